"""All runs of the benchmark: planned, made side by side, kept under what they depend on, and put into one table."""

from __future__ import annotations

import functools
import hashlib
import json
import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import IO, Any

import torch
from safetensors.torch import load_file, save_file

from cumulant.bench.provenance import provenance
from cumulant.grammar import suggest
from cumulant.studies.cab import data, synthetic
from cumulant.studies.cab.backbones import PATTERNS, Uses, fitted, support
from cumulant.studies.cab.leaderboard import judged
from cumulant.studies.cab.tasks import Data, Task, tasks_of
from cumulant.studies.command import Cab
from cumulant.studies.crews import device_failed
from cumulant.studies.loop import Schedule, drawn, fit, half
from cumulant.studies.mechanisms import chosen
from cumulant.studies.outcome import origins
from cumulant.studies.plan import CONTROL_SEED, Budget, Run, seeded
from cumulant.studies.records import device_name
from cumulant.studies.runs import Record, TimeOverError, Workshop, complete
from cumulant.tensors import threads
from cumulant.train.files import read_json, write_atomically
from cumulant.train.processes import chosen_device
from cumulant.train.progress import bar_of
from cumulant.train.stepping import PLAIN_CALLS, quick_float32

BASELINE = "softmax"
LOOK = PLAIN_CALLS + 4, PLAIN_CALLS + 8  # steps between which the speed of a run is taken


@dataclass(frozen=True)
class Column:
    """One task in which one use of attention is replaced."""

    task: str
    pattern: str

    @property
    def name(self) -> str:
        return f"{self.pattern} {self.task}"


@dataclass(frozen=True)
class Training(Run):
    """One backbone from one seed. Columns share runs in which every use is softmax."""

    task: Task = field(compare=False, hash=False, repr=False)
    uses: Mapping[str, str] = field(compare=False, hash=False)
    schedule: Schedule = field(compare=False, hash=False)
    tensors: Path = field(compare=False, hash=False)
    about: Mapping[str, Any] = field(compare=False, hash=False)  # size, and content of its data


@dataclass(frozen=True)
class Shop(Workshop):
    """Trains one backbone a run; on a GPU too several stand side by side, since each leaves most of it idle."""

    limit: float | None = None

    @property
    def side_by_side(self) -> bool:
        return True

    def make(self, run: Training, shared: Any = None, progress: IO[str] | None = None) -> Record:
        head = self.head(run)
        try:
            with threads(1):
                tensors = _loaded(str(run.tensors), self.device)
                made = trained(run.task, tensors, run.uses, run.seed, run.schedule, self.device, self.limit)
            return {**head, **made}
        except NotReachedError as error:
            return {**head, "failed": str(error)}
        except (
            RuntimeError,
            ValueError,
            TypeError,
            NotImplementedError,
        ) as error:  # of one mechanism, not of the others
            if device_failed(error):  # of this process from now on
                raise
            return {**head, "failed": f"{type(error).__name__}: {str(error).strip().splitlines()[0][:160]}"}

    def finished(self, run: Training) -> Record | None:
        """One that came to nothing is tried again."""
        record = super().finished(run) or {"failed": "none"}
        return None if "failed" in record else record

    def given_up(self, run: Training, why: str) -> Record | None:
        record = {**self.head(run), "failed": why}
        write_atomically(self.record(run), json.dumps(record).encode())
        return record

    def head(self, run: Training) -> Record:
        """What every record says."""
        return {"configuration": run.configuration, "seed": run.seed, "task": run.task.name, **run.about, **self.made}


class NotReachedError(RuntimeError):
    """A run that came to no figure, with the reason."""


def trained(
    task: Task, data: Data, uses: Uses, seed: int, schedule: Schedule, device: str, limit: float | None = None
) -> dict[str, Any]:
    """Metrics on the test part, seconds, parameters. On a GPU in bfloat16, the step as one CUDA graph where it can be.

    `NotReachedError` where it would take more than `limit` seconds, or where the loss is not finite.
    """
    where, start = torch.device(device), time.perf_counter()
    size, ratio = fitted(task.build, task.size, uses)
    torch.manual_seed(seed)
    model = task.build(size, uses).to(where)
    places = drawn(task.items(data), schedule.epochs, task.batch, seed, where)
    looked: list[float] = []

    def watch(number: int) -> None:
        """Stops a run that would take too long, as soon as its speed is known."""
        if number not in LOOK:
            return
        if where.type == "cuda":
            torch.cuda.synchronize()
        looked.append(time.perf_counter())
        whole = (looked[-1] - looked[0]) / (LOOK[1] - LOOK[0]) * schedule.epochs
        if limit is not None and whole > limit:
            raise NotReachedError(f"{schedule.epochs} steps would take {whole:,.0f} s, the limit is {limit:g} s")

    loss, graph = fit(model, lambda at: task.loss(model, data, at), places, schedule, watch)
    if not math.isfinite(loss):
        raise NotReachedError("the loss is not finite")
    model.eval()
    seconds = time.perf_counter() - start
    with torch.no_grad(), quick_float32(where, "bf16"), half(where):
        metrics = task.score(model, data)
    if not all(map(math.isfinite, metrics.values())):
        raise NotReachedError("a figure of the test part is not finite")
    return {
        "metrics": metrics, "loss": loss, "seconds": round(seconds, 2), "hidden": size.hidden,
        "parameters": sum(one.numel() for one in model.parameters()), "ratio": round(ratio, 4),
        "graph": graph,
    }  # fmt: skip


