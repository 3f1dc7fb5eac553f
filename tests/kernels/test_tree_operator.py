"""The operator that finds clusters of a tree and attends: against plain torch in the order that it found, outputs and
gradients in float64, in Triton's interpreter or on a GPU. Memory is full of NaN."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_checks import DEVICE, error, poisoned_memory, tokens  # noqa: F401
from torch import Tensor

from cumulant.cluster import Blocks, Tree, by_content, cluster_attention
from cumulant.cluster.basis import sampled
from cumulant.cluster.tree import permuted
from cumulant.kernels import replay
from cumulant.kernels.cluster.bounds import tables
from cumulant.kernels.tree import attend, host

FORM: dict[str, Any] = {"near": 2, "near_rows": 32, "rank": "error", "response": "pooled"}
SHAPES = {  # Lq, Lk, D, E, tree
    "one search for both": (96, 96, 24, 16, Tree(4)),
    "uneven": (75, 61, 20, 36, Tree(8)),
    "few queries": (20, 90, 16, 16, Tree(4)),
}


def inputs(Lq: int, Lk: int, D: int, E: int, dtype: torch.dtype = torch.float32, heads: int = 2) -> list[Tensor]:
    q = tokens(1, heads, Lq, D, dtype=dtype)
    return [q, *(tokens(1, heads, Lk, n, mean=m, dtype=dtype, seed=m) for n, m in ((D, 1), (E, 2)))]


def together(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> tuple[list[Tensor], list[Tensor]]:
    """The output and gradients of the operator, and the orders that it found."""
    found: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        orders = attend.host.orders
        patch.setattr(attend.host, "orders", lambda *given: found.append(orders(*given)) or found[-1])
        answer = answers(*(x.clone().requires_grad_() for x in (q, k, v)), **options)
    assert len(found) == 1
    order, asking = found[0]
    if len(order) > k.shape[0] * k.shape[1]:  # one search for both
        order, asking = order.chunk(2)
    return answer, [order[:, : k.shape[2]], asking[:, : q.shape[2]]]


def answers(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[Tensor]:
    out = cluster_attention(q, k, v, **options)
    grad = tokens(*out.shape, seed=7).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, (q, k, v), grad)]


def apart(
    q: Tensor, k: Tensor, v: Tensor, order: Tensor, asking: Tensor, tree: Tree, backend: str, **options: Any
) -> list[Tensor]:
    """The same by blocks of tokens that are put in these orders before."""
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    places = [asking if asking.shape[1] else None, order, order]
    given = [x if at is None else moved(x, at) for x, at in zip(leaves, places, strict=True)]
    out = cluster_attention(*given, clusters=Blocks(-(-k.shape[2] // tree.count)), backend=backend, **options)
    out = out if places[0] is None else moved(out, asking, back=True)
    grad = tokens(*out.shape, seed=7).to(q.dtype).to(out.dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def moved(x: Tensor, order: Tensor, back: bool = False) -> Tensor:
    return permuted(x.flatten(0, 1), order, back).view_as(x)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("more", [{}, {"rank": "mean", "response": None}, {"near": 0}], ids=["error", "mean", "far"])
def test_outputs_and_gradients_are_those_of_plain_torch_in_the_order_found(shape: str, more: dict[str, Any]) -> None:
    *sizes, tree = SHAPES[shape]
    given, options = inputs(*sizes), FORM | more
    found, orders = together(*given, clusters=tree, backend="triton", **options)
    exact = apart(*(x.double() for x in given), *orders, tree, "reference", **options)
    errors = [error(x, y) for x, y in zip(found, exact, strict=True)]
    assert all(x < 3e-6 for x in errors), errors  # NaN is not below it


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SHAPES)
def test_it_is_the_search_and_then_the_call_bit_by_bit(shape: str, dtype: torch.dtype) -> None:
    *sizes, tree = SHAPES[shape]
    given = inputs(*sizes, dtype=dtype)
    found, orders = together(*given, clusters=tree, backend="triton", **FORM)
    for x, y in zip(found, apart(*given, *orders, tree, "triton", **FORM), strict=True):
        assert torch.equal(x, y)


def test_queries_of_a_long_grid_are_in_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(by_content, "LONG_GRID", 128)
    given = inputs(128, 128, 16, 16)
    found, (order, asking) = together(*given, clusters=Tree(4), grid=(8, 16), backend="triton", **FORM)
    assert asking.shape[1] == 0
    tiles = torch.arange(128, device=DEVICE).view(2, 4, 2, 8).transpose(1, 2).reshape(1, 128).expand(2, -1)
    exact = apart(*(x.double() for x in given), order, tiles, Tree(4), "reference", **FORM)
    errors = [error(x, y) for x, y in zip(found, exact, strict=True)]
    assert all(x < 3e-6 for x in errors), errors


def test_what_tokens_are_ordered_by_is_what_plain_torch_orders_them_by() -> None:
    q, k, _ = inputs(75, 61, 24, 16)
    some, few = sampled(20, q), sampled(16, k)
    wanted = k.flatten(0, 1) @ q[:, :, some].flatten(0, 1).mT
    assert error(host.columns(k, q, some, centred=False), wanted) < 1e-6
    away = k[:, :, few] - k[:, :, few].mean(-2, keepdim=True)
    assert error(host.columns(q, k, few), (q @ away.mT).flatten(0, 1)) < 1e-6


def test_values_and_keys_far_from_zero_lose_no_digits() -> None:
    q, k, v = inputs(96, 96, 16, 16)
    found, orders = together(q, k + 1000, v - 3000, clusters=Tree(4), backend="triton", **FORM)
    exact = apart(*(x.double() for x in (q, k + 1000, v - 3000)), *orders, Tree(4), "reference", **FORM)
    assert error(found[0] + 3000, exact[0] + 3000) < 1e-3


@pytest.mark.parametrize(
    "options",
    [{"key_mask": True}, {"prefix": 1}, {"enable_gqa": True}, {"clusters": Tree(4, width=4)}],
    ids=["mask", "prefix", "grouped", "few directions"],
)
def test_what_it_does_not_take_goes_the_other_way(options: dict[str, Any]) -> None:
    q, k, v = inputs(97, 97, 16, 16)
    if "key_mask" in options:
        options = {"key_mask": torch.arange(97, device=DEVICE)[None] % 5 != 2}
    if "enable_gqa" in options:
        k, v = k[:, :1], v[:, :1]
    calls: list[Any] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(attend.host, "orders", lambda *given: calls.append(given))
        out = cluster_attention(q, k, v, **{"clusters": Tree(4), "backend": "triton"} | FORM | options)
    assert not calls
    assert out.isfinite().all()


def test_the_operator_can_be_compiled() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(64, 64, 16, 16))
    bounds, logs = tables([0, 16, 32, 48, 64], 0, q.device)
    none = torch.empty(1, 0, dtype=torch.int64, device=DEVICE)
    numbers = 4, 2, 2, 4, 16, True, 0.25, 32, 2, -2, "tanh", "mass"
    given = q, k, v, sampled(16, q), sampled(16, k), none, bounds, logs, *numbers
    torch.library.opcheck(attend.attention.forward, (*given, True), test_utils=("test_schema", "test_faketensor"))


def test_a_compiled_call_is_one_graph() -> None:
    given = inputs(96, 96, 16, 16)

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return cluster_attention(q, k, v, clusters=Tree(4), backend="triton", **FORM)

    whole = torch.compile(call, fullgraph=True, backend="aot_eager")
    found, wanted = (f(*(x.clone().requires_grad_() for x in given)) for f in (whole, call))
    assert torch.equal(found, wanted)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("heads", "Lq", "Lk", "width", "options"),
    [
        (4, 4096, 4096, 64, {}),
        (2, 5001, 3333, 64, {"near_rows": 128, "rank": "mass"}),
        (2, 16_384, 16_384, 48, {"grid": (128, 128), "near_rows": 128, "near": 4}),
    ],
    ids=["both", "cross", "tiles"],
)
def test_at_full_size_it_is_the_search_and_then_the_call(
    heads: int, Lq: int, Lk: int, width: int, options: dict[str, Any], dtype: torch.dtype, monkeypatch: Any
) -> None:
    monkeypatch.undo()
    given, options = inputs(Lq, Lk, width, width, dtype, heads), FORM | {"near_rows": 64} | options
    found, (order, asking) = together(*given, clusters=Tree(64), **options)
    if options.pop("grid", None):
        asking = torch.arange(Lq, device=DEVICE).view(16, 8, 8, 16).transpose(1, 2).reshape(1, Lq).expand(heads, -1)
    same = apart(*given, order, asking, Tree(64), "triton", **options)
    for x, y in zip(found, same, strict=True):
        assert torch.equal(x, y) if dtype != torch.float32 else error(x, y) < 2e-5


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize(("width", "near_rows"), [(96, 128), (96, 64), (64, 128)])
def test_of_many_clusters_those_of_plain_torch_are_chosen(width: int, near_rows: int) -> None:
    given, tree = inputs(8192, 8192, width, width, torch.bfloat16), Tree(128)
    options = FORM | {"near": 4, "near_rows": near_rows}
    found, orders = together(*given, clusters=tree, **options)
    plain = apart(*given, *orders, tree, "reference", **options)[0]
    exact = apart(*(x.double() for x in given), *orders, tree, "reference", **options)[0]
    assert error(found[0], exact) < 2 * error(plain, exact) + 1e-3


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.filterwarnings("error::cumulant.kernels.notice.SlowPathWarning")
def test_a_newcomers_call_takes_kernels_and_is_repeated_from_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    replay.forget()
    given = [x.requires_grad_() for x in inputs(4096, 4096, 64, 64, torch.bfloat16, 4)]
    wanted, *later = (answers(*given, clusters=Tree(64), near=4) for _ in range(6))
    for each in later:
        for x, y in zip(each, wanted, strict=True):
            assert torch.equal(x, y)
    records = [x for x in replay._records.values() if isinstance(x, replay.Record)]
    assert [x.proven for x in records] == [True]
