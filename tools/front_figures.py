"""Figures of the first pages, from records: `python -m tools.pages` draws them.

cpu_time.svg: milliseconds of a call against tokens on two cores (cpu.json). swap.svg: accuracy of a trained model after
its softmax was replaced and nothing trained (class_tokens_digits.json).
"""

from __future__ import annotations

from pathlib import Path
from statistics import mean
from typing import Any

from cumulant.style import COLOURS, new_figure, save, styled


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
