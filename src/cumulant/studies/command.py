"""`cumulant reproduce`, `study` and `bench`: what a user may choose, and what happens then. No heavy import."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal

import tyro

from ..bench.command import Efficiency, Error, Speed
from ..command import check_choices, check_least, command_line, failed, show, stopped, time_over

# What decides the results; where they go, and how quickly they are made, does not.
DECISIVE = ("data", "recipe", "attention", "seeds", "control", "epochs", "change", "workers")


Place = Literal["here", "folder", "ray"]


@dataclass(frozen=True)
class Reproduce:
    """Compare attention mechanisms as the cumulant-attention paper does: on handwritten digits, or on your data.

    Trains the same model with each mechanism and several seeds, and ends with a table and one self-contained page,
    report.html. Without --data it is a demo of a few minutes: a small vision transformer on digits of 8 x 8 pixels,
    with the error against softmax and the cost on this machine. Finished runs are kept as small records, and a stopped
    one goes on where it was when the command is given again. Records made elsewhere join by being copied into the
    folder `records`.

    What stands behind a mechanism's name with + changes the model: v_conv, gate, qk_norm, temperature=order, full,
    normalization=sum, pool=gap, patch=4, variant=2 and further options of the mechanism, the model or the recipe.

    Example: cumulant reproduce

    Example: cumulant reproduce --attention softmax cumulant3 --seeds 3 --epochs 10 --out runs/quick

    Example: cumulant reproduce --data path/to/tiny-imagenet-100 --seeds 3 --minutes 25

    Example: cumulant reproduce --on folder --out /shared/digits

    Example: cumulant reproduce --data path/to/tiny-imagenet-100 --attention softmax cumulant3 cumulant3+v_conv
    """

    data: str = "digits"
    """Name of a data set (digits, tiny-imagenet-100, cifar10, ucf101-6) or a folder."""
    attention: tuple[str, ...] = ("softmax", "linear", "cumulant2", "cumulant3")
    """What to compare: mechanisms by the names that `cumulant list` prints, with extras: cumulant3+v_conv+pool=gap."""
    recipe: str | None = None
    """Name or TOML file of the recipe; by default the one named like the data."""
    seeds: int = 5
    """Training runs of each."""
    control: int | None = None
    """Runs of the control, softmax once more with other seeds; by default as many as seeds."""
    epochs: int | None = None
    """Passes over the training part in each run; by default as in the recipe (digits: 20)."""
    change: tuple[str, ...] = ()
    """Values of the recipe or the model to change in every run: batch_size=256 precision=fp32 compile=false."""
    out: Path | None = None
    """Folder for report.html, results.json, the records and the runs; by default runs/ and the name of the recipe."""
    workers: int = 2
    """Training runs at the same time on CPUs, one core each; on a GPU one after the other. Results do not depend on
    it."""
    on: Place = "here"
    """Where runs are made. folder: on every machine that gives the same command with the same --out, a folder that all
    of them see; each takes the next run that nobody has. ray: on the Ray cluster of $RAY_ADDRESS, or of this one."""
    device: str | None = None
    """cpu or cuda; by default cuda where there is one, except for the digits."""
    minutes: float | None = None
    """Start no run that would end later than this many minutes from now, judged by the runs so far, and stop one that
    does; exit status 3 says that runs are left for another time."""
    fresh: bool = False
    """Train every run again, finished ones too."""
    report_only: bool = False
    """Train nothing: write results.json and report.html from the records in the folder."""
    json: bool = False
    """Print the results as JSON instead of the table."""

    def __post_init__(self) -> None:
        check_least(self, seeds=1, epochs=1, workers=1, control=0)
        check_choices(self)
        if self.minutes is not None and not self.minutes > 0:
            raise ValueError(f"minutes must be positive, got {self.minutes}")
        if not self.attention:
            raise ValueError("attention must name at least one mechanism, got none")
        if len(set(self.attention)) < len(self.attention):
            raise ValueError(f"attention must name each mechanism once, got {' '.join(self.attention)}")

    @property
    def baseline(self) -> str:
        """What the control repeats."""
        return "softmax" if "softmax" in self.attention else self.attention[0]

    @property
    def controls(self) -> int:
        """Runs of the control."""
        return self.seeds if self.control is None else self.control

    @property
    def data_name(self) -> str:
        """The data without the place where it lies."""
        return Path(self.data).name

    @property
    def folder(self) -> Path:
        """Where everything is kept."""
        return self.out or Path("runs") / Path(self.recipe or self.data).stem

    def command(self) -> str:
        """The command line that gives these results. Where they go, and how quickly, does not belong to it."""
        return command_line("reproduce", self, {field.name for field in fields(self)} - {*DECISIVE})

    def run(self) -> int:
        from . import cumulant_vit as study
        from .report import terminal_summary
        from .runs import RunError, TimeOverError

        try:
            results = study.remake_report(self) if self.report_only else study.reproduce(self, progress=sys.stderr)
        except TimeOverError as error:
            return time_over(error)
        except RunError as error:
            return failed(error)
        except KeyboardInterrupt as stop:
            again = "the command without --fresh" if self.fresh else "the same command"
            kept = f"Finished runs are kept in {self.folder}; give {again} again to go on."
            return stopped(f". {stop}".rstrip() + f"\n{kept}")
        if self.json:
            show(results, "", True)
        else:
            page = f"open {self.folder / 'report.html'} in a browser to see the report"
            print(f"{terminal_summary(results)}\n\n{page}")
        return 3 if self.minutes is not None and results["missing"] else 0


@dataclass(frozen=True)
class TrainBench:
    """Train one model per mechanism under one recipe: accuracy beside parameters, FLOPs, throughput and memory.

    The baseline is trained again with other seeds: this A/A control shows what chance alone does. Finished runs are
    kept, so a stopped command goes on where it was when it is given again.

    Example: cumulant bench train

    Example: cumulant bench train --recipe tiny-imagenet-100 --data FOLDER --epochs 50
    """

    what: ClassVar[str] = "train"
    recipe: str = "digits"
    """Name of a built-in recipe, or path of a TOML file."""
    data: str | None = None
    """Name of a data set, or a folder; by default that of the recipe."""
    attention: tuple[str, ...] = ("all",)
    """Mechanisms by name, with options of their layers as in agent+conv=false; all: every one."""
    epochs: int = 0
    """Passes over the training part. 0: as in the recipe."""
    seeds: int = 1
    """Runs per mechanism."""
    control: int = 2
    """Further runs of the baseline, softmax unless it takes no part: the A/A control."""
    on: Place = "here"
    """Where runs are made: here, folder (shared by machines with the same --out) or ray; see cumulant reproduce."""
    device: str | None = None
    """cpu or cuda; by default cuda where there is one."""
    minutes: float | None = None
    """Start no run that would end later than this many minutes from now, and stop one that does."""
    out: Path = Path("runs/bench")
    """Folder for the runs (below RECIPE), train.json, the plot and report.html."""
    fresh: bool = False
    """Train every run again, finished ones too."""
    json: bool = False
    """Print JSON instead of the table."""

    def __post_init__(self) -> None:
        check_least(self, epochs=0, seeds=1, control=1, minutes=0)
        check_choices(self)

    def run(self) -> int:
        from . import mechanisms

        return answered(self, mechanisms.run, mechanisms.table)


def answered(settings: Any, run: Callable[..., Any], table: Callable[..., Any]) -> int:
    """Run what trains many models and publish its table; a stop, or time that is over, keeps what is finished.

    Where packages of figures and page are missing, what can make its report later, elsewhere, goes on without one."""
    from ..bench.command import published
    from ..bench.report import prepare, record
    from .runs import TimeOverError

    no_page = None
    try:
        prepare(settings.out)
    except ImportError as error:
        if not hasattr(settings, "report_only"):
            raise
        no_page = error
    try:
        result = run(settings, sys.stderr)
    except TimeOverError as error:
        return time_over(error)
    except KeyboardInterrupt as stop:
        kept = "Finished runs are kept: give the same command again to go on."
        return stopped(f". {stop}".rstrip() + f"\n{kept}")
    if no_page is not None:
        show(record(result, settings), f"{table(result)}\n\nno page: {no_page}; --report-only makes it", settings.json)
        return 3 if result["missing"] else 0
    return published(result, settings, table)


@dataclass(frozen=True)
class Cab:
    """Train small tasks in which attention is used in four ways: self and cross, causal and not (after CAB, ICML 2023).

    One use is replaced at a time, the others stay softmax; softmax again with other seeds is the A/A control.
    Mechanisms that lack a use are left out of its columns. Finished runs are kept, so a stopped command goes on.

    Example: cumulant bench cab --attention linear cumulant2 cumulant3 --tasks lm restore --seeds 1

    Example: cumulant bench cab --data FOLDER --workers 12

    Example: cumulant bench cab --report-only --out FOLDER
    """

    what: ClassVar[str] = "cab"
    data: Path | None = None
    """Folder with tiny-shakespeare, imdb, tiny-imagenet-100, legal-rhetorical-roles, ett-small; without: generated."""
    tasks: tuple[str, ...] = ("all",)
    """lm, mlm, sr, reviews, roles, lstf, restore; all: every one."""
    uses: tuple[str, ...] = ("all",)
    """Which use is replaced: NS, CS, NC, CC; all: each that a task has."""
    attention: tuple[str, ...] = ("all",)
    """Mechanisms by name, with options of their layers as in agent+conv=false; all: every one."""
    size: Literal["auto", "small", "full"] = "auto"
    """Lengths and widths. auto: full on a GPU, small elsewhere."""
    steps: int = 400
    """Steps of every run."""
    lr: float = 2e-3
    """The highest rate; a tenth of the steps leads up to it, a cosine down to 0."""
    seeds: int = 3
    """Runs of each mechanism in each column."""
    control: int = 3
    """Further runs of softmax with other seeds in each column: the A/A control."""
    limit: float | None = None
    """Leave out a run that would take more seconds than this, and say so."""
    workers: int = 1
    """Runs at the same time, on a GPU too."""
    device: str | None = None
    """cpu or cuda; by default cuda where there is one."""
    minutes: float | None = None
    """Start no run that would end later than this many minutes from now, and stop one that does."""
    out: Path = Path("runs/bench")
    """Folder for the runs (below cab), cab.json, the plot and report.html."""
    fresh: bool = False
    """Train every run again, finished ones too."""
    report_only: bool = False
    """Train nothing: the table of the records in OUT/cab/records, those made elsewhere and copied there too."""
    json: bool = False
    """Print JSON instead of the table."""

    def __post_init__(self) -> None:
        check_least(self, steps=1, seeds=1, control=0, workers=1, minutes=0, limit=0)
        if not self.lr > 0:
            raise ValueError(f"lr must be above 0, got {self.lr}")

    def run(self) -> int:
        from .cab import leaderboard, study

        return answered(self, study.run, leaderboard.table)


@dataclass(frozen=True)
class Study:
    """Try what papers say about attention, in minutes: each claim is confirmed, refuted or not told apart.

    `cumulant study list` says what each study claims and how long it takes. Finished runs are kept, so a stopped
    command goes on where it was when it is given again; changed settings begin new records.

    Example: cumulant study list

    Example: cumulant study random-features --attention softmax linear cumulant3

    Example: cumulant study heads --layers moh
    """

    name: Annotated[str, tyro.conf.Positional]
    """list, or the name of a study that it prints."""
    setting: str = "small"
    """small, for two cores; or paper, the setting of the study's page."""
    change: tuple[str, ...] = ()
    """Single values of the setting to change: seeds=5 steps=1000."""
    attention: tuple[str, ...] = ()
    """Mechanisms to compare, where the study compares several; by default as in the setting."""
    layers: tuple[str, ...] = ("all",)
    """Of the study heads only: layers by name; all: every one that has an ordering."""
    seeds: int | None = None
    """Runs of each configuration; by default as in the setting."""
    control: int | None = None
    """Further runs of the baseline with other seeds, the A/A control; by default as many as seeds."""
    epochs: int = 0
    """cumulant-vit and mechanisms: passes over the training part. 0: as in the recipe."""
    workers: int | None = None
    """Runs at the same time, on a CPU with one thread each; by default 2, for heads 1."""
    on: Place = "here"
    """Where runs are made: here, folder (shared by machines with the same --out) or ray; see cumulant reproduce."""
    device: str | None = None
    """cpu or cuda; by default cuda where there is one."""
    minutes: float | None = None
    """Start no run that would end later than this many minutes from now, and stop one that does."""
    out: Path = Path("runs/study")
    """Folder for the records, results.json, pages and figures, below NAME."""
    fresh: bool = False
    """Make every run again, finished ones too."""
    json: bool = False
    """Print JSON instead of the table."""

    def __post_init__(self) -> None:
        check_least(self, epochs=0, seeds=1, control=0, workers=1, minutes=0)
        check_choices(self)

    def command(self) -> str:
        """The command line that gives these results."""
        left_out = {"name", "workers", "on", "device", "minutes", "out", "fresh", "json"}
        return command_line(f"study {self.name}", self, left_out)

    def run(self) -> int:
        from . import get, listed, measuring

        if self.name == "list":
            show(*listed(), self.json)
            return 0
        if self.name in ("cumulant-vit", "mechanisms"):
            return self._other().run()
        module = get(self.name)
        study = getattr(module, "STUDY", None)
        try:
            result = module.run(self, sys.stderr) if study is None else measuring.run(study, self, sys.stderr)
        except KeyboardInterrupt as stop:
            return stopped(f". {stop}".rstrip() + "\nFinished runs are kept: give the same command again to go on.")
        show(result, (module if study is None else measuring).table(result), self.json)
        if not self.json and "page" in result:
            print(f"\nopen {result['page']} in a browser to see the figures")
        elif not self.json and "no page" in result:
            print(f"\nno page was written: {result['no page']}")
        return 3 if result["missing"] else 0

    def _other(self) -> Reproduce | TrainBench:
        """The command of a study that has one of its own."""
        shared: dict[str, Any] = {name: getattr(self, name) for name in ("device", "minutes", "fresh", "on")}
        shared |= {"json": self.json, "out": self.out / self.name}
        shared |= {name: getattr(self, name) for name in ("seeds", "control", "attention") if getattr(self, name)}
        if self.name == "mechanisms":
            return TrainBench(**shared, epochs=self.epochs)
        return Reproduce(**shared, epochs=self.epochs or None, workers=self.workers or 2, change=self.change)


@dataclass(frozen=True)
class Bench:
    """Measure on this machine: speed, error against softmax, cost by length, accuracy, four uses of attention.

    Example: cumulant bench speed --lengths 1024 4096
    """

    what: (
        Annotated[Speed, tyro.conf.subcommand("speed")]
        | Annotated[Error, tyro.conf.subcommand("error")]
        | Annotated[Efficiency, tyro.conf.subcommand("efficiency")]
        | Annotated[TrainBench, tyro.conf.subcommand("train")]
        | Annotated[Cab, tyro.conf.subcommand("cab")]
    )

    def run(self) -> int:
        try:
            return self.what.run()
        except RuntimeError as error:
            if "memory" not in str(error):
                raise
            return failed(RuntimeError(f"{str(error).splitlines()[0]} To take less: fewer tokens"))
