"""Matrix products of Triton kernels that also run under its interpreter."""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl

from . import launch

INTERPRET = tl.constexpr(launch.INTERPRET)


@triton.jit
def dot(a, b, acc, PRECISION: tl.constexpr):
    """acc + a b in float32 (acc may be None); PRECISION as `launch.dot_precision` says.

    The interpreter keeps bfloat16 as integers and would multiply those, so there operands become float32 first:
    the same product, since float32 holds every bfloat16.
    """
    if INTERPRET:
        a, b = a.to(tl.float32), b.to(tl.float32)
    elif a.dtype == tl.float32 and PRECISION == "tf32":
        a, b = _nearest_tf32(a), _nearest_tf32(b)
    return tl.dot(a, b, acc, input_precision=PRECISION)


@triton.jit
def _nearest_tf32(x):
    """Tensor cores cut float32 off after 10 digits, which is biased: half a unit of the last more, and it rounds."""
    return (x.to(tl.int32, bitcast=True) + 0x1000).to(tl.float32, bitcast=True)


@triton.jit
def cast(x, dtype: tl.constexpr):
    """x.to(dtype), to the nearest. The interpreter cuts float32 off to bfloat16, so there it is rounded first."""
    if INTERPRET and x.dtype == tl.float32 and dtype == tl.bfloat16:
        bits = x.to(tl.int32, bitcast=True)
        bits = (bits + 0x7FFF + ((bits >> 16) & 1)) & -65536
        x = bits.to(tl.float32, bitcast=True)
    return x.to(dtype)
