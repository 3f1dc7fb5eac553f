"""How everything looks: one colour and mark a mechanism, one pair of colours for signs, one way to write figures.

Files are drawn with matplotlib, pages with plotly; the explorer's static/colour.js repeats the palettes, and a test
holds the two together. No heavy import.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Callable, Iterable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any, TypeVar

from .optional import needed

F = TypeVar("F", bound=Callable[..., Any])

# Mid-tones that hold on white and on dark. The first five keep a distance of 20 in CIE Lab from each other also for
# people who lack one kind of cone; the others are told apart by their marks.
COLOURS = {
    "softmax": "#b5459b",
    "linear": "#d9920f",
    "cumulant2": "#1faa7a",
    "cumulant3": "#3c6fe0",
    "cumulant1": "#8a7f3c",
    "cosformer": "#c0558f",
    "flow": "#6b8e23",
    "focused_linear": "#a0522d",
    "rala": "#d4526e",
    "mala": "#c868c0",
    "agent": "#159fb0",
    "combiner": "#7a7a3a",
    "aaren": "#7f7f7f",
    "lla": "#c23b22",
    "hierarchical": "#4a6fa4",
    "cluster4": "#58ad8b",
    "cluster16": "#2f9e6e",
    "cluster64": "#127d5c",
}
ALIKE = {  # not mechanisms, but drawn beside them
    "control": "#8c8c8c",
    "softmax, matrix formed": "#cf7fbd",
    "order 1": COLOURS["cumulant1"],
    "order 2": COLOURS["cumulant2"],
    "order 3, diagonal": COLOURS["cumulant3"],
    "order 3, full": "#6a4fd0",
}
SPARE = ("#c0558f", "#6b8e23", "#a0522d", "#4a90a4", "#d4526e", "#7a7a3a", "#3f7f6f", "#9467bd", "#b08d2d", "#5b7fa6")
MARKS = {  # of matplotlib, and of plotly
    "o": "circle", "s": "square", "D": "diamond", "^": "triangle-up", "v": "triangle-down", "P": "cross", "X": "x",
    "<": "triangle-left", ">": "triangle-right", "p": "pentagon", "h": "hexagon", "*": "star", "d": "diamond-tall",
    "8": "octagon", "H": "hexagon2",
}  # fmt: skip
DASHES = {"linear": "dash", "cumulant2": "dashdot", "control": "dot"}  # of plotly; the others are solid

# Signed weights: red is added, blue subtracted, white is zero. ColorBrewer's RdBu, which colour-blind people can read.
DIVERGING = "RdBu_r"
NEGATIVE = ("#f7f7f7", "#d1e5f0", "#92c5de", "#4393c3", "#2166ac", "#053061")
POSITIVE = ("#f7f7f7", "#fddbc7", "#f4a582", "#d6604d", "#b2182b", "#67001f")
SEQUENTIAL = "cividis"
SHADES = ("#f7f7f7", "#dadaeb", "#9e9ac8", "#6a51a3", "#3f007d")  # without a sign, on a page

INK, SOFT, RULE = "#222222", "#6b6b6b", "#d9d9d9"  # of figures on paper
FIRST, LAST = "#d55e00", "#0072b2"  # two ends of an order
PAGE = {  # of pages, in light and in dark
    "paper": ("#ffffff", "#14171d"),
    "ink": ("#1d2330", "#e7e9ee"),
    "soft": ("#5b6475", "#a3abba"),
    "line": ("#e3e6ec", "#2c313b"),
    "card": ("#f6f7fa", "#1c2028"),
    "accent": ("#3c6fe0", "#6aa8f5"),
    "good": ("#1b8a5a", "#54c492"),
    "open": ("#a86a00", "#e0a94a"),
    "bad": ("#b83232", "#ee7a7a"),
}
FORMATS = ("png", "svg", "pdf")
RC: Any = {
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
    "svg.hashsalt": "cumulant",
    "pdf.fonttype": 42,
}


def family(label: str) -> str:
    """The mechanism of a label: agent of agent+agents=16."""
    return re.split("[+:,]", label)[0]


def colour(label: str, number: int = 0) -> str:
    """Of a mechanism or a setting of it; what is neither gets the spare one of its number."""
    return ALIKE.get(label) or COLOURS.get(family(label), SPARE[number % len(SPARE)])


def palette(names: Iterable[str]) -> dict[str, str]:
    """A colour for each configuration of a comparison: settings of a mechanism get spare ones, to be told from it."""
    known = COLOURS | ALIKE
    others = [name for name in names if name not in known]
    return known | {name: SPARE[i % len(SPARE)] for i, name in enumerate(others)}


def mark(label: str) -> str:
    """matplotlib's mark of a mechanism; `MARKS` has plotly's name of it."""
    names = list(COLOURS)
    return list(MARKS)[names.index(family(label)) % len(MARKS)] if family(label) in names else "o"


def dashed(label: str) -> bool:
    """A setting of a mechanism is drawn dashed beside its default form."""
    return label != family(label)


def transparent(hexadecimal: str, alpha: float) -> str:
    red, green, blue = (int(hexadecimal[i : i + 2], 16) for i in (1, 3, 5))
    return f"rgba({red},{green},{blue},{alpha})"


# Files.


def styled(function: F) -> F:
    """A function that draws in this style; the caller's own settings, backend and open figures are left alone."""

    @functools.wraps(function)
    def drawn(*args: Any, **kwargs: Any) -> Any:
        with needed("the figures need matplotlib", "train"):
            import matplotlib
        with matplotlib.rc_context(RC):
            return function(*args, **kwargs)

    return drawn  # type: ignore[return-value]


