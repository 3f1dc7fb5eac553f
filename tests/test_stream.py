import pytest
import torch
from oracles import relative

from cumulant import Moments, attention
from cumulant.kernels import launch
from cumulant.streaming import SlidingWindow, Stream


@pytest.fixture(params=[False, True], ids=["plain", "kernel"])
def either_path(request, monkeypatch):
    """Steps by plain torch, then by the kernel."""
    if not request.param:
        monkeypatch.setattr(launch, "available", lambda x: False)
    elif not launch.INTERPRET:
        pytest.skip("the kernel runs on the CPU through the interpreter")


@pytest.mark.usefixtures("either_path")
@pytest.mark.parametrize(("order", "full"), [(1, False), (2, False), (3, False), (3, True)])
@pytest.mark.parametrize(("D", "E", "groups"), [(8, 8, 1), (20, 24, 3)])
def test_decoding_step_by_step_gives_the_causal_rows(order, full, D, E, groups):
    q, k, v = torch.randn(2, 2 * groups, 30, D), torch.randn(2, 2, 30, D) + 5, torch.randn(2, 2, 30, E)
    rows = attention(
        q.double(), k.double(), v.double(), order=order, full=full, is_causal=True, enable_gqa=True, scale=0.3
    )
    prompted, fresh = Stream(order=order, full=full), Stream(order=order, full=full)
    prompted.append(k[:, :, :10], v[:, :, :10])
    for t in range(30):
        token = q[:, :, t : t + 1], k[:, :, t : t + 1], v[:, :, t : t + 1]
        assert relative(fresh.step(*token, scale=0.3), rows[:, :, t : t + 1]) < 1e-5
        if t >= 10:
            assert relative(prompted.step(*token, scale=0.3), rows[:, :, t : t + 1]) < 1e-5


def test_a_step_of_more_than_one_token_is_refused():
    x = torch.randn(1, 2, 3, 4)
    with pytest.raises(ValueError, match="one token"):
        Stream().step(x, x, x)
    one = torch.randn(1, 2, 1, 4)
    with pytest.raises(ValueError, match=r"query heads \(3\) must be a multiple of key heads \(2\)"):
        Stream().step(torch.randn(1, 3, 1, 4), one, one)
    x = torch.randn(1, 2, 1, 5)
    with pytest.raises(ValueError, match=r"query and key must have the same batch and width, got .*5.* and .*4"):
        Stream().step(x, one, one)
    with pytest.raises(ValueError, match="key and value must have the same tokens"):
        Stream().step(one, one, one[:, :1])


@pytest.mark.usefixtures("either_path")
def test_a_state_of_other_sizes_or_strides_is_never_read_as_if_it_fitted():
    """A kernel that took its layout for granted would read and write beyond it."""
    q, k, v = (torch.randn(3, 2, 6, 4) for _ in range(3))
    token = q[:, :, 5:], k[:, :, 5:], v[:, :, 5:]
    k[1:, :, :5], v[1:, :, :5] = k[:1, :, :5], v[:1, :, :5]  # all batches begin with the same five tokens
    row = attention(q, k, v, is_causal=True)[:, :, 5:]

    shared = Stream()
    shared.append(k[:1, :, :5], v[:1, :, :5])
    assert relative(shared.step(*token), row) < 1e-5

    strided = Stream()
    strided.append(k[:, :, :5].repeat_interleave(2, 0), v[:, :, :5].repeat_interleave(2, 0))
    strided.state = Moments._make(x[::2] for x in strided.state)  # every second of the batch goes on
    assert relative(strided.step(*token), row) < 1e-5

    wide = torch.randn(3, 2, 1, 7)
    with pytest.raises(ValueError, match="as wide as those before, 4 and 4, got 7 and 4"):
        strided.step(wide, wide, v[:, :, 5:])


@pytest.mark.usefixtures("either_path")
def test_autocast_does_not_narrow_the_state():
    """In 16 bits, a sum of 256 tokens would take in no more."""
    q, k, v = (torch.randn(1, 2, 300, 4) for _ in range(3))
    stream = Stream()
    with torch.autocast("cpu", dtype=torch.bfloat16):
        stream.append(k[:, :, :299], v[:, :, :299])
        out = stream.step(q[:, :, 299:], k[:, :, 299:], v[:, :, 299:])
    assert all(x.dtype in (torch.float32, torch.float64) for x in stream.state)
    assert relative(out, attention(q[:, :, 299:], k, v)) < 1e-5


def test_streams_of_orders_and_windows_that_do_not_exist_are_refused():
    for make in (Stream, lambda **o: SlidingWindow(4, **o)):
        with pytest.raises(ValueError, match="order must be 1, 2 or 3, got 4"):
            make(order=4)
        with pytest.raises(ValueError, match="needs order=3, got order=2"):
            make(order=2, full=True)
    for window in (0, 2.5, True):
        with pytest.raises(ValueError, match=f"window must be a number of tokens, at least 1, got {window}"):
            SlidingWindow(window)
