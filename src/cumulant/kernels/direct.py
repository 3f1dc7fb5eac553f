"""Compiled kernels launched by one call of the driver each: numbers lie in memory, only addresses are written anew.

Triton's launcher takes some forty arguments one by one and looks at each, 10 microseconds a launch. Launches that are
repeated have the same arguments but for addresses, many of which they share. So everything is laid out once as the
driver reads it, eight bytes each, addresses in front: a pass writes these and calls the driver. The driver is asked
first whether the parameters of a kernel are those that are laid out; where it cannot say, or a kernel needs more than a
plain launch, Triton launches as ever.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any, NamedTuple

WANTED = os.environ.get("CUMULANT_DIRECT") != "0"
SIZES = {"i32": 4, "i64": 8, "fp32": 4}  # of what kernels here take beside addresses
UNUSED = 2  # addresses that Triton may add at the end: scratch memory, which is None where its size is 0
CONFIG = struct.Struct("<7I4xQQI4x")  # CUlaunchConfig: grid, block, shared memory, stream, attributes, their number
STREAM = 32  # bytes before the stream in it
NO_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT


class Launch(NamedTuple):
    """A compiled kernel with its arguments but for constants; `places`: (argument, base, bytes from there)."""

    compiled: Any
    grid: tuple[int, int, int]
    given: Sequence[Any]
    places: Sequence[tuple[int, int, int]]


@cache
def _driver() -> Any:
    """cuLaunchKernelEx and cuFuncGetParamInfo (CUDA 12.4 and later); None where the driver has not both."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        about = library.cuFuncGetParamInfo
        about.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_void_p, ctypes.c_void_p]
        return library.cuLaunchKernelEx, about  # the first without argtypes: it is called with what ctypes made before
    except (OSError, AttributeError):
        return None


def _parameters(function: int) -> list[int] | None:
    """Bytes of each parameter of a kernel, as the driver has them."""
    found: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while _driver()[1](function, len(found), ctypes.byref(offset), ctypes.byref(size)) == 0:
        found.append(size.value)
        if len(found) > 4096:
            return None
    return found


def kinds_of(launch: Launch) -> list[str] | None:
    """Types of the arguments as Triton names them; None where only Triton can launch."""
    compiled, count = launch.compiled, len(launch.given)
    about = getattr(compiled, "metadata", None)
    if not WANTED or about is None or _driver() is None or 0 in launch.grid:
        return None
    needs = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    if about.num_ctas != 1 or any(getattr(about, name, 0) for name in needs):
        return None
    kinds = list(compiled.src.signature.values())
    if len(kinds) < count or any(kind != "constexpr" for kind in kinds[count:]):
        return None
    kinds = kinds[:count]
    if not all(isinstance(x, str) and (x == "constexpr" or x[0] == "*" or x in SIZES) for x in kinds):
        return None
    wanted = [8 if kind[0] == "*" else SIZES[kind] for kind in kinds if kind != "constexpr"]
    found = _parameters(compiled.function)
    fits = found is not None and found[: len(wanted)] == wanted and found[len(wanted) :] in ([], [8], [8, 8])
    return kinds if fits else None


class Direct:
    """Launches one after the other, with what is done between them; called with the addresses of bases and a stream."""

    def __init__(self, items: Sequence[Any], kinds: Sequence[Sequence[str] | None]) -> None:
        launches = [x for x in items if isinstance(x, Launch)]
        self.compiled = [x.compiled for x in launches]  # their modules stay loaded
        every = sorted({(base, away) for x in launches for _, base, away in x.places})
        slot = {address: n for n, address in enumerate(every)}
        self.offsets = [
            (b, tuple(away for base, away in every if base == b)) for b in dict.fromkeys(b for b, _ in every)
        ]
        self.addresses = struct.Struct(f"<{len(every)}Q")
        numbers = sum(len(x.given) for x in launches)
        self.memory = ctypes.create_string_buffer(8 * (len(every) + numbers + 1))  # the last one is 0
        self.start, free = ctypes.addressof(self.memory), len(every)
        self.arrays: list[Any] = []
        self.configs: list[Any] = []
        self.items: list[Any] = []
        for item, types in zip(items, kinds, strict=True):
            if types is None:
                self.items.append(item)
                continue
            moved = {i: slot[base, away] for i, base, away in item.places}
            slots = []
            for i, kind in enumerate(types):
                if kind == "constexpr":
                    continue
                if i not in moved:
                    struct.pack_into("<f" if kind == "fp32" else "<q", self.memory, 8 * free, item.given[i] or 0)
                    moved[i], free = free, free + 1
                slots.append(moved[i])
            slots += [len(self.memory) // 8 - 1] * UNUSED
            self.items.append(self._launch(item, slots))
        self.function, self.lock, self.stream = _driver()[0], threading.Lock(), 0

    def _launch(self, item: Launch, slots: Sequence[int]) -> tuple[Any, ...]:
        about = item.compiled.metadata
        array = (ctypes.c_void_p * len(slots))(*(self.start + 8 * n for n in slots))
        config = ctypes.create_string_buffer(CONFIG.size)
        CONFIG.pack_into(config, 0, *item.grid, 32 * about.num_warps, 1, 1, about.shared, 0, 0, 0)
        self.arrays.append(array)
        self.configs.append(config)
        pointers = ctypes.addressof(config), item.compiled.function, ctypes.addressof(array)
        return (*map(ctypes.c_void_p, pointers), None)

    def __call__(self, bases: Sequence[int], stream: int, between: Callable[[Any], None]) -> bool:
        """Whether it was done: not in a thread that has not used the device yet, which Triton prepares."""
        addresses: list[int] = []
        for base, offsets in self.offsets:
            addresses += map(bases[base].__add__, offsets)
        with self.lock:  # calls of the driver let other threads run
            self.addresses.pack_into(self.memory, 0, *addresses)
            if stream != self.stream:
                for config in self.configs:
                    struct.pack_into("<Q", config, STREAM, stream)
                self.stream = stream
            for item in self.items:
                if item.__class__ is tuple:
                    problem = self.function(*item)
                    if problem == NO_CONTEXT and item is self.items[0]:
                        return False
                    if problem:
                        raise RuntimeError(f"the driver refuses to launch a kernel: error {problem}")
                else:
                    between(item)
        return True


def direct(items: Sequence[Any]) -> Direct | None:
    """These launches, and what is done between them, by the driver; None where Triton is needed for one."""
    kinds = [kinds_of(x) if isinstance(x, Launch) else None for x in items]
    if any(kind is None and isinstance(x, Launch) for x, kind in zip(items, kinds, strict=True)):
        return None
    return Direct(items, kinds)
