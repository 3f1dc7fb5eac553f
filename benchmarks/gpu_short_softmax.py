"""Softmax over short and narrow heads: torch's fused kernel against plain products, where each is quicker.

    PYTHONPATH=src python benchmarks/gpu_short_softmax.py            a table of ratios (about 15 s)
    PYTHONPATH=src python benchmarks/gpu_short_softmax.py --quick    tiny sizes on the CPU: that all of it runs

bfloat16, 2^19 tokens in all (or 64 heads: "few"), q, k and v views of one projection, forward alone and with gradients,
replays of a CUDA graph. Nothing is timed before plain products are seen to be off float64 by at most twice what a plain
softmax in bfloat16 is. JSON goes to $OUT/gpu_short_softmax.json if OUT is set. It is for the limits in
`cumulant.zoo.fused`, which stand on three points until this has been run.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import sdpa_kernel

from cumulant.bench.provenance import provenance
from cumulant.zoo.fused import WITHOUT_CUDNN, plain_softmax

QUICK = "--quick" in sys.argv
DEVICE = "cpu" if QUICK else "cuda"
TOKENS = (8,) if QUICK else (8, 16, 32, 49, 64)
WIDTHS = (6,) if QUICK else (6, 8, 16, 32)
IN_ALL = 2**8 if QUICK else 2**19


def fused(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    with sdpa_kernel(WITHOUT_CUDNN):
        return F.scaled_dot_product_attention(query, key, value, **options)


def drawn(heads: int, tokens: int, width: int) -> Tensor:
    """Query, key and value of `heads` heads, four to a sequence, as a layer's projection gives them."""
    return torch.randn(heads // 4, tokens, 3, 4, width, device=DEVICE, dtype=torch.bfloat16, requires_grad=True)


def run(attend: Callable[..., Tensor], x: Tensor, bias: Tensor | None = None) -> Tensor:
    query, key, value = (part.transpose(1, 2) for part in x.unbind(2))
    return attend(query, key, value, attn_mask=bias).transpose(1, 2).flatten(2)


def ms(call: Callable[[], Any]) -> float:
    """Milliseconds of a call as a CUDA graph: the median of nine."""
    if QUICK:
        call()
        return 1.0
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=side):
        call()
    times = []
    for _ in range(9):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return sorted(times)[4]


def checked(tokens: int, width: int) -> None:
    x = drawn(32, tokens, width)
    exact = run(plain_softmax, x.double())
    query, key, value = (part.transpose(1, 2) for part in x.unbind(2))
    plain = ((query @ key.mT * width**-0.5).softmax(-1) @ value).transpose(1, 2).flatten(2)
    allowed = 2 * (plain - exact).norm()
    if not (run(plain_softmax, x) - exact).norm() <= allowed:
        raise ValueError(
            f"{tokens} tokens of {width} channels: off by more than twice plain bfloat16; nothing is timed"
        )


def measured(tokens: int, width: int, heads: int, biased: bool) -> dict[str, Any]:
    checked(tokens, width)
    x = drawn(heads, tokens, width)
    bias = torch.randn(4, tokens, tokens, device=DEVICE, dtype=torch.bfloat16, requires_grad=True) if biased else None
    grad = torch.randn(heads // 4, tokens, 4 * width, device=DEVICE, dtype=torch.bfloat16)
    leaves = [x] if bias is None else [x, bias]
    row: dict[str, Any] = {"tokens": tokens, "width": width, "heads": heads, "bias": biased}
    for name, attend in (("fused", fused), ("plain", plain_softmax)):
        with torch.no_grad():
            row[f"{name}_forward_ms"] = ms(lambda attend=attend: run(attend, x, bias))
        row[f"{name}_step_ms"] = ms(lambda attend=attend: torch.autograd.grad(run(attend, x, bias), leaves, grad))
    row["forward"], row["step"] = (row[f"fused_{what}_ms"] / row[f"plain_{what}_ms"] for what in ("forward", "step"))
    return row


def main() -> None:
    rows = []
    print(f"{'tokens':>6} {'width':>5} {'heads':>8} bias  fused / plain: forward  step   (above 1 plain is quicker)")
    cases = [(tokens, width, IN_ALL // tokens, False) for tokens, width in product(TOKENS, WIDTHS)]
    cases += [] if QUICK else [(16, 6, few, False) for few in (64, 1024, 4096)] + [(49, 32, 2**15, True)]
    for case in cases:
        row = measured(*case)
        rows.append(row)
        where = f"{row['tokens']:6} {row['width']:5} {row['heads']:8} {row['bias']:4}"
        print(f"{where} {row['forward']:23.2f} {row['step']:5.2f}", flush=True)
        if "OUT" in os.environ:
            record = {**provenance("python benchmarks/gpu_short_softmax.py"), "rows": rows}
            Path(os.environ["OUT"], "gpu_short_softmax.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
