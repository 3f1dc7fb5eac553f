"""Seeing attention: maps of any layer, head and query, summaries of heads, and figures."""

from ..inspect.sites import Site, find_sites, model_info
from ..inspect.tokens import TokenLayout
from . import figures
from .capture import Captured, capture
from .flow import relevance, rollout, token_map
from .heads import block_off, head_means, head_off
from .importance import (
    PruningCurve,
    head_importance,
    jensen_shannon,
    partial_importance,
    pruning_curve,
    pruning_curves,
    rank_correlations,
    ranked,
)
from .metrics import (
    Profile,
    entropy,
    mean_distance,
    negative_mass,
    patch_distances,
    received,
    ring_profile,
    sink_rate,
    summary,
    tokens_used,
    uniform_distance,
)
from .patterns import Patterns, find_patterns, flat_maps
from .record import Recording, record

__all__ = [
    "Captured",
    "Patterns",
    "Profile",
    "PruningCurve",
    "Recording",
    "Site",
    "TokenLayout",
    "block_off",
    "capture",
    "entropy",
    "figures",
    "find_patterns",
    "find_sites",
    "flat_maps",
    "head_importance",
    "head_means",
    "head_off",
    "jensen_shannon",
    "mean_distance",
    "model_info",
    "negative_mass",
    "partial_importance",
    "patch_distances",
    "pruning_curve",
    "pruning_curves",
    "rank_correlations",
    "ranked",
    "received",
    "record",
    "relevance",
    "ring_profile",
    "rollout",
    "sink_rate",
    "summary",
    "token_map",
    "tokens_used",
    "uniform_distance",
]
