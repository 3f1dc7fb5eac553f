"""Figures of single maps: on the image, in all layers and heads, and of several mechanisms side by side.

Colours are those of weight times number of tokens: 1 is what a uniform map gives. Red is added, blue is subtracted, and
the scale is centred on zero, so that white means "not looked at".
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from ..inspect.tokens import TokenLayout
from ..style import DIVERGING, INK, NEGATIVE, SOFT, new_figure, styled
from .capture import Captured

BELOW = NEGATIVE[-2]
LEAST_END = 3.0  # the colour scale never ends before this many times the uniform weight: a uniform map stays pale
QUANTILE = 0.995  # of |weight|: the end of the colour scale, so that one patch does not wash out the others


def draw_map(
    axes: Any,
    row: Tensor,
    tokens: TokenLayout,
    *,
    image: Tensor | None = None,
    query: int | None = None,
    limit: float | None = None,
) -> Any:
    """One row of weights (L,) on `axes`, over the image where there is one; the query's patch gets a frame.

    Returns what a colour bar needs. Over an image, the opacity of a patch grows with the size of its weight.
    """
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import Normalize

    if row.shape != (tokens.count,):
        raise ValueError(f"row must have shape ({tokens.count},), one weight for each token, got {tuple(row.shape)}")
    values = tiled((row[tokens.prefix :].detach().float().cpu() * tokens.count).reshape(tokens.grid))
    limit = scale_end(values) if limit is None else limit
    colours = ScalarMappable(Normalize(-limit, limit), DIVERGING)
    extent = _extent(tokens)
    if image is None:
        axes.imshow(values.numpy(), cmap=DIVERGING, norm=colours.norm, interpolation="nearest", extent=extent)
    else:
        grey = picture(image).mean(-1, keepdims=True).repeat(3, -1) * 0.4 + 0.6  # faded, so that colours carry
        axes.imshow(grey, extent=extent, interpolation="nearest")
        paint = colours.to_rgba(values.numpy())
        paint[..., 3] = (values.abs() / limit).clamp(0, 1).sqrt().numpy() * 0.85
        axes.imshow(paint, extent=extent, interpolation="nearest")
    _finish(axes, tokens, query)
    return colours


@styled
def overlay(
    captured: Captured, image: Tensor, *, layer: int, head: int, query: int, item: int = 0, size: float = 3.2
) -> Any:
    """The image beside what one query takes from it, in one layer and head."""
    tokens = captured.tokens
    row = _rows(captured, layer, query, item)[head]
    wide = 1 if len(tokens.grid) == 2 else tokens.grid[0] * 0.5
    figure, axes = new_figure(1, 2, (size * (2 * wide + 0.3), size * 1.08))
    draw_image(axes[0, 0], image, tokens, query)
    colours = draw_map(axes[0, 1], row, tokens, image=image, query=query)
    axes[0, 1].set_title(f"layer {layer + 1}, head {head + 1}{_minus(row)}", color=INK)
    bar(figure, colours, axes)
    return figure


@styled
def layer_grid(
    captured: Captured, *, query: int, item: int = 0, image: Tensor | None = None, shared_scale: bool = False
) -> Any:
    """The maps of one query in all captured layers and heads, each with its negative mass.

    Each layer has a colour scale of its own, as deeper layers are often sharper; `shared_scale` takes one for all.
    """
    tokens, layers = captured.tokens, captured.layers
    rows = [_rows(captured, layer, query, item) for layer in layers]
    heads = max(len(row) for row in rows)
    negative = any(float(row.min()) < 0 for row in rows)
    lying = len(layers) > 2 * heads  # a deep model with few heads lies on its side: a column for each layer
    down, across = (heads, len(layers)) if lying else (len(layers), heads)
    height, width = tiled(torch.zeros(tokens.grid)).shape
    tile = 1.15 if len(tokens.grid) == 2 else 2.6
    step = tile * height / width + (0.22 if negative else 0.06)
    figure, axes = new_figure(down, across, (tile * across + 0.9, step * down + (1.0 if lying else 0.5)))
    places = axes.T if lying else axes
    common = max(_end(row, tokens) for row in rows) if shared_scale else None
    for i, (layer, row) in enumerate(zip(layers, rows, strict=True)):
        limit = common or _end(row, tokens)
        for h, place in enumerate(places[i]):
            if h >= len(row):
                place.axis("off")
                continue
            colours = draw_map(place, row[h], tokens, image=image, query=query, limit=limit)
            if i == 0:
                _label(place, f"head {h + 1}", left=lying)
            mass = float(row[h].clamp(max=0).sum())
            if mass < -0.005:
                place.set_xlabel(f"−{-mass:.2f}", color=BELOW, fontsize=7, labelpad=2)
        _label(places[i, 0], f"layer {layer + 1}", left=not lying)
        if common is None:
            bar(figure, colours, places[i], location="bottom" if lying else "right", label="")
    if common is not None:
        bar(figure, colours, axes)
    foot = "; below a map: its negative mass" if negative else ""
    figure.suptitle(f"{token_name(query, tokens)}: weight × tokens (1 = uniform){foot}", fontsize=9, color=SOFT)
    return figure


@styled
def compare_mechanisms(
    rows: Mapping[str, Tensor], tokens: TokenLayout, *, image: Tensor, query: int, shared_scale: bool = False
) -> Any:
    """The paper's Figure 1: an image with one query, and what that query takes under each mechanism.

    rows: name -> weights (L,), e.g. the mean over heads of a layer.
    """
    size = 2.1 if len(tokens.grid) == 2 else 4.2
    figure, axes = new_figure(1, len(rows) + 1, (size * (len(rows) + 1), size * 1.3))
    draw_image(axes[0, 0], image, tokens, query)
    limit = max(_end(row, tokens) for row in rows.values()) if shared_scale else None
    for place, (name, row) in zip(axes[0, 1:], rows.items(), strict=True):
        colours = draw_map(place, row, tokens, image=image, query=query, limit=limit)
        place.set_title(f"{name}{_minus(row)}", color=INK)
        if limit is None:
            bar(figure, colours, place, location="bottom", label="")
    if limit is None:  # a bar that is not seen keeps the image level with the maps
        bar(figure, colours, axes[0, 0], location="bottom", label="").ax.set_visible(False)
        figure.supxlabel("weight × tokens (1 = uniform)", fontsize=8, color=SOFT)
    else:
        bar(figure, colours, axes)
    return figure


@styled
def signed_parts(row: Tensor, tokens: TokenLayout, *, image: Tensor, query: int, name: str = "") -> Any:
    """How to read a signed map: the image, the positive part, the negative part, and both."""
    figure, axes = new_figure(1, 4, (8.6, 2.5))
    draw_image(axes[0, 0], image, tokens, query)
    limit = _end(row, tokens)
    parts = {
        f"added: {float(row.clamp(min=0).sum()):.2f}": row.clamp(min=0),
        f"subtracted: {float(row.clamp(max=0).sum().abs()):.2f}": row.clamp(max=0),
        f"both: {float(row.sum()):.2f}": row,
    }
    for place, (title, part) in zip(axes[0, 1:], parts.items(), strict=True):
        colours = draw_map(place, part, tokens, image=image, query=query, limit=limit)
        place.set_title(title, color=INK)
    bar(figure, colours, axes)
    if name:
        figure.suptitle(name, fontsize=9, color=SOFT)
    return figure


def draw_image(axes: Any, image: Tensor, tokens: TokenLayout, query: int) -> None:
    """The image itself, with a frame around the query's patch, under the name of the query."""
    axes.imshow(picture(image), extent=_extent(tokens), interpolation="nearest")
    _finish(axes, tokens, query)
    axes.set_title(token_name(query, tokens), color=INK)


