"""What all Triton kernels here do with the tokens of a head: find them, load them, weigh them, take a reference point.

A sequence is a pointer to its first token, a token stride and a length: dense and ragged batches differ only in how
these are found (`sequence`).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

from functools import partial

import torch
import triton
import triton.language as tl
from torch import Tensor
from torch.nn import Parameter
from triton.runtime.errors import OutOfResources

from . import launch, replay
from .products import INTERPRET, cast

COUNTS = {
    "length_q", "length_k", "heads", "group", "span", "splits", "plane", "clusters", "tiles", "all_tiles", "blocks",
    "all_blocks", "T", "R", "per", "listed", "size", "recent", "least", "offset", "levels", "step",
}  # fmt: skip


def kernel(function):
    """triton.jit, without recompiling for a length, a batch or a stride (names that end in _b, _h, _t)."""
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    numbers = [x for x in names if x not in function.__annotations__]
    counts = [x for x in numbers if x in COUNTS or x[-2:] in ("_b", "_h", "_t")]
    jitted = triton.jit(function, do_not_specialize=counts)
    return Kernel(jitted, numbers, counts)


class Fixed:
    """Constants of a launch that a plan keeps, and what was compiled for them.

    `known`: nothing else that Triton compiles for can change from call to call, so that arguments need not be looked
    at. That is so with UNIT = 8 (`launch.layout`), and where all tensors are fresh memory.
    """

    __slots__ = ("compiled", "constants", "known")

    def __init__(self, constants, known):
        self.constants, self.known, self.compiled = constants, known, {}


class Kernel:
    """A kernel that Triton compiles, and that is launched without its binder from the second call of a kind on.

    The binder looks at each of some forty arguments, which takes longer than a small kernel runs. Calls are of a kind
    if constants, types, alignment of tensors and 32-bit range of numbers are the same: what Triton compiles for.
    """

    def __init__(self, jitted, numbers, counts):
        self.jitted, self.numbers, self.compiled = jitted, numbers, {}
        self.special = [i for i, name in enumerate(numbers) if name not in counts]

    def __getattr__(self, name):
        return getattr(self.jitted, name)

    def __getitem__(self, grid):
        if launch.INTERPRET:
            replay.spoiled()
            return self.jitted[grid]
        return partial(self.launched, grid + (1,) * (3 - len(grid)))

    def start(self, grid, fixed, *given):
        """Launches with `fixed` constants, tensors and numbers being those that they were made for."""
        if launch.INTERPRET or not fixed.known:
            self[grid](*given, **fixed.constants)
            return
        device = torch.cuda.current_device()
        found = fixed.compiled.get(device)
        if found is None:
            compiled, rest = self.first(grid, given, fixed.constants)
            if compiled is None:
                replay.spoiled()
                return
            fixed.compiled[device] = compiled, rest
        else:
            compiled, rest = found
            # Addresses: of a tensor the launcher asks for its own, and the driver whether that is one of the device.
            compiled[grid](*[x.data_ptr() if isinstance(x, Tensor) else x for x in given], *rest)
        replay.started(compiled, rest, grid, given)

    def first(self, grid, given, constants):
        """Launches by Triton: what it compiled, and the constants behind what is given. Where that takes more than the
        device has, loops wait for their tiles instead of having the next ones brought meanwhile."""
        try:
            compiled = self.jitted[grid](*given, **constants)
        except OutOfResources as short:
            fewer = {name: 1 if name.upper().endswith("STAGES") else x for name, x in constants.items()}
            if fewer == constants:
                raise RuntimeError(
                    f"kernel {self.jitted.__name__} takes {short.required:,} of {short.name} and this GPU has "
                    f'{short.limit:,}: pass backend="reference", which is plain torch, or narrower heads'
                ) from short
            return self.first(grid, given, fewer)
        return compiled, tuple(constants[name] for name in self.jitted.arg_names[len(given) :])

    def launched(self, grid, *given, **constants):
        kind, away = [torch.cuda.current_device(), *constants, *constants.values()], 0
        for x in given:
            if x.__class__ is Tensor or x.__class__ is Parameter:
                kind.append(x.dtype)
                kind.append(x.data_ptr() & 15)
                away |= kind[-1]
            elif x.__class__ is int:
                kind.append(-0x80000000 <= x < 0x80000000)
            else:
                kind.append(x.__class__)
        for i in self.special:
            x = given[i]
            if x.__class__ is int:
                kind.append((x == 1, x & 15 == 0))
        key = tuple(kind)
        found = self.compiled.get(key)
        if found is None:
            compiled, rest = self.first(grid, given, constants)
            if compiled is None:
                replay.spoiled()
                return
            self.compiled[key] = compiled, rest
        else:
            compiled, rest = found
            compiled[grid](*given, *rest)
        if away:  # compiled for tensors off their alignment, which those of a later call may have
            replay.spoiled()
        else:
            replay.started(compiled, rest, grid, given)


@triton.jit
def sequence(offsets, b, length, RAGGED: tl.constexpr):
    """First packed token of sequence b (0 when dense) and its number of tokens."""
    first = tl.zeros((), tl.int64)
    if RAGGED:
        first = tl.load(offsets + b).to(tl.int64)
        length = (tl.load(offsets + b + 1) - first).to(tl.int32)
    return first, length


@triton.jit
def head(x, b, h, first, stride_b, stride_h, stride_t, UNIT: tl.constexpr):
    """Pointer to token `first` of head h of sequence b; strides in units of UNIT elements."""
    b, h = b.to(tl.int64), h.to(tl.int64)
    return x + (b * stride_b + h * stride_h + first * stride_t) * UNIT


@triton.jit
def tile_mask(valid, columns, WIDTH: tl.constexpr, EVEN: tl.constexpr):
    mask = valid[:, None]
    if not EVEN:
        mask = mask & (columns < WIDTH)[None, :]
    return mask


@triton.jit
def fma(a, b, c):
    """a b + c of bfloat16 tiles, rounded once, two elements an instruction."""
    if INTERPRET:
        return cast(a.to(tl.float32) * b.to(tl.float32) + c.to(tl.float32), tl.bfloat16)
    else:
        return tl.inline_asm_elementwise(
            "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=tl.bfloat16, is_pure=True, pack=2
        )


@triton.jit
def minus(x, point, present):
    """x - point for tokens x (N, width) and a point (width,) that x's type can hold; x itself where not present."""
    if x.dtype == tl.bfloat16:
        one = present.to(tl.float32).to(tl.bfloat16)[:, None]
        away = (-point).to(tl.bfloat16)[None, :]
        return fma(tl.broadcast_to(one, x.shape), tl.broadcast_to(away, x.shape), x)
    else:
        return cast(x.to(tl.float32) - tl.where(present[:, None], point[None, :], 0.0), x.dtype)


