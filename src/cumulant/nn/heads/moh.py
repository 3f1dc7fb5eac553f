"""MoH, mixture-of-head attention: each token chooses K of its heads and weighs what they say.

Shape legend: ... leading dimensions, L tokens, C width, H = S + R heads (shared first, then routed), K chosen of R.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...call import Call, check_choice
from ...kernels import launch
from ...tensors import wide
from ...tracing import is_plain, transformed
from ...zoo.mixing import Bound
from ...zoo.options import number
from ...zoo.registry import can
from ..registry import registered
from .base import HeadsLayer

ROUTERS = ("learned", "norm")
GATHERED_FROM = 4096  # tokens; below, finding the rows takes longer than it saves
UNEVEN = 1.25  # rows of heads are computed together while the padding to the longest is at most a quarter


@registered(
    "moh",
    "each token chooses some of its heads and weighs what they say",
    paper="MoH: Multi-Head Attention as Mixture-of-Head Attention (Jin et al.)",
    year=2024,
    arxiv="2410.11842",
    cost="(S + K) / H of the mechanism's rows",
    **can("causal cross key_mask ragged streaming equivariant losses weights"),
)
class MixtureOfHeads(HeadsLayer):
    """Shared heads that every token uses, and routed heads of which each token chooses `top`.

        p = softmax(W_g x) over R,  g_r = K p m / sum(p m),  m the top K of p      (m has no gradient)
        g_s = S softmax(W_g1 x),  a = 2 softmax(W_g0 x),  y = proj(concat(a_0 g_s, a_1 g_r) * heads(x))

    The mean gate is 1, so the output has the size of plain attention. In training the loss `balance` is
    R sum_e mean(p_e) mean(m_e) times its weight: K when all heads are used alike, R when all tokens choose the same.

    Args:
        shared: heads that every token uses; about a quarter of them unless given.
        top: routed heads that a token uses; so many that three quarters of all heads work, unless given.
        router: "learned", or "norm" for the router without parameters: the largest norms of the query over their
            deviation, gates 0 or 1 with a straight-through gradient, to go on from a trained layer.
        balance: weight of the balance loss.
        sparse: compute only the rows that were chosen: True, False, or "auto", from 4,096 tokens on over mechanisms of
            quadratic cost. The output is the same.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        shared: int | None = None,
        top: int | None = None,
        router: str = "learned",
        balance: float = 0.01,
        sparse: bool | str = "auto",
        **layer: Any,
    ) -> None:
        super().__init__(dim, num_heads, **layer)
        shared = max(1, num_heads // 4) * (num_heads > 1) if shared is None else shared
        routed = num_heads - shared
        if not 0 <= shared <= num_heads:
            raise ValueError(f"shared must be from 0 to num_heads={num_heads}, got shared={shared}")
        top = min(routed, max(1, round(0.75 * num_heads) - shared)) if top is None else top
        if not 0 <= top <= routed:
            raise ValueError(
                f"top={top} of {routed} routed heads (num_heads={num_heads}, shared={shared}): the router of layer "
                f"'moh' cannot choose more heads than there are; take top={routed} or fewer shared heads"
            )
        if not top and routed:
            raise ValueError(
                f"top=0 leaves {routed} routed heads that no token uses; take shared={num_heads} or top=1 and more"
            )
        check_choice("router", router, ROUTERS)
        check_choice("sparse", sparse, (True, False, "auto"))
        number("balance", balance)
        place: dict[str, Any] = {**self.place, "bias": False}
        self.shared, self.routed, self.top, self.balance, self.sparse = shared, routed, top, balance, sparse
        learned = router == "learned"
        self.route = nn.Linear(dim, routed, **place) if top and learned else None
        self.weigh_shared = nn.Linear(dim, shared, **place) if shared > 1 and learned else None
        self.weigh_stages = nn.Linear(dim, 2, **place) if shared and top and learned else None
        self.router = router
        for linear in (self.route, self.weigh_shared, self.weigh_stages):
            if linear is not None:
                nn.init.trunc_normal_(linear.weight, std=0.02)

    def gates(self, x: Tensor, query: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        """Gates (..., L, H) of tokens x (..., L, C), probabilities p and choice m of the routed heads (..., L, R).

        `router="norm"` reads the query (..., H, L, D).
        """
        shared, routed, stages = self._logits(x, query)
        parts: list[Tensor] = []
        if self.shared:
            parts.append(_full(x, self.shared, 1.0) if shared is None else _softmax(shared) * self.shared)
        p = m = _full(x, self.routed, 0.0)
        if routed is not None:
            p = _softmax(routed)
            m = largest(p, self.top)
            total = (p * m).sum(-1, keepdim=True).clamp(min=torch.finfo(p.dtype).eps)
            parts.append(m + m * (p - p.detach()) if self.router == "norm" else p * m / total * self.top)
        if stages is not None:
            both = _softmax(stages) * 2
            parts = [part * both[..., i : i + 1] for i, part in enumerate(parts)]
        return torch.cat(parts, -1), p, m

    def mix_tokens(self, call: Call, x: Tensor, context: Tensor | None = None) -> Tensor:
        if self.route is not None and not torch.is_grad_enabled() and launch.direct(x):
            return self._by_kernel(call, x, context)
        gates, p, m = self.gates(x, call.query)
        if self.top and self.balance and self.training:
            self.keep_loss("balance", self.balance * balance_loss(p, m, call.query_mask))
        weight = gates.mT.unsqueeze(-1)
        if self.top and self.top < self.routed and self._gathers(call):
            return torch.cat((
                self._of_heads(call, x, slice(0, self.shared)) * weight[..., : self.shared, :, :].to(call.query.dtype),
                self._chosen(call, x, m, weight[..., self.shared :, :, :]),
            ), -3)  # fmt: skip
        return super().mix_tokens(call, x, context) * weight.to(call.query.dtype)

    def _logits(self, x: Tensor, query: Tensor | None) -> list[Tensor | None]:
        """Of shared heads (..., L, S), routed heads (..., L, R) and stages (..., L, 2), each where there are some."""
        linears = (self.weigh_shared, self.route, self.weigh_stages)
        found: list[Tensor | None] = [None, None, None]
        if any(linear is not None for linear in linears):
            sizes = [linear.out_features for linear in linears if linear is not None]
            parts = iter(self._all_logits(x).split(sizes, -1))
            found = [None if linear is None else next(parts) for linear in linears]
        if self.top and self.router == "norm":
            assert query is not None
            norms = wide(query)[..., self.shared :, :, :].norm(dim=-1).mT  # (..., L, R)
            spread = norms.std(-1, keepdim=True) if self.routed > 1 else torch.ones_like(norms)
            found[1] = norms / spread.clamp(min=torch.finfo(norms.dtype).eps)
        return found

    def _all_logits(self, x: Tensor) -> Tensor:
        """Logits of shared heads, routed heads and stages side by side: each product would read all tokens anew."""
        linears = (self.weigh_shared, self.route, self.weigh_stages)
        return F.linear(x, torch.cat([linear.weight for linear in linears if linear is not None]))

    def _gathers(self, call: Call) -> bool:
        """Whether only rows that were chosen are computed: each must follow from its own query and all keys."""
        able = (
            isinstance(self.mix, Bound)
            and self.temperature is None
            and not self.enable_gqa
            and self.mechanism.cross
            and self.mechanism.independent_rows
            and not self.mechanism.wants_grid
            and not call.is_causal
            and self.attention_options.get("around", "zero") == "zero"
        )
        if self.sparse is not True:
            plain = not torch.compiler.is_compiling() and is_plain(call.query) and not transformed()
            quadratic = not self.mechanism.subquadratic  # or the rows cost less than finding them
            return able and self.sparse == "auto" and plain and quadratic and call.query.shape[-2] >= GATHERED_FROM
        if not able:
            raise ValueError(
                f"sparse=True computes the chosen rows alone, which {self.mechanism.name!r} cannot here (causal rows, "
                'rows that see each other or a layout on a grid); pass sparse="auto"'
            )
        return True

    def _of_heads(self, call: Call, x: Tensor, heads: slice) -> Tensor:
        query, key, value = (part[..., heads, :, :] for part in call[:3])
        return self.mix.run(call._replace(query=query, key=key, value=value), x)

    def _chosen(self, call: Call, x: Tensor, m: Tensor, weight: Tensor) -> Tensor:
        """Gated output (..., R, L, D) of the routed heads; only rows with m = 1 are computed, and heads that no token
        of the batch chose not at all. Heads that are used about alike go together, others one by one."""
        chosen = m.mT.contiguous() > 0  # (..., R, L), so that counting runs along memory
        number = chosen.cumsum(-1)  # of the rows up to each, so that row n of a head is where it is n + 1
        counts = number[..., -1]
        most = counts.flatten(0, -2).amax(0).tolist() if counts.ndim > 1 else counts.tolist()  # waits for the device
        used = [head for head in range(self.routed) if most[head]]
        even = max(most) * len(used) <= UNEVEN * sum(most)
        groups = [used] if even else [[head] for head in used]
        routed = [part[..., self.shared :, :, :] for part in call[:3]]
        if len(used) == self.routed and even:
            return self._rows(call, x, routed, chosen, number, max(most)) * weight.to(call.query.dtype)
        out = routed[2].new_zeros((*call.query.shape[:-3], self.routed, call.query.shape[-2], self.head_dim))
        for heads in groups:
            parts = [part[..., heads, :, :] for part in routed]
            rows = max(most[head] for head in heads)
            found = self._rows(call, x, parts, chosen[..., heads, :], number[..., heads, :], rows)
            out = out.index_copy(-3, torch.tensor(heads, device=out.device), found)
        return out * weight.to(call.query.dtype)

    def _by_kernel(self, call: Call, x: Tensor, context: Tensor | None) -> Tensor:
        """The gated output (..., H, L, D) without gradients: gates by one kernel, rows taken and put back by another.

        The host learns how many rows the longest head has while the device computes the shared heads.
        """
        from ...kernels.heads.chosen import put, take
        from ...kernels.heads.routes import routed

        lead, (L, D), R = call.query.shape[:-3], call.query.shape[-2:], self.routed
        gathers = self.top < R and self._gathers(call)
        logits = self._all_logits(x)
        gates, place, counts = routed(
            logits.reshape(-1, *logits.shape[-2:]),
            (self.shared, R, self.top),
            weighed=self.weigh_shared is not None,
            stages=self.weigh_stages is not None,
            places=gathers,
        )
        if place is None or counts is None:
            weight = gates.view(*lead, L, self.num_heads).mT.unsqueeze(-1)
            return super().mix_tokens(call, x, context) * weight.to(call.query.dtype)
        arriving = launch.Arriving(counts)
        common = self._of_heads(call, x, slice(0, self.shared)).reshape(-1, self.shared, L, D) if self.shared else None
        query, key, value = (part[..., self.shared :, :, :] for part in call[:3])
        most = max(1, int(arriving.get().max()))
        few = take(query.reshape(-1, R, L, D), place, most).view(*lead, R, most, D)
        found = self.mix.run(call._replace(query=few, key=key, value=value, query_mask=None), x)
        out = put(common, found.reshape(-1, *found.shape[-3:]), place, gates)
        return out.view(*lead, *out.shape[1:])

    def _rows(self, call: Call, x: Tensor, parts: list[Tensor], chosen: Tensor, number: Tensor, rows: int) -> Tensor:
        """Output (..., h, L, D) of some heads, computed for at most `rows` chosen rows of each; the others are 0."""
        query, key, value = parts
        length = query.shape[-2]
        # Every token that was not chosen goes to one place too many, which is cut off.
        at = torch.where(chosen, number - 1, rows)
        tokens = torch.arange(length, device=at.device).expand(at.shape)
        places = torch.zeros((*at.shape[:-1], rows + 1), dtype=at.dtype, device=at.device).scatter(-1, at, tokens)
        wanted = places[..., :rows].unsqueeze(-1).expand(*at.shape[:-1], rows, query.shape[-1])
        own = call._replace(query=query.gather(-2, wanted), key=key, value=value, query_mask=None)
        found = self.mix.run(own, x)
        found = F.pad(found, (0, 0, 0, 1))
        return found.gather(-2, at.unsqueeze(-1).expand(*at.shape, found.shape[-1]))


def largest(p: Tensor, count: int) -> Tensor:
    """1 for the `count` largest of p along its last axis, the first of equals, and 0 for the others.

    By comparing all pairs: for a few heads that is much quicker on a GPU than `topk`, and does not depend on its ties.
    """
    p = p.detach()
    heads = torch.arange(p.shape[-1], device=p.device)
    one, other = p.unsqueeze(-1), p.unsqueeze(-2)
    before = (other > one) | ((other == one) & (heads < heads.unsqueeze(-1)))
    return (before.sum(-1) < count).to(p.dtype)


def balance_loss(p: Tensor, m: Tensor, present: Tensor | None = None) -> Tensor:
    """R sum_e mean(p_e) mean(m_e) over the tokens that are there, of p and m (..., L, R)."""
    if present is not None:
        weight = (present != 0).expand(p.shape[:-1]).to(p.dtype).unsqueeze(-1)
        p, m, count = p * weight, m * weight, weight.sum().clamp(min=1)
    else:
        count = torch.full((), p[..., 0].numel(), dtype=p.dtype, device=p.device)
    tokens = tuple(range(p.ndim - 1))
    return p.shape[-1] * (p.sum(tokens) / count * (m.sum(tokens) / count)).sum()


def _full(x: Tensor, heads: int, value: float) -> Tensor:
    """So much for every token and head, in the dtype of gates."""
    dtype = torch.promote_types(x.dtype, torch.float32)
    return torch.full((*x.shape[:-1], heads), value, dtype=dtype, device=x.device)


def _softmax(logits: Tensor) -> Tensor:
    return wide(logits).softmax(-1)
