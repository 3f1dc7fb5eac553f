"""The options of `cluster_attention` as they are given, and what of them goes together: all that needs no tensors."""

from __future__ import annotations

from typing import NamedTuple

from ..call import Call, check_choice, whole
from ..closures import check_closure
from .auto import is_auto, tuning
from .backend import Case, Form, blocks_of_past
from .build import Clusters
from .layout import Blocks
from .near import RANKS
from .statistics import VARIANCES
from .tree import Tree

BACKENDS = ("auto", "reference", "triton")
QUERIES = ("each", "mean")


class Asked(NamedTuple):
    """What is asked for beside the `Call`: named as the arguments of `cluster_attention`."""

    clusters: Clusters
    near: int | str
    closure: str
    rank: str
    variance: str
    response: int | str | None
    near_rows: int | str
    queries: str
    least: int
    backend: str

    def check_tokens(self, offset: int, is_causal: bool) -> None:
        """Raises for numbers of tokens and of clusters that are none."""
        check_near(self.near)
        if not whole(self.least, 1):
            raise ValueError(f"least must be a number of tokens, 1 or more, got {self.least!r}")
        if not whole(offset) or (offset and not is_causal):
            raise ValueError(f"offset must be a place, 0 or more, of causal queries, got {offset!r} with {is_causal=}")

    def form(self, call: Call, queries: int, keys: int) -> Form:
        """With what "auto" stands for in a call of so many queries and keys in all."""
        rows = call.offset + queries
        found = tuning(self.clusters, self.near, rows, keys, is_causal=call.is_causal, asking=self.queries)
        return check_form(
            self.near,
            self.closure,
            found.rank if is_auto(self.rank) else self.rank,
            self.variance,
            found.response if is_auto(self.response) else self.response,
            found.near_rows if is_auto(self.near_rows) else self.near_rows,
            self.backend,
            self.queries,
        )


def check_near(near: int | str) -> None:
    if not whole(near) and not (isinstance(near, str) and near == "neighbours"):
        raise ValueError(f'near must be a number of clusters, 0 or more, or "neighbours", got {near!r}')


def check_form(
    near: int | str,
    closure: str,
    rank: str,
    variance: str,
    response: int | str | None,
    near_rows: int | str = 1,
    backend: str = "auto",
    queries: str = "each",
) -> Form:
    """The options that say how clusters and near field are put together, checked."""
    check_closure(closure)
    check_near(near)
    check_choice("rank", rank, RANKS)
    check_choice("variance", variance, VARIANCES)
    check_choice("backend", backend, BACKENDS)
    check_choice("queries", queries, QUERIES)
    pooled = isinstance(response, str) and response == "pooled"
    count = None if pooled else response
    if count is not None and not whole(count):
        raise ValueError(f'response must be None (all clusters), a number, 0 or more, or "pooled", got {response!r}')
    if not whole(near_rows, 1):
        raise ValueError(f"near_rows must be at least 1, got {near_rows!r}")
    return Form(near, closure, rank, variance == "full", count, near_rows, pooled, queries == "mean")


def check_tree(tree: Tree, call: Call, form: Form) -> None:
    """Raises for what clusters by content cannot do."""
    if call.is_causal:
        raise TypeError("clusters must be an int or Blocks(size, keep, recent) when is_causal, got Tree")
    if form.near == "neighbours":
        raise ValueError(
            'near="neighbours" needs blocks of a sequence or a grid: clusters of a Tree have no neighbours'
        )
    if form.together:
        raise ValueError('queries="mean" needs blocks of a sequence or a grid: clusters of a Tree hold no queries')
    if tree.exact and not form.near:
        raise ValueError(f"exact={tree.exact} tokens of a Tree are those of near leaves: pass near, got near=0")
    if tree.leaves > 1 and (form.near_rows != 1 or form.full or not (form.pooled or form.response == 0)):
        got = (
            f"near_rows={form.near_rows}, variance={'full' if form.full else 'diagonal'!r}, response={form.response!r}"
        )
        raise ValueError(
            'a Tree with leaves takes near_rows=1, variance="diagonal" and response="pooled" or 0 (all "auto" as they '
            f"are), got {got}"
        )


def causal_blocks(case: Case, Lq: int) -> Blocks:
    """The blocks of causal attention; raises for what has no causal form."""
    blocks, call, form = case.clusters, case.call, case.form
    if call.grid is not None:
        raise ValueError(f"is_causal=True takes blocks of a sequence; pass grid=None, got {call.grid}")
    if not isinstance(blocks, int | Blocks):
        kind = type(blocks).__name__
        raise TypeError(f"clusters must be an int or Blocks(size, keep, recent) when is_causal, got {kind}")
    if form.near == "neighbours":
        raise ValueError('near="neighbours" has no causal form; Blocks(size, recent=1) makes the block before exact')
    blocks = blocks_of_past(blocks, Lq)
    if form.near and blocks.keep is not None:
        raise ValueError(
            f"near={form.near} needs the tokens of old blocks, which {blocks} merges; use recent= or keep=None"
        )
    if form.together:
        raise ValueError('queries="mean" has no causal form: a block would know its later queries; pass "each"')
    if form.near_rows != 1:
        raise ValueError(f"near_rows={form.near_rows} would let a row choose for earlier ones; pass 1 when is_causal")
    return blocks
