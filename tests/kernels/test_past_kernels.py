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


@pytest.mark.parametrize(
    ("queries", "keys", "blocks", "options"),
    [
        (150, 150, Blocks(128), {}),
        (60, 190, Blocks(64), {"offset": 128, "closure": "langevin"}),
        (50, 180, Blocks(64, recent=1), {"offset": 128}),
        (50, 160, Blocks(64), {"offset": 128}),
        (300, 290, Blocks(128), {"closure": "gauss"}),
        (60, 190, Blocks(64), {"offset": 128, "prefix": 3}),
        (60, 190, Blocks(64), {"offset": 128, "near": 1}),
        (20, 1100, Blocks(32), {"offset": 34 * 32}),
    ],
    ids=[
        "two tiles of a block",
        "from a place on",
        "recent blocks",
        "rows behind all keys",
        "several blocks",
        "sinks",
        "near",
        "more clusters than a program takes at once",
    ],
)
def test_tiles_within_a_block_of_rows_equal_plain_torch(
    queries: int, keys: int, blocks: Blocks, options: dict[str, Any]
) -> None:
    k, v = tokens(1, 1, keys, 24, mean=1, seed=1), tokens(1, 1, keys, 40, seed=2)
    for heads in (1, 2):
        q = tokens(1, heads, queries, 24)
        compare(q, k, v, 2e-5, clusters=blocks, response="pooled", enable_gqa=True, **CAUSAL, **options)


@pytest.mark.parametrize("options", [{}, {"near": 1}, {"prefix": 3}], ids=str)
def test_tiles_within_a_block_of_rows_are_as_precise(options: dict[str, Any]) -> None:
    q = tokens(1, 2, 60, 32, dtype=torch.bfloat16)
    k, v = (tokens(1, 2, 190, 32, mean=m, dtype=torch.bfloat16, seed=i) for i, m in ((1, 1), (2, 0.5)))
    compare_half(q, k, v, clusters=Blocks(64), offset=128, response="pooled", **options, **CAUSAL)


@pytest.mark.parametrize("sinks", [0, 5])
def test_key_masks_and_groups_of_query_heads(sinks: int) -> None:
    q, k, v = tokens(2, 2, 40, 16), tokens(2, 1, 40, 16, mean=1, seed=1), tokens(2, 1, 40, 16, seed=2)
    mask = torch.arange(40, device=DEVICE) % 5 != 2
    mask = torch.stack((mask, mask & (torch.arange(40, device=DEVICE) > 12)))  # nothing to see for the first rows
    compare(q, k, v, clusters=Blocks(8, keep=1), key_mask=mask, enable_gqa=True, prefix=sinks, **CAUSAL)
    compare(q, k, v, clusters=Blocks(8), key_mask=mask, enable_gqa=True, prefix=sinks, response="pooled", **CAUSAL)
    within: dict[str, Any] = {"clusters": Blocks(32), "offset": 32, "response": "pooled", **CAUSAL}
    compare(q[..., :8, :], k, v, key_mask=mask, enable_gqa=True, prefix=sinks, **within)


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
        {"clusters": Blocks(6), "near": 1, "response": "pooled"},
        {"clusters": Blocks(64), "response": "pooled"},  # long blocks, whose values are not looked at one by one
        {"clusters": Blocks(32, keep=0), "prefix": 4},
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
    ("queries", "keys", "heads", "options"),
    [
        (70, 70, (1, 1), {"clusters": Blocks(8), "near": 1}),
        (61, 61, (2, 2), {"clusters": 9, "near": 2, "response": "pooled", "closure": "langevin"}),
        (45, 61, (4, 2), {"clusters": Blocks(7, recent=1), "near": 3, "offset": 16, "prefix": 3, "response": 0}),
        (50, 50, (1, 1), {"clusters": Blocks(5), "near": 2, "rank": "error", "prefix": 2}),
        (2, 40, (2, 1), {"clusters": Blocks(4), "near": 2, "offset": 33}),
        (50, 45, (1, 1), {"clusters": 3, "near": 5, "closure": "gauss"}),
        (80, 80, (1, 1), {"clusters": Blocks(2), "near": 1, "response": "pooled"}),
    ],
    ids=[
        "blocks",
        "one response",
        "sinks, groups, recent blocks, from a place on",
        "by error",
        "one step of decoding",
        "all near",
        "more clusters than a program takes at once",
    ],
)
def test_rows_that_choose_near_clusters_equal_plain_torch(
    queries: int, keys: int, heads: tuple[int, int], options: dict[str, Any]
) -> None:
    H, Hk = heads
    q, k = tokens(1, H, queries, 24), tokens(1, Hk, keys, 24, mean=2, seed=1)
    compare(q, k, tokens(1, Hk, keys, 40, mean=-1, seed=2), enable_gqa=True, **CAUSAL, **options)


