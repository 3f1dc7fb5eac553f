"""Cluster attention on the GPU: correct first, then forward and training step beside every backend of SDPA.

    python benchmarks/gpu_cluster.py            one response for all clusters at 16,384 and 65,536 tokens and at 4,096,
                                                then all responses and 16 of them at 16,384: times and memory; then the
                                                time of each kernel
    python benchmarks/gpu_cluster.py --forms pooled          (or all, 16): only these
    python benchmarks/gpu_cluster.py --plain    the same, with plain torch beside it up to 16,384
    python benchmarks/gpu_cluster.py --tune     kernels one by one, with a few other configurations of each, then the
                                                rows of one response with the best of them
    python benchmarks/gpu_cluster.py --tune KERNEL ...       everything with the table first, then other configurations
                                                of these kernels and the rows with the best of them
    python benchmarks/gpu_cluster.py --check    outputs and gradients for many shapes and types (compiles for minutes)
    python benchmarks/gpu_cluster.py --quick    tiny sizes, on the CPU in Triton's interpreter: that all of it runs

bfloat16, B 1, H 12, D 64, one near field for 128 queries in a row, medians over replays of a CUDA graph (events where
one call takes more than 20 ms). Tokens are smooth in time with noise on top, so that blocks mean something; the error
is that against softmax on sampled queries, ||out - softmax|| / ||softmax - mean of v||. Kernels (in
gpu_cluster_kernels.py) are compiled in parallel first. JSON goes to $OUT/gpu_cluster.json if OUT is set. Run with
PYTHONPATH=src.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from gpu_cluster_kernels import (  # before triton and torch: it says whether kernels are interpreted
    CANDIDATES,
    QUICK,
    TUNED,
    Form,
    Row,
    Save,
    compile_all,
    eager_milliseconds,
    inputs,
    milliseconds,
    parts,
    tune,
)

import torch  # isort: skip
import torch.nn.functional as F  # isort: skip
from torch import Tensor  # isort: skip
from torch.nn.attention import SDPBackend, sdpa_kernel  # isort: skip

from cumulant.cluster import cluster_attention  # isort: skip

PEERS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
GOALS = {16384: (8, 6), 65536: (25, 25)}  # times faster than the best backend of SDPA: forward, training step
FORMS: dict[str, list[tuple[int, Form]]] = {
    "pooled": [
        (16384, Form(64, "pooled")),
        (65536, Form(128, "pooled")),
        (65536, Form(256, "pooled")),
        (65536, Form(64, "pooled")),
        (4096, Form(64, "pooled")),
    ],
    "all": [(16384, Form(64, None))],
    "16": [(16384, Form(64, 16, "mass"))],
}  # fmt: skip
if QUICK:
    FORMS = {"pooled": [(96, Form(6, "pooled"))], "all": [(96, Form(6, None))], "16": []}
Case = tuple[int, int, int, torch.dtype, dict[str, Any]]
HALF = torch.bfloat16
WIDE: list[Case] = [
    (1000, 64, 64, HALF, dict(clusters=33, near=3, near_rows=64, closure="langevin")),
    (1777, 80, 40, HALF, dict(clusters=100, near=1, near_rows=128, rank="error")),
    (1777, 80, 40, HALF, dict(clusters=100, near=1, near_rows=128, rank="mean", response="pooled")),
    (1500, 128, 128, HALF, dict(clusters=24, near=2, near_rows=128)),
    (1500, 128, 128, HALF, dict(clusters=24, near=2, near_rows=128, rank="mean", response="pooled")),
    (900, 32, 32, torch.float16, dict(clusters=16, near=2, near_rows=32, closure="gauss")),
    (1024, 64, 64, torch.float16, dict(clusters=32, near=0, response="pooled")),
    (700, 64, 64, torch.float32, dict(clusters=16, near=2, near_rows=64, rank="mean", response="pooled")),
    (700, 64, 64, torch.float32, dict(clusters=16, near=2, near_rows=64)),
    (900, 64, 64, HALF, dict(clusters=(5, 5), grid=(30, 30), near=0, response=0)),
]
TINY: list[Case] = [
    (70, 32, 24, HALF, dict(clusters=6, near=2, near_rows=32, rank="mean", response="pooled")),
    (70, 32, 24, torch.float32, dict(clusters=6, near=1, near_rows=32)),
]


def gates(forms: Sequence[Form]) -> list[Case]:
    """Forms at 128 tokens a cluster, so that the kernels compared are those that are timed, for 4,096 queries.

    Ranked by mass, though, at 4,096 tokens: where two clusters of a tile have the same mass to 4 digits, kernel and
    float64 may take one for near that the other does not, and gradients of its keys differ by more than rounding; that
    does not happen in these tokens. Means are ranked in float32.
    """
    return [(128 * f.clusters if f.rank == "mean" else 4096, 64, 64, HALF, f.options) for f in forms]


def check(cases: Sequence[Case]) -> bool:
    """Outputs and gradients beside plain torch in float64 and in the same precision; a line for each case."""
    right = True
    for L, D, E, dtype, options in cases:
        *tokens, grad = inputs(L, D, E, dtype)
        tokens[0], grad = tokens[0][:, :, :4096], grad[:, :, :4096]
        if options.get("closure") == "gauss":
            tokens[0] = tokens[0] * 0.3
        found = []
        for backend, kind in (("triton", dtype), ("reference", dtype), ("reference", torch.float64)):
            leaves = [x.to(kind).requires_grad_() for x in tokens]
            out = cluster_attention(*leaves, backend=backend, **options)
            found.append([out.detach(), *torch.autograd.grad(out, leaves, grad.to(kind))])
        ours, plain = ([float((x.double() - y).norm() / y.norm()) for x, y in zip(f, found[2], strict=True)]
                       for f in found[:2])  # fmt: skip
        limit = 1e-5 if dtype == torch.float32 else 0.0
        fine = all(
            a <= max(2 * b + (0 if limit else 1e-4), limit) for a, b in zip(ours, plain, strict=True)
        )  # False for NaN
        right &= fine
        name = f"L {L} D {D} E {E} {str(dtype)[6:]} {options}"
        errors = " ".join(f"{a:.1e}/{b:.1e}" for a, b in zip(ours, plain, strict=True))
        print(f"{'PASS' if fine else 'FAIL'}  {errors}  {name}", flush=True)
    return right


def peer_times(leaves: list[Tensor], grad: Tensor) -> dict[str, float]:
    """scaled_dot_product_attention by each backend: forward, and forward with backward."""
    sdpa, times = F.scaled_dot_product_attention, {}
    for name, backend in PEERS.items():
        if name == "efficient" and leaves[0].shape[-2] > 16384:  # seconds, for the slowest of them
            continue
        try:
            with sdpa_kernel(backend):
                with torch.no_grad():
                    times[f"{name}_forward_ms"] = milliseconds(lambda: sdpa(*leaves))
                times[f"{name}_both_ms"] = milliseconds(lambda: torch.autograd.grad(sdpa(*leaves), leaves, grad))
        except RuntimeError as problem:  # a backend that this build or shape does not have
            print(f"skipped SDPA {name}: {str(problem).splitlines()[0]}", flush=True)
    if not times:
        return {"sdpa_forward_ms": float("nan"), "sdpa_both_ms": float("nan")}
    for what in ("forward", "both"):
        times[f"sdpa_{what}_ms"] = min(t for key, t in times.items() if key.endswith(f"_{what}_ms"))
    return times


def memory(function: Callable[[], Any]) -> float:
    """MiB that a call holds at its peak beyond what was there before."""
    if QUICK:
        return 0.0
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    function()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def error(out: Tensor, q: Tensor, k: Tensor, v: Tensor) -> float:
    """Relative error against softmax on every 64th query."""
    rows = q[:, :, ::64].float()
    exact = (rows @ k.float().mT * q.shape[-1] ** -0.5).softmax(-1) @ v.float()
    return float((out[:, :, ::64].float() - exact).norm() / (exact - v.float().mean(-2, keepdim=True)).norm())


def measure(L: int, form: Form, save: Save, peers: dict[int, Row], plain: bool) -> None:
    """Softmax, once for a length, and cluster attention."""
    q, k, v, grad = inputs(L)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if L not in peers:
        peers[L] = peer_times(leaves, grad)
        print(f"L {L}: " + "  ".join(f"{name} {t:.3f}" for name, t in peers[L].items()), flush=True)
        save({"L": L, "method": "softmax", **peers[L]})

    def call(backend: str = "triton") -> Tensor:
        return cluster_attention(*leaves, backend=backend, **form.options)

    def step(backend: str = "triton") -> tuple[Tensor, ...]:
        return torch.autograd.grad(call(backend), leaves, grad)

    row: Row = {"L": L, "method": "cluster", **form._asdict()}
    with torch.no_grad():
        row["error"] = error(call(), q, k, v)
        row["forward_ms"], row["forward_eager_ms"] = milliseconds(call), eager_milliseconds(call)
        row["forward_mib"] = memory(call)
    row["both_ms"], row["both_eager_ms"] = milliseconds(step), eager_milliseconds(step)
    row["both_mib"] = memory(step)
    row["forward_times"] = peers[L]["sdpa_forward_ms"] / row["forward_ms"]
    row["both_times"] = peers[L]["sdpa_both_ms"] / row["both_ms"]
    said = ""
    if plain and L <= 16384:
        with torch.no_grad():
            row["plain_forward_ms"] = eager_milliseconds(lambda: call("reference"))
        row["plain_both_ms"] = eager_milliseconds(lambda: step("reference"))
        said = f" | plain {row['plain_forward_ms']:.1f}, {row['plain_both_ms']:.1f} ms"
    goal = GOALS.get(L, (0, 0))
    print(
        f"L {L:6d} K {form.clusters:4d} near {form.near} response {form.response!s:6s} rank {form.rank}"
        f" error {row['error']:.3f} | forward {row['forward_ms']:.4f} ms (eager {row['forward_eager_ms']:.3f})"
        f" {row['forward_times']:.1f} x"
        f" (goal {goal[0]}) {row['forward_mib']:.0f} MiB | both {row['both_ms']:.4f} ms (eager"
        f" {row['both_eager_ms']:.3f}) {row['both_times']:.1f} x (goal {goal[1]}) {row['both_mib']:.0f} MiB{said}",
        flush=True,
    )
    save(row)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("quick", "plain", "check"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--forms", nargs="+", choices=list(FORMS), default=list(FORMS))
    parser.add_argument("--tune", nargs="*", choices=list(CANDIDATES), metavar="KERNEL")
    parser.add_argument("--name", default="gpu_cluster", help="of the JSON file")
    options = parser.parse_args()
    results: list[Row] = []
    begin = time.perf_counter()

    def save(row: Row) -> None:
        results.append(row)
        if os.environ.get("OUT"):
            Path(os.environ["OUT"], f"{options.name}.json").write_text(json.dumps(results, indent=1))

    def say(what: str) -> None:
        print(f"[{time.perf_counter() - begin:.0f} s] {what}", flush=True)

    def right(cases: Sequence[Case]) -> None:
        if not check(cases):
            sys.exit("the kernels are wrong: no speed is measured")
        say("checked")

    peers = dict[int, Row]()
    tuned = [] if options.tune is None else options.tune or list(CANDIDATES)
    names = ["pooled"] if options.tune == [] else options.forms
    every = list(dict.fromkeys(form for name in names for _, form in FORMS[name]))
    with ProcessPoolExecutor(1 if QUICK else 15, mp_context=get_context("spawn")) as pool:
        later = [] if QUICK else compile_all(pool, every, tuned)
        say("compiled")
        if options.check:
            right([*gates(every), *WIDE])
            return
        for name in names:
            if FORMS[name]:
                right(TINY if QUICK else gates(list(dict.fromkeys(form for _, form in FORMS[name]))))
            if options.tune != []:
                for L, form in FORMS[name]:
                    measure(L, form, save, peers, options.plain)
                say("measured")
        for L, form in TUNED if "pooled" in names else ():
            parts(L, form, save)
        say("parts")
        if tuned:
            for future in later:
                future.result()
            tune(save, tuned)
            say("tuned; with the best of each kernel:")
            for L, form in FORMS["pooled"]:
                measure(L, form, save, peers, options.plain)
        say("done")


if __name__ == "__main__":
    main()
