"""Linear-time attention from the cumulant expansion of softmax."""

from . import nn, zoo
from .attention import attention, attention_varlen, scores
from .cluster import ClusterStream, cluster_attention, cluster_scores
from .conversion import convert, register_transformers
from .models import create_model
from .moments import Moments
from .streaming import SlidingWindow, Stream

__version__ = "0.1.0"

__all__ = [
    "ClusterStream",
    "Moments",
    "SlidingWindow",
    "Stream",
    "attention",
    "attention_varlen",
    "cluster_attention",
    "cluster_scores",
    "convert",
    "create_model",
    "nn",
    "register_transformers",
    "scores",
    "zoo",
]
