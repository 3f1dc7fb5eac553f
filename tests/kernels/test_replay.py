"""Calls that are repeated without Python in between: in Triton's interpreter, as if it were a GPU, and on one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from kernel_checks import DEVICE, error, tokens
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils.checkpoint import checkpoint

from cumulant import attention, cluster_attention
from cumulant.cluster import Blocks
from cumulant.kernels import replay
from cumulant.kernels.tokens import Kernel

CLUSTERS: dict[str, Any] = {"clusters": 4, "near": 1, "near_rows": 32, "rank": "mean", "response": "pooled"}
CASES = {
    "dense": partial(attention, order=2, backend="triton"),
    "clusters": partial(cluster_attention, backend="triton", **CLUSTERS),
    "past": partial(cluster_attention, clusters=Blocks(16, keep=1), is_causal=True, backend="triton"),
}
GPU = [pytest.param(name, marks=pytest.mark.gpu, id=f"{name} on a GPU") for name in CASES]
EACH = ["dense", *GPU]  # in the interpreter the others take a minute


class Compiled:
    """Stands for a compiled kernel: launched with addresses, the interpreter gets tensors at them."""

    def __init__(self, kernel: Any, constants: dict[str, Any], kinds: list[torch.dtype | None]) -> None:
        self.kernel, self.constants, self.kinds = kernel, constants, kinds

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        def at(address: int, kind: torch.dtype) -> Tensor:
            return (
                torch.frombuffer((ctypes.c_char * 8).from_address(address), dtype=kind)
                if address
                else torch.empty(0, dtype=kind)
            )

        def run(*given: Any) -> None:
            self.kernel[grid](
                *(x if kind is None else at(x, kind) for x, kind in zip(given, self.kinds, strict=True)),
                **self.constants,
            )

        return run


@pytest.fixture(autouse=True)
def learning(monkeypatch: pytest.MonkeyPatch) -> None:
    replay.forget()
    monkeypatch.setattr(replay, "ASKED", True)
    if DEVICE == "cuda":
        return

    def start(self: Kernel, grid: Any, fixed: Any, *given: Any) -> None:
        with _disable_current_modes():  # the interpreter's own operations are no part of a launch
            self.jitted[grid](*given, **fixed.constants)
        kinds = [x.dtype if isinstance(x, Tensor) else None for x in given]
        replay.started(Compiled(self.jitted, fixed.constants, kinds), (), grid, given)

    monkeypatch.setattr(Kernel, "start", start)
    monkeypatch.setattr(replay, "_on_gpu", lambda x: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def made(case: str, seed: int) -> list[Tensor]:
    L = 32 if case == "dense" else 130
    return [tokens(1, 1, L, 32, mean=m, dtype=torch.bfloat16, seed=seed + i) for i, m in enumerate((0, 1, 0.5))]


def known() -> list[Any]:
    return [x for x in replay._records.values() if isinstance(x, replay.Record)]


@pytest.mark.parametrize("case", EACH)
def test_a_repeated_call_gives_the_same_bits_for_other_tensors(case: str) -> None:
    call = CASES[case]
    with torch.no_grad():
        for _ in range(3):
            call(*made(case, 0))
        assert [x.proven for x in known()] == [True]
        again = call(*made(case, 5))
        replay.forget()
        assert torch.equal(again, call(*made(case, 5)))


@pytest.mark.parametrize("case", EACH)
def test_gradients_of_a_repeated_call_have_the_same_bits(case: str) -> None:
    def step(seed: int) -> list[Tensor]:
        leaves = [x.requires_grad_() for x in made(case, seed)]
        out = CASES[case](*leaves)
        return [out.detach(), *torch.autograd.grad(out, leaves, tokens(*out.shape, dtype=out.dtype, seed=seed))]

    for seed in range(5):  # compiled, learned and proven forward, learned and proven backward
        step(seed)
    (record,) = known()
    assert record.proven
    assert record.back is not None
    assert record.back.proven
    again = step(7)
    replay.forget()
    for x, y in zip(again, step(7), strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_a_repeated_call_is_recorded_by_a_cuda_graph(case: str) -> None:
    inputs = made(case, 0)
    with torch.no_grad():
        for _ in range(4):
            CASES[case](*inputs)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = CASES[case](*inputs)
        for x, y in zip(inputs, made(case, 5), strict=True):
            x.copy_(y)
        graph.replay()
        torch.cuda.synchronize()
        replay.forget()
        assert torch.equal(out, CASES[case](*inputs))


@pytest.mark.gpu
def test_tensors_off_their_alignment_are_taken_as_ever() -> None:
    inputs = made("dense", 0)
    wanted = CASES["dense"](*inputs)
    for _ in range(3):
        CASES["dense"](*inputs)
    off = [x.new_empty(x.numel() + 1)[1:].view_as(x).copy_(x) for x in inputs]
    assert error(CASES["dense"](*off), wanted.double()) < 4e-3  # other loads, other sums: not the same bits


def test_other_options_shapes_strides_and_types_are_other_calls() -> None:
    q, k, v = (tokens(1, 2, 32, 32, dtype=torch.bfloat16, seed=i) for i in range(3))
    kind = partial(replay.kind, "attention")
    plain = kind(q, k, v, 2, None)
    turned = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (q, k, v)]
    others = [
        kind(q, k, v, 3, None),
        kind(q, k, v, 2.0, None),
        kind(q[:, :, :16], k, v, 2, None),
        kind(*turned, 2, None),
        kind(*(x.half() for x in (q, k, v)), 2, None),
        kind(q.requires_grad_(), k, v, 2, None),
    ]
    assert plain is not None
    assert len({plain, *others}) == 7


def test_what_is_not_a_plain_call_is_not_learned() -> None:
    q, k, v = made("dense", 0)
    assert replay.kind("attention", q.float(), k, v) is None
    assert replay.kind("attention", q, k, v, torch.ones(1).tolist()) is None  # an option that has no hash
    with torch.autograd.graph.save_on_cpu():
        assert replay.kind("attention", q, k, v) is None


def test_what_was_learned_wrongly_is_found_out_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs = made("dense", 0)
    with torch.no_grad():
        wanted = CASES["dense"](*inputs)
        CASES["dense"](*inputs)
        monkeypatch.setattr(replay, "_launch", lambda *given: None)  # repeats nothing
        assert torch.equal(CASES["dense"](*inputs), wanted)
        assert not known()
        assert torch.equal(CASES["dense"](*inputs), wanted)


def test_one_tensor_for_query_and_key_is_not_taken_for_two() -> None:
    q, k, v = made("dense", 0)
    call = CASES["dense"]
    with torch.no_grad():
        for _ in range(3):
            call(q, q, v)
        assert not known()
        wanted = call(q, k, v)
        replay.forget()
        assert torch.equal(wanted, call(q, k, v))


def test_the_output_may_be_changed_in_place_where_no_gradient_needs_it() -> None:
    leaves = [x.requires_grad_() for x in made("dense", 0)]
    for _ in range(6):
        out = CASES["dense"](*leaves)
        torch.autograd.grad(out.mul_(2).sum(), leaves)


def test_checkpoints_recompute_what_they_saw() -> None:
    leaves = [x.requires_grad_() for x in made("dense", 0)]
    for _ in range(4):
        out = checkpoint(CASES["dense"], *leaves, use_reentrant=False)
        assert isinstance(out, Tensor)
        torch.autograd.grad(out.sum(), leaves)
