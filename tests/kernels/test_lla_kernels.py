"""Triton kernels of local linear attention against a direct solve in float64, in Triton's interpreter or on a GPU.

Every test runs with fresh memory full of NaN, so that nothing is read before it is written.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_checks import DEVICE, error, poisoned_memory, tokens  # noqa: F401
from torch import Tensor

from cumulant.call import Call
from cumulant.kernels.lla import backward, forward, plan
from cumulant.kernels.lla import host as triton_lla
from cumulant.zoo import lla

NAMES = ("out", "dq", "dk", "dv", "d_ridge")
FLOAT32 = 2e-5  # the solver stops at a residual of 1e-6


def kernels(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """`lla` by the kernels, wherever the tensors are."""
    call, options = Call.split(query, key, value, options)
    call = call.prepared()
    ridge, qk_norm = options.pop("ridge", 10.0), options.pop("qk_norm", False)
    chosen = {"solver": "cg", "iterations": 64, "tolerance": 1e-12, "precondition": False}
    settings = lla._settings(call, block=64, **chosen | options)
    assert lla._obstacle(call, settings) is None
    return lla.by_kernels(call, ridge, qk_norm, settings)


def plain(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """The same in torch operations on the CPU, where no kernel is taken."""
    moved = {name: x.cpu() if isinstance(x, Tensor) else x for name, x in options.items()}
    return lla.LLA(query.cpu(), key.cpu(), value.cpu(), **moved).to(query.device)


def results(function: Any, inputs: tuple[Tensor, ...], dtype: torch.dtype, **options: Any) -> list[Tensor]:
    """The output and the gradients of q, k, v and of a ridge for each row."""
    q, k, v, ridge = inputs
    leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
    leaves.append(ridge.detach().to(torch.float64 if dtype == torch.float64 else torch.float32).requires_grad_())
    out = function(*leaves[:3], ridge=leaves[3], **options)
    assert out.dtype == dtype
    grad = tokens(*q.shape[:-1], v.shape[-1], seed=7).to(q.dtype).to(dtype)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def errors(function: Any, inputs: tuple[Tensor, ...], **options: Any) -> dict[str, float]:
    ours = results(function, inputs, inputs[0].dtype, **options)
    exact = results(plain, inputs, torch.float64, solver="direct", **options)
    return {name: error(x, y) for name, x, y in zip(NAMES, ours, exact, strict=True)}


def draw(L: int, S: int, D: int, E: int, *, heads: int = 1, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    q = tokens(2, heads, L, D, dtype=dtype)
    k, v = tokens(2, heads, S, D, mean=1, seed=1, dtype=dtype), tokens(2, heads, S, E, mean=-1, seed=2, dtype=dtype)
    return q, k, v, tokens(2, heads, L, seed=3).abs() + 0.3


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("L", "S", "D", "E"), [(1, 1, 1, 1), (17, 35, 24, 40), (70, 67, 16, 20), (33, 5, 3, 16)])
def test_outputs_and_gradients_equal_a_direct_solve_in_float64(L, S, D, E, is_causal):
    found = errors(kernels, draw(L, S, D, E), is_causal=is_causal)
    if S == 1:  # one key leaves no slope: all gradients but that of its value are 0, up to rounding
        found = {name: found[name] for name in ("out", "dv")}
    assert all(value < FLOAT32 for value in found.values()), found  # NaN is not below it


@pytest.mark.parametrize("kind", ["bool", "weights"])
def test_masked_keys_count_for_nothing_and_a_row_without_keys_is_0(kind):
    q, k, v, ridge = draw(19, 21, 16, 16)
    mask = tokens(2, 21, seed=4) > -0.3
    mask[0, :3], mask[1] = False, False
    weights = mask if kind == "bool" else mask * tokens(2, 21, seed=5).abs()
    spoiled = [x.masked_fill(~mask[:, None, :, None], float("nan")) for x in (k, v)]
    how: dict[str, Any] = {"key_mask": weights, "is_causal": True, "solver": "direct"}
    found = results(kernels, (q, *spoiled, ridge), torch.float32, key_mask=weights, is_causal=True)
    rounded, exact = (results(plain, (q, *spoiled, ridge), dtype, **how) for dtype in (torch.float32, torch.float64))
    for name, x, y, z in zip(NAMES, found, rounded, exact, strict=True):
        assert error(x, z) < 2 * error(y, z) + 1e-6, name
    assert not found[0][1].any()
    assert not found[0][0, :, :3].any()


def test_strided_and_grouped_heads_with_unit_queries_and_keys():
    q, k = tokens(2, 18, 4, 16).transpose(1, 2), tokens(2, 2, 16, 23, mean=1).mT
    v = tokens(2, 2, 23, 32, seed=2)[..., ::2]
    found = errors(kernels, (q, k, v, tokens(2, 4, 18).abs() + 0.1), enable_gqa=True, qk_norm=True, scale=3.0)
    assert all(value < FLOAT32 for value in found.values()), found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_16_bits_are_at_most_twice_as_far_off_as_torch_in_float32_rounded_once(dtype, is_causal):
    inputs = draw(40, 65, 32, 32, dtype=dtype)
    ours, torch_ = (errors(function, inputs, is_causal=is_causal) for function in (kernels, plain))
    del ours["d_ridge"]  # never rounded: it is compared with float32's own below
    assert all(value < 2 * torch_[name] for name, value in ours.items()), (ours, torch_)


def test_the_gradient_of_the_ridge_keeps_more_digits_than_the_inputs_have():
    found = errors(kernels, draw(40, 65, 32, 32, dtype=torch.bfloat16))
    assert found["d_ridge"] < torch.finfo(torch.bfloat16).eps / 2 / 16  # four bits more than half a unit of theirs


def test_fewer_steps_than_needed_give_the_same_unfinished_answer():
    inputs = draw(20, 33, 16, 16)
    three = {"iterations": 3, "tolerance": 0.0}
    ours = results(kernels, inputs, torch.float32, **three)[0]
    assert error(ours, results(plain, inputs, torch.float64, solver="cg", **three)[0]) < 1e-5
    assert error(ours, results(plain, inputs, torch.float64, solver="direct")[0]) > 1e-3


def test_compiled_it_is_the_same_with_gradients():
    q, k, v, ridge = draw(20, 33, 16, 16)

    def call(q: Tensor, k: Tensor, v: Tensor, ridge: Tensor) -> Tensor:
        return triton_lla.attention(q, k, v, None, ridge, scale=0.25, is_causal=True)

    leaves = [x.detach().requires_grad_() for x in (q, k, v, ridge)]
    grad = tokens(2, 1, 20, 16, seed=7)
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    ours, eager = (torch.autograd.grad(f(*leaves), leaves, grad) for f in (compiled, call))
    for x, y in zip(ours, eager, strict=True):
        torch.testing.assert_close(x, y, rtol=1e-6, atol=1e-6)


def test_what_the_kernels_cannot_take_is_named():
    q = tokens(1, 1, 4, 16)
    assert "float64" in (plan.obstacle(q.double(), q.double()) or "")
    wide = tokens(1, 1, 4, 72)
    assert "64 wide" in (plan.obstacle(wide, wide) or "")
    assert plan.obstacle(wide.bfloat16(), wide.bfloat16()) is None


def test_the_custom_ops_keep_their_promises(monkeypatch):
    q, k, v, ridge = draw(17, 19, 16, 16)
    numbers = (0.25, True, 16, 1e-12)
    monkeypatch.undo()  # opcheck compares memory that nobody has written
    operator = triton_lla.attention
    out, *state = operator.forward(q, k, v, None, ridge, *numbers, True)
    torch.library.opcheck(operator.backward, (torch.ones_like(out), q, k, v, None, ridge, *state, *numbers))
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.library.opcheck(operator.forward, (*leaves, None, ridge.requires_grad_(), *numbers, True))


def test_grids_have_one_dimension(monkeypatch):
    """A second one would end at 65,535 heads of all sequences together."""
    grids = []

    class Recorded:
        def __init__(self, kernel: Any) -> None:
            self.kernel = kernel

        def __getitem__(self, grid: tuple[int, ...]) -> Any:
            grids.append(grid)
            return self.kernel[grid]

    for module, name in ((forward, "forward"), (backward, "query_gradients"), (backward, "key_gradients")):
        monkeypatch.setattr(module, name, Recorded(getattr(module, name)))
    results(kernels, draw(70, 33, 16, 16, heads=3), torch.float32)
    assert [len(grid) for grid in grids] == [1, 1, 1]
