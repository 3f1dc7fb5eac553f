"""V1, V2 and V7 of the study, and the measures of sinks and spread, on maps whose answer is known."""

import math

import pytest
import torch
from torch import Tensor

import cumulant
from cumulant import explain
from cumulant.explain.metrics import gini, shares

TOKENS = explain.TokenLayout(1, (4, 4))


def uniform() -> Tensor:
    return torch.full((1, 1, 17, 17), 1 / 17)


def only_patches(map_of_patches: Tensor) -> Tensor:
    maps = torch.zeros(1, 1, 17, 17)
    maps[..., 0, 0] = 1
    maps[..., 1:, 1:] = map_of_patches
    return maps


@pytest.mark.parametrize("sign", ["absolute", "positive", "signed"])
def test_v1_the_identity_has_distance_0_and_self_share_1(sign: str) -> None:
    maps = torch.eye(17).expand(1, 1, 17, 17)
    assert float(explain.mean_distance(maps, TOKENS, sign=sign)) == 0
    assert float(shares(maps, TOKENS)["self_share"]) == 1
    assert float(shares(maps, TOKENS)["class_share"]) == 0


@pytest.mark.parametrize("metric", ["hop", "euclidean"])
def test_v1_a_uniform_map_gives_the_reference_of_the_grid(metric: str) -> None:
    pairs = [
        max(abs(a - c), abs(b - d)) if metric == "hop" else math.hypot(a - c, b - d)
        for a in range(4) for b in range(4) for c in range(4) for d in range(4)
    ]  # fmt: skip
    reference = sum(pairs) / len(pairs)
    assert explain.uniform_distance((4, 4), metric) == pytest.approx(reference)
    assert float(explain.mean_distance(uniform(), TOKENS, metric=metric)) == pytest.approx(reference)
    profile = explain.ring_profile(uniform(), TOKENS)
    torch.testing.assert_close(profile.per_neighbour, torch.full((1, 1, 4), 1 / 17))
    assert profile.uniform == pytest.approx(1 / 17)
    assert float(shares(uniform(), TOKENS)["class_share"]) == pytest.approx(1 / 17)


@pytest.mark.parametrize("k", [0, 1, 2])
def test_v2_a_map_uniform_over_one_ring_has_its_mass_there_alone(k: int) -> None:
    ring = (explain.patch_distances((4, 4)) == k).float()
    maps = only_patches(ring / ring.sum(-1, keepdim=True).clamp(min=1))
    mass = explain.ring_profile(maps, TOKENS).mass[0, 0]
    assert float(mass[k]) == pytest.approx(float((ring.sum(-1) > 0).float().mean()))
    assert float(mass.sum()) == pytest.approx(float(mass[k]))
    assert float(explain.mean_distance(maps, TOKENS)) == pytest.approx(k)


@pytest.mark.parametrize("turn", ["flip rows", "flip columns", "quarter turn"])
def test_v7_profiles_do_not_change_when_the_grid_is_flipped_or_turned(turn: str) -> None:
    place = torch.arange(16).reshape(4, 4)
    moved = {"flip rows": place.flip(0), "flip columns": place.flip(1), "quarter turn": place.rot90()}[turn]
    order = torch.cat([torch.zeros(1, dtype=torch.long), moved.flatten() + 1])
    maps = torch.randn(2, 3, 17, 17)
    turned = maps[..., order, :][..., order]
    before, after = (explain.ring_profile(m, TOKENS) for m in (maps, turned))
    torch.testing.assert_close(before.per_neighbour, after.per_neighbour)
    torch.testing.assert_close(before.mass, after.mass)
    torch.testing.assert_close(
        explain.mean_distance(maps, TOKENS), explain.mean_distance(turned, TOKENS), atol=1e-5, rtol=1e-5
    )


def test_the_distance_of_some_queries_is_that_of_their_rows() -> None:
    maps = torch.rand(1, 2, 17, 17)
    rows = [3, 0, 9]
    some = explain.mean_distance(maps[:, :, rows], TOKENS, rows)
    only = maps.clone()
    only[:, :, [i for i in range(17) if i not in rows]] = 0
    torch.testing.assert_close(some, explain.mean_distance(only, TOKENS))


