"""Triton kernels of cluster attention against plain torch in float64, in Triton's interpreter or on a GPU.

Every test runs with fresh memory full of NaN, so that nothing is read before it is written.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from cluster_checks import FLOAT32, compare, compare_full_size, compare_half, results
from kernel_checks import DEVICE, NAMES, error, poisoned_memory, tokens  # noqa: F401
from torch import Tensor

from cumulant.cluster import Blocks, KMeans, cluster_attention
from cumulant.cluster.run import _kept
from cumulant.kernels.cluster import host as triton_cluster
from cumulant.kernels.cluster.plan import Plan, _plan_of, of_blocks

POOLED: dict[str, Any] = {"clusters": 128, "near": 2, "near_rows": 128, "rank": "mean", "response": "pooled"}


@pytest.mark.parametrize(
    ("closure", "near", "response", "rank"),
    [
        ("tanh", 0, None, "mass"),
        ("tanh", 2, None, "mass"),
        ("gauss", 2, 2, "mass"),
        ("langevin", 1, 3, "error"),
        ("langevin", 3, 0, "mass"),
        ("tanh", 0, 2, "mass"),
        ("tanh", 2, "pooled", "mass"),
        ("langevin", 0, "pooled", "mass"),
        ("tanh", 2, "pooled", "mean"),
        ("langevin", 2, None, "mean"),
        ("gauss", 1, 2, "mean"),
    ],
)
def test_outputs_and_gradients_equal_plain_torch(
    closure: str, near: int, response: int | str | None, rank: str
) -> None:
    q, k, v = tokens(2, 1, 50, 24), tokens(2, 1, 61, 24, mean=2, seed=1), tokens(2, 1, 61, 40, mean=-1, seed=2)
    compare(q, k, v, clusters=7, near=near, near_rows=32, closure=closure, response=response, rank=rank)


@pytest.mark.parametrize("clusters", [1, Blocks(16), 33])
def test_one_cluster_a_short_last_one_and_single_tokens(clusters: int | Blocks) -> None:
    q, k, v = tokens(1, 1, 33, 16), tokens(1, 1, 35, 16, mean=1), tokens(1, 1, 35, 16)
    compare(q, k, v, clusters=clusters)


def test_more_clusters_than_a_program_holds_at_once() -> None:
    q, k, v = tokens(1, 1, 34, 16), tokens(1, 1, 150, 16, mean=1), tokens(1, 1, 150, 16)
    compare(q, k, v, clusters=70, near=2, near_rows=32, response=4)


def test_blocks_of_a_grid_that_do_not_divide_it() -> None:
    q, k, v = (tokens(1, 2, 35, 16, seed=i) for i in range(3))
    compare(q, k, v, clusters=(2, 3), grid=(5, 7), near=1, near_rows=32)


def test_a_first_call_under_inference_mode_does_not_stand_in_the_way_of_training() -> None:
    _kept.cache_clear()
    query, key, value = (torch.randn(1, 1, 35, 16, device=DEVICE, requires_grad=True) for _ in range(3))
    options: dict[str, Any] = {"clusters": (2, 2), "grid": (5, 7), "near": 1, "near_rows": 32, "backend": "triton"}
    with torch.inference_mode():
        cluster_attention(query, key, value, **options)
    cluster_attention(query, key, value, **options).sum().backward()
    assert key.grad is not None


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("near", [0, 2])
def test_half_precision_is_at_most_twice_as_far_off_as_plain_torch(dtype: torch.dtype, near: int) -> None:
    q, k, v = (tokens(1, 2, 96, 32, mean=m, dtype=dtype, seed=i) for i, m in enumerate((0, 1, 0.5)))
    options: dict[str, Any] = {"clusters": 8, "near": near, "near_rows": 32}
    compare_half(q, k, v, **options)


@pytest.mark.parametrize("response", [None, "pooled"])
def test_clusters_of_whole_blocks_are_read_without_their_ends(response: str | None) -> None:
    """128 tokens a cluster, as many as a program reads at once, in half precision, with and without gradients."""
    q, k, v = (tokens(1, 1, L, 32, mean=m, dtype=torch.bfloat16, seed=L) for L, m in ((40, 0), (384, 1), (384, 0.5)))
    options: dict[str, Any] = {"clusters": 3, "near": 1, "near_rows": 32, "rank": "mean", "response": response}
    plain, exact = compare_half(q, k, v, **options)
    with torch.no_grad():
        alone = cluster_attention(q, k, v, backend="triton", **options)
    assert error(alone, exact[0]) < 2 * error(plain[0], exact[0]) + 1e-4


@pytest.mark.parametrize("options", [{}, {"key_mask": True}, {"prefix": 1}])
def test_points_that_are_found_once_a_head_are_those_of_each_cluster(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    q, k, v = (tokens(2, 1, L, 32, mean=m, dtype=torch.bfloat16, seed=L) for L, m in ((40, 0), (193, 3), (193, 5)))
    if "key_mask" in options:
        options = {"key_mask": torch.arange(193, device=DEVICE) < torch.tensor([[193], [100]], device=DEVICE)}
    found = []
    for many in (False, True):
        monkeypatch.setattr(Plan, "many_clusters", lambda self, device, many=many: many)
        _plan_of.cache_clear()
        found.append(cluster_attention(q, k, v, clusters=3, near=1, near_rows=32, backend="triton", **options))
    _plan_of.cache_clear()
    assert torch.equal(*found)


@pytest.mark.parametrize("width", [72, 96])
@pytest.mark.parametrize("keys", [256, 250])
def test_heads_a_little_wider_than_64_are_met_in_two_parts(width: int, keys: int) -> None:
    q, k, v = (
        tokens(1, 1, L, width, mean=m, dtype=torch.bfloat16, seed=L) for L, m in ((40, 0), (keys, 1), (keys, 0.5))
    )
    options: dict[str, Any] = {"clusters": 4, "near": 2, "near_rows": 32, "rank": "mean", "response": "pooled"}
    plain, exact = compare_half(q, k, v, **options)
    with torch.no_grad():
        alone = cluster_attention(q, k, v, backend="triton", **options)
    assert error(alone, exact[0]) < 2 * error(plain[0], exact[0]) + 1e-4


@pytest.mark.parametrize("response", [None, 3])
def test_sums_over_many_tiles_of_groups_that_the_clusters_do_not_fill(response: int | None) -> None:
    q, k, v = (tokens(1, 1, L, 32, mean=m, dtype=torch.bfloat16, seed=L) for L, m in ((300, 0), (90, 1), (90, 0.5)))
    options: dict[str, Any] = {"clusters": 9, "near": 1, "near_rows": 32, "response": response}
    ours, exact = (
        results(q, k, v, backend, kind, **options)
        for backend, kind in (("triton", q.dtype), ("reference", torch.float64))
    )
    for name, x, y in zip(NAMES, ours, exact, strict=True):
        assert error(x, y) < 5e-3, name


@pytest.mark.filterwarnings("ignore:overflow", "ignore:invalid value")  # of rows that pad a block and go nowhere
def test_keys_far_from_zero_cost_no_digits() -> None:
    q, v = tokens(1, 1, 64, 32, dtype=torch.bfloat16), tokens(1, 1, 96, 32, dtype=torch.bfloat16, seed=1)
    k = tokens(1, 1, 96, 32, mean=100, dtype=torch.bfloat16, seed=2)
    options: dict[str, Any] = {"clusters": 6, "near": 2, "near_rows": 32}
    compare_half(q, k, v, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"clusters": 6, "near": 2, "near_rows": 32, "response": "pooled"},
        {"clusters": Blocks(4), "prefix": 2},
        {"clusters": Blocks(16), "is_causal": True},
    ],
    ids=["near", "short", "causal"],
)
def test_values_far_from_zero_cost_gradients_no_digits(options: dict[str, Any]) -> None:
    """In bfloat16: weights that are rounded after they were summed up would move them by 2^-9 of where they lie."""
    q, k, v = (tokens(1, 1, 96, 32, mean=m, dtype=torch.bfloat16, seed=i) for i, m in enumerate((0, 1, 30)))
    compare_half(q, k, v, **options)


@pytest.mark.parametrize("response", ["pooled", None])
def test_tokens_a_few_deviations_from_zero_cost_dq_no_digits(response: str | None) -> None:
    """There some lie more than a factor of 2 from any point, and their differences to one would be rounded."""
    shapes = ((64, 0, 10), (96, 3, 11), (96, 5, 12))
    q, k, v = (tokens(1, 1, L, 32, mean=m, dtype=torch.bfloat16, seed=seed) for L, m, seed in shapes)
    compare_half(q, k, v, clusters=6, response=response)


def test_four_keys_that_are_alike_by_chance_cost_dq_no_digits() -> None:
    """They are taken for all keys, of which many then differ from them by numbers that 16 bits do not hold."""
    q, k, v = (tokens(1, 1, 96, 32, mean=m, dtype=torch.bfloat16, seed=i) for i, m in enumerate((0, 2, 5)))
    k[:, :, ::24] = 2
    compare_half(q, k, v, clusters=6, response="pooled")


def test_keys_are_measured_from_a_point_amid_them() -> None:
    """What dq loses grows with the distance from it. An outlier among the keys does not move it."""
    q, k, v = (tokens(1, 1, 256, 32, mean=m, dtype=torch.bfloat16, seed=i) for i, m in enumerate((0, 1, 5)))
    k[:, :, 0] = 100
    call = of_blocks(q, k, v, None, [0, 128, 256], 0.25)
    factors = triton_cluster.attention.forward(*call, False)[3].view(2, -1)
    away = factors[0, 3 * 32 : 4 * 32].float() - k[0, 0, 1:].float().mean(0)
    assert away.square().mean().sqrt() < 0.3


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("means", [(3, 5), (1, 30), (30, 0.5)])
@pytest.mark.parametrize("near", [0, 2])
def test_tokens_away_from_zero_cost_dq_no_digits_at_full_size(means: tuple[float, float], near: int) -> None:
    shapes = zip((0, *means), range(3), strict=True)
    q, k, v = (tokens(1, 2, 4096, 64, mean=m, dtype=torch.bfloat16, seed=i) for m, i in shapes)
    compare_half(q, k, v, clusters=32, near=near, near_rows=128, rank="mean", response="pooled")


def test_logits_that_overflow_an_exponential_do_no_harm() -> None:
    q, k, v = tokens(1, 1, 40, 16) * 40, tokens(1, 1, 64, 16) * 5, tokens(1, 1, 64, 16)
    compare(q, k, v, 5e-4, clusters=8, near=2, near_rows=32)
    assert cluster_attention(q, k, v, clusters=8, closure="gauss", backend="triton").isfinite().all()


@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value", "ignore:divide by zero")
@pytest.mark.parametrize(("clusters", "rank"), [(6, "mass"), (70, "mass"), (70, "mean")])
def test_tiles_with_a_query_that_is_not_a_number_still_list_clusters_that_exist(clusters: int, rank: str) -> None:
    q, k, v = tokens(1, 1, 64, 16), tokens(1, 1, 140, 16, mean=1), tokens(1, 1, 140, 16)
    q[0, 0, 3] = float("nan")
    starts = [-(-c * 140 // clusters) for c in range(clusters + 1)]
    call = of_blocks(q, k, v, None, starts, 0.25, tile=32, near=2, response=3, rank=rank)
    state = triton_cluster.attention.forward(*call, False)
    near, responding = (x[0].tolist() for x in state if x.dtype == torch.int32)
    assert [len({*tile} & {*range(clusters)}) for tile in near] == [2, 2]
    assert [len({*tile} & {*range(clusters)}) for tile in responding] == [3, 3]


def check_choices(batch: int, clusters: int, width: int, closure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of 19 tiles in groups of 16, one of them with a query that is not a number."""
    sizes = (600, 0), (140, 1), (140, 2)
    q, k, v = (tokens(batch, 2, L, width, mean=m, dtype=torch.bfloat16, seed=m) for L, m in sizes)
    q[0, 0, 3] = float("nan")
    starts = [-(-c * 140 // clusters) for c in range(clusters + 1)]
    call = of_blocks(q, k, v, None, starts, 0.25, tile=32, near=2, response=-2, rank="mean", closure=closure)
    lists = []
    for together in (True, False):
        monkeypatch.setattr(Plan, "by_products", lambda self, device, together=together: together)
        lists.append(triton_cluster.attention.forward(*call, False)[5])
    assert torch.equal(*lists)


@pytest.mark.filterwarnings("ignore:All-NaN", "ignore:invalid value")
@pytest.mark.parametrize(("clusters", "closure"), [(6, "tanh"), (70, "langevin")])
def test_tiles_choose_the_same_clusters_together_as_one_by_one(
    clusters: int, closure: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_choices(1, clusters, 32, closure, monkeypatch)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("clusters", [6, 40, 70, 140])
def test_tiles_choose_the_same_clusters_together_as_one_by_one_on_a_gpu(
    clusters: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_choices(2, clusters, 64, "tanh", monkeypatch)


def test_views_of_a_projection_are_read_in_place() -> None:
    B, L, H, D = 2, 40, 2, 24
    qkv = tokens(B, L, 3, H, D, mean=1).requires_grad_()
    exact = qkv.detach().double().requires_grad_()
    outs = []
    for x, backend in ((qkv, "triton"), (exact, "reference")):
        q, k, v = (part.transpose(1, 2) for part in x.unbind(2))
        out = cluster_attention(q, k, v, clusters=4, near=1, near_rows=32, backend=backend)
        out.square().sum().backward()
        outs.append(out)
    assert outs[0].transpose(1, 2).is_contiguous()
    assert error(outs[0], outs[1]) < FLOAT32
    assert error(qkv.grad, exact.grad) < FLOAT32


def test_two_runs_are_bitwise_equal() -> None:
    q, k, v = (tokens(1, 1, 70, 16, dtype=torch.bfloat16, seed=i) for i in range(3))
    runs = [results(q, k, v, "triton", q.dtype, clusters=5, near=2, near_rows=32, response=2) for _ in range(2)]
    for x, y in zip(*runs, strict=True):
        assert torch.equal(x, y)


def test_near_clusters_may_be_given() -> None:
    """Lists with holes: the same as softmax over the listed clusters beside the others far away."""
    q, k, v = (tokens(1, 1, 32, 16, seed=i) for i in range(3))
    which = torch.tensor([[1, -1]], dtype=torch.int32, device=DEVICE)
    starts = [0, 8, 16, 24, 32]
    out = triton_cluster.attention_of_blocks(q, k, v, which, starts, 0.25, tile=32, near=2)
    ids = torch.arange(32, device=DEVICE) // 8
    alone = ids.clone()
    alone[8:16] = 4 + torch.arange(8, device=DEVICE)  # every token of cluster 1 its own cluster: exact
    alone = torch.where(alone >= 2, alone - 1, alone)
    exact = cluster_attention(q.double(), k.double(), v.double(), clusters=alone, scale=0.25)
    assert error(out, exact) < FLOAT32


def test_gradients_leave_out_the_holes_of_given_lists() -> None:
    """A hole beside a cluster, where clusters are whole blocks of tokens: as if the list ended before it."""
    grads = []
    for listed in ([[1, -1]], [[1]]):
        inputs = [tokens(1, 1, 32, 32), *(tokens(1, 1, 128, 32, seed=i) for i in (1, 2))]
        inputs = [x.requires_grad_() for x in inputs]
        which = torch.tensor(listed, dtype=torch.int32, device=DEVICE)
        starts = [0, 32, 64, 96, 128]
        out = triton_cluster.attention_of_blocks(*inputs, which, starts, 0.25, tile=32, near=len(listed[0]))
        grads.append(torch.autograd.grad(out.square().sum(), inputs))
    for x, y in zip(*grads, strict=True):
        assert error(x, y) < FLOAT32


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"clusters": 4, "key_mask": True}, r"a key_mask of bool, got weights of torch\.float32; pass key_mask > 0"),
        ({"clusters": Blocks(1), "near": 17, "is_causal": True}, "take near up to 16, got 17"),
        ({"clusters": KMeans(4), "near": 1}, "got near_rows=1"),
        ({"clusters": 4, "near": 1}, "got near_rows=1"),
        ({"clusters": 4, "near": 4, "near_rows": 32}, "leaves nothing far away"),
        ({"clusters": 4, "near": "neighbours"}, "near as a number"),
        ({"clusters": 4, "variance": "full", "near": 1, "near_rows": 32}, 'variance="diagonal"'),
    ],
    ids=["weights", "causal", "kmeans", "near of each query", "all near", "neighbours", "full variance"],
)
def test_what_the_kernels_cannot_take_is_refused_by_name(options: dict[str, Any], reason: str) -> None:
    q = tokens(1, 2, 24, 16)
    if options.pop("key_mask", False):
        options["key_mask"] = torch.ones(1, 24, device=DEVICE)
    with pytest.raises(ValueError, match=f'backend="triton" cannot be used: .*{reason}'):
        cluster_attention(q, q, q, backend="triton", **options)
    if "is_causal" not in options:
        cluster_attention(q, q, q, **options)  # "auto" takes plain torch


