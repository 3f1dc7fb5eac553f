"""Candidates of the dial, by name: what they pass to `cluster_attention` in a layer, and what they multiply there.

Shape legend: Lq queries, Lk keys, D, E widths, K clusters.
"""

from __future__ import annotations

from dataclasses import replace
from math import inf
from typing import Any

from ..call import Call
from ..cluster.alike import multiply_adds as sorting_work
from ..cluster.auto import is_auto, tuning
from ..cluster.cost import causal_multiply_adds, multiply_adds
from ..cluster.kmeans import KMeans
from ..cluster.layout import Blocks
from ..cluster.tree import Tree
from ..nn.swapped.choice import Choice
from ..zoo.cluster import FOUND, LEAST, by_head, clusters_of, past_blocks

# Those that made layers cheapest, on random smooth tokens and on a sentence encoder, at 256 to 4,096 tokens: one
# covariance for all blocks or none, since one for each costs K D E a query, and a near field of up to a quarter. Of
# trees those of one level are fast, as alike queries share their near clusters; those with leaves need least work.
NAMES = (
    "cluster4+response=pooled",
    "cluster16+response=0",
    "cluster16+response=pooled",
    "cluster16+near=2+response=0",
    "cluster16+near=4+response=0",
    "cluster64+response=0",
    "cluster64+near=4+response=0",
    "cluster64+near=8+response=0",
    "cluster64+near=8+response=pooled",
    "cluster64+near=16+response=pooled",
    "cluster64+find=tree+near=4",
    "cluster64+find=tree+near=8",
    "cluster64+find=tree+near=16",
    "cluster256+find=tree+near=16",
    "cluster256+find=tree+near=48",
    "cluster64+find=tree+leaves=4+opened=16+near=24+width=24+exact=96",
    "cluster64+find=tree+leaves=4+opened=24+near=40+width=24+exact=208",
)
# For causal layers, where `cluster16` keeps the newest 16 blocks of the past apart and merges older ones: no near field
# and no pooled covariance, but exact tokens of the recent past. In a small language model of 1,024 tokens no layer was
# cheaper by more than 0.02 of softmax's cost with 72 combinations of clusters, block, recent and response. First tokens
# take most of the attention in language models: as sinks they are exact (SmolLM2's layer 15: 2 % squared error for 65).
CAUSAL_NAMES = (
    "cluster4+block=8+recent=1+response=0+sinks=4",
    "cluster4+block=16+recent=1+response=0+sinks=4",
    "cluster4+block=32+recent=1+response=0+sinks=4",
    "cluster4+block=32+recent=3+response=0+sinks=4",
    "cluster16+block=16+recent=7+response=0+sinks=4",
    "cluster16+block=32+recent=7+response=0+sinks=4",
    "cluster4+block=16+recent=3+response=8+sinks=4",
    "cluster4+block=32+recent=3+response=8+sinks=4",
    "cluster4+block=32+recent=7+response=8+sinks=4",
    "cluster16+recent=1+response=8+sinks=4",
    "cluster16+recent=3+response=8+sinks=4",
    "cluster64+recent=7+response=16+sinks=4",
)
PAST = ("block", "recent", "sinks")  # options of causal attention alone


def arguments_of(choice: Choice, made: Call) -> dict[str, Any]:
    """What the mechanism passes to `cluster_attention` in a layer that calls it so."""
    options = {name: option for name, option in _tuned(choice, made).items() if name not in (*PAST, *FOUND)}
    if made.is_causal:
        return {"clusters": _past(choice), "prefix": choice.options.get("sinks", 0), "is_causal": True, **options}
    if made.query.shape[-2] == made.key.shape[-2]:
        options |= {"grid": made.grid, "prefix": made.prefix if made.grid is not None else 0}
    return {"clusters": _clusters(choice), "least": LEAST, **options}


def work_of(choice: Choice, made: Call) -> float:
    """Multiply-adds of a candidate for one head and sequence of a call, with blocks of equal size; infinite if it
    cannot be. The mean over heads where these have options of their own."""
    if heads := by_head(choice.options):
        return sum(work_of(replace(choice, heads=None, options=own), made) for own in heads) / len(heads)
    (Lq, D), (Lk, E) = made.query.shape[-2:], made.value.shape[-2:]
    options, near, own = _tuned(choice, made), choice.options.get("near", 0), Lq == Lk
    form = {name: options[name] for name in ("response", "variance") if name in options}
    if made.is_causal:
        pooled = isinstance(options["response"], str)
        if _any_of(FOUND, choice) or not own or near or pooled or options["near_rows"] != 1:
            return inf
        return causal_multiply_adds(Lq, D, E, _past(choice), sinks=choice.options.get("sinks", 0), **form)
    if _any_of(PAST, choice) or (near == "neighbours" and not own):
        return inf
    if near == "neighbours":
        near = 3 ** (1 if made.grid is None else len(made.grid))
    K, clusters = min(_blocks(choice), -(-Lk // 2)), _clusters(choice)
    prefix = made.prefix if own and made.grid is not None else 0
    search, also = None if isinstance(clusters, int) else clusters, 0.0
    if isinstance(search, Tree):
        search = search.for_tokens(Lk)
        K = search.count * search.leaves
        if options["near_rows"] != 1:  # queries that share near clusters of a tree are put in order too
            also = search.multiply_adds(Lq, D)
        if search.exact:
            search = replace(search, exact=search.exact + prefix)
    elif search is not None and near and options["near_rows"] != 1:
        also = sorting_work(Lq, D, options["near_rows"])
    exact = min(Lk, near * Lk / K + prefix)
    return also + multiply_adds(Lk, D, E, K, near_tokens=exact, asking=Lq / Lk, kmeans=search, **form)


def _tuned(choice: Choice, made: Call) -> dict[str, Any]:
    """The options of a candidate with numbers in place of "auto", which are those of the whole sequence."""
    clusters, near = _past(choice) if made.is_causal else _clusters(choice), choice.options.get("near", 0)
    found = tuning(clusters, near, made.query.shape[-2], made.key.shape[-2], is_causal=made.is_causal)._asdict()
    return found | {name: option for name, option in choice.options.items() if not is_auto(option)}


def _any_of(names: tuple[str, ...], choice: Choice) -> bool:
    return any(name in choice.options for name in names)


def _blocks(choice: Choice) -> int:
    return int(choice.attention.removeprefix("cluster"))


def _clusters(choice: Choice) -> int | Tree | KMeans:
    return clusters_of(_blocks(choice), **{name: choice.options[name] for name in FOUND if name in choice.options})


def _past(choice: Choice) -> Blocks:
    """The blocks of a candidate in a causal layer."""
    return past_blocks(_blocks(choice), **{name: choice.options[name] for name in PAST[:2] if name in choice.options})