@triton.jit
def squared(x, dtype: tl.constexpr):
    """x^2 in the given type; the same number whether the product is rounded in bfloat16 or after float32."""
    if x.dtype == tl.bfloat16 and dtype == tl.bfloat16:
        return fma(x, x, tl.full(x.shape, -0.0, tl.float32).to(tl.bfloat16))
    else:
        y = x.to(tl.float32)
        return cast(y * y, dtype)


@triton.jit
def fold(x, ROWS: tl.constexpr):
    """Partial column sums of x (N, width) as (ROWS, width).

    A thread's elements of a column are ROWS tokens apart, so this takes no exchange between threads; the sum over
    ROWS waits until after the loop.
    """
    return tl.sum(tl.reshape(x, (x.shape[0] // ROWS, ROWS, x.shape[1])), 0)


@triton.jit
def sharing(ROWS: tl.constexpr, N: tl.constexpr):
    """(ROWS, N) of 1 / ROWS: a product with it is what `fold` gives, on tensor cores that are idle most of the time."""
    return tl.full((ROWS, N), 1.0 / ROWS, tl.float32).to(tl.bfloat16)


@triton.jit
def weigh(w, w_t, at, end):
    """Which tokens take part, and their weights."""
    weights = tl.load(w + at.to(tl.int64) * w_t, mask=at < end, other=0).to(tl.float32)
    return weights > 0, weights


@triton.jit
def first_present(w, w_t, start, end, N: tl.constexpr):
    """The first block with a token that takes part (`end` or beyond when there is none)."""
    found = 0
    while (start < end) & (found == 0):
        present, _ = weigh(w, w_t, start + tl.arange(0, N), end)
        found = tl.sum(present.to(tl.int32))
        start += tl.where(found == 0, N, 0)
    return start


@triton.jit
def reference(x, stride, count, columns, WIDTH: tl.constexpr):
    """A point near the `count` tokens at x: of four, evenly spaced, between the middle two, as near to 0 as they allow.

    Differences to it are then exact, or nearly so, in the tokens' own precision: tokens around 0 stay as they are, and
    those far from 0 share its exponent. The extremes are left out, so that one outlier (often the first token) does
    not drag it away from the others.
    """
    inside = columns < tl.where(count > 0, WIDTH, 0)
    quarter = (count // 4).to(tl.int64) * stride
    x0 = tl.load(x + columns, mask=inside, other=0.0)
    x1 = tl.load(x + quarter + columns, mask=inside, other=0.0)
    x2 = tl.load(x + 2 * quarter + columns, mask=inside, other=0.0)
    x3 = tl.load(x + 3 * quarter + columns, mask=inside, other=0.0)
    return between(x0, x1, x2, x3)


@triton.jit
def between(x0, x1, x2, x3):
    """Between the middle two of four numbers, as near to 0 as they allow; float32."""
    if x0.dtype == tl.bfloat16 and not INTERPRET:  # the same, two columns an instruction
        return tl.inline_asm_elementwise(
            """{ .reg .b32 a, b, c, zero;
            min.bf16x2 a, $1, $2; min.bf16x2 b, $3, $4; max.bf16x2 a, a, b;
            max.bf16x2 b, $1, $2; max.bf16x2 c, $3, $4; min.bf16x2 b, b, c;
            min.bf16x2 c, a, b; max.bf16x2 b, a, b;
            mov.b32 zero, 0; max.bf16x2 c, c, zero; min.bf16x2 b, b, zero; or.b32 $0, b, c; }""",
            "=r,r,r,r,r", [x0, x1, x2, x3], dtype=tl.bfloat16, is_pure=True, pack=2,
        ).to(tl.float32)  # fmt: skip
    else:
        x0, x1, x2, x3 = x0.to(tl.float32), x1.to(tl.float32), x2.to(tl.float32), x3.to(tl.float32)
        a = tl.maximum(tl.minimum(x0, x1), tl.minimum(x2, x3))
        b = tl.minimum(tl.maximum(x0, x1), tl.maximum(x2, x3))
        return tl.maximum(tl.minimum(a, b), 0.0) + tl.minimum(tl.maximum(a, b), 0.0)


@triton.jit
def ahead(x, stride, at, end, ROWS: tl.constexpr):
    """Asks for ROWS rows of x from `at` on, those before `end`, to be in the L2 cache when they are read.

    128 bytes of each; nothing waits for them.
    """
    if not INTERPRET:
        row = tl.maximum(tl.minimum(at + tl.arange(0, ROWS), end - 1), 0)
        tl.inline_asm_elementwise(
            "prefetch.global.L2 [$1]; mov.b32 $0, 0;", "=r,l", [x + row.to(tl.int64) * stride], dtype=tl.int32,
            is_pure=False, pack=1,
        )  # fmt: skip


@triton.jit
def present_reference(x, present):
    """The same for a block of tokens of which some are absent: the mean of the others but for the extremes."""
    count = tl.sum(present.to(tl.float32))
    y, mask = x.to(tl.float32), present[:, None]
    total = tl.sum(tl.where(mask, y, 0.0), 0)
    top = tl.max(tl.where(mask, y, -float("inf")), 0)
    bottom = tl.min(tl.where(mask, y, float("inf")), 0)
    trimmed = (total - top - bottom) / tl.maximum(count - 2.0, 1.0)
    middle = tl.where(count > 2.0, trimmed, total / tl.maximum(count, 1.0))
    near_zero = tl.abs(middle) <= 0.25 * (top - bottom)
    return cast(tl.where(near_zero, 0.0, middle), x.dtype).to(tl.float32)
