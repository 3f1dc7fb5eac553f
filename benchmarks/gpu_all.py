"""Everything that docs/performance.md and docs/lab/speed.md show of a GPU, in one run, alone on the device.

    PYTHONPATH=src:. OUT=folder python benchmarks/gpu_all.py            about 5 minutes on an H200
    PYTHONPATH=src:. OUT=folder python benchmarks/gpu_all.py --tests    with the GPU suite, about 10 minutes
    PYTHONPATH=src:. OUT=folder python benchmarks/gpu_all.py --seconds 420   begins nothing new after so long
    PYTHONPATH=src:. OUT=folder python benchmarks/gpu_all.py --without gpu_bench fold

First what is not timed, side by side: the suite, and the checks of the scripts, which also compile; what they find
wrong is not timed. Then the times, one after the other, the most important first, each part with a limit of its own
(`PARTS`). Each writes the JSON that its script writes, to $OUT, as it goes: a run that is stopped keeps what was
measured. Copied to benchmarks/results, `python -m tools.pages` makes page and picture.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# The calls that have goals, and what stands beside them, in order of weight.
CASES = (
    "cluster", "order 2, 64", "order 3, 64", "long", "grid 64k", "4k", "grid 4k", "masked", "causal 64", "blocks",
    "kmeans", "far only", "kmeans, B 8", "order 2, 16k", "order 3, 16k", "causal 2, 16k", "causal 3, 16k",
    "grid 64k, 256", "kmeans near", "kmeans near, B 8", "causal", "order 2, 197", "grouped", "prefix", "causal near",
    "short", "causal means", "causal sinks",
)  # fmt: skip
PROFILED = (  # steps whose kernels are timed one by one: those that fell short
    "cluster", "long", "grid 64k", "grid 4k", "masked", "causal 64", "kmeans", "short", "order 3, 16k", "causal 2, 16k",
    "causal 3, 16k",
)  # fmt: skip
CHECKS = {
    "gpu_called": ["gpu_called.py", "--check", "--workers", "6", "--verdicts", "RIGHT", "--only", *CASES],
    "gpu_public": ["gpu_public.py"],
    "gpu_dense": ["-c", "import sys, gpu_dense; sys.exit(not gpu_dense.check(quick=True))"],
    "gpu_causal": ["-c", "import sys, gpu_causal; sys.exit(not gpu_causal.check(quick=True))"],
    "fold": ["-c", "import fold; fold.check()"],
    "gpu_decode": ["-c", "import gpu_decode; gpu_decode.check()"],
    "gpu_bench": [
        "gpu_bench.py",
        "--minutes",
        "0",
        "--out",
        "WARM",
    ],  # compiles what torch compiles; refuses what is off
}
CHECKING = 340.0  # seconds of all checks together, which leave cores to the suite first
TESTING = 340.0  # seconds of the suite
# Parts in their order, with the seconds that each may take; those that follow are then still made.
PARTS = {
    "called": 130, "gpu_dense": 40, "gpu_host": 30, "fold": 25, "profiles": 50, "gpu_bench": 60, "gpu_first_call": 45,
    "gpu_decode": 15, "gpu_causal": 15,
}  # fmt: skip


def command_of(out: Path, given: list[str]) -> list[str]:
    places = {"RIGHT": str(out / "gpu_called_right.json"), "WARM": str(out / "warm")}
    given = [places.get(x, x) for x in given]
    return [sys.executable, *(given if given[0] == "-c" else [str(HERE / given[0]), *given[1:]])]


def environment() -> dict[str, str]:
    return {
        **os.environ,
        "TORCHINDUCTOR_COMPILE_THREADS": "2",
        "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")]),
    }


def _end(process: subprocess.Popen[bytes]) -> None:
    """With the processes that it has started: they would run on beside what is timed."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def checked(out: Path, begin: float, tests: bool, without: Sequence[str] = ()) -> dict[str, bool]:
    """Whether each check went well; all side by side, and the suite with them."""
    suite = None
    if tests:
        command = [sys.executable, "-m", "tools.test_gpu", "--limit", "240"]
        suite = subprocess.Popen([*command, "--out", str(out / "gpu_tests.json")], start_new_session=True)
    logs = {name: out / f"check_{name}.log" for name in CHECKS}
    running, fine = {}, {}
    for name, given in CHECKS.items():
        if name in without:
            continue
        with logs[name].open("w") as log:
            running[name] = subprocess.Popen(
                ["nice", "-n", "10", *command_of(out, given)],
                env=environment(),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
    for name, process in running.items():
        try:
            fine[name] = process.wait(max(1.0, CHECKING + begin - time.monotonic())) == 0
        except subprocess.TimeoutExpired:
            _end(process)
            fine[name] = False
        said = f"== [{time.monotonic() - begin:.0f} s] check of {name}: {process.poll()}"
        print(f"{said}\n{logs[name].read_text()[-3000:]}", flush=True)
        logs[name].unlink()
    if suite is not None:
        try:
            suite.wait(max(1.0, TESTING + begin - time.monotonic()))
        except subprocess.TimeoutExpired:  # its record says how many tests are left
            _end(suite)
        print(f"== [{time.monotonic() - begin:.0f} s] suite: {suite.returncode}", flush=True)
    shutil.rmtree(out / "warm", ignore_errors=True)
    return fine | {"gpu_bench": True}  # it looks again at what it times


def measure(out: Path, fine: dict[str, bool], begin: float, end: float, without: Sequence[str] = ()) -> int:
    """Times of everything that is right; how many parts failed."""
    import fold
    import gpu_called
    import gpu_causal
    import gpu_decode
    import gpu_dense
    import gpu_host

    from cumulant.bench.provenance import provenance

    gpu_dense.REP = fold.REP = 20

    def keep(name: str, command: str, found: dict[str, Any]) -> None:
        record = provenance(f"python benchmarks/gpu_all.py ({command})", gpu=True) | found
        (out / f"{name}.json").write_text(json.dumps(record, indent=1, default=str))

    def called() -> None:
        right = json.loads((out / "gpu_called_right.json").read_text())["right"]
        wrong = [name for name, well in right.items() if not well]
        rows: dict[str, Any] = {}
        peers: dict[Any, dict[str, float]] = {}
        for name in CASES:
            if right.get(name):
                case = gpu_called.CASES[name]
                rows[name] = gpu_called.measure(case, peers) | {"goal": case.goal}
                print(gpu_called.line(name, rows[name], case.goal), f"[{time.monotonic() - begin:.0f} s]", flush=True)
                found = {"cases": rows, "wrong": wrong, "called": gpu_called.FROM_PYTHON}
                keep("gpu_called", "gpu_called.py", found)

    def dense() -> None:
        speed, rows = gpu_dense.bandwidth(), []
        for L in (197, 16384, 1568, 64, 577, 4096, 65536):
            for order in (2, 3):
                rows.append(gpu_dense.measure(L, order, speed, peers=True))
                gpu_dense.show(rows[-1:])
            rows.sort(key=lambda row: (row["L"], row["order"]))
            keep("gpu_dense", "gpu_dense.py --peers", {"copy_bytes_per_second": speed, "rows": rows})

    def causal() -> None:
        speed = gpu_dense.bandwidth()
        rows = [gpu_causal.measure(16384, order, speed) for order in (2, 3)]
        for row in rows:
            gpu_causal.show(row)
        keep("gpu_causal", "gpu_causal.py --quick", {"copy_bytes_per_second": speed, "rows": rows})

    def profiles() -> None:
        found = {}
        for name in PROFILED:
            found[name] = gpu_called.profile(gpu_called.CASES[name])
            keep("gpu_profile", "gpu_called.py --profile", {"cases": found})

    def script(*given: str) -> None:
        subprocess.run(command_of(out, list(given)), env=environment(), check=True)

    def bench() -> None:
        try:
            script("gpu_bench.py", "--minutes", "0.4")
        finally:  # as the page names them
            for name, kept in (("speed", "gpu_speed"), ("efficiency", "zoo_efficiency")):
                if (out / f"{name}.json").exists():
                    (out / f"{name}.json").rename(out / f"{kept}.json")

    runs: dict[str, Callable[[], None]] = {
        "gpu_dense": dense,
        "fold": lambda: keep("fold-cuda", "fold.py", {"dtype": str(fold.DTYPE), "rows": fold.measure(1568)}),
        "gpu_decode": lambda: keep("gpu_decode", "gpu_decode.py", {"orders": gpu_decode.measure()}),
        "called": called,
        "profiles": profiles,
        "gpu_bench": bench,
        "gpu_causal": causal,
        "gpu_host": lambda: keep("gpu_host", "gpu_host.py", gpu_host.measure(["repeated"])),
        "gpu_first_call": lambda: script("gpu_first_call.py"),
    }
    parts = [name for name in PARTS if name not in without]
    return sum(not _part(name, runs[name], fine.get(name, True), begin, end) for name in parts)


def _part(name: str, run: Callable[[], None], right: bool, begin: float, end: float) -> bool:
    """One part, with its limit of time; whether it is whole."""
    import torch

    left = end - (time.monotonic() - begin)
    if not right or left < 5:
        print(f"== {name}: {'no time left' if right else 'wrong, no time'}", flush=True)
        return False

    def late(*_: Any) -> None:
        raise TimeoutError(f"not done in {PARTS[name]} s")

    usual = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, min(PARTS[name], left))
    whole = True
    try:
        run()
    except Exception as problem:  # the other parts are worth having
        whole = False
        print(f"== {name}: {type(problem).__name__}: {problem}", flush=True)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, usual)
    torch.cuda.empty_cache()
    print(f"== [{time.monotonic() - begin:.0f} s] {name}", flush=True)
    return whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", action="store_true", help="the GPU suite too")
    parser.add_argument("--seconds", type=float, default=1e9, help="after which nothing new is begun")
    parser.add_argument("--without", nargs="+", choices={**PARTS, **CHECKS}, default=[], help="parts to leave out")
    options = parser.parse_args()
    out, begin = Path(os.environ["OUT"]), time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(HERE))
    fine = checked(out, begin, options.tests, options.without)
    failed = measure(out, fine, begin, options.seconds, options.without) + sum(not well for well in fine.values())
    print(f"[{time.monotonic() - begin:.0f} s] done, {failed} parts failed")
    sys.exit(int(failed > 0))


if __name__ == "__main__":
    main()