@functools.lru_cache(1)
def _loaded(path: str, device: str) -> dict[str, torch.Tensor]:
    return load_file(path, device=device)


def chosen_tasks(names: Sequence[str], size: str) -> dict[str, Task]:
    """Those named, or all."""
    known = tasks_of(size)
    for name in names:
        if name not in known and name != "all":
            raise ValueError(f"unknown task {name!r} of CAB; {suggest(name, known)}")
    return known if "all" in names else {name: known[name] for name in dict.fromkeys(names)}


def chosen_uses(names: Sequence[str]) -> Sequence[str]:
    """Those named, or all."""
    for name in names:
        if name not in PATTERNS and name != "all":
            raise ValueError(f"unknown use {name!r} of attention; {suggest(name, PATTERNS)}")
    return PATTERNS if "all" in names else names


def prepared_path(task: Task, folder: Path | None, out: Path) -> Path:
    """Where a task's tensors lie: named after what they are made of."""
    about = json.dumps([task.told(), None if folder is None else _stamp(folder / task.data)], sort_keys=True)
    return out / "data" / f"{task.name}-{hashlib.sha256(about.encode()).hexdigest()[:8]}.safetensors"


def prepared(task: Task, folder: Path | None, out: Path) -> tuple[Path, str]:
    """The file with a task's tensors, made unless it is there, and the digest of its content."""
    path = prepared_path(task, folder, out)
    if not path.is_file():
        tensors = synthetic.made(task) if folder is None else data.read(task, folder)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, part)
        part.replace(path)
    return path, data.digest(load_file(path))


def _stamp(place: Path) -> list[Any]:
    """Names, sizes and times of the files of a data set: whether they have to be read again."""
    files = sorted(file for file in place.glob("*") if file.is_file())
    return [[file.name, file.stat().st_size, file.stat().st_mtime_ns] for file in files]


@dataclass(frozen=True)
class Ground:
    """What runs stand on: the size of tasks, the device, and of every task the file of its tensors and its digest."""

    size: str
    device: torch.device
    tensors: Mapping[str, tuple[Path, str]]
    generated: bool

    @property
    def precision(self) -> str:
        return "bf16" if self.device.type == "cuda" else "float32"


def laid(settings: Cab, device: torch.device) -> Ground:
    """As the settings ask for it; tensors are read, or made, where they are not there yet."""
    size = settings.size if settings.size != "auto" else "full" if device.type == "cuda" else "small"
    tasks = chosen_tasks(settings.tasks, size)
    tensors = {name: prepared(task, settings.data, settings.out) for name, task in tasks.items()}
    return Ground(size, device, tensors, settings.data is None)


def told_by_records(settings: Cab) -> Ground:
    """As the records of --out tell: neither the data nor the device on which they were made has to be at hand. Of tasks
    whose records do not tell their content, that of --data counts."""
    folder = settings.out / "cab" / "records"
    records = [read_json(path) for path in sorted(folder.glob("*.json"))]
    records = [one for one in records if "content" in one]  # those that do not tell are known by their names alone
    if settings.size != "auto":
        records = [one for one in records if one.get("size") == settings.size]
    kinds = sorted({tuple(str(one.get(key)) for key in ("size", "device", "generated")) for one in records})
    contents = sorted({(one["task"], one["content"]) for one in records})
    if len(kinds) != 1 or len(dict(contents)) < len(contents):
        found = "; ".join(" ".join(kind) for kind in kinds) or "none"
        raise ValueError(
            f"--report-only takes records of one size, one device and one content of each task; in {folder} there are: "
            f"{found}; of {', '.join(f'{task} {content}' for task, content in contents) or 'no task'}"
        )
    ((size, device, generated),) = kinds
    tensors = {name: (Path(), content) for name, content in contents}
    if settings.data is not None:
        others = {name: task for name, task in chosen_tasks(settings.tasks, size).items() if name not in tensors}
        tensors |= {name: prepared(task, settings.data, settings.out) for name, task in others.items()}
    return Ground(size, torch.device(device), tensors, generated == "True")


