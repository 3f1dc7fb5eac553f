"""Hostile numbers against direct enumeration in float64, by hand: `python -m tools.fuzz --cases 10000 --seed 1`.

The oracle is written from specs/cumulant.md alone and shares no code with the library or its tests: for each row the
weights that it sees, their averages, deviations and the printed sums over them, in float64. A case draws dtype, sizes,
order, closure, weights over twelve or sixty decades, offsets of keys and values, logits, scales of 0, below it and far
above 1, causality, normalisation, grouped query heads, views, backend or stream, and compares output and gradients; or
`scores`, whose values are unit vectors, of causal rows at places of their own. What passes: an error of at most a few
roundings of the dtype, twice what plain torch in that dtype has: its formula is evaluated in float32 for 16 bits, then
rounded; for kernels, which multiply on tensor cores, with centred keys, their squares, weighted values and their
gradients rounded to 16 bits. The worst of five units of the keys counts, since roundings of a few numbers may cancel by
chance. Outputs of causal kernels with logits of order 1 have the bound of plain torch that rounds nothing but its
result.
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from torch import Tensor

import cumulant
from cumulant.streaming import SlidingWindow, Stream

Found = tuple[str, float, float, str]  # where, how far off, the bound, the case in words
HALF = {torch.float32: 6e-8, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


def row_by_row(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    w: Tensor,
    form: dict,
    rounded: Callable[[Tensor], Tensor] = lambda x: x,
    places: list[int] | None = None,
) -> Tensor:
    """q (B, G H, Lq, D), k (B, H, Lk, D), v (B, H, Lk, E), w (B, Lk) in float64; q carries the scale.

    `rounded`: what becomes of k~, k~^2 and w v~ before they are multiplied and summed over keys. `places` of causal
    rows, 0, 1, ... unless given.
    """
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    outs = []
    for i in range(q.shape[-2]):
        seen = w.clone()
        if form["is_causal"]:
            seen[:, (places[i] if places else i) + 1 :] = 0
        total = seen.sum(-1)[:, None, None]
        p = (seen / seen.sum(-1, keepdim=True).clamp_min(1e-320))[:, None, :, None]
        dk, dv = k - (p * k).sum(-2, keepdim=True), v - (p * v).sum(-2, keepdim=True)
        x = q[:, :, i, :].unsqueeze(-2)
        dk, dv = rounded(dk), rounded(p * dv)
        u = (x * dk).sum(-1, keepdim=True)
        row = (p * v).sum(-2)
        if form["order"] >= 2:
            gain = 1.0
            if form["closure"] is not None:
                s2 = (x * x * (p * dk * dk).sum(-2, keepdim=True)).sum(-1)
                s = (s2 + 1e-300).sqrt() * (math.sqrt(3) if form["closure"] == "langevin" else 1)
                gain = torch.tanh(s) / s if form["closure"] == "tanh" else 3 * (1 / torch.tanh(s) - 1 / s) / s
                gain = torch.where(s < 1e-3, 1.0 - s * s / (3 if form["closure"] == "tanh" else 15), gain)
            row = row + gain * (u * dv).sum(-2)
        if form["order"] == 3:
            square = u * u if form["full"] else (x * x * rounded(dk * dk)).sum(-1, keepdim=True)
            row = row + 0.5 * (square * dv).sum(-2)
        outs.append(row * (total if form["normalization"] == "sum" else 1))
    return torch.stack(outs, -2)


def draw(rng: random.Random) -> tuple[dict, dict, list[Tensor], Tensor | None]:
    """What is asked (for the oracle too), how it is asked, tokens and weights."""
    torch.manual_seed(rng.randrange(1 << 30))
    order = rng.choice((1, 2, 2, 3, 3))
    form = {
        "order": order,
        "full": order == 3 and rng.random() < 0.2,
        "closure": rng.choice((None, "tanh", "langevin")) if order == 2 else None,
        "is_causal": rng.random() < 0.4,
        "normalization": rng.choice(("mean", "mean", "sum")),
    }
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    B, H, D, E = rng.choice((1, 2)), rng.choice((1, 2)), rng.choice((1, 3, 8, 16, 33)), rng.choice((1, 4, 12))
    Lk = rng.choice((1, 2, 3, 7, 20, 33, 70))
    Lq = Lk if form["is_causal"] and rng.random() < 0.7 else rng.choice((1, 3, 20))
    offsets = (0.0, 0.0, 1.0, 30.0) + ((1e3, -1e4) if dtype == torch.float32 else (100.0,))
    spread = rng.choice((1.0, 1.0, 0.01, 10.0))
    q = torch.randn(B, H, Lq, D) * rng.choice((1.0, 0.1, 3.0))
    k = torch.randn(B, H, Lk, D) * spread + rng.choice(offsets) * torch.sign(torch.randn(D))
    v = torch.randn(B, H, Lk, E) * rng.choice((1.0, 0.0, 0.1)) + rng.choice(offsets)
    if rng.random() < 0.15:
        k = k + torch.linspace(0, rng.choice((10.0, 300.0)), Lk)[:, None]
    kind = rng.choice(("none", "none", "bool", "float", "decades", "sixty", "tiny", "huge"))
    w = None if kind == "none" else torch.rand(B, Lk) + 0.05
    if kind == "bool":
        w = w > 0.4
    elif kind == "decades":
        w = 10 ** (torch.rand(B, Lk) * 12 - 6)
    elif kind == "sixty":
        w = 10 ** (torch.rand(B, Lk) * 60 - 30)
        form["normalization"] = "mean"
    elif kind == "tiny":
        decades = rng.choice((-5, -8, -30, -40))
        w = w * 10.0**decades
        if decades == -40:  # sums would have few digits or none
            form["normalization"] = "mean"
    elif kind == "huge":
        w = w * 10.0 ** rng.choice((5, 30, 37))
        form["normalization"] = "mean"
    if w is not None and kind != "bool" and rng.random() < 0.4:
        w = w * (torch.rand(B, Lk) > 0.3)
    how = {"scale": rng.choice((None, None, 0.3, 2.0, 0.0, -0.5, 1e3)), "key_mask": w}
    if how["scale"] == 1e3:  # about as large logits
        k = k / 300
    q = q.repeat_interleave(rng.choice((1, 1, 2)), 1)
    q = q + 0.5 * torch.randn(q.shape) * q.std(correction=0)
    how["enable_gqa"] = q.shape[1] > H
    tokens = [x.to(dtype) for x in (q, k, v)]
    if rng.random() < 0.5:  # as of a projection
        tokens = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in tokens]
    return form, how, tokens, w


def error(found: Tensor, exact: Tensor) -> float:
    """Relative, but for what the dtype cannot hold: each addend may be off by half a step of its smallest numbers."""
    if not bool(torch.isfinite(found).all()):
        return math.inf
    step = 32 * torch.finfo(found.dtype).smallest_normal * torch.finfo(found.dtype).eps
    off = ((found.double() - exact).abs() - step).clamp(min=0)
    return (off.norm() / exact.norm().clamp_min(1e-300)).item()


UNITS = (1.0, 1.17, 1.37, 1.59, 1.83)


def plainly(
    tokens: list[Tensor],
    scale: float,
    weights: Tensor,
    form: dict,
    operands: torch.dtype,
    places: list[int] | None = None,
) -> Iterator[Tensor]:
    """Plain torch: the oracle's formula in float32, with keys in several units. They differ by their roundings alone,
    which may cancel by chance where few numbers are compared: the worst counts. Tensor cores multiply 16 bits.
    """
    for unit in UNITS:
        rounded = (lambda x: x) if operands == torch.float32 else as_operand(operands, unit)
        q, k, v = tokens
        yield row_by_row(q * (scale / unit), k * unit, v, weights.float(), form, rounded, places)


def as_operand(dtype: torch.dtype, unit: float) -> Callable[[Tensor], Tensor]:
    """Rounding to a type, of numbers and of their gradients; in multiples of a unit, of whatever exponent."""

    def to(x: Tensor) -> Tensor:
        step = unit * 2.0 ** x.abs().max().clamp_min(1e-30).log2().floor()
        return (x / step).to(dtype).to(x.dtype) * step

    def rounded(x: Tensor) -> Tensor:
        out = x + (to(x.detach()) - x).detach()
        out.register_hook(to)
        return out

    return rounded


def small(q: Tensor, k: Tensor) -> Tensor:
    """Whether logits about the mean of the keys are of order 1; q carries the scale."""
    k = (k - k.mean(-2, keepdim=True)).repeat_interleave(q.shape[1] // k.shape[1], 1)
    return (q @ k.transpose(-1, -2)).std(correction=0) < 2


def allowed(plains: list[Tensor], exact: Tensor, few: float, dtype: torch.dtype) -> float:
    """A few roundings, or twice what plain torch is off where it has an answer."""
    off = max(error(plain.to(dtype), exact) for plain in plains)
    return max(few, 2 * off) if math.isfinite(off) else few


def run(rng: random.Random, kernels: bool) -> Found | None:
    """One case: where it is worst, the error there, what is allowed, and what was asked."""
    form, how, tokens, w = draw(rng)
    mapped, places = not kernels and rng.random() < 0.1, None
    if mapped:
        Lk = tokens[1].shape[-2]
        tokens[2] = torch.eye(Lk, dtype=tokens[2].dtype).expand(*tokens[1].shape[:-1], Lk)
        places = [rng.randrange(Lk + 2) for _ in range(tokens[0].shape[-2])] if form["is_causal"] else None
    dtype, (q, k, v) = tokens[0].dtype, tokens
    backend = rng.choice(("triton", "reference")) if kernels else rng.choice(("auto", "auto", "reference"))
    wide = [x.double().requires_grad_() for x in tokens]
    scale = q.shape[-1] ** -0.5 if how["scale"] is None else how["scale"]
    weights = torch.ones(k.shape[0], k.shape[-2], dtype=torch.float64) if w is None else w.double()
    exact = row_by_row(wide[0] * scale, wide[1], wide[2], weights, form, places=places)
    largest = 0.9 * torch.finfo(dtype).max
    if exact.abs().max() > largest:
        return None
    leaves = [x.detach().clone().requires_grad_() for x in tokens]
    named = f"scores at {places} " if mapped else ""
    named += f"{dtype} {backend} q{tuple(q.shape)} k{tuple(k.shape)} E{v.shape[-1]} {form} scale={how['scale']}"
    named += f" k~{k.float().mean():.3g}+-{k.float().std():.2g} v~{v.float().mean():.3g}+-{v.float().std():.2g}"
    named += "" if w is None else f" w {w.dtype} {w.float().min():.2g}..{w.float().max():.2g}"
    try:
        if mapped:
            out = cumulant.scores(*leaves[:2], **form, **how, positions=places)
        else:
            out = cumulant.attention(*leaves, **form, **how, backend=backend)
    except ValueError as refused:
        return None if backend == "triton" else ("refused", math.inf, 0.0, f"{named}: {refused}")
    grad = torch.randn(out.shape).to(dtype)
    if not out.requires_grad:  # weights of order 1 hang on nothing
        return "out", error(out, exact), allowed([exact], exact, 1.25 * HALF[dtype], dtype), named
    found = torch.autograd.grad(out, leaves, grad, allow_unused=True)
    wanted = torch.autograd.grad(exact, wide, grad.double(), allow_unused=True)
    few = (64 if dtype == torch.float32 else 8) * HALF[dtype]
    tight = (
        backend == "triton" and form["is_causal"] and dtype != torch.float32 and bool(small(wide[0] * scale, wide[1]))
    )
    equal = any(bool((x == x[..., :1, :]).all(-2).any()) for x in (k, v))
    compared = [("out", 0, error(out, exact), exact)]
    for at, (name, a, b) in enumerate(zip(("dq", "dk", "dv"), found, wanted, strict=True), 1):
        # equal keys or values, of all tokens or of those seen, leave queries and keys the rounding of the oracle alone
        could = grad.double().norm() * weights.sum().clamp(min=1) * v.abs().max()
        could *= (abs(scale) * q.double().norm(dim=-1).amax()).clamp(min=1)
        nothing = b is None or b.norm() <= 1e-12 * could  # float64 itself has lost the digits, ours and the oracle's
        if a is not None and not nothing and (name == "dv" or not equal) and b.abs().max() < largest:
            compared.append((name, at, error(a, b), b))
    name, at, here, b = max(compared, key=lambda one: one[2])
    if here <= few and not (tight and compared[0][2] > 1.25 * HALF[dtype]):
        return name, here, few, named
    narrow = [x.detach().float().requires_grad_() for x in tokens]
    plains = [
        (plain, *torch.autograd.grad(plain, narrow, grad.float(), allow_unused=True))
        for plain in plainly(narrow, scale, weights, form, dtype if backend == "triton" else torch.float32, places)
    ]
    rated = [(name, here, allowed([x[at] for x in plains], b, few, dtype), named) for name, at, here, b in compared]
    if tight:
        whole = list(plainly(narrow, scale, weights, form, torch.float32))
        rated[0] = ("out", compared[0][2], allowed(whole, exact, 1.25 * HALF[dtype], dtype), named)
    return max(rated, key=lambda one: one[1] / one[2])


def stream(rng: random.Random) -> Found | None:
    """A stream, a window or merged parts against all tokens at once."""
    form, how, (q, k, v), _ = draw(rng)
    form |= {"is_causal": False, "normalization": "mean", "closure": None}
    q, k, v = q[:, :: q.shape[1] // k.shape[1], :1].float(), k.float(), v.float()
    scale = 0.3 if how["scale"] is None else how["scale"]
    what, L = rng.choice(("stream", "window", "merge")), k.shape[-2]
    first = 0
    if what == "stream":
        held = Stream(order=form["order"], full=form["full"])
        for i in range(L):
            held.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        out = held.state.apply(q, scale)
    elif what == "window":
        size = rng.choice((1, 4, 30))
        held = SlidingWindow(size, order=form["order"], full=form["full"])
        for i in range(L):
            held.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        out, first = held.apply(q, scale), max(0, L - size)
    else:
        cut = rng.randrange(L + 1)
        parts = [
            cumulant.Moments.of(k[:, :, n], v[:, :, n], order=form["order"], full=form["full"])
            for n in (slice(0, cut), slice(cut, L))
        ]
        out = parts[0].merge(parts[1]).apply(q, scale)
    k, v = k[:, :, first:], v[:, :, first:]
    ones = torch.ones(k.shape[0], k.shape[-2], dtype=torch.float64)
    exact = row_by_row(q.double() * scale, k.double(), v.double(), ones, form)
    few, here = 64 * HALF[torch.float32], error(out, exact)
    named = f"{what} {form} k{tuple(k.shape)} k~{k.mean():.3g}+-{k.std():.2g} v~{v.mean():.3g}"
    if here <= few:
        return what, here, few, named
    return what, here, allowed(list(plainly([q, k, v], scale, ones, form, torch.float32)), exact, few, k.dtype), named


def searched(cases: int, seed: int, one: Callable[[int, random.Random], tuple[str, Found | None]]) -> int:
    """Draws so many cases, `one` by one, and prints those over their bound, the worst first; 1 if there are any.

    `one` gives the kind of a case and what was found.
    """
    counts: Counter[str] = Counter()
    bad, begin = [], time.time()
    for case in range(cases):
        kind, found = one(case, random.Random(seed * 1_000_003 + case))
        counts["not asked" if found is None else kind] += 1
        if found is not None and not found[1] <= found[2]:
            bad.append((found[1] / found[2], case, found[0], found[1], found[3]))
            counts["bad"] += 1
    for over, case, where, size, named in sorted(bad, reverse=True)[:40]:
        print(f"case {case} {where} {size:.1e} ({over:.1f} x) {named}")
    print(f"seed {seed}: {dict(counts)} in {time.time() - begin:.0f} s")
    return 1 if bad else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kernels", type=int, default=300, help="cases of these through Triton's interpreter: slow")
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    every = max(1, args.cases // max(1, args.kernels))

    def one(case: int, rng: random.Random) -> tuple[str, Found | None]:
        kernels = args.kernels > 0 and case % every == 0
        found = stream(rng) if not kernels and case % 5 == 1 else run(rng, kernels)
        streamed = found is not None and found[0] in ("stream", "window", "merge")
        return "kernel" if kernels else "stream" if streamed else "call", found

    return searched(args.cases, args.seed, one)


if __name__ == "__main__":
    sys.exit(main())
