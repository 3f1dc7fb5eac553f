"""The mechanisms of the zoo as their papers and released code put them: einsums and whole tensors, for torch.compile.

Each function takes query, key, value (B, H, L, D) in the dtype of the model and returns (B, H, L, D), without the
masks, ragged batches, grouped queries and guards of the library. They were written from formulas, not from code, and
are what `benchmarks/gpu_zoo.py` measures the library against; what can be computed once for all calls (tables of sines
and cosines) is made outside of them. `cases` says which call of the library each of them equals.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

Operator = Callable[..., Tensor]
Compiler = Callable[[Callable[..., Any]], Callable[..., Any]]
EPS = 1e-6


def _as_is(function: Callable[..., Any]) -> Callable[..., Any]:
    return function


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (torch.einsum("bhld,bhsd->bhls", q, k) * q.shape[-1] ** -0.5).softmax(-1) @ v


def cumulant(order: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """<v> + <(q.k~) v~> + 1/2 sum_i q_i^2 <k~_i^2 v~>, cut after `order` terms."""
    L, q = k.shape[-2], q * q.shape[-1] ** -0.5
    mean_v = v.mean(-2, keepdim=True)
    if order == 1:
        return mean_v.expand(*q.shape[:-1], v.shape[-1]).contiguous()
    k, v = k - k.mean(-2, keepdim=True), v - mean_v
    out = mean_v + torch.einsum("bhld,bhde->bhle", q, torch.einsum("bhsd,bhse->bhde", k, v) / L)
    if order == 3:
        out = out + 0.5 * torch.einsum("bhld,bhde->bhle", q * q, torch.einsum("bhsd,bhse->bhde", k * k, v) / L)
    return out


def linear(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    Q, K = F.elu(q) + 1, F.elu(k) + 1
    Z = 1 / (torch.einsum("bhld,bhd->bhl", Q, K.sum(-2)) + EPS)
    return torch.einsum("bhld,bhde,bhl->bhle", Q, torch.einsum("bhsd,bhse->bhde", K, v), Z)


def linear_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Prefix sums written down, (L, D, E); the released one is a CUDA loop over the length."""
    Q, K = F.elu(q) + 1, F.elu(k) + 1
    KV = torch.einsum("bhld,bhle->bhlde", K, v).cumsum(-3)
    total = (Q * K.cumsum(-2)).sum(-1, keepdim=True) + EPS
    return torch.einsum("bhld,bhlde->bhle", Q, KV) / total


