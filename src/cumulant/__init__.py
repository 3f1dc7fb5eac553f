"""Linear-time attention from the cumulant expansion of softmax."""

from typing import TYPE_CHECKING

from . import conversion as conversion  # it answers to its old name, cumulant.convert, too
from .arrival import register_on_arrival
from .lazy import lazy

__version__ = "0.2.0"

if TYPE_CHECKING:
    from . import nn as nn
    from . import zoo as zoo
    from .attention import attention as attention
    from .attention import attention_varlen as attention_varlen
    from .attention import scores as scores
    from .cluster import ClusterStream as ClusterStream
    from .cluster import cluster_attention as cluster_attention
    from .cluster import cluster_scores as cluster_scores
    from .conversion import convert as convert
    from .conversion import register_transformers as register_transformers
    from .models import create_model as create_model
    from .moments import Moments as Moments
    from .streaming import SlidingWindow as SlidingWindow
    from .streaming import Stream as Stream

lazy(__name__)
register_on_arrival()
