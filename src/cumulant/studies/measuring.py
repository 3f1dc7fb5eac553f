"""Studies that measure: a plan, what is measured for a configuration and a seed, and statements about the numbers.

Records, stopping and going on, the control, the verdict, the table, the page and the JSON are made here, from the
records alone. A study is one file with a `STUDY`; see docs/extending.md.
"""

from __future__ import annotations

import json
import math
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import IO, Any

from cumulant import zoo
from cumulant.bench.provenance import provenance
from cumulant.grammar import read_option, suggest
from cumulant.studies.command import Study as Options
from cumulant.studies.outcome import origins
from cumulant.studies.plan import CONTROL_SEED, Budget, Run, digest, seeded
from cumulant.studies.report import write_pages
from cumulant.studies.runs import Record, Workshop, complete
from cumulant.studies.statements import AGAIN, Measured, Statement, interval, judged, values
from cumulant.studies.training import device_of
from cumulant.style import save
from cumulant.tensors import threads
from cumulant.train.files import read_json, write_atomically
from cumulant.train.progress import bar_of

INDIFFERENT = ("attention", "seeds")  # fields of settings that do not decide what comes out of one run
Figures = Mapping[str, Any]
FUNCTIONS = ("plan", "measure", "statements", "tables", "figures")


@dataclass(frozen=True)
class Table:
    """Rows of a table by their names: texts, ready to be shown."""

    title: str
    head: Sequence[str]
    rows: list[list[str]]

    @classmethod
    def grid(cls, title: str, corner: str, rows: Any, columns: Any, cell: Callable[[Any, Any], str]) -> Table:
        """Of cell(row, column); rows and columns by what they are called, {shown: meant}, or as they are shown."""
        down, across = (x if isinstance(x, Mapping) else {str(one): one for one in x} for x in (rows, columns))
        cells = [[name, *(cell(row, column) for column in across.values())] for name, row in down.items()]
        return cls(title, [corner, *across], cells)


@dataclass(frozen=True)
class Study:
    """A question that is answered by measuring. Settings are frozen dataclasses with `seeds`, and with `attention`
    where mechanisms are asked; `small` is the one that two cores finish in minutes."""

    name: str
    claim: str  # what is said, in one sentence
    paper: str
    settings: Mapping[str, Any]
    plan: Callable[[Any], Sequence[str]]  # of settings: the configurations
    measure: Callable[[Any, str, int, str], dict[str, Any]]  # of settings, configuration, seed, device: its numbers
    statements: Callable[[Any], Sequence[Statement]]
    tables: Callable[[Any, Sequence[Measured]], Sequence[Table]]
    figures: Callable[[Any, Sequence[Measured]], Figures] | None = None  # matplotlib figures by name
    needs: tuple[str, ...] = ()  # what a mechanism must be able to do, of zoo.CAPABILITIES
    control: str | None = None  # the configuration that is run again with other seeds
    seconds: Mapping[str, float] = field(default_factory=dict)  # how long `small` took, by machine
    views: Mapping[str, Sequence[str]] = field(default_factory=dict)  # pages of their own: name -> how titles begin

    @classmethod
    def of(cls, module: str, **about: Any) -> Study:
        """The study whose functions (plan, measure, statements, tables and figures) are those of a module."""
        named = {name: getattr(sys.modules[module], name) for name in FUNCTIONS}
        return cls(**named, **about)


@dataclass(frozen=True)
class Measurement(Run):
    """One configuration measured with one seed."""

    settings: Any = field(default=None, repr=False, compare=False, hash=False)


@dataclass(frozen=True)
class Measurements(Workshop):
    """Where measurements are made: one thread each on a CPU, so that what runs beside them changes nothing; a GPU is
    mostly idle under models this small, so that several share it."""

    study: Study | None = None

    @property
    def side_by_side(self) -> bool:
        return True

    def make(self, run: Measurement, shared: Any = None, progress: IO[str] | None = None) -> Record:
        assert self.study is not None
        start, busy = time.perf_counter(), time.process_time()
        with ExitStack() as stack:
            if self.device == "cpu":
                stack.enter_context(threads(1))
            numbers = self.study.measure(run.settings, run.configuration, run.seed, self.device)
        return {
            "study": self.study.name, "configuration": run.configuration, "seed": run.seed, "role": run.role,
            "fingerprint": run.fingerprint, "settings": plain(asdict(run.settings)), "values": plain(numbers),
            "epochs": 1, "seconds": round(time.perf_counter() - start, 2), "device": self.device,
            "processor": round(time.process_time() - busy, 2), **self.made,
        }  # fmt: skip


