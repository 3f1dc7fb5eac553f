"""Sparsifiner: a cheap low-rank guess of the attention map says which keys each query meets exactly.

Shape legend: B batch (all leading dimensions), L = p + N tokens, p prefix tokens, H heads, D head width, c reduced
channels, K basis maps, b keys kept, r queries in a row that share their keys.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ...call import Call, check_choice, check_count
from ...kernels import launch
from ...kernels.heads.limits import MOST_KEYS, MOST_MAPS
from ...tensors import ABSENT, wide
from ...zoo.mixing import Bound
from ...zoo.registry import can, get, names
from ..registry import registered
from .base import HeadsLayer, flattened, need

STAGES = ("sparse", "reconstruct")
TOP_BASIS, LEAST = 8, 0.02  # basis maps that a row mixes, and entries of them that count as 0
GATHERED = 1 << 26  # numbers of gathered keys that are held at a time
GUESSED = 1 << 29  # numbers of a guess that kernels choose from
AT_ONCE = 65535  # calls that fused kernels take side by side on a GPU
FIRST = 1e-10  # of equal guesses, the earlier key
NOT_OVER = {
    name: "each query has keys of its own: it has no cross attention, or parts that belong to a whole sequence"
    for name in names()
    if not get(name).cross or get(name).module is not None
}


class Predictor(nn.Module):
    """A guess of the attention map of each head, rows softmax(W_q q (W_k k)^T P H^-0.5) times K basis maps.

    P and the basis belong to `tokens` tokens; for another number they are interpolated. Cost: 2 L D c + 2 L c K a head.
    """

    def __init__(self, head_dim: int, tokens: int, reduce_c: int, reduce_n: int, **place: Any) -> None:
        super().__init__()
        c, K = max(1, head_dim // reduce_c), max(1, tokens // reduce_n)
        self.query, self.key = nn.Linear(head_dim, c, **place), nn.Linear(head_dim, c, **place)
        self.pool = nn.Parameter(torch.empty(tokens, K, **place))
        self.basis = nn.Parameter(torch.empty(tokens, K, **place))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        for linear in (self.query, self.key):
            nn.init.trunc_normal_(linear.weight, std=0.02)
            nn.init.zeros_(linear.bias)
        for table in (self.pool, self.basis):
            nn.init.trunc_normal_(table, std=0.02)

    def coefficients(self, query: Tensor, key: Tensor, present: Tensor | None, dense: bool) -> Tensor:
        """How each query (B, H, L, D) mixes the basis maps, (B, H, L, K); all of them, or the eight largest."""
        k = self.key(key)
        if present is not None:
            k = k.masked_fill((present == 0)[:, None, :, None], 0)
        s = self.query(query) @ self.pooled(k) * query.shape[-3] ** -0.5
        a = wide(s).softmax(-1)
        if dense or a.shape[-1] <= TOP_BASIS:
            return a
        best = a.topk(TOP_BASIS, -1)
        return torch.zeros_like(a).scatter(-1, best.indices, best.values)

    def pooled(self, k: Tensor) -> Tensor:
        """Reduced keys (B, H, L, c) summed over the tokens, (B, H, c, K); the table first, or k would be copied."""
        return (fitted(self.pool, k.shape[-2]).to(k.dtype).mT @ k).mT

    def maps(self, length: int, signed: bool) -> Tensor:
        """The basis maps (K, L): as they are trained first, or their sizes where these count."""
        M = fitted(self.basis, length).mT
        if signed:
            return M
        M = M.abs()
        return M.masked_fill(M <= LEAST, 0)


@registered(
    "sparsifiner",
    "a cheap guess of the map says which keys each query meets exactly",
    paper="Sparsifiner: Learning Sparse Instance-Dependent Attention for Efficient ViTs (Wei et al.)",
    year=2023,
    arxiv="2303.13755",
    cost="2 L b D for b keys a query",
    not_over=NOT_OVER,
    **can("key_mask weights"),
)
class Sparsifiner(HeadsLayer):
    """Exact attention of each query to the b keys of its largest guessed weights; prefix tokens see all keys.

        guess = a M,  a = coefficients(q, k),  M = basis;   y = proj(mechanism(q, the b keys of guess, their values))

    In the stage "reconstruct" attention is dense and the guess learns to be it: loss 0.01 sum (guess - A)^2. Later the
    choice has no gradient. No L x L tensor is held in the stage "sparse". Cost: 2 L b D a head, and the guess.

    Args:
        keep: share of the keys that a query meets, b = ceil(keep L).
        block: so many queries in a row share their keys, those of the largest sum of guesses; 1 is as published. With
            64 or 128 a GPU takes a fraction of the time of single rows.
        stage: "sparse" or "reconstruct", see `set_stage`.
        tokens: that the predictor is made for; those of grid_size and prefix, or 197, unless given.
        reduce_c, reduce_n: channels and tokens of the guess are so many times fewer.
        signed_basis: leave the basis as it was trained; the released code takes its absolute value.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        keep: float = 0.25,
        block: int = 1,
        stage: str = "sparse",
        tokens: int | None = None,
        reduce_c: int = 2,
        reduce_n: int = 6,
        signed_basis: bool = False,
        **layer: Any,
    ) -> None:
        super().__init__(dim, num_heads, **layer)
        if not 0 < keep <= 1:
            raise ValueError(f"keep must be a share of the keys above 0, at most 1, got {keep}")
        if block < 1 or reduce_c < 1 or reduce_n < 1:
            raise ValueError(f"block, reduce_c and reduce_n must be at least 1, got {block}, {reduce_c}, {reduce_n}")
        check_choice("stage", stage, STAGES)
        need(self.layer_name, self.mechanism, "cross", "gives each query keys of its own", 'take layer="multihead"')
        if not isinstance(self.mix, Bound):
            raise ValueError(
                f"layer 'sparsifiner' gives each query keys of its own, but {self.mechanism.name!r} has parts that "
                "belong to a whole sequence; nearest that works: 'linear' or 'softmax'"
            )
        self.check_ungrouped()
        if tokens is not None:
            check_count("tokens", tokens)
        else:
            tokens = 197 if self.grid_size is None else self.prefix + math.prod(self.grid_size)
        self.keep, self.block, self.stage, self.signed_basis = keep, block, stage, signed_basis
        self.predictor = Predictor(self.head_dim, tokens, reduce_c, reduce_n, **self.place)

    def reset_extras(self) -> None:
        super().reset_extras()
        self.predictor.reset_parameters()

    def mix_tokens(self, call: Call, x: Tensor, context: Tensor | None = None) -> Tensor:
        if self.stage == "reconstruct":
            if self.training:
                flat = self._flat(call)
                exact = self.mechanism.weigh(flat, **self.attention_options).detach()[:, :, call.prefix :]
                self.keep_loss("reconstruction", 0.01 * (self.guess(flat) - exact).square().sum())
            return super().mix_tokens(call, x, context)
        flat = self._flat(call)
        rows = [self.mix.run(self._prefix_of(flat))] if call.prefix else []
        if self._direct(flat):
            from ...kernels.heads.sparse import attend_listed

            query = flat.query[:, :, call.prefix :]
            chosen = self._choice(query, flat)
            rows.append(attend_listed(query, flat.key, flat.value, chosen, self.block, flat.softmax_scale))
            return (torch.cat(rows, -2) if call.prefix else rows[0]).reshape(call.query.shape)
        for asked, chosen, count in self._asked(flat):
            out = self.mix.run(asked).view(*chosen.shape[:3], self.block, self.head_dim)
            rows.append(out.flatten(2, 3)[:, :, :count])
        return torch.cat(rows, -2).reshape(call.query.shape)

    def guess(self, call: Call) -> Tensor:
        """The guessed map (B, H, N, L) of the queries after the prefix, in the form of the stage; with gradients."""
        dense = self.stage == "reconstruct"
        query = call.query[:, :, call.prefix :].detach()
        a = self.predictor.coefficients(query, call.key.detach(), call.key_mask, dense)
        return a @ wide(self.predictor.maps(call.key.shape[-2], dense or self.signed_basis))

    def scores_of(self, call: Call, x: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        if self.stage == "reconstruct":
            return super().scores_of(call, x, context)
        flat, L = self._flat(call), call.key.shape[-2]
        rows = [self.mix.weigh(self._prefix_of(flat))] if call.prefix else []
        for asked, chosen, count in self._asked(flat):
            A = self.mix.weigh(asked).view(*chosen.shape[:3], self.block, chosen.shape[-1])  # (B, H, blocks, r, b)
            full = A.new_zeros(*A.shape[:-1], L).scatter(-1, chosen.unsqueeze(-2).expand(A.shape), A)
            rows.append(full.flatten(2, 3)[:, :, :count])
        return torch.cat(rows, -2).reshape(*call.query.shape[:-1], L)

    def _direct(self, call: Call) -> bool:
        """Whether kernels compute the layer: softmax on a GPU, where no gradient is asked for."""
        plain = self.mechanism.name == "softmax" and self.temperature is None and not call.dropout_p
        return plain and not torch.is_grad_enabled() and call.value.shape == call.key.shape and self._chooses(call)

    def _chooses(self, call: Call) -> bool:
        """Whether kernels choose the keys."""
        (B, H, L, D), maps = call.key.shape, self.predictor.basis.shape[-1]
        fits = L <= MOST_KEYS and maps <= MOST_MAPS and D <= launch.WIDEST
        guessed = B * H * -(-L // self.block) * L
        return fits and guessed <= GUESSED and call.key_mask is None and launch.direct(call.query)

    @torch.no_grad()
    def _choice(self, query: Tensor, call: Call) -> Tensor:
        """The places (B, H, blocks, b) of the keys that blocks of these queries (B, H, n, D) meet."""
        L, r, predictor = call.key.shape[-2], self.block, self.predictor
        b, maps = math.ceil(self.keep * L), predictor.maps(L, self.signed_basis)
        if self._chooses(call):
            from ...kernels.heads.sparse import largest_places, mixed

            pooled = predictor.pooled(predictor.key(call.key))
            top = TOP_BASIS if pooled.shape[-1] > TOP_BASIS else 0
            a = mixed(predictor.query(query), pooled, r, top, query.shape[-3] ** -0.5)
            return largest_places(a.to(query.dtype) @ maps.to(query.dtype), b)
        a = predictor.coefficients(query, call.key, call.key_mask, dense=False)
        a = F.pad(a, (0, 0, 0, -query.shape[2] % r)).unflatten(2, (-1, r)).sum(3)  # the guess is linear in them
        narrow = a.to(query.dtype) @ maps.to(query.dtype)
        found = wide(narrow) - FIRST * torch.arange(L, device=query.device)
        if call.key_mask is not None:
            found = found.masked_fill((call.key_mask == 0)[:, None, None], ABSENT)
        return found.topk(b, -1).indices

    def _flat(self, call: Call) -> Call:
        """The call with all leading dimensions as one."""
        if call.is_causal:
            raise ValueError("is_causal=True, but which keys layer 'sparsifiner' chooses depends on later tokens")
        if call.query.shape[-2] != call.key.shape[-2]:
            lengths = f"{call.query.shape[-2]} queries and {call.key.shape[-2]} keys"
            raise ValueError(f"layer 'sparsifiner' is for self-attention, got {lengths}")
        return flattened(call)._replace(grid=None)

    def _prefix_of(self, call: Call) -> Call:
        return call._replace(query=call.query[:, :, : call.prefix], prefix=0)

    def _asked(self, call: Call) -> Any:
        """Calls (B H blocks; 1 head; r queries, b keys), one leading dimension as fused kernels want it, the places
        of their keys and the rows that count; as many blocks at a time as fit."""
        (B, H, L, D), r, p = call.key.shape, self.block, call.prefix
        b = math.ceil(self.keep * L)
        at_once = max(1, min(GATHERED // max(1, B * H * b * D), AT_ONCE // max(1, B * H))) * r
        for start in range(p, L, at_once):
            rows = call.query[:, :, start : start + at_once]
            count, more = rows.shape[2], -rows.shape[2] % r
            chosen = self._choice(rows, call).long()
            query = F.pad(rows, (0, 0, 0, more)).unflatten(2, (-1, r)).flatten(0, 2).unsqueeze(1)
            key, value = (_taken(part, chosen).unsqueeze(1) for part in call[1:3])
            mask = None
            if call.key_mask is not None:
                mask = call.key_mask[:, None].expand(-1, H, -1).gather(2, chosen.flatten(2)).view(-1, b)
            yield Call(query, key, value, mask, scale=call.scale, dropout_p=call.dropout_p), chosen, count


def _taken(part: Tensor, chosen: Tensor) -> Tensor:
    """Rows `chosen` (B, H, blocks, b) of (B, H, L, D), (B H blocks, b, D): whole rows are copied."""
    B, H, L, D = part.shape
    first = L * torch.arange(B * H, device=part.device).view(B, H, 1, 1)
    return part.reshape(-1, D).index_select(0, (chosen + first).flatten()).view(-1, chosen.shape[-1], D)


def fitted(table: Tensor, length: int) -> Tensor:
    """A table (tokens, K) for another number of tokens."""
    if table.shape[0] == length:
        return table
    return F.interpolate(wide(table).mT[None], size=length, mode="linear", align_corners=False)[0].mT.to(table.dtype)


def set_stage(model: nn.Module, stage: str) -> None:
    """Put every Sparsifiner layer of a model into a stage and let only what learns in it have gradients.

    "reconstruct": the predictors alone, by `auxiliary_loss`, while attention stays dense; start from a trained model.
    "sparse": all but the predictors, by the task (and by what a dense teacher says: `sparse_loss`).
    """
    check_choice("stage", stage, STAGES)
    layers = [module for module in model.modules() if isinstance(module, Sparsifiner)]
    if not layers:
        raise ValueError("no layer of this model is 'sparsifiner': create it with layer='sparsifiner'")
    for weight in model.parameters():
        weight.requires_grad_(stage == "sparse")
    for layer in layers:
        layer.stage = stage
        for weight in layer.predictor.parameters():
            weight.requires_grad_(stage == "reconstruct")


def sparse_loss(
    logits: Tensor, labels: Tensor, teacher: Tensor, tokens: Tensor | None = None, taught: Tensor | None = None
) -> Tensor:
    """Cross entropy + 0.5 KL(teacher || student) of the classes + 0.5 mean square of the last tokens, if given."""
    loss = F.cross_entropy(logits, labels)
    told = teacher.detach().log_softmax(-1)
    loss = loss + 0.5 * F.kl_div(logits.log_softmax(-1), told, reduction="batchmean", log_target=True)
    return loss if tokens is None or taught is None else loss + 0.5 * F.mse_loss(tokens, taught.detach())
