"""Hostile numbers for clusters and packed sequences: `python -m tools.fuzz_clusters --cases 10000 --seed 1`.

Beside `tools.fuzz`, which draws `attention`, `Stream`, `SlidingWindow` and `Moments`. The oracle enumerates tokens in
float64, from specs/local-cumulants.md alone: clusters that are named token by token, and softmax, which clusters of any
kind are where all of them are near, and a merged stream that has room for all. Drawn are dtypes, closures, responses,
full variances, prefixes, weights over up to sixty decades, near clusters that each query chooses, uneven blocks of
grids, causal blocks with `keep`, `recent` and sinks, trees with leaves and exact tokens, expansions around the mean
query, grouped queries, E beside D, empty inputs, views, offsets of keys and values. What passes: a few roundings of the
dtype, or twice what the same enumeration in float32 is off, its result rounded: the worst of five units of keys and
values, as in `tools.fuzz`, since roundings of a few numbers may cancel by chance. Where nearly all of a gradient
cancels, which no unit tells, a backward error passes, as of any sum: four roundings of float32 of what dq and dk could
be (`largest`), and two of the dtype of a sum of absolute values, in dv over rows, in dk and dv over query heads that
share a key head. (Seed 8104, case 649 of the draws before: dv 8e-6 off, plain torch 2e-6; absolute values sum to 257
times the result, so that ours is half a rounding off.)
"""

# mypy: ignore-errors
from __future__ import annotations

import argparse
import math
import random
import sys
import warnings
from collections.abc import Callable

import torch
from torch import Tensor

import cumulant
from cumulant.cluster import Blocks, ClusterStream, KMeans, MergedStream, Tree
from tools.fuzz import HALF, UNITS, Found, allowed, error, row_by_row, searched

Oracle = Callable[[Tensor, Tensor, Tensor], Tensor]


def closed(s2: Tensor, closure: str) -> tuple[Tensor, Tensor]:
    """phi and f of the variance s^2: gauss s^2 / 2; tanh log cosh s; langevin log(sinh(y) / y), y = sqrt(3) s."""
    s = (s2 + 1e-30).sqrt()
    if closure == "gauss":
        return 0.5 * s2, torch.ones_like(s2)
    if closure == "tanh":
        phi = s + torch.log1p(torch.exp(-2 * s)) - math.log(2)
        return phi, torch.where(s < 1e-3, 1 - s2 / 3, torch.tanh(s) / s)
    y = math.sqrt(3) * s
    phi = y + torch.log(-torch.expm1(-2 * y) / (2 * y))
    f = 3 * (1 / torch.tanh(y) - 1 / y) / y
    return torch.where(y < 1e-2, 0.5 * s2 - s2 * s2 / 20, phi), torch.where(y < 1e-2, 1 - s2 / 5, f)


class UndecidedError(Exception):
    """Two clusters weigh the same to the digits of float32: either may be chosen."""