def planned(
    columns: Mapping[Column, Sequence[str]], tasks: Mapping[str, Task], ground: Ground,
    schedule: Schedule, seeds: int, controls: int,
) -> dict[tuple[Column, str, int, str], Training]:  # fmt: skip
    """The run of every cell (column, mechanism, seed, role): seed by seed, the baseline's other seeds among
    them, so that a stopped benchmark has its A/A control."""
    cells: dict[tuple[Column, str, int, str], Training] = {}
    for column, mechanisms in columns.items():
        task, (path, content) = tasks[column.task], ground.tensors[column.task]
        about = {"size": ground.size, "content": content, "generated": ground.generated}
        own = replace(schedule, epochs=schedule.epochs * task.longer)
        for name, seed, role in seeded(mechanisms, BASELINE, seeds, controls):
            uses = {} if name == BASELINE else {column.pattern: name}
            deciding = [task.told(), asdict(own), uses, content, ground.precision]
            mark = hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()[:16]
            what = " ".join([task.name, *(f"{pattern} {one}" for pattern, one in (uses or {"all": name}).items())])
            run = Training(what, seed, role, mark, task=task, uses=uses, schedule=own, tensors=path, about=about)
            cells[column, name, seed, role] = run
    return dict(sorted(cells.items(), key=lambda cell: cell[0][2] % CONTROL_SEED))


def run(settings: Cab, progress: IO[str] | None = None) -> dict[str, Any]:
    """Train what is missing, then the leaderboard; `missing` of it names runs for which there was no time."""
    names = chosen(settings.attention)
    names = [BASELINE, *(name for name in names if name != BASELINE)]
    ground = told_by_records(settings) if settings.report_only else laid(settings, chosen_device(settings.device))
    tasks = {name: task for name, task in chosen_tasks(settings.tasks, ground.size).items() if name in ground.tensors}
    served, uses = {name: support(name) for name in names}, chosen_uses(settings.uses)
    columns = {
        Column(task.name, pattern): [name for name in names if not served[name][pattern]]
        for task in tasks.values() for pattern in task.uses if pattern in uses
    }  # fmt: skip
    if not columns:
        have = "; ".join(f"{task.name} has {' and '.join(task.uses)}" for task in tasks.values())
        raise ValueError(f"none of {', '.join(tasks)} has {' or '.join(uses)}: {have}")
    cells = planned(
        columns, tasks, ground, Schedule(settings.steps, settings.lr), settings.seeds, settings.control
    )  # fmt: skip
    made = {"provenance": provenance("cumulant bench cab"), "device": ground.device.type}
    if not settings.report_only:
        made["machine"] = device_name(str(ground.device))
    shop = Shop(settings.out / "cab", str(ground.device), made, settings.fresh, limit=settings.limit)
    records, left = finished(list(dict.fromkeys(cells.values())), shop, settings, progress)
    if not records:
        raise TimeOverError(settings.minutes)
    found = {cell: records[one] for cell, one in cells.items() if one in records}
    return {
        "bench": "cab", "device": ground.device.type, "missing": [str(one) for one in left],
        "origins": origins(list(records.values())),
        "setting": {
            **{key: getattr(settings, key) for key in ("steps", "lr", "seeds", "control")},
            "size": ground.size, "precision": ground.precision, "device": ground.device.type,
            "data": "generated" if ground.generated else "files",
            "digests": {name: ground.tensors[name][1] for name in tasks},
            "tasks": {name: {**task.told(), "steps": settings.steps * task.longer} for name, task in tasks.items()},
        },
        "support": served,
        **judged(tasks, {(at.pattern, at.task, name, seed, by): one for (at, name, seed, by), one in found.items()}),
    }  # fmt: skip


def finished(
    runs: Sequence[Training], shop: Shop, settings: Cab, progress: IO[str] | None
) -> tuple[dict[Training, Record], list[Training]]:
    """Records of these runs, those kept and those made now, and the runs for which there was no time; one that came to
    nothing is tried again."""
    own = {shop.record(one).name for one in runs}
    strange = [path for path in (shop.out / "records").glob("*.json") if path.name not in own]
    if strange and progress is not None:
        print(f"not used: {len(strange)} records of other settings, mechanisms or data", file=progress)
    done = [one for one in runs if not shop.fresh and shop.finished(one)]
    if done and progress is not None:
        print(f"{len(done)} of {len(runs)} runs are finished already (--fresh trains them again)", file=progress)
    if settings.report_only:
        found = {one: read_json(shop.record(one)) for one in runs if shop.record(one).is_file()}
    else:
        with bar_of("training", len(runs), "run", progress) as bar:

            def told(one: Training, record: Record | None) -> None:
                if record is not None:
                    bar.set_postfix_str(f"{one}: {record.get('failed') or _said(record)}", refresh=False)
                    bar.update()

            budget = Budget(settings.minutes)
            found = complete(runs, shop, told, workers=settings.workers, budget=budget)
    return found, [one for one in runs if one not in found]


def _said(record: Record) -> str:
    return ", ".join(f"{name} {value:.4g}" for name, value in record["metrics"].items())
