"""Short clusters on the GPU: right first, then forward and training step beside plain torch, compiled, and SDPA.

    python benchmarks/gpu_short.py --no-plain     kernels and softmax at the two shapes of a ViT-Ti (about 20 s)
    python benchmarks/gpu_short.py                then plain torch, compiled (about 40 s more)
    python benchmarks/gpu_short.py --check        results for more types, widths and options (about 40 s), no times
    python benchmarks/gpu_short.py --quick        tiny sizes, on the CPU in Triton's interpreter: that all of it runs

bfloat16, B 1,024, H 3, D 64, blocks of 4 x 4 patches, a class token; q, k, v are views of one projection. Medians over
replays of a CUDA graph. "floor": memory moves the 4 and 11 tensors that no kernel can do without, as fast as a copy.
JSON goes to $OUT/gpu_short.json if OUT is set. Run with PYTHONPATH=src.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

QUICK = "--quick" in sys.argv
if QUICK:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import triton  # noqa: E402
from torch import Tensor  # noqa: E402

from cumulant.cluster import cluster_attention  # noqa: E402

DEVICE = "cpu" if QUICK else "cuda"
BATCH, HEADS, WIDTH = (1, 1, 32) if QUICK else (1024, 3, 64)
HALF = torch.bfloat16


def image(side: int, variance: str = "diagonal") -> dict[str, Any]:
    return dict(clusters=(side // 4) ** 2, grid=(side, side), prefix=1, variance=variance)


def draw(B: int, H: int, L: int, D: int, dtype: torch.dtype) -> list[Tensor]:
    generator = torch.Generator(DEVICE).manual_seed(L)
    x = torch.randn(B, L, 4, H, D, generator=generator, device=DEVICE) + 0.5
    return [part.transpose(1, 2) for part in x.to(dtype).unbind(2)]


def check(many: bool) -> bool:
    """Outputs and gradients beside plain torch in float64 and in the same precision; a line for each case."""
    ragged = dict(clusters=16, grid=(14, 14), prefix=1, closure="langevin", variance="full")
    kinds = ("diagonal", "full")
    cases = [(side, HALF, WIDTH, image(side, kind)) for side in (8, 16)[: 1 if QUICK else 2] for kind in kinds]
    if many:
        cases += [(14, HALF, 64, ragged), (8, torch.float16, 64, image(8)), (16, torch.float16, 32, image(16)),
                  (8, torch.float32, 64, image(8)), (16, torch.float32, 48, image(16)), (8, HALF, 128, image(8)),
                  (14, HALF, 128, ragged)]  # fmt: skip
    right = True
    for side, dtype, D, options in cases:
        *tokens, grad = draw(1 if QUICK else 4, 2, side * side + 1, D, dtype)
        found = []
        for backend, kind in (("triton", dtype), ("reference", dtype), ("reference", torch.float64)):
            leaves = [x.detach().to(kind).requires_grad_() for x in tokens]
            out = cluster_attention(*leaves, backend=backend, **options)
            found.append([out.detach(), *torch.autograd.grad(out, leaves, grad.to(kind))])
        ours, plain = ([float((x.double() - y).norm() / y.norm()) for x, y in zip(f, found[2], strict=True)]
                       for f in found[:2])  # fmt: skip
        passed = all(x < (2e-5 if dtype == torch.float32 else 2 * y + 1e-4) for x, y in zip(ours, plain, strict=True))
        errors = " ".join(f"{x:.1e}/{y:.1e}" for x, y in zip(ours, plain, strict=True))
        print(f"{'PASS' if passed else 'FAIL'} {errors} side {side} {dtype} D {D} {options}", flush=True)
        right &= passed
    return right


def milliseconds(function: Callable[[], Any]) -> float:
    if QUICK:
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e3
    function()
    with torch.cuda.stream(torch.cuda.Stream()):
        return float(triton.testing.do_bench_cudagraph(function, rep=20, return_mode="median"))


def both(call: Callable[..., Tensor], tokens: list[Tensor], grad: Tensor) -> dict[str, float]:
    leaves = [x.detach().requires_grad_() for x in tokens]
    with torch.no_grad():
        forward = milliseconds(lambda: call(*leaves))
    return {"forward": forward, "both": milliseconds(lambda: torch.autograd.grad(call(*leaves), leaves, grad))}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for flag in ("--quick", "--no-plain", "--check"):
        parser.add_argument(flag, action="store_true")
    options = parser.parse_args()
    rows: list[dict[str, Any]] = []

    def save(**row: Any) -> None:
        rows.append(row)
        print("  ".join(f"{a} {b:.4f}" if isinstance(b, float) else f"{a} {b}" for a, b in row.items()), flush=True)
        if "OUT" in os.environ:
            Path(os.environ["OUT"], "gpu_short.json").write_text(json.dumps(rows, indent=1))

    if not check(options.check):
        sys.exit("wrong results: no times")
    sides = () if options.check else (8,) if QUICK else (8, 16)
    for side, plain in [(s, p) for p in (False, True) for s in sides if not (p and options.no_plain)]:
        *tokens, grad = draw(BATCH, HEADS, side * side + 1, WIDTH, HALF)

        def ours(*x: Tensor, side: int = side, backend: str = "triton", variance: str = "diagonal") -> Tensor:
            return cluster_attention(*x, backend=backend, **image(side, variance))

        if plain:
            call = torch.compile(lambda *x, ours=ours: ours(*x, backend="reference"), disable=QUICK)
            save(side=side, method="plain", **both(call, tokens, grad))
            continue
        copy = milliseconds(grad.contiguous().clone) / 2
        save(side=side, method="floor", forward=4 * copy, both=11 * copy)
        save(side=side, method="kernels", **both(ours, tokens, grad))
        save(side=side, method="kernels, full variance", **both(partial(ours, variance="full"), tokens, grad))
        save(side=side, method="softmax", **both(F.scaled_dot_product_attention, tokens, grad))


if __name__ == "__main__":
    main()
