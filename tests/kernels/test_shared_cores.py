"""A call on a CPU whose cores others want too: each parallel region is a wait for the scheduler, so there are few.

What that costs is measured by benchmarks/cpu_shared.py.
"""

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from cumulant import attention
from cumulant.kernels import workers
from cumulant.kernels.dense import cpu

GRAIN = 32768  # numbers from which on torch cuts an operation into shares of its threads
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
    monkeypatch.setattr(workers.torch, "set_num_threads", lambda count: None)  # or all tests after this one have three
    monkeypatch.setattr(workers.torch, "get_num_threads", lambda: 3)
    return entered


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("batch", "length"), [(16, 197), (2, 4096)])
def test_a_call_has_two_parallel_regions_and_its_gradients_two_more(regions, order, masked, batch, length):
    """As many as its products over the tokens: moments, rows; gradients of the queries, of the keys."""
    tokens = [torch.randn(batch, 4, length, 64, requires_grad=True) for _ in range(3)]
    grad, mask = torch.ones(batch, 4, length, 64), torch.rand(batch, length) > 0.3 if masked else None
    with profile(activities=[ProfilerActivity.CPU], record_shapes=True) as seen:  # this thread alone
        out = attention(*tokens, order=order, key_mask=mask)
        forward = list(regions)
        torch.autograd.grad(out, tokens, grad)
    assert len(forward) == 2
    assert len(regions) == 4
    assert min(regions) > 1
    large = {
        event.name
        for event in seen.events()
        if any(torch.Size(shape).numel() >= GRAIN for shape in event.input_shapes or [])
    }
    assert not {name for name in large if not any(part in name for part in NO_WORK)}, large
