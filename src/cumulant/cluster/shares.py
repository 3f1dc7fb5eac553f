"""Plain torch without gradients on a CPU: some heads at a time, so that what each step writes is still in the caches.

Shape legend: B batch, H query heads, Hk key heads, G = H / Hk, Lq queries, Lk keys, D, E widths.

Cluster attention is some hundred operations, most of which go once through a number a query and cluster. Over all heads
each of them is a way through memory, and through fresh memory at that: the kernel clears every page of it first.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from ..kernels.workers import Pace, side_by_side
from ..tracing import is_plain, transformed
from . import quick
from .backend import Case

SHARE = 1 << 18  # tokens times width of a share: 1 MiB in float32
PACE = Pace()
Compute = Callable[[Case], Tensor]


def by_heads(reference: Compute, case: Case) -> Tensor:
    """reference(case) (B, Hk, G, Lq, E) of a call in one batch.

    By `quick`, where that serves, of some heads at a time. Where others want the cores too, shares are tasks of threads
    of their own.
    """
    q, k, v = case.call[:3]
    wanted = torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v))
    if wanted or q.device.type != "cpu" or not is_plain(q) or transformed():
        return reference(case)
    with torch.no_grad():
        if not quick.serves(case):
            return reference(case)
        (B, H, Lq, _), (Hk, Lk), E = q.shape, k.shape[1:3], v.shape[-1]
        G, width = H // Hk, max(q.shape[-1], E)
        threads = torch.get_num_threads()
        ours = threads < 2 or PACE.ours()
        count = max(1, SHARE // max(1, max(G * Lq, Lk) * width))
        if not ours:
            count = min(count, -(-B * Hk // threads))
        out = q.new_empty(B, Hk, G, Lq, E)
        many, count = max(1, min(B, count // Hk)), min(Hk, count)
        heads = [slice(h, min(Hk, h + count)) for h in range(0, Hk, count)]
        shares = [(slice(b, min(B, b + many)), h) for b in range(0, B, many) for h in heads]

        def answer(share: tuple[slice, slice]) -> None:
            b, h = share
            part = case.call._replace(query=q[b, h.start * G : h.stop * G], key=k[share], value=v[share])
            out[share] = quick.attend(case._replace(call=part))

        if ours:
            kind = case.form, width, (H * Lq).bit_length(), Lk.bit_length(), threads
            with PACE.timed(kind, q.numel(), threads > 1):
                for share in shares:
                    answer(share)
        else:
            side_by_side(answer, shares)
        return out
