"""`Stream.step` on the GPU: right against the causal result in float64, then the time of a token.

python benchmarks/gpu_decode.py     (PYTHONPATH=src, about 20 s)

bfloat16, 64 sequences, 12 heads of 64. The floor is reading and writing the state once at 4.2 TB/s; a state that
stays in the level-2 cache can be faster. JSON goes to $OUT/gpu_decode.json if OUT is set.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import cumulant
from cumulant.bench.provenance import provenance
from cumulant.streaming import Stream

BANDWIDTH = 4.2e12


def check() -> None:
    for dtype, bound in ((torch.bfloat16, 3e-3), (torch.float32, 1e-6)):
        for order in (2, 3):
            for B, H, G, D in ((2, 12, 1, 64), (4, 2, 4, 128)):
                q = torch.randn(B, H * G, 40, D, device="cuda").to(dtype)
                k, v = ((torch.randn(B, H, 40, D, device="cuda") + mean).to(dtype) for mean in (3, 0))
                exact = cumulant.attention(
                    q.double(), k.double(), v.double(), order=order, is_causal=True, enable_gqa=True
                )
                stream = Stream(order=order)
                steps = [stream.step(*(x[:, :, t : t + 1] for x in (q, k, v))) for t in range(40)]
                error = float((torch.cat(steps, 2).double() - exact).norm() / exact.norm())
                print(f"{str(dtype)[6:]:9s} order {order} B {B} H {H}x{G} D {D}: error {error:.1e}")
                if error > bound:
                    raise SystemExit("wrong results: no speed is printed")


def microseconds(function: Callable[[], Any], runs: int = 200) -> float:
    function()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    torch.cuda.synchronize()
    start.record()
    for _ in range(runs):
        function()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / runs * 1e3


def measure() -> dict[int, dict[str, float]]:
    """Microseconds of a token by order."""
    B, H, D = 64, 12, 64
    rows: dict[int, dict[str, float]] = {}
    for order in (2, 3):
        stream = Stream(order=order)
        q, k, v = (torch.randn(B, H, 1, D, device="cuda", dtype=torch.bfloat16) for _ in range(3))
        eager = microseconds(lambda stream=stream, q=q, k=k, v=v: stream.step(q, k, v))
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(10):
                stream.step(q, k, v)
        floor = 2 * B * H * ((order - 1) * D * D + 3 * D) * 4 / BANDWIDTH * 1e6
        replayed = microseconds(graph.replay) / 10
        rows[order] = {"called_us": eager, "graph_us": replayed, "floor_us": floor}
        print(f"order {order}: {eager:.1f} us from Python, {replayed:.2f} us in a CUDA graph, floor {floor:.2f} us")
    return rows


def main() -> None:
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu_decode.py needs a CUDA device")
    torch.manual_seed(0)
    check()
    rows = measure()
    if os.environ.get("OUT"):
        found = provenance("python benchmarks/gpu_decode.py", gpu=True) | {"orders": rows}
        Path(os.environ["OUT"], "gpu_decode.json").write_text(json.dumps(found, indent=1, default=str))


if __name__ == "__main__":
    main()
