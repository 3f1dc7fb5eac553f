"""What every Triton kernel's host code shares: where kernels run, how widths are padded and how strides travel.

Shape legend: B batch, H heads, L tokens, T packed tokens of a ragged batch, D width.

Strides reach a kernel as (batch, head, token) in units of `unit` elements (`stride_unit`), and a kernel multiplies
them back by the constant UNIT: the compiler then knows that rows are aligned and loads 16 bytes at a time, whatever
the length, and strides need no specialisation, so no length ever recompiles a kernel.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager, nullcontext
from functools import cache
from importlib.util import find_spec
from typing import NamedTuple

import torch
from torch import Tensor

from ..optional import install
from ..tracing import is_plain, transformed

INTERPRET = os.environ.get("TRITON_INTERPRET", "0") not in ("", "0")  # Triton reads it at import too
HAS_TRITON = find_spec("triton") is not None
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
WIDEST = 256  # head size, at most
ROOM = 232_448  # bytes of shared memory of a program on H100, H200 and B200: all tuning tables are made for these
OLDEST = (8, 0)  # compute capability: Triton supports none before
# Causal or not, type, order and padded head size -> bytes of shared memory that kernels of `attention` take, where that
# is more than GPUs of 99 KB have, as compiled for sm_89 (`python -m tools.fits`).
TAKEN = {
    (False, torch.bfloat16, 2, 256): 123_904, (False, torch.bfloat16, 3, 256): 160_768,
    (False, torch.float16, 2, 256): 189_440, (False, torch.float16, 3, 256): 160_256,
    (False, torch.float16, 3, 128): 173_056, (False, torch.float32, 3, 128): 173_056,
    (False, torch.float32, 3, 256): 154_112,
    (True, torch.float16, 3, 256): 133_120, (True, torch.float32, 3, 256): 133_120,
}  # fmt: skip
FARTHEST = 1 << 24  # elements from a token to the next, at most: kernels walk the 128 tokens of a tile in 32 bits


class Config(NamedTuple):
    """One line of a tuning table: tokens in a block, warps of a program, stages of its software pipeline.

    `keys` and `key_stages`, where not 0, hold for the loop over keys of a kernel that also has one over queries;
    `registers` bounds those of a thread, so that more programs share a multiprocessor.
    """

    block: int
    warps: int
    stages: int
    keys: int = 0
    key_stages: int = 0
    registers: int | None = None


def available(x: Tensor) -> bool:
    """Whether Triton kernels can take x: on a CUDA device, or on the CPU under TRITON_INTERPRET=1."""
    there = x.dtype in DTYPES and HAS_TRITON and x.device.type == ("cpu" if INTERPRET else "cuda")
    return there and unsupported(x.device) is None


def direct(x: Tensor) -> bool:
    """Whether a kernel that is no operator of torch may take x: on a GPU, and nothing watches that must know it."""
    return x.is_cuda and available(x) and is_plain(x) and not transformed()


def obstacle(query: Tensor, value: Tensor) -> str | None:
    """Why the Triton kernels cannot take these tensors, or None if they can."""
    if not HAS_TRITON:
        return f"Triton is not installed ({install('gpu')})"
    if query.device.type != ("cpu" if INTERPRET else "cuda"):
        return f"tensors are on {query.device}, not on a CUDA device (TRITON_INTERPRET=1 runs kernels on the CPU)"
    reason = unsupported(query.device)
    if reason is not None:
        return reason
    if query.dtype not in DTYPES:
        return f"kernels take float16, bfloat16 and float32, got {query.dtype}"
    if max(query.shape[-1], value.shape[-1]) > WIDEST:
        return f"heads are at most {WIDEST} wide, got {query.shape[-1]} and {value.shape[-1]}"
    return None


@cache
def unsupported(device: torch.device) -> str | None:
    """Why no kernel runs on a device that torch calls a GPU, or None."""
    if device.type != "cuda":
        return None
    if torch.version.hip is not None:
        return "kernels are written for GPUs of NVIDIA, this one is used by ROCm"
    capability = torch.cuda.get_device_capability(device)
    if capability >= OLDEST:
        return None
    return "kernels take GPUs of compute capability {}.{} and later, this one has {}.{}".format(*OLDEST, *capability)


def no_room(query: Tensor, value: Tensor, order: int, is_causal: bool) -> str | None:
    """Why kernels of `attention` do not fit the shared memory of this GPU, or None."""
    width = padded(max(query.shape[-1], value.shape[-1]))
    taken, room = TAKEN.get((is_causal, query.dtype, order, width), 0), shared_memory(query.device)
    if taken <= room:
        return None
    return f"heads of {width} take {taken:,} bytes of shared memory at order {order}, a program has {room:,} here"


def too_wide(query: Tensor, value: Tensor, widest: int, widest_float32: int) -> str | None:
    """Why heads are too wide for kernels that take so much, less of float32; None if they are not."""
    most = widest_float32 if query.dtype == torch.float32 else widest
    if max(query.shape[-1], value.shape[-1]) <= most:
        return None
    return f"heads of {query.dtype} are at most {most} wide, got {query.shape[-1]} and {value.shape[-1]}"


@cache
def multiprocessors(device: torch.device) -> int:
    """Multiprocessors of the device; under the interpreter a small number, so that tests meet split sequences."""
    return torch.cuda.get_device_properties(device).multi_processor_count if device.type == "cuda" else 4


@cache
def shared_memory(device: torch.device) -> int:
    """Bytes of shared memory that a program may have: 227 KB on an H200, 163 on an A100, 99 on small GPUs."""
    found = torch.cuda.get_device_properties(device) if device.type == "cuda" else None
    return int(getattr(found, "shared_memory_per_block_optin", ROOM))


def memory(device: torch.device) -> int:
    """Bytes of memory of a GPU, 0 of anything else."""
    return torch.cuda.get_device_properties(device).total_memory if device.type == "cuda" else 0


def on_device(device: torch.device) -> AbstractContextManager[None]:
    """Triton launches on the current device: make it that of the tensors."""
    elsewhere = device.type == "cuda" and device.index != torch.cuda.current_device()
    return torch.cuda.device(device) if elsewhere else nullcontext()


class Arriving:
    """A small tensor on its way to the host: what is launched before `get` runs while the host waits for it."""

    def __init__(self, x: Tensor) -> None:
        self.host = x.to("cpu", non_blocking=True)
        self.event = None
        if x.is_cuda:
            self.event = torch.cuda.Event()
            self.event.record(torch.cuda.current_stream(x.device))

    def get(self) -> Tensor:
        if self.event is not None:
            self.event.synchronize()
        return self.host


def padded(width: int, least: int = 16) -> int:
    """The power of two that holds `width`, at least what a matrix product of Triton takes."""
    return max(least, 1 << (width - 1).bit_length())


def cdiv(a: int, b: int) -> int:
    return -(-a // b)


def dot_precision(dtype: torch.dtype) -> str:
    """input_precision of tl.dot for float32 operands: "ieee" unless torch's own switch allows tf32.

    With float16 inputs only squares are multiplied as float32 (their range overflows float16 beyond 255), and
    tf32 keeps the 11 digits that float16 has.
    """
    if dtype == torch.float16:
        return "tf32"
    return "tf32" if torch.backends.cuda.matmul.allow_tf32 else "ieee"


def rows(x: Tensor) -> Tensor:
    """x, (B, H, L, D) or packed (T, H, D), as kernels walk it: itself, or a copy where rows are strided or too far."""
    within = x.stride(-1) == 1 or x.shape[-1] == 1
    return x if within and x.stride(2 if x.ndim == 4 else 0) < FARTHEST else x.contiguous()


def stride_unit(*tensors: Tensor) -> int:
    """8 where all strides and addresses of the tensors are whole multiples of 8 elements, else 1."""
    bits = 0
    for x in tensors:
        bits |= x.data_ptr() // x.element_size()
        for step in x.stride()[:-1]:
            bits |= step
    return 1 if bits & 7 else 8


def layout(*tensors: Tensor) -> tuple[int, list[tuple[int, int, int]]]:
    """`stride_unit` and `strides` of each; 1 also where a stride would not be a 32-bit number of units."""
    bits, steps = 0, []
    for x in tensors:
        at = x.stride()
        bits |= x.data_ptr() // x.element_size()
        if len(at) == 4:
            b, h, t, _ = at
        else:
            (t, h, _), b = at, 0
        bits |= b | h | t
        steps.append((b, h, t))
    if bits & 7 or max(map(max, steps)) >= 1 << 34:
        return 1, steps
    return 8, [(b >> 3, h >> 3, t >> 3) for b, h, t in steps]


def strides(unit: int, *tensors: Tensor) -> tuple[int, ...]:
    """(batch, head, token) steps of each, (B, H, L, D) or packed (T, H, D), whose batch step is 0."""
    steps: list[int] = []
    for x in tensors:
        at = x.stride()
        steps += (at[0], at[1], at[2]) if len(at) == 4 else (0, at[1], at[0])
    return tuple(steps) if unit == 1 else tuple(step // unit for step in steps)


def empty_like_rows(x: Tensor, width: int) -> Tensor:
    """Fresh memory of x's shape but for the last dimension, `width`.

    Dense (B, H, L, D): tokens lie outside heads in memory where those of x do, so joining heads is then free.
    """
    if x.ndim == 4 and x.stride(1) < x.stride(2):
        B, H, L, _ = x.shape
        return x.new_empty(B, L, H, width).transpose(1, 2)
    return x.new_empty(*x.shape[:-1], width)


def like_rows(x: Tensor) -> Tensor:
    """Fresh memory for the gradient of x."""
    return empty_like_rows(x, x.shape[-1])
