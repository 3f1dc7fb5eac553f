"""Short clusters: fewer multiplications to go through their tokens than through their covariances.

Shape legend: B batch, H key heads, G query heads of each, L queries, K clusters of m tokens, p exact tokens, D, E
widths. Queries carry the scale.

    S_c^T q / W_c = <v~ (k~.q)>_c        so that        out = sum_l A_l v_l,   A_l = w_c share_l (1 + f_c q.k~_l)

with share_l the weight of token l in its cluster: the same function as with the D x E matrix S_c, at m (D + E)
multiply-adds a query and cluster in place of D E. Plain torch; the kernels are in `cumulant.kernels.short`.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ..closures import gain, log_mass
from ..moments import ratio
from ..tensors import softmax_or_zero
from .backend import Form, cheaper_by_token
from .build import Packed
from .fields import recomputed, room
from .statistics import log

Parts = tuple[Tensor, Tensor, Tensor, Tensor | None, Tensor]  # log W, k_mean, k~, spread (None: full) and shares


def answers_by_token(packed: Packed, form: Form) -> bool:
    """Whether all clusters respond, none is near, each is one piece, and their tokens are the cheaper way."""
    D, (m, E) = packed.key.shape[-1], packed.value.shape[-2:]
    every = form.response is None or form.response >= packed.layout.clusters
    whole = packed.layout.owner is None and packed.layout.clusters > 0
    return form.near == 0 and every and not form.pooled and whole and cheaper_by_token(m, D, E)


def multiplied_in(dtype: torch.dtype, device: torch.device) -> torch.dtype | None:
    """What the products over tokens are taken in for inputs of `dtype`; None: in the dtype of the statistics.

    A GPU multiplies bfloat16 as softmax does there: q.k~ and the weights are rounded, masses and sums are not.
    """
    return dtype if dtype == torch.bfloat16 and device.type == "cuda" else None


def token_responses(q: Tensor, packed: Packed, form: Form, dtype: torch.dtype) -> Tensor:
    """q (B, H, G, L, D) -> (B, H, G, L, E), for inputs of `dtype`, in blocks of rows.

    Cost a row: 2 K D + K m (D + E).
    """
    B, H, G, L, _ = q.shape
    narrow = multiplied_in(dtype, q.device)
    rows = q.flatten(2, 3)
    weight = packed.weight.sum(-1)
    share = ratio(packed.weight, weight.unsqueeze(-1))  # (B, H or 1, K, m)
    mean = (share.unsqueeze(-1) * packed.key).sum(-2)
    centred = packed.key - mean.unsqueeze(-2)
    spread = None if form.full else (share.unsqueeze(-1) * centred * centred).sum(-2)
    parts = (log(weight), mean, centred, spread, share)
    held = 2 if torch.compiler.is_compiling() else 4  # numbers for each pair of row and token at the peak
    step = max(1, room(q) // max(1, B * H * held * packed.key.shape[2] * packed.key.shape[3]))
    step = -(-G * L // -(-G * L // step))  # blocks of equal size
    if step >= G * L:
        return _rows(rows, packed, parts, form.closure, narrow).unflatten(2, (G, L))
    outs = [recomputed(_rows, block, packed, parts, form.closure, narrow) for block in rows.split(step, 2)]
    return torch.cat(outs, 2).unflatten(2, (G, L))


def _rows(q: Tensor, packed: Packed, parts: Parts, closure: str, narrow: torch.dtype | None) -> Tensor:
    """Rows q (B, H, n, D) -> (B, H, n, E)."""
    log_weight, mean, centred, spread, share = parts
    exact, K = packed.exact, mean.shape[-2]
    share = share.unsqueeze(2)  # (B, H or 1, 1, K, m)
    within = _product(q, centred.flatten(2, 3).mT, narrow).unflatten(-1, centred.shape[2:4])  # q.k~, (B, H, n, K, m)
    variance = (share * within * within).sum(-1) if spread is None else (q * q) @ spread.mT
    logits = log_weight.unsqueeze(-2) + q @ mean.mT + log_mass(variance, closure)
    if exact is not None:
        near = q @ exact.key.squeeze(2).mT + exact.log_weight.squeeze(2)
        logits = torch.cat((logits, near), -1)
    w = softmax_or_zero(logits)
    mass = w[..., :K]
    # In this order the backward pass needs nothing as large as `within` but that itself.
    far = share * (mass.unsqueeze(-1) + (mass * gain(variance, closure)).unsqueeze(-1) * within)
    out = _product(far.flatten(-2), packed.value.flatten(2, 3), narrow)
    return out if exact is None else out + w[..., K:] @ exact.value.squeeze(2)


def _product(a: Tensor, b: Tensor, narrow: torch.dtype | None) -> Tensor:
    return a @ b if narrow is None else (a.to(narrow) @ b.to(narrow)).to(a.dtype)
