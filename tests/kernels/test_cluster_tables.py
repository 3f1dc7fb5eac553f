"""Kernels of cluster attention for what people have: masks, grouped queries, prefix tokens, grids, found clusters.

In Triton's interpreter or on a GPU, against plain torch in float64, outputs and gradients; memory is full of NaN.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cluster_checks import compare
from kernel_checks import DEVICE, poisoned_memory, tokens  # noqa: F401

from cumulant.cluster import Blocks, KMeans, cluster_attention
from cumulant.kernels.cluster import order
from cumulant.kernels.cluster.plan import Shape, kept_plan

SHARED: dict[str, Any] = {"near": 2, "near_rows": 32, "rank": "mean", "response": "pooled"}
EACH: dict[str, Any] = {"near": 0, "near_rows": 1, "rank": "mass", "response": None}


def check(heads: int = 1, key_heads: int = 1, *, batch: int = 1, Lq: int = 36, Lk: int = 36, **options: Any) -> None:
    q = tokens(batch, heads, Lq, 16)
    k, v = tokens(batch, key_heads, Lk, 16, mean=1, seed=1), tokens(batch, key_heads, Lk, 24, mean=-1, seed=2)
    compare(q, k, v, enable_gqa=heads != key_heads, **options)


def mask(batch: int = 2, length: int = 36) -> torch.Tensor:
    return (torch.rand(batch, length, generator=torch.Generator().manual_seed(1)) < 0.6).to(DEVICE)


@pytest.mark.parametrize("form", [SHARED, SHARED | {"rank": "mass", "response": 2}], ids=["pooled", "listed"])
def test_query_heads_that_share_a_key_head(form: dict[str, Any]) -> None:
    check(4, 2, Lq=40, clusters=5, **form)


@pytest.mark.parametrize("clusters", [5, Blocks(8)], ids=["of those present", "where they are"])
def test_keys_that_take_no_part(clusters: int | Blocks) -> None:
    check(batch=2, key_mask=mask(), clusters=clusters, **SHARED)


def test_keys_in_a_row_after_padding_and_before_it() -> None:
    """Padding at the end of one sequence and at the start of the other; then with a hole in one cluster."""
    place = torch.arange(36, device=DEVICE)
    there = torch.stack((place < 23, place >= 11))
    check(batch=2, key_mask=there, clusters=5, **SHARED)
    there[1, 20] = False
    check(batch=2, key_mask=there, clusters=5, **SHARED)


def test_leading_dimensions_of_a_mask_are_those_of_the_batch() -> None:
    q, k, v, there = (tokens(2, 1, 36, 16), tokens(2, 1, 36, 16, seed=1), tokens(2, 1, 36, 16, seed=2), mask())
    flat = cluster_attention(q, k, v, clusters=5, key_mask=there, backend="triton", **SHARED)
    split = [x.unsqueeze(1) for x in (q, k, v)]
    out = cluster_attention(*split, clusters=5, key_mask=there.unsqueeze(1), backend="triton", **SHARED)
    assert torch.equal(out, flat.unsqueeze(1))


def test_prefix_tokens_near_to_every_query() -> None:
    check(2, 1, Lq=40, clusters=5, prefix=3, **SHARED)
    check(clusters=5, prefix=3, **EACH | {"response": "pooled"})


def test_a_masked_grid_with_a_prefix() -> None:
    check(batch=2, Lq=37, Lk=37, key_mask=mask(length=37), clusters=(2, 3), grid=(5, 7), prefix=2, **SHARED)


def test_keys_of_a_grid_that_are_read_often_are_put_in_order_first() -> None:
    """Sixteen tiles of queries that each meet half of the keys: those are copied, and their gradients go back."""
    q, k, v = (tokens(1, 1, 512, width, mean=m, seed=i) for i, (width, m) in enumerate(((16, 0), (16, 1), (24, -1))))
    options = SHARED | {"clusters": (2, 2), "grid": (16, 32)}
    call = Shape(1, 1, 1, 512, 512, 16, 24, 1, True, 4, 128, True, 32, 2, -2, "tanh", "mean", False, 0, False)
    assert kept_plan(call, q.dtype).copies
    compare(q, k, v, **options)


def test_clusters_found_by_k_means_of_masked_keys() -> None:
    check(2, 1, batch=2, key_mask=mask(), clusters=KMeans(5, 2), **EACH)


def test_any_assignment_of_the_keys() -> None:
    ids = torch.randint(6, (1, 2, 36), generator=torch.Generator().manual_seed(1)).to(DEVICE)
    check(2, 2, clusters=ids, **EACH | {"response": "pooled"})


@pytest.mark.filterwarnings("ignore:divide by zero", "ignore:invalid value")  # of rows that see nothing
def test_nan_in_keys_that_take_no_part_goes_nowhere_and_a_row_that_sees_nothing_is_0() -> None:
    q, k, v = (tokens(2, 1, 36, 16, seed=i) for i in range(3))
    there = mask()
    there[0] = False
    clean = [x.masked_fill(~there[:, None, :, None], 0) for x in (k, v)]
    broken = [x.masked_fill(~there[:, None, :, None], float("nan")) for x in (k, v)]
    outs = []
    for pair in (clean, broken):
        leaves = [x.clone().requires_grad_() for x in (q, *pair)]
        out = cluster_attention(*leaves, clusters=5, key_mask=there, backend="triton", **SHARED)
        outs.append([out, *torch.autograd.grad(out.square().sum(), leaves)])
    for x, y in zip(*outs, strict=True):
        assert torch.equal(x, y)
        assert not x[0].any()


@pytest.mark.parametrize("masked", [False, True])
def test_kernels_sort_tokens_as_torch_does(masked: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the last cluster and others have no token; a mask is shared by the heads of a sequence."""
    from cumulant.cluster.run import _sorted

    K, ids = 45, torch.randint(0, 40, (4, 300), generator=torch.Generator().manual_seed(3)).to(DEVICE)
    ids[ids % 7 == 3] = 5
    present = mask(2, 300) if masked else None
    found = _sorted(ids, present, 0, K, 0)
    monkeypatch.setattr(order, "sortable", lambda *_: False)
    exact = _sorted(ids, present, 0, K, 0)
    assert torch.equal(found.bounds, exact.bounds)
    torch.testing.assert_close(found.logs, exact.logs)
    for one, other, bounds in zip(found.order, exact.order, exact.bounds, strict=True):
        assert torch.equal(one[: bounds[1, K - 1]], other[: bounds[1, K - 1]])  # the rest takes no part


def test_more_sets_than_the_second_dimension_of_a_grid_holds_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    """70,000 sets of one token: what is launched for them, without the hour that the interpreter would take."""
    grids = []

    class Recorded:
        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return lambda *given, **constants: None

    for name in ("count_tokens", "offsets", "place_tokens"):
        monkeypatch.setattr(order, name, Recorded())
    order.sorted_tables(torch.zeros(70_000, 1, dtype=torch.int32, device=DEVICE), None, 2)
    assert len(grids) == 3
    assert all(n <= 65_535 for grid in grids for n in grid[1:])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_many_sets_are_sorted_as_few_are() -> None:
    ids = torch.randint(3, (70_000, 200), dtype=torch.int32, device=DEVICE)
    bounds, _, places = order.sorted_tables(ids, None, 3)
    for s in (0, 65_535, 65_536, 69_999):
        assert torch.equal(places[s].long(), ids[s].argsort(stable=True))
        assert bounds[s, 1, :3].tolist() == [int((ids[s] <= c).sum()) for c in range(3)]
