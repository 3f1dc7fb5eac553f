"""Kernels of near clusters whose sizes only the device knows, those of k-means and given ones: against plain torch in
float64, outputs and gradients, in Triton's interpreter or on a GPU. Memory is full of NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cluster_checks import compare, compare_half, results
from kernel_checks import DEVICE, poisoned_memory, tokens  # noqa: F401
from torch import Tensor

from cumulant.cluster import KMeans, alike, attention, cluster_attention, kmeans_assignment
from cumulant.cluster.basis import sampled
from cumulant.kernels.cluster.plan import Shape, kept_plan
from cumulant.kernels.kmeans import attend
from cumulant.kernels.kmeans import host as kmeans
from cumulant.kernels.tree import host

FORM: dict[str, Any] = {"near": 2, "near_rows": 32, "rank": "mass", "response": "pooled"}


@pytest.fixture(autouse=True)
def one_order_of_the_queries(monkeypatch: pytest.MonkeyPatch) -> None:
    """That of float64, whatever the precision: tiles of other queries have another result."""
    found = alike.order_by_content

    def order(query: Tensor, key: Tensor, *more: Any) -> Tensor:
        return found(
            query.double().cpu(), key.double().cpu(), *(x.cpu() if isinstance(x, Tensor) else x for x in more)
        ).to(query.device)

    monkeypatch.setattr(attention, "order_by_content", order)


def by_kernels(query: Tensor, key: Tensor, mask: Tensor | None, rows: int, prefix: int = 0) -> Tensor:
    """The order that kernels of k-means find, where it is looked for by plain torch too."""
    query, key = query.contiguous(), key.contiguous()
    seen = host.columns(query, key, sampled(alike.SEARCH.sample, key))
    return host.order(seen, alike.runs_of(query.shape[2], rows), alike.SEARCH.iterations, None)


def uneven(B: int, Hk: int, L: int, K: int, seed: int = 1) -> Tensor:
    """Clusters of very different sizes: half of the tokens in the first, none in the next two."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(2, K, (B, Hk, L), generator=generator)
    return torch.where((ids == 2) | (torch.rand(B, Hk, L, generator=generator) < 0.4), 0, ids).to(DEVICE)


def check(
    heads: int = 1,
    key_heads: int = 1,
    *,
    batch: int = 1,
    Lq: int = 75,
    Lk: int = 61,
    D: int = 24,
    E: int = 16,
    **options: Any,
) -> None:
    q = tokens(batch, heads, Lq, D)
    k, v = tokens(batch, key_heads, Lk, D, mean=1, seed=1), tokens(batch, key_heads, Lk, E, mean=-1, seed=2)
    compare(q, k, v, enable_gqa=heads != key_heads, **FORM | options)


@pytest.mark.parametrize(
    "form",
    [
        {},
        {"rank": "mean"},
        {"rank": "error", "response": None, "near": 1},
        {"response": 2, "closure": "langevin"},
        {"response": 0, "near": 3, "closure": "gauss"},
    ],
    ids=["auto", "mean", "error", "listed", "means"],
)
def test_outputs_and_gradients_equal_plain_torch(form: dict[str, Any]) -> None:
    check(2, 1, clusters=uneven(1, 1, 61, 7), **form)