def test_wide_heads_are_refused() -> None:
    wide = tokens(1, 1, 24, 65)
    with pytest.raises(ValueError, match=r"heads of torch\.float32 are at most 64 wide, got 65"):
        cluster_attention(wide, wide, wide, clusters=4, backend="triton")


def test_more_heads_than_a_grid_of_programs_has_are_refused() -> None:
    q = torch.zeros(1, 1, 4, 16, device=DEVICE).expand(65_536, 1, 4, 16)
    with pytest.raises(ValueError, match="at most 65,535 heads in a batch, got 65,536"):
        cluster_attention(q, q, q, clusters=4, near=1, near_rows=32, backend="triton")


def test_the_custom_ops_keep_their_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # opcheck compares memory bit by bit, and NaN differs from itself
    q, k, v = (tokens(1, 1, 20, 16, dtype=torch.bfloat16, seed=i).requires_grad_() for i in range(3))
    call = of_blocks(q, k, v, None, [0, 7, 14, 20], 0.25, tile=32, near=1, response=1)
    tables, numbers = call[3:7], call[7:]
    names = ("test_schema", "test_autograd_registration", "test_faketensor")
    operator = triton_cluster.attention
    torch.library.opcheck(operator.forward, (*call, True), test_utils=names)
    with torch.no_grad():
        out, *state = operator.forward(*call, True)
    tensors = (x if x is None else x.detach() for x in (out, q, k, v, *tables, out, *state))
    torch.library.opcheck(operator.backward, (*tensors, *numbers), test_utils=names)


