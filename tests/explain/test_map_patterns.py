"""V6 of the study: planted families of maps are told apart; the autoencoder is better than PCA of its size."""

import pytest
import torch
from torch import Tensor

import cumulant
from cumulant import explain
from cumulant.explain.patterns import adjusted_rand, describe, find_patterns, resized


def planted(each: int = 200, noise: float = 0.1) -> tuple[Tensor, Tensor]:
    """Diagonal, rows, columns, stripes (one or two keys, another each time) and uniform maps of a 4 x 4 grid."""
    row, column = torch.arange(16) // 4, torch.arange(16) % 4
    fixed = [torch.eye(16), (row[:, None] == row).float(), (column[:, None] == column).float(), torch.ones(16, 16)]
    maps = []
    for family in fixed:
        maps += [family] * each
    for _ in range(each):
        stripes = torch.zeros(16, 16)
        stripes[:, torch.randint(16, (2,))] = 1
        maps.append(stripes)
    stacked = torch.stack(maps)
    stacked = stacked / stacked.sum(-1, keepdim=True)
    stacked = stacked + noise * stacked.amax((-1, -2), keepdim=True) * torch.randn_like(stacked)
    return resized(stacked), torch.arange(5).repeat_interleave(each)


@pytest.mark.parametrize("method", ["pca", "autoencoder"])
def test_v6_planted_families_are_separated(method: str) -> None:
    maps, families = planted()
    found = find_patterns(maps, clusters=5, code=8, method=method, steps=200)
    assert adjusted_rand(found.labels, families) > 0.9
    assert sorted(describe(centre) for centre in found.centres) == ["column", "few keys", "row", "self", "uniform"]


def test_the_autoencoder_beats_pca_of_the_same_size_on_maps_it_has_not_seen() -> None:
    maps, _ = planted(100)
    found = find_patterns(maps, clusters=5, code=8, steps=400)
    assert found.error < found.pca_error


def test_the_same_seed_finds_the_same_patterns() -> None:
    maps, _ = planted(20)
    first, second = (find_patterns(maps, clusters=5, code=4, steps=20, seed=3) for _ in range(2))
    assert torch.equal(first.labels, second.labels)
    assert torch.equal(first.codes, second.codes)


def test_a_head_that_does_the_same_to_every_image_has_entropy_0() -> None:
    maps, families = planted(10)
    owner = torch.stack([torch.arange(50) % 10, torch.zeros(50, dtype=torch.long), families.clamp(max=1)], -1)
    found = find_patterns(maps, owner, clusters=5, code=4, method="pca")
    assert found.histograms().shape == (1, 2, 5)
    assert float(found.entropies()[0, 0]) == 0
    assert float(found.entropies()[0, 1]) > 0.5


def test_rand_index_knows_equal_partitions_and_chance() -> None:
    a = torch.randint(4, (500,))
    assert adjusted_rand(a, (a + 1) % 4) == pytest.approx(1)
    assert abs(adjusted_rand(a, torch.randint(4, (500,)))) < 0.05
    metrics = pytest.importorskip("sklearn.metrics")
    b = torch.randint(3, (500,))
    assert adjusted_rand(a, b) == pytest.approx(metrics.adjusted_rand_score(a, b))


def test_maps_of_a_model_come_with_their_image_layer_and_head() -> None:
    model = cumulant.create_model("vit_nano_patch2_8", attention="cumulant2", num_classes=10, init_std=0.2).eval()
    with explain.capture(model, torch.randn(3, 1, 8, 8)) as captured:
        pass
    maps, owner = explain.flat_maps(captured)
    assert maps.shape == (3 * 4 * 4, 16, 16)
    at = int(((owner == torch.tensor([2, 1, 3])).all(-1)).nonzero())
    torch.testing.assert_close(maps[at], resized(captured.maps(1)[2, 3:4, 1:, 1:])[0])


@pytest.mark.parametrize(("grid", "kind"), [((8, 8), "row"), ((8, 8), "column"), ((8, 12), "self")])
def test_kinds_of_maps_keep_their_name_on_another_grid(grid: tuple[int, int], kind: str) -> None:
    places = torch.cartesian_prod(torch.arange(grid[0]), torch.arange(grid[1]))
    same = places[:, None] == places[None]
    maps = {"row": same[..., 0], "column": same[..., 1], "self": same.all(-1)}[kind].float()
    assert describe(resized(maps[None], grid=grid)[0]) == kind


def test_more_clusters_than_maps_are_refused() -> None:
    with pytest.raises(ValueError, match="clusters must be between 1 and the number of maps, 3, got 4"):
        find_patterns(torch.rand(3, 16, 16), clusters=4)


def test_there_are_no_more_clusters_than_maps_that_differ() -> None:
    alike = torch.cat((torch.eye(16).expand(10, -1, -1), torch.ones(10, 16, 16)))
    found = explain.find_patterns(alike, clusters=4, steps=5)
    assert found.centres.shape == (2, 16, 16)
    assert found.centres.isfinite().all()
    assert found.histograms().sum(-1).eq(1).all()
    uniform = explain.find_patterns(torch.ones(6, 16, 16), clusters=3, method="pca")
    assert (len(uniform.centres), uniform.error) == (1, 0.0)


def test_a_few_maps_have_patterns_too() -> None:
    found = explain.find_patterns(torch.rand(3, 16, 16), clusters=3, steps=5)
    assert sorted(found.labels.tolist()) == [0, 1, 2]
    assert found.plane.shape == (3, 2)


@pytest.mark.parametrize("maps", [torch.ones(1, 16, 16), torch.full((8, 16, 16), torch.nan)], ids=["one", "nan"])
def test_maps_without_a_pattern_are_refused(maps: Tensor) -> None:
    with pytest.raises(ValueError, match="2 or more without NaN"):
        explain.find_patterns(maps, clusters=1)