def _rows(captured: Captured, layer: int, query: int, item: int) -> Tensor:
    """Weights (H, L) of a captured query."""
    if query not in captured.queries:
        raise ValueError(f"query must be one that was captured, {captured.queries[:8]}..., got {query}")
    return captured.maps(layer)[item, :, captured.queries.index(query)]


def scale_end(values: Tensor) -> float:
    """End of a colour scale for these weights: nearly their largest size, and at least LEAST_END."""
    return max(LEAST_END, float(torch.quantile(values.detach().float().abs().flatten()[:1_000_000], QUANTILE)))


def _end(row: Tensor, tokens: TokenLayout) -> float:
    """The end for rows (..., L) of maps, by their patches."""
    return scale_end(row[..., tokens.prefix :] * tokens.count)


def token_name(query: int, tokens: TokenLayout) -> str:
    if query < tokens.prefix:
        return "class token" if query == 0 else f"prefix token {query}"
    rows, columns = tokens.grid[-2:]
    frame, place = divmod(query - tokens.prefix, rows * columns)
    where = f"query: row {place // columns + 1}, column {place % columns + 1}"
    return where if len(tokens.grid) == 2 else f"{where}, frame {frame + 1}"


def bar(figure: Any, colours: Any, axes: Any, *, location: str = "right", label: str = "weight × tokens") -> Any:
    """A quiet colour bar with three marks: both ends and zero."""
    end = colours.norm.vmax
    found = figure.colorbar(colours, ax=axes, location=location, shrink=0.72, aspect=22, pad=0.02, ticks=[-end, 0, end])
    marks = [f"−{end:.3g}", "0", f"{end:.3g}"]
    (found.ax.set_yticklabels if location == "right" else found.ax.set_xticklabels)(marks, fontsize=7)
    found.outline.set_visible(False)
    found.ax.tick_params(length=2, colors=SOFT)
    if label:
        found.set_label(label, fontsize=8, color=SOFT)
    return found