def test_compiled_code_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()

    def function(*x: Tensor) -> Tensor:
        return cluster_attention(*x, clusters=(2, 2), grid=(6, 6), near=1, near_rows=32, backend="triton")

    found = []
    for call in (function, torch.compile(function, fullgraph=True, backend="aot_eager")):
        inputs = [tokens(1, 1, 36, 16, seed=i).requires_grad_() for i in range(3)]
        out = call(*inputs)
        found.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for x, y in zip(*found, strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("B", "H", "Lq", "Lk", "D", "E", "options"),
    [
        (2, 3, 4096, 4096, 64, 64, {"clusters": 64, "near": 2, "near_rows": 128}),
        (1, 2, 5001, 3333, 64, 64, {"clusters": 50, "near": 3, "near_rows": 64, "closure": "langevin"}),
        (1, 2, 2000, 2000, 128, 128, {"clusters": 20, "near": 1, "near_rows": 128, "response": 4}),
        (1, 2, 3000, 3000, 80, 40, {"clusters": 200, "near": 2, "near_rows": 128, "response": 16}),
        (
            1,
            2,
            8192,
            8192,
            64,
            64,
            {"clusters": 128, "near": 2, "near_rows": 128, "rank": "mean", "response": "pooled"},
        ),
        (
            1,
            2,
            4096,
            4096,
            96,
            96,
            {"clusters": (8, 8), "grid": (64, 64), "near": 4, "near_rows": 128, "rank": "mean", "response": "pooled"},
        ),
        (4, 3, 196, 196, 32, 32, {"clusters": (4, 4), "grid": (14, 14)}),
        (1, 1, 1000, 1000, 16, 24, {"clusters": 30, "near": 2, "near_rows": 32}),
    ],
    ids=["square", "cross", "wide", "many clusters", "pooled", "grid of wide heads", "grid", "narrow"],
)
def test_full_size(
    B: int, H: int, Lq: int, Lk: int, D: int, E: int, options: dict[str, Any], dtype: torch.dtype
) -> None:
    compare_full_size(B, H, Lq, Lk, D, E, dtype, options)


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_auto_takes_the_kernels_under_compile_autocast_and_graphs() -> None:
    options: dict[str, Any] = {"clusters": 16, "near": 2, "near_rows": 64}
    q, k, v = (torch.randn(2, 4, 1500, 64, device="cuda", requires_grad=True) for _ in range(3))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        eager = cluster_attention(q, k, v, **options)
        compiled = torch.compile(lambda *x: cluster_attention(*x, **options), fullgraph=True)(q, k, v)
        plain = cluster_attention(q, k, v, backend="reference", **options)
    assert eager.dtype == torch.bfloat16
    assert torch.equal(eager, compiled)
    assert not torch.equal(eager, plain)
    grads = [torch.autograd.grad(out.float().square().sum(), (q, k, v)) for out in (eager, compiled)]
    for a, b in zip(*grads, strict=True):
        assert torch.equal(a, b)
    with torch.no_grad():
        graph, half = torch.cuda.CUDAGraph(), [x.bfloat16() for x in (q, k, v)]
        cluster_attention(*half, **options)
        with torch.cuda.graph(graph):
            captured = cluster_attention(*half, **options)
        graph.replay()
        assert torch.equal(captured, cluster_attention(*half, **options))


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_memory_of_a_training_step_grows_as_the_length() -> None:
    def peak(L: int) -> int:
        inputs = [tokens(1, 2, L, 64, dtype=torch.bfloat16, seed=i).requires_grad_() for i in range(3)]
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        out = cluster_attention(*inputs, clusters=64, near=2, near_rows=128)
        torch.autograd.grad(out, inputs, torch.ones_like(out))
        return torch.cuda.max_memory_allocated() - before

    assert peak(32768) < 4.4 * peak(8192)


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    "options",
    [{"clusters": 3, "near": 1, "near_rows": 32}, {"clusters": Blocks(32), "is_causal": True}],
    ids=["near", "causal"],
)
@pytest.mark.parametrize(
    ("dtype", "keys", "values"), [(torch.float32, 1e3, 0.0), (torch.float32, 0.0, 1e3)], ids=["keys", "values"]
)
def test_tokens_far_from_zero_cost_neither_kernels_nor_plain_torch_any_digits(dtype, keys, values, masked, options):
    q, k, v = (tokens(1, 1, L, 16, seed=L + i) for i, L in enumerate((64, 96, 96)))
    mask = torch.rand(1, 96, device=DEVICE) > 0.2 if masked else None
    inputs, grad = [x.to(dtype) for x in (q, k + keys, v + values)], tokens(1, 1, 64, 16, seed=9).to(dtype)

    def all_of(backend, inputs):
        leaves = [x.detach().requires_grad_() for x in inputs]
        out = cluster_attention(*leaves, key_mask=mask, backend=backend, **options)
        return out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))

    exact = all_of("reference", [x.double() for x in inputs])
    for backend in ("triton", "reference"):
        for own, wanted in zip(all_of(backend, inputs), exact, strict=True):
            assert error(own, wanted) < (1e-6 if dtype == torch.float32 else 3 * 2**-9), backend
