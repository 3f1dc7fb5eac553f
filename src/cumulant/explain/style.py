"""How the figures of this room look: colours that colour-blind people can tell apart, files in three formats."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from ..optional import needed

F = TypeVar("F", bound=Callable[..., Any])
FORMATS = ("png", "svg", "pdf")
DIVERGING = "RdBu_r"  # red above zero, blue below, white at zero: told apart with any common colour blindness
SEQUENTIAL = "cividis"
INK, SOFT, RULE = "#222222", "#6b6b6b", "#d9d9d9"
# Okabe and Ito's palette; mechanisms keep their colour in every figure.
COLOURS = {"softmax": "#222222", "linear": "#e69f00", "cumulant1": "#999999", "cumulant2": "#009e73"}
COLOURS |= {"cumulant3": "#0072b2"}
SPARE = ("#d55e00", "#cc79a7", "#56b4e9", "#b8a000")
RC = {
    "font.size": 9,
    "font.family": "DejaVu Sans",
    "axes.titlesize": 9,
    "axes.labelsize": 9,
    "axes.edgecolor": SOFT,
    "axes.labelcolor": INK,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "xtick.color": SOFT,
    "ytick.color": SOFT,
    "legend.frameon": False,
    "figure.dpi": 110,
    "svg.fonttype": "none",
    "pdf.fonttype": 42,
}


def pyplot() -> Any:
    """matplotlib's pyplot for files, without a screen."""
    with needed("the figures need matplotlib", "train"):
        import matplotlib
    matplotlib.use("Agg")
    from matplotlib import pyplot as module

    return module


def styled(function: F) -> F:
    """A function that draws in the style of this room; the caller's own settings are left alone.

    Where it fails, what it had begun is closed: pyplot would keep it.
    """

    @functools.wraps(function)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        plt = pyplot()
        open_before = set(plt.get_fignums())
        with plt.rc_context(RC):
            try:
                return function(*args, **kwargs)
            except BaseException:
                for number in set(plt.get_fignums()) - open_before:
                    plt.close(number)
                raise

    return drawn  # type: ignore[return-value]


def new_figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A figure and its axes (rows, columns), laid out so that nothing overlaps."""
    return pyplot().subplots(rows, columns, figsize=size, squeeze=False, layout="constrained", **options)


def save(figure: Any, path: str | Path, formats: tuple[str, ...] = FORMATS, dpi: int = 200) -> list[Path]:
    """Write the figure beside `path` in each format, close it, and return the files."""
    plt, path = pyplot(), Path(path)
    for name in formats:
        if name not in FORMATS:
            raise ValueError(f"formats must be among {', '.join(FORMATS)}, got {name!r}")
    path.parent.mkdir(parents=True, exist_ok=True)
    files = [path.with_suffix(f".{name}") for name in formats]
    with plt.rc_context(RC):
        for file in files:
            # Without a date the same figure gives the same bytes.
            stamp = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(file.suffix)
            figure.savefig(file, dpi=dpi, bbox_inches="tight", metadata=stamp)
    plt.close(figure)
    return files


def colour(name: str, number: int = 0) -> str:
    return COLOURS.get(name, SPARE[number % len(SPARE)])


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
