"""All figures of this room in one place; each function returns a matplotlib figure, `save` writes it."""

from ..style import save
from .head_figures import (
    correlation_figure,
    distance_by_layer,
    distance_profiles,
    importance_map,
    pattern_figure,
    pruning_figure,
)
from .map_figures import compare_mechanisms, draw_map, layer_grid, overlay, signed_parts

__all__ = [
    "compare_mechanisms",
    "correlation_figure",
    "distance_by_layer",
    "distance_profiles",
    "draw_map",
    "importance_map",
    "layer_grid",
    "overlay",
    "pattern_figure",
    "pruning_figure",
    "save",
    "signed_parts",
]
