"""The pages of a study and what is said on them and in a terminal: every sentence about maps, error and cost is
computed from the results, none is written in advance. A page is one file that fetches nothing."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cumulant import style
from cumulant.studies import figures
from cumulant.studies.outcome import confused
from cumulant.studies.verdict import signed
from cumulant.train.files import write_atomically

TAGS = {"confirmed": "above", "refuted": "below"}  # the classes of report.css; all else is open
WHOLE = "page"  # has everything


def percent(share: float) -> str:
    """A share with two figures that count: 0.0123 -> '1.2 %', 3.4 -> '340 %'."""
    value = 100 * share
    digits = f"{value:.0f}" if value >= 10 else f"{value:.1f}" if value >= 0.1 else f"{value:.1g}"
    return f"{digits}\N{NO-BREAK SPACE}%"


def joined(parts: list[str]) -> str:
    return parts[0] if len(parts) == 1 else f"{', '.join(parts[:-1])} and {parts[-1]}"


def listed(values: dict[str, Any]) -> str:
    """Values by name for reading: 'lr 0.002, augmentation (crop_scale 0.5 to 1.0, flip 0.5)'."""

    def shown(value: Any) -> str:
        if isinstance(value, dict):
            return f"({listed(value)})"
        return (" to " if len(value) == 2 else " ").join(map(str, value)) if isinstance(value, list) else str(value)

    return ", ".join(f"{name} {shown(value)}" for name, value in values.items())


def title(results: dict[str, Any]) -> str:
    """The data in a headline."""
    return {"digits": "handwritten digits"}.get(results["data"]["name"], results["data"]["name"])


def noun(results: dict[str, Any]) -> str:
    """What one item of the data is."""
    return "clip" if results["data"]["kind"] == "video" else "image"


def about_data(results: dict[str, Any]) -> str:
    """What was found where the data lies."""
    data, classes = results["data"], len(results["classes"])
    return f"{data['name']}: {data['train']:,} training and {data['test']:,} test {noun(results)}s of {classes} classes"


def missing(results: dict[str, Any]) -> str:
    """The runs that are not finished, by configuration."""
    counts: dict[str, int] = {}
    for one in results["missing"]:
        name = one["configuration"] + (" again (control)" if one["role"] == "control" else "")
        counts[name] = counts.get(name, 0) + 1
    return ", ".join(f"{count} of {name}" for name, count in counts.items())


def failures(results: dict[str, Any]) -> list[str]:
    """A sentence for every run that ended without a result."""
    return [f"{one['configuration']}, seed {one['seed']}: {one['failed']}" for one in results["failed"]]


def collapses(results: dict[str, Any]) -> list[str]:
    """A sentence for every run that ended with less than half of the accuracy it once had: its training diverged."""
    return [
        f"{run['configuration']}, seed {run['seed']} reached {100 * run['best_accuracy']:.1f} % and fell to "
        f"{100 * run['accuracy']:.1f} %: a difference from it tells of that, not of the mechanism"
        for run in results["runs"]
        if 2 * run["accuracy"] < run["best_accuracy"]
    ]


def class_token(results: dict[str, Any]) -> str:
    """Which of the models with maps have a class token: "all", "some" or "none". Those of older records have one."""
    have = [model.get("prefix", 1) > 0 for model in results["maps"]["models"].values()]
    return "all" if all(have) else "some" if any(have) else "none"


def about_maps(results: dict[str, Any]) -> list[str]:
    """How far the maps are spread, and whether those of the cumulants are more local than linear attention's."""
    locality, tokens = results["maps"]["locality"], results["maps"]["tokens"]
    locality = {name: values for name, values in locality.items() if values["tokens"] == tokens}  # alike to compare
    used = {name: values["tokens_used"] for name, values in locality.items()}
    spreads = joined([f"{value['mean']:.1f} ({name})" for name, value in used.items()])
    sentences = [
        f"On average over images, layers, heads and seeds a map is spread over {spreads} of the {tokens} tokens."
    ]
    cumulants = [name for name in used if name in ("cumulant2", "cumulant3")]
    if "linear" in used and cumulants:
        linear = used["linear"]
        sharper = [name for name in cumulants if used[name]["high"] < linear["low"]]
        broader = [name for name in cumulants if used[name]["low"] > linear["high"]]
        mixed = [name for name in cumulants if name not in sharper + broader]
        claim = "The paper reports more localised maps for cumulant than for linear attention. "
        parts = []
        if sharper:
            parts.append(f"{joined(sharper)}: seen here, in every seed")
        if mixed:
            parts.append(f"{joined(mixed)}: not clear here, the seeds overlap")
        if broader:
            parts.append(f"{joined(broader)}: the opposite is seen here, in every seed")
        sentences.append(claim + "; ".join(parts) + ".")
    negative = {name: values["negative_mass"]["mean"] for name, values in locality.items()}
    signed = [f"{value:.2f} ({name})" for name, value in negative.items() if value > 5e-4]
    signed = [one for one in signed if "normalization=sum" not in one]
    if signed:
        sentences.append(
            f"The negative weights of a map add up to {joined(signed)} on average; the positive ones to 1 plus that, "
            "because all weights of a map sum to exactly 1."
        )
    return sentences


