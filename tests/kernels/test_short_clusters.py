"""Triton kernels of short clusters against plain torch in float64, in Triton's interpreter or on a GPU.

Every test runs with fresh memory full of NaN, so that nothing is read before it is written.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cluster_checks import FLOAT32, compare, compare_full_size, compare_half, results
from kernel_checks import DEVICE, NAMES, error, poisoned_memory, tokens  # noqa: F401
from torch import Tensor

from cumulant.cluster import Blocks, cluster_attention, short
from cumulant.kernels.cluster import host as triton_cluster
from cumulant.kernels.short import host as triton_short


@pytest.fixture(autouse=True)
def no_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: Any, **options: Any) -> None:
        raise AssertionError("the kernels of any clusters were taken")

    monkeypatch.setattr(triton_cluster, "attention", refuse)


@pytest.mark.parametrize("closure", ["gauss", "tanh", "langevin"])
@pytest.mark.parametrize("variance", ["diagonal", "full"])
@pytest.mark.parametrize(("Lq", "Lk", "prefix"), [(33, 41, 1), (70, 135, 0)], ids=["one tile", "several tiles"])
def test_outputs_and_gradients_equal_plain_torch(closure: str, variance: str, Lq: int, Lk: int, prefix: int) -> None:
    q, k, v = tokens(2, 1, Lq, 24), tokens(2, 1, Lk, 24, mean=2, seed=1), tokens(2, 1, Lk, 40, mean=-1, seed=2)
    compare(q, k, v, clusters=Blocks(5), prefix=prefix, closure=closure, variance=variance)


@pytest.mark.parametrize(
    ("L", "options"),
    [
        (65, dict(clusters=4, grid=(8, 8), prefix=1)),
        (36, dict(clusters=(2, 3), grid=(5, 7), prefix=1)),
        (48, dict(clusters=(2, 2, 2), grid=(2, 4, 6))),
        (131, dict(clusters=(5, 6), grid=(8, 16), prefix=3)),
    ],
    ids=["square", "does not divide", "video", "several tiles"],
)
def test_blocks_of_a_grid(L: int, options: dict[str, Any]) -> None:
    q, k, v = (tokens(1, 2, L, 32, seed=i) for i in range(3))
    compare(q, k, v, **options)


def test_poisoned_memory_may_be_a_leaf() -> None:
    """torch.utils.checkpoint asks for such, in older versions of torch; large inputs of plain torch go through it."""
    assert torch.empty(2, requires_grad=True).isnan().all()


@pytest.mark.parametrize("prefix", [2, 32])
def test_many_prefix_tokens(prefix: int) -> None:
    q, k, v = tokens(1, 1, 20, 16), tokens(1, 2, 60, 16, mean=1)[:, :1], tokens(1, 1, 60, 16, seed=2)
    compare(q, k, v, clusters=8, prefix=prefix)


@pytest.mark.parametrize(("clusters", "L"), [(21, 21), (30, 60), (1, 33), (5, 151)])
def test_single_tokens_pairs_and_clusters_as_long_as_a_tile(clusters: int, L: int) -> None:
    q, k, v = (tokens(1, 1, L, 64, seed=i) for i in range(3))
    compare(q, k, v, clusters=clusters, prefix=L % 2)


def test_every_token_its_own_cluster_is_softmax() -> None:
    q, k, v = (tokens(1, 2, 40, 16, seed=i) for i in range(3))
    out = cluster_attention(q, k, v, clusters=40, backend="triton")
    exact = torch.nn.functional.scaled_dot_product_attention(q.double(), k.double(), v.double())
    assert error(out, exact) < FLOAT32


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("side", [8, 10], ids=["one tile", "several tiles"])
@pytest.mark.parametrize("mean", [0.5, 100.0], ids=["keys near zero", "keys far from zero"])
def test_half_precision_is_at_most_twice_as_far_off_as_plain_torch(
    dtype: torch.dtype, side: int, mean: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(short, "multiplied_in", lambda dtype, device: None)  # the better of the two plain forms
    L = side * side + 1
    q, k, v = (tokens(1, 2, L, 32, mean=m, dtype=dtype, seed=i) for i, m in enumerate((0, mean, 0.5)))
    options: dict[str, Any] = dict(clusters=(4, 2), grid=(side, side), prefix=1)
    compare_half(q, k, v, **options)


@pytest.mark.parametrize("L", [33, 70], ids=["one tile", "several tiles"])
def test_heads_wider_than_64(L: int) -> None:
    q, k = (tokens(1, 1, L, 24, dtype=torch.bfloat16, seed=i) for i in range(2))
    compare(q, k, tokens(1, 1, L, 72, dtype=torch.bfloat16, seed=2), 4e-3, clusters=Blocks(8), prefix=1)


def test_logits_that_overflow_an_exponential_do_no_harm() -> None:
    q, k, v = tokens(1, 1, 40, 16) * 40, tokens(1, 1, 65, 16) * 5, tokens(1, 1, 65, 16)
    compare(q, k, v, 5e-4, clusters=8, prefix=1)
    out = cluster_attention(q, k, v, clusters=8, prefix=1, closure="gauss", backend="triton")
    assert out.isfinite().all()


def test_views_of_a_projection_are_read_in_place() -> None:
    B, L, H, D = 2, 41, 2, 24
    qkv = tokens(B, L, 3, H, D, mean=1).requires_grad_()
    exact = qkv.detach().double().requires_grad_()
    outs = []
    for x, backend in ((qkv, "triton"), (exact, "reference")):
        q, k, v = (part.transpose(1, 2) for part in x.unbind(2))
        out = cluster_attention(q, k, v, clusters=4, prefix=1, backend=backend)
        out.square().sum().backward()
        outs.append(out)
    assert outs[0].transpose(1, 2).is_contiguous()
    assert error(outs[0], outs[1]) < FLOAT32
    assert error(qkv.grad, exact.grad) < FLOAT32


def test_columns_that_are_not_contiguous_and_leading_dimensions_are_taken() -> None:
    q, k, v = (tokens(2, 3, 1, 16, 30, seed=i).mT for i in range(3))
    compare(q, k, v, clusters=6)


def test_two_runs_are_bitwise_equal() -> None:
    q, k, v = (tokens(1, 1, 101, 16, dtype=torch.bfloat16, seed=i) for i in range(3))
    runs = [results(q, k, v, "triton", q.dtype, clusters=25, prefix=1) for _ in range(2)]
    for x, y in zip(*runs, strict=True):
        assert torch.equal(x, y)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"clusters": 6, "near": 1}, "near=0, got 1"),
        ({"clusters": 6, "response": 2, "variance": "full"}, "all clusters respond, got response=2"),
    ],
    ids=["near", "few respond"],
)
def test_what_the_kernels_cannot_take_is_refused_by_name(options: dict[str, Any], reason: str) -> None:
    q = tokens(1, 2, 130, 16)
    with pytest.raises(ValueError, match=f'backend="triton" cannot be used: .*{reason}'):
        cluster_attention(q, q, q, backend="triton", **options)
    cluster_attention(q, q, q, **options)  # "auto" takes plain torch


def test_the_custom_ops_keep_their_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # opcheck compares memory bit by bit, and NaN differs from itself
    q, k, v = (tokens(1, 1, 69, 16, dtype=torch.bfloat16, seed=i).requires_grad_() for i in range(3))
    numbers = ([*range(1, 69)], 4, 0.25, 1, "tanh", False)
    names = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = triton_short.attention
    torch.library.opcheck(operator.forward, (q, k, v, *numbers, True), test_utils=names)
    with torch.no_grad():
        out, *state = operator.forward(q, k, v, *numbers, True)
    tensors = (x.detach() for x in (out, q, k, v, out, *state))
    torch.library.opcheck(operator.backward, (*tensors, *numbers), test_utils=names)


@pytest.mark.parametrize("options", [dict(clusters=(2, 2), grid=(6, 6), prefix=1), dict(clusters=Blocks(5))])
def test_compiled_code_gives_the_same(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    torch.compiler.reset()

    def function(*x: Tensor) -> Tensor:
        return cluster_attention(*x, backend="triton", **options)

    found = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        inputs = [tokens(1, 1, 37, 32, seed=i).requires_grad_() for i in range(3)]
        out = call(*inputs)
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


def test_compiled_code_takes_batches_of_any_size() -> None:
    torch.compiler.reset()

    def function(*x: Tensor) -> Tensor:
        return cluster_attention(*x, clusters=4, prefix=1, backend="triton")

    compiled = torch.compile(function, fullgraph=True, backend="eager")
    for B in (2, 3, 5):  # the second makes torch.compile leave the number open
        inputs = [tokens(B, 1, 21, 32, seed=i) for i in range(3)]
        assert torch.equal(compiled(*inputs), function(*inputs))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("B", "H", "Lq", "Lk", "D", "E", "options"),
    [
        (64, 3, 65, 65, 64, 64, {"clusters": 4, "grid": (8, 8), "prefix": 1}),
        (32, 3, 257, 257, 64, 64, {"clusters": 16, "grid": (16, 16), "prefix": 1}),
        (8, 3, 197, 197, 64, 64, {"clusters": 16, "grid": (14, 14), "prefix": 1, "closure": "langevin"}),
        (8, 2, 300, 500, 32, 48, {"clusters": Blocks(7), "variance": "full"}),
        (4, 2, 130, 129, 128, 80, {"clusters": 4, "prefix": 5}),
    ],
    ids=["cluster4", "cluster16", "ragged", "cross", "wide"],
)
def test_full_size(
    B: int, H: int, Lq: int, Lk: int, D: int, E: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    compare_full_size(B, H, Lq, Lk, D, E, dtype, options)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("side", [8, 16])
def test_auto_takes_the_kernels_for_images(side: int, monkeypatch: pytest.MonkeyPatch) -> None:
    seen, run = [], triton_short.attention
    monkeypatch.setattr(triton_short, "attention", lambda *a, **k: seen.append(1) or run(*a, **k))
    q, k, v = (tokens(4, 3, side * side + 1, 64, dtype=torch.bfloat16, seed=i) for i in range(3))
    cluster_attention(q, k, v, clusters=side * side // 16, grid=(side, side), prefix=1)
    assert seen
