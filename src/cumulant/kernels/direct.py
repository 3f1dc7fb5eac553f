"""A compiled kernel launched by one call of the driver: its numbers lie in memory, only addresses are written anew.

Triton's launcher takes some forty arguments one by one and looks at each, 5 to 10 microseconds a launch. One that is
repeated has the same arguments but for addresses, so they are laid out once as the driver reads them, eight bytes each.
The driver is asked first whether the kernel's parameters are the ones that are laid out; where it cannot say, or a
kernel needs more than a plain launch, Triton launches as ever.
"""

from __future__ import annotations

import ctypes
import os
import struct
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

WANTED = os.environ.get("CUMULANT_DIRECT") == "1"
SIZES = {"i32": 4, "i64": 8, "fp32": 4}  # of what kernels here take beside addresses
UNUSED = 2  # addresses that Triton may add at the end: scratch memory, which is None where its size is 0
Places = Sequence[tuple[int, int, int]]


@cache
def _driver() -> Any:
    """cuLaunchKernel and cuFuncGetParamInfo (CUDA 12.4 and later); None where the driver has not both."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        launch, about = library.cuLaunchKernel, library.cuFuncGetParamInfo
    except (OSError, AttributeError):
        return None
    number, pointer = ctypes.c_uint, ctypes.c_void_p
    launch.argtypes = [pointer, *[number] * 7, pointer, pointer, pointer]
    about.argtypes = [pointer, ctypes.c_size_t, pointer, pointer]
    return launch, about


def _parameters(function: int) -> list[int] | None:
    """Bytes of each parameter of a kernel, as the driver has them."""
    found: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while _driver()[1](function, len(found), ctypes.byref(offset), ctypes.byref(size)) == 0:
        found.append(size.value)
        if len(found) > 4096:
            return None
    return found


def kinds_of(compiled: Any, count: int) -> list[str] | None:
    """Types of the first `count` arguments of a compiled kernel as Triton names them; None if there are others."""
    kinds = list(compiled.src.signature.values())
    if len(kinds) < count or any(kind != "constexpr" for kind in kinds[count:]):
        return None
    known = all(isinstance(x, str) and (x == "constexpr" or x[0] == "*" or x in SIZES) for x in kinds[:count])
    return kinds[:count] if known else None


class Direct:
    """One launch. Called with the addresses of bases and a stream; `places` as of `replay.Start`."""

    def __init__(self, compiled: Any, grid: Sequence[int], given: Sequence[Any], kinds: Sequence[str], places: Places):
        self.compiled = compiled  # its module stays loaded
        there = [i for i, kind in enumerate(kinds) if kind != "constexpr"]
        slot = {i: n for n, i in enumerate(there)}
        self.memory = ctypes.create_string_buffer(8 * (len(there) + UNUSED))
        start = ctypes.addressof(self.memory)
        self.parameters = (ctypes.c_void_p * (len(there) + UNUSED))(*range(start, start + len(self.memory), 8))
        for n, i in enumerate(there):
            form = "<f" if kinds[i] == "fp32" else "<q"
            struct.pack_into(form, self.memory, 8 * n, given[i] or 0)
        self.slots = memoryview(self.memory).cast("B").cast("Q")
        self.places = tuple((slot[i], base, away) for i, base, away in places)
        about = compiled.metadata
        self.launch, self.lock = _driver()[0], threading.Lock()
        self.head = compiled.function, *grid, 32 * about.num_warps, 1, 1, about.shared

    def __call__(self, bases: Sequence[int], stream: int) -> None:
        slots = self.slots
        with self.lock:  # the call below lets other threads run
            for i, base, away in self.places:
                slots[i] = bases[base] + away
            problem = self.launch(*self.head, stream, self.parameters, None)
        if problem:
            raise RuntimeError(f"the driver refuses to launch {self.compiled.name}: error {problem}")


def direct(compiled: Any, grid: Sequence[int], given: Sequence[Any], places: Places) -> Direct | None:
    """The launch of a compiled kernel with its arguments but for constants; None where only Triton can do it."""
    about = getattr(compiled, "metadata", None)
    if not WANTED or about is None or _driver() is None or 0 in grid:
        return None
    needs = ("global_scratch_size", "profile_scratch_size", "launch_cooperative_grid", "launch_pdl")
    plain = about.num_ctas == 1 and not any(getattr(about, name, 0) for name in needs)
    kinds = kinds_of(compiled, len(given)) if plain else None
    if kinds is None:
        return None
    wanted = [8 if kind[0] == "*" else SIZES[kind] for kind in kinds if kind != "constexpr"]
    found = _parameters(compiled.function)
    if found is None or found[: len(wanted)] != wanted or found[len(wanted) :] not in ([], [8], [8, 8]):
        return None
    return Direct(compiled, grid, given, kinds, places)
