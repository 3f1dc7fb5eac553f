"""What models tell the registered mechanisms: where the patches of a ViT and the tubelets of a ViViT are."""

import pytest
import torch
from cluster_cases import tokens

from cumulant import zoo
from cumulant.cluster import cluster_attention
from cumulant.models import create_model
from cumulant.zoo import cluster


@pytest.fixture
def calls(monkeypatch):
    """Grid, prefix and number of tokens of each call of a mechanism."""
    seen = []

    def watched(query, key, value, **options):
        seen.append((options.get("grid"), options.get("prefix"), key.shape[-2]))
        return cluster_attention(query, key, value, **options)

    monkeypatch.setattr(cluster, "cluster_attention", watched)
    return seen


@pytest.mark.parametrize("name", ["cluster4", "cluster16", "cluster64"])
def test_a_vit_says_where_its_patches_are(name, calls):
    model = create_model("vit_nano_patch2_8", num_classes=3, attention=name, depth=2)
    assert model(torch.randn(2, 1, 8, 8)).shape == (2, 3)
    assert calls == [((4, 4), 1, 17)] * 2


@pytest.mark.parametrize(
    ("variant", "expected"),
    [
        (1, [((4, 4, 4), 1, 65)]),
        (2, [((4, 4), 1, 17), ((4, 1), 1, 5)]),  # patches of a frame, then frames
        (3, [((4, 4), 0, 16), ((4, 1), 0, 4)]),
    ],
)
def test_a_vivit_says_where_its_tubelets_are(variant, expected, calls):
    model = create_model("vivit_nano_patch4x2_16", variant=variant, num_classes=3, attention="cluster4", depth=1)
    model(torch.randn(1, 1, 8, 16, 16))
    assert calls == expected


@pytest.mark.parametrize(("count", "blocks"), [(4, (2, 2)), (16, (4, 4)), (64, (4, 8))])
def test_a_mechanism_of_a_grid_is_cluster_attention_with_square_blocks(count, blocks):
    inputs = tokens(65, 65)
    out = zoo.get(f"cluster{count}")(*inputs, grid=(8, 8), prefix=1)
    torch.testing.assert_close(out, cluster_attention(*inputs, clusters=blocks, grid=(8, 8), prefix=1))


@pytest.mark.parametrize(
    "options",
    [
        {"variance": "full"},
        {"response": "pooled"},
        {"response": 2, "near": 1},
        {"near": 1, "near_rows": 4, "rank": "mean"},
    ],
)
def test_a_mechanism_hands_its_options_on(options):
    query, key, value = tokens(16, 16)
    out = zoo.get("cluster4")(query, key, value, grid=(4, 4), **options)
    expected = cluster_attention(query, key, value, clusters=4, grid=(4, 4), least=2, **options)
    assert torch.equal(out, expected)
    assert not torch.allclose(out, zoo.get("cluster4")(query, key, value, grid=(4, 4)))
