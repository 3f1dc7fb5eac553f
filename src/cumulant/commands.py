"""What a user may choose for each command. No heavy import: the command line shows its help from this."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import tyro


@dataclass(frozen=True)
class Speed:
    """Time cumulant attention against softmax kernels, plain torch and torch.compile; refuse if results are off.

    Example: cumulant bench speed

    Example: cumulant bench speed --lengths 1024 4096 --causal --out runs/speed
    """

    lengths: tuple[int, ...] = (256, 1024, 4096, 16384)
    """Sequence lengths."""
    numbers: int = 0
    """Numbers in each tensor; the batch is chosen to reach it. 0: 100 million on a GPU, one sequence elsewhere."""
    heads: int = 12
    dim: int = 64
    """Width of a head."""
    causal: bool = False
    device: str = "auto"
    """auto, cpu or cuda."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """auto: bfloat16 on a GPU, float32 elsewhere."""
    longest_softmax: int = 16384
    """Do not run quadratic attentions beyond this length."""
    out: Path = Path("runs/speed")
    """Folder for speed.json and speed.svg."""
    json: bool = False
    """Print JSON instead of the table."""


@dataclass(frozen=True)
class ListMechanisms:
    """Print the attention mechanisms that can be used by name, with what each costs and can do.

    Example: cumulant list

    Example: cumulant list --json
    """

    json: bool = False
    """Print JSON instead of the table."""


@dataclass(frozen=True)
class Error:
    """Print how far each order is from softmax on random tokens, by the size of the logits.

    Example: cumulant bench error --sizes 0.1 0.5 1 2
    """

    sizes: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0)
    """Standard deviations of the scaled q.k over the keys."""
    length: int = 256
    """Tokens."""
    dim: int = 16
    """Width of a head."""
    json: bool = False
    """Print JSON instead of the table."""


@dataclass(frozen=True)
class Bench:
    """Measure on this machine: speed against other attentions, or error against softmax.

    Example: cumulant bench speed --lengths 1024 4096
    """

    what: Annotated[Speed, tyro.conf.subcommand("speed")] | Annotated[Error, tyro.conf.subcommand("error")]
