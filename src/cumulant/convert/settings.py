"""What a user may choose for `cumulant diagnose` and `cumulant convert`. No heavy import: help is shown from this."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro


@dataclass(frozen=True)
class Diagnose:
    """Measure where a trained model can do without softmax: logit spread and error of each order by layer and head.

    Prints the layers, the safest first, with a proposal; writes diagnosis.json and a heat map.

    Example: cumulant diagnose runs/digits-softmax-0 digits

    Example: cumulant diagnose path/to/sentence-encoder texts.txt --heads

    Example: cumulant diagnose timm:vit_small_patch16_224 path/to/imagenet-100 --budget 0.1
    """

    model: Annotated[str, tyro.conf.Positional]
    """A run of `cumulant train` or its weights, a folder of transformers, or timm:NAME."""
    data: Annotated[str | None, tyro.conf.Positional] = None
    """Data set or folder of images or videos; a .txt or .parquet file of texts. Without it, noise."""
    attention: tuple[str, ...] = ("cumulant2", "cumulant3")
    """Mechanisms whose effect on the output is measured."""
    budget: float = 0.05
    """Relative change of the output that the proposal may cause."""
    batches: int = 2
    batch_size: int = 16
    queries: int = 64
    """Queries sampled in each layer and batch."""
    heads: bool = False
    """Also measure the effect of replacing single heads."""
    device: str | None = None
    """cpu or cuda; by default cuda where there is one."""
    out: Path = Path("runs/diagnosis")
    """Folder for diagnosis.json and diagnosis.svg."""
    json: bool = False
    """Print JSON instead of the table."""


@dataclass(frozen=True)
class Convert:
    """Put attention of linear cost into a trained model and save it; `load(FOLDER)` of cumulant.convert loads it.

    Example: cumulant convert runs/digits-softmax-0 digits --layers auto --budget 0.1

    Example: cumulant convert path/to/sentence-encoder texts.txt --layers 3 4 5 --out encoder-hybrid
    """

    model: Annotated[str, tyro.conf.Positional]
    """A run of `cumulant train` or its weights, a folder of transformers, or timm:NAME."""
    data: Annotated[str | None, tyro.conf.Positional] = None
    """Data to measure the change on, as for `cumulant diagnose`; needed with --layers auto."""
    attention: str = "cumulant3"
    """Mechanism, by the name that `cumulant list` prints."""
    layers: tuple[str, ...] = ("all",)
    """all; auto, to choose by diagnosis; or numbers, or patterns of names, of layers."""
    budget: float | None = None
    """With --layers auto, the relative change of the output to accept (0.05)."""
    heads: bool = False
    """With --layers auto, also replace single heads."""
    batches: int = 4
    batch_size: int = 16
    device: str | None = None
    """cpu or cuda; by default cuda where there is one."""
    out: Path = Path("runs/converted")
    """Folder for the converted model and conversion.json."""
    json: bool = False
    """Print JSON instead of the report."""
