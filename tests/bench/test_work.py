"""Work is counted, not declared: the count must agree with torch's own and with the formulas."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cumulant.bench.variants import parse
from cumulant.bench.work import WorkCounter, work_of
from cumulant.call import Call

L, D = 48, 8


def tokens(length=L, dim=D):
    return torch.randn(3, 1, 1, length, dim, generator=torch.Generator().manual_seed(0)).unbind()


@pytest.mark.parametrize(
    "name", ["softmax", "linear", "cumulant2", "cumulant3", "cumulant3+full", "flow", "rala", "agent", "combiner"]
)
def test_multiply_adds_are_half_of_what_torch_counts(name):
    variant = parse(name)
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as torchs:
        variant.plain()(*tokens())
    assert 2 * work_of(variant, Call(*tokens())).multiply_adds == torchs.get_total_flops() > 0


@pytest.mark.parametrize(("name", "formula"), [("softmax", L * L * 2 * D), ("cumulant2", 2 * L * D * D)])
def test_multiply_adds_follow_the_formula(name, formula):
    assert work_of(parse(name), Call(*tokens())).multiply_adds == formula


@pytest.mark.parametrize(("name", "factor"), [("softmax", 4), ("linear", 2), ("cumulant3", 2), ("hierarchical", 2)])
def test_twice_the_tokens_are_twice_or_four_times_the_work(name, factor):
    short, long = (work_of(parse(name), Call(*tokens(n))).total for n in (256, 512))
    assert long / short == pytest.approx(factor, rel=0.05)


def test_other_steps_are_counted_once_for_each_number_and_moves_not_at_all():
    x = torch.ones(10, 20)
    with torch.no_grad(), WorkCounter() as counter:
        y = torch.cat([x, x]).T.contiguous()  # moved
        y.exp().sum()  # 400 and 400
    assert counter.work.multiply_adds == 0
    assert counter.work.other == 800


def test_solving_a_system_is_counted():
    with torch.no_grad(), WorkCounter() as counter:
        torch.linalg.solve(torch.eye(6).expand(5, 6, 6), torch.ones(5, 6, 2))
    assert counter.work.multiply_adds == 5 * (6**3 // 3 + 6 * 6 * 2)


@torch.library.custom_op("bench_test::hidden", mutates_args=())
def hidden(x: torch.Tensor) -> torch.Tensor:
    return x @ x


def test_a_fused_operation_is_not_counted_as_nothing():
    with torch.no_grad(), WorkCounter(), pytest.raises(RuntimeError, match="cannot be counted"):
        hidden(torch.ones(3, 3))


def test_giving_a_result_another_shape_is_no_work():
    a, b = torch.ones(1, 2, 5, 4), torch.ones(1, 2, 4, 6)
    with torch.no_grad(), WorkCounter() as counter:
        (a @ b).transpose(1, 2).reshape(5, 12)
        a.diag_embed()
    assert (counter.work.multiply_adds, counter.work.other) == (2 * 5 * 4 * 6, 0)