def about_error(results: dict[str, Any]) -> list[str]:
    """Error of each order at a small and at a large logit size, and where the trained model stands."""
    error, trained = results["error"], results["trained"]
    sizes, curves = error["logit_sizes"], error["relative_error"]
    sentences = []
    for wanted in (0.2, 1.0):
        i = min(range(len(sizes)), key=lambda i: abs(sizes[i] - wanted))
        listed = joined([f"{percent(values[i])} ({name})" for name, values in curves.items()])
        sentences.append(f"At logit size {sizes[i]:g} the error is {listed}.")
    useful = [
        size for size, two, full in zip(sizes, curves["order 2"], curves["order 3, full"], strict=True) if full < two
    ]
    if useful and len(useful) < len(sizes):
        sentences.append(
            f"The full third order helps up to a logit size of about {max(useful):g}; beyond it the series "
            "no longer converges and a higher order makes it worse."
        )
    if trained:
        layers = trained
        low, high = min(layer["logit_size"] for layer in layers), max(layer["logit_size"] for layer in layers)
        best = {name: [layer["relative_error"][name] for layer in layers] for name in curves}
        listed = joined([f"{percent(min(v))} to {percent(max(v))} ({name})" for name, v in best.items()])
        sentences.append(
            f"The rings, with their range over the layers, are the softmax model trained here, whose logit sizes are "
            f"{low:.2f} to {high:.2f}. Were its attention replaced without further training, the error of a layer "
            f"would be {listed}."
        )
        closest = min(min(values) for values in best.values())
        if closest > 0.1:
            sentences.append(
                f"No order comes closer than {percent(closest)} to any layer, so here cumulant attention is not a "
                "close copy of the softmax that was learned; the accuracies above are of models trained with it from "
                "the start."
            )
    return sentences


def about_cost(results: dict[str, Any]) -> list[str]:
    """Ratios at the longest common length, and what doubling the length costs."""
    measured, seconds = results["scaling"]["measurements"], results["scaling"]["time_shown"]
    by_name: dict[str, dict[int, dict[str, Any]]] = {}
    for one in measured:
        by_name.setdefault(one["name"], {})[one["length"]] = one
    sentences = []
    linear_time: list[str] = [name for name in ("cumulant2", "cumulant3") if name in by_name]
    if "softmax" in by_name and linear_time:
        longest = max(set.intersection(*(set(by_name[name]) for name in ("softmax", *linear_time))))
        softmax = by_name["softmax"][longest][seconds]
        ratios = [f"{softmax / by_name[name][longest][seconds]:.3g} times as long as {name}" for name in linear_time]
        sentences.append(f"At L = {longest:,} softmax takes {joined(ratios)}.")
        for name in linear_time:
            shared = sorted(by_name["softmax"].keys() & by_name[name].keys())
            quicker = [by_name["softmax"][n][seconds] < by_name[name][n][seconds] for n in shared]
            # One length further on, measured while the machine was busy, is no crossing.
            first = quicker.index(False) if False in quicker else len(shared)
            if 0 < first < len(shared):
                sentences.append(f"Up to L = {shared[first - 1]:,} softmax is the quicker one against {name}.")
    grown: dict[tuple[int, int], list[str]] = {}
    for name, own in by_name.items():
        lengths = sorted(own)
        first, last = lengths[-min(4, len(lengths))], lengths[-1]
        if first < last:
            grown.setdefault((first, last), []).append(f"{own[last][seconds] / own[first][seconds]:.3g} ({name})")
    for (first, last), factors in grown.items():
        sentences.append(
            f"From L = {first:,} to {last:,}, {last / first:g} times as many tokens, the time grew by a factor of "
            f"{joined(factors)}."
        )
    if "disturbed_on" in results["scaling"]:
        sentences.append(
            f"Measured on one thread: on {results['scaling']['disturbed_on']}, calls of the same kind took very "
            "different times, as on a machine busy with other work."
        )
    if results["scaling"]["disturbed"]:
        sentences.append(
            "Calls of the same kind took very different times, as on a machine busy with other work, so the curves and "
            "the sentences above go by the quickest calls instead of the median."
        )
    reasons = [f"{name} ({why})" for name, why in results["scaling"]["given_up"].items()]
    if reasons:
        sentences.append(f"Not measured at every length: {joined(reasons)}.")
    return sentences


