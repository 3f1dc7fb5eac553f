"""`cumulant bench train`: one recipe, every mechanism; accuracy beside parameters, FLOPs, throughput and memory.

Every finished run has a record, bench.json, in its folder. Records are enough to go on with: those in the folder and
those in an earlier train.json count as finished, so that several visits to a machine add up. The baseline is trained
again with other seeds: the range of its runs is what chance alone makes, and it is shown next to every difference.
"""

from __future__ import annotations

import re
import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import IO, Any

from cumulant import zoo
from cumulant.bench.provenance import provenance, read_result
from cumulant.bench.variants import ALL
from cumulant.bench.work import costs
from cumulant.data.part import Source
from cumulant.grammar import parse, write
from cumulant.studies.command import TrainBench
from cumulant.studies.plan import Budget
from cumulant.studies.runs import Record, TimeOverError, train_all
from cumulant.studies.training import Training, Trainings, device_of, fingerprint, trainings
from cumulant.studies.verdict import compare
from cumulant.train import RecipeError, TrainRecipe, read_recipe, train
from cumulant.train.build import open_recipe_source
from cumulant.train.stepping import room_for_compiled_code

RECORD = "bench.json"
REACHED = ("top1", "top5", "loss", "best_top1", "parameters", "seconds")
# What the pages of the mechanisms (docs/zoo) report for image classification: (above, below, whether a tie agrees).
CLAIMS = (
    ("softmax", "linear", False),
    ("softmax", "cumulant3", False),
    ("cumulant3", "cumulant2", True),
    ("cumulant2", "linear", False),
    ("flow", "linear", False),
    ("focused_linear", "linear", False),
    ("focused_linear", "softmax", False),
    ("focused_linear", "focused_linear+use_conv=false", False),
    ("rala", "focused_linear", False),
    ("rala", "rala+use_gate=false", False),
    ("rala+use_gate=false", "rala+use_alpha=false", False),
    ("rala+use_alpha=false", "rala+use_alpha=false+use_gate=false", False),
    ("mala", "linear", False),
    ("mala", "rala", True),
    ("agent", "softmax", False),
    ("agent", "agent+conv=false", False),
    ("agent+agents=16", "agent", True),
)


@dataclass(frozen=True)
class Bench(Trainings):
    """Trains one model a run into a folder of its own, with all cores, and keeps bench.json there."""

    def folder(self, run: Training) -> Path:
        return self.out / f"{re.sub(r'[^A-Za-z0-9_.=-]+', '+', run.configuration)}-{run.seed}"

    def record(self, run: Training) -> Path:
        return self.folder(run) / RECORD

    def finished(self, run: Training) -> Record | None:
        """Folders are named without the recipe: only a record of this one counts, and none of a failure."""
        record = super().finished(run) or {"failure": "none"}
        return record if not record["failure"] and record.get("recipe_digest") == self.made["recipe_digest"] else None

    def make(self, run: Training, shared: Source | None = None, progress: IO[str] | None = None) -> Record:
        """Whatever is wrong with one mechanism must not cost the runs of the others: it is told, and tried anew."""
        recipe, folder = replace(run.recipe, seed=run.seed), self.folder(run)
        source = self.opened(run, shared)
        head = {"variant": run.configuration, "seed": run.seed}
        try:
            with room_for_compiled_code() if recipe.compile else nullcontext():
                result = train(recipe, folder, source=source, device=self.device, fresh=self.fresh, progress=progress)
            reached = {name: getattr(result, name) for name in REACHED} | {"throughput": throughput(result, recipe)}
            return {**head, "failure": "", **reached, **costs(recipe, source, self.device), **self.made}
        except (RecipeError, OSError, ImportError):
            raise
        except Exception as error:
            reason = ": ".join([type(error).__name__, *(line[:160] for line in str(error).splitlines()[:1])])
            return {**head, "failure": reason, "failed": reason}


