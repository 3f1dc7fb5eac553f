"""`cumulant bench train`: one recipe, every mechanism; accuracy beside parameters, FLOPs, throughput and memory.

A thin layer over `cumulant.train.train`, which keeps and resumes each run; here every finished run gets a record,
bench.json, in its folder. Records are enough to go on with: those in the folder and those in an earlier train.json
count as finished, so that several visits to a machine add up, each with its `minutes`. The baseline is trained again
with other seeds (A/A control): the range of its runs is what chance alone makes, and it is shown next to every
difference.
"""

from __future__ import annotations

import hashlib
import json
import re
import statistics
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cumulant import zoo
from cumulant.bench.command import TrainBench
from cumulant.bench.provenance import provenance, read_result
from cumulant.bench.scaling import peak_memory
from cumulant.bench.speed import peak_memory as cuda_peak
from cumulant.bench.variants import ALL, Variant, parse
from cumulant.train.processes import chosen_device

if TYPE_CHECKING:
    from cumulant.data.part import Source
    from cumulant.train import TrainRecipe

RECORD = "bench.json"
# What the pages of the mechanisms (docs/zoo) report for image classification: (above, below, whether a tie agrees).
CLAIMS = (
    ("softmax", "linear", False),
    ("softmax", "cumulant3", False),
    ("cumulant3", "cumulant2", True),
    ("cumulant2", "linear", False),
    ("flow", "linear", False),
    ("focused_linear", "linear", False),
    ("focused_linear", "softmax", False),
    ("focused_linear", "focused_linear:use_conv=false", False),
    ("rala", "focused_linear", False),
    ("rala", "rala:use_gate=false", False),
    ("rala:use_gate=false", "rala:use_alpha=false", False),
    ("rala:use_alpha=false", "rala:use_gate=false:use_alpha=false", False),
    ("mala", "linear", False),
    ("mala", "rala", True),
    ("agent", "softmax", False),
    ("agent", "agent:conv=false", False),
    ("agent:agents=16", "agent", True),
)


@dataclass(frozen=True)
class Run:
    """One mechanism from one seed; `control` runs repeat the baseline."""

    variant: Variant
    seed: int
    role: str  # "compared" or "control"

    @property
    def folder(self) -> str:
        return f"{re.sub(r'[^A-Za-z0-9_.=-]+', '+', self.variant.label)}-{self.seed}"


def run(settings: TrainBench, progress: IO[str] | None = None, *, minutes: float | None = None) -> dict[str, Any]:
    """Train what is missing, then say what the runs allow to be said.

    With `minutes` no run is begun that would not end in time, as far as the runs so far tell, and one that has not
    ended by then is stopped with its state kept; `missing` of the result names what was left.
    """
    from cumulant.data.held import hold
    from cumulant.studies.budget import Budget, epochs_done
    from cumulant.studies.runs import time_limit
    from cumulant.studies.study import TimeOverError
    from cumulant.train import read_recipe
    from cumulant.train.build import open_recipe_source
    from cumulant.train.stepping import room_for_compiled_code

    recipe = read_recipe(settings.recipe)
    recipe = replace(recipe, data=settings.data or recipe.data).lasting(settings.epochs or recipe.epochs)
    variants = chosen(settings.attention)
    baseline = next((v for v in variants if v.label == "softmax"), variants[0])
    source = open_recipe_source(recipe)
    folder = settings.out / Path(settings.recipe).stem
    held: Source | None = None  # decoded once for all runs, when the first of them is trained
    records, missing, budget = [], [], Budget(minutes)
    runs = planned(variants, baseline, settings)
    kept = {} if settings.fresh else earlier(settings.out, recipe)
    for number, one in enumerate(runs, 1):
        name, place = f"{one.variant.label}, seed {one.seed}", folder / one.folder
        record = kept.pop((one.variant.label, one.seed), None) or read_record(place, recipe, settings.fresh)
        to_do = recipe.epochs - epochs_done(place)
        if record is None and not budget.fits(one.variant.label, to_do):
            missing.append(name)
            continue
        if progress is not None:
            print(f"[{number}/{len(runs)}] {name}, {one.role}", file=progress, flush=True)
        if record is None:
            started = budget.clock()
            if held is None:
                held = (hold(source, recipe.loaded_size) if recipe.in_memory != "no" else None) or source
            try:
                with time_limit(budget) as over, room_for_compiled_code() if recipe.compile else nullcontext():
                    record = train_one(one, recipe, held, place, settings, progress)
            except KeyboardInterrupt:
                if not over.is_set():
                    raise
                missing.append(name)
                continue
            if not record["failure"]:
                budget.saw(one.variant.label, to_do, budget.clock() - started)
        if progress is not None:
            print(f"  {record['failure'] or format(record['top1'], '.2%')}", file=progress, flush=True)
        records.append({**record, "role": one.role})
        if number == 1 and record["failure"]:  # without a baseline there is nothing to compare with
            raise ValueError(f"the baseline {baseline.label} failed: {record['failure']}")
    records += kept.values()  # runs of earlier commands that this one does not name stay in the table
    if not records:
        raise TimeOverError(f"no run was finished within the {minutes:g} minutes; give the same command again to go on")
    result = {
        "bench": "train",
        "recipe": Path(settings.recipe).stem,
        "data": Path(source.name).name,
        "model": recipe.model,
        "epochs": recipe.epochs,
        "batch_size": recipe.batch_size,
        "precision": recipe.precision,
        "test_items": len(source.test),
        "baseline": baseline.label,
        "seeds": settings.seeds,
        "missing": missing,
        "runs": records,
    }
    return {**result, **judged(records, baseline.label)}


