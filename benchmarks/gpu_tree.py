"""Clusters by content on a GPU: the order of a tree by kernels and by plain torch, and whole calls beside softmax.

    PYTHONPATH=src python benchmarks/gpu_tree.py [--only order whole profile tune] [--shapes sam2 lightglue short]

Times are of replays of a CUDA graph, and of calls from Python one after the other. Tokens are random, spread farther in
some directions than in others; first the kernels' runs are compared with plain torch's: no time is printed where they
are not a permutation or their spread is more than 2 % larger. JSON goes to $OUT/gpu_tree.json if OUT is set, row
by row.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cumulant.bench.provenance import provenance
from cumulant.cluster import Tree, cluster_attention
from cumulant.cluster import tree as plain
from cumulant.kernels.tree import host

SHAPES: dict[str, tuple[int, int, int, torch.dtype]] = {  # heads, tokens, width, type
    "sam2": (4, 65_536, 96, torch.bfloat16),
    "lightglue": (4, 16_384, 64, torch.float32),
    "lightglue in half": (4, 16_384, 64, torch.float16),
    "short": (4, 4_096, 96, torch.bfloat16),
}
PARTS = {"sam2": 256, "lightglue": 64, "lightglue in half": 64, "short": 64}
CALLS: dict[str, list[tuple[Tree, int, int, str]]] = {  # tree, near, near_rows, rank
    "sam2": [
        *((Tree(256), near, 128, "error") for near in (4, 8, 16)), (Tree(256), 8, 128, "mean"),
        (Tree(256), 8, 64, "error"), (Tree(256, patch=2), 8, 128, "error"),
    ],
    "lightglue": [
        *((Tree(256), near, 64, "error") for near in (16, 20, 24, 32)), (Tree(256), 24, 64, "mass"),
        (Tree(256), 32, 64, "mean"), (Tree(256), 32, 128, "error"), (Tree(128), 12, 64, "error"),
    ],
    "lightglue in half": [
        *((Tree(256), near, 64, "error") for near in (16, 24, 32)), (Tree(128), 16, 64, "error"),
        (Tree(64), 8, 64, "error"),
    ],
    "short": [(Tree(64), near, 64, "error") for near in (4, 8)],
}  # fmt: skip
PEERS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION
}  # fmt: skip


def milliseconds(run: Callable[[], Any], repeats: int = 7, calls: int = 4) -> float:
    """Median of a few replays of a graph of several calls."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    graph, times = torch.cuda.CUDAGraph(), []
    with torch.cuda.graph(graph):
        for _ in range(calls):
            run()
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        graph.replay()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / calls)
    return statistics.median(times)


def from_python(run: Callable[[], Any], calls: int = 30) -> float:
    """Milliseconds of a call among many, one after the other; the first ones are learned."""
    for _ in range(6):
        run()
    torch.cuda.synchronize()
    start = time.perf_counter()
    for _ in range(calls):
        run()
    torch.cuda.synchronize()
    return (time.perf_counter() - start) / calls * 1e3


