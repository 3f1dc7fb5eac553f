"""Cumulants inside clusters of keys: `cluster_attention`, its weights, streams, and the dial that chooses for you."""

import sys
import warnings

from ..closures import CLOSURES
from .attention import cluster_attention, cluster_scores, kmeans_assignment
from .cost import multiply_adds, softmax_multiply_adds
from .dial import Choice, Dial, choose
from .kmeans import KMeans
from .layout import Blocks
from .merging import MergedStream
from .streaming import ClusterStream
from .tree import Tree

__all__ = [
    "CLOSURES",
    "Blocks",
    "Choice",
    "ClusterStream",
    "Dial",
    "KMeans",
    "MergedStream",
    "Tree",
    "choose",
    "cluster_attention",
    "cluster_scores",
    "kmeans_assignment",
    "multiply_adds",
    "softmax_multiply_adds",
]


def __getattr__(name: str) -> object:
    if name not in ("ModelDial", "choose_layers"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    said = f"cumulant.cluster.{name} has moved: import it from cumulant.conversion"
    warnings.warn(said, DeprecationWarning, stacklevel=2)
    return getattr(sys.modules["cumulant.conversion"], name)  # it is above this room, which imports nothing of it