def chosen(texts: Sequence[str]) -> list[Variant]:
    """The mechanisms to train, with options of their layers; `all`: every registered one."""
    names = [name for text in texts for name in (zoo.names() if text == ALL else [text])]
    if not names:
        raise ValueError(f"name at least one mechanism, or {ALL!r}; known: {', '.join(zoo.names())}")
    return [parse(name, layer=True) for name in dict.fromkeys(names)]


def planned(variants: Sequence[Variant], baseline: Variant, settings: TrainBench) -> list[Run]:
    """The baseline first with its control, so that the A/A spread is there early; then seed by seed."""
    own = [Run(baseline, seed, "compared") for seed in range(settings.seeds)]
    again = [Run(baseline, settings.seeds + number, "control") for number in range(settings.control)]
    others = [Run(v, seed, "compared") for seed in range(settings.seeds) for v in variants if v is not baseline]
    return own + again + others


def earlier(out: Path, recipe: TrainRecipe) -> dict[tuple[str, int], dict[str, Any]]:
    """Records in a train.json in the folder, by variant and seed: those of this recipe that did not fail."""
    path = out / "train.json"
    if not path.is_file():
        return {}
    return {
        (one["variant"], one["seed"]): one
        for one in read_result(path, "runs")["runs"]
        if not one["failure"] and one.get("recipe_digest") == digest(recipe)
    }


def read_record(folder: Path, recipe: TrainRecipe, fresh: bool) -> dict[str, Any] | None:
    """The record in the folder of a run, if it is one of this recipe and none is to be made anew."""
    path = folder / RECORD
    if fresh or not path.is_file():
        return None
    record = read_result(path)
    return record if record.get("recipe_digest") == digest(recipe) else None


def digest(recipe: TrainRecipe) -> str:
    """What tells two recipes apart, whichever mechanism and seed they are run with and wherever their data lies."""
    same = replace(recipe, data=Path(recipe.data).name, attention="softmax", seed=0)
    return hashlib.sha256(json.dumps(asdict(same), sort_keys=True, default=str).encode()).hexdigest()[:12]


def train_one(
    one: Run, recipe: TrainRecipe, source: Source, folder: Path, settings: TrainBench, progress: IO[str] | None
) -> dict[str, Any]:
    """The record of a run: read if it is there, else trained, measured and kept. A failure is told, not kept."""
    from cumulant.train import RecipeError, train
    from cumulant.train.files import write_atomically

    variant, common = one.variant, digest(recipe)
    recipe = replace(
        recipe,
        attention=variant.mechanism.name,
        attention_options={**recipe.attention_options, **variant.options},
        seed=one.seed,
    )
    path = folder / RECORD
    try:
        result = train(recipe, folder, source=source, device=settings.device, fresh=settings.fresh, progress=progress)
        record = {
            "variant": variant.label,
            "seed": one.seed,
            "failure": "",
            "recipe_digest": common,
            **{name: getattr(result, name) for name in ("top1", "top5", "loss", "best_top1", "parameters", "seconds")},
            "throughput": throughput(result, recipe),
            **costs(recipe, source, settings.device),
            "provenance": provenance(f"cumulant bench train --recipe {Path(settings.recipe).stem}"),
        }
    except (RecipeError, OSError, ImportError):
        raise
    except Exception as error:  # whatever is wrong with one mechanism must not cost the runs of the others
        reason = ": ".join([type(error).__name__, *(line[:160] for line in str(error).splitlines()[:1])])
        return {"variant": variant.label, "seed": one.seed, "failure": reason}
    write_atomically(path, json.dumps(record, indent=1, allow_nan=False).encode())
    return record


