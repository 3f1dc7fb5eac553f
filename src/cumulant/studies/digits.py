"""The paper's comparison on real data that comes with scikit-learn: 1797 handwritten digits of 8 x 8 pixels.

The same vision transformer (four layers, 136,138 parameters) is trained with each mechanism, same recipe and seeds.
Seen with the default settings: single runs from 94.4 to 98.7 %, about six minutes of processor time in all. Which
mechanism comes first depends on the recipe: with initial weights of 0.02 no link of the paper's ordering was resolved.
"""

from __future__ import annotations

import json
import statistics
import textwrap
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

from cumulant.studies.runs import MODEL, Run, fingerprint, finished, train_all, write_atomically
from cumulant.studies.settings import Reproduce
from cumulant.studies.verdict import summarise, verdict

if TYPE_CHECKING:
    from cumulant.train import Recipe

FORMAT = 1  # of results.json; raised when the report could not read an older file


def recipe_for(epochs: int) -> Recipe:
    """The recipe of every run, whatever its mechanism; it was chosen for softmax."""
    from cumulant.train.recipe import DIGITS

    return replace(DIGITS, epochs=epochs)


def planned(settings: Reproduce) -> list[tuple[Run, str]]:
    """All runs with their role; seed by seed, so that a stopped study has the same seeds of every mechanism."""
    compared = [(Run(name, seed), "compared") for seed in range(settings.seeds) for name in settings.attention]
    again = range(settings.seeds, 2 * settings.seeds)
    return compared + [(Run(settings.baseline, seed), "control") for seed in again]


def reproduce(settings: Reproduce, *, progress: IO[str] | None = None) -> dict[str, Any]:
    """The whole study: train, measure, write results.json and report.html into settings.out, return the results.

    `progress` is where progress bars go; None for none. Wrong names and an unwritable folder are reported before
    anything is trained.
    """
    from cumulant import zoo
    from cumulant.bench import provenance
    from cumulant.data import digits
    from cumulant.studies import report

    for name in settings.attention:
        zoo.get(name)
    report.check_packages()
    folder = writable(settings.out) / "runs"
    folder.mkdir(exist_ok=True)
    split = digits()
    recipe = recipe_for(settings.epochs)
    runs = planned(settings)
    records = _trained(settings, [run for run, _ in runs], recipe, folder, progress)
    for (_, role), record in zip(runs, records, strict=True):
        record["role"] = role
    accuracies = {
        name: [r["accuracy"] for r in records if r["mechanism"] == name and r["role"] == "compared"]
        for name in settings.attention
    }
    control = [r["accuracy"] for r in records if r["role"] == "control"]
    results = {
        "format": FORMAT,
        "study": "digits",
        "provenance": provenance(settings.command()),
        "model": MODEL,
        "data": {
            "name": "handwritten digits of 8 x 8 pixels that come with scikit-learn",
            "train_images": len(split.train_images),
            "test_images": len(split.test_images),
        },
        "recipe": {key: value for key, value in asdict(recipe).items() if key != "seed"},
        "workers": settings.workers,
        "baseline": settings.baseline,
        "attention": list(settings.attention),
        "seeds": {
            "compared": list(range(settings.seeds)),
            "control": [r.seed for r, role in runs if role == "control"],
        },
        "runs": records,
        "summary": summarise(records),
        "verdict": verdict(accuracies, control, settings.baseline),
        **_measured(settings, folder, progress),
    }
    write_atomically(settings.out / "results.json", json.dumps(results, indent=1, allow_nan=False))
    report.write(results, settings.out / "report.html")
    return results


def remake_report(out: Path) -> dict[str, Any]:
    """Write report.html again from the results.json beside it."""
    from cumulant.studies import report

    path = out / "results.json"
    if not path.is_file():
        raise FileNotFoundError(f"there is no results.json in {out}; run `cumulant reproduce --out {out}` first")
    results = json.loads(path.read_text(encoding="utf-8"))
    if results.get("format") != FORMAT:
        raise ValueError(f"{path} has format {results.get('format')!r}, this version reads {FORMAT}; run it again")
    report.write(results, out / "report.html")
    return results


def writable(out: Path) -> Path:
    """Create the folder and prove that files can be written there: better now than after minutes of training."""
    try:
        out.mkdir(parents=True, exist_ok=True)
        probe = out / ".writable"
        probe.write_text("")
        probe.unlink()
    except OSError as error:
        raise OSError(f"cannot write into --out {out}: {error.strerror}; choose another folder") from error
    return out


def _bar(what: str, total: int, unit: str, progress: IO[str] | None) -> Any:
    """A progress bar that redraws often on a terminal and seldom in a log file."""
    from tqdm import tqdm

    often = progress is not None and progress.isatty()
    return tqdm(
        total=total,
        desc=what,
        unit=unit,
        file=progress,
        disable=progress is None,
        dynamic_ncols=True,
        mininterval=0.1 if often else 10,
    )


