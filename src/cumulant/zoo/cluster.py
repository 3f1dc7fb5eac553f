"""Cluster attention with 4, 16, 64 or any number of clusters as mechanisms; see `cumulant.cluster`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from torch import Tensor

from ..call import Call, check_choice
from ..cluster import Blocks, ClusterStream, KMeans, Tree, cluster_attention, cluster_scores
from ..cluster.asked import check_form
from ..cluster.auto import is_auto
from .options import CHECKS, Check, at_least
from .registry import Mechanism, can, family, options_of, register

COUNTS = (4, 16, 64)  # listed; any other number is found by its name
FIND = ("blocks", "tree", "kmeans")  # how clusters are found
FOUND = ("find", "leaves", "opened", "patch", "width", "exact")  # options that say which clusters
# A block of one token is softmax at more than its price: the mechanisms make blocks of two tokens at least.
LEAST = 2
BLOCK = 64  # tokens of a block in causal attention


def past_blocks(count: int, *, block: int = BLOCK, recent: int = 0) -> Blocks:
    """The blocks of causal attention and of streams."""
    return Blocks(block, keep=count, recent=recent)


def clusters_of(count: int, *, find: str = "blocks", **tree: int) -> int | Tree | KMeans:
    """What `cluster_attention` takes as clusters; leaves, opened, patch, width and exact are those of a tree."""
    check_choice("find", find, FIND)
    if find == "tree":
        return Tree(count, **tree, iterations=3 if tree.get("width") else 2)
    if _of_tree(tree):
        got = ", ".join(f"{name}={tree.get(name, getattr(Tree, name))}" for name in FOUND[1:])
        raise ValueError(f"{got} belong to find='tree', got find={find!r}")
    return count if find == "blocks" else KMeans(count, 3, 4)


def _check_past(find: str = "blocks", **tree: int) -> None:
    if find != "blocks" or _of_tree(tree):
        raise ValueError(
            f"find={find!r} has no causal form: clusters by content would know later tokens; past blocks are "
            'find="blocks", with block and recent'
        )


def _of_tree(options: dict[str, int]) -> bool:
    """Whether one of a tree's options is given another value than it has by itself."""
    return any(value != getattr(Tree, name) for name, value in options.items())


