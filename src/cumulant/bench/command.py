"""`cumulant bench speed`, `error` and `efficiency`: what a user may choose, and what happens then. No heavy import."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar, Literal, Protocol

from ..command import check_least, show


class Measure(Protocol):
    """What is measured, by the word behind `cumulant bench`, and where the result goes."""

    what: ClassVar[str]
    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def out(self) -> Path: ...
    @property
    def json(self) -> bool: ...


@dataclass(frozen=True)
class Speed:
    """Time cumulant attention against softmax kernels, plain torch and torch.compile; refuse if results are off.

    Example: cumulant bench speed

    Example: cumulant bench speed --lengths 1024 4096 --causal --out runs/speed
    """

    what: ClassVar[str] = "speed"
    lengths: tuple[int, ...] = (256, 1024, 4096, 16384)
    """Sequence lengths."""
    numbers: int = 0
    """Numbers in each tensor; the batch is chosen to reach it. 0: 100 million on a GPU, one sequence elsewhere."""
    heads: int = 12
    dim: int = 64
    """Width of a head."""
    causal: bool = False
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """auto: bfloat16 on a GPU, float32 elsewhere."""
    longest_softmax: int = 16384
    """Do not run quadratic attentions beyond this length."""
    out: Path = Path("runs/speed")
    """Folder for speed.json and speed.svg."""
    json: bool = False
    """Print JSON instead of the table."""

    def __post_init__(self) -> None:
        if not self.lengths:
            raise ValueError("lengths must hold at least one number of tokens, got none")
        check_least(self, numbers=0, heads=1, dim=1)

    def run(self) -> int:
        from . import speed

        result = speed.run(self, progress=lambda text: print(text, file=sys.stderr if self.json else sys.stdout))
        show(result, f"wrote {self.out}/speed.json and speed.svg", self.json)
        return 0


@dataclass(frozen=True)
class Error:
    """Print how far each order is from softmax on random tokens, by the size of the logits.

    With --attention or --checkpoint: error beside cost for all mechanisms, with a plot, JSON and a page in --out.

    Example: cumulant bench error --sizes 0.1 0.5 1 2

    Example: cumulant bench error --attention all --checkpoint runs/digits-softmax-0
    """

    what: ClassVar[str] = "error"
    sizes: tuple[float, ...] = (0.05, 0.1, 0.2, 0.5, 1.0, 2.0, 3.0)
    """Standard deviations of the scaled q.k over the keys."""
    length: int = 256
    """Tokens."""
    dim: int = 16
    """Width of a head."""
    attention: tuple[str, ...] = ()
    """Mechanisms by name, with options as in cumulant3+full; all: every one."""
    checkpoint: Path | None = None
    """Also measure on the q, k, v of this model: a file that `cumulant train` wrote, or the folder of a run."""
    data: str | None = None
    """Inputs for that model; by default the test part of the data it was trained on."""
    images: int = 32
    """How many of them."""
    causal: bool = False
    """Random tokens see only the past; needs --attention."""
    out: Path = Path("runs/bench")
    """Folder for error.json, the plot and report.html; the quick form writes nothing."""
    json: bool = False
    """Print JSON instead of the table."""

    def __post_init__(self) -> None:
        if self.causal and self.quick:
            raise ValueError("--causal needs --attention: the quick form is about the orders of the expansion alone")
        if self.data is not None and self.checkpoint is None:
            raise ValueError(f"--data {self.data} needs --checkpoint: there is no model to show it to")

    @property
    def quick(self) -> bool:
        """Whether only the orders of the expansion are printed."""
        return not self.attention and self.checkpoint is None

    def run(self) -> int:
        from . import pareto, report

        if self.quick:
            return self.run_quick()
        report.prepare(self.out)
        return published(pareto.run(self, sys.stderr), self, pareto.table)

    def run_quick(self) -> int:
        from . import softmax_error

        errors = softmax_error(self.sizes, length=self.length, dim=self.dim)
        lines = ["relative error against softmax", f"{'logit size':20s}" + "".join(f"{x:>9g}" for x in self.sizes)]
        for name, curve in errors["relative_error"].items():
            lines.append(f"{name:20s}" + "".join(f"{error:9.1e}" for error in curve))
        show(errors, "\n".join(lines), self.json)
        return 0


@dataclass(frozen=True)
class Efficiency:
    """Time and peak memory of every mechanism against length, and from which length on it beats softmax.

    Opponents are the textbook softmax and the fused kernel. A result that is off is not timed.

    Example: cumulant bench efficiency

    Example: cumulant bench efficiency --attention linear cumulant3 --lengths 512 1024 2048 4096 --pattern causal
    """

    what: ClassVar[str] = "efficiency"
    attention: tuple[str, ...] = ("all",)
    """Mechanisms by name, with options as in agent+agents=16; all: every one that has the pattern."""
    lengths: tuple[int, ...] = ()
    """Numbers of tokens. By default 256 to 8192 on a GPU, 256 to 2048 elsewhere."""
    heads: int = 8
    dim: int = 64
    """Width of a head."""
    batch: int = 0
    """Sequences. 0: 4 on a GPU, 1 elsewhere."""
    pattern: Literal["noncausal", "causal", "cross"] = "noncausal"
    """cross: half as many keys as queries."""
    device: Literal["auto", "cpu", "cuda"] = "auto"
    """auto: cuda where there is one."""
    dtype: Literal["auto", "bfloat16", "float16", "float32"] = "auto"
    """auto: bfloat16 on a GPU, float32 elsewhere."""
    calls: int = 15
    """On a CPU: calls of each, at most; at least 3."""
    time_limit: float = 1.0
    """A mechanism that takes more seconds a call is not measured at longer lengths."""
    memory_limit: float = 4.0
    """The textbook softmax is not measured where its matrices need more GiB."""
    minutes: float | None = None
    """Start no further length after this many minutes."""
    out: Path = Path("runs/bench")
    """Folder for efficiency.json, the plot and report.html."""
    json: bool = False
    """Print JSON instead of the table."""

    def __post_init__(self) -> None:
        check_least(self, heads=1, dim=1, batch=0, calls=3, time_limit=0, memory_limit=0, minutes=0)

    def run(self) -> int:
        from . import cab, efficiency, report

        report.prepare(self.out)
        screen = sys.stderr if self.json else sys.stdout
        result = efficiency.run(self, lambda text: print(text, file=screen, flush=True), minutes=self.minutes)
        return published(result, self, cab.table)


def published(result: dict[str, Any], settings: Measure, table: Callable[[dict[str, Any]], str]) -> int:
    """Write result, plot and page into --out and show the table; the exit status."""
    from . import report

    result = report.publish(result, settings)
    place = f"wrote {settings.out}/{result['bench']}.json, .svg and .png; open {settings.out}/report.html"
    show(result, f"{table(result)}\n\n{place}", settings.json)
    return 1 if result.get("failed") else 3 if result.get("missing") else 0