@styled
def new_figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> tuple[Any, Any]:
    """A figure and its axes (rows, columns), laid out so that nothing overlaps; pyplot does not know of it."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=size, layout="constrained")
    return figure, figure.subplots(rows, columns, squeeze=False, **options)


@styled
def save(figure: Any, path: str | Path, formats: tuple[str, ...] = FORMATS, dpi: int = 200) -> list[Path]:
    """Write the figure beside `path` in each format, and return the files.

    Without dates and random names, so that the same figure gives the same bytes.
    """
    for name in formats:
        if name not in FORMATS:
            raise ValueError(f"formats must be among {', '.join(FORMATS)}, got {name!r}")
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    files = [Path(path).with_suffix(f".{name}") for name in formats]
    for file in files:
        stamp = {".svg": {"Date": None}, ".pdf": {"CreationDate": None}}.get(file.suffix)
        figure.savefig(file, dpi=dpi, bbox_inches="tight", metadata=stamp)
    return files


# Pages.


def layout(x: str, y: str, *, height: int = 340, **more: Any) -> dict[str, Any]:
    """What all plotly figures share: small margins, the legend above, hover for one x at a time.

    Colours of text and grid are left to the page, which sets them for light or dark when it draws.
    """
    base: dict[str, Any] = {
        "height": height,
        "margin": {"l": 58, "r": 14, "t": 10, "b": 46},
        "legend": {"orientation": "h", "x": 0, "y": 1.02, "yanchor": "bottom"},
        "hovermode": "x unified",
        "xaxis": {"title": {"text": x}, "zeroline": False},
        "yaxis": {"title": {"text": y, "standoff": 8}, "zeroline": False, "automargin": True},
    }
    for axis in ("xaxis", "yaxis"):
        base[axis].update(more.pop(axis, {}))
    return {**base, **more}


def logarithmic(**more: Any) -> dict[str, Any]:
    return {"type": "log", "dtick": 1, "minor": {"ticks": "outside", "ticklen": 3}, **more}


def css() -> str:
    """The colours of pages as variables: --paper, --ink and so on, and --below and --above for signed maps."""
    light, dark = (" ".join(f"--{name}: {pair[i]};" for name, pair in PAGE.items()) for i in (0, 1))
    ends = f"--below: {NEGATIVE[-2]}; --zero: {NEGATIVE[0]}; --above: {POSITIVE[-2]};"
    return (
        f":root {{ color-scheme: light dark; {light} {ends} }}\n"
        f"@media (prefers-color-scheme: dark) {{ :root {{ {dark} }} }}"
    )


def check_packages(*modules: str) -> None:
    """Fail early, and say what to install, where a module of the report is missing."""
    names = [module.split(".")[0] for module in modules]
    with needed(f"the report needs {', '.join(names[:-1])} and {names[-1]}", "train"):
        for module in modules:
            import_module(module)


def page(
    package: str,
    filters: Mapping[str, Callable[..., Any]],
    template: str = "report.html.j2",
    plotly: bool = True,
    **values: Any,
) -> str:
    """A template of a package as one self-contained page: nothing is fetched, and `plotlyjs` is there to be inlined."""
    with needed("the report needs jinja2 and plotly", "train"):
        from jinja2 import Environment, PackageLoader, StrictUndefined

        if plotly:
            from plotly.offline import get_plotlyjs

            values["plotlyjs"] = get_plotlyjs()

    environment = Environment(
        loader=PackageLoader("cumulant", package),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters.update(filters)
    signs = {"below": NEGATIVE, "above": POSITIVE}
    return environment.get_template(template).render(css=css(), signs=signs, **values)
