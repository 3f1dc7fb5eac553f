"""How long the first call in a fresh process takes, with an empty cache of Triton and with a full one.

    PYTHONPATH=src python benchmarks/gpu_first_call.py
    PYTHONPATH=src python benchmarks/gpu_first_call.py --only cluster      those whose name has this in it

Each call is made in a process of its own, calls side by side: seconds of its first forward and backward pass, after the
imports and a first kernel of torch, once with an empty cache and once with what that left behind. JSON goes to
$OUT/gpu_first_call.json if OUT is set.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from cumulant.bench.provenance import provenance

CALLS = {
    "attention(order=2)": "attention(q, k, v, order=2)",
    "attention(order=3)": "attention(q, k, v, order=3)",
    "attention(order=2, is_causal=True)": "attention(q, k, v, order=2, is_causal=True)",
    "cluster_attention(clusters=64, near=2)": "cluster_attention(q, k, v, clusters=64, near=2)",
    "cluster_attention(clusters=64, is_causal=True)": "cluster_attention(q, k, v, clusters=64, is_causal=True)",
}
SCRIPT = """
import time, torch
from cumulant import attention, cluster_attention
q, k, v = (torch.randn(2, 4, 4096, 64, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
torch.ones(9, device="cuda").sum().item()
begin = time.perf_counter()
out = {call}
torch.cuda.synchronize()
middle = time.perf_counter()
out.sum().backward()
torch.cuda.synchronize()
print(middle - begin, time.perf_counter() - middle)
"""


def first_call(call: str, cache: str) -> list[float]:
    """Seconds of the first forward and backward pass."""
    environment = os.environ | {"TRITON_CACHE_DIR": cache}
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT.replace("{call}", call)],
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [float(x) for x in done.stdout.split()]


def both(call: str) -> list[list[float]]:
    with tempfile.TemporaryDirectory() as cache:
        return [first_call(call, cache) for _ in range(2)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="calls whose name has this in it")
    parser.add_argument("--jobs", type=int, default=8, help="calls at a time")
    options = parser.parse_args()
    calls = {name: call for name, call in CALLS.items() if options.only in name}
    rows: dict[str, list[list[float]]] = {}
    print("| call | empty cache, forward + backward s | full cache |\n|---|---|---|", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        for name, found in zip(calls, pool.map(both, calls.values()), strict=True):
            rows[name] = found
            cold, warm = (" + ".join(f"{x:.2f}" for x in pair) for pair in found)
            print(f"| `{name}` | {cold} | {warm} |", flush=True)
            if os.environ.get("OUT"):
                record = provenance("python benchmarks/gpu_first_call.py", gpu=True) | {"calls": rows}
                Path(os.environ["OUT"], "gpu_first_call.json").write_text(json.dumps(record, indent=1, default=str))


if __name__ == "__main__":
    main()
