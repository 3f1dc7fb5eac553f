"""Triton kernels of causal cluster attention against plain torch in float64, in Triton's interpreter or on a GPU.

Every test runs with fresh memory full of NaN, so that nothing is read before it is written.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cluster_checks import compare, compare_half, results
from kernel_checks import DEVICE, NAMES, error, poisoned_memory, tokens  # noqa: F401

from cumulant.cluster import Blocks, cluster_attention
from cumulant.cluster.causal import merged_lists
from cumulant.cluster.run import _made_past
from cumulant.cluster.statistics import moments_of

CAUSAL: dict[str, Any] = {"is_causal": True}


@pytest.mark.parametrize(
    ("queries", "keys", "clusters", "options"),
    [
        (40, 40, Blocks(8), {}),
        (30, 61, Blocks(7, keep=1, recent=1), {"offset": 31, "closure": "langevin"}),
        (3, 40, Blocks(4, keep=0, recent=2), {"offset": 33, "response": 0}),
        (50, 45, 3, {"closure": "gauss"}),  # the last rows stand behind all keys
        (40, 40, Blocks(8, keep=1, recent=1), {"prefix": 3}),
        (45, 61, Blocks(7, keep=1), {"prefix": 10, "offset": 16, "closure": "langevin"}),  # one block and three more
        (3, 40, Blocks(4, keep=0, recent=2), {"prefix": 2, "offset": 33, "response": 0}),
        (40, 30, 3, {"prefix": 35}),  # every token is one
        (70, 70, Blocks(16), {"response": "pooled", "prefix": 3}),
        (61, 61, Blocks(7, recent=1), {"response": "pooled", "closure": "langevin"}),  # tiles of several blocks
        (50, 45, Blocks(32), {"response": "pooled", "offset": 32}),  # each within one
    ],
    ids=[
        "blocks",
        "merged, from a place on",
        "one step of decoding",
        "a number of blocks",
        "sinks",
        "sinks of two blocks, from a place on",
        "sinks in a step of decoding",
        "sinks alone",
        "one response, sinks",
        "one response, recent blocks",
        "one response, from a place on",
    ],
)
def test_outputs_and_gradients_equal_plain_torch(
    queries: int, keys: int, clusters: int | Blocks, options: dict[str, Any]
) -> None:
    q, k, v = tokens(1, 1, queries, 24), tokens(1, 1, keys, 24, mean=2, seed=1), tokens(1, 1, keys, 40, mean=-1, seed=2)
    compare(q, k, v, clusters=clusters, **CAUSAL, **options)


@pytest.mark.parametrize("sinks", [0, 5])
def test_key_masks_and_groups_of_query_heads(sinks: int) -> None:
    q, k, v = tokens(2, 2, 40, 16), tokens(2, 1, 40, 16, mean=1, seed=1), tokens(2, 1, 40, 16, seed=2)
    mask = torch.arange(40, device=DEVICE) % 5 != 2
    mask = torch.stack((mask, mask & (torch.arange(40, device=DEVICE) > 12)))  # nothing to see for the first rows
    compare(q, k, v, clusters=Blocks(8, keep=1), key_mask=mask, enable_gqa=True, prefix=sinks, **CAUSAL)
    compare(q, k, v, clusters=Blocks(8), key_mask=mask, enable_gqa=True, prefix=sinks, response="pooled", **CAUSAL)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"prefix": 4},
        {"prefix": 4, "response": 0},
        {"clusters": Blocks(8, recent=1), "response": "pooled"},
        {"clusters": Blocks(32), "prefix": 4, "response": "pooled"},
    ],
    ids=str,
)
def test_half_precision_is_at_most_twice_as_far_off_as_plain_torch(options: dict[str, Any]) -> None:
    q, k, v = (tokens(1, 1, 70, 32, mean=m, dtype=torch.bfloat16, seed=i) for i, m in enumerate((0, 1, 0.5)))
    compare_half(q, k, v, **{"clusters": Blocks(8, keep=2, recent=1), **options, **CAUSAL})


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:All-NaN")
@pytest.mark.parametrize(
    "how",
    [
        {"clusters": Blocks(6, keep=0, recent=1)},
        {"clusters": Blocks(6, keep=0, recent=1), "prefix": 4},
        {"clusters": Blocks(6, keep=0, recent=1), "prefix": 25},
        {"clusters": Blocks(6), "response": "pooled"},
    ],
    ids=str,
)
def test_what_comes_later_reaches_no_row_even_if_it_is_not_a_number(how: dict[str, Any]) -> None:
    q, k, v = (tokens(1, 1, 40, 16, seed=i) for i in range(3))
    options: dict[str, Any] = {"backend": "triton", **CAUSAL, **how}
    before = cluster_attention(q, k, v, **options)
    k[0, 0, 21], v[0, 0, 30, 3] = float("nan"), float("inf")
    after = cluster_attention(q, k, v, **options)
    assert torch.equal(before[..., :21, :], after[..., :21, :])
    assert after[..., 21:, :].isnan().all()


@pytest.mark.parametrize(
    ("size", "keep", "recent", "offset", "tile"), [(3, 1, 1, 0, 8), (5, 0, 2, 17, 4), (2, None, 0, 9, 16)]
)
def test_tables_let_each_row_see_the_clusters_of_the_rule(
    size: int, keep: int | None, recent: int, offset: int, tile: int
) -> None:
    blocks, rows = Blocks(size, keep, recent), 60
    spans, lists = _made_past(rows, rows, offset, blocks, tile, torch.device("cpu"))[2][3:5]
    N = -(-(offset + rows) // size)
    if keep is None:
        rule = [set(range(max(0, n - recent))) for n in range(N)]
    else:
        x = torch.ones(1, 1, N, size, 1)
        table = merged_lists(moments_of(x, x, x[..., 0]), N, keep, recent)[1]
        rule = [set(line) - {-1} for line in table.tolist()]
    for row in range(rows):
        place, names = offset + row, lists[row // tile].tolist()
        seen = {c for c, (since, until, _) in enumerate(spans.T.tolist()) if since <= place < until}
        assert seen == rule[place // size]
        assert all(names[1 + spans[2, c]] == c and spans[2, c] < names[0] for c in seen)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize(
    ("D", "E", "Lq", "Lk", "options"),
    [
        (64, 64, 2048, 2048, {"clusters": Blocks(64, keep=4, recent=1)}),
        (64, 64, 1500, 2000, {"clusters": 16, "offset": 500}),
        (32, 48, 700, 700, {"clusters": Blocks(50, keep=2), "response": 0}),
        (128, 96, 900, 900, {"clusters": Blocks(64, keep=4)}),
        (64, 64, 1, 777, {"clusters": Blocks(64, keep=2, recent=1), "offset": 776}),
        (64, 64, 2048, 2048, {"clusters": Blocks(64, keep=4, recent=1), "prefix": 4}),
        (64, 64, 1500, 2000, {"clusters": 16, "offset": 500, "prefix": 70}),
        (32, 48, 701, 701, {"clusters": Blocks(50, keep=2), "response": 0, "prefix": 1}),
        (128, 96, 900, 900, {"clusters": Blocks(64, keep=4), "prefix": 17}),
        (64, 64, 1, 777, {"clusters": Blocks(64, keep=2, recent=1), "offset": 776, "prefix": 4}),
        (64, 64, 2048, 2048, {"clusters": 16, "response": "pooled"}),
        (64, 64, 1500, 2000, {"clusters": 16, "offset": 500, "response": "pooled", "prefix": 4}),
        (128, 96, 900, 900, {"clusters": Blocks(64, recent=1), "response": "pooled"}),
    ],
)
def test_full_size(D: int, E: int, Lq: int, Lk: int, options: dict[str, Any], dtype: torch.dtype) -> None:
    if dtype == torch.float32 and max(D, E) > 64:
        pytest.skip("float32 heads are at most 64 wide")
    q = tokens(2, 4, Lq, D, dtype=dtype)
    k, v = tokens(2, 2, Lk, D, mean=1, dtype=dtype, seed=1), tokens(2, 2, Lk, E, mean=0.5, dtype=dtype, seed=2)
    options = {"is_causal": True, "enable_gqa": True, **options}
    if dtype == torch.float32:
        compare(q, k, v, 2e-5, **options)
    else:
        compare_half(q, k, v, **options)


@pytest.mark.gpu
@pytest.mark.parametrize("sinks", [0, 4])
def test_padding_at_the_start(sinks: int) -> None:
    q, k, v = (tokens(2, 4, 1000, 64, mean=m, dtype=torch.bfloat16, seed=i) for i, m in enumerate((0, 1, 0.5)))
    mask = torch.arange(1000, device=DEVICE) >= torch.tensor([[0], [301]], device=DEVICE)
    compare_half(q, k, v, clusters=Blocks(64, keep=4, recent=1), key_mask=mask, prefix=sinks, **CAUSAL)


@pytest.mark.gpu
@pytest.mark.parametrize("sinks", [0, 4])
def test_two_runs_are_bitwise_equal(sinks: int) -> None:
    q, k, v = (tokens(1, 4, 1024, 64, dtype=torch.bfloat16, seed=i) for i in range(3))
    runs = [results(q, k, v, "triton", q.dtype, clusters=Blocks(64, keep=2), prefix=sinks, **CAUSAL) for _ in range(2)]
    for name, x, y in zip(NAMES, *runs, strict=True):
        assert torch.equal(x, y), (name, error(x, y))