def run(settings: TrainBench, progress: IO[str] | None = None) -> dict[str, Any]:
    """Train what is missing, then say what the runs allow to be said; `missing` of the result names what
    `settings.minutes` had no time for."""
    recipe = read_recipe(settings.recipe)
    recipe = replace(recipe, data=settings.data or recipe.data).lasting(settings.epochs or recipe.epochs)
    names = chosen(settings.attention)
    baseline = "softmax" if "softmax" in names else names[0]
    source, stem = open_recipe_source(recipe), Path(settings.recipe).stem
    data = source.identity()["digest"]
    runs = planned(recipe, names, baseline, settings, data)
    common = digest(recipe, data)
    made = {"recipe_digest": common, "provenance": provenance(f"cumulant bench train --recipe {stem}")}
    shop = Bench(settings.out / stem, device_of(settings), made, settings.fresh)
    if progress is not None:
        print(f"data: {source}", file=progress)
    kept, strange = earlier(settings.out, [shop.folder(run) for run in runs], common)
    if settings.fresh:
        kept = {}
    elif strange and progress is not None:
        print(f"not used: {strange} runs of another recipe, of other data, or of an earlier version", file=progress)
    records: dict[Training, Record] = {}

    def report(run: Training, record: Record | None) -> None:
        if record is None:  # an epoch of a run that is made elsewhere
            return
        if progress is not None:
            print(f"  {record['failure'] or format(record['top1'], '.2%')}", file=progress, flush=True)
        if run == runs[0] and record["failure"]:  # without a baseline there is nothing to compare with
            raise ValueError(f"the baseline {baseline} failed: {record['failure']}")
        records[run] = {**{key: value for key, value in record.items() if key != "failed"}, "role": run.role}

    for number, one in enumerate([run for run in runs if (run.configuration, run.seed) in kept], 1):
        if progress is not None:
            print(f"[{number}/{len(runs)}] {one}, {one.role}", file=progress)
        report(one, kept.pop((one.configuration, one.seed)))
    missing = [run for run in runs if run not in records]
    budget = Budget(settings.minutes)
    left = train_all(
        missing, shop, report=report, budget=budget, progress=progress, before=len(records), on=settings.on
    )
    found = [records[run] for run in runs if run in records]
    found += kept.values()  # runs of earlier commands that this one does not name stay in the table
    if not found:
        raise TimeOverError(settings.minutes)
    return {
        "bench": "train", "recipe": stem, "data": Path(source.name).name, "data_digest": data,
        "classes": len(source.classes), "train_items": len(source.train), "test_items": len(source.test),
        **{key: getattr(recipe, key) for key in ("model", "epochs", "batch_size", "precision")},
        "baseline": baseline, "seeds": settings.seeds, "missing": [str(run) for run in left], "runs": found,
        **judged(found, baseline),
    }  # fmt: skip


def chosen(texts: Sequence[str]) -> list[str]:
    """The mechanisms to train, with their options; `all`: every registered one."""
    names = [name for text in texts for name in (zoo.names() if text == ALL else [text])]
    if not names:
        raise ValueError(f"name at least one mechanism, or {ALL!r}; known: {', '.join(zoo.names())}")
    return list(dict.fromkeys(write(*parse(name)) for name in names))


def planned(
    recipe: TrainRecipe, names: Sequence[str], baseline: str, settings: TrainBench, data: str | None = None
) -> list[Training]:
    """The baseline first with its control, so that the A/A spread is there early; then seed by seed."""
    first = settings.seeds  # of the control: its seeds follow those of the baseline
    runs = trainings(recipe, names, baseline, first, settings.control, data=data, first_control=first)
    return sorted(runs, key=lambda run: run.configuration != baseline)


def earlier(out: Path, folders: Sequence[Path], common: str) -> tuple[dict[tuple[str, int], Record], int]:
    """Records in a train.json in the folder and in the folders of runs, by configuration and seed: those of this
    recipe and data that did not fail; and how many others there are."""
    paths = [folder / RECORD for folder in folders if (folder / RECORD).is_file()]
    records = [read_result(path) for path in paths]
    if (out / "train.json").is_file():
        records += read_result(out / "train.json", "runs")["runs"]
    sound = [one for one in records if not one["failure"]]
    own = {(one["variant"], one["seed"]): one for one in sound if one.get("recipe_digest") == common}
    return own, sum(one.get("recipe_digest") != common for one in sound)


def digest(recipe: TrainRecipe, data: str | None = None) -> str:
    """What tells two recipes apart, whichever mechanism and seed they are run with and wherever their data lies."""
    return fingerprint(replace(recipe, attention="softmax"), data)


def throughput(result: Any, recipe: TrainRecipe) -> float | None:
    """Training items a second in the median epoch, loading and augmentation included; None if no whole one was seen."""
    if not result.epoch_seconds:
        return None
    return result.steps / result.epochs * recipe.batch_size / result.epoch_seconds


