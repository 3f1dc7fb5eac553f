"""Triton kernels of a tree's order against plain torch: clusters as alike, in Triton's interpreter or on a GPU."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import DEVICE, poisoned_memory, tokens  # noqa: F401
from torch import Tensor

from cumulant.cluster import Tree, cluster_attention
from cumulant.cluster.tree import order_of, tree_order
from cumulant.kernels.tree import host, rows

ROUTES = {"one launch": (2048, 16384), "two launches": (16, 16384), "five launches": (16, 32)}


@pytest.fixture(params=ROUTES)
def route(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Which launches halve the first nodes, whatever their size."""
    monkeypatch.setattr(host, "ALONE", ROUTES[request.param][0])
    monkeypatch.setattr(host, "HELD", ROUTES[request.param][1])
    return request.param


def in_plain_torch(x: Tensor, parts: int, absent: Tensor | None = None) -> Tensor:
    return order_of(x.double(), parts, Tree(parts), absent)  # no kernel takes float64


def spread(x: Tensor, order: Tensor, parts: int) -> float:
    """Squared distances of the tokens of each run from its mean."""
    x = x.double()[torch.arange(len(x), device=x.device)[:, None], order]
    return sum(float((run - run.mean(1, keepdim=True)).square().sum()) for run in x.split(-(-x.shape[1] // parts), 1))


def runs(order: Tensor, parts: int) -> Tensor:
    """Tokens of each run, sorted."""
    return order.unflatten(1, (parts, -1)).sort(-1).values


def uneven(N: int, L: int, S: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Tokens that are spread farther in some directions than in others."""
    return (tokens(N, L, S) * torch.linspace(0.2, 3.0, S, device=DEVICE) + 5).to(dtype)


def groups(L: int, parts: int, S: int) -> Tensor:
    """Tokens around `parts` points far from each other, as many around each."""
    points = 20 * tokens(2, parts, S, seed=1)
    return points[:, torch.arange(L, device=DEVICE) * 7 % parts] + 0.1 * tokens(2, L, S)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("L", "S", "parts"), [(512, 64, 16), (301, 24, 8)])
def test_runs_hold_every_token_and_are_as_alike_as_those_of_plain_torch(L, S, parts, dtype) -> None:
    x = uneven(2, L, S, dtype)
    order = host.order(x, parts, 2, None)
    assert torch.equal(order.sort(-1).values, torch.arange(L, device=DEVICE).expand(2, -1))
    assert spread(x, order, parts) < 1.02 * spread(x, in_plain_torch(x, parts), parts)


def test_groups_far_apart_are_found_as_plain_torch_finds_them(route: str) -> None:
    x = groups(224, 8, 16)
    assert torch.equal(runs(host.order(x, 8, 2, None), 8), runs(in_plain_torch(x, 8), 8))


def test_every_route_gives_the_same_order(route: str, monkeypatch: pytest.MonkeyPatch) -> None:
    x, absent = uneven(2, 203, 20), torch.arange(203, device=DEVICE).expand(2, -1) % 5 == 2
    x[:, 50:90] = 1.0  # alike in all: those that come first are in the lower half
    found = host.order(x, 8, 2, absent)
    assert torch.equal(host.order(x, 8, 2, absent), found)
    monkeypatch.setattr(host, "ALONE", 2048)
    assert torch.equal(host.order(x, 8, 2, absent), found)


def test_absent_tokens_are_in_the_last_runs_and_may_hold_anything(route: str) -> None:
    x, absent = groups(240, 8, 16), torch.arange(240, device=DEVICE).expand(2, -1) % 5 == 2
    order, exact = host.order(x, 8, 2, absent), in_plain_torch(x, 8, absent)
    here, wanted = (y.masked_fill(absent.gather(1, y), -1) for y in (order, exact))
    assert torch.equal(runs(here, 8), runs(wanted, 8))
    assert absent.gather(1, order)[:, -30:].all()
    assert torch.equal(host.order(x.masked_fill(absent.unsqueeze(-1), float("nan")), 8, 2, absent), order)
    assert host.order(x, 8, 2, torch.ones_like(absent)).sort(-1).values[:, -1].eq(239).all()


def test_what_is_no_number_keeps_others_where_they_are() -> None:
    x = groups(224, 8, 16)
    x[:, 3], x[:, 7, 2] = float("nan"), float("-inf")
    assert torch.equal(runs(host.order(x, 8, 2, None), 8), runs(in_plain_torch(x, 8), 8))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_rows_are_those_of_the_order_whatever_lies_between_them(dtype: torch.dtype) -> None:
    for x in (tokens(70, 3, 2, 24, dtype=dtype)[:, :, 1].transpose(0, 1), tokens(3, 70, 19, dtype=dtype)):
        order = torch.stack([torch.randperm(70, generator=torch.Generator().manual_seed(i))[:66] for i in range(3)])
        order = order.to(DEVICE)
        assert torch.equal(rows.rows_of(x, order), x.gather(1, order.unsqueeze(-1).expand(-1, -1, x.shape[-1])))


def test_gradients_of_rows_in_an_order_go_back_to_where_they_came_from() -> None:
    order = torch.stack([torch.randperm(70, generator=torch.Generator().manual_seed(i)) for i in range(3)]).to(DEVICE)
    weight = tokens(3, 70, 19, seed=1)
    x = tokens(3, 70, 19).requires_grad_()
    (rows.Permuted.apply(x, order) * weight).sum().backward()
    assert torch.equal(x.grad, torch.empty_like(x).scatter(1, order.unsqueeze(-1).expand_as(x), weight))
    x.grad = None
    rows.Permuted.apply(x, order)[..., :1].sum().backward()  # a gradient whose rows are not whole
    assert torch.equal(x.grad[..., 0], torch.ones(3, 70, device=DEVICE))


def test_the_operator_can_be_compiled() -> None:
    torch.library.opcheck(
        host.tree_order, (uneven(1, 70, 16), 4, 2, None), test_utils=("test_schema", "test_faketensor")
    )


@pytest.mark.gpu
@pytest.mark.parametrize(("L", "S", "parts"), [(65_536, 64, 256), (16_384, 64, 64), (20_001, 24, 32)])
def test_at_full_size_runs_are_as_alike_and_the_same_again(L: int, S: int, parts: int) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        x = uneven(4, L, S, dtype)
        order = host.order(x, parts, 2, None)
        assert torch.equal(order.sort(-1).values, torch.arange(L, device=DEVICE).expand(4, -1))
        assert spread(x, order, parts) < 1.02 * spread(x, in_plain_torch(x, parts), parts)
        assert all(torch.equal(host.order(x, parts, 2, None), order) for _ in range(5))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_calls_whose_rows_a_kernel_moves_are_those_of_torch(dtype: torch.dtype, monkeypatch) -> None:
    given = [tokens(2, 4, 4096, 64, dtype=dtype, seed=i) for i in range(4)]

    def results() -> list[Tensor]:
        q, k, v = (x.clone().requires_grad_() for x in given[:3])
        out = cluster_attention(q, k, v, clusters=Tree(32), near=4, near_rows=64, response="pooled")
        return [out, *torch.autograd.grad(out, (q, k, v), given[3])]

    moved = results()
    monkeypatch.setattr(rows, "fits", lambda x: False)
    assert all(map(torch.equal, moved, results()))


@pytest.mark.gpu
def test_orders_run_in_graphs_of_cuda_and_of_the_compiler() -> None:
    q, k, v = (tokens(1, 2, 4096, 64, dtype=torch.bfloat16, seed=i) for i in range(3))
    search = lambda q, k: tree_order(q, k, 32, Tree(32))  # noqa: E731
    found = torch.compile(search, fullgraph=True)(q[0], k[0])
    assert torch.equal(found.sort(-1).values, torch.arange(4096, device=DEVICE).expand(2, -1))
    run = lambda: cluster_attention(q, k, v, clusters=Tree(32), near=4, near_rows=64)  # noqa: E731
    out, graph = run(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = run()
    again.zero_()
    graph.replay()
    assert torch.equal(again, out)
