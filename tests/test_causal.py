"""Causality, chunking, streaming and windows."""

import pytest
import torch
from oracles import relative

from cumulant import Moments, attention
from cumulant.causal import causal_attention
from cumulant.streaming import SlidingWindow

ORDERS = [(1, False), (2, False), (3, False), (3, True)]


def inputs(L, D=6, E=5, dtype=torch.float32):
    return (
        torch.randn(1, 2, L, D, dtype=dtype),
        torch.randn(1, 2, L, D, dtype=dtype) + 1,
        torch.randn(1, 2, L, E, dtype=dtype),
    )


@pytest.mark.parametrize(("order", "full"), ORDERS)
@pytest.mark.parametrize("cut", [1, 63, 64, 65, 100, 199])
def test_the_future_leaves_the_past_bit_equal(order, full, cut):
    q, k, v = inputs(200)
    before = attention(q, k, v, order=order, full=full, is_causal=True)
    for x in (q, k, v):
        x[..., cut:, :] = 1e3 * torch.randn_like(x[..., cut:, :])
    after = attention(q, k, v, order=order, full=full, is_causal=True)
    assert torch.equal(before[..., :cut, :], after[..., :cut, :])
    assert not torch.equal(before[..., cut:, :], after[..., cut:, :])


@pytest.mark.parametrize(("order", "full"), ORDERS)
def test_the_last_row_sees_everything(order, full):
    q, k, v = inputs(150, dtype=torch.float64)
    causal = attention(q, k, v, order=order, full=full, is_causal=True)
    whole = attention(q[..., -1:, :], k, v, order=order, full=full)
    assert relative(causal[..., -1:, :], whole) < 1e-12


@pytest.mark.parametrize(("order", "full"), ORDERS)
@pytest.mark.parametrize("chunk", [1, 7, 64, 200])
def test_the_chunk_size_does_not_matter(order, full, chunk):
    q, k, v = inputs(130, dtype=torch.float64)
    options = dict(order=order, full=full, weights=None, scale=0.4)
    chunked = causal_attention(q.unsqueeze(2), k, v, chunk=chunk, **options)
    assert relative(chunked.squeeze(2), attention(q, k, v, order=order, full=full, scale=0.4, is_causal=True)) < 1e-11


def test_memory_is_linear_in_length():
    """No saved tensor grows faster than the length: the prefix of states is one state per chunk but the first."""

    def saved(L):
        sizes = []
        tensors = [x.requires_grad_() for x in inputs(L, 64, 64)]
        with torch.autograd.graph.saved_tensors_hooks(lambda x: sizes.append(x.numel()) or x, lambda x: x):
            attention(*tensors, is_causal=True)
        return max(sizes)

    assert saved(4096) - saved(2048) == 2 * (saved(2048) - saved(1024))
    assert saved(2048) <= 2 * 2048 * 64 * 2  # the C x C scores or the features, nothing like L x D x E


@pytest.mark.parametrize(("order", "full"), ORDERS)
def test_appending_tokens_one_by_one_gives_the_causal_rows(order, full):
    q, k, v = inputs(90, dtype=torch.float64)
    rows = attention(q, k, v, order=order, full=full, is_causal=True)
    state = Moments.of(k[..., :0, :], v[..., :0, :], order=order, full=full)
    size = sum(x.numel() for x in state if x is not None)
    for t in range(90):
        now = slice(t, t + 1)
        state = state.merge(Moments.of(k[..., now, :], v[..., now, :], order=order, full=full))
        assert relative(state.apply(q[..., now, :]), rows[..., now, :]) < 1e-10
        assert sum(x.numel() for x in state if x is not None) == size, "a stream needs constant memory"


def test_a_float32_stream_of_a_hundred_thousand_tokens_stays_accurate():
    L, block = 100_000, 1000
    q, k, v = inputs(L)
    state = Moments.of(k[..., :0, :], v[..., :0, :])
    for t in range(0, L, block):
        state = state.merge(Moments.of(k[..., t : t + block, :], v[..., t : t + block, :]))
    exact = Moments.of(k.double(), v.double())
    assert relative(state.apply(q[..., :50, :]), exact.apply(q[..., :50, :].double())) < 1e-6


@pytest.mark.parametrize(("order", "full"), ORDERS)
@pytest.mark.parametrize("step", [1, 3, 20, 45])
def test_a_sliding_window_sees_the_last_tokens_only(order, full, step):
    q, k, v = inputs(90, dtype=torch.float64)
    window = SlidingWindow(20, order=order, full=full)
    for t in range(0, 90, step):
        now = slice(t, t + step)
        window.append(k[..., now, :], v[..., now, :])
        end = min(90, t + step)
        seen = slice(max(0, end - 20), end)
        exact = Moments.of(k[..., seen, :], v[..., seen, :], order=order, full=full).apply(q[..., :3, :])
        assert relative(window.apply(q[..., :3, :]), exact) < 1e-9


def test_a_long_window_keeps_float32_accuracy_even_after_an_outlier():
    """One token at a time, a window of 64; checked shortly after the outlier left and at the end.

    benchmarks/window.py does the same for 100,000 steps and prints the errors with and without rebuilding.
    """
    torch.manual_seed(1)
    steps, width = 3_000, 64
    k, v = torch.randn(1, steps, 4) + 3, torch.randn(1, steps, 4)
    k[:, 1_500] = 1e3
    q = torch.randn(1, 5, 4)
    window, worst = SlidingWindow(width), 0.0
    for t in range(steps):
        window.append(k[:, t : t + 1], v[:, t : t + 1])
        if t >= steps - 200 or 1_700 <= t < 1_900:
            seen = slice(t + 1 - width, t + 1)
            exact = Moments.of(k[:, seen].double(), v[:, seen].double()).apply(q.double())
            worst = max(worst, relative(window.apply(q), exact))
    assert worst < 1e-5


def test_window_errors_say_what_is_wrong():
    with pytest.raises(ValueError, match="at least 1"):
        SlidingWindow(0)
    with pytest.raises(ValueError, match="append"):
        SlidingWindow(3).apply(torch.randn(1, 2, 3))
    with pytest.raises(ValueError, match="same tokens"):
        SlidingWindow(3).append(torch.randn(1, 2, 3), torch.randn(1, 3, 3))


@pytest.mark.parametrize("normalization", ["mean", "sum"])
def test_the_first_token_has_a_gradient_as_exact_as_the_others(normalization):
    """It is the point that all others are measured from, which must leave no rounding of theirs in it."""
    q, k, v = inputs(1000)
    grads = []
    for dtype in (torch.float32, torch.float64):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, is_causal=True, normalization=normalization, backend="reference")
        grads.append(torch.autograd.grad(out.sum(), leaves[1:]))
    for ours, exact in zip(*grads, strict=True):
        error = (ours - exact).abs().amax(-1) / exact.abs().max()
        assert error[..., 0].max() < 4 * error[..., 1:].max()


def test_one_compiled_graph_serves_all_lengths_of_several_chunks():
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(
        lambda *x: attention(*x, order=1, is_causal=True, backend="reference"), dynamic=True, backend=counter
    )
    for L in (130, 200, 300):
        x = inputs(L)
        assert torch.equal(compiled(*x), attention(*x, order=1, is_causal=True, backend="reference"))
    assert counter.frame_count == 1
