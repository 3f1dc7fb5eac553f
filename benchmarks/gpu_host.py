"""The host's time of a call on a GPU, in microseconds, beside that of F.scaled_dot_product_attention.

    PYTHONPATH=src python benchmarks/gpu_host.py               every call, repeated as by default
    PYTHONPATH=src python benchmarks/gpu_host.py --ways        and not repeated, and repeated through Triton's launcher

Small problems, so that the device is always done first: what is timed is Python, torch and the launches. bfloat16; a
step is a forward and a backward pass (torch.autograd.grad). Medians of 15 times 20 calls. With --ways nothing
is timed that does not have the bits of a call that is not repeated. JSON goes to $OUT/gpu_host.json if OUT is set.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from gpu_called import host_us
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
SDPA = "F.scaled_dot_product_attention"
GOAL = 25  # microseconds more than SDPA
WAYS = {"repeated": (True, True), "repeated by Triton": (True, False), "not repeated": (False, False)}


def leaves_of(shape: tuple[int, ...]) -> list[Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    made = (torch.randn(shape, generator=generator, device="cuda").bfloat16() for _ in range(3))
    return [x.requires_grad_() for x in made]


def times(call: Callable[..., Tensor], shape: tuple[int, ...]) -> tuple[float, float, list[Tensor]]:
    """Microseconds of a forward pass and of a step; the output and gradients of the last."""
    leaves = leaves_of(shape)
    grad = torch.ones_like(leaves[0])

    def step() -> Any:
        out = call(*leaves)
        return [out, *torch.autograd.grad(out, leaves, grad)]

    for _ in range(8):
        found = step()
    with torch.no_grad():
        for _ in range(8):
            call(*leaves)
        forward = host_us(lambda: call(*leaves), 20, 15)
    return forward, host_us(step, 20, 15), found


def measure(ways: Iterable[str]) -> dict[str, Any]:
    """SDPA, and each call in each of these ways."""
    rows: dict[str, dict[str, list[float]]] = {}
    peer = times(F.scaled_dot_product_attention, (1, 12, 197, 64))[:2]
    print(f"{SDPA}: forward {peer[0]:.1f}, step {peer[1]:.1f}", flush=True)
    print("| call | way | forward us | more than SDPA | step us | more than SDPA |\n|" + "---|" * 6, flush=True)
    for name, (shape, call) in CALLS.items():
        wanted, row = None, rows.setdefault(name, {})
        for way in ways:
            replay.forget()
            replay.ASKED, direct.WANTED = WAYS[way]
            forward, step, found = times(call, shape)
            wanted = found if wanted is None else wanted
            if not all(map(torch.equal, found, wanted)):
                print(f"| {name} | {way} | other bits: no time |", flush=True)
                continue
            row[way] = [forward, step]
            more = f"{forward - peer[0]:+.1f} | {step:.1f} | {step - peer[1]:+.1f}"
            print(f"| `{name}` | {way} | {forward:.1f} | {more} |", flush=True)
        keep({"goal": GOAL, SDPA: peer, "calls": rows})
    return {"goal": GOAL, SDPA: peer, "calls": rows}


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
