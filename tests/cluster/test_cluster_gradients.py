"""Gradients in float64 against differences, also through the blocks that are computed again; dtypes and autocast."""

import pytest
import torch
from cluster_cases import tokens
from random_tokens import one as draw

from cumulant.cluster import Blocks, KMeans, cluster_attention, fields

FORMS = {
    "blocks, gauss": {"clusters": 3, "closure": "gauss"},
    "blocks, tanh": {"clusters": 3},
    "blocks, langevin, near": {"clusters": 4, "closure": "langevin", "near": 1},
    "neighbours": {"clusters": 4, "near": "neighbours"},
    "grid and prefix": {"clusters": (2, 2), "grid": (3, 3), "prefix": 1, "near": 1, "rank": "error"},
    "k-means, near": {"clusters": KMeans(3), "near": 1, "response": 1},
    "neighbours, one responds": {"clusters": 5, "near": "neighbours", "response": 1},
    "means alone": {"clusters": 3, "response": 0, "closure": "langevin"},
    "one response for all": {"clusters": 3, "near": 1, "response": "pooled", "closure": "gauss"},
    "rows together, two respond": {"clusters": 4, "near": 1, "near_rows": 3, "rank": "mean", "response": 2},
    "mean queries": {"clusters": 3, "near": 1, "queries": "mean", "rank": "error"},
    "full variance": {"clusters": 3, "variance": "full", "near": 1},
    "rows together": {"clusters": 4, "near": 1, "near_rows": 3},
    "all near": {"clusters": 3, "near": 3},
    "causal": {"clusters": Blocks(3, recent=1), "is_causal": True},
    "causal, near": {"clusters": Blocks(2), "near": 1, "is_causal": True},
    "causal, one responds": {"clusters": Blocks(2, keep=1), "response": 1, "closure": "gauss", "is_causal": True},
    "causal, merged": {"clusters": Blocks(2, keep=0), "is_causal": True},
}
forms = pytest.mark.parametrize("form", FORMS)


@forms
def test_gradients_agree_with_differences(form):
    inputs = tuple(x.requires_grad_() for x in tokens(10, 10, 2, 1, 3, 2, batch=1))

    def function(*x):
        # k-means looks at keys and queries; a difference must not move its borders, so it is done once.
        options = FORMS[form]
        if isinstance(options["clusters"], KMeans):
            options = options | {"clusters": torch.tensor([0, 0, 1, 1, 1, 1, 2, 2, 1, 0])}
        return cluster_attention(*x, enable_gqa=True, **options)

    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)


def test_gradients_with_weights_and_a_mask_agree_with_differences():
    inputs = tuple(x.requires_grad_() for x in tokens(6, 8, 1, 1, 3, 2))
    mask = torch.tensor([[1.0, 0, 2, 1, 0.5, 0, 1, 3], [1, 1, 1, 1, 1, 1, 1, 0]], dtype=torch.float64)
    for near in (0, 1):
        assert torch.autograd.gradcheck(
            lambda *x, near=near: cluster_attention(*x, clusters=3, near=near, key_mask=mask), inputs, fast_mode=True
        )


def test_second_derivatives_agree_with_differences():
    inputs = tuple(x.requires_grad_() for x in tokens(3, 5, 1, 1, 2, 2, batch=1))
    assert torch.autograd.gradgradcheck(lambda *x: cluster_attention(*x, clusters=2), inputs, fast_mode=True)


@forms
def test_small_blocks_of_rows_give_the_same_output_and_gradients(form, monkeypatch):
    results = []
    for room in (1 << 22, 1):
        monkeypatch.setattr(fields, "room", lambda q, room=room: room)
        inputs = [x.requires_grad_() for x in tokens(10, 10, 2, 1)]
        out = cluster_attention(*inputs, enable_gqa=True, **FORMS[form])
        results.append((out, *torch.autograd.grad(out.square().sum(), inputs)))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize(("gibibytes", "numbers"), [(0, 1 << 22), (8, 1 << 24), (24, 3 << 24), (139, 1 << 28)])
def test_blocks_of_rows_hold_a_128th_of_a_gpus_memory_and_no_more_than_one_gibibyte(gibibytes, numbers, monkeypatch):
    monkeypatch.setattr(fields, "_memory", lambda device: gibibytes << 30)
    assert fields.room(torch.ones(2, requires_grad=True)) == numbers


def test_tokens_that_are_all_equal_have_finite_gradients():
    inputs = [torch.ones(1, 1, 6, 3, dtype=torch.float64).requires_grad_() for _ in range(3)]
    for closure in ("gauss", "tanh", "langevin"):
        out = cluster_attention(*inputs, clusters=2, closure=closure)
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize("closure", ["tanh", "langevin"])
def test_huge_logits_stay_inside_the_values(closure):
    query, key, value = tokens(dtype=torch.float32)
    out = cluster_attention(1e3 * query, 1e3 * key, value, clusters=4, closure=closure, near=1)
    assert out.isfinite().all()
    assert out.abs().max() < 10 * value.abs().max()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_narrow_types_are_computed_in_float32(dtype):
    inputs = tuple(x.to(dtype) for x in tokens())
    out = cluster_attention(*inputs, clusters=4, near=1)
    exact = cluster_attention(*(x.double() for x in inputs), clusters=4, near=1)
    assert out.dtype == dtype
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)


def test_leading_dimensions_are_broadcast():
    query, key, value = draw(3, 1, 2, 5, 4), draw(1, 2, 2, 9, 4), draw(1, 2, 2, 9, 3)
    out = cluster_attention(query, key, value, clusters=3, near=1)
    assert out.shape == (3, 2, 2, 5, 3)
    torch.testing.assert_close(out[1, 1], cluster_attention(query[1, 0], key[0, 1], value[0, 1], clusters=3, near=1))
