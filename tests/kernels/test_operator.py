"""What `Operator` makes of a call, its forward and backward pass, on an operator without kernels."""

from __future__ import annotations

from typing import NamedTuple

import pytest
import torch
from torch import Tensor

from cumulant.kernels.operator import Operator

seen: list[tuple[str, bool]] = []


class Call(NamedTuple):
    query: Tensor
    key: Tensor
    value: Tensor
    shift: Tensor | None
    factor: float = 2.0


def empty(call: Call, keep: bool) -> tuple[Tensor, Tensor]:
    return torch.empty_like(call.query), torch.empty_like(call.query if keep else call.query[:0])


def forward(call: Call, keep: bool) -> tuple[Tensor, Tensor]:
    """factor q k + v (+ shift), keeping factor k."""
    out, kept = empty(call, keep)
    seen.append(("forward", keep))
    assert call.query.stride(-1) == 1
    times = call.factor * call.key
    torch.add(call.query * times, call.value if call.shift is None else call.value + call.shift, out=out)
    return out, kept.copy_(times) if keep else kept


def backward(call: Call, grad: Tensor, kept: Tensor) -> tuple[Tensor, ...]:
    seen.append(("backward", True))
    assert grad.stride(-1) == 1
    return grad * kept, call.factor * grad * call.query, grad.clone()


operator = Operator("test_operator", Call, forward, backward, empty, states=1)


@pytest.fixture(autouse=True)
def nothing_seen() -> None:
    seen.clear()


def draw(**options: bool) -> list[Tensor]:
    return [torch.randn(1, 2, 5, 8).requires_grad_(**options) for _ in range(3)]


def expected(query: Tensor, key: Tensor, value: Tensor, shift: Tensor | None, factor: float) -> Tensor:
    return factor * query * key + value + (0 if shift is None else shift)


@pytest.mark.parametrize("shift", [None, torch.ones(8)], ids=["no shift", "a shift"])
@pytest.mark.parametrize("compiled", [False, True], ids=["called", "compiled"])
def test_outputs_and_gradients_whoever_calls(shift: Tensor | None, compiled: bool) -> None:
    call = torch.compile(operator, fullgraph=True, backend="aot_eager") if compiled else operator
    inputs = draw()
    found, wanted = call(*inputs, shift, factor=3.0), expected(*inputs, shift, 3.0)
    torch.testing.assert_close(found, wanted)
    grad = torch.randn(1, 2, 8, 5).mT
    torch.testing.assert_close(*(torch.autograd.grad(x, inputs, grad) for x in (found, wanted)))
    assert seen == [("forward", True), ("backward", True)]


def test_no_state_is_asked_for_where_no_gradient_is_wanted() -> None:
    operator(*draw(requires_grad=False), None)
    with torch.no_grad():
        operator(*draw(), None)
    assert seen == [("forward", False), ("forward", False)]


def test_the_registered_operators_keep_their_promises() -> None:
    inputs = draw()
    torch.library.opcheck(operator.forward, (*inputs, torch.ones(8), 2.0, True))
    out, kept = operator.forward(*inputs, None, 2.0, True)
    torch.library.opcheck(operator.backward, (out.detach(), *(x.detach() for x in inputs), None, kept.detach(), 2.0))


def test_columns_that_are_not_contiguous_are_copied() -> None:
    inputs = [torch.randn(1, 2, 8, 5).mT for _ in range(3)]
    torch.testing.assert_close(operator(*inputs, None), expected(*inputs, None, 2.0))


@pytest.mark.parametrize("weight", [1.0, None], ids=["constant gradient", "gradient of its own"])
def test_a_second_derivative_is_refused_with_what_to_do_and_never_0_in_silence(weight: float | None) -> None:
    q, k, v = (torch.randn(2, 3, requires_grad=True) for _ in range(3))
    out = operator(q, k, v, None)
    (first,) = torch.autograd.grad(out.sum() if weight else out.square().sum(), q, create_graph=True)
    assert first.requires_grad
    for ask in (
        lambda: torch.autograd.grad(first.square().sum(), k, allow_unused=True, retain_graph=True),
        lambda: (out.sum() + first.square().sum()).backward(),
    ):
        with pytest.raises(RuntimeError, match=r'first derivatives only; plain torch has all.*backend="reference"'):
            ask()


def test_saved_tensors_are_unpacked_once_also_where_a_graph_of_gradients_is_asked_for() -> None:
    q, k, v = (torch.randn(2, 3, requires_grad=True) for _ in range(3))
    unpacked: list[int] = []

    def unpack(x: Tensor) -> Tensor:
        unpacked.append(id(x))
        return x

    with torch.autograd.graph.saved_tensors_hooks(lambda x: x, unpack):
        out = operator(q, k, v, None)
    torch.autograd.grad(out.sum(), q, create_graph=True)
    assert len(unpacked) == len(set(unpacked))
