"""A call on a CPU whose cores others want too: each parallel region is a wait for the scheduler, so there are few.
On cores of its own a call runs torch's operations on all of them; how long that took says which it is.

What that costs is measured by benchmarks/cpu_shared.py.
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from cumulant import attention
from cumulant.kernels import workers
from cumulant.kernels.dense import cpu, tiles

NO_WORK = ("empty", "view", "reshape", "AccumulateGrad", "_Attention")  # memory, and what stands around the work


@pytest.fixture
def regions(monkeypatch):
    """Tasks of each parallel region that is entered, with three threads."""
    entered = []

    def counted(task, items):
        entered.append(len(items))
        return workers.side_by_side(task, items)

    monkeypatch.setattr(cpu, "side_by_side", counted)
    monkeypatch.setattr(workers, "_POOLS", {})
    monkeypatch.setattr(cpu.PACE, "until", float("inf"))  # others want the cores
    monkeypatch.setattr(workers.torch, "set_num_threads", lambda count: None)  # or all tests after this one have three
    monkeypatch.setattr(workers.torch, "get_num_threads", lambda: 3)
    return entered


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("batch", "heads", "length", "passes"), [(1, 4, 197, 1), (16, 4, 197, 1), (1, 4, 4096, 2)])
def test_a_pass_has_one_parallel_region_or_two_where_heads_are_few(
    regions, order, masked, batch, heads, length, passes
):
    """Never more than it has products over the tokens: moments, rows; gradients of the queries, of the keys."""
    tokens = [torch.randn(batch, heads, length, 64, requires_grad=True) for _ in range(3)]
    grad, mask = torch.ones(batch, heads, length, 64), torch.rand(batch, length) > 0.3 if masked else None
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:  # this thread alone
        out = attention(*tokens, order=order, key_mask=mask)
        forward = list(regions)
        torch.autograd.grad(out, tokens, grad)
    assert len(forward) == passes
    assert len(regions) == 2 * passes
    assert all(1 < count <= 8 for count in regions) or batch * heads * length * 64 < 2 * tiles.SHARE
    large = {
        event.name
        for event in seen.events()
        if any(torch.Size(shape).numel() >= tiles.GRAIN for shape in event.input_shapes or [])
    }
    assert not {name for name in large if not any(part in name for part in NO_WORK)}, large


def test_a_task_runs_on_one_thread():
    """A thread's first operation takes the number of threads that all have, unless it was asked before."""
    before = torch.get_num_threads()
    try:
        torch.set_num_threads(2)
        found = workers.side_by_side(lambda x: (x, torch.ones(8).sum() and torch.get_num_threads()), [1, 2, 3])
        assert found == [(1, 1), (2, 1), (3, 1)]
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_an_error_of_a_task_is_raised_where_it_was_asked_for(regions):
    with pytest.raises(ZeroDivisionError):
        workers.side_by_side(lambda x: 1 / x, [2, 0, 1])
    assert workers.side_by_side(lambda x: x + 1, [2, 0, 1]) == [3, 1, 2]


def test_cores_are_ours_until_two_calls_in_a_row_come_late(monkeypatch):
    """The best of a kind says what a call should take; the next try comes later each time."""
    clock = [100.0]
    monkeypatch.setattr(workers, "monotonic", lambda: clock[0])
    pace = workers.Pace()
    for seconds in (0.5, 0.01, 0.5, 0.02):  # the first has nothing to be compared with, one late call is chance
        pace.took("kind", 1000, seconds, seconds)
        assert pace.ours()
    pace.took("another", 1000, 0.5, 0.5)
    pace.took("another", 1000, 0.5, 0.5)
    assert pace.ours()
    pace.took("kind", 1000, 0.5, 0.5)
    for wait in (workers.PAUSE, 2 * workers.PAUSE):  # a late try is one more in the row
        pace.took("kind", 1000, 0.5, 0.5)
        assert not pace.ours()
        clock[0] += 0.99 * wait
        assert not pace.ours()
        clock[0] += 0.02 * wait
        assert pace.ours()
    pace.took("kind", 1000, 0.01, 0.01)
    assert pace.pause == workers.PAUSE


def test_short_forward_passes_do_not_excuse_late_backward_ones():
    pace = workers.Pace()
    pace.took("backward", 1000, 0.003, 0.003)
    for _ in range(2):
        assert pace.ours()
        pace.took("forward", 1000, 0.001, 0.001)
        pace.took("backward", 1000, 0.07, 0.07)
    assert not pace.ours()


def test_a_thread_that_hardly_runs_has_no_cores_of_its_own():
    """Also where no call was ever quick."""
    pace = workers.Pace()
    pace.took("kind", 1000, 0.5, 0.1)
    assert pace.ours()
    pace.took("kind", 1000, 0.5, 0.1)
    assert not pace.ours()


def test_a_call_on_cores_of_its_own_has_few_operations_over_all_tokens(monkeypatch):
    """Each is a parallel region: 15 forward at order 3 where the two products have 2."""
    monkeypatch.setattr(cpu.PACE, "until", 0.0)
    monkeypatch.setattr(workers.torch, "get_num_threads", lambda: 3)
    q, k, v = (torch.randn(1, 12, 1024, 64) for _ in range(3))
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:
        attention(q, k, v)
    large = [
        event.name
        for event in seen.events()
        if any(torch.Size(shape).numel() >= 12 * 1024 * 64 for shape in event.input_shapes or [])
    ]
    work = ("bmm", "sub", "sum", "mul", "copy", "add")
    assert 4 <= sum(any(part in name for part in work) for name in large) <= 15, large
