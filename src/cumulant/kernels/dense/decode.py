"""One decoding step on the GPU: take in a token, answer a query, with the state staying where it is.

Shape legend: B batch, H key heads, G query heads for each, D key width, E value width; BD, BE padded to powers of two.

One program per (batch, key head). Taking in a token (k, v) of weight 1, with dk = k - k_mean, dv = v - v_mean and
r = 1 / (W + 1), moves the means by r dk, r dv and

    S += W r dk dv^T      P += W r dk^2
    T += -2 r dk S - r (P + W r^2 dk^2) dv^T + (W r)^3 dk^2 dv^T          (S and P those before the step)

The state is read once and written once: 2 x 4 D E bytes at order 2, twice that at order 3, whatever the length so far.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from ...moments import Moments
from ..launch import on_device, padded


@triton.jit
def step_kernel(
    q, k, v, out, W, k_mean, v_mean, S, P, T, q_b, q_h, k_b, k_h, v_b, v_h, scale,
    ORDER: tl.constexpr, H: tl.constexpr, G: tl.constexpr, D: tl.constexpr, E: tl.constexpr,
    BD: tl.constexpr, BE: tl.constexpr,
):  # fmt: skip
    pair = tl.program_id(0)
    b, h = (pair // H).to(tl.int64), (pair % H).to(tl.int64)
    pair = pair.to(tl.int64)
    d, e = tl.arange(0, BD), tl.arange(0, BE)
    inside = (d < D)[:, None] & (e < E)[None, :]
    cells = pair * D * E + d[:, None] * E + e[None, :]
    weight = tl.load(W + pair)
    km = tl.load(k_mean + pair * D + d, mask=d < D, other=0.0)
    vm = tl.load(v_mean + pair * E + e, mask=e < E, other=0.0)
    # Means are float64: far from the origin their difference to a token is small.
    dk = (tl.load(k + b * k_b + h * k_h + d, mask=d < D, other=0.0).to(tl.float32).to(tl.float64) - km).to(tl.float32)
    dv = (tl.load(v + b * v_b + h * v_h + e, mask=e < E, other=0.0).to(tl.float32).to(tl.float64) - vm).to(tl.float32)
    r = 1.0 / (weight + 1.0)
    keep = weight * r
    s = tl.load(S + cells, mask=inside, other=0.0)
    if ORDER == 3:
        p = tl.load(P + pair * D + d, mask=d < D, other=0.0)
        t = tl.load(T + cells, mask=inside, other=0.0)
    tl.debug_barrier()  # every warp has read the state, which the quickest is about to overwrite
    if ORDER == 3:
        column = (keep * keep * keep - weight * r * r * r) * dk * dk - r * p
        t += -2.0 * r * dk[:, None] * s + column[:, None] * dv[None, :]
        tl.store(T + cells, t, mask=inside)
        tl.store(P + pair * D + d, p + keep * dk * dk, mask=d < D)
    s += keep * dk[:, None] * dv[None, :]
    tl.store(S + cells, s, mask=inside)
    vm += r * dv
    tl.store(k_mean + pair * D + d, km + r * dk, mask=d < D)
    tl.store(v_mean + pair * E + e, vm, mask=e < E)
    tl.store(W + pair, weight + 1.0)
    for g in range(G):
        head = h * G + g
        x = tl.load(q + b * q_b + head * q_h + d, mask=d < D, other=0.0).to(tl.float32) * scale
        row = vm.to(tl.float32) + r * tl.sum(x[:, None] * s, 0)
        if ORDER == 3:
            row += 0.5 * r * tl.sum((x * x)[:, None] * t, 0)
        tl.store(out + (b * H * G + head) * E + e, row.to(out.dtype.element_ty), mask=e < E)


def step(state: Moments, query: Tensor, key: Tensor, value: Tensor, scale: float) -> Tensor:
    """Merges key (B, H, 1, D), value (B, H, 1, E) into the state in place and applies query (B, G H, 1, D)."""
    B, H, _, D = key.shape
    E, G = value.shape[-1], query.shape[1] // H
    query, key, value = (x if x.stride(-1) == 1 else x.contiguous() for x in (query, key, value))
    out = query.new_empty(B, H * G, 1, E)
    P, T = (state.S, state.S) if state.P is None or state.T is None else (state.P, state.T)
    with on_device(query.device):
        step_kernel[(B * H,)](
            query, key, value, out, state.weight, state.key_mean, state.value_mean, state.S, P, T,
            query.stride(0), query.stride(1), key.stride(0), key.stride(1), value.stride(0), value.stride(1), scale,
            ORDER=state.order, H=H, G=G, D=D, E=E, BD=padded(D), BE=padded(E), num_warps=4,
        )  # fmt: skip
    return out