def throughput(result: Any, recipe: TrainRecipe) -> float | None:
    """Training items a second in the median epoch, loading and augmentation included; None if no whole one was seen."""
    if not result.epoch_seconds:
        return None
    return result.steps / result.epochs * recipe.batch_size / result.epoch_seconds


def costs(recipe: TrainRecipe, source: Source, device: str | None) -> dict[str, Any]:
    """FLOPs of one item (forward) by torch's counter, and the peak memory of one training step, not compiled."""
    where = chosen_device(device)
    return {"flops": flops(recipe, source), "step_bytes": step_bytes(recipe, source, where), "device": where.type}


@torch.no_grad()
def flops(recipe: TrainRecipe, source: Source) -> int:
    """Floating-point operations (2 a multiply-add) of matrix products and convolutions for one item."""
    from cumulant.train.build import build_model

    if "backend" in zoo.get(recipe.attention).options:  # a fused kernel hides its products from the counter
        recipe = replace(recipe, attention_options={**recipe.attention_options, "backend": "reference"})
    model = build_model(recipe, source).eval()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(_items(recipe, source, 1))
    return counter.get_total_flops()


def step_bytes(recipe: TrainRecipe, source: Source, device: torch.device) -> int | None:
    """Bytes of activations and gradients at the peak of one forward and backward pass; None if they do not fit."""
    from cumulant.train.build import build_model

    model = build_model(recipe, source).to(device).train()
    count = recipe.batch_size // recipe.accumulate
    items = _items(recipe, source, count).to(device)
    labels = torch.zeros(count, dtype=torch.long, device=device)
    half = torch.autocast(device.type, torch.bfloat16) if recipe.precision == "bf16" else nullcontext()

    def step() -> None:
        with half:
            loss = F.cross_entropy(model(items).float(), labels)
        loss.backward()

    try:
        step()
        model.zero_grad(set_to_none=True)
        if device.type != "cuda":
            return peak_memory(step)
        with cuda_peak() as peak:
            step()
        return peak[0]
    except torch.OutOfMemoryError:
        return None


def _items(recipe: TrainRecipe, source: Source, count: int) -> torch.Tensor:
    frames = (recipe.frames,) if source.kind == "video" else ()
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, *frames, recipe.image_size, recipe.image_size, generator=generator)


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
    gap = 0.0
    if accuracies.get(baseline) and again:
        gap = 100 * abs(statistics.mean(accuracies[baseline]) - statistics.mean(again))
    own = accuracies.get(baseline, []) + again  # every run of the baseline counts where others are compared with it
    if own:
        accuracies[baseline] = own
    spread = 100 * (max(own) - min(own)) if len(own) > 1 else None
    ranking = []
    for name in sorted(accuracies, key=lambda name: -statistics.mean(accuracies[name])):
        first = next(record for record in done if record["variant"] == name)
        values = accuracies[name]
        difference = 100 * (statistics.mean(values) - statistics.mean(own)) if own else None
        row = {
            "variant": name,
            "mean": statistics.mean(values),
            "low": min(values),
            "high": max(values),
            "seeds": len(values),
            "difference": difference,
            "beyond_chance": None,
            **{key: first.get(key) for key in ("parameters", "flops", "throughput", "step_bytes")},
        }
        if spread is not None and difference is not None and name != baseline:
            row["beyond_chance"] = beyond(difference, spread)
        ranking.append(row)
    failed = {r["variant"]: r["failure"] for r in records if r["failure"]}
    return {
        "ranking": ranking,
        "control": {"runs": len(own), "spread": spread, "gap": gap, "low": min(own, default=None),
                    "high": max(own, default=None)},
        "claims": [claim(*one, accuracies, spread, gap) for one in CLAIMS],
        "failed": failed,
    }  # fmt: skip


def beyond(difference: float, spread: float) -> bool:
    """Larger than the spread: as many test items are not, whatever their shares round to."""
    return abs(difference) > spread + 1e-9


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
        from cumulant.studies.verdict import compare

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