def by_head(options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The options of each head where some are lists of one value a head, as in near=[2, 8, 2, 8]; [] where none is."""
    lists = {name: given for name, given in options.items() if isinstance(given, list | tuple)}
    counts = {len(given) for given in lists.values()}
    if len(counts) > 1 or 0 in counts:
        got = ", ".join(f"{name} of {len(given)}" for name, given in lists.items())
        raise ValueError(f"lists of options have one value a head, all of the same length, got {got}")
    return [
        {**options, **{name: given[head] for name, given in lists.items()}} for head in range(max(counts, default=0))
    ]


def _lists(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={given}" for name, given in options.items() if isinstance(given, list | tuple))


def joined(heads: list[dict[str, Any]]) -> dict[str, Any]:
    """Options of which `by_head` gives these to each head, lists only where heads differ."""
    names = dict.fromkeys(name for options in heads for name in options)
    each = {name: [options.get(name, DEFAULTS[name]) for options in heads] for name in names}
    return {name: given[0] if all(one == given[0] for one in given) else given for name, given in each.items()}


def _each_head(call: Call, options: Mapping[str, Any], run: Callable[[Call, Mapping[str, Any]], Tensor]) -> Tensor:
    heads = by_head(options)
    if not heads:
        return run(call, options)
    call = call.checked()
    if len(heads) != call.query.shape[-3]:
        heads_here = call.query.shape[-3]
        raise ValueError(f"lists of options have one value a head: query has {heads_here} heads, got {_lists(options)}")
    return call.by_heads([tuple(own.items()) for own in heads], lambda own, of_heads: run(of_heads, dict(own)))


def _stream(count: int, *, block: int = BLOCK, recent: int = 0, sinks: int = 0, **options: Any) -> ClusterStream:
    lists = _lists({"block": block, "recent": recent, "sinks": sinks, **options})
    if lists:
        raise ValueError(f"options of a stream have one value for all heads, got {lists}")
    _check_past(**{name: options.pop(name) for name in FOUND if name in options})
    given = {name: option for name, option in options.items() if not is_auto(option)}
    return ClusterStream(past_blocks(count, block=block, recent=recent), prefix=sinks, **given)


def _options(
    count: int,
    call: Call,
    *,
    near: int | str = 0,
    closure: str = "tanh",
    variance: str = "diagonal",
    response: int | str | None = "auto",
    near_rows: int | str = "auto",
    rank: str = "auto",
    block: int = BLOCK,
    recent: int = 0,
    sinks: int = 0,
    find: str = "blocks",
    leaves: int = 1,
    opened: int = 0,
    patch: int = 1,
    width: int = 0,
    exact: int = 0,
) -> dict[str, Any]:
    """Arguments of `cluster_attention`: the blocks are a grid's, a sequence's, or past ones; or clusters by content,
    where `find` is "tree" (of patches of a grid, with leaves, if it has any, of so many that are opened) or "kmeans".
    In causal attention blocks are of `block` tokens, `recent` ones exact, and so are `sinks` at the start of a text.

    A grid is that of the queries; where keys are others it says nothing of them.
    """
    shared = {name: getattr(call, name) for name in ("key_mask", "is_causal", "scale", "enable_gqa", "offset")}
    shared |= {"near": near, "closure": closure, "variance": variance}
    shared |= {"response": response, "near_rows": near_rows, "rank": rank}
    found: Any = {"find": find, "leaves": leaves, "opened": opened, "patch": patch, "width": width, "exact": exact}
    if call.is_causal:
        _check_past(**found)
        return {"clusters": past_blocks(count, block=block, recent=recent), "prefix": sinks, **shared}
    clusters = clusters_of(count, **found)
    query, key = call.query, call.key
    tensors = all(isinstance(x, Tensor) and not x.is_nested and x.ndim > 1 for x in (query, key))
    if tensors and query.shape[-2] == key.shape[-2]:  # what is no tensor is named by the function
        shared |= {"grid": call.grid, "prefix": call.prefix}
    return {"clusters": clusters, "least": LEAST, **shared}


def _check_form(name: str, given: Any) -> None:
    plain: dict[str, Any] = {"near": 0, "closure": "tanh", "rank": "mass", "variance": "diagonal", "response": None}
    if not is_auto(given) or name not in ("rank", "response", "near_rows"):
        check_form(**{**plain, name: given})


def _one_or_each(check: Check) -> Check:
    def checked(name: str, given: Any) -> None:
        for one in given if isinstance(given, list | tuple) else (given,):
            check(name, one)

    return checked


DEFAULTS = {p.name: p.default for p in inspect.signature(_options).parameters.values() if p.default is not p.empty}
CHECKED = {
    **CHECKS,
    **dict.fromkeys(("near", "closure", "variance", "response", "near_rows", "rank"), _check_form),
    "find": lambda name, given: check_choice(name, given, FIND),
    **dict.fromkeys(("width", "exact"), at_least(0)),
    "patch": at_least(1),
}
CHECKED |= {name: _one_or_each(CHECKED[name]) for name in DEFAULTS}


def mechanism(count: int) -> Mechanism:
    @options_of(_options)
    def function(call: Call, **options: Any) -> Tensor:
        return _each_head(call, options, lambda x, own: cluster_attention(*x[:3], **_options(count, x, **own)))

    @options_of(_options)
    def weights(call: Call, **options: Any) -> Tensor:
        return _each_head(call, options, lambda x, own: cluster_scores(*x[:2], **_options(count, x, **own)))

    return Mechanism(
        name=f"cluster{count}",
        summary=f"softmax expanded inside {count} blocks of keys: second order in each, the right masses between them",
        paper="Local cumulants (this library)",
        year=2026,
        cost=f"{count + 1} L D E + {count} L (2 D + E)",
        function=function,
        row_weights=weights,
        stream=partial(_stream, count),
        order_free=False,
        checks=CHECKED,
        **can(
            "causal cross causal_cross offset key_mask grouped_queries subquadratic ragged raw key_shift wants_grid "
            "mergeable"
        ),
    )


family("cluster", mechanism)
for _count in COUNTS:
    register(mechanism(_count))
