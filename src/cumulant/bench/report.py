"""Results of the bench on disk: a JSON file each, figures, and one self-contained page of all that is in the folder."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cumulant import style
from cumulant.bench import cab, plots
from cumulant.bench.command import Measure
from cumulant.bench.provenance import provenance, read_result
from cumulant.command import command_line
from cumulant.train.files import claim_room, write_atomically

KEYS = {  # without which a result can be neither drawn nor told
    "error": ("variants", "cases", "groups", "left_out"),
    "efficiency": ("rows", "crossings", "checks", "setting", "given_up", "left_out"),
    "train": ("ranking", "control", "claims", "runs", "failed"),
    "cab": ("rows", "index", "correlation", "support", "setting", "failed"),
}
PLOTS: dict[str, Callable[[dict[str, Any], Path], None]] = {
    "error": plots.pareto,
    "efficiency": plots.efficiency,
    "train": plots.training,
    "cab": plots.uses,
}
NOT_SAID = ("out", "json", "fresh", "minutes")  # they do not change the numbers


def prepare(out: Path) -> None:
    """Fail before minutes of measuring: packages of figures and page are missing, nothing can be written, or an earlier
    result in the folder is damaged."""
    style.check_packages("jinja2", "matplotlib", "plotly.offline")
    claim_room(out, 0)
    if any((out / f"{name}.json").is_file() for name in PLOTS):
        read(out)  # the page shows them beside the new result


def command(settings: Measure) -> str:
    """The command line that gives these results."""
    return command_line(f"bench {settings.what}", settings, NOT_SAID)


def publish(result: dict[str, Any], settings: Measure) -> dict[str, Any]:
    """Write NAME.json, NAME.svg, NAME.png and report.html into settings.out; the result with its provenance."""
    result = record(result, settings)
    redraw(settings.out, result["bench"])
    return result


def record(result: dict[str, Any], settings: Measure) -> dict[str, Any]:
    """Write NAME.json alone, for machines without the packages of figures and page; see `redraw`."""
    result = {**result, **provenance(command(settings))}
    device = result.get("setting", {}).get("device") or next(
        (r["device"] for r in result.get("runs", ()) if "device" in r), ""
    )
    if device == "cuda" and torch.cuda.is_available():  # records of a GPU may be put together elsewhere
        result["machine"]["gpu"] = torch.cuda.get_device_name()
    path = settings.out / f"{result['bench']}.json"
    write_atomically(path, (json.dumps(result, indent=1, allow_nan=False) + "\n").encode())
    return result


def redraw(out: Path, *names: str) -> None:
    """Figures (of all results in the folder unless named) and report.html, e.g. of JSON that another machine wrote."""
    results = read(out)
    for name in names or results:
        PLOTS[name](results[name], out / name)
    write_atomically(out / "report.html", render(results).encode())


def read(out: Path) -> dict[str, dict[str, Any]]:
    """The results in a folder by name: error, efficiency, train, cab."""
    paths = {name: out / f"{name}.json" for name in PLOTS}
    found = {name: read_result(path, *KEYS[name]) for name, path in paths.items() if path.is_file()}
    if not found:
        raise FileNotFoundError(f"there are no results in {out}: it must hold {', '.join(f'{n}.json' for n in PLOTS)}")
    return found


def render(results: dict[str, dict[str, Any]]) -> str:
    """The page as text."""
    return style.page(
        "bench",
        {
            "by_work": lambda rows: sorted(rows, key=lambda row: row.get("total", float("inf"))),
            "crossing": cab.crossing_text,
        },
        results=results,
        panels=plots.panels(results["error"]) if "error" in results else [],
        phases=cab.PHASES,
        opponents=tuple(cab.OPPONENTS),
        colour=style.colour,
        page=plots.figures(results),
    )
