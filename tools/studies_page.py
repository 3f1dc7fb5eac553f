"""What the studies found, for docs/studies: `python -m tools.studies_page FOLDER`, then `python -m tools.pages`.

FOLDER is the --out of `cumulant study`, or FOLDER/heads for the orderings of the layers. Of each study in it the
results are kept as benchmarks/results/study_NAME.json, without the single runs, and its figures as
docs/figures/study-NAME-TITLE.svg (one alone: study-NAME.svg).
"""

from __future__ import annotations

import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cumulant.studies import minutes, rows
from cumulant.studies.heads import LAYERS
from cumulant.studies.statements import CONFIRMED, OPEN, REFUTED
from tools.pages import ROOT, table
from tools.tables import made

Result = Mapping[str, Any]
ELSEWHERE = {  # studies that train classifiers: where their pages are
    "cumulant-vit": "../results.md", "mechanisms": "../benchmarks.md",
}  # fmt: skip
MACHINES = ("two cores", "an H200")


def overview(results: Mapping[str, Result]) -> str:
    """A line a study: what is claimed, what became of its statements, how long the small setting takes."""
    lines = []
    for row in rows():
        found = results.get(f"study_{row['name']}")
        if row["name"] == "heads":
            own = [results[f"study_{layer}"] for layer in LAYERS if f"study_{layer}" in results]
            found = {"statements": [one for result in own for one in result["statements"]]} if own else None
        page = f"[{row['name']}]({ELSEWHERE.get(row['name'], row['name'] + '.md')})"
        times = [minutes(row["seconds"][place]) if place in row["seconds"] else "-" for place in MACHINES]
        lines.append(
            [page, row["summary"].replace("\n", " "), "see its page" if found is None else count(found), *times]
        )
    head = ["study", "what it tries", "confirmed / refuted / not told apart", *(f"on {place}" for place in MACHINES)]
    return table(head, lines)


def count(result: Result) -> str:
    """Of the statements, by verdict."""
    found = Counter(one["verdict"] for one in result["statements"])
    untested = f" ({left} not tested)" if (left := len(result["statements"]) - sum(found[v] for v in VERDICTS)) else ""
    return " / ".join(str(found[verdict]) for verdict in VERDICTS) + untested


VERDICTS = (CONFIRMED, REFUTED, OPEN)
LONG = 8  # rows; a longer table is folded


def block(result: Result) -> str:
    """Verdicts, tables and origin of one study."""
    runs = sum(one["runs"] for one in result["origins"])
    verdicts = f"{count(result)} statements confirmed / refuted / not told apart"
    said = f"{runs} runs, {result['settings']['seeds']} seeds; {verdicts}."
    if result["missing"]:
        said += f" No time was left for {len(result['missing'])} runs."
    parts = [said]
    refuted = [one for one in result["statements"] if one["verdict"] == REFUTED]
    if len(result["statements"]) <= LONG:
        parts.append(judged(result["statements"]))
    else:
        parts += ["Refuted:", judged(refuted)] if refuted else ["None is refuted."]
        parts.append(folded(f"All {len(result['statements'])} statements", judged(result["statements"])))
    for one in result["tables"]:
        cells: Sequence[Sequence[str]] = [[escaped(cell) for cell in line] for line in one["rows"]]
        shown = table([escaped(cell) for cell in one["head"]], cells)
        title = escaped(one["title"])
        parts.append(folded(title, shown) if len(cells) > LONG else f"**{title}**\n\n{shown}")
    return "\n\n".join([*parts, *(made(one) for one in result["origins"])])


def judged(statements: Sequence[Mapping[str, Any]]) -> str:
    head = ["verdict", "found (95 %)", "should be", "claim", "source"]
    lines = [[one["verdict"], one["found"], one["bounds"], told(one), one["source"]] for one in statements]
    return table(head, [[escaped(cell) for cell in line] for line in lines])


def folded(title: str, text: str) -> str:
    """Text below a line that opens it, on the site and on GitHub."""
    return f'<details markdown="1">\n<summary>{title}</summary>\n\n{text}\n\n</details>'


def told(one: Mapping[str, Any]) -> str:
    return f"{one['text']} ({one['why']})" if one["why"] else one["text"]


def escaped(cell: str) -> str:
    """A cell of a table in Markdown."""
    return cell.replace("|", "\\|").replace("<", "&lt;")


def take(folder: Path) -> list[str]:
    """Keep what lies in a folder of studies; the names of those that were there."""
    names = []
    for path in sorted(folder.glob("*/results.json")):
        result = json.loads(path.read_text(encoding="utf-8"))
        name = result["study"]
        kept = {key: value for key, value in result.items() if key not in ("runs", "provenance")}
        target = ROOT / "benchmarks" / "results" / f"study_{name}.json"
        target.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")
        figures = sorted((path.parent / "figures").glob("*.svg"))
        for figure in figures:
            own = f"study-{name}.svg" if len(figures) == 1 else f"study-{name}-{figure.name}"
            (ROOT / "docs" / "figures" / own).write_bytes(figure.read_bytes())
        names.append(name)
    return names


if __name__ == "__main__":
    print("\n".join(take(Path(sys.argv[1]))))
