"""Everything that docs/performance.md shows of a GPU, in one run: its scripts one after the other, alone on the device.

    PYTHONPATH=src:. OUT=folder python benchmarks/gpu_all.py            about 4 minutes on an H200
    PYTHONPATH=src:. OUT=folder python benchmarks/gpu_all.py --tests    the GPU suite first, about 4 minutes more

Each script writes its JSON to $OUT as it goes, so a run that is stopped keeps what was measured. What only compiles or
checks runs side by side first; what is timed is alone. Copied to benchmarks/results, the page and its picture are made
by `python -m tools.pages` and `python -m tools.plot_gpu`.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
CHECKED = "gpu_called_right.json"  # which calls were found to be right
BEFORE = (["gpu_first_call.py", "--jobs", "6"],)  # compiles
CHECKS = (["gpu_called.py", "--check", "--verdicts", CHECKED], ["gpu_public.py"])
TIMED = (
    ["gpu_called.py", "--verdicts", CHECKED],
    ["gpu_dense.py", "--peers"],
    ["gpu_causal.py", "--quick"],
    ["gpu_host.py"],
    ["fold.py"],
    ["gpu_decode.py"],
)


def started(command: list[str], out: Path) -> tuple[list[str], subprocess.Popen[str]]:
    given = [str(out / x) if x == CHECKED else x for x in command[1:]]
    full = [sys.executable, str(HERE / command[0]), *given]
    return command, subprocess.Popen(full, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tests", action="store_true", help="the GPU suite first")
    parser.add_argument("--only", nargs="+", default=[], help="scripts, e.g. gpu_host.py")
    options = parser.parse_args()
    out = Path(os.environ["OUT"])
    begin, failed = time.monotonic(), 0

    def together(commands: tuple[list[str], ...]) -> None:
        nonlocal failed
        for command, process in [started(x, out) for x in commands if not options.only or x[0] in options.only]:
            said, _ = process.communicate()
            print(
                f"== [{time.monotonic() - begin:.0f} s] {' '.join(command)}: {process.returncode}\n{said}", flush=True
            )
            failed += process.returncode != 0

    if options.tests:
        suite = [sys.executable, "-m", "tools.test_gpu", "--jobs", "14", "--out", str(out / "gpu_tests.json")]
        failed += subprocess.run(suite, check=False).returncode != 0
    together(BEFORE)
    together(CHECKS)
    for command in TIMED:
        together((command,))
    print(f"[{time.monotonic() - begin:.0f} s] done, {failed} scripts failed")
    sys.exit(int(failed > 0))


if __name__ == "__main__":
    main()
