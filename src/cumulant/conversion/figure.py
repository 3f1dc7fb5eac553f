"""The heat map of a diagnosis."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ..style import SEQUENTIAL, new_figure, save, styled

if TYPE_CHECKING:
    from .diagnosis import Diagnosis


@styled
def heat_map(found: Diagnosis, path: Path) -> Path:
    """Layers (rows, first at the top) by heads: logit spread, and the error of orders 2 and 3 against softmax.

    White: no such form, as around the mean query where a layer is causal.
    """
    heads = max(layer.heads for layer in found.layers)
    rows = len(found.layers)
    panels = {
        "spread of the logits": [layer.spread for layer in found.layers],
        "error of order 2": [layer.error[2] for layer in found.layers],
        "error of order 3": [layer.error[3] for layer in found.layers],
    }
    if any(layer.mean_error for layer in found.layers):
        panels["order 3, around the mean query"] = [layer.mean_error.get(3, []) for layer in found.layers]
    labels = [layer.name if len(layer.name) <= 32 else "..." + layer.name[-29:] for layer in found.layers]
    size = 3.2 + len(panels) * 0.32 * max(4, heads), 1.6 + 0.28 * rows
    figure, every = new_figure(1, len(panels), size)
    for place, (axes, (title, values)) in enumerate(zip(every[0], panels.items(), strict=True)):
        grid = np.full((rows, heads), np.nan)
        for row, line in enumerate(values):
            grid[row, : len(line)] = line
        top = 1.0 if place else 4.0  # beyond these, no order is near softmax
        image = axes.imshow(grid, aspect="auto", cmap=SEQUENTIAL, vmin=0.0, vmax=top)
        axes.set_title(title, fontsize=9)
        axes.set_xlabel("head", fontsize=8)
        axes.set_yticks(range(rows), labels if place == 0 else [""] * rows, fontsize=7)
        axes.tick_params(axis="x", labelsize=7)
        figure.colorbar(image, ax=axes, shrink=0.8, extend="max")
    figure.suptitle(found.model, fontsize=10)
    return save(figure, path, (path.suffix[1:],))[0]
