"""What a tree sees of tokens whose order is asked for: their products with a few of the others.

Queries are told apart by the logits that a few keys give them, keys by those that they give a few queries.

Shape legend: B sequences, H heads of the tokens ("q" here), Hk of those they are met with ("k") for GROUP of theirs
each, Lq and Lk of them, S sampled (BS padded), D width (BD padded).
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import triton.language as tl

from ..cluster.parts import picked_tile, store_picked
from ..products import cast, dot, finished
from ..tokens import head, kernel


@kernel
def columns(
    q, k, places, x, q_b, q_h, q_t, k_b, k_h, k_t, length_q, heads, GROUP: tl.constexpr, CENTRED: tl.constexpr,
    S: tl.constexpr, BS: tl.constexpr, D: tl.constexpr, BD: tl.constexpr, N: tl.constexpr, UNIT: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """Grid (blocks of N tokens, B H). x (B H, Lq, S): products of q and those of k at `places` (S,), what is no number
    there being 0. CENTRED: less their mean, which moves all logits of a query alike."""
    pid, d, s = tl.program_id(1), tl.arange(0, BD), tl.arange(0, BS)
    b, h = pid // heads, pid % heads
    there = s < S
    token = tl.load(places + s, mask=there, other=0)
    keys = head(k, b, h // GROUP, 0, k_b, k_h, k_t, UNIT)
    some = picked_tile(keys, token, there, k_t * UNIT, d, D, BD, False).to(tl.float32)
    if CENTRED:
        some -= (tl.sum(some, 0) / S)[None, :]
    some = tl.where(there[:, None] & (tl.abs(some) < float("inf")), some, 0.0)
    row = tl.program_id(0) * N + tl.arange(0, N)
    rows = picked_tile(head(q, b, h, 0, q_b, q_h, q_t, UNIT), row, row < length_q, q_t * UNIT, d, D, BD, False)
    found = finished(dot(rows, tl.trans(cast(some, q.dtype.element_ty)), None, PRECISION))
    store_picked(x + pid.to(tl.int64) * length_q * S, found, row, row < length_q, S, s, S, BS)
