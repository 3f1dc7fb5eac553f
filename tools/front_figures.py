"""Figures of the first pages, from records: `python -m tools.pages` draws them.

cpu_time.svg: milliseconds of a call against tokens on two cores (cpu.json). swap.svg: accuracy of a trained model after
its softmax was replaced and nothing trained (class_tokens_digits.json). real-cache.svg: perplexity of a language model
against the memory of its cache (smollm2_cache.json). real-captured.svg: squared error of attention on tensors of real
models against its speed (captured_qkv.json).
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from cumulant.style import COLOURS, INK, SOFT, new_figure, save, styled

GOAL = 6, 0.05  # of issue 22: times as fast as cuDNN, squared error
WINDOWS = "window", "parts", "recent"  # names of controls
MODELS = {
    "sam2": ("SAM 2", "cumulant3", "s"),
    "lightglue": ("LightGlue", "cumulant2", "o"),
    "smollm2": ("SmolLM2", "linear", "^"),
}


@styled
def cpu_time(cpu: Any, out: Path) -> None:
    figure, ((axis,),) = new_figure(1, 1, (6.4, 3.4))
    lines = [("softmax", 2, "softmax_over_ours", "s"), ("cumulant2", 2, "over_products", "o")]
    for name, order, key, marker in [*lines, ("cumulant3", 3, "over_products", "^")]:
        rows = [(row["L"], row[key]["ms"]) for row in cpu["speed"] if row["order"] == order]
        axis.plot(*zip(*rows, strict=True), marker=marker, markersize=4, color=COLOURS[name], label=name)
    axis.set(xscale="log", yscale="log", xlabel="tokens in a sequence", ylabel="milliseconds a call")
    axis.grid(alpha=0.3, which="major")
    axis.legend(frameon=False)
    save(figure, out, ("svg",))


@styled
def swap(found: Any, out: Path) -> None:
    figure, ((axis,),) = new_figure(1, 1, (6.4, 3.0))
    names = list(dict.fromkeys(row["attention"].partition("+apart")[0] for row in found["rows"]))
    for place, name in enumerate(names):
        for text, shift, strength in (("", 0.0, 1.0), ("+apart=0", 0.2, 0.45), ("+apart=1", -0.2, 1.0)):
            runs = [100 * row["top1"] for row in found["rows"] if row["attention"] == name + text]
            if runs:
                colour = COLOURS[name.partition("+")[0]]
                axis.barh(place + shift, mean(runs), 0.36, color=colour, alpha=strength)
                axis.plot(runs, [place + shift] * len(runs), "|", color="black")
                axis.text(101, place + shift, f"{mean(runs):.1f}", va="center", fontsize=8)
    axis.set_yticks(range(len(names)), names)
    axis.invert_yaxis()
    axis.set(xlim=(50, 107), xticks=range(50, 101, 10))
    axis.set_xlabel("top-1 of the digits, %; pale: class token as the patches")
    save(figure, out, ("svg",))


@styled
def cache(found: Any, out: Path) -> None:
    figure, ((axis,),) = new_figure(1, 1, (6.4, 3.2))
    rows = found["moby-dick"]
    for kind, label, colour, marker in (
        ("window", "the last tokens and 4 sinks", SOFT, "s"), ("merged", "merged", COLOURS["cumulant3"], "o"),
    ):  # fmt: skip
        shown = [row for name, row in rows.items() if name.startswith(kind)]
        points = sorted((100 * row["memory"], 100 * row["above"], 100 * row["above_error"]) for row in shown)
        x, y, error = zip(*points, strict=True)
        axis.errorbar(x, y, error, marker=marker, markersize=5, capsize=3, color=colour, label=label)
        for at, height in zip(x, y, strict=True):
            offset, side = ((8, 5), "left") if kind == "window" else ((-4, -13), "right")
            axis.annotate(
                f"+{height:.1f} %", (at, height), offset, textcoords="offset points", ha=side, color=colour, fontsize=8
            )
    axis.set(xscale="log", xlim=(5, 34), ylim=(0, 7.4), ylabel="perplexity above the whole cache, %")
    axis.set_xticks([6.25, 12.5, 25], ["1/16", "1/8", "1/4"])
    axis.minorticks_off()
    axis.set_xlabel("memory of the cache at 8,192 tokens, of the whole")
    axis.grid(alpha=0.3, which="major")
    axis.legend()
    save(figure, out, ("svg",))


@styled
def captured(record: Any, out: Path) -> None:
    """Clusters are filled marks with standard errors, second order hollow ones; windows are left to the table."""
    figure, ((axis,),) = new_figure(1, 1, (6.4, 3.6))
    for model, (label, colour, marker) in MODELS.items():
        for second in (False, True):
            rows = [row for row in record["found"][model] if not row["name"].startswith(WINDOWS)]
            rows = [row for row in rows if (row["name"] == "cumulant2") == second]
            axis.errorbar(
                [row["softmax"] / row["seconds"] for row in rows], [row["squared_error"] for row in rows],
                [row["standard_error"] for row in rows], fmt=marker, elinewidth=0.7, color=COLOURS[colour],
                markersize=5, fillstyle="none" if second else "full",
                label=f"{label}, second order" if second else label,
            )  # fmt: skip
    fast, close = GOAL
    axis.set(xscale="log", yscale="log", xlim=(0.13, 40), ylim=(5e-4, 9e2), xlabel="times as fast as cuDNN's softmax")
    axis.set_ylabel("squared error")
    axis.fill_between([fast, 40], [5e-4, 5e-4], [close, close], color=COLOURS["cumulant2"], alpha=0.15, linewidth=0)
    axis.text(40, close / 1.4, "the goal ", ha="right", va="top", color=INK, fontsize=8)
    axis.set_xticks([0.2, 0.5, 1, 2, 5, 10, 20], ["0.2", "0.5", "1", "2", "5", "10", "20"])
    axis.minorticks_off()
    axis.grid(alpha=0.3, which="major")
    axis.legend(loc="upper left", fontsize=7.5)
    save(figure, out, ("svg",))


FIGURES = {  # a file: its record, and what draws it
    "cpu_time.svg": ("cpu", cpu_time),
    "swap.svg": ("class_tokens_digits", swap),
    "real-cache.svg": ("smollm2_cache", cache),
    "real-captured.svg": ("captured_qkv", captured),
}
