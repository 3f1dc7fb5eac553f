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


@triton.jit
def finished(x):
    """x itself, a sum of products, waited for before the next turn of a loop. Two reasons for that:

    In Triton 3.6 and 3.9 a tile that a product reads where it was copied to, and that is also loaded into registers,
    has one place too few: a later tile may be copied there while the product is under way.

    The assembler runs products one by one where some are under way across turns while their first factor, in registers,
    changes; in a row and waited for together they overlap.
    """
    if INTERPRET:
        return x
    else:
        return tl.inline_asm_elementwise("// $0", "=r,0", [x], dtype=tl.float32, is_pure=True, pack=1)
