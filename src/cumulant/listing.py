"""`cumulant list`: the names that other commands and functions take. No heavy import: help is shown from this."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from importlib import resources
from textwrap import fill
from typing import Annotated, Any, Literal

import tyro

from .command import show

WIDTH = 100  # of a terminal that is not narrow
ABLE = ("causal", "cross", "key_mask", "grouped_queries", "weights", "subquadratic", "streaming", "ragged")
LEGEND = """
cost: order of the multiply-adds of one head for L tokens, key width D, value width E.
Found by running: causal: tokens see only the past · cross: queries and keys of different sequences
key mask: padding or weights · grouped queries: several query heads share a key head · weights: the
L x L map can be shown · subquadratic: no L x L work · streaming: constant memory while tokens
arrive · ragged: sequences of different lengths packed without padding"""

LAYER_LEGEND = """
Found by running: causal: tokens see only the past · cross: keys of another sequence · key mask:
padding · ragged: sequences end to end, forward_packed · streaming: token by token, stream() ·
equivariant: permuted tokens give permuted rows · losses: auxiliary losses that training adds
weights: scores(x) can be shown · any mechanism: runs over every name of `cumulant list`"""

MODELS_LEGEND = """
parameters: with 1000 classes. GMACs: thousand millions of multiply-adds for one input with softmax
attention, all matrix products counted. input: channels x (frames x) height x width, or tokens"""


@dataclass(frozen=True)
class List:
    """Print the names that can be used: mechanisms, layers, models or studies, with what each is and can do.

    Example: cumulant list

    Example: cumulant list models

    Example: cumulant list mechanisms --json
    """

    what: Annotated[
        Literal["mechanisms", "layers", "models", "studies"], tyro.conf.Positional, tyro.conf.arg(metavar="[WHAT]")
    ] = "mechanisms"
    """mechanisms, layers, models or studies."""
    json: bool = False
    """Print JSON instead of the table."""

    def run(self) -> int:
        rows, text = LISTS[self.what]()
        show(rows, text, self.json)
        return 0


def mechanisms() -> tuple[list[dict[str, Any]], str]:
    """The registry; what each can do is found by running it, not read from what it declares."""
    from tqdm import tqdm

    from . import zoo

    rows = []
    for name in tqdm(zoo.names(), desc="running each mechanism", leave=False, disable=None):
        mechanism, marks = zoo.get(name), zoo.capabilities(name)[name]
        told = {key: getattr(mechanism, key) for key in ("name", "summary", "paper", "year", "cost")}
        rows.append({**told, "patterns": list(mechanism.patterns), **marks, "options": list(mechanism.options)})
    width = max(len(row["name"]) for row in rows)
    lines = [f"{'name':{width}}  cost, what it is, and what it can do"]
    for row in rows:
        can = ", ".join(key.replace("_", " ") for key in ABLE if row[key]) or "none of the patterns below"
        lines.append(f"{row['name']:{width}}  {row['cost']}")
        lines += [under(width, f"{row['summary']} ({row['paper']}, {row['year']})"), under(width, can)]
    return rows, "\n".join([*lines, LEGEND])


def layers() -> tuple[list[dict[str, Any]], str]:
    """Attention layers by name; what each can do is found by running it."""
    from tqdm import tqdm

    from .nn import get_layer, layers, marks
    from .nn.registry import CLAIMS

    rows = []
    for name in tqdm(layers(), desc="running each layer", leave=False, disable=None):
        layer = get_layer(name)
        told = {key: getattr(layer, key) for key in ("name", "summary", "paper", "year", "cost")}
        rows.append({**told, **marks(name), "options": list(layer.options)})
    width = max(len(row["name"]) for row in rows)
    lines = [f"{'name':{width}}  what it is, what it can do, and its options"]
    for row in rows:
        can = ", ".join(key.replace("_", " ") for key in (*CLAIMS, "any_mechanism") if row[key]) or "none of these"
        head = under(width, f"{row['summary']} ({row['paper']}, {row['year']})")
        lines += [f"{row['name']:{width}}{head[width:]}", under(width, can)]
        if row["options"]:
            lines.append(under(width, "options: " + ", ".join(row["options"])))
    return rows, "\n".join([*lines, LAYER_LEGEND])


def models() -> tuple[list[dict[str, Any]], str]:
    """Every model with its parameters and multiply-adds, and the input that it takes.

    Ours were counted by tools/models_page.py, which takes half a minute; others are counted here.
    """
    from .models import names
    from .models.registry import input_shape

    known = json.loads(resources.files("cumulant.models").joinpath("counted.json").read_text())
    rows: list[dict[str, Any]] = []
    for name in names():
        count, macs = known[name] if name in known else counted(name)
        rows.append({"name": name, "parameters": count, "macs": macs, "input": list(input_shape(name))})
    width = max(len(row["name"]) for row in rows)
    lines = [f"{'name':{width}}  {'parameters':>11}  {'GMACs':>9}  input"]
    for row in rows:
        work = "depends" if row["macs"] is None else f"{row['macs'] / 1e9:,.3f}"
        size = " x ".join(map(str, row["input"])) or "any"
        lines.append(f"{row['name']:{width}}  {row['parameters']:11,}  {work:>9}  {size}")
    return rows, "\n".join([*lines, MODELS_LEGEND])


def counted(name: str) -> tuple[int, int | None]:
    """Parameters and multiply-adds of a model, without making it."""
    from .models import create_model
    from .models.registry import input_shape

    model, shape = create_model(name, device="meta"), input_shape(name)
    return sum(weight.numel() for weight in model.parameters()), multiply_adds(model, shape) if shape else None


def multiply_adds(model: Any, shape: tuple[int, ...]) -> int | None:
    """Of all matrix products and convolutions for one input of that shape, counted while a forward pass runs that
    computes no numbers: the model is on the meta device. None where they depend on what is in the input."""
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.utils.flop_counter import FlopCounterMode

    tokens = len(shape) == 1
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        try:
            model.eval()(torch.empty(1, *shape, device="meta", dtype=torch.int64 if tokens else torch.float32))
        except RuntimeError:  # it asks for the numbers, to leave tokens out, say
            return None
    return counter.get_total_flops() // 2


def studies() -> tuple[list[dict[str, Any]], str]:
    """What is claimed in each, and how long it takes."""
    from .studies import listed

    return listed()


LISTS: dict[str, Callable[[], tuple[list[dict[str, Any]], str]]] = {
    "mechanisms": mechanisms,
    "layers": layers,
    "models": models,
    "studies": studies,
}


def under(width: int, text: str) -> str:
    """Text below a name, beside a column of that width."""
    margin = " " * (width + 2)
    return fill(text, WIDTH, initial_indent=margin, subsequent_indent=margin)