@pytest.mark.parametrize(
    ("heads", "key_heads", "more"),
    [(2, 2, {}), (2, 1, {"Lq": 130, "rank": "mean"}), (1, 1, {"near": 0}), (1, 1, {"Lq": 20})],
    ids=["many tiles", "grouped", "far only", "one tile"],
)
def test_clusters_found_by_k_means(heads: int, key_heads: int, more: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    def order(query: Tensor, key: Tensor, *how: Any) -> Tensor:
        return by_kernels(query.float(), key.float(), *how)

    monkeypatch.setattr(attention, "order_by_content", order)
    check(heads, key_heads, batch=2, clusters=KMeans(6, 2), **more)


@pytest.mark.parametrize("options", [{"metric": "diagonal"}, {"start": "random"}, {"sample": 2}], ids=str)
def test_other_ways_to_find_them(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    if "sample" in options:
        monkeypatch.setattr(attention, "order_by_content", lambda q, k, *how: by_kernels(q.float(), k.float(), *how))
    check(2, 1, clusters=KMeans(6, 2, **options))


def test_the_operator_can_be_compiled() -> None:
    q, k, v = (tokens(1, 2, 80, 16, seed=i).requires_grad_() for i in range(3))
    numbers = 6, 2, 1, True, 2, 2, 0.25, 32, 2, -2, "tanh", "mass"
    given = q, k, v, sampled(64, k), *numbers
    torch.library.opcheck(attend.attention.forward, (*given, True), test_utils=("test_schema", "test_faketensor"))


def compiled(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> None:
    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cluster_attention(q, k, v, **options)

    whole = torch.compile(call, fullgraph=True, backend="aot_eager")
    leaves = [x.requires_grad_() for x in (q, k, v)]
    found, wanted = ([out, *torch.autograd.grad(out.sum(), leaves)] for out in (whole(q, k, v), call(q, k, v)))
    for x, y in zip(found, wanted, strict=True):
        assert torch.equal(x, y)


def test_a_compiled_call_is_one_graph() -> None:
    compiled(*(tokens(1, 2, 80, 16, seed=i) for i in range(3)), clusters=KMeans(6), backend="triton", **FORM)


def test_more_near_clusters_than_registers_hold() -> None:
    check(Lq=40, clusters=uneven(1, 1, 61, 20), near=10)


@pytest.mark.parametrize("near", [2, 9])
def test_prefix_tokens_and_keys_that_take_no_part(near: int) -> None:
    there = (torch.rand(2, 64, generator=torch.Generator().manual_seed(1)) < 0.6).to(DEVICE)
    check(2, 1, batch=2, Lq=40, Lk=64, prefix=3, key_mask=there, clusters=uneven(2, 1, 61, 12), near=near)


def test_keys_that_are_read_often_are_put_in_order_first() -> None:
    call = Shape(1, 1, 1, 620, 90, 20, 28, 1, True, 4, 0, False, 32, 2, -2, "tanh", "mass", False, 0, False)
    assert kept_plan(call, torch.float32).copies
    check(Lq=620, Lk=90, clusters=uneven(1, 1, 90, 4))


def half(B: int, H: int, Lq: int, Lk: int, D: int, E: int, dtype: torch.dtype, clusters: int, **options: Any) -> None:
    q = tokens(B, H, Lq, D, dtype=dtype)
    k, v = tokens(B, H, Lk, D, mean=1, dtype=dtype, seed=1), tokens(B, H, Lk, E, mean=0.5, dtype=dtype, seed=2)
    order = attention.order_by_content(q, k, None, options["near_rows"])
    compare_half(q, k, v, order, clusters=uneven(B, H, Lk, clusters), **options)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("width", "near"), [(32, 2), (72, 2), (40, 9)])
def test_half_precision_is_at_most_twice_as_far_off_as_plain_torch(dtype: torch.dtype, width: int, near: int) -> None:
    half(1, 2, 96, 150, width, width, dtype, 12, **FORM | {"near": near, "rank": "mean"})


def test_views_of_a_projection() -> None:
    qkv = tokens(1, 70, 3, 2, 24, mean=1)
    q, k, v = (x.transpose(1, 2) for x in qkv.unbind(2))
    compare(q, k, v, clusters=uneven(1, 2, 70, 6), **FORM)


def test_k_means_and_its_assignment_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(attention, "order_by_content", by_kernels)
    q, k, v = (tokens(1, 2, 80, 16, seed=i) for i in range(3))
    found = cluster_attention(q, k, v, clusters=KMeans(6), backend="triton", **FORM)
    given = cluster_attention(q, k, v, clusters=kmeans_assignment(q, k, KMeans(6)), backend="triton", **FORM)
    assert torch.equal(found, given)


def test_two_runs_are_bitwise_equal() -> None:
    q, k, v = (tokens(1, 1, 70, 16, dtype=torch.bfloat16, seed=i) for i in range(3))
    for x, y in zip(*(results(q, k, v, "triton", q.dtype, clusters=KMeans(5), **FORM) for _ in range(2)), strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("B", "H", "Lq", "Lk", "D", "E", "options"),
    [
        (2, 3, 4096, 4096, 64, 64, {"near": 2, "near_rows": 64, "rank": "error"}),
        (1, 2, 4096, 4096, 64, 64, {"near": 4, "near_rows": 128, "rank": "mass", "response": None}),
        (1, 2, 5001, 3333, 80, 40, {"near": 3, "near_rows": 64, "rank": "mean", "closure": "langevin"}),
        (1, 2, 3000, 3000, 96, 96, {"near": 12, "near_rows": 128, "rank": "mean"}),
        (1, 2, 2000, 2000, 128, 128, {"near": 1, "near_rows": 64, "rank": "error"}),
    ],
    ids=["auto", "each its own", "cross", "many near", "wide"],
)
def test_full_size(B: int, H: int, Lq: int, Lk: int, D: int, E: int, options: dict[str, Any], dtype: Any) -> None:
    half(B, H, Lq, Lk, D, E, dtype, 64, **{"response": "pooled"} | options)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("masked", [False, True])
def test_full_size_in_float32(masked: bool) -> None:
    q, k, v = (tokens(2, 2, 4096, 64, mean=m, seed=i) for i, m in enumerate((0, 1, 0.5)))
    there = torch.rand(2, 4096, device=DEVICE) < 0.7 if masked else None
    options = {"near": 2, "near_rows": 64, "rank": "mean", "response": "pooled"}
    compare(q, k, v, 2e-5, clusters=uneven(2, 2, 4096, 64), key_mask=there, **options)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize(
    ("heads", "key_heads", "Lq", "Lk", "width", "options"),
    [
        (4, 4, 4096, 4096, 64, {"near": 2}),
        (4, 2, 5001, 3333, 64, {"near": 3, "rank": "mean", "near_rows": 128}),
        (2, 2, 3000, 3000, 96, {"near": 1, "response": None}),
        (3, 3, 2048, 2048, 64, {}),
    ],
    ids=["auto", "cross", "wide", "far only"],
)
def test_one_operator_is_the_search_and_then_the_call(
    heads: int, key_heads: int, Lq: int, Lk: int, width: int, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    options |= {"enable_gqa": heads != key_heads}
    q = tokens(2, heads, Lq, width, dtype=torch.bfloat16)
    k, v = (tokens(2, key_heads, Lk, width, mean=m, dtype=torch.bfloat16, seed=i) for i, m in enumerate((1, 0.5), 1))
    ids = kmeans.nearest(q, k, None, None, 64, KMeans(64).iterations, 1)
    found, given = (results(q, k, v, "auto", q.dtype, clusters=x, **options) for x in (KMeans(64), ids))
    for x, y in zip(found, given, strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_a_compiled_call_is_one_graph_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    compiled(*(tokens(1, 2, 2048, 64, dtype=torch.bfloat16, seed=i) for i in range(3)), clusters=KMeans(64), near=2)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.filterwarnings("error::cumulant.kernels.notice.SlowPathWarning")
def test_defaults_take_the_kernels_wait_for_nothing_and_can_be_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    leaves = [tokens(1, 4, 2048, 64, dtype=torch.bfloat16, seed=i).requires_grad_() for i in range(3)]

    def step() -> list[Tensor]:
        out = cluster_attention(*leaves, clusters=KMeans(64), near=2)
        return [out.detach(), *torch.autograd.grad(out, leaves, torch.ones_like(out))]

    for _ in range(3):
        once = step()
    torch.cuda.set_sync_debug_mode("error")
    try:
        again = step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    side, graph = torch.cuda.Stream(), torch.cuda.CUDAGraph()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    for x, y, z in zip(once, again, captured, strict=True):
        assert torch.equal(x, y)
        assert torch.equal(x, z)
