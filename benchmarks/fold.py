"""The folded second-order layer against the plain one and against that one's four projections alone.

    python benchmarks/fold.py           # table, and fold-<device>.json in $OUT, or in benchmarks/results

On a GPU in bf16, elsewhere in float32. Forward and training step (forward and backward), medians; numbers that are
compared come from one run, and GPU times are replays of CUDA graphs. The folded layer is compared with the plain one
in float64 first.
"""

from __future__ import annotations

import copy
import json
import os
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from cumulant.bench.provenance import provenance
from cumulant.nn import CumulantAttention

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16 if DEVICE == "cuda" else torch.float32
REP = 100  # milliseconds of a replay on a GPU
TOKENS = 65536 if DEVICE == "cuda" else 8192


def milliseconds(f: Callable[[], Any]) -> float:
    if DEVICE == "cuda":
        from triton.testing import do_bench_cudagraph

        with torch.cuda.stream(torch.cuda.Stream()):
            return float(do_bench_cudagraph(f, rep=REP, return_mode="median"))
    f()
    times = []
    for _ in range(7):
        start = time.perf_counter()
        f()
        times.append(time.perf_counter() - start)
    return 1e3 * statistics.median(times)


def layers(C: int, heads: int) -> tuple[CumulantAttention, CumulantAttention]:
    torch.manual_seed(0)
    plain = CumulantAttention(C, heads, order=2, fold=False, device=DEVICE, dtype=DTYPE)
    folded = CumulantAttention(C, heads, order=2, fold=True, device=DEVICE, dtype=DTYPE)
    folded.load_state_dict(plain.state_dict())
    return plain, folded


def check() -> None:
    """No speed without correctness: at most twice the plain layer's error against float64."""
    plain, folded = layers(384, 6)
    x = (torch.randn(2, 1568, 384, device=DEVICE) + 0.5).to(DTYPE)
    exact = copy.deepcopy(plain).double()(x.double())

    def error(y: torch.Tensor) -> float:
        return ((y.double() - exact).norm() / exact.norm()).item()

    if not error(folded(x)) <= 2 * error(plain(x)):
        sys.exit(f"the folded layer is off by {error(folded(x)):.1e}, the plain one by {error(plain(x)):.1e}")


def row(C: int, heads: int, B: int, L: int) -> dict[str, Any]:
    plain, folded = layers(C, heads)
    x = (torch.randn(B, L, C, device=DEVICE) + 0.5).to(DTYPE)
    grad = torch.randn_like(x)

    def projections(x: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The four products of a plain layer and nothing else; the last one on x, which is as large as the real one."""
        qkv = F.linear(x, plain.qkv.weight, plain.qkv.bias)
        return qkv, F.linear(x, plain.proj.weight, plain.proj.bias)

    def training(layer: Callable[[torch.Tensor], torch.Tensor], module: torch.nn.Module) -> Callable[[], Any]:
        leaf = x.clone().requires_grad_()
        parameters = [leaf, *module.parameters()]

        def step() -> Any:
            outputs = layer(leaf)
            if isinstance(outputs, tuple):  # the projections alone: a gradient of each output's shape
                return torch.autograd.grad(outputs, parameters, (torch.cat([grad] * 3, -1), grad))
            return torch.autograd.grad(outputs, parameters, grad)

        return step

    with torch.no_grad():
        forward = {
            name: milliseconds(lambda f=f: f(x))
            for name, f in (("projections", projections), ("plain", plain), ("folded", folded))
        }
    step = {
        "plain": milliseconds(training(plain, plain)),
        "folded": milliseconds(training(folded, folded)),
        "projections": milliseconds(training(projections, plain)),
    }
    print(
        f"C {C:4} B {B:5} L {L:6}  forward ms: projections {forward['projections']:.3f}, plain {forward['plain']:.3f}, "
        f"folded {forward['folded']:.3f} ({forward['projections'] / forward['folded']:.2f} x the projections, "
        f"{forward['plain'] / forward['folded']:.2f} x plain)   step: projections {step['projections']:.3f}, plain "
        f"{step['plain']:.3f}, folded {step['folded']:.3f} ({step['projections'] / step['folded']:.2f} x, "
        f"{step['plain'] / step['folded']:.2f} x)",
        flush=True,
    )
    return {"C": C, "heads": heads, "B": B, "L": L, "forward_ms": forward, "step_ms": step}


def measure(least: int = 0) -> list[dict[str, Any]]:
    """Rows of `least` tokens and more, the longest first."""
    sizes = [(768, 12, L) for L in (16384, 65536) if L <= TOKENS]
    sizes += [(384, 6, L) for L in (197, 392, 784, 1568, 4096)] + [(768, 12, L) for L in (784, 1568, 4096)]
    return [row(C, heads, max(1, TOKENS // L), L) for C, heads, L in sizes if least <= L]


def main() -> None:
    check()
    rows = measure()
    results = Path(os.environ.get("OUT", Path(__file__).parent / "results")) / f"fold-{DEVICE}.json"
    origin = provenance("python benchmarks/fold.py", gpu=DEVICE == "cuda")
    results.write_text(json.dumps({"dtype": str(DTYPE), "rows": rows, **origin}, indent=1) + "\n")


if __name__ == "__main__":
    main()
