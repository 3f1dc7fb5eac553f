"""The host's time of a call on a GPU, in microseconds, beside that of F.scaled_dot_product_attention.

    PYTHONPATH=src python benchmarks/gpu_host.py               every call, repeated as by default
    PYTHONPATH=src python benchmarks/gpu_host.py --ways        and not repeated, and repeated through Triton's launcher

Small problems, so that the device is always done first: what is timed is Python, torch and the launches. bfloat16; a
step is a forward and a backward pass (torch.autograd.grad). Medians of 40 times 10 calls, in turns with SDPA of that
shape. With --ways nothing is timed that does not have the bits of a call that is not repeated. JSON goes to
$OUT/gpu_host.json if OUT is set.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import time
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant import attention, cluster_attention
from cumulant.bench.provenance import provenance
from cumulant.kernels import direct, replay

# name -> shape (B, H, L, D), and the call
CALLS: dict[str, tuple[tuple[int, ...], Callable[..., Tensor]]] = {
    "attention(order=2)": ((1, 12, 197, 64), partial(attention, order=2)),
    "attention(order=3)": ((1, 12, 197, 64), partial(attention, order=3)),
    "attention(order=2, is_causal=True)": ((1, 12, 512, 64), partial(attention, order=2, is_causal=True)),
    "cluster_attention(clusters=16)": ((1, 4, 256, 64), partial(cluster_attention, clusters=16)),
    "cluster_attention(clusters=16, near=2)": ((1, 4, 2048, 64), partial(cluster_attention, clusters=16, near=2)),
    "cluster_attention(clusters=16, is_causal=True)": (
        (1, 4, 1024, 64),
        partial(cluster_attention, clusters=16, is_causal=True),
    ),
}
GOAL = 25  # microseconds more than SDPA
WAYS = {"repeated": (True, True), "repeated by Triton": (True, False), "not repeated": (False, False)}


def leaves_of(shape: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    made = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(3))
    return [x.requires_grad_() for x in made]


def alternately(functions: list[Callable[[], Any]], calls: int = 10, rounds: int = 40) -> list[float]:
    """Median microseconds of each on the host, measured in turns: what else the machine does hits all alike."""
    found: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for function, row in zip(functions, found, strict=True):
            torch.cuda.synchronize()
            begin = time.perf_counter()
            for _ in range(calls):
                function()
            row.append((time.perf_counter() - begin) / calls * 1e6)
    return [statistics.median(row) for row in found]


def times(call: Callable[..., Tensor], shape: tuple[int, ...]) -> tuple[list[float], list[Tensor]]:
    """Microseconds of a forward pass, a step, and these of SDPA; and the output and gradients of the call."""
    leaves = leaves_of(shape)
    grad = torch.ones_like(leaves[0])

    def step(function: Callable[..., Tensor]) -> list[Tensor]:
        out = function(*leaves)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    both = [call, F.scaled_dot_product_attention]
    for _ in range(8):
        found = step(call)
    steps = alternately([partial(step, x) for x in both])
    with torch.no_grad():
        for _ in range(8):
            call(*leaves)
        forward = alternately([partial(x, *leaves) for x in both])
    return [forward[0], steps[0], forward[1], steps[1]], found


def measure(ways: Iterable[str]) -> dict[str, Any]:
    """Each call in each of these ways, beside SDPA."""
    rows: dict[str, dict[str, list[float]]] = {}
    print("| call | way | forward us (SDPA) | more | step us (SDPA) | more |\n|" + "---|" * 6, flush=True)
    gc.disable()
    for name, (shape, call) in CALLS.items():
        wanted, row = None, rows.setdefault(name, {})
        for way in ways:
            replay.forget()
            replay.ASKED, direct.WANTED = WAYS[way]
            found_us, found = times(call, shape)
            wanted = found if wanted is None else wanted
            if not all(map(torch.equal, found, wanted)):
                print(f"| {name} | {way} | other bits: no time |", flush=True)
                continue
            forward, step, peer_forward, peer_step = row[way] = found_us
            cells = f"{forward:.1f} ({peer_forward:.1f}) | {forward - peer_forward:+.1f}"
            cells += f" | {step:.1f} ({peer_step:.1f}) | {step - peer_step:+.1f}"
            print(f"| `{name}` | {way} | {cells} |", flush=True)
        keep({"goal": GOAL, "calls": rows})
    gc.enable()
    return {"goal": GOAL, "calls": rows}


def keep(found: dict[str, Any]) -> None:
    if os.environ.get("OUT"):
        record = provenance("python benchmarks/gpu_host.py", gpu=True) | found
        Path(os.environ["OUT"], "gpu_host.json").write_text(json.dumps(record, indent=1, default=str))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ways", action="store_true", help="also calls that are not repeated")
    options = parser.parse_args()
    measure(list(reversed(WAYS)) if options.ways else ["repeated"])


if __name__ == "__main__":
    main()
