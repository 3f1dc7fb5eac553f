"""Non-causal Triton kernels against `Moments` in float64, through Triton's interpreter or on the GPU if there is one.

Every test runs with fresh memory full of NaN, so that nothing is read before it is written.
"""

from __future__ import annotations

from functools import partial

import pytest
import torch
from kernel_checks import (  # noqa: F401
    DEVICE,
    beside_plain_torch,
    compare_empty,
    compare_packed,
    compare_runs,
    compare_views,
    compare_with,
    poisoned_memory,
    tokens,
)
from torch import Tensor

from cumulant.kernels import launch
from cumulant.kernels.batch import batch_of
from cumulant.kernels.dense import forward as dense_forward
from cumulant.kernels.dense import host as triton_dense
from cumulant.kernels.dense import plan as dense_plan
from cumulant.moments import Moments

TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 5e-3, torch.float16: 7e-4}


@pytest.fixture(params=["fused", "split"])
def path(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Both ways to compute: one program for a head, or spans of tokens and a merge."""
    monkeypatch.setattr(dense_plan, "SHORT", 10**9 if request.param == "fused" else -1)
    monkeypatch.setattr(dense_plan, "FILLING", 10**9)
    monkeypatch.setattr(dense_plan, "LEAST", 48)
    return str(request.param)


def reference(
    q: Tensor, k: Tensor, v: Tensor, weights: Tensor | None, order: int, scale: float, normalization: str = "mean"
) -> Tensor:
    H, G = k.shape[1], q.shape[1] // k.shape[1]
    state = Moments.of(k, v, order=order, key_mask=None if weights is None else weights.unsqueeze(1))
    out = state.apply(q.unflatten(1, (H, G)).flatten(2, 3), scale).unflatten(2, (G, q.shape[2])).flatten(1, 2)
    if normalization == "sum":
        W = torch.full_like(out[:, 0, 0, 0], k.shape[2]) if weights is None else weights.to(out.dtype).sum(-1)
        out = out * W[:, None, None, None]
    return out


compare = partial(compare_with, triton_dense.attention, reference)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize(
    ("B", "H", "G", "Lq", "Lk", "D", "E"),
    [(1, 2, 1, 1, 1, 16, 16), (2, 1, 1, 17, 63, 24, 40), (1, 1, 3, 65, 130, 40, 16), (1, 1, 1, 130, 65, 64, 64)],
)
def test_outputs_and_gradients_equal_the_reference(
    B: int, H: int, G: int, Lq: int, Lk: int, D: int, E: int, order: int
) -> None:
    q, k, v = tokens(B, H * G, Lq, D), tokens(B, H, Lk, D, mean=3, seed=1), tokens(B, H, Lk, E, mean=-2, seed=2)
    compare(q, k, v, None, order, TOLERANCE[torch.float32])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_inputs(order: int, dtype: torch.dtype) -> None:
    q, k, v = (tokens(1, 1, 70, 64, mean=m, dtype=dtype, seed=m) for m in (0, 1, 2))
    compare(q, k, v, None, order, TOLERANCE[dtype])


@pytest.mark.parametrize(("D", "E", "order"), [(144, 24, 3), (24, 136, 3), (256, 24, 2)])
def test_heads_wider_than_a_program(D: int, E: int, order: int) -> None:
    q, k, v = tokens(1, 1, 33, D), tokens(1, 1, 40, D, mean=1), tokens(1, 1, 40, E, mean=1)
    compare(q, k, v, None, order, TOLERANCE[torch.float32])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize(("kind", "normalization"), [("bool", "mean"), ("float", "sum")])
def test_absent_tokens_reach_nothing_even_as_nan(kind: str, normalization: str) -> None:
    q, k, v = tokens(3, 1, 20, 16), tokens(3, 1, 130, 16, mean=5), tokens(3, 1, 130, 24, mean=5)
    weights = tokens(3, 130).abs() * (tokens(3, 130, seed=3) > 0)
    weights[0] = 0  # a row without keys
    weights[1, :100] = 0  # the first blocks of it without keys
    if kind == "bool":
        weights = weights > 0
    absent = (weights == 0)[:, None, :, None]
    k, v = k.masked_fill(absent, float("nan")), v.masked_fill(absent, float("inf"))
    compare(q, k, v, weights, 3, 5e-6, normalization)
    assert not triton_dense.attention(q[:1], k[:1], v[:1], weights[:1], 3, 0.25, normalization).any()


@pytest.mark.usefixtures("path")
def test_sum_normalization_without_a_mask() -> None:
    q, k, v = tokens(1, 1, 20, 16), tokens(1, 1, 50, 16, mean=1), tokens(1, 1, 50, 16, mean=1)
    compare(q, k, v, None, 3, TOLERANCE[torch.float32], "sum")


@pytest.mark.usefixtures("path")
def test_views_of_a_projection_are_read_in_place() -> None:
    compare_views(triton_dense.attention, reference, 50, TOLERANCE[torch.float32])


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("order", [2, 3])
def test_a_packed_batch_equals_a_loop_over_its_sequences(order: int) -> None:
    both = [5, 0, 20, 1], [65, 3, 0, 70]
    compare_packed(triton_dense.attention, reference, both, order, TOLERANCE[torch.float32])


@pytest.mark.parametrize("order", [2, 3])
def test_more_spans_than_are_merged_at_a_time(order: int, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, number in (("SHORT", -1), ("FILLING", 10**9), ("LEAST", 16)):
        monkeypatch.setattr(dense_plan, name, number)
    q, k, v = tokens(1, 1, 330, 16), tokens(1, 1, 330, 16, mean=20), tokens(1, 1, 330, 24, mean=-3)
    k = k + torch.linspace(0, 5, 330, device=DEVICE)[:, None]  # spans whose means differ
    plan = dense_plan.plan_for(batch_of(q, k, v, None, order, 0.25))
    assert plan.span("partial_moments", 330, 1, plan.config("partial_moments", 330).block)[1] > dense_plan.MERGED
    weights = torch.ones(1, 330, dtype=torch.bool, device=DEVICE)
    weights[:, :100] = False  # the first spans without keys
    compare(q, k, v, None if order == 2 else weights, order, 1e-5)


@pytest.mark.usefixtures("path")
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize(("of_keys", "of_values"), [(100, 0), (0, 100), (-30, 30)])
def test_tokens_far_from_zero_cost_no_digits(of_keys: int, of_values: int, order: int) -> None:
    """bfloat16 tokens a hundred spreads away: at most twice the error of the plain version in the same precision."""
    q = tokens(1, 2, 96, 32, dtype=torch.bfloat16)
    v = tokens(1, 2, 200, 32, mean=of_values, dtype=torch.bfloat16, seed=1)
    k = tokens(1, 2, 200, 32, mean=of_keys, dtype=torch.bfloat16, seed=2)
    grad = tokens(1, 2, 96, 32, dtype=torch.bfloat16, seed=3)
    found = beside_plain_torch(triton_dense.attention, reference, q, k, v, grad, order)
    for name, (ours, plain) in found.items():
        assert ours < 2 * plain + 1e-4, name


@pytest.mark.usefixtures("path")
def test_float32_keys_a_thousand_spreads_away() -> None:
    q, k, v = tokens(1, 1, 65, 16), tokens(1, 1, 200, 16, mean=1000), tokens(1, 1, 200, 16)
    compare(q, k, v, None, 3, 2e-4)


@pytest.mark.usefixtures("path")
def test_an_outlier_among_the_first_tokens_does_no_harm() -> None:
    q, k, v = (tokens(1, 1, 130, 32, dtype=torch.bfloat16, seed=i) for i in range(3))
    k[:, :, 0] *= 100
    compare(q, k, v, None, 3, 1e-2)


@pytest.mark.usefixtures("path")
def test_two_runs_are_bitwise_equal() -> None:
    compare_runs(triton_dense.attention, 2, 130)


def test_no_state_is_kept_without_gradients() -> None:
    q, k, v = (tokens(1, 1, 8, 16, seed=i) for i in range(3))
    _, matrices, vectors = triton_dense.attention.forward(q, k, v, None, None, None, 8, 8, 3, 0.25, False, False)
    assert matrices.numel() == 0
    assert vectors.numel() == 0


def test_empty_batches_and_lengths() -> None:
    compare_empty(triton_dense.attention)


def test_the_custom_ops_keep_their_promises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()  # opcheck compares memory bit by bit, and NaN differs from itself
    q, k, v = (tokens(1, 2, 20, 16, seed=i).requires_grad_() for i in range(3))
    weights = torch.ones(1, 20, dtype=torch.bool, device=DEVICE)
    arguments = (q, k, v, weights, None, None, 20, 20, 3, 0.25, False, True)
    torch.library.opcheck(triton_dense.attention.forward, arguments)
    with torch.no_grad():
        out, matrices, vectors = triton_dense.attention.forward(*arguments)
    state = (out, q, k, v, weights, None, None, matrices, vectors, 20, 20, 3, 0.25, False)
    state = tuple(x.detach() if isinstance(x, Tensor) else x for x in state)
    torch.library.opcheck(triton_dense.attention.backward, state)


def test_compiled_code_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    compiled = torch.compile(triton_dense.attention, fullgraph=True, backend="aot_eager")
    results = []
    for function in (triton_dense.attention, compiled):
        inputs = [tokens(1, 2, 40, 16, seed=i).requires_grad_() for i in range(3)]
        out = function(*inputs, None, 3, 0.25)
        results.append([out, *torch.autograd.grad(out.square().sum(), inputs)])
    for x, y in zip(*results, strict=True):
        assert torch.equal(x, y)


def test_kernels_are_available_here() -> None:
    assert launch.available(tokens(1))
    assert not launch.available(tokens(1).double())


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("B", "H", "G", "Lq", "Lk", "D", "E"),
    [(32, 12, 1, 197, 197, 64, 64), (2, 3, 4, 4096, 1777, 64, 64), (1, 2, 1, 70000, 70000, 128, 80),
     (2, 2, 1, 1000, 1000, 256, 256), (300, 1, 1, 64, 64, 32, 32)],
)  # fmt: skip
def test_full_size(B: int, H: int, G: int, Lq: int, Lk: int, D: int, E: int, order: int, dtype: torch.dtype) -> None:
    q = tokens(B, H * G, Lq, D, dtype=dtype)
    k, v = tokens(B, H, Lk, D, mean=1, dtype=dtype, seed=1), tokens(B, H, Lk, E, mean=0.5, dtype=dtype, seed=2)
    compare(q, k, v, None, order, 2e-5 if dtype == torch.float32 else TOLERANCE[dtype])
    weights = tokens(B, Lk) > 0
    compare(q, k, v, weights, order, 2e-5 if dtype == torch.float32 else TOLERANCE[dtype])


@pytest.mark.gpu
@pytest.mark.skipif(DEVICE == "cpu", reason="needs a GPU")
def test_no_length_recompiles_a_kernel() -> None:
    def run(L: int) -> int:
        q, k, v = (tokens(2, 2, L, 64, dtype=torch.bfloat16, seed=i) for i in range(3))
        triton_dense.attention(q, k, v, None, 3, 0.125)
        return sum(len(cache[0]) for cache in dense_forward.fused_forward.device_caches.values())

    first = run(128)
    assert [run(L) for L in (129, 200, 333, 400)] == [first] * 4


def test_backward_passes_are_cut_so_that_the_last_round_of_programs_is_full() -> None:
    """384 heads of 4,096 tokens on 132 multiprocessors: the second round of two programs each would be half empty."""

    def plan(order: int, sequences: int, length: int) -> dense_plan.Plan:
        sizes = (64, 64, 64, 64, length, length)
        return dense_plan.Plan(order, False, False, sequences, 12, 1, *sizes, torch.bfloat16, "ieee", 132)

    assert [plan(3, B, 4096).fused_backward for B in (22, 32, 44)] == [True, False, True]
    assert plan(3, 661, 197).fused_backward
    assert plan(2, 32, 4096).fused_backward
    assert plan(2, 32, 4096).config("fused_backward", 4096) == dense_plan.THREE_STAGES
    assert plan(2, 83, 1568).config("fused_backward", 1568) == dense_plan.FOUR_STAGES
    assert plan(3, 256, 64).config("fused_backward", 64).block == 32
