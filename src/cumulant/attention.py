"""What a user calls: `attention`, `attention_varlen` and `scores`. From here: `expansion` picks the path that computes.

Shape legend: ... leading dimensions, H heads, Lq queries, Lk keys, D key width, E value width.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor

from . import shards
from .around import around_mean, check_around, softmax_rows
from .call import Call, check_packed, longest, offsets
from .expansion import Form, by_kernels, expand, path_for, weigh
from .kernels import notice, replay
from .saturated import saturated
from .tracing import in_autocast_dtype, without_autocast


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    order: int = 3,
    full: bool = False,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    normalization: str = "mean",
    closure: str | None = None,
    around: str = "zero",
    apart: int = 0,
    query_mask: Tensor | None = None,
    backend: str = "auto",
) -> Tensor:
    """Cumulant attention: the Taylor polynomial of softmax attention in the query, cut after `order` terms.

        out = <v> + <(q.k~) v~> + 1/2 sum_i q_i^2 <k~_i^2 v~>        (orders 1, 2, 3; a tilde: minus the mean)

    Layout and meaning follow `F.scaled_dot_product_attention`.

    Args:
        query: (..., H, Lq, D).
        key: (..., H, Lk, D); fewer heads with `enable_gqa`.
        value: (..., H, Lk, E).
        order: 1 keeps the mean, 2 adds the covariance of keys and values, 3 the third cumulant.
        full: at order 3, take the whole third cumulant instead of its diagonal. Cost: 2 L D^2 E, and L^2 (D + E)
            where the pairs of tokens are fewer than the D^2 E numbers of the moments (L up to 512 for D = E = 64).
        key_mask: (..., Lk), leading dimensions those before H. Bool (True takes part) or non-negative weights.
            Tokens of weight 0 do not matter, NaN in them included. A row without any key gives 0.
        is_causal: query i sees the keys j <= i, aligned at the first token also when Lq != Lk.
        scale: factor on q.k, D**-0.5 unless given.
        enable_gqa: query heads may be a multiple of the key heads; keys are not copied.
        normalization: "mean" approximates softmax; "sum" is the paper's printed form, larger by the sum of weights.
        closure: at order 2, "tanh" or "langevin" let the response saturate, <v> + f(s) <(q.k~) v~> with the spread s
            of q.k, so that it cannot run away at large logits; None (or "gauss") is second order as it stands.
        around: "zero", or "mean": around the mean of the queries, which is exact there; closer where logits are spread.
            `query_mask` (..., Lq) says which queries count.
        apart: the first so many queries (class tokens) are not expanded with the others: around "zero" they get softmax
            itself, around "mean" a mean of their own, which for one query is the same.
        backend: "auto", "reference" (plain torch), "cpu" (tiled) or "triton".

    Returns:
        (..., H, Lq, E), in the dtype of the query. Cost: 2 L D E a head at order 2, 4 L D E at order 3, never L^2.
    """

    call = Call(query, key, value, key_mask, is_causal, scale, enable_gqa, query_mask)
    return attend(call, Form(order, full, normalization, closure, around, apart, backend))


def attend(
    call: Call,
    form: Form,
    what: Callable[[Call, Form], Tensor] = expand,
    positions: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """`attention` of a call; with `what=weigh` its weights, causal rows at `positions`, as `what` has them too.

    Calls without masks that were made before are repeated.
    """
    kind = None
    if what is expand and call.key_mask is None and call.query_mask is None:
        kind = replay.kind("attention", *call[:3], call.is_causal, call.scale, call.enable_gqa, *form)
    if kind is None:
        return _attend(call, form, what, positions)
    return replay.call(kind, lambda: _attend(call, form, what), *call[:3])


def _attend(
    call: Call, form: Form, what: Callable[[Call, Form], Tensor], positions: Tensor | Sequence[int] | None = None
) -> Tensor:
    form = form.checked()
    check_around(form.around, call.is_causal, form.apart)
    if form.closure is not None and (form.order != 2 or form.around != "zero"):
        got = f"order={form.order!r}, around={form.around!r}"
        raise ValueError(f"closure={form.closure!r} closes the second order around 0: pass order=2, got {got}")
    across = shards.answerer()
    if across is not None:
        return across.attend(call, form, what)
    if form.around == "mean":
        return around_mean(what, call, form)
    if form.apart:
        own = softmax_rows(call, form.apart, weigh=what is not expand)
        others = call._replace(query=call.query[..., form.apart :, :], query_mask=None)
        return torch.cat((own, attend(others, form._replace(apart=0), what)), -2)
    call = call.checked()
    return what(call, form) if form.closure in (None, "gauss") else saturated(what, call, form, positions)


def attention_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor,
    max_q: int | None = None,
    max_k: int | None = None,
    *,
    order: int = 3,
    full: bool = False,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    normalization: str = "mean",
    closure: str | None = None,
    around: str = "zero",
    apart: int = 0,
    backend: str = "auto",
) -> Tensor:
    """`attention` over sequences of different lengths packed end to end; equal to a loop over them.

    Args:
        query: (Tq, H, D), all sequences one after the other.
        key: (Tk, H, D).
        value: (Tk, H, E).
        cu_seq_q: (n + 1,) integer offsets: sequence i is query[cu_seq_q[i] : cu_seq_q[i + 1]].
        cu_seq_k: the same for keys and values.
        max_q: longest query sequence; kernels size their grid with it. Computed when not given.
        max_k: longest key sequence.

    The other arguments are those of `attention`. A sequence without keys gives 0. Returns (Tq, H, E).
    """
    query, key, value = in_autocast_dtype(query, key, value)
    check_packed(query, key, value, cu_seq_q, cu_seq_k)
    form = Form(order, full, normalization, closure, around, apart, backend).checked()
    q, k, v = (x.transpose(0, 1) for x in (query, key, value))
    call = Call(q, k, v, None, is_causal, scale, enable_gqa).checked()
    across = shards.answerer()
    if across is not None:
        return across.varlen(call, form, cu_seq_q, cu_seq_k)
    plain = closure in (None, "gauss") and around == "zero" and not apart  # others need all of a sequence: one by one
    path = path_for(form, call) if plain else "reference"
    if not plain and form.backend == "auto":
        given = f"closure={closure!r}, around={around!r}, apart={apart}"
        notice.plain_torch("attention_varlen", q, f"{given} take one sequence after the other; the defaults take all")
    if path == "triton":
        max_q = _longest("cu_seq_q", cu_seq_q, query.shape[0], max_q, "max_q")
        max_k = _longest("cu_seq_k", cu_seq_k, key.shape[0], max_k, "max_k")
        with without_autocast(query.device.type):
            tokens_first = call._replace(query=query, key=key, value=value)
            cu_q, cu_k = (x.to(query.device, torch.int32).contiguous() for x in (cu_seq_q, cu_seq_k))
            return by_kernels(tokens_first, form, cu_q, cu_k, max_q, max_k)
    q_at = offsets("cu_seq_q", cu_seq_q, query.shape[0], max_q, "max_q")
    k_at = offsets("cu_seq_k", cu_seq_k, key.shape[0], max_k, "max_k")
    parts = [
        attend(call._replace(query=q[:, a:b], key=k[:, c:d], value=v[:, c:d]), form)
        for (a, b), (c, d) in zip(pairwise(q_at), pairwise(k_at), strict=True)
    ]
    if not parts:
        return query.new_zeros(0, query.shape[1], value.shape[2])
    return torch.cat(parts, -2).transpose(0, 1)


def _longest(name: str, cu_seq: Tensor, tokens: int, most: int | None, most_name: str) -> int:
    """The longest sequence. Offsets on a GPU, or in a graph, are taken at their word where it is given: to look at them
    would wait for everything before them."""
    if most is not None and (cu_seq.device.type != "cpu" or torch.compiler.is_compiling()):
        return most
    at = offsets(name, cu_seq, tokens, most, most_name)
    return longest(at) if most is None else most


def scores(
    query: Tensor,
    key: Tensor,
    *,
    order: int = 3,
    full: bool = False,
    key_mask: Tensor | None = None,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    normalization: str = "mean",
    closure: str | None = None,
    around: str = "zero",
    apart: int = 0,
    query_mask: Tensor | None = None,
    positions: Tensor | Sequence[int] | None = None,
) -> Tensor:
    """The signed weights A (..., H, Lq, Lk) with which `attention` mixes the values: out = A v.

        A_l = w_l/W [ 1 + q.k~_l + 1/2 sum_i q_i^2 (k~_li^2 - <k~_i^2>) ]

    Each row sums to 1 (to the sum of weights with normalization="sum"). A row costs Lk D, so pass only the
    queries whose maps are wanted; `positions` (Lq,) then says where they stand when `is_causal` (default: 0, 1, ...).
    The other arguments are those of `attention`.
    """
    call = Call(query, key, key, key_mask, is_causal, scale, enable_gqa, query_mask)
    form = Form(order, full, normalization, closure, around, apart)
    return attend(call, form, partial(weigh, positions=positions), positions)