def terminal_summary(results: dict[str, Any]) -> str:
    """The table and the verdict."""
    labels = [row["configuration"] + (" (control)" if row["role"] == "control" else "") for row in results["summary"]]
    width = max(18, *map(len, labels))
    lines = [
        about_data(results),
        f"{'attention':{width}}  {'runs':>4}  {'test accuracy':16}  {'lowest .. highest':18}  {'parameters':>10}  "
        f"{'s/epoch':>7}  {'s/run':>7}",
    ]
    for label, row in zip(labels, results["summary"], strict=True):
        spread = "" if row["std"] is None else f" ± {100 * row['std']:.2f}"
        extremes = f"{100 * row['low']:.2f} .. {100 * row['high']:.2f}"
        accuracy = f"{100 * row['mean']:.2f}{spread} %"
        epoch = f"{row['epoch_seconds']:.2f}" if row["epoch_seconds"] else "-"
        lines.append(
            f"{label:{width}}  {len(row['seeds']):>4}  {accuracy:16}  {extremes:18}  {row['parameters']:>10,}  "
            f"{epoch:>7}  {row['seconds']:>7.1f}"
        )
    words = results["verdict"]
    lines += [
        f"mean ± standard deviation over the runs; control: {results['baseline']} again, other seeds",
        "",
        f"found: {words['ordering']}" + ("   (≈: not told apart by these runs)" if "≈" in words["ordering"] else ""),
        words["claim_text"],
        *(f"  {comparison['text']}" for comparison in [*words["comparisons"], *words["pairs"]]),
        *textwrap.wrap(words["control_text"], 100),
    ]
    lines += [f"failed: {sentence}" for sentence in failures(results)]
    lines += [f"diverged: {sentence}" for sentence in collapses(results)]
    if results["missing"]:
        lines += ["", f"not finished: {missing(results)}; the same command goes on with them"]
    return "\n".join(lines)


def check_packages() -> None:
    """Fail early, and say what to install, where the packages of the report are missing."""
    style.check_packages("jinja2", "plotly.offline", "scipy.stats")


def render(results: dict[str, Any]) -> str:
    """The page as text."""
    item, names = noun(results), results["attention"]
    return style.page(
        "studies",
        {"points": lambda share: f"{100 * share:.2f}", "signed": signed, "listed": listed},
        results=results,
        verdict=results["verdict"],
        title=title(results),
        noun=item,
        class_token=class_token(results),
        about_data=about_data(results),
        missing=missing(results),
        failures=failures(results),
        collapses=collapses(results),
        on_cpu=any(run["device_kind"] == "cpu" for run in results["runs"]),
        colours=style.palette(names),
        confused={name: confused(results["confusion"][name], results["classes"]) for name in names},
        class_order=figures.by_accuracy(results) if names else [],
        page={
            "figures": figures.figures(results),
            "maps": results["maps"],
            "dial": results.get("dial"),
            "attention": names,
            "classes": [figures.short(name) for name in results["classes"]],
            "noun": item,
            "signs": {"below": style.NEGATIVE, "above": style.POSITIVE},
        },
        about_maps=about_maps(results) if results["maps"]["locality"] else [],
        about_error=about_error(results) if results["error"] else [],
        about_cost=about_cost(results) if results["scaling"] else [],
    )


def write(results: dict[str, Any], path: Path) -> None:
    """Write the page to `path`, whole or not at all."""
    write_atomically(path, render(results).encode(errors="replace"))  # names of folders may be no UTF-8


def write_pages(
    result: Mapping[str, Any], figures: Sequence[tuple[str, str]], folder: Path, views: Mapping[str, Sequence[str]]
) -> None:
    """Write page.html, and a page for each view with those of the `figures` (title, SVG) whose titles begin so."""
    shown = {name: [one for one in figures if one[0].startswith(tuple(starts))] for name, starts in views.items()}
    for name, own in {WHOLE: figures, **shown}.items():
        given = {"result": result, "figures": own, "view": "" if name == WHOLE else name, "pages": [WHOLE, *views]}
        filters = {"tag": lambda word: TAGS.get(word, "level")}
        text = style.page("studies", filters, "study.html.j2", plotly=False, **given)
        write_atomically(folder / f"{name}.html", text.encode())