def tokens(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    draw = torch.Generator(device="cuda").manual_seed(seed)
    x = torch.randn(*shape, device="cuda", generator=draw)
    return (x * torch.linspace(0.2, 3.0, shape[-1], device="cuda")).to(dtype)


def spread(x: Tensor, order: Tensor, parts: int) -> float:
    runs = plain.rows_of(x.double(), order).unflatten(1, (parts, -1))
    return float((runs - runs.mean(2, keepdim=True)).square().sum())


def in_plain_torch(run: Callable[[], Any]) -> Callable[[], Any]:
    def without() -> Any:
        with mock.patch.object(plain, "HAS_TRITON", False):
            return run()

    return without


def orders(name: str) -> dict[str, Any]:
    heads, L, width, dtype = SHAPES[name]
    parts, options = PARTS[name], Tree(PARTS[name])
    looking, x = tokens(heads, L, width, dtype=dtype, seed=0), tokens(heads, L, width, dtype=dtype, seed=1)
    run = lambda: plain.tree_order(looking, x, parts, options)  # noqa: E731
    new, old = run(), in_plain_torch(run)()
    logits = x @ plain.spread_out(looking, options.sample).mT
    numbers = torch.arange(L, device="cuda").expand(heads, -1)
    ratio = spread(logits, new, parts) / spread(logits, old, parts)
    again = all(torch.equal(run(), new) for _ in range(5))
    right = torch.equal(new.sort(-1).values, numbers) and ratio < 1.02 and again
    row = {"shape": name, "parts": parts, "right": right, "spread": ratio, "the same again": again}
    if right:
        row |= {"kernels": milliseconds(run), "plain torch": milliseconds(in_plain_torch(run))}
        row |= {"of x": milliseconds(lambda: host.order(logits, parts, 2, None))}
    print(json.dumps(row), flush=True)
    return row


def softmax(q: Tensor, k: Tensor, v: Tensor) -> tuple[float, str]:
    best = (float("inf"), "none")
    for name, peer in PEERS.items():
        try:
            with sdpa_kernel(peer), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                best = min(best, (milliseconds(lambda: F.scaled_dot_product_attention(q, k, v), calls=2), name))
        except RuntimeError:
            continue
    return best


def whole(name: str) -> Iterator[dict[str, Any]]:
    heads, L, width, dtype = SHAPES[name]
    q, k, v = (tokens(1, heads, L, width, dtype=dtype, seed=i) * 0.5 for i in range(3))
    exact, peer = softmax(q, k, v)
    print(f"{name}: softmax {exact:.3f} ms ({peer})", flush=True)
    grid = (int(L**0.5),) * 2 if name == "sam2" else None
    for tree, near, near_rows, rank in CALLS[name]:
        given: dict[str, Any] = {"clusters": tree, "near": near, "near_rows": near_rows, "grid": grid, "rank": rank}
        run = lambda g=given: cluster_attention(q, k, v, response="pooled", **g)  # noqa: E731
        row = {"shape": name, "tree": str(tree), "near": near, "near_rows": near_rows, "rank": rank, "softmax": exact}
        if not run().isfinite().all():
            print(f"  {row}: not finite, no time is taken", flush=True)
            yield {**row, "ms": None}
            continue
        own, called = milliseconds(run), from_python(run)
        yield {**row, "ms": own, "from_python": called}
        print(
            f"  Tree({tree.count}, patch={tree.patch}), near {near} ({near * L // tree.count} tokens), {near_rows} "
            f"rows, by {rank}: {own:.3f} ms, {exact / own:.2f} x; from Python {called:.3f}",
            flush=True,
        )


def profile(name: str) -> None:
    """Which kernels of one call take how long."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as watch

    heads, L, width, dtype = SHAPES[name]
    q, k, v = (tokens(1, heads, L, width, dtype=dtype, seed=i) * 0.5 for i in range(3))
    tree, near, near_rows, rank = CALLS[name][1]
    grid = (int(L**0.5),) * 2 if name == "sam2" else None
    run = lambda: cluster_attention(q, k, v, clusters=tree, near=near, near_rows=near_rows, grid=grid, rank=rank)  # noqa: E731
    for _ in range(3):
        run()
    torch.cuda.synchronize()
    with watch(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        run()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = {}
    for event in seen.events():
        if "cuda" in str(event.device_type).lower():
            spent.setdefault(event.name[:40], []).append(event.time_range.elapsed_us())
    total = sum(map(sum, spent.values()))
    print(
        f"{name}, {tree.count} clusters, near {near}: {sum(map(len, spent.values()))} launches, {total:.0f} us in all"
    )
    for kernel, times in sorted(spent.items(), key=lambda item: -sum(item[1])):
        print(f"  {kernel:40s} {' '.join(f'{x:.0f}' for x in times[:12])}", flush=True)


def tune(name: str) -> None:
    """The order with other sizes of its programs."""
    heads, L, _, dtype = SHAPES[name]
    x = tokens(heads, L, 64, dtype=dtype, seed=1)
    for what, values in (("RESIDENT", (1, 2, 4)), ("ALONE", (512, 1024, 2048, 4096)), ("HELD", (4096, 8192, 16384))):
        line = []
        for value in values:
            with mock.patch.object(host, what, value):
                line.append(f"{value}: {milliseconds(lambda: host.order(x, PARTS[name], 2, None)):.3f}")
        print(f"{name} {what} ms {', '.join(line)}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", choices=("order", "whole", "profile", "tune"), default=["order", "whole"])
    parser.add_argument("--shapes", nargs="*", choices=SHAPES, default=list(SHAPES))
    options = parser.parse_args()
    command = " ".join(["python benchmarks/gpu_tree.py", *sys.argv[1:]])
    result: dict[str, Any] = {"provenance": provenance(command, gpu=True), "orders": [], "whole": []}

    def keep(what: str, row: dict[str, Any]) -> None:
        result[what].append(row)
        if os.environ.get("OUT"):
            (Path(os.environ["OUT"]) / "gpu_tree.json").write_text(json.dumps(result, indent=1) + "\n")

    for name in options.shapes:
        if "order" in options.only:
            keep("orders", orders(name))
    for name in options.shapes:
        if "whole" in options.only:
            for row in whole(name):
                keep("whole", row)
        if "profile" in options.only:
            profile(name)
        if "tune" in options.only:
            tune(name)


if __name__ == "__main__":
    main()