def _trained(
    settings: Reproduce, runs: Sequence[Run], recipe: Recipe, folder: Path, progress: IO[str] | None
) -> list[dict[str, Any]]:
    """The record of every run, in order: kept ones are read, the others trained."""
    mark = fingerprint(recipe)
    records = {} if settings.fresh else {run: kept for run in runs if (kept := finished(run, folder, mark))}
    missing = [run for run in runs if run not in records]
    if progress is not None and records:
        print(f"{len(records)} of {len(runs)} runs are finished already (--fresh trains them anew)", file=progress)
    total = recipe.epochs * len(missing)
    with _bar("training", total, "epoch", progress) as bar:

        def report(run: Run, record: dict[str, Any] | None) -> None:
            if record is None:
                bar.update()
            else:
                records[run] = record
                last = f"{run.mechanism} seed {run.seed}: {record['accuracy']:.1%}"
                bar.set_postfix_str(f"{len(records)}/{len(runs)} runs, {last}")

        if missing:
            train_all(missing, recipe, folder, mark, workers=settings.workers, report=report)
    return [records[run] for run in runs]


def _measured(settings: Reproduce, folder: Path, progress: IO[str] | None) -> dict[str, Any]:
    """Maps of the trained models, error against softmax, time and memory: what the report shows besides accuracy."""
    from cumulant.bench import scaling, softmax_error
    from cumulant.bench.error import LOGIT_SIZES
    from cumulant.bench.scaling import LENGTHS, threads

    steps = 1 + len(LOGIT_SIZES) + len(LENGTHS)
    with _bar("measuring", steps, "step", progress) as bar:
        bar.set_postfix_str("attention maps")
        with threads(1):  # tensors this small are slower on two
            looked_at = _maps(settings, folder)
        bar.update()
        bar.set_postfix_str("error against softmax")
        error = softmax_error(on_size=lambda _: bar.update())
        error["trained"] = looked_at.pop("trained")
        bar.set_postfix_str("time and memory")
        cost = scaling(settings.attention, LENGTHS, on_length=lambda _: bar.update())
        if cost["disturbed"] and cost["threads"] > 1:
            # Threads that wait for one another suffer most from other work on the machine; a single one hardly does.
            bar.total += len(LENGTHS)
            bar.set_postfix_str("time and memory again: the machine is busy")
            disturbed_on = cost["threads"]
            cost = scaling(settings.attention, LENGTHS, num_threads=1, on_length=lambda _: bar.update())
            cost["disturbed_on"] = disturbed_on
    return {"maps": looked_at, "error": error, "scaling": cost}


def _maps(settings: Reproduce, folder: Path) -> dict[str, Any]:
    """Example maps from seed 0, their locality over all seeds, and the logits of a trained softmax model."""
    from cumulant.bench.error import errors_against_softmax, logit_size
    from cumulant.data import digits
    from cumulant.studies import maps
    from cumulant.train import load

    split = digits()
    some = split.test_images[:200]
    models = {name: load(Run(name, 0).checkpoint(folder)) for name in settings.attention}
    result = maps.examples(models, split.test_images, split.test_labels)
    result["locality"] = {}
    for name in settings.attention:
        each = [maps.locality(load(Run(name, seed).checkpoint(folder)), some) for seed in range(settings.seeds)]
        result["locality"][name] = {
            key: {
                "mean": statistics.mean(one[key] for one in each),
                "low": min(one[key] for one in each),
                "high": max(one[key] for one in each),
            }
            for key in each[0]
        }
    result["tokens"] = result["grid"] ** 2 + 1
    result["trained"] = [
        {"layer": i + 1, "logit_size": logit_size(q, k), "relative_error": errors_against_softmax(q, k, v)}
        for i, (q, k, v) in enumerate(maps.projections(models["softmax"], some) if "softmax" in models else [])
    ]
    return result


def terminal_summary(results: dict[str, Any]) -> str:
    """The table and the verdict, for a terminal."""
    lines = [f"{'mechanism':18}  {'test accuracy':16}  {'lowest .. highest':18}  {'parameters':>10}  {'s/run':>6}"]
    for row in results["summary"]:
        name = row["mechanism"] + (" (control)" if row["role"] == "control" else "")
        spread = "" if row["std"] is None else f" ± {100 * row['std']:.2f}"
        extremes = f"{100 * row['low']:.2f} .. {100 * row['high']:.2f}"
        accuracy = f"{100 * row['mean']:.2f}{spread} %"
        lines.append(f"{name:18}  {accuracy:16}  {extremes:18}  {row['parameters']:>10,}  {row['seconds']:>6.1f}")
    words = results["verdict"]
    count = len(results["seeds"]["compared"])
    lines += [
        f"mean ± standard deviation over {count} seed{'s' if count > 1 else ''}; control: {results['baseline']} again, "
        "other seeds",
        "",
        f"found: {words['ordering']}   (≈: not told apart by these runs)",
        words["claim_text"],
        *(f"  {comparison['text']}" for comparison in words["comparisons"]),
        *textwrap.wrap(words["control_text"], 100),
    ]
    return "\n".join(lines)