def judged(records: Sequence[Mapping[str, Any]], baseline: str) -> dict[str, Any]:
    """Ranking, A/A spread and what becomes of the claims, from the records of all runs (each with its role)."""
    done = [record for record in records if not record["failure"]]
    accuracies: dict[str, list[float]] = {}
    again = []
    for record in done:
        if record["role"] == "control" and record["variant"] == baseline:
            again.append(record["top1"])
        else:  # the control of an earlier command with another baseline is compared like any other run
            accuracies.setdefault(record["variant"], []).append(record["top1"])
    first, gap = accuracies.get(baseline, []), 0.0
    if first and again:
        gap = 100 * abs(statistics.mean(first) - statistics.mean(again))
    own = first + again  # every run of the baseline counts where others are compared with it
    if own:
        accuracies[baseline] = own
    spread = 100 * (max(own) - min(own)) if len(own) > 1 else None
    ranking = []
    for name in sorted(accuracies, key=lambda name: -statistics.mean(accuracies[name])):
        cost = next(record for record in done if record["variant"] == name)
        values = accuracies[name]
        difference = 100 * (statistics.mean(values) - statistics.mean(own)) if own else None
        ranking.append(
            {
                "variant": name, "mean": statistics.mean(values), "low": min(values), "high": max(values),
                "seeds": len(values), "difference": difference,
                "beyond_chance": None if name == baseline else beyond(difference, spread),
                **{key: cost.get(key) for key in ("parameters", "flops", "throughput", "step_bytes")},
            }
        )  # fmt: skip
    extremes = {"low": min(own, default=None), "high": max(own, default=None)}
    return {
        "ranking": ranking,
        "control": {"runs": len(own), "spread": spread, "gap": gap, **extremes},
        "claims": [claim(*one, accuracies, spread, gap) for one in CLAIMS],
        "failed": {record["variant"]: record["failure"] for record in records if record["failure"]},
    }


def beyond(difference: float | None, spread: float | None) -> bool | None:
    """Larger than the spread: as many test items are not, whatever their shares round to. None: not known."""
    return None if difference is None or spread is None else abs(difference) > spread + 1e-9


def claim(
    above: str, below: str, tie: bool, accuracies: Mapping[str, Sequence[float]], spread: float | None, gap: float
) -> dict[str, Any]:
    """Whether `above` > `below` (or >= with `tie`) is confirmed, refuted, not resolved or not tested by these runs.

    From two seeds each on: Welch's 95 % interval must leave out 0 and the difference exceed the A/A gap. With one seed:
    it must exceed the A/A spread, the range of the baseline's runs.
    """
    entry: dict[str, Any] = {"claim": f"{above} {'>=' if tie else '>'} {below}", "difference": None, "interval": None}
    if above not in accuracies or below not in accuracies or spread is None:
        return entry | {"outcome": "not tested"}
    first, second = accuracies[above], accuracies[below]
    difference = 100 * (statistics.mean(first) - statistics.mean(second))
    if min(len(first), len(second)) > 1:
        found = compare(above, below, accuracies, gap)
        side, entry["interval"] = found.outcome, [found.low, found.high]
    else:
        side = "level" if not beyond(difference, spread) else "above" if difference > 0 else "below"
    words = {"above": "confirmed", "below": "refuted", "level": "not contradicted" if tie else "not resolved"}
    return entry | {"difference": difference, "outcome": words[side]}


def table(result: dict[str, Any]) -> str:
    """Ranking and claims for a terminal."""
    lines = [
        f"{'':32s}{'top-1 %':>9s}{'vs ' + result['baseline']:>12s}{'parameters':>12s}{'MFLOP':>9s}"
        f"{'items/s':>10s}{'step MiB':>10s}"
    ]
    for row in result["ranking"]:
        beyond = {True: " *", False: "  ", None: "  "}[row["beyond_chance"]]
        speed = "-" if row["throughput"] is None else f"{row['throughput']:,.0f}"
        memory = "-" if row["step_bytes"] is None else f"{row['step_bytes'] / 2**20:,.1f}"
        difference = "-" if row["difference"] is None else f"{row['difference']:+.2f}"
        lines.append(
            f"{row['variant']:32s}{100 * row['mean']:9.2f}{difference:>10s}{beyond}{row['parameters']:>12,}"
            f"{row['flops'] / 1e6:>9,.2f}{speed:>10s}{memory:>10s}"
        )
    control = result["control"]
    spread = "not known" if control["spread"] is None else f"{control['spread']:.2f} points over {control['runs']} runs"
    lines.append(f"A/A spread of {result['baseline']}: {spread}; * differs from it by more than that")
    tested = [one for one in result["claims"] if one["outcome"] != "not tested"]
    lines += [f"  {one['claim']:44s} {one['outcome']} ({one['difference']:+.2f})" for one in tested]
    lines += [f"failed: {name}: {why}" for name, why in result["failed"].items()]
    lines += [f"no time was left for {name}" for name in result.get("missing", ())]
    return "\n".join(lines)
