"""`cumulant bench speed` and `cumulant bench efficiency` on a GPU machine that has not the packages of figures.

    PYTHONPATH=src python benchmarks/gpu_bench.py                both, JSON alone: $OUT/speed.json and efficiency.json
    PYTHONPATH=src python benchmarks/gpu_bench.py --minutes 1    efficiency begins no further length after a minute
    PYTHONPATH=src python benchmarks/gpu_bench.py --minutes 0    speed alone

They measure what the commands measure. Copied to benchmarks/results/gpu_speed.json and zoo_efficiency.json, the pages
are made from them (`python -m tools.pages`).
"""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from unittest import mock

from cumulant.bench import efficiency, report, speed
from cumulant.bench.command import Efficiency, Speed


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, help="of efficiency, after which no further length is begun")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--lengths", nargs="*", type=int, default=[], help="of both; by default those of the commands")
    parser.add_argument("--out", type=Path, default=Path(os.environ.get("OUT", "runs/bench")))
    options = parser.parse_args()
    out = options.out
    out.mkdir(parents=True, exist_ok=True)
    lengths = {"lengths": tuple(options.lengths)} if options.lengths else {}
    with mock.patch.object(speed, "new_figure"), mock.patch.object(speed, "plot"):
        speed.run(Speed(device=options.device, out=out, **lengths), progress=lambda text: print(text, flush=True))
    if options.minutes == 0:
        return
    settings = Efficiency(device=options.device, out=out, time_limit=0.1, minutes=options.minutes, **lengths)
    found = efficiency.run(settings, lambda text: print(text, flush=True), minutes=options.minutes)
    report.record(found, settings)


if __name__ == "__main__":
    main()
