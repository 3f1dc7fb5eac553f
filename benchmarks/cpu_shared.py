"""Cumulant attention on a CPU whose cores are shared: how much slower beside another busy process, and the products.

    python benchmarks/cpu_shared.py            # table, and benchmarks/results/cpu_shared.json

Float32, 12 heads of width 64, two threads. The yardstick is `q @ (k^T @ v)` on the same tensors. Rounds alternate
between both sides, and between an idle and a busy neighbour (a process that counts, stopped and continued), so that
what else the machine does falls on all four alike. What counts is the slowdown over that of the products.
"""

from __future__ import annotations

import json
import os
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from cpu import D, H, check, tensors, two_products

import cumulant

RESULTS = Path(__file__).parent / "results" / "cpu_shared.json"
ROUNDS = 15


def milliseconds(f: Callable[[], object], least: float = 0.03) -> float:
    """Mean over calls that fill at least so many seconds: longer than a turn of the scheduler."""
    calls, start = 0, time.perf_counter()
    while time.perf_counter() - start < least or not calls:
        f()
        calls += 1
    return 1e3 * (time.perf_counter() - start) / calls


def measured(ours: Callable[[], object], products: Callable[[], object], neighbour: int) -> dict[str, float]:
    times: dict[str, list[float]] = {name: [] for name in ("ours", "products", "ours_busy", "products_busy")}
    for f in (ours, products):
        f()
    for _ in range(ROUNDS):
        for busy in ("", "_busy"):
            os.kill(neighbour, signal.SIGCONT if busy else signal.SIGSTOP)
            time.sleep(0.005)
            times["ours" + busy].append(milliseconds(ours))
            times["products" + busy].append(milliseconds(products))
    middle = {name: statistics.median(each) for name, each in times.items()}
    slower, theirs = middle["ours_busy"] / middle["ours"], middle["products_busy"] / middle["products"]
    return {**middle, "slowdown": slower, "slowdown_of_products": theirs, "over": slower / theirs}


def both_ways(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, order: int) -> None:
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]
    torch.autograd.grad(cumulant.attention(*leaves, order=order).sum(), leaves)


def main() -> None:
    check()
    rows = []
    with subprocess.Popen([sys.executable, "-c", "while True: pass"]) as neighbour:
        try:
            for L in (197, 1024, 4096):
                q, k, v = tensors(L)
                products = partial(two_products, q, k, v)
                for order in (2, 3):
                    forward = partial(cumulant.attention, q, k, v, order=order)
                    for way, ours in (("forward", forward), ("both", partial(both_ways, q, k, v, order))):
                        row = {"L": L, "order": order, "way": way, **measured(ours, products, neighbour.pid)}
                        rows.append(row)
                        print(
                            f"L {L:>5} order {order} {way:8}{row['ours']:8.2f} -> {row['ours_busy']:8.2f} ms "
                            f"({row['slowdown']:.2f} x)   products {row['products']:.2f} -> {row['products_busy']:.2f} "
                            f"({row['slowdown_of_products']:.2f} x)   over {row['over']:.2f}",
                            flush=True,
                        )
        finally:
            os.kill(neighbour.pid, signal.SIGCONT)
            neighbour.kill()
    commit = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True).stdout.strip()
    record = {"command": "python benchmarks/cpu_shared.py", "commit": commit, "torch": torch.__version__}
    record |= {"threads": torch.get_num_threads(), "cores": os.cpu_count(), "load": os.getloadavg(), "rows": rows}
    RESULTS.write_text(json.dumps(record | {"heads": H, "width": D}, indent=1) + "\n")


if __name__ == "__main__":
    main()
