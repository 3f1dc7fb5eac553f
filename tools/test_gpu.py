"""Run the tests that need a GPU, a few at a time and each few in a process of its own, so that none spoils another.

    python -m tools.test_gpu                               # every file under tests/ with such tests; prints a table
    python -m tools.test_gpu tests/kernels --out gpu.json  # those of a folder, with a record: commit, machine, counts

Needs pytest, torch and Triton; no plugin of pytest is loaded. Exit status 1 where a test failed or a process died. The
record is written whenever a process ends, with the number of tests that are `left`: a run that is stopped keeps it.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

ENVIRONMENT = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONUNBUFFERED": "1"}
JOBS = max(1, min(15, (os.cpu_count() or 1) - 1))  # most of their time they compile, each on a core
NONE_FOUND = 5  # pytest's status for a file that only names the mark
BEFORE = Path(__file__).parent.parent / "benchmarks" / "results" / "gpu_tests.json"
PYTEST = (sys.executable, "-m", "pytest", "-m", "gpu", "-q", "-p", "no:cacheprovider")


@dataclass
class Outcome:
    """What became of the tests of one file."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0
    seconds: float = 0.0  # of all its processes together
    problems: dict[str, str] = field(default_factory=dict)  # test, or the process -> first line of what went wrong
    tests: dict[str, float] = field(default_factory=dict)  # seconds of each

    def add(self, other: Outcome) -> None:
        for name, value in vars(other).items():
            before = getattr(self, name)
            setattr(self, name, before | value if isinstance(value, dict) else before + value)


def files_of(places: list[Path]) -> list[Path]:
    found = (path for place in places for path in ([place] if place.is_file() else sorted(place.rglob("test_*.py"))))
    return [path for path in found if "mark.gpu" in path.read_text()]


def _pytest(*arguments: str, limit: float) -> subprocess.CompletedProcess[str]:
    command, environment = [*PYTEST, *arguments], {**os.environ, **ENVIRONMENT}
    try:
        return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=limit, check=False)
    except subprocess.TimeoutExpired:
        return subprocess.CompletedProcess(command, 124, "", f"not done after {limit:g} s")


def tests_of(path: Path, limit: float) -> tuple[list[str], str]:
    """The names of its tests as pytest gives them, and why there are none."""
    done = _pytest("--collect-only", str(path), "-o", "addopts=", limit=limit)
    found = [line.partition("::")[2] for line in done.stdout.splitlines() if not line.startswith("ERROR")]
    names = [f"{path}::{name}" for name in found if name]  # pytest's own begin at the root that it found
    return names, "" if names or done.returncode == NONE_FOUND else _last_line(done)


def _last_line(done: subprocess.CompletedProcess[str]) -> str:
    lines = [line.strip() for line in (done.stdout + "\n" + done.stderr).splitlines() if line.strip()]
    errors = [line[1:].strip() for line in lines if line.startswith("E ")]
    return f"exit status {done.returncode}: {(errors or lines or ['no word'])[-1]}"


def run(names: list[str], limit: float) -> Outcome:
    """These tests in one process."""
    start, outcome = time.monotonic(), Outcome()
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.xml"
        done = _pytest(f"--junitxml={report}", *names, limit=limit)
        cases = list(ElementTree.parse(report).iter("testcase")) if report.exists() else []
    for case in cases:
        outcome.tests[case.get("name", "?")] = float(case.get("time", 0.0))
        wrong = case.find("failure") if case.find("failure") is not None else case.find("error")
        if wrong is not None:
            outcome.failed += 1
            outcome.problems[case.get("name", "?")] = (wrong.get("message") or "").splitlines()[0]
        elif case.find("skipped") is not None:
            outcome.skipped += 1
        else:
            outcome.passed += 1
    if len(cases) < len(names):  # it died on the way
        outcome.failed += len(names) - len(cases)
        outcome.problems[f"process of {names[0]} and {len(names) - 1} more"] = _last_line(done)
    outcome.seconds = time.monotonic() - start
    return outcome


