"""The own block and all that touch it, exact for each query; prefix queries stand nowhere and have none.

Shape legend: B batch, H key heads, G query heads of each, L tokens after the prefix, p prefix tokens, N blocks of at
most m tokens, t neighbours, D, E widths.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import Form
from .fields import Far, Seen, Tokens, mix
from .layout import Layout


def beside(q: Tensor, prefix: int, blocks: Layout | None, far: Far, tokens: Tokens, seen: Seen, form: Form) -> Tensor:
    """q (B, H, G, p + L, D) -> (B, H, G, p + L, E).

    `seen.near` (B or 1, 1, N, t), -1 for none, are the neighbours of each of `blocks`; those of each token, N = L,
    where masks move the borders of every sequence.
    """
    first, rest = q[..., :prefix, :], q[..., prefix:, :]
    outs, (G, length) = [], rest.shape[2:4]
    if prefix:
        out = mix(first.flatten(2, 3).unsqueeze(-2), far, None, Seen(seen.exact), form)
        outs.append(out.squeeze(-2).unflatten(2, (G, prefix)))
    assert isinstance(seen.near, Tensor)
    seen = seen._replace(near=seen.near.repeat(1, 1, G, 1))
    if length and blocks is not None:
        rows = torch.stack([blocks.pack(x) for x in rest.unbind(2)], 2)  # (B, H, G, N, m, D)
        outs.append(blocks.unpack(mix(rows.flatten(2, 3), far, tokens, seen, form).unflatten(2, (G, -1)), length))
    elif length:
        out = mix(rest.flatten(2, 3).unsqueeze(-2), far, tokens, seen, form)
        outs.append(out.squeeze(-2).unflatten(2, (G, length)))
    if not outs:
        return q.new_zeros(*q.shape[:-1], far.value_mean.shape[-1]) + q.sum() * 0
    return torch.cat(outs, -2)
