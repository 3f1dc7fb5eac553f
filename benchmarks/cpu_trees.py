"""Cumulant attention on a CPU in several trees of this repository: processor time of a call, on a busy machine too.

    git worktree add ../before COMMIT
    python benchmarks/cpu_trees.py before=../before/src now=src      # table, and benchmarks/results/cpu_trees.json

Float32, 12 heads of width 64, one thread. Each tree has a process of its own; they are asked in turn, several times,
and the least processor time of a call counts, so that what else the machine does falls on all of them or on none.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

H, D, ROUNDS, SECONDS = 12, 64, 4, 0.15
DENSE = ("order 2", "order 3", "step of order 2", "step of order 3")
WAYS = (*DENSE, "64 clusters, near 2", "step of 64 clusters, near 2")
CASES = [(length, way) for length in (256, 1024, 4096, 16384) for way in WAYS if length > 256 or "clusters" not in way]
RESULTS = Path(__file__).parent / "results" / "cpu_trees.json"


def serve() -> None:
    """Answer each line [length, way] with the least milliseconds of processor time of a call."""
    import torch

    import cumulant

    torch.set_num_threads(1)
    for line in sys.stdin:
        length, way = json.loads(line)
        torch.manual_seed(length)
        stepping = way.startswith("step")
        tokens = [(torch.randn(1, H, length, D) + 0.5).requires_grad_(stepping) for _ in range(3)]
        grad, few = torch.ones(1, H, length, D), 2 if "clusters" in way else 4
        least, calls, end = float("inf"), 0, time.perf_counter() + SECONDS
        with torch.set_grad_enabled(stepping):
            while time.perf_counter() < end or calls < few:
                start = time.process_time()
                if "clusters" in way:
                    out = cumulant.cluster_attention(*tokens, clusters=64, near=2)
                else:
                    out = cumulant.attention(*tokens, order=int(way[-1]))
                if stepping:
                    torch.autograd.grad(out, tokens, grad)
                calls, least = calls + 1, min(least, time.process_time() - start)
        print(json.dumps(1e3 * least), flush=True)


def started(source: str) -> subprocess.Popen[str]:
    settings = {**os.environ, "PYTHONPATH": str(Path(source).resolve()), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, __file__, "--serve"]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=settings)


def asked(process: subprocess.Popen[str], case: tuple[int, str]) -> float:
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write(json.dumps(case) + "\n")
    process.stdin.flush()
    return float(json.loads(process.stdout.readline()))


def commit(source: str) -> str:
    command = ["git", "-C", source, "rev-parse", "--short", "HEAD"]
    return subprocess.run(command, capture_output=True, text=True).stdout.strip()


def main() -> None:
    from cumulant.bench.provenance import provenance

    trees = dict(one.split("=", 1) for one in sys.argv[1:]) or {"now": "src"}
    processes = {name: started(source) for name, source in trees.items()}
    rows: list[dict[str, Any]] = []
    for length, way in CASES:
        times: dict[str, list[float]] = {name: [] for name in processes}
        for _ in range(ROUNDS):
            for name, one in processes.items():
                times[name].append(asked(one, (length, way)))
        least = {name: min(each) for name, each in times.items()}
        rows.append({"L": length, "way": way, "ms": least})
        print(f"{length:>6} {way:28}" + "  ".join(f"{name} {ms:8.2f}" for name, ms in least.items()), flush=True)
    for one in processes.values():
        assert one.stdin is not None
        one.stdin.close()
        one.wait()
    commits = {name: commit(source) for name, source in trees.items()}
    record = {"setting": f"float32, {H} heads of {D}, one thread, processor time", "commits": commits, "rows": rows}
    known = provenance("python benchmarks/cpu_trees.py " + " ".join(f"{name}=SOURCE" for name in trees))
    RESULTS.write_text(json.dumps({**known, **record}, indent=1) + "\n")


if __name__ == "__main__":
    serve() if "--serve" in sys.argv else main()
