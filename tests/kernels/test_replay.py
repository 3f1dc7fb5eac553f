"""Calls that are repeated without Python in between: in Triton's interpreter, as if it were a GPU, and on one."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kernel_checks import DEVICE, error, tokens
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from cumulant import attention, cluster_attention
from cumulant.cluster import KMeans, Tree
from cumulant.kernels import direct, replay
from cumulant.kernels.tokens import Kernel

CASES = {  # in the interpreter the kernels of clusters take a minute
    "dense": partial(attention, order=2, backend="triton"),
    "causal": partial(attention, order=2, is_causal=True, backend="triton"),
    "k-means": partial(
        cluster_attention, clusters=KMeans(4, 1), near=1, near_rows=32, rank="error", response="pooled",
        backend="triton",
    ),
    "tree": partial(
        cluster_attention, clusters=Tree(4), near=1, near_rows=32, rank="error", response="pooled", backend="triton"
    ),
}  # fmt: skip
# What else is called on a GPU: shape (B, H, Hk, L, D), and the call.
SHAPES: dict[str, tuple[tuple[int, ...], Callable[..., Tensor]]] = {
    "order 3": ((2, 3, 3, 197, 64), partial(attention, order=3)),
    "long": ((1, 2, 2, 5000, 64), partial(attention, order=2)),
    "grouped": ((2, 4, 2, 300, 64), partial(attention, order=2, enable_gqa=True)),
    "causal 3": ((1, 2, 2, 3000, 64), partial(attention, order=3, is_causal=True)),
    "far clusters": ((2, 2, 2, 2048, 64), partial(cluster_attention, clusters=16)),
    "near clusters": ((2, 2, 2, 2048, 64), partial(cluster_attention, clusters=16, near=2)),
    "short clusters": ((2, 2, 2, 256, 64), partial(cluster_attention, clusters=16)),
    "k-means": ((1, 2, 2, 2048, 64), partial(cluster_attention, clusters=KMeans(16))),
    "near k-means": ((2, 4, 2, 2048, 64), partial(cluster_attention, clusters=KMeans(16), near=2, enable_gqa=True)),
    "near k-means of odd length": ((1, 2, 2, 10_001, 64), partial(cluster_attention, clusters=KMeans(16), near=2)),
    "causal clusters": ((1, 2, 2, 2048, 64), partial(cluster_attention, clusters=16, is_causal=True)),
}


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

    def launched(self: Kernel, grid: Any, *given: Any, **constants: Any) -> None:
        with torch._C.DisableTorchFunction():  # the interpreter's own operations are no part of a launch
            self.jitted[grid](*given, **constants)
        kinds = [x.dtype if isinstance(x, Tensor) else None for x in given]
        replay.started(Compiled(self.jitted, constants, kinds), (), grid, given)

    def start(self: Kernel, grid: Any, fixed: Any, *given: Any) -> None:
        launched(self, grid, *given, **fixed.constants)

    monkeypatch.setattr(Kernel, "start", start)
    monkeypatch.setattr(Kernel, "__getitem__", lambda self, grid: partial(launched, self, grid))
    monkeypatch.setattr(replay, "_stream", lambda device: 0)
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(replay, "_on_gpu", lambda x: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)


def made(seed: int) -> list[Tensor]:
    return [tokens(1, 1, 64, 32, mean=m, dtype=torch.bfloat16, seed=seed + i) for i, m in enumerate((0, 1, 0.5))]


def known() -> list[Any]:
    return [x for x in replay._records.values() if isinstance(x, replay.Record)]


@pytest.mark.parametrize("case", CASES)
def test_a_repeated_call_gives_the_same_bits_for_other_tensors(case: str) -> None:
    call = CASES[case]
    with torch.no_grad():
        for _ in range(3):
            call(*made(0))
        assert [x.proven for x in known()] == [True]
        again = call(*made(5))
        replay.forget()
        assert torch.equal(again, call(*made(5)))


@pytest.mark.parametrize("case", CASES)
def test_gradients_of_a_repeated_call_have_the_same_bits(case: str) -> None:
    def step(seed: int) -> list[Tensor]:
        leaves = [x.requires_grad_() for x in made(seed)]
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
def test_tensors_off_their_alignment_are_taken_as_ever() -> None:
    inputs = made(0)
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
    q, k, v = made(0)
    assert replay.kind("attention", q.double(), k, v) is None
    odd = replay.kind("attention", q, k, v, [1.0])  # an option that has no hash
    assert replay.call(odd, lambda: q, q, k, v) is q
    with torch.autograd.graph.save_on_cpu():
        assert replay.kind("attention", q, k, v) is None


def test_what_was_learned_wrongly_is_found_out_and_not_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    inputs, fresh = made(0), torch.empty_strided
    # Memory that an earlier answer was in may hold it still.
    monkeypatch.setattr(torch, "empty_strided", lambda *given, **how: fresh(*given, **how).zero_())
    with torch.no_grad():
        wanted = CASES["dense"](*inputs)
        CASES["dense"](*inputs)
        monkeypatch.setattr(replay.Launches, "__call__", lambda *given: None)  # repeats nothing
        assert torch.equal(CASES["dense"](*inputs), wanted)
        assert not known()
        assert torch.equal(CASES["dense"](*inputs), wanted)


@pytest.mark.parametrize(("argument", "learned"), [(3, True), (SimpleNamespace(base=torch.zeros(4)), False)])
def test_a_launch_with_an_argument_that_may_hold_an_address_is_not_learned(argument: Any, learned: bool) -> None:
    x, watch = torch.zeros(4), replay.Watch()
    watch.launches.append((Compiled(None, {}, []), (1, 1, 1), (x, argument), ()))
    memory = replay.Memory(watch, [x], [])
    memory.starts(0)
    assert memory.sound is learned


def test_one_tensor_for_query_and_key_is_not_taken_for_two() -> None:
    q, k, v = made(0)
    call = CASES["dense"]
    with torch.no_grad():
        for _ in range(3):
            call(q, q, v)
        assert not known()
        wanted = call(q, k, v)
        replay.forget()
        assert torch.equal(wanted, call(q, k, v))


def test_the_output_may_be_changed_in_place_where_no_gradient_needs_it() -> None:
    leaves = [x.requires_grad_() for x in made(0)]
    for _ in range(6):
        out = CASES["dense"](*leaves)
        torch.autograd.grad(out.mul_(2).sum(), leaves)


def test_checkpoints_recompute_what_they_saw() -> None:
    leaves = [x.requires_grad_() for x in made(0)]
    for _ in range(4):
        out = checkpoint(CASES["dense"], *leaves, use_reentrant=False)
        assert isinstance(out, Tensor)
        torch.autograd.grad(out.sum(), leaves)


def test_the_driver_is_given_new_addresses_and_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"x": "*bf16", "w": "constexpr", "y": "*fp32", "n": "i32", "far": "i64", "s": "fp32", "C": "constexpr"}
    sizes, seen = [8, 8, 4, 8, 4, 8, 8], []  # and two addresses of scratch memory

    def about(function: int, which: int, offset: Any, size: Any) -> int:
        size._obj.value = sizes[which] if which < len(sizes) else 0
        return int(which >= len(sizes))

    def launch(config: Any, function: Any, array: Any, extra: None) -> int:
        read = (
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_int32,
            ctypes.c_int64,
            ctypes.c_float,
            *[ctypes.c_uint64] * 2,
        )
        at = (ctypes.c_void_p * len(read)).from_address(array.value)
        numbers = direct.CONFIG.unpack(ctypes.string_at(config.value, direct.CONFIG.size))
        seen.append((function.value, numbers, [kind.from_address(a).value for kind, a in zip(read, at, strict=True)]))
        return 0

    monkeypatch.setattr(direct, "WANTED", True)
    monkeypatch.setattr(direct, "_driver", lambda: (launch, about))
    compiled = SimpleNamespace(
        src=SimpleNamespace(signature=kinds), metadata=SimpleNamespace(num_ctas=1, num_warps=4, shared=99), function=5
    )
    first = direct.Launch(compiled, (7, 8, 9), [0, None, 0, -3, 1 << 40, 0.5], [(0, 0, 16), (2, 1, 0)])
    second = direct.Launch(compiled, (1, 1, 1), [0, None, 4321, 6, 7, -2.0], [(0, 1, 0)])
    found = direct.direct([first, "between", second])
    assert found is not None
    assert found([1000, 2000], 77, seen.append)
    assert found([3000, 4000], 78, seen.append)
    config, small = (7, 8, 9, 128, 1, 1, 99), (1, 1, 1, 128, 1, 1, 99)
    assert seen == [
        (5, (*config, 77, 0, 0), [1016, 2000, -3, 1 << 40, 0.5, 0, 0]),
        "between",
        (5, (*small, 77, 0, 0), [2000, 4321, 6, 7, -2.0, 0, 0]),
        (5, (*config, 78, 0, 0), [3016, 4000, -3, 1 << 40, 0.5, 0, 0]),
        "between",
        (5, (*small, 78, 0, 0), [4000, 4321, 6, 7, -2.0, 0, 0]),
    ]
    found.function = lambda *given: direct.NO_CONTEXT  # of a thread that is new to the device
    assert not found([1000, 2000], 77, seen.append)
    found.function = lambda *given: 1
    with pytest.raises(RuntimeError, match="error 1"):
        found([1000, 2000], 77, seen.append)
    sizes[2] = 8  # other parameters than those that were laid out
    assert direct.direct([first]) is None


def placed(B: int, H: int, Hk: int, L: int, D: int, seed: int, inside: bool) -> list[Tensor]:
    """query, key, value, alone or as parts of one projection (B, L, H D)."""
    found = [
        tokens(B, h, L, D, mean=m, dtype=torch.bfloat16, seed=seed + i)
        for i, (h, m) in enumerate(((H, 0), (Hk, 1), (Hk, 0.5)))
    ]
    if inside:
        joined = torch.cat([x.transpose(1, 2).flatten(2) for x in found], -1)
        parts = joined.split([x.shape[1] * D for x in found], -1)
        found = [x.unflatten(2, (-1, D)).transpose(1, 2) for x in parts]
    return found


def results(name: str, seed: int, inside: bool = False) -> list[Tensor]:
    """Output and gradients."""
    shape, call = SHAPES[name]
    leaves = [x.detach().requires_grad_() for x in placed(*shape, seed=seed, inside=inside)]
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, tokens(*out.shape, dtype=out.dtype, seed=seed))]


def repeated() -> list[Any]:
    """The records whose backward pass is repeated too."""
    return [x for x in known() if x.proven and x.back is not None and x.back.proven and not x.broken]


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("name", "driver"),
    [*((name, True) for name in SHAPES), ("order 3", False), ("near clusters", False)],
    ids=lambda x: x if isinstance(x, str) else "by the driver" if x else "by Triton",
)
def test_what_is_repeated_on_a_gpu_has_the_bits_of_a_call(
    name: str, driver: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(direct, "WANTED", driver)
    monkeypatch.setattr(replay, "ASKED", False)
    wanted = {(seed, inside): results(name, seed, inside) for seed in (8, 9) for inside in (False, True)}
    monkeypatch.setattr(replay, "ASKED", True)
    for inside in (False, True):
        for seed in range(6):
            results(name, seed, inside)
    assert len(repeated()) == 2
    for record in repeated():
        assert (record.starts.direct is not None) == (record.back.starts.direct is not None) == driver
    for (seed, inside), each in wanted.items():
        for x, y in zip(results(name, seed, inside), each, strict=True):
            assert torch.equal(x, y)


@pytest.fixture
def by_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct, "WANTED", True)


@pytest.mark.gpu
@pytest.mark.usefixtures("by_the_driver")
@pytest.mark.parametrize("name", ["order 3", "near clusters"])
def test_inputs_changed_in_place_are_read_as_they_are(name: str) -> None:
    shape, call = SHAPES[name]
    first, second = (placed(*shape, seed=seed, inside=False) for seed in (0, 20))
    with torch.no_grad():
        wanted = call(*second)
        for _ in range(5):
            call(*first)
        for x, y in zip(first, second, strict=True):
            x.copy_(y)
        assert torch.equal(call(*first), wanted)


@pytest.mark.gpu
@pytest.mark.usefixtures("by_the_driver")
@pytest.mark.parametrize("name", ["order 3", "near clusters"])
def test_a_saved_tensor_that_is_written_to_is_still_found_out(name: str) -> None:
    shape, call = SHAPES[name]
    for _ in range(6):
        results(name, 0)
    leaves = [x.requires_grad_() for x in placed(*shape, seed=0, inside=False)]
    moved = [x * 1 for x in leaves]
    out = call(*moved)
    moved[1].mul_(2)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


@pytest.mark.gpu
@pytest.mark.usefixtures("by_the_driver")
@pytest.mark.parametrize("name", ["order 3", "near clusters"])
def test_a_thread_that_is_new_to_the_device_may_repeat(name: str) -> None:
    shape, call = SHAPES[name]
    inputs = placed(*shape, seed=0, inside=False)
    with torch.no_grad():
        wanted, *_ = [call(*inputs) for _ in range(4)]
    torch.cuda.synchronize()

    def work() -> Tensor:
        with torch.no_grad():
            return call(*inputs)

    with ThreadPoolExecutor(1) as pool:
        found = [pool.submit(work).result() for _ in range(2)]
    torch.cuda.synchronize()
    assert all(torch.equal(x, wanted) for x in found)


@pytest.mark.gpu
@pytest.mark.usefixtures("by_the_driver")
@pytest.mark.parametrize("name", ["order 3", "near clusters"])
def test_calls_on_several_streams_and_threads_do_not_mix(name: str) -> None:
    wanted = [results(name, seed) for seed in range(12)]
    assert repeated()
    torch.cuda.synchronize()

    def work(seed: int) -> list[Tensor]:
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(5):
                found = results(name, seed)
            stream.synchronize()
        return found

    with ThreadPoolExecutor(4) as pool:
        for found, each in zip(pool.map(work, range(12)), wanted, strict=True):
            for x, y in zip(found, each, strict=True):
                assert torch.equal(x, y)


@pytest.mark.gpu
@pytest.mark.usefixtures("by_the_driver")
@pytest.mark.parametrize("name", ["order 3", "near clusters", "causal 3"])
def test_a_repeated_step_is_recorded_by_a_cuda_graph(name: str) -> None:
    shape, call = SHAPES[name]
    leaves = [x.requires_grad_() for x in placed(*shape, seed=0, inside=False)]
    grad = torch.ones_like(leaves[0])

    def step() -> tuple[Tensor, ...]:
        out = call(*leaves)
        return out, *torch.autograd.grad(out, leaves, grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(6):
            step()
    torch.cuda.current_stream().wait_stream(stream)
    assert repeated()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    with torch.no_grad():
        for x, y in zip(leaves, placed(*shape, seed=30, inside=False), strict=True):
            x.copy_(y)
    graph.replay()
    torch.cuda.synchronize()
    replay.forget()
    for x, y in zip(found, step(), strict=True):
        assert torch.equal(x, y)


@pytest.mark.gpu
def test_under_torch_compile_nothing_is_repeated() -> None:
    shape, call = SHAPES["order 3"]
    inputs = placed(*shape, seed=0, inside=False)
    with torch.no_grad():
        wanted = call(*inputs)
        for _ in range(4):
            call(*inputs)
        many = len(replay._records)
        compiled = torch.compile(call, fullgraph=True)
        for _ in range(4):
            assert error(compiled(*inputs), wanted.double()) < 4e-3
        assert len(replay._records) == many


@pytest.mark.gpu
def test_where_the_host_may_not_wait_nothing_is_compared() -> None:
    shape, call = SHAPES["order 3"]
    inputs = placed(*shape, seed=0, inside=False)
    with torch.no_grad():
        wanted = call(*inputs)
        torch.cuda.synchronize()
        torch.cuda.set_sync_debug_mode("error")
        try:
            found = [call(*inputs) for _ in range(5)]
        finally:
            torch.cuda.set_sync_debug_mode("default")
        assert all(torch.equal(x, wanted) for x in found)