def run_all(
    files: list[Path], jobs: int, most: int, limit: float, heard: Callable[[dict[str, Outcome], int], None],
    expected: dict[str, float] | None = None,
) -> dict[str, Outcome]:  # fmt: skip
    """Outcomes by file: its tests go in turns to processes of at most `most` tests, `jobs` of these at a time, those
    that are `expected` to take longest first: file -> seconds of one of its tests.

    `heard` is given the outcomes so far and the number of tests that are left, whenever a process has ended.
    """
    outcomes: dict[str, Outcome] = defaultdict(Outcome)
    expected = expected or {}
    shares: list[tuple[str, list[str]]] = []
    with ThreadPoolExecutor(jobs) as pool:
        for path, (names, reason) in zip(files, pool.map(lambda path: tests_of(path, limit), files), strict=True):
            count = -(-len(names) // most)
            shares += [(str(path), names[i::count]) for i in range(count)]
            if reason:
                outcomes[str(path)].add(Outcome(failed=1, problems={"collection": reason}))
        shares.sort(key=lambda share: -expected.get(share[0], 0.0) * len(share[1]))
        left = sum(len(names) for _, names in shares)
        running = {pool.submit(run, names, limit): (path, len(names)) for path, names in shares}
        for done in as_completed(running):
            name, count = running[done]
            outcomes[name].add(done.result())
            left -= count
            heard(outcomes, left)
    return dict(sorted(outcomes.items()))


def seconds_before(record: Path) -> dict[str, float]:
    """Seconds of a test of each file, by the record of an earlier run; nothing where there is none."""
    if not record.exists():
        return {}
    files = json.loads(record.read_text())["files"]
    return {path: x["seconds"] / max(1, x["passed"] + x["failed"] + x["skipped"]) for path, x in files.items()}


def setting(places: list[Path], commit: str | None) -> dict[str, Any]:
    """What was run where; a copy of the tree on a borrowed machine is told its commit."""
    import torch

    try:
        import triton

        version = triton.__version__
    except ImportError:
        version = None
    here = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False).stdout.strip()
    return {
        "command": "python -m tools.test_gpu " + " ".join(map(str, places)),
        "commit": commit or os.environ.get("CUMULANT_COMMIT") or here or None,
        "machine": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.processor() or "no GPU",
        "cores": os.cpu_count(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": version,
    }


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("places", nargs="*", type=Path, default=[Path("tests")], help="files or folders")
    parser.add_argument("--out", type=Path, help="where to write the record, JSON")
    parser.add_argument("--commit", help="what the record calls this tree; by default what git says")
    parser.add_argument("--jobs", type=int, default=JOBS, help="processes at a time")
    parser.add_argument("--most", type=int, default=5, help="tests of a process")
    parser.add_argument("--limit", type=float, default=450, help="seconds of a process")
    options = parser.parse_args(arguments)
    start, about = time.monotonic(), setting(options.places, options.commit)

    def keep(outcomes: dict[str, Outcome], left: int) -> None:
        print(f"{time.monotonic() - start:.0f} s: {left} tests left", end="\n" if left == 0 else "\r", file=sys.stderr)
        if options.out is not None:
            files = {path: vars(outcome) for path, outcome in sorted(outcomes.items())}
            record = {**about, "seconds": time.monotonic() - start, "left": left, "files": files}
            options.out.write_text(json.dumps(record, indent=1) + "\n")

    files, expected = files_of(options.places), seconds_before(BEFORE)
    outcomes = run_all(files, options.jobs, options.most, options.limit, keep, expected)
    total = Outcome()
    for path, outcome in outcomes.items():
        total.add(outcome)
        _line(path, outcome)
    _line("all", total)
    for path, outcome in outcomes.items():
        for name, problem in outcome.problems.items():
            print(f"{path}: {name}: {problem}")
    print("slowest: " + ", ".join(f"{name} {spent:.0f} s" for spent, name in _slowest(outcomes)))
    print(f"{time.monotonic() - start:.0f} s")
    return int(total.failed > 0 or not outcomes)


def _slowest(outcomes: dict[str, Outcome], count: int = 5) -> list[tuple[float, str]]:
    """Of all tests those that took longest: where to begin if the suite takes too long."""
    return sorted(((spent, name) for x in outcomes.values() for name, spent in x.tests.items()), reverse=True)[:count]


def _line(name: str, outcome: Outcome) -> None:
    numbers = f"{outcome.passed:5d} passed {outcome.failed:4d} failed {outcome.skipped:4d} skipped"
    print(f"{name:44s} {numbers} {outcome.seconds:7.0f} s", flush=True)


if __name__ == "__main__":
    sys.exit(main())
