"""Records of single runs, kept in the repository so that any machine goes on with them.

`python -m tools.records put FOLDER` lays them out as `cumulant study` and `cumulant bench cab` find them with --out
FOLDER (those of a layer's ordering below FOLDER/heads); `python -m tools.records take FOLDER` (or FILE, as
`tools.visit` writes it) keeps what was made there. One file a study, benchmarks/results/records/NAME.json, one line a
run; what many runs share is written once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cumulant.studies.heads import LAYERS
from cumulant.train.files import read_json, write_atomically

KEPT = Path(__file__).parents[1] / "benchmarks" / "results" / "records"
SHARED = ("provenance", "settings", "about")  # parts of a record that most runs of a visit have in common
Records = dict[str, dict[str, Any]]  # by the name of their file


def found(folder: Path) -> dict[str, Records]:
    """The records below a folder of studies, by study."""
    every: dict[str, Records] = {}
    for path in sorted([*folder.glob("*/records/*.json"), *folder.glob("heads/*/records/*.json")]):
        every.setdefault(path.parts[-3], {})[path.stem] = read_json(path)
    return every


def packed(records: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Records with what they share written once."""
    shared: list[Any] = []
    lines: Records = {}
    for name, record in sorted(records.items()):
        line = dict(record)
        for key in SHARED:
            if key in line:
                if line[key] not in shared:
                    shared.append(line[key])
                line[key] = shared.index(line[key])
        lines[name] = line
    return {"shared": shared, "records": lines}


def unpacked(content: Mapping[str, Any]) -> Records:
    """The records that `packed` was given."""
    shared = content["shared"]
    return {
        name: {key: shared[value] if key in SHARED else value for key, value in line.items()}
        for name, line in content["records"].items()
    }


def kept(folder: Path = KEPT) -> dict[str, Records]:
    """What the repository holds, by study."""
    return {path.stem: unpacked(read_json(path)) for path in sorted(folder.glob("*.json"))}


def put(folder: Path, kept_in: Path = KEPT) -> int:
    """Lay the kept records out below a folder; one that is there already stays. How many are new there."""
    count = 0
    for study, records in kept(kept_in).items():
        for name, record in records.items():
            path = folder / ("heads" if study in LAYERS else "") / study / "records" / f"{name}.json"
            if not path.exists():
                write_atomically(path, json.dumps(record, allow_nan=False).encode())
                count += 1
    return count


def take(place: Path, kept_in: Path = KEPT) -> dict[str, int]:
    """Keep the records of a folder, or of a file with several studies; how many are new or others, by study."""
    given = found(place) if place.is_dir() else {name: unpacked(one) for name, one in read_json(place).items()}
    before, counts = kept(kept_in), {}
    for study, records in given.items():
        old = before.get(study, {})
        new = {name: one for name, one in records.items() if old.get(name) != one}
        counts[study] = len(new)
        if new:
            write_atomically(kept_in / f"{study}.json", lines(packed(old | new)).encode())
    return counts


def lines(content: Mapping[str, Any]) -> str:
    """As JSON with one line a run, so that a change of one is a change of one line."""
    rows = [f" {json.dumps(name)}: {json.dumps(one, allow_nan=False)}" for name, one in content["records"].items()]
    shared = [f" {json.dumps(one, allow_nan=False)}" for one in content["shared"]]
    return '{"shared": [\n' + ",\n".join(shared) + '\n], "records": {\n' + ",\n".join(rows) + "\n}}\n"


def main() -> None:
    if len(sys.argv) != 3 or sys.argv[1] not in ("put", "take"):
        raise SystemExit("give `put FOLDER` or `take FOLDER|FILE`")
    place = Path(sys.argv[2])
    if sys.argv[1] == "put":
        print(f"{put(place)} records laid out in {place}")
    else:
        for study, count in take(place).items():
            print(f"{study}: {count} new")


if __name__ == "__main__":
    main()
