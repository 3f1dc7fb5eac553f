"""Speed and memory of cumulant attention on the CPU, as ratios measured in one run.

    python benchmarks/cpu.py            # table, and benchmarks/results/cpu.json

Float32, 12 heads of width 64, two threads. The yardstick for speed is `q @ (k^T @ v)` on the same tensors: the two
matrix products without which no second-order linear attention exists. Each ratio is the median over rounds in
which both sides run back to back, so that a machine that slows down slows both. Memory is the rise of the
process's peak resident size (Linux) over what it was before the call, in a fresh process.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

H, D = 12, 64
RESULTS = Path(__file__).parent / "results" / "cpu.json"


def tensors(L: int, count: int = 3):  # type: ignore[no-untyped-def]
    import torch

    torch.set_num_threads(2)
    torch.manual_seed(L)
    return [torch.randn(1, H, L, D) + 0.5 for _ in range(count)]


def ratio(
    candidate: Callable[[], object], yardstick: Callable[[], object], rounds: int, warm: int = 2
) -> dict[str, float]:
    """Median over rounds of time(candidate) / time(yardstick), with the quartiles as spread; `warm` rounds before."""

    def seconds(f: Callable[[], object]) -> float:
        start = time.perf_counter()
        f()
        return time.perf_counter() - start

    for f in (candidate, yardstick) * warm:
        f()
    pairs = [(seconds(candidate), seconds(yardstick)) for _ in range(rounds)]
    ratios = [a / b for a, b in pairs]
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {"ratio": middle, "q1": low, "q3": high, "ms": 1e3 * statistics.median(a for a, _ in pairs)}


def check() -> None:
    """No speed without correctness: the path that is timed must agree with the float64 reference."""
    import cumulant

    q, k, v = tensors(1000)
    for order in (2, 3):
        fast = cumulant.attention(q, k, v, order=order)
        exact = cumulant.attention(q.double(), k.double(), v.double(), order=order, backend="reference")
        error = ((fast - exact).norm() / exact.norm()).item()
        if not error < 1e-6:
            sys.exit(f"order {order} is off by {error:.1e} (relative): not measuring its speed")


def speed() -> list[dict[str, Any]]:
    import torch
    import torch.nn.functional as F

    import cumulant

    rows: list[dict[str, Any]] = []
    with torch.no_grad():
        for L in (256, 1024, 4096, 16384):
            q, k, v = tensors(L)
            rounds = 101 if L <= 1024 else 31
            softmax = partial(F.scaled_dot_product_attention, q, k, v)
            products = partial(two_products, q, k, v)
            for order in (2, 3):
                ours = partial(cumulant.attention, q, k, v, order=order)
                row = {
                    "L": L,
                    "order": order,
                    "over_products": ratio(ours, products, rounds),
                    "plain_over_products": ratio(partial(ours, backend="reference"), products, rounds),
                    "softmax_over_ours": ratio(softmax, ours, *((3, 1) if L == 16384 else (31,))),
                    "step_over_products": step_ratio(ours, products, (q, k, v), 31 if L <= 1024 else 7),
                }
                rows.append(row)
                print(
                    f"L {L:>6}  order {order}:  {row['over_products']['ratio']:5.2f} x the two products"
                    f"   (plain torch {row['plain_over_products']['ratio']:5.2f} x)"
                    f"   softmax takes {row['softmax_over_ours']['ratio']:7.1f} x as long"
                    f"   step {row['step_over_products']['ratio']:5.2f} x that of the products",
                    flush=True,
                )
    return rows


def step_ratio(
    ours: Callable[..., Any], theirs: Callable[..., Any], given: Any, rounds: int, warm: int = 2
) -> dict[str, float]:
    """The same of steps: forward, and gradients of q, k and v. Both are partial functions of tensors without any."""
    import torch

    leaves = [x.detach().requires_grad_() for x in given]
    grad = torch.randn_like(leaves[0])

    def step(f: Any) -> None:
        with torch.enable_grad():
            torch.autograd.grad(f.func(*leaves, **f.keywords), leaves, grad)

    return ratio(partial(step, ours), partial(step, theirs), rounds, warm)


def clusters() -> list[dict[str, Any]]:
    """How many times as long softmax takes as `cluster_attention(clusters=64, near=2)`, right first."""
    import torch
    import torch.nn.functional as F

    import cumulant

    rows: list[dict[str, Any]] = []
    call = partial(cumulant.cluster_attention, clusters=64, near=2)
    with torch.no_grad():
        given = tensors(2048)
        exact = call(*(x.double() for x in given), backend="reference")
        error = ((call(*given) - exact).norm() / exact.norm()).item()
        if not error < 1e-5:
            sys.exit(f"clusters are off by {error:.1e} (relative): not measuring their speed")
        for L in (1024, 4096, 16384):
            given = tensors(L)
            rounds, warm = (3, 1) if L > 4096 else (15, 2)
            softmax = partial(F.scaled_dot_product_attention, *given)
            found = ratio(softmax, partial(call, *given), rounds, warm)
            steps = step_ratio(softmax, call, given, *((2, 1) if L > 4096 else (5, 1)))
            rows.append({"L": L, "softmax_over_ours": found, "softmax_step_over_ours": steps})
            print(
                f"L {L:>6}  64 clusters, near 2: softmax takes {found['ratio']:5.1f} x as long, "
                f"its step {steps['ratio']:5.1f} x",
                flush=True,
            )
    return rows


def two_products(q: Any, k: Any, v: Any) -> Any:
    return q @ (k.mT @ v)


def linearity_child() -> None:
    """Prints time at 2 L over time at L, order 3, both in every round."""
    import torch

    import cumulant

    rows = []
    with torch.no_grad():
        for L in (8192, 16384, 32768):
            long, short = (partial(cumulant.attention, *tensors(n)) for n in (2 * L, L))
            rows.append({"L": L, **ratio(long, short, 15)})
    print(json.dumps(rows))


def linearity() -> dict[str, list[dict[str, float]]]:
    """Twice: as it is, and with glibc told to treat all sizes alike.

    By default glibc hands blocks beyond 32 MiB back to the kernel at every free, so an output of that size (between
    8,192 and 16,384 tokens) starts to pay for fresh pages in every call, whatever computes it.
    """
    alike = {"MALLOC_MMAP_THRESHOLD_": str(1 << 30), "MALLOC_TRIM_THRESHOLD_": str(1 << 31)}
    rows = {}
    for name, environment in (("default", {}), ("one_allocator", alike)):
        command = [sys.executable, __file__, "--linearity-child"]
        done = subprocess.run(command, check=True, capture_output=True, text=True, env={**os.environ, **environment})
        rows[name] = json.loads(done.stdout)
        steps = ", ".join(f"{row['L']} -> {2 * row['L']}: {row['ratio']:.2f} x" for row in rows[name])
        print(f"time at twice the length ({name}): {steps}", flush=True)
    return rows


def memory_child(L: int, order: int) -> None:
    """Prints the bytes that one forward pass adds to the peak of this process, and the bytes of its output."""
    import torch

    import cumulant

    q, k, v = tensors(L)
    with torch.no_grad():
        cumulant.attention(q[..., :64, :], k[..., :64, :], v[..., :64, :], order=order)  # libraries load here
        Path("/proc/self/clear_refs").write_text("5")  # the kernel forgets the peak so far
        before = resident("VmRSS")
        out = cumulant.attention(q, k, v, order=order)
        added = resident("VmHWM") - before
    print(json.dumps({"added": added, "output": out.numel() * out.element_size()}))


def resident(field: str) -> int:
    """Bytes of this process in memory now (VmRSS) or at its peak (VmHWM)."""
    line = next(x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(field))
    return int(line.split()[1]) * 1024


def memory() -> dict[str, object]:
    L = 65536
    command = [sys.executable, __file__, "--memory-child", str(L), "3"]
    measured = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    factor = measured["added"] / measured["output"]
    print(f"L {L} order 3: a forward pass adds {factor:.2f} x the size of its output", flush=True)
    return {"L": L, "order": 3, **measured, "factor": factor}


def import_time() -> dict[str, float]:
    """Seconds that `import cumulant` adds to `import torch`: median of fresh processes."""
    code = "import time, torch; t = time.perf_counter(); import cumulant; print(time.perf_counter() - t)"
    runs = [
        float(subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout)
        for _ in range(7)
    ]
    print(f"import cumulant adds {statistics.median(runs):.3f} s to import torch")
    return {"seconds": statistics.median(runs), "worst": max(runs)}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--memory-child", nargs=2, type=int, metavar=("L", "ORDER"), help=argparse.SUPPRESS)
    parser.add_argument("--linearity-child", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.linearity_child:
        linearity_child()
        return
    if arguments.memory_child:
        memory_child(*arguments.memory_child)
        return
    from cumulant.bench.provenance import provenance

    check()
    result = {
        "setting": f"float32, batch 1, {H} heads, width {D}, forward pass and step (with gradients of q, k, v)",
        "speed": speed(),
        "clusters": clusters(),
        "linearity": linearity(),
        "memory": memory(),
        "import": import_time(),
        **provenance("python benchmarks/cpu.py"),
    }
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(result, indent=1) + "\n")
    print(f"wrote benchmarks/results/{RESULTS.name}")


if __name__ == "__main__":
    main()