def _label(axes: Any, text: str, left: bool) -> None:
    (axes.set_ylabel if left else axes.set_title)(text, color=INK)


def _minus(row: Tensor) -> str:
    mass = -float(row.clamp(max=0).sum())
    return f"  (−{mass:.2f})" if mass > 0.005 else ""


def _extent(tokens: TokenLayout) -> tuple[float, float, float, float]:
    rows, columns = tiled(torch.zeros(tokens.grid)).shape
    return (-0.5, columns - 0.5, rows - 0.5, -0.5)


def _finish(axes: Any, tokens: TokenLayout, query: int | None) -> None:
    """A thin edge without marks, and a frame around the query's patch."""
    from matplotlib.patches import Rectangle

    if query is not None and query >= tokens.prefix:
        rows, columns = tokens.grid[-2:]
        frame, place = divmod(query - tokens.prefix, rows * columns)
        corner = (frame * columns + place % columns - 0.5, place // columns - 0.5)
        for width, ink in ((2.6, "white"), (1.3, "black")):  # seen on dark and on light
            axes.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=ink, linewidth=width))
    extent = _extent(tokens)
    axes.set(xticks=[], yticks=[], xlim=extent[:2], ylim=extent[2:])
    axes.spines[:].set(visible=True, color=SOFT, linewidth=0.6)


def picture(image: Tensor) -> Any:
    """Pixels (channels, H, W), or a clip (channels, T, H, W) as its frames side by side, as (H, W, 3) from 0 to 1."""
    pixels = image.detach().float().cpu()
    if pixels.ndim == 4:
        pixels = torch.cat(list(pixels.unbind(1)), -1)
    if pixels.ndim != 3 or pixels.shape[0] not in (1, 3):
        raise ValueError(f"image must be (1 or 3, height, width) or (1 or 3, frames, height, width), got {image.shape}")
    low, high = pixels.min(), pixels.max()
    pixels = (pixels - low) / (high - low).clamp(min=1e-12)
    return pixels.expand(3, -1, -1).permute(1, 2, 0).numpy()


def tiled(values: Tensor) -> Tensor:
    """A map (rows, cols), or (frames, rows, cols) as its frames side by side."""
    return torch.cat(list(values.unbind(0)), -1) if values.ndim == 3 else values
