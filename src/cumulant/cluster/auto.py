"""What "auto" stands for in `cluster_attention`: one rule for every device, so that a call has one answer.

    near > 0 of blocks, not causal, 1,024 queries and keys or more     near_rows=128   rank="mean"   response="pooled"
    near > 0 of a Tree, KMeans or an assignment, not causal, as many   near_rows=64    rank="error"  response="pooled"
    a Tree with leaves                                                 near_rows=1     rank="error"  response="pooled"
    causal, K blocks, 1,024 queries and keys or more                   near_rows=1     rank="mass"   response="pooled"
    everything else                                                    near_rows=1     rank="mass"   response=None

The first line is what matrix products want: near clusters for a tile of queries, one covariance for all clusters. It is
coarser; short sequences do not need it. Of clusters by content the mean of queries says less: with 4 near clusters of
k-means on a sentence encoder rank="error" has 0.78 times the error of "mean", "mass" 0.80; with 8 of 64 of a tree, in
six layers of LightGlue, 0.50 to 1.06 times that of "mean" and 0.76 to 1.06 times that of "mass", as docs/lab/lightglue
has by layer. A tile of 128 queries by content has twice the error of one of 32. In causal calls a rule by length would
make a row depend on what comes after it. K blocks do so anyway; `Blocks` do not, and keep theirs.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from .build import Clusters
from .kmeans import KMeans
from .layout import Blocks
from .tree import Tree

LONG = 1024  # queries and keys from which tiles of queries share their near clusters
AUTO = "auto"


def is_auto(option: object) -> bool:
    """Whether an option is left to the library; an array answers a comparison with an array."""
    return isinstance(option, str) and option == AUTO


class Tuning(NamedTuple):
    """The options that "auto" fills in."""

    near_rows: int
    rank: str
    response: int | str | None


EACH = Tuning(1, "mass", None)
SHARED = Tuning(128, "mean", "pooled")
ALIKE = Tuning(64, "error", "pooled")  # queries by content
LEVELS = Tuning(1, "error", "pooled")
PAST = Tuning(1, "mass", "pooled")


def tuning(
    clusters: Clusters, near: int | str, queries: int, keys: int, *, is_causal: bool = False, asking: str = "each"
) -> Tuning:
    """The options of a call with so many queries and keys; `asking` as `queries=`."""
    if isinstance(clusters, Tree) and clusters.leaves > 1:
        return LEVELS
    many = queries >= LONG and keys >= LONG
    if is_causal and isinstance(clusters, int) and many:
        return PAST
    near_field = isinstance(near, int) and near > 0
    if not (near_field and many and not is_causal and asking == "each"):
        return EACH
    if isinstance(clusters, Tree | KMeans | Tensor):
        return ALIKE
    return SHARED if isinstance(clusters, int | tuple | Blocks) else EACH