@pytest.mark.parametrize("sinks", [0, 3])
def test_rows_choose_among_the_tokens_that_take_part(sinks: int) -> None:
    q, k, v = tokens(2, 2, 40, 16), tokens(2, 1, 40, 16, mean=1, seed=1), tokens(2, 1, 40, 16, seed=2)
    mask = torch.arange(40, device=DEVICE) % 5 != 2
    mask = torch.stack((mask, mask & (torch.arange(40, device=DEVICE) > 12)))
    shared: dict[str, Any] = {"key_mask": mask, "enable_gqa": True, "prefix": sinks, **CAUSAL}
    compare(q, k, v, clusters=Blocks(8), near=2, response="pooled", **shared)


@pytest.mark.parametrize("options", [{}, {"response": None, "prefix": 4}, {"response": 0}], ids=str)
def test_near_clusters_in_half_precision_are_at_most_twice_as_far_off_as_plain_torch(options: dict[str, Any]) -> None:
    q, k, v = (tokens(1, 2, 75, 32, mean=m, dtype=torch.bfloat16, seed=i) for i, m in enumerate((0, 1, 0.5)))
    options = {"clusters": Blocks(8), "near": 2, "response": "pooled", **options, **CAUSAL}
    plain, exact = compare_half(q, k, v, **options)
    with torch.no_grad():  # nothing is kept in float32 then
        alone = cluster_attention(q, k, v, backend="triton", **options)
    assert error(alone, exact[0]) < 2 * error(plain[0], exact[0])


@pytest.mark.parametrize("cut", [1, 29, 40, 63])
def test_near_clusters_of_a_row_depend_on_no_later_token(cut: int) -> None:
    q, k, v = (tokens(1, 4, 70, 16, seed=i) for i in range(3))
    options: dict[str, Any] = {"backend": "triton", "clusters": Blocks(8), "near": 2, "response": "pooled", **CAUSAL}
    whole = cluster_attention(q, k, v, **options)
    others = [torch.cat((x[..., :cut, :], 9 * tokens(1, 4, 70 - cut, 16, seed=8)), -2) for x in (q, k, v)]
    assert torch.equal(whole[..., :cut, :], cluster_attention(*others, **options)[..., :cut, :])
    one = cluster_attention(q[..., cut : cut + 1, :], k, v, offset=cut, **options)
    assert error(one, whole[..., cut : cut + 1, :]) < 1e-6


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
        (48, 32, 900, 900, {"clusters": Blocks(64), "response": "pooled"}),
        (64, 64, 2048, 2048, {"clusters": 16, "near": 2, "response": "pooled"}),
        (64, 64, 1500, 2001, {"clusters": 16, "offset": 500, "near": 3, "response": "pooled", "prefix": 4}),
        (32, 48, 1700, 1700, {"clusters": Blocks(16), "near": 1, "response": 0}),
        (64, 48, 777, 777, {"clusters": Blocks(64, recent=1), "near": 4, "rank": "error"}),
        (64, 64, 1, 777, {"clusters": Blocks(64), "near": 2, "offset": 776, "response": "pooled"}),
        (128, 96, 900, 900, {"clusters": Blocks(64), "near": 2, "response": "pooled"}),
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
def test_later_tokens_change_no_bit_of_a_row_with_near_clusters() -> None:
    q, k, v = (tokens(2, 4, 2000, 64, dtype=torch.bfloat16, seed=i) for i in range(3))
    options: dict[str, Any] = {"backend": "triton", "clusters": 32, "near": 2, "response": "pooled", **CAUSAL}
    whole = cluster_attention(q, k, v, **options)
    for cut in (70, 1001, 1999):
        others = [torch.cat((x[..., :cut, :], 9 * x[..., cut:, :]), -2) for x in (q, k, v)]
        assert torch.equal(whole[..., :cut, :], cluster_attention(*others, **options)[..., :cut, :])


@pytest.mark.gpu
def test_two_runs_with_near_clusters_are_bitwise_equal() -> None:
    q, k, v = (tokens(1, 4, 1024, 64, dtype=torch.bfloat16, seed=i) for i in range(3))
    runs = [results(q, k, v, "triton", q.dtype, clusters=16, near=2, **CAUSAL) for _ in range(2)]
    for name, x, y in zip(NAMES, *runs, strict=True):
        assert torch.equal(x, y), (name, error(x, y))


@pytest.mark.gpu
@pytest.mark.parametrize("sinks", [0, 4])
def test_two_runs_are_bitwise_equal(sinks: int) -> None:
    q, k, v = (tokens(1, 4, 1024, 64, dtype=torch.bfloat16, seed=i) for i in range(3))
    runs = [results(q, k, v, "triton", q.dtype, clusters=Blocks(64, keep=2), prefix=sinks, **CAUSAL) for _ in range(2)]
    for name, x, y in zip(NAMES, *runs, strict=True):
        assert torch.equal(x, y), (name, error(x, y))