def clusters_of(
    ids: Tensor, w: Tensor, prefix: int, closure: str, response: object, full: bool, near: int = 0
) -> Oracle:
    """ids (B, H, L) of tokens after the prefix, w (B, L + prefix); q carries the scale. The `near` clusters of largest
    mass are met token by token."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        outs = []
        for b in range(q.shape[0]):
            heads = [one(q[b, h], k[b, h], v[b, h], ids[b, h], w[b].to(q.dtype)) for h in range(q.shape[1])]
            outs.append(torch.stack(heads))
        return torch.stack(outs)

    def one(q: Tensor, k: Tensor, v: Tensor, ids: Tensor, w: Tensor) -> Tensor:
        origin = k.detach().mean(0) if len(k) else 0.0
        k = k - origin
        logits, values = [], []
        for i in range(prefix):
            if w[i] > 0:
                logits.append(q @ k[i] + w[i].log())
                values.append(v[i].expand(len(q), -1))
        rest, pooled, tokens = w[prefix:], 0.0, w[prefix:].sum()
        found = []
        for c in ids.unique().tolist():
            at = (ids == c) & (rest > 0)
            if not at.any():
                continue
            p, kc, vc = rest[at] / rest[at].sum(), k[prefix:][at], v[prefix:][at]
            km, vm = p @ kc, p @ vc
            dk, dv = kc - km, vc - vm
            S = (p[:, None] * dk).mT @ dv
            s2 = ((q @ dk.mT).square() * p).sum(-1) if full else q.square() @ (p @ dk.square())
            phi, f = closed(s2, closure)
            found.append((q @ km + rest[at].sum().log() + phi, vm, f, S, q @ kc.mT + rest[at].log(), vc))
            pooled = pooled + rest[at].sum() / tokens * S
        chosen = chosen_of([one[0] for one in found], near)
        for (z, vm, f, S, each, vc), here in zip(found, chosen, strict=True):
            S = pooled if response == "pooled" else S
            if here.any():
                z = z.masked_fill(here, -math.inf)
                logits += each.masked_fill(~here[:, None], -math.inf).unbind(-1)
                values += [x.expand(len(q), -1) for x in vc]
            logits.append(z)
            values.append(vm if response == 0 else vm + f[:, None] * (q @ S))
            values[-1] = values[-1].expand(len(q), -1)
        if not logits:
            return v.new_zeros(len(q), v.shape[-1]) + 0 * (q.sum() + k.sum() + v.sum())
        p = torch.stack(logits).softmax(0)
        return sum(p[i][:, None] * values[i] for i in range(len(values)))

    return run


def chosen_of(masses: list[Tensor], near: int) -> list[Tensor]:
    """Which rows are near to each cluster: those for which it is among the `near` of largest mass."""
    if not near or not masses:
        return [torch.zeros_like(z, dtype=torch.bool) for z in masses]
    z = torch.stack(masses, -1).detach()
    if near >= z.shape[-1]:
        return list(torch.ones_like(z, dtype=torch.bool).unbind(-1))
    best = z.sort(-1, descending=True).values
    if (best[:, near - 1] - best[:, near] < 1e-3 * (1 + best[:, 0].abs())).any():
        raise UndecidedError
    return list((z >= best[:, near - 1 : near]).unbind(-1))


def past_of(w: Tensor, blocks: Blocks, sinks: int, closure: str, response: object) -> Oracle:
    """Causal: row i sees the tokens of its block and of `recent` blocks before it one by one, and the first `sinks`
    that take part; older blocks as clusters, of which the two oldest of a size merge wherever there are keep + 2."""

    def ages(n: int) -> list[list[int]]:
        if blocks.keep is None:
            return [[b] for b in range(n)]
        levels: list[list[list[int]]] = [[]]
        for b in range(n):
            levels[0].append([b])
            for j, level in enumerate(levels):
                if len(level) == blocks.keep + 2:
                    if j + 1 == len(levels):
                        levels.append([])
                    levels[j + 1].append(level.pop(0) + level.pop(0))
        return [one for level in levels for one in level]

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        rows = []
        for i in range(q.shape[-2]):
            block, L = i // blocks.size, k.shape[-2]
            place = torch.arange(L) // blocks.size
            outs = []
            for b in range(q.shape[0]):
                seen = w[b].clone()
                seen[i + 1 :] = 0
                exact = (place >= block - blocks.recent) & (seen > 0)
                first = (seen > 0).nonzero().flatten()[:sinks]
                exact[first] = True
                ids = torch.full((L,), -1)
                for c, members in enumerate(ages(max(0, block - blocks.recent))):
                    for one in members:
                        ids[(place == one) & ~exact] = c
                kept = torch.cat((exact.nonzero().flatten(), ((ids >= 0) & (seen > 0)).nonzero().flatten()))
                alone = int(exact.sum())
                of = clusters_of(
                    ids[kept[alone:]].expand(1, q.shape[1], -1), seen[kept][None], alone, closure, response, False
                )
                outs.append(of(q[b : b + 1, :, i : i + 1], k[b : b + 1, :, kept], v[b : b + 1, :, kept]))
            rows.append(torch.cat(outs))
        return torch.cat(rows, -2)

    return run


def softmax_of(w: Tensor, is_causal: bool, centred: bool = True) -> Oracle:
    """Not `centred`: as F.scaled_dot_product_attention multiplies, wherever the keys lie."""

    def run(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k - k.detach().mean(-2, keepdim=True) if k.shape[-2] and centred else k
        z = q @ k.mT + w.to(q.dtype).log()[:, None, None, :]
        if is_causal:
            z = z.masked_fill(torch.ones(z.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
        seen = (z > -math.inf).any(-1, keepdim=True)
        return torch.where(seen, z, 0.0).softmax(-1).masked_fill(~seen, 0) @ v if z.shape[-1] else q[..., :0] @ v

    return run


def tokens_of(rng: random.Random, empty: bool) -> tuple[Tensor, Tensor, Tensor, int]:
    torch.manual_seed(rng.randrange(1 << 30))
    dtype = rng.choice((torch.float32, torch.float32, torch.bfloat16, torch.float16))
    B, H, D, E = rng.choice((1, 2)), rng.choice((1, 2)), rng.choice((1, 5, 8, 16)), rng.choice((1, 4, 8, 12))
    group, Lk, Lq = rng.choice((1, 1, 2)), rng.choice((1, 2, 3, 7, 20, 33, 70)), rng.choice((1, 3, 20, 40))
    if empty:
        Lk, Lq = rng.choice(((0, 3), (4, 0), (0, 0)))
    offsets = (0.0, 0.0, 1.0, 30.0) + ((1e3,) if dtype == torch.float32 else (100.0,))
    q = torch.randn(B, Lq, H * group, D) * rng.choice((1.0, 0.1, 3.0))
    k = torch.randn(B, Lk, H, D) * rng.choice((1.0, 0.01, 3.0)) + rng.choice(offsets) * torch.sign(torch.randn(D))
    v = torch.randn(B, Lk, H, E) * rng.choice((1.0, 0.1)) + rng.choice(offsets)
    q, k, v = (x.to(dtype).transpose(1, 2) for x in (q, k, v))  # views, as of a projection
    return (*(x if rng.random() < 0.5 else x.contiguous() for x in (q, k, v)), group)


def weights_of(rng: random.Random, B: int, L: int) -> Tensor | None:
    kind = rng.choice(("none", "none", "bool", "float", "small", "sixty"))
    w = torch.rand(B, L) + 0.05
    if kind == "none":
        return None
    if kind == "sixty":
        return 10 ** (w * 57 - 30)
    if kind == "bool":
        return w > 0.4
    return w * (torch.rand(B, L) > 0.2) * (1e-6 if kind == "small" else 1.0)


def largest(tokens: list[Tensor], grad: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """What dq and dk of softmax could be if nothing cancelled: scale |do| |v~| |k~| of each row, and the sum of
    scale |do| |v~| |q| over rows, with the largest distance of a value and of a key from their mean."""
    q, k, v = (x.detach().double() for x in tokens)
    k, v = ((x - x.mean(-2, keepdim=True)).norm(dim=-1).max() for x in (k, v))
    do = grad.double().norm(dim=-1)
    return scale * v * k * do.norm(), scale * v * (do * q.norm(dim=-1)).sum()


def compared(
    named: str, call: Callable[..., Tensor], oracle: Oracle, tokens: list[Tensor], scale: float, group: int
) -> Found | None:
    """Outputs and gradients: where they are worst."""
    leaves = [x.detach().requires_grad_() for x in tokens]
    out = call(*leaves)
    grad = torch.randn(out.shape).to(out.dtype)
    found = [out.detach(), *torch.autograd.grad(out, leaves, grad, allow_unused=True)] if out.requires_grad else [out]

    def wanted(dtype: torch.dtype, unit: float = 1.0, grad: Tensor = grad, absolute: bool = False) -> list[Tensor]:
        """absolute: gradients of keys and values as sums of the absolute ones of the query heads that share them."""
        wide = [x.detach().to(dtype).requires_grad_() for x in tokens]
        q, k, v = wide[0] * (scale / unit), *((x * unit).repeat_interleave(group, 1) for x in wide[1:])
        exact = oracle(q, k, v) / unit
        if len(found) == 1 or not exact.requires_grad:
            return [exact]
        ends = [wide[0], k, v] if absolute else wide
        grads = torch.autograd.grad(exact, ends, grad.to(dtype), allow_unused=True)
        if absolute:
            grads = [
                x if x is None else x.abs().unflatten(1, (-1, group if i else 1)).sum(2) for i, x in enumerate(grads)
            ]
        return [exact.detach(), *grads]

    exact, few = wanted(torch.float64), (64 if out.dtype == torch.float32 else 8) * HALF[out.dtype]
    if exact[0].numel() == 0:
        return named.split()[0], 0.0 if out.shape == exact[0].shape else math.inf, few, named
    norm = tokens[2].double().norm() * grad.double().norm()
    rated = []
    for name, a, b, at in zip(("out", "dq", "dk", "dv"), found, exact, range(4), strict=False):
        if a is None or b is None or not b.numel() or (at in (1, 2) and b.norm() <= 1e-12 * norm):
            continue
        if b.abs().max() > 0.9 * torch.finfo(out.dtype).max:
            continue
        rated.append((error(a, b), name, at, b))
    here, name, at, b = max(rated, key=lambda one: one[0] if one[0] == one[0] else math.inf)
    if here <= few:
        return name, here, few, named
    plains, least = [wanted(torch.float32, unit) for unit in UNITS], dict.fromkeys(range(4), few)
    for at, most in enumerate(largest(tokens, grad, scale), 1):
        if len(exact) == 4 and exact[at] is not None and exact[at].norm() > 0:
            least[at] = max(few, 4 * HALF[torch.float32] * (most / exact[at].norm()).item())
    for at, sign in ((2, grad), (3, grad.abs())):
        if len(exact) == 4 and exact[at] is not None and exact[at].norm() > 0 and (at == 3 or group > 1):
            terms = wanted(torch.float64, grad=sign, absolute=True)[at]
            least[at] = max(least[at], 2 * HALF[out.dtype] * (terms.norm() / exact[at].norm()).item())
    worst = max(
        ((e, n, allowed([plain[i] for plain in plains], x, least[i], out.dtype)) for e, n, i, x in rated),
        key=lambda one: one[0] / one[2],
    )
    return worst[1], worst[0], worst[2], named


def on_grid(rng: random.Random, L: int) -> tuple[tuple[int, ...], tuple[int, ...], Tensor]:
    """Sides of a grid of L tokens, parts of each side that differ by one token at most, and the block of each token."""
    sides = [L]
    for _ in range(rng.choice((1, 2))):
        cut = rng.choice([n for n in range(1, sides[0] + 1) if sides[0] % n == 0])
        sides[:1] = [cut, sides[0] // cut]
    parts = tuple(min(side, rng.choice((1, 2, 3))) for side in sides)
    ids = torch.zeros((), dtype=torch.long)
    for side, count in zip(sides, parts, strict=True):
        ids = ids[..., None] * count + torch.arange(side) * count // side
    return tuple(sides), parts, ids.flatten()


def clustered(rng: random.Random):
    q, k, v, group = tokens_of(rng, rng.random() < 0.03)
    B, H, Lk, D = k.shape
    prefix = rng.choice((0, 0, min(2, Lk)))
    L, K = Lk - prefix, rng.choice((1, 2, 5, 9))
    ids = torch.randint(K, (B, H, L)) if L else torch.zeros(B, H, 0, dtype=torch.long)
    clusters, grid = ids, None
    if L and rng.random() < 0.3:
        grid, clusters, of_token = on_grid(rng, L)
        ids = of_token.expand(B, H, L)
    w = weights_of(rng, B, Lk)
    full, response = rng.random() < 0.2, rng.choice((None, None, 0, "pooled"))
    closure, scale = rng.choice(("tanh", "langevin", "gauss")), rng.choice((None, 0.3))
    ones = torch.ones(B, Lk) if w is None else w
    used = D**-0.5 if scale is None else scale
    spread = (q.float().norm(dim=-1).max() * used * (k.float().std() if k.numel() > 1 else 0)) if q.numel() else 0
    if closure == "gauss" and spread > 6:  # exponents that no dtype holds
        closure = "tanh"
    options = {"prefix": prefix, "closure": closure, "response": response, "scale": scale, "key_mask": w, "grid": grid}
    near = rng.choice((0, 0, 1, 3)) if Lk > prefix else 0
    options |= {"variance": "full" if full else "diagonal", "enable_gqa": group > 1, "near": near}
    named = f"assigned {q.dtype} q{tuple(q.shape)} k{tuple(k.shape)} E{v.shape[-1]} "
    named += f"{clusters if grid else f'K{K}'} { {n: x for n, x in options.items() if n != 'key_mask'} }"
    named += f" w={None if w is None else w.dtype}"
    named += f" k~{k.float().mean():.3g}+-{k.float().std():.2g} v~{v.float().mean():.3g}"
    oracle = clusters_of(ids.repeat_interleave(group, 1), ones.double(), prefix, closure, response, full, near)
    call = lambda q, k, v: cumulant.cluster_attention(q, k, v, clusters=clusters, **options)  # noqa: E731
    return compared(named, call, oracle, [q, k, v], used, group)


def near_all(rng: random.Random):
    q, k, v, group = tokens_of(rng, rng.random() < 0.03)
    B, _, Lk, D = k.shape
    K = rng.choice((1, 2, 4, 8))
    kinds = [K, Blocks(rng.choice((1, 4, 16))), Tree(K), Tree(K, width=rng.choice((1, 4))), KMeans(K)]
    kinds += [Tree(K, leaves=2, opened=K), Tree(K, leaves=rng.choice((2, 4)), opened=K, exact=128)]
    clusters = rng.choice(kinds)
    w = weights_of(rng, B, Lk)
    w = None if w is None else w > 0 if isinstance(clusters, Tree | KMeans) or rng.random() < 0.5 else w
    options = {"near": 1 << 10, "key_mask": w, "enable_gqa": group > 1, "prefix": rng.choice((0, min(1, Lk)))}
    options |= {"response": 0 if getattr(clusters, "leaves", 1) > 1 else rng.choice((None, 0))}
    named = (
        f"softmax {q.dtype} {clusters} q{tuple(q.shape)} k{tuple(k.shape)} E{v.shape[-1]} prefix={options['prefix']}"
    )
    named += (
        f" w={None if w is None else w.dtype} k~{k.float().mean():.3g}+-{k.float().std():.2g} v~{v.float().mean():.3g}"
    )
    ones = torch.ones(B, Lk) if w is None else w
    call = lambda q, k, v: cumulant.cluster_attention(q, k, v, clusters=clusters, **options)  # noqa: E731
    return compared(named, call, softmax_of(ones.double(), False), [q, k, v], D**-0.5, group)


def past(rng: random.Random):
    """Causal blocks, with `keep`, `recent` and sinks."""
    q, k, v, group = tokens_of(rng, False)
    B, H, L, D = k.shape
    L = min(L, 20)
    q, k, v = torch.randn(B, H * group, L, D).to(k.dtype), k[:, :, :L], v[:, :, :L]
    blocks = Blocks(rng.choice((1, 2, 5)), keep=rng.choice((None, 0, 1, 2)), recent=rng.choice((0, 0, 1)))
    w = weights_of(rng, B, L)
    sinks, closure, response = rng.choice((0, 0, 1, min(3, L))), rng.choice(("tanh", "langevin")), rng.choice((None, 0))
    options = {"prefix": sinks, "closure": closure, "response": response}
    named = f"past {q.dtype} {blocks} q{tuple(q.shape)} k{tuple(k.shape)} E{v.shape[-1]} {options}"
    named += (
        f" w={None if w is None else w.dtype} k~{k.float().mean():.3g}+-{k.float().std():.2g} v~{v.float().mean():.3g}"
    )
    ones = torch.ones(B, L) if w is None else w
    call = lambda q, k, v: cumulant.cluster_attention(  # noqa: E731
        q, k, v, clusters=blocks, is_causal=True, key_mask=w, enable_gqa=group > 1, **options
    )
    return compared(named, call, past_of(ones.double(), blocks, sinks, closure, response), [q, k, v], D**-0.5, group)


def about_mean(rng: random.Random):
    """Expanded around the mean query: weights of softmax there, the rest of each query expanded."""
    q, k, v, group = tokens_of(rng, False)
    B, _, Lk, D = k.shape
    order = rng.choice((1, 2, 3))
    form = {"order": order, "full": order == 3 and rng.random() < 0.3, "is_causal": False}
    form |= {"normalization": "mean", "closure": None}
    w = weights_of(rng, B, Lk)
    if w is not None and not (w > 0).any(-1).all():
        return None
    ones = torch.ones(B, Lk) if w is None else w
    apart = rng.choice((0, 0, 1, min(2, q.shape[-2])))
    named = f"around {q.dtype} q{tuple(q.shape)} k{tuple(k.shape)} E{v.shape[-1]} {form} group {group} apart {apart}"
    named += (
        f" w={None if w is None else w.dtype} k~{k.float().mean():.3g}+-{k.float().std():.2g} v~{v.float().mean():.3g}"
    )

    def part(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mean = q.mean(-2, keepdim=True)
        p = ((mean @ k.mT).squeeze(-2) + ones.to(q.dtype).log()[:, None]).softmax(-1)
        one = [x.flatten(0, 1).unsqueeze(1) for x in (q - mean, k, v)]
        return row_by_row(*one, p.flatten(0, 1), form).unflatten(0, q.shape[:2]).squeeze(2)

    def oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        k = k - k.detach().mean(-2, keepdim=True)
        return torch.cat([part(x, k, v) for x in (q[:, :, :apart], q[:, :, apart:]) if x.shape[-2]], -2)

    options = {"order": order, "full": form["full"], "around": "mean", "key_mask": w, "enable_gqa": group > 1}
    call = lambda q, k, v: cumulant.attention(q, k, v, apart=apart, **options)  # noqa: E731
    return compared(named, call, oracle, [q, k, v], D**-0.5, group)


def streamed(rng: random.Random):
    """A stream of blocks that are all recent, or of room for all: causal softmax."""
    q, k, v, group = tokens_of(rng, False)
    B, H, L, D = k.shape
    q = torch.randn(B, H * group, L, D).to(k.dtype)
    what = rng.choice(("cluster stream", "merged stream"))
    stream = ClusterStream(Blocks(4, recent=40)) if what[0] == "c" else MergedStream(L + 600, chunk=rng.choice((4, 64)))
    cut = rng.randrange(L + 1)
    outs = []
    with torch.no_grad():
        if cut and what[0] == "c":
            stream.append(k[:, :, :cut], v[:, :, :cut])
        elif cut:
            outs.append(stream.step(q[:, :, :cut], k[:, :, :cut], v[:, :, :cut]))
        outs += [stream.step(*(x[:, :, i : i + 1] for x in (q, k, v))) for i in range(cut, L)]
    if not outs:
        return None
    out = torch.cat(outs, -2)
    named = (
        f"{what} {k.dtype} k{tuple(k.shape)} group {group} cut {cut} k~{k.float().mean():.3g}+-{k.float().std():.2g}"
    )
    oracle = softmax_of(torch.ones(B, L, dtype=torch.float64), True, what[0] == "c")
    rows = slice(L - out.shape[-2], L)

    def last(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return oracle(q, k, v)[:, :, rows]

    _, here, bound, named = compared(named, lambda *_: out, last, [q, k, v], D**-0.5, group)
    return what, here, bound, named


def packed(rng: random.Random):
    """Sequences end to end, in any order of expansion: each alone."""
    _, k, v, group = tokens_of(rng, False)
    order = rng.choice((1, 2, 3))
    form = {"order": order, "full": order == 3 and rng.random() < 0.3, "is_causal": rng.random() < 0.4}
    form |= {"normalization": "mean", "closure": rng.choice((None, "tanh")) if order == 2 else None}
    D, lengths = k.shape[-1], [rng.choice((1, 2, 9, 30)) for _ in range(3)]
    lengths.insert(rng.randrange(4), 0)
    total, H = sum(lengths), k.shape[1]
    far = [x.float().mean().item() for x in (k, v)]
    qs = (torch.randn(total, H * group, D)).to(k.dtype)
    ks, vs = ((torch.randn(total, H, n) + m).to(k.dtype) for n, m in ((D, far[0]), (v.shape[-1], far[1])))
    ends = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)
    named = f"packed {k.dtype} {lengths} D{D} E{v.shape[-1]} H{H}x{group} {form} k~{far[0]:.3g} v~{far[1]:.3g}"

    def call(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (x.squeeze(0).transpose(0, 1) for x in (q, k, v))
        out = cumulant.attention_varlen(q, k, v, ends, ends, enable_gqa=group > 1, **form)
        return out.transpose(0, 1).unsqueeze(0)

    def oracle(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        parts = [x.split(lengths, -2) for x in (q, k, v)]
        each = [
            row_by_row(a, b, c, torch.ones(1, b.shape[-2], dtype=b.dtype), form)
            for a, b, c in zip(*parts, strict=True)
            if b.shape[-2]
        ]
        return torch.cat(each, -2)

    tokens = [x.transpose(0, 1).unsqueeze(0) for x in (qs, ks, vs)]
    return compared(named, call, oracle, tokens, D**-0.5, group)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    args = parser.parse_args()
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)

    def one(_: int, rng: random.Random) -> tuple[str, Found | None]:
        kind = rng.choice((clustered, clustered, near_all, streamed, packed, past, about_mean))
        try:
            return kind.__name__, kind(rng)
        except UndecidedError:
            return kind.__name__, None

    return searched(args.cases, args.seed, one)


if __name__ == "__main__":
    sys.exit(main())