def cosformer(q: Tensor, k: Tensor, v: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """sin and cos (L, 1) of the positions, pi i / (2 L)."""
    q, k = F.relu(q), F.relu(k)
    Q, K = torch.cat((q * sin, q * cos), -1), torch.cat((k * sin, k * cos), -1)
    Z = 1 / torch.clamp_min(torch.einsum("bhld,bhd->bhl", Q, K.sum(-2)), EPS)
    return torch.einsum("bhld,bhde,bhl->bhle", Q, torch.einsum("bhsd,bhse->bhde", K, v), Z)


def cosformer_causal(q: Tensor, k: Tensor, v: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    q, k = F.relu(q), F.relu(k)
    parts = k * sin, k * cos
    Q, K = torch.cat((q * sin, q * cos), -1), torch.cat(parts, -1)
    KV = torch.einsum("bhld,bhle->bhlde", K, v).cumsum(-3)
    # Prefix sums of the parts, and angles from a table: torch 2.11 cannot compile a cumsum over what it indexes itself.
    Z = 1 / torch.clamp_min(torch.einsum("bhld,bhld->bhl", Q, torch.cat([x.cumsum(-2) for x in parts], -1)), EPS)
    return torch.einsum("bhld,bhlde,bhl->bhle", Q, KV, Z)


def quarter_turns(length: int, like: Tensor) -> dict[str, Tensor]:
    angle = (math.pi / 2 / length) * torch.arange(1, length + 1, device=like.device, dtype=torch.float64)[:, None]
    return {"sin": angle.sin().to(like.dtype), "cos": angle.cos().to(like.dtype)}


def focused_linear(q: Tensor, k: Tensor, v: Tensor, power: int = 3) -> Tensor:
    """Norms over the channels of all heads; the learned scale at 1, no positions, no convolution."""

    def focus(x: Tensor) -> Tensor:
        x = F.relu(x) + EPS
        raised = x**power
        return raised * (x.norm(dim=(1, 3), keepdim=True) / raised.norm(dim=(1, 3), keepdim=True))

    Q, K, n = focus(q), focus(k), k.shape[-2]
    Z = 1 / (Q @ K.mean(-2, keepdim=True).mT + EPS)
    return (Q @ ((K.mT * n**-0.5) @ (v * n**-0.5))) * Z


def rotary_tables(grid: tuple[int, int], width: int, like: Tensor) -> tuple[Tensor, Tensor]:
    """sin and cos (L, D) of a 2-D rotary position, each value for a pair of channels."""
    theta = (10000 ** -torch.linspace(0, 1, width // 4, device=like.device, dtype=torch.float64)).repeat_interleave(2)
    row, col = (torch.arange(n, device=like.device, dtype=torch.float64)[:, None] * theta for n in grid)
    angle = torch.cat((row[:, None].expand(*grid, -1), col[None].expand(*grid, -1)), -1).flatten(0, 1)
    return angle.sin().to(like.dtype), angle.cos().to(like.dtype)


def _turn(x: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    return x * cos + torch.stack((-x[..., 1::2], x[..., ::2]), -1).flatten(-2) * sin


def rala(q: Tensor, k: Tensor, v: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    """Without gate and LePE, which are modules on top."""
    q, k, N = F.elu(q) + 1, F.elu(k) + 1, k.shape[-2]
    logits = q.mean(-2, keepdim=True) * q.shape[-1] ** -0.5 @ k.mT
    k = k * logits.softmax(-1).mT * N
    z = 1 / (q @ k.mean(-2, keepdim=True).mT + EPS)
    kv = (_turn(k, sin, cos).mT * N**-0.5) @ (v * N**-0.5)
    return _turn(q, sin, cos) @ kv * z


def mala(q: Tensor, k: Tensor, v: Tensor, sin: Tensor, cos: Tensor) -> Tensor:
    q, k, N, scale = F.elu(q) + 1, F.elu(k) + 1, k.shape[-2], q.shape[-1] ** -0.5
    z = q @ k.mean(-2, keepdim=True).mT * scale
    half = (scale / N) ** 0.5
    kv = (_turn(k, sin, cos).mT * half) @ (v * half)
    return _turn(q, sin, cos) @ kv * (1 + 1 / (z + EPS)) - z * v.mean(-2, keepdim=True)


def flow(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    L, S = q.shape[-2], k.shape[-2]
    q, k = torch.sigmoid(q), torch.sigmoid(k)
    sink = 1 / torch.einsum("bhld,bhd->bhl", q + EPS, k.sum(-2) + EPS)
    source = 1 / torch.einsum("bhsd,bhd->bhs", k + EPS, q.sum(-2) + EPS)
    conserved_sink = torch.einsum("bhld,bhd->bhl", q + EPS, (k * source[..., None]).sum(-2) + EPS)
    conserved_source = torch.einsum("bhsd,bhd->bhs", k + EPS, (q * sink[..., None]).sum(-2) + EPS).clamp(-1, 1)
    allocation = torch.sigmoid(conserved_sink * (L / S))
    competition = conserved_source.softmax(-1) * S
    kv = k.mT @ (v * competition[..., None])
    return ((q * sink[..., None]) @ kv) * allocation[..., None]


def flow_causal(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q, k = torch.sigmoid(q), torch.sigmoid(k)
    t = torch.arange(1, q.shape[-2] + 1, device=q.device, dtype=q.dtype)

    def dot(x: Tensor, y: Tensor) -> Tensor:
        return ((x + EPS) * (y + EPS)).sum(-1)

    sink, source = 1 / dot(q, k.cumsum(-2)), 1 / dot(k, q.cumsum(-2))
    conserved_sink = dot(q, (k * (source * t)[..., None]).cumsum(-2)) / t
    conserved_source = (dot(k, (q * (sink * t)[..., None]).cumsum(-2)) / t).clamp(-1, 1)
    exps = conserved_source.exp()
    competition = exps / exps.cumsum(-1) * t
    kv = torch.einsum("bhld,bhle->bhlde", k, v * competition[..., None]).cumsum(-3)
    return torch.einsum("bhld,bhlde->bhle", q * sink[..., None], kv) * torch.sigmoid(conserved_sink)[..., None]


def agent(q: Tensor, k: Tensor, v: Tensor, grid: tuple[int, int], side: int, b1: Tensor, b2: Tensor) -> Tensor:
    """Agents pooled over the grid, two softmaxes with position biases (H, n, L) and (H, L, n); no convolution."""
    H, D = q.shape[1], q.shape[3]
    image = q.transpose(1, 2).flatten(2).mT.unflatten(-1, grid)  # (B, C, rows, cols)
    A = F.adaptive_avg_pool2d(image, (side, side)).flatten(2).mT.unflatten(-1, (H, D)).transpose(1, 2)
    scale = D**-0.5
    gathered = ((A * scale) @ k.mT + b1).softmax(-1) @ v
    return ((q * scale) @ A.mT + b2).softmax(-1) @ gathered


def _regions(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Summary key and value of each segment (..., m, c, D) by max pooling."""
    p = torch.einsum("...d,...cd->...c", q.amax(-2), k).softmax(-1)
    return k.amax(-2), torch.einsum("...c,...ce->...e", p, v)


def combiner_fixed(q: Tensor, k: Tensor, v: Tensor, c: int) -> Tensor:
    """Causal: the own segment up to the token itself, and summaries of the earlier ones."""
    L = q.shape[-2]
    m = L // c
    q, k, v = ((x * s).unflatten(-2, (m, c)) for x, s in ((q, q.shape[-1] ** -0.5), (k, 1), (v, 1)))
    K, V = _regions(q, k, v)
    near = q @ k.mT + torch.full((c, c), -1e9, device=q.device, dtype=q.dtype).triu(1)
    far = torch.einsum("bhmcd,bhnd->bhmcn", q, K)
    far = far + torch.full((m, m), -1e9, device=q.device, dtype=q.dtype).triu()[:, None]
    weights = torch.cat((near, far), -1).softmax(-1)
    out = weights[..., :c] @ v + torch.einsum("bhmcn,bhne->bhmce", weights[..., c:], V)
    return out.flatten(-3, -2)


def combiner_axial(q: Tensor, k: Tensor, v: Tensor, c: int) -> Tensor:
    """Not causal, own row no region, keys of the summaries "wsum"."""
    m = q.shape[-2] // c
    q, k, v = ((x * s).unflatten(-2, (m, c)) for x, s in ((q, q.shape[-1] ** -0.5), (k, 1), (v, 1)))
    near = q @ k.mT
    P = near.softmax(-1)
    K, V = P @ k, P @ v
    own = torch.eye(m, device=q.device, dtype=q.dtype) * -1e9
    far = torch.einsum("bhmcd,bhncd->bhmcn", q, K) + own[:, None]
    weights = torch.cat((near, far), -1).softmax(-1)
    out = weights[..., :c] @ v + torch.einsum("bhmcn,bhnce->bhmce", weights[..., c:], V)
    return out.flatten(-3, -2)


def aaren(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The triples (m, u, w) of all prefixes by ceil(log2 L) steps of shift and merge; no code was released."""
    s = (q[..., :1, :] * q.shape[-1] ** -0.5 @ k.mT).mT  # (B, H, L, 1)
    m, u, w = s.float(), torch.ones_like(s, dtype=torch.float), v.float()
    step, L = 1, k.shape[-2]
    while step < L:
        before = F.pad(m, (0, 0, step, 0), value=-1e30)[..., :L, :]
        top = torch.maximum(m, before)
        a, b = (before - top).exp(), (m - top).exp()
        u = F.pad(u, (0, 0, step, 0))[..., :L, :] * a + u * b
        w = F.pad(w, (0, 0, step, 0))[..., :L, :] * a + w * b
        m, step = top, 2 * step
    return (w / u).to(v.dtype)


def lla(
    q: Tensor, k: Tensor, v: Tensor, ridge: float = 10.0, steps: int = 32, tolerance: float = 1e-12,
    compiled: Compiler = _as_is,
) -> Tensor:  # fmt: skip
    """Causal; the weights (L, L) kept, `steps` of conjugate gradients for Sigma rho = mu, then the tilted weights.

    Its three parts go through the compiler one by one: 32 steps in one graph take minutes to compile.
    """
    w, omega, M = compiled(_lla_weights)(q, k)
    wide_q, wide_k = q.to(w.dtype), k.to(w.dtype)
    mu = M - omega * wide_q
    start = (mu * mu).sum(-1, keepdim=True)
    x, r, p, rr, active = torch.zeros_like(mu), mu, mu, start, start != 0
    step = compiled(_lla_step)
    for _ in range(steps):
        x, r, p, rr, active = step(x, r, p, rr, active, start, wide_q, wide_k, w, omega, M, ridge, tolerance)
    return compiled(_lla_read)(x, mu, wide_q, wide_k, v, w, omega)


def _lla_weights(q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    at_least, L = torch.float64 if q.dtype == torch.float64 else torch.float32, q.shape[-2]
    q, k = q.to(at_least), k.to(at_least)
    logits = (q * q.shape[-1] ** -0.5) @ k.mT
    logits = logits.masked_fill(torch.ones(L, L, dtype=torch.bool, device=q.device).triu(1), -float("inf"))
    w = (logits - logits.amax(-1, keepdim=True)).exp()
    return w, w.sum(-1, keepdim=True), w @ k


def _lla_step(
    x: Tensor, r: Tensor, p: Tensor, rr: Tensor, active: Tensor, start: Tensor, q: Tensor, k: Tensor, w: Tensor,
    omega: Tensor, M: Tensor, ridge: float, tolerance: float,
) -> tuple[Tensor, ...]:  # fmt: skip
    qp, Mp = (q * p).sum(-1, keepdim=True), (M * p).sum(-1, keepdim=True)
    y = ((p @ k.mT) * w) @ k - qp * M - Mp * q + omega * qp * q + ridge * omega * p
    a = torch.where(active, rr / ((p * y).sum(-1, keepdim=True) + 1e-10), 0)
    x, r = x + a * p, r - a * y
    left = (r * r).sum(-1, keepdim=True)
    active = active & (left > tolerance * start.clamp(min=tolerance))
    return x, r, r + torch.where(active, left / torch.where(active, rr, 1), 0) * p, left, active


def _lla_read(x: Tensor, mu: Tensor, q: Tensor, k: Tensor, v: Tensor, w: Tensor, omega: Tensor) -> Tensor:
    d = omega - (mu * x).sum(-1, keepdim=True)
    d = d + 1e-12 * d.sign()
    s = w * (1 - x @ k.mT + (q * x).sum(-1, keepdim=True)) / d
    return (s @ v.to(s.dtype)).to(v.dtype)


def hierarchical(q: Tensor, k: Tensor, v: Tensor, b: int = 4) -> Tensor:
    """A regular tree of contiguous groups of b, L = b^h: one softmax of b x b for each parent, up and down again."""
    q = q * q.shape[-1] ** -0.5
    phi, size, steps, leaf = -(q * k).sum(-1), 1, [], v
    while q.shape[-2] > 1:
        n = q.shape[-2]
        width = b if n % b == 0 else n
        q, k, v = (x.unflatten(-2, (-1, width)) for x in (q, k, v))
        own = torch.eye(width, dtype=torch.bool, device=q.device)
        logits = torch.where(own, -phi.unflatten(-1, (-1, width))[..., None], q @ k.mT + math.log(size))
        log_Z = torch.logsumexp(logits, -1)
        steps.append(((logits - log_Z[..., None]).exp(), v))
        phi, size = -log_Z.mean(-1), size * width
        q, k, v = q.mean(-2), k.mean(-2), v.mean(-2)
    mass, out = torch.ones_like(phi), torch.zeros_like(v)
    for u, values in reversed(steps):
        keep = u.diagonal(dim1=-2, dim2=-1)
        siblings = (u - torch.diag_embed(keep)) @ values
        out = (out[..., None, :] + mass[..., None, None] * siblings).flatten(-3, -2)
        mass = (mass[..., None] * keep).flatten(-2)
    return out + mass[..., None] * leaf


def cluster(q: Tensor, k: Tensor, v: Tensor, count: int) -> Tensor:
    """Blocks in a row, closure tanh, no near field: the formulas of local-cumulants.md as they stand."""
    q = q * q.shape[-1] ** -0.5
    k, v = (x.unflatten(-2, (count, -1)) for x in (k, v))
    K, V = k.mean(-2), v.mean(-2)
    k, v = k - K[..., None, :], v - V[..., None, :]
    s = torch.einsum("bhld,bhcd->bhlc", q * q, (k * k).mean(-2)).clamp(min=1e-12).sqrt()
    S = torch.einsum("bhcnd,bhcne->bhcde", k, v) / k.shape[-2]
    w = (q @ K.mT + s + torch.log1p((-2 * s).exp()) - math.log(2)).softmax(-1)
    return w @ V + torch.einsum("bhlc,bhld,bhcde->bhle", w * (s.tanh() / s), q, S)


class Case(NamedTuple):
    """A call of the library, the formulation it equals, and the shape at which both are measured."""

    mechanism: str
    public: Operator
    options: dict[str, Any]
    is_causal: bool
    shape: tuple[int, int, int, int]  # B, H, L, D
    in_parts: bool = False  # the public one takes `compiled=` for its parts


def cases(device: str, dtype: torch.dtype, small: bool = False) -> dict[str, Case]:
    """Every mechanism of the registry; `small` are lengths for a look on a CPU. Tables and biases are in `dtype`."""
    long = (1, 2, 64, 16) if small else (16, 12, 4096, 64)
    short = (1, 2, 64, 16) if small else (4, 12, 1024, 64)
    side = math.isqrt(long[2])
    agents = 4 if small else 49
    wide = 4 if small else 16
    like = torch.empty(0, device=device, dtype=dtype)
    sin, cos = rotary_tables((side, side), long[3], like)
    generator = torch.Generator(device).manual_seed(0)

    def bias(*shape: int) -> Tensor:
        return (0.02 * torch.randn(shape, device=device, generator=generator, dtype=torch.float64)).to(dtype)

    b1, b2 = bias(long[1], agents, long[2]), bias(long[1], long[2], agents)
    # Two solvers that stop at a squared residual of 1e-12 agree to 1e-6, their gradients to 1e-4: not in float64.
    exact = dtype == torch.float64
    solver = {"steps": 40, "tolerance": 1e-20} if exact else {}
    own_solver = {"iterations": 40, "tolerance": 1e-20} if exact else {}
    on_grid = {"grid": (side, side)}
    table = {"sin": sin, "cos": cos}
    pool = {"grid": (side, side), "side": math.isqrt(agents), "b1": b1, "b2": b2}
    turn = {**on_grid, "use_rope": True}
    found = {
        "softmax": Case("softmax", softmax, {}, False, short),
        "linear": Case("linear", linear, {}, False, long),
        "linear, causal": Case("linear", linear_causal, {}, True, short),
        "cosformer": Case("cosformer", partial(cosformer, **quarter_turns(long[2], like)), {}, False, long),
        "cosformer, causal": Case(
            "cosformer", partial(cosformer_causal, **quarter_turns(short[2], like)), {}, True, short
        ),
        "flow": Case("flow", flow, {}, False, long),
        "flow, causal": Case("flow", flow_causal, {}, True, short),
        "focused_linear": Case("focused_linear", focused_linear, {}, False, long),
        "rala": Case("rala", partial(rala, **table), turn, False, long),
        "mala": Case("mala", partial(mala, **table), turn, False, long),
        "agent": Case(
            "agent",
            partial(agent, **pool),
            {**on_grid, "agents": agents, "key_bias": b1, "query_bias": b2},
            False,
            long,
        ),
        "combiner, fixed causal": Case(
            "combiner", partial(combiner_fixed, c=side), {"variant": "fixed", "segment": side}, True, long
        ),
        "combiner, axial": Case(
            "combiner", partial(combiner_axial, c=side), {"variant": "axial", "segment": side}, False, long
        ),
        "aaren, causal": Case("aaren", aaren, {}, True, long),
        "lla, causal": Case("lla", partial(lla, **solver), {"solver": "cg", **own_solver}, True, short, in_parts=True),
        # Groups of 16 instead of 4: three levels, which compile in half the time of six.
        "hierarchical": Case("hierarchical", partial(hierarchical, b=wide), {"branching": wide}, False, long),
    }
    for order in (1, 2, 3):
        found[f"cumulant{order}"] = Case(f"cumulant{order}", partial(cumulant, order), {}, False, long)
    for count in (4, 16, 64):
        shape = long if count < 64 else (max(1, long[0] // 4), *long[1:])
        blocks = partial(cluster, count=min(count, long[2] // 2))
        found[f"cluster{count}"] = Case(f"cluster{count}", blocks, {}, False, shape)
    return found