def plain(value: Any) -> Any:
    """For JSON: lists of numbers, and nothing where a number is none."""
    if isinstance(value, Mapping):
        return {str(key): plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [plain(one) for one in value]
    if hasattr(value, "tolist"):
        return plain(value.tolist())
    return None if isinstance(value, float) and not math.isfinite(value) else value


def planned(study: Study, settings: Any, controls: int = 0) -> tuple[list[Measurement], dict[str, str]]:
    """The runs, and the mechanisms that are left out with the reason: they lack what the study needs."""
    settings, skipped = able(study, settings)
    names = list(study.plan(settings))
    own = {key: value for key, value in plain(asdict(settings)).items() if key not in INDIFFERENT}
    marks = {name: digest({"study": study.name, "settings": own, "configuration": name}) for name in names}
    if not names:
        reasons = "; ".join(f"{name} {why}" for name, why in skipped.items()) or "no configuration was named"
        raise ValueError(f"nothing is left to measure in {study.name}: {reasons}")
    again = study.control if study.control in names else None
    order = seeded(names, again or names[0], settings.seeds, controls if again else 0, CONTROL_SEED)
    return [Measurement(name, seed, role, marks[name], settings) for name, seed, role in order], skipped


def able(study: Study, settings: Any) -> tuple[Any, dict[str, str]]:
    """The settings with those of their mechanisms that have what the study needs, and why the others have not."""
    skipped = {}
    for name in getattr(settings, "attention", ()):
        lacking = [need for need in study.needs if not getattr(zoo.get(name), need)]
        if lacking:
            skipped[name] = f"lacks {' and '.join(lacking)}".replace("_", " ")
    if skipped:
        settings = replace(settings, attention=tuple(name for name in settings.attention if name not in skipped))
    return settings, skipped


def chosen(study: Study, options: Options) -> Any:
    """The settings that the options name: a whole setting, with single values changed."""
    if options.setting not in study.settings:
        raise ValueError(f"{study.name} has no setting {options.setting!r}; {suggest(options.setting, study.settings)}")
    settings = study.settings[options.setting]
    given: dict[str, Any] = {} if options.seeds is None else {"seeds": options.seeds}
    if options.attention:
        given["attention"] = options.attention
    given |= dict(read_option(word, "--change", "values") for word in options.change)
    kinds = {one.name: type(getattr(settings, one.name)) for one in fields(settings)}
    for name, value in given.items():
        if name not in kinds:
            raise ValueError(f"{study.name} has no value {name!r}; {suggest(name, kinds)}")
        value = tuple(value) if isinstance(value, list) else value
        value = float(value) if kinds[name] is float and type(value) is int else value
        if type(value) is not kinds[name]:
            raise ValueError(f"{name} of {study.name} must be {kinds[name].__name__}, got {value!r}")
        given[name] = value
    settings = replace(settings, **given)
    if settings.seeds < 1:
        raise ValueError(f"seeds must be 1 or more, got {settings.seeds}")
    return settings


def run(study: Study, options: Options, progress: IO[str] | None = None) -> dict[str, Any]:
    """Measure what is missing, judge, and write results.json, page.html and the figures."""
    settings, out = chosen(study, options), options.out / study.name
    controls = (settings.seeds if options.control is None else options.control) if study.control else 0
    runs, skipped = planned(study, settings, controls)
    made = {"provenance": provenance(options.command())}
    shop = Measurements(out, device_of(options), made, options.fresh, study)
    for sentence in about_records(runs, shop):
        if progress is not None:
            print(sentence, file=progress)
    with bar_of(study.name, len(runs), "run", progress) as bar:
        records = complete(
            runs, shop, workers=options.workers or 2, budget=Budget(options.minutes), on=options.on,
            told=lambda run, record: bar.update(record is not None),
        )  # fmt: skip
    result = outcome(study, settings, runs, records, skipped)
    result = {"setting": options.setting, **result, **made}
    write_atomically(out / "results.json", json.dumps(result, indent=1, allow_nan=False).encode())
    try:
        write_pages(result, drawings(study, settings, records, out), out, study.views)
    except ImportError as error:  # of matplotlib or jinja2: the numbers are there all the same
        return {**result, "no page": str(error)}
    return {**result, "page": str(out / "page.html")}


def about_records(runs: Sequence[Measurement], shop: Measurements) -> list[str]:
    """What is said of the records in the folder before anything is measured."""
    wanted, others = {run.fingerprint for run in runs}, {}
    for path in sorted((shop.out / "records").glob("*.json")):
        one = read_json(path)
        ours = one.get("configuration") in {run.configuration for run in runs} and "settings" in one
        if ours and one.get("fingerprint") not in wanted:
            others[path.name] = one
    done = sum(shop.record(run).is_file() for run in runs)
    said = [f"{done} of {len(runs)} runs are finished already (--fresh measures them anew)"] if done else []
    if others:
        before, now = next(iter(others.values()))["settings"], plain(asdict(runs[0].settings))
        differ = [f"{key} {before.get(key)}, now {now[key]}" for key in now
                  if key not in INDIFFERENT and before.get(key) != now[key]]  # fmt: skip
        what = f" ({'; '.join(differ)})" if differ else ""
        said.append(f"the settings are others than those of {len(others)} kept records{what}: a new record is begun")
    return said


def by_seed(records: Mapping[Measurement, Record]) -> list[dict[str, dict[str, Any]]]:
    """What was measured, seed by seed; the control's under the name of what it repeats and `AGAIN`."""
    found: dict[int, dict[str, dict[str, Any]]] = {}
    for run, record in records.items():
        again = run.role == "control"
        seed = run.seed - CONTROL_SEED if again else run.seed
        found.setdefault(seed, {})[run.configuration + AGAIN * again] = record["values"]
    return [found[seed] for seed in sorted(found)]


def outcome(
    study: Study,
    settings: Any,
    runs: Sequence[Measurement],
    records: Mapping[Measurement, Record],
    skipped: Mapping[str, str],
) -> dict[str, Any]:
    """Verdicts, tables and numbers of the records that there are."""
    seeds = by_seed(records)
    return {
        "study": study.name,
        "claim": study.claim,
        "paper": study.paper,
        "settings": plain(asdict(settings)),
        "statements": [values(judged(statement, seeds)) for statement in study.statements(settings)],
        "tables": [asdict(table) for table in study.tables(settings, seeds)] if seeds else [],
        "skipped": dict(skipped),
        "missing": [str(run) for run in runs if run not in records],
        "origins": origins(list(records.values())),
        "seconds": round(sum(record["seconds"] for record in records.values()), 1),  # of all runs, one after the other
        "runs": [
            {key: record[key] for key in ("configuration", "seed", "role", "seconds", "device", "values")}
            for record in records.values()
        ],
    }


def drawings(study: Study, settings: Any, records: Mapping[Measurement, Record], out: Path) -> list[tuple[str, str]]:
    """The figures of the seeds that are complete, as (title, SVG), also written to the folder `figures`."""
    planned_names = set(study.plan(able(study, settings)[0]))
    seeds = [one for one in by_seed(records) if planned_names <= one.keys()]  # a stopped study has others
    if study.figures is None or not seeds:
        return []
    found = []
    for title, figure in study.figures(settings, seeds).items():
        name = "-".join("".join(letter if letter.isalnum() else " " for letter in title.lower()).split())
        (path,) = save(figure, out / "figures" / name, ("svg",))
        text = path.read_text(encoding="utf-8")
        found.append((title, text[text.index("<svg") :]))
    return found


def table(result: Mapping[str, Any]) -> str:
    """The tables and verdicts for a terminal."""
    lines = [f"{result['study']} ({result['paper']}): {result['claim']}"]
    for one in result["tables"]:
        lines += ["", one["title"], *columns([one["head"], *one["rows"]])]
    head = ["verdict", "found (95 %)", "should be", "claim"]
    rows = [[one["verdict"], one["found"], one["bounds"],
             f"{one['text']} [{one['source']}]" + (f": {one['why']}" if one["why"] else "")]
            for one in result["statements"]]  # fmt: skip
    lines += ["", *columns([head, *rows], left=(0, 3))]
    lines += [f"skipped: {name} {why}" for name, why in result["skipped"].items()]
    lines += [f"no time was left for {left}" for left in result["missing"]]
    return "\n".join(lines)


def columns(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> list[str]:
    """Rows of texts under each other."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    sides = ["<" if i in left else ">" for i in range(len(widths))]
    shapes = list(zip(sides, widths, strict=True))
    return [
        "  ".join(f"{cell:{side}{width}}" for cell, (side, width) in zip(row, shapes, strict=True)).rstrip()
        for row in rows
    ]


def mean_of(seeds: Sequence[Measured], configuration: str, key: str, digits: int = 3) -> str:
    """A cell of a table: the mean over the seeds that have it and half of its 95 % interval."""
    found = [one[configuration][key] for one in seeds if one.get(configuration, {}).get(key) is not None]
    if not found:
        return "-"
    low, high = interval(found)
    spread = "" if low is None or high is None else f" ± {(high - low) / 2:.{digits}f}"
    return f"{statistics.mean(found):.{digits}f}{spread}"
