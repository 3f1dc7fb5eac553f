"""Everything that docs/performance.md shows of a GPU, in one run, alone on the device.

    PYTHONPATH=src:. OUT=folder python benchmarks/gpu_all.py            about 150 s on an H200
    PYTHONPATH=src:. OUT=folder python benchmarks/gpu_all.py --tests    the GPU suite first, about 4 minutes more

First the checks of the scripts, side by side, which also compile; what they find wrong is not timed. Then the times, in
one process, the most important first. Each part writes the JSON that its script writes, to $OUT, as soon as it is done:
a run that is stopped keeps what was measured. Copied to benchmarks/results, `python -m tools.pages` makes page and
picture.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
# The calls that have goals, and what stands beside them, in order of weight.
CASES = (
    "cluster", "order 2, 64", "order 3, 64", "long", "grid 64k", "4k", "grid 4k", "masked", "causal 64", "blocks",
    "kmeans", "order 2, 16k", "order 3, 16k", "causal 2, 16k", "causal 3, 16k", "causal", "order 2, 197", "grouped",
    "prefix", "short", "far only", "causal means",
)  # fmt: skip
PROFILED = (  # steps whose kernels are timed one by one: those that fell short
    "cluster", "long", "grid 64k", "grid 4k", "masked", "causal 64", "kmeans", "short", "order 3, 16k", "causal 2, 16k",
    "causal 3, 16k",
)  # fmt: skip
CHECKS = {
    "gpu_called": ["gpu_called.py", "--check", "--workers", "6", "--verdicts", "RIGHT"],
    "gpu_first_call": ["gpu_first_call.py"],
    "gpu_public": ["gpu_public.py"],
    "gpu_dense": ["-c", "import sys, gpu_dense; sys.exit(not gpu_dense.check(quick=True))"],
    "gpu_causal": ["-c", "import sys, gpu_causal; sys.exit(not gpu_causal.check(quick=True))"],
    "fold": ["-c", "import fold; fold.check()"],
    "gpu_decode": ["-c", "import gpu_decode; gpu_decode.check()"],
}


def checked(out: Path, begin: float) -> dict[str, bool]:
    """Whether each check went well; all side by side."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(HERE), os.environ.get("PYTHONPATH", "")])}
    running = {}
    for name, command in CHECKS.items():
        given = [str(out / "gpu_called_right.json") if x == "RIGHT" else x for x in command]
        given = given if given[0] == "-c" else [str(HERE / given[0]), *given[1:]]
        running[name] = subprocess.Popen(
            [sys.executable, *given], env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
        )
    fine = {}
    for name, process in running.items():
        said, _ = process.communicate()
        fine[name] = process.returncode == 0
        print(f"== [{time.monotonic() - begin:.0f} s] check of {name}: {process.returncode}\n{said}", flush=True)
    return fine


def measure(out: Path, fine: dict[str, bool], begin: float) -> int:
    """Times of everything that is right; how many parts failed."""
    import fold
    import gpu_called
    import gpu_causal
    import gpu_decode
    import gpu_dense
    import gpu_host
    import torch

    from cumulant.bench.provenance import provenance

    gpu_dense.REP = fold.REP = 20
    failed = 0

    def keep(name: str, command: str, found: dict[str, Any]) -> None:
        record = provenance(f"python benchmarks/gpu_all.py ({command})", gpu=True) | found
        (out / f"{name}.json").write_text(json.dumps(record, indent=1, default=str))

    def part(name: str, run: Callable[[], None]) -> None:
        nonlocal failed
        if not fine.get(name, True):
            print(f"== {name}: wrong, no time", flush=True)
            return
        try:
            run()
        except Exception as problem:  # the other parts are worth having
            failed += 1
            print(f"== {name}: {type(problem).__name__}: {problem}", flush=True)
        torch.cuda.empty_cache()
        print(f"== [{time.monotonic() - begin:.0f} s] {name}", flush=True)

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
                keep("gpu_called", "gpu_called.py", {"cases": rows, "wrong": wrong})

    def dense() -> None:
        speed, rows = gpu_dense.bandwidth(), []
        for L in (64, 197, 577, 1568, 4096, 16384, 65536):
            for order in (2, 3):
                rows.append(gpu_dense.measure(L, order, speed, peers=True))
                gpu_dense.show(rows[-1:])
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

    part("called", called)
    part("gpu_host", lambda: keep("gpu_host", "gpu_host.py", gpu_host.measure(["repeated"])))
    part("gpu_dense", dense)
    part("gpu_causal", causal)
    part("fold", lambda: keep("fold-cuda", "fold.py", {"dtype": str(fold.DTYPE), "rows": fold.measure(1568)}))
    part("gpu_decode", lambda: keep("gpu_decode", "gpu_decode.py", {"orders": gpu_decode.measure()}))
    part("profiles", profiles)
    return failed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", action="store_true", help="the GPU suite first")
    options = parser.parse_args()
    out, begin = Path(os.environ["OUT"]), time.monotonic()
    out.mkdir(parents=True, exist_ok=True)
    sys.path.insert(0, str(HERE))
    if options.tests:
        suite = [sys.executable, "-m", "tools.test_gpu", "--jobs", "14", "--out", str(out / "gpu_tests.json")]
        subprocess.run(suite, check=False)
    fine = checked(out, begin)
    failed = measure(out, fine, begin) + sum(not well for well in fine.values())
    print(f"[{time.monotonic() - begin:.0f} s] done, {failed} parts failed")
    sys.exit(int(failed > 0))


if __name__ == "__main__":
    main()