def test_negative_far_weights_shorten_the_signed_distance_alone() -> None:
    near = torch.eye(16) * 1.5
    near[explain.patch_distances((4, 4)) == 3] -= 0.01
    maps = only_patches(near)
    assert float(explain.mean_distance(maps, TOKENS, sign="signed")) < 0
    assert float(explain.mean_distance(maps, TOKENS)) > 0
    assert float(explain.mean_distance(maps, TOKENS, sign="positive")) == 0


def test_distances_of_clips_split_into_space_and_time() -> None:
    grid = (3, 2, 2)
    both, space, time = (explain.patch_distances(grid, axes=axes) for axes in ("all", "space", "time"))
    assert (int(time.max()), int(space.max())) == (2, 1)
    assert torch.equal(both, torch.maximum(space, time))


def test_spread_is_1_token_for_one_and_all_for_a_uniform_row() -> None:
    one, all_alike = torch.eye(17)[0], torch.full((17,), -1 / 17)
    assert float(explain.tokens_used(one)) == 1
    assert float(explain.tokens_used(all_alike)) == pytest.approx(17)
    assert float(explain.entropy(one)) == 0
    assert float(explain.entropy(all_alike)) == pytest.approx(math.log(17))


def test_received_attention_of_signed_maps_takes_sizes() -> None:
    maps = torch.tensor([[[[1.5, -0.5], [0.5, 0.5]]]])
    torch.testing.assert_close(explain.received(maps), torch.tensor([[[0.625, 0.375]]]))


def test_gini_is_0_for_equal_shares_and_near_1_for_one_receiver() -> None:
    assert float(gini(torch.full((10,), 0.1))) == pytest.approx(0, abs=1e-6)
    assert float(gini(torch.eye(10)[3])) == pytest.approx(0.9)


def planted(row: Tensor) -> explain.Captured:
    captured = explain.Captured([0], None)
    captured._maps[0] = [row.expand(1, 2, 17, 17)]
    captured._tokens = TOKENS
    return captured


def test_a_uniform_map_has_no_sink_and_a_key_that_all_look_at_is_one() -> None:
    assert explain.sink_rate(planted(torch.full((17,), 1 / 17)))["patches"] == 0
    assert explain.sink_rate(planted(torch.eye(17)[5])) == {
        "patches": 1.0, "class token": 0.0, "relative 10": 1.0, "relative 50": 0.0,
    }  # fmt: skip
    assert explain.sink_rate(planted(torch.eye(17)[0]))["class token"] == 1.0


@pytest.mark.parametrize("order", [2, 3])
def test_v5_implicit_rows_sum_to_1_and_reproduce_the_operator(order: int) -> None:
    query, key, value = (torch.randn(2, 3, 50, 16, dtype=torch.float64) for _ in range(3))
    A = cumulant.scores(query, key, order=order)
    assert float((A.sum(-1) - 1).abs().max()) < 1e-6
    torch.testing.assert_close(A @ value, cumulant.attention(query, key, value, order=order), atol=1e-5, rtol=0)


def test_summary_has_a_number_for_every_layer_and_head() -> None:
    model = cumulant.create_model("vit_nano_patch2_8", attention="cumulant2", num_classes=10, init_std=0.2).eval()
    with explain.capture(model, torch.randn(2, 1, 8, 8)) as captured:
        pass
    found = explain.summary(captured)
    assert {value.shape for value in found.values()} == {(4, 4)}
    assert all(bool(value.isfinite().all()) for value in found.values())
    assert bool((found["negative_mass"] >= 0).all())


def test_rows_of_the_class_token_alone_have_no_distance() -> None:
    with pytest.raises(ValueError, match=r"no row of a patch is among queries=\[0\]"):
        explain.mean_distance(uniform()[:, :, :1], TOKENS, [0])
