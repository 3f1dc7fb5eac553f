"""Local linear attention (LLA): a weighted affine fit of values to keys around each query, read at the query.

Shape legend: ... leading dimensions, H heads, L queries, S keys, D key width, E value width, b queries of a block.

With softmax weights w_j of a query, their means k_bar, v_bar and covariances C = Cov(k, k), B = Cov(v, k), the fit
min_{c,W} sum_j w_j |v_j - c - W (k_j - q)|^2 + ridge |W|^2 has the intercept

    out = v_bar - B g,   (C + ridge I) g = k_bar - q,   i.e. weights s_j = w_j (1 - (k_j - k_bar).g)

This is the published form, rho = Sigma^-1 mu and s_j = w_j (1 - z_j.rho) / (omega - mu.rho) with the ridge times omega,
after one Sherman-Morrison step. Nothing here is divided by a difference, so that the published delta = 1e-12, which
keeps that denominator from 0, is not needed, and the system is better conditioned: C is centred, Sigma is not.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..call import Call
from ..kernels import notice
from ..kernels.lla import plan
from ..kernels.once import once_differentiable
from ..tensors import ABSENT, broken, log_weights, nothing, repeat_heads, softmax_or_zero, spoiled, wide
from ..tracing import transformed
from .lla_solver import STEPS, Settings, solver_of
from .mixing import Mixer
from .options import ridge as check_ridge
from .registry import can, options_of, register

RIDGE = 10.0
DIRECT_UP_TO = 32  # width above which "auto" takes conjugate gradients: the direct solve costs D times as much a step


@options_of(Settings)
def lla_attention(call: Call, *, ridge: float | Tensor = RIDGE, qk_norm: bool = False, **solving: Any) -> Tensor:
    """out_i = c_i of min_{c,W} sum_j w_ij |v_j - c - W (k_j - q_i)|^2 + ridge |W|^2, w_i = softmax_j(scale q_i.k_j).

    Weights may be negative; a row without any key gives 0. The ridge acts on normalised weights (the released code; the
    paper's plain lambda I would depend on the shift of the softmax). It is a number or a tensor that broadcasts to
    (..., H, L), with gradients (the released code has none). `qk_norm` normalises queries and keys to length 1, where
    the softmax is a Gaussian kernel in k - q (ours, to match the theory).

    `solver`: "direct" solves the D x D systems; "cg" runs at most `iterations` of conjugate gradients, which end early
    where the squared residual is below `tolerance` times its start, with `precondition` after Jacobi, and warns of rows
    that ran out of them; "auto" is direct up to D = 32 and in traced graphs, else 32 steps of "cg" and a direct solve
    of the rows that they leave short. Gradients are implicit: one more solve, no step of it is recorded. Works in
    blocks of `block` queries. On a GPU "auto" and "cg" without `precondition` are a Triton kernel that keeps its block
    on the chip; it takes up to 4 D steps unless told, and nobody looks whether they sufficed.
    Cost: L S (3 D + E), and 2 T L S D for T steps or L S D^2 + L D^3 direct; memory (L + S)(D + E) + b S (+ b D^2
    direct).
    """
    settings = _settings(call, **solving)
    query, key, value = call[:3]
    if query.shape[-2] == 0 or key.shape[-2] == 0:
        return nothing((*query.shape[:-1], value.shape[-1]), query, key, value, call.key_mask)
    if notice.expected(query):
        obstacle = _obstacle(call, settings)
        if obstacle is None:
            return by_kernels(call, ridge, qk_norm, settings)
        notice.plain_torch("lla", query, obstacle)
    rows, lost = _rows(call, ridge, qk_norm)
    if transformed():
        out = torch.cat([fit.out for fit in _fits(*rows, settings)], -2)
    else:
        out = _LocalLinear.apply(*rows, settings)
    return out if lost is None else spoiled(out, lost, torch.arange(out.shape[-2], device=out.device))


def _obstacle(call: Call, settings: Settings) -> str | None:
    """Why the kernels cannot take this, or None."""
    if settings.solver == "direct" or settings.precondition:
        got = f"solver={settings.solver!r}, precondition={settings.precondition}"
        return f'kernels take solver="auto" or "cg" and precondition=False, got {got}'
    if call.key_mask is not None and call.key_mask.requires_grad and torch.is_grad_enabled():
        return "kernels have no gradient for a key_mask that learns"
    return plan.obstacle(call.query, call.value)


def by_kernels(call: Call, ridge: float | Tensor, qk_norm: bool, settings: Settings) -> Tensor:
    """The Triton kernels on a prepared call; with `qk_norm` they get queries and keys rounded to their dtype again."""
    from ..kernels.lla import host

    query, key, value = call[:3]
    heads, lead, count = query.shape[-3], query.shape[:-3], math.prod(query.shape[:-3])
    if qk_norm:
        query, key = (F.normalize(wide(x), dim=-1).to(x.dtype) for x in (query, key))
    lam = _ridge_of_rows(ridge, query.new_empty((), dtype=torch.float32).expand(query.shape[:-1]))
    added = log_weights(call.key_mask, lam)
    key, value = repeat_heads(key, heads), repeat_heads(value, heads)
    query, key, value = (x.reshape(count, *x.shape[-3:]) for x in (query, key, value))
    out = host.attention(
        query,
        key,
        value,
        None if added is None else added.reshape(count, key.shape[-2]),
        lam.reshape(count, *lam.shape[-2:]),
        scale=settings.scale,
        is_causal=settings.is_causal,
        iterations=settings.iterations or STEPS,
        tolerance=settings.tolerance,
    )
    return out.reshape(*lead, *out.shape[1:])


@options_of(Settings)
def lla_weights(call: Call, *, ridge: float | Tensor = RIDGE, qk_norm: bool = False, **solving: Any) -> Tensor:
    """The signed weights s_ij, (..., H, L, S); rows sum to 1. Cost: as the attention."""
    settings = _settings(call, **solving)
    rows, keys = call.query.shape[:-1], call.key.shape[-2]
    if rows[-1] == 0 or keys == 0:
        return nothing((*rows, keys), call.query, call.key, call.key_mask)
    told, lost = _rows(call._replace(value=call.key), ridge, qk_norm)
    fits = _fits(*told, settings)
    out = torch.cat([F.pad(fit.weights * (1 - fit.tilt), (0, keys - fit.keys)) for fit in fits], -2)
    return out if lost is None else spoiled(out, lost, torch.arange(out.shape[-2], device=out.device))


class Fit(NamedTuple):
    """The fits of a block of queries over the keys that any of them may see."""

    rows: slice
    keys: int
    weights: Tensor  # (..., b, S') softmax weights, 0 where a key is not seen
    key_mean: Tensor  # (..., b, D)
    slope: Tensor  # (..., b, D), g
    tilt: Tensor  # (..., b, S'), (k_j - k_bar).g
    out: Tensor  # (..., b, E)
    solve: Callable[[Tensor], Tensor]  # (C + ridge I)^-1 for rows (..., b, D)


def _fits(q: Tensor, k: Tensor, v: Tensor, lam: Tensor, added: Tensor | None, settings: Settings) -> Iterator[Fit]:
    """One `Fit` for each block of queries: what forward, backward and the weights all walk through."""
    for start in range(0, q.shape[-2], settings.block):
        rows = slice(start, min(start + settings.block, q.shape[-2]))
        seen = min(rows.stop, k.shape[-2]) if settings.is_causal else k.shape[-2]
        qb, kb = q[..., rows, :], k[..., :seen, :]
        logits = (settings.scale * qb) @ kb.mT
        if added is not None:
            logits = logits + added[..., None, :seen]
        if settings.is_causal:
            place = torch.arange(rows.start, rows.stop, device=q.device)
            logits = logits.masked_fill(torch.arange(seen, device=q.device) > place[:, None], ABSENT)
        weights = softmax_or_zero(logits)
        key_mean = weights @ kb
        solve = solver_of(weights, kb, key_mean, lam[..., rows], settings)
        slope = solve(key_mean - qb)
        tilt = slope @ kb.mT - (slope * key_mean).sum(-1, keepdim=True)
        out = (weights * (1 - tilt)) @ v[..., :seen, :]
        yield Fit(rows, seen, weights, key_mean, slope, tilt, out, solve)


class _LocalLinear(torch.autograd.Function):
    """The blocks of `_fits`, with the gradient by implicit differentiation; the weights are computed again.

    With a_j = do.v_j and Cov under the weights of a row: h = -(C + ridge I)^-1 Cov(k, a), r_j = (k_j - k_bar).h,
    f_j = a_j - a_bar + r_j, t_j the tilt. Then the logit of key j receives w_j (f_j (1 - t_j) - ridge g.h), besides

        dv_j = w_j (1 - t_j) do    dk_j = w_j ((1 - t_j) h - f_j g)    dq = -h    d ridge = -g.h

    What was added to the logits, the log of the key weights, receives the sum of theirs over rows and heads.
    """

    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, lam: Tensor, added: Tensor | None, settings: Settings
    ) -> Tensor:
        ctx.save_for_backward(q, k, v, lam, added)
        ctx.settings = settings
        return torch.cat([fit.out for fit in _fits(q, k, v, lam, added, settings)], -2)

    @staticmethod
    @partial(once_differentiable, told="LLA has first derivatives only, and its gradient is differentiated again")
    def backward(ctx: Any, do: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, lam, added = ctx.saved_tensors
        scale = ctx.settings.scale
        dq, d_lam, dk, dv = [], [], torch.zeros_like(k), torch.zeros_like(v)
        d_added = torch.zeros_like(added) if ctx.needs_input_grad[4] else None
        for fit in _fits(q, k, v, lam, added, ctx.settings):
            kb, w, g = k[..., : fit.keys, :], fit.weights, fit.slope
            row = do[..., fit.rows, :]
            a = row @ v[..., : fit.keys, :].mT
            a = a - (w * a).sum(-1, keepdim=True)
            h = -fit.solve((w * a) @ kb)
            f = a + h @ kb.mT - (h * fit.key_mean).sum(-1, keepdim=True)
            gh = (g * h).sum(-1)
            flat = w * (1 - fit.tilt)
            d_logits = flat * f - w * (lam[..., fit.rows] * gh).unsqueeze(-1)
            if d_added is not None:
                d_added[..., : fit.keys] += d_logits.sum((-3, -2)).unsqueeze(-2)
            dq.append(scale * d_logits @ kb - h)
            d_lam.append(-gh)
            dv[..., : fit.keys, :] += flat.mT @ row
            dk[..., : fit.keys, :] += scale * d_logits.mT @ q[..., fit.rows, :] + flat.mT @ h - (w * f).mT @ g
        return torch.cat(dq, -2), dk, dv, torch.cat(d_lam, -1), d_added, None


@options_of(lla_attention)
class LocalLinearAttention(Mixer):
    """LLA for a layer, with a fixed ridge or one learned for each head, softplus(parameter) (ours, not published).

    Arguments are the options of `lla_attention`; `learn_ridge` starts at `ridge`.
    """

    mechanism = "lla"

    def __init__(
        self, dim: int, num_heads: int, *, ridge: float = RIDGE, learn_ridge: bool = False, **rest: Any
    ) -> None:
        super().__init__(dim, num_heads, **rest)
        check_ridge("ridge", ridge)
        Settings(1.0, False, **{name: given for name, given in self.options.items() if name != "qk_norm"}).checked()
        self.start = float(ridge)
        self.raw_ridge = nn.Parameter(torch.empty(num_heads, 1, **self.place)) if learn_ridge else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.raw_ridge is not None:
            nn.init.constant_(self.raw_ridge, self.start + math.log(-math.expm1(-self.start)))

    @property
    def ridge(self) -> float | Tensor:
        """The ridge in use: a number, or (H, 1) where it is learned."""
        return self.start if self.raw_ridge is None else F.softplus(wide(self.raw_ridge))

    def asked(self, call: Call, x: Tensor | None) -> tuple[Call, dict[str, Any]]:
        return call, {"ridge": self.ridge, **self.options}


def _rows(
    call: Call, ridge: float | Tensor, qk_norm: bool
) -> tuple[tuple[Tensor, Tensor, Tensor, Tensor, Tensor | None], Tensor | None]:
    """q, k, v in at least float32 with equal heads, the ridge of each row, (..., H, L), and the log of key weights; and
    causally, which tokens (..., H, L) hold no numbers: there k and v are 0."""
    q = wide(call.query)
    k, v = (repeat_heads(wide(x), q.shape[-3]) for x in call[1:3])
    if qk_norm:
        q, k = F.normalize(q, dim=-1), F.normalize(k, dim=-1)
    lost = None
    if call.is_causal:
        lost = broken(k, v)
        k, v = (x.masked_fill(lost.unsqueeze(-1), 0) for x in (k, v))
    return (q, k, v, _ridge_of_rows(ridge, q[..., 0]), log_weights(call.key_mask, q)), lost


def _ridge_of_rows(ridge: float | Tensor, rows: Tensor) -> Tensor:
    """The ridge as (..., H, L), in the shape, dtype and place of `rows`."""
    check_ridge("ridge", ridge)
    lam = ridge if isinstance(ridge, Tensor) else rows.new_full((), float(ridge))
    try:
        return lam.to(rows).expand(rows.shape)
    except RuntimeError:
        raise ValueError(
            f"ridge must be a number or broadcast to {tuple(rows.shape)}, got a tensor {tuple(lam.shape)}"
        ) from None


def _settings(call: Call, **solving: Any) -> Settings:
    settings = Settings(call.softmax_scale, call.is_causal, **solving).checked()
    width, on_chip = call.query.shape[-1], call.query.is_cuda and call.query.dtype != torch.float64
    traced = torch.compiler.is_compiling() or transformed()  # where nobody can look whether the steps sufficed
    if settings.solver == "auto" and not on_chip and (width <= DIRECT_UP_TO or traced):
        settings = settings._replace(solver="direct")
    if settings.iterations is None:
        looked_after = settings.solver == "auto" and not on_chip
        settings = settings._replace(iterations=STEPS if looked_after else max(STEPS, 4 * width))
    return settings


LLA = register(
    name="lla",
    summary="a local affine fit of values to keys around each query: softmax without its bias at the edges",
    paper="Local Linear Attention (Zuo et al.)",
    year=2026,
    arxiv="2510.01450",
    cost="L^2 (2 T D + E), T = 32 solver steps",
    function=lla_attention,
    row_weights=lla_weights,
    module=LocalLinearAttention,
    **can("causal cross causal_cross key_mask grouped_queries ragged"),
)
