"""What a user gets by calling it: public functions with their defaults on a GPU, beside softmax of the same run.

    PYTHONPATH=src python benchmarks/gpu_called.py             every case: correct first, then times
    PYTHONPATH=src python benchmarks/gpu_called.py --only masked grouped
    PYTHONPATH=src python benchmarks/gpu_called.py --sinks     causal clusters with and without sinks, and no other
    PYTHONPATH=src python benchmarks/gpu_called.py --check     only that outputs and gradients are right
    PYTHONPATH=src python benchmarks/gpu_called.py --profile cluster      and the time of each kernel of a step
    PYTHONPATH=src python benchmarks/gpu_called.py --check --verdicts F   keeps in F what was right; without --check
                                                                          times what F says is, of the same commit

Correct: outputs and gradients of the call at full length (one sequence, one or two heads) are at most twice as far from
plain torch in float64 as plain torch in the same precision is. Cases are checked in processes of their own, which then
make the whole call, so that its kernels are compiled; no time is taken where one is wrong, and cases that fall back to
plain torch say so.

Times in ms: forward and training step (forward and backward) in a CUDA graph; the same as called from Python, one call
after the other; and the host's time of a call in microseconds, launches alone, beside that of SDPA. Softmax is the
quicker of cuDNN and flash (from 4,096 tokens on that is cuDNN, and flash is not timed). JSON goes to
$OUT/gpu_called.json (gpu_sinks.json) if OUT is set.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cumulant import attention, cluster_attention
from cumulant.bench.provenance import provenance
from cumulant.cluster import Blocks, KMeans
from cumulant.kernels.notice import SlowPathWarning

FROM_PYTHON = "medians; of calls below a millisecond, where the host is what is timed, the least of three"
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}


class Case(NamedTuple):
    """One public call: batch, query heads, key heads, tokens, width, and what is called with which options."""

    B: int
    H: int
    Hk: int
    L: int
    D: int
    function: Callable[..., Tensor]
    options: dict[str, Any]
    masked: bool = False  # a key mask: each sequence has a length of its own
    goal: tuple[float, float] = (0, 0)  # times softmax, forward and step


def case(B: int, H: int, L: int, D: int, Hk: int = 0, masked: bool = False, goal: Any = (0, 0), **options: Any) -> Case:
    function = attention if "order" in options else cluster_attention
    return Case(B, H, Hk or H, L, D, function, options, masked, goal)


CASES: dict[str, Case] = {
    "cluster": case(8, 12, 16384, 64, clusters=64, near=2, goal=(15, 12)),
    "causal": case(1, 12, 16384, 64, clusters=Blocks(64, keep=16, recent=1), is_causal=True, goal=(10, 8)),
    "causal 64": case(8, 12, 16384, 64, clusters=64, is_causal=True, goal=(10, 8)),
    "causal near": case(8, 12, 16384, 64, clusters=64, near=2, is_causal=True, goal=(10, 8)),
    "causal near, B 1": case(1, 12, 16384, 64, clusters=64, near=2, is_causal=True, goal=(10, 8)),
    "causal means": case(
        8, 12, 16384, 64, clusters=Blocks(64, keep=16, recent=1), is_causal=True, response=0, goal=(10, 8)
    ),
    "causal sinks": case(
        8, 12, 16384, 64, clusters=Blocks(64, keep=16, recent=1), is_causal=True, response=0, prefix=4, goal=(10, 8)
    ),
    "order 2, 64": case(256, 12, 64, 64, order=2, goal=(1, 1)),
    "kmeans": case(1, 12, 16384, 64, clusters=KMeans(64), near=0),
    "kmeans near": case(1, 12, 16384, 64, clusters=KMeans(64), near=2),
    "kmeans, B 8": case(8, 12, 16384, 64, clusters=KMeans(64), near=0),
    "kmeans near, B 8": case(8, 12, 16384, 64, clusters=KMeans(64), near=2),
    "blocks": case(1, 12, 16384, 64, clusters=64, near=0),
    "masked": case(8, 12, 16384, 64, masked=True, clusters=64, near=2, goal=(10, 8)),
    "long": case(2, 12, 65536, 64, clusters=256, near=2, goal=(40, 0)),
    "grid 64k": case(1, 4, 65536, 96, clusters=(8, 8), grid=(256, 256), near=4, goal=(18, 0)),
    "grid 64k, 256": case(1, 4, 65536, 96, clusters=(16, 16), grid=(256, 256), near=4, goal=(18, 0)),
    "4k": case(8, 12, 4096, 64, clusters=64, near=2, goal=(1, 1)),
    "order 3, 64": case(256, 12, 64, 64, order=3, goal=(1, 1)),
    "grid 4k": case(1, 4, 4096, 96, clusters=(8, 8), grid=(64, 64), near=4, goal=(1, 1)),
    "order 2, 16k": case(8, 12, 16384, 64, order=2),
    "order 3, 16k": case(8, 12, 16384, 64, order=3),
    "order 2, 197": case(64, 12, 197, 64, order=2),
    "far only": case(8, 12, 16384, 64, clusters=64),
    "causal 2, 16k": case(8, 12, 16384, 64, order=2, is_causal=True),
    "causal 3, 16k": case(8, 12, 16384, 64, order=3, is_causal=True),
    "prefix": case(8, 12, 16385, 64, clusters=64, near=2, prefix=1),
    "grouped": case(8, 12, 16384, 64, Hk=4, clusters=64, near=2, enable_gqa=True),
    "short": case(256, 12, 256, 64, clusters=16),
}

PAST: dict[str, Any] = {"clusters": Blocks(64, keep=16, recent=1), "is_causal": True}
KINDS: dict[str, dict[str, Any]] = {"means": {"response": 0}, "covariances": {}}
SINKS: dict[str, Case] = {  # 64 of them once: more than a few are the price of a block of tokens
    f"{kind}, B {B}, {L:,}, {sinks} sinks": case(B, 12, L, 64, **PAST, **options, prefix=sinks)
    for kind, options in KINDS.items()
    for B in (1, 8)
    for L in (8192, 16384)
    for sinks in ((0, 4, 64) if (kind, B, L) == ("means", 8, 16384) else (0, 4))
}
EVERY = CASES | SINKS


def inputs(case: Case, B: int = 0, heads: int = 0) -> tuple[list[Tensor], Tensor, dict[str, Any]]:
    """query, key, value, smooth in time with noise on top; a gradient of the output; the options with their mask."""
    B, group = B or case.B, case.H // case.Hk
    Hk = heads or case.Hk
    generator = torch.Generator("cuda").manual_seed(case.L)

    def smooth(H: int, noise: float) -> Tensor:
        slow = torch.randn(B * H, case.D, max(4, case.L // 100), generator=generator, device="cuda")
        slow = F.interpolate(slow, case.L, mode="linear").mT.view(B, H, case.L, case.D)
        slow += noise * torch.randn(slow.shape, generator=generator, device="cuda")
        return slow

    tensors = [smooth(Hk * group, 0.3) * 1.5, smooth(Hk, 0.5) + 0.5, smooth(Hk, 0.5) + 0.5]
    tensors = [x.bfloat16().contiguous() for x in tensors]
    options = dict(case.options)
    if case.masked:
        lengths = torch.linspace(0.6, 1, B, device="cuda")[:, None] * case.L
        options["key_mask"] = torch.arange(case.L, device="cuda") < lengths
    return tensors, torch.randn(tensors[0].shape, generator=generator, device="cuda").bfloat16(), options


def check(case: Case) -> bool:
    """Whether outputs and gradients are right; prints their errors beside plain torch's."""
    leaves, grad, options = inputs(case, B=2 if case.masked else 1, heads=1)
    if isinstance(options.get("clusters"), KMeans):  # one choice of clusters for all: near ties are not the kernels'
        from cumulant.cluster import alike, kmeans_assignment
        from cumulant.cluster import attention as cluster

        options["clusters"] = kmeans_assignment(leaves[0], leaves[1], options["clusters"])
        if options["near"]:  # and one order of the queries, and near clusters chosen in float32
            options["rank"] = "mean"
            order = alike.order_by_content(leaves[0], leaves[1], None, 64)
            cluster.order_by_content = lambda *given: order
    found, slow = [], []
    for backend, kind in (("auto", torch.bfloat16), ("reference", torch.bfloat16), ("reference", torch.float64)):
        own = [x.to(kind).requires_grad_() for x in leaves]
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            out = case.function(*own, backend=backend, **options)
        slow += [str(w.message).splitlines()[0] for w in caught if issubclass(w.category, SlowPathWarning)]
        found.append([out.detach(), *torch.autograd.grad(out, own, grad.to(kind))])
    ours, plain = (
        [float((x.double() - y).norm() / y.norm()) for x, y in zip(f, found[2], strict=True)] for f in found[:2]
    )
    right = all(a <= 2 * b + 1e-4 for a, b in zip(ours, plain, strict=True))  # False for NaN
    errors = " ".join(f"{a:.1e}/{b:.1e}" for a, b in zip(ours, plain, strict=True))
    print(f"{'PASS' if right else 'FAIL'} {errors} {'PLAIN TORCH: ' + slow[0] if slow else ''}", flush=True)
    return right


def whole_step(case: Case) -> None:
    """One training step of the whole call, and one without gradients: what is compiled for its size then is."""
    leaves, grad, options = inputs(case)
    with torch.no_grad():
        case.function(*leaves, **options)
    leaves = [x.requires_grad_() for x in leaves]
    torch.autograd.grad(case.function(*leaves, **options), leaves, grad)


def graph_ms(function: Callable[[], Any]) -> float:
    """Median over replays of a CUDA graph; as called where a call takes long."""
    import triton

    function()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    function()
    torch.cuda.synchronize()
    once = (time.perf_counter() - begin) * 1e3
    if once > 100:
        return once
    with torch.cuda.stream(torch.cuda.Stream()):
        return float(triton.testing.do_bench_cudagraph(function, rep=20, return_mode="median"))


def called_ms(function: Callable[[], Any]) -> float:
    """Median of a call after the other, from Python; of short ones the least of three such, 30 ms each: the host, which
    is then what is timed, has slow moments that hit one call and not the next."""
    import triton

    def median() -> float:
        return float(triton.testing.do_bench(function, warmup=5, rep=30, return_mode="median"))

    found = median()
    return found if found > 1 else min(found, median(), median())


def host_us(function: Callable[[], Any], times: int = 5) -> float:
    """The host's time of a call: so few that the device's queue never fills."""
    found = []
    for _ in range(7):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(times):
            function()
        found.append((time.perf_counter() - begin) / times * 1e6)
    return statistics.median(found)


def times(call: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> dict[str, float]:
    def step() -> Any:
        return torch.autograd.grad(call(*leaves), leaves, grad)

    row = {}
    with torch.no_grad():
        row |= {"forward": graph_ms(lambda: call(*leaves)), "forward_called": called_ms(lambda: call(*leaves))}
    row |= {"step": graph_ms(step), "step_called": called_ms(step)}
    if row["step"] < 12:  # else the queue is full before a few calls are in it
        with torch.no_grad():
            row["forward_host_us"] = host_us(lambda: call(*leaves))
        row["step_host_us"] = host_us(step)
    return row


def measure(case: Case, peers: dict[Any, dict[str, float]]) -> dict[str, Any]:
    leaves, grad, options = inputs(case)
    leaves = [x.requires_grad_() for x in leaves]
    causal = bool(options.get("is_causal"))
    shape = (*case[:5], causal)
    if shape not in peers:
        found, group = [], case.H != case.Hk
        softmax = partial(F.scaled_dot_product_attention, is_causal=causal, enable_gqa=group)
        for name, backend in PEERS.items():
            if name == "flash" and case.L >= 4096:
                continue
            try:
                with sdpa_kernel(backend):
                    found.append(times(softmax, leaves, grad))
            except RuntimeError as problem:
                print(f"no SDPA: {str(problem).splitlines()[0]}", flush=True)
        peers[shape] = {key: min(x[key] for x in found if key in x) for key in found[0]} if found else {}
    ours, peer = times(lambda *x: case.function(*x, **options), leaves, grad), peers[shape]
    ratios = {f"{key}_times": peer[key] / ours[key] for key in ours if "host" not in key and key in peer}
    return {**ours, **{f"softmax_{key}": t for key, t in peer.items()}, **ratios}


def profile(case: Case) -> dict[str, float]:
    """Milliseconds of each kernel of a training step, the longest first."""
    leaves, grad, options = inputs(case)
    leaves = [x.requires_grad_() for x in leaves]
    for _ in range(6):  # the first ones compile, and compute both ways what will be repeated
        torch.autograd.grad(case.function(*leaves, **options), leaves, grad)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as trace:
        for _ in range(3):
            torch.autograd.grad(case.function(*leaves, **options), leaves, grad)
        torch.cuda.synchronize()
    rows = sorted(trace.key_averages(), key=lambda e: -e.self_device_time_total)[:14]
    found: dict[str, float] = {}
    for event in rows:
        name = event.key.split("<")[0].split("(")[0].split("::")[-1].strip()[:40]
        found[name] = found.get(name, 0.0) + event.self_device_time_total / 3e3
    print("  " + "  ".join(f"{name} {ms:.3f}" for name, ms in found.items()), flush=True)
    return found


def line(name: str, row: dict[str, Any], goal: tuple[float, float]) -> str:
    def number(key: str, form: str = ".3f") -> str:
        return format(row[key], form) if key in row else "-"

    hosts = [f"{number(f'{x}_host_us', '.0f')} ({number(f'softmax_{x}_host_us', '.0f')})" for x in ("forward", "step")]
    parts = [name]
    for what, aim in zip(("forward", "step"), goal, strict=True):
        parts += [
            f"{number(what)} / {number(f'softmax_{what}')}",
            number(f"{what}_times", ".1f"),
            f"{aim:g}" if aim else "",
        ]
        parts += [number(f"{what}_called_times", ".1f")]
    return "| " + " | ".join([*parts, *hosts]) + " |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(EVERY), default=[])
    parser.add_argument("--sinks", action="store_true")
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--one", help="check one case in this process", choices=list(EVERY))
    parser.add_argument("--verdicts", type=Path, help="file of what was right")
    parser.add_argument("--workers", type=int, default=12, help="cases that are checked at once")
    parser.add_argument("--profile", nargs="*", default=[], choices=list(EVERY))
    options = parser.parse_args()
    if options.one:
        right = check(EVERY[options.one])
        try:
            whole_step(EVERY[options.one])
        except torch.OutOfMemoryError:  # beside others: what is compiled for its size then is when it is timed
            print("no room for the whole call")
        sys.exit(0 if right else 1)
    options.only = options.only or list(SINKS if options.sinks else CASES)
    begin = time.perf_counter()

    def alone(name: str) -> bool:
        done = subprocess.run([sys.executable, __file__, "--one", name], capture_output=True, text=True, check=False)
        said = [x for x in done.stdout.splitlines() if x[:4] in ("PASS", "FAIL")] or done.stderr.splitlines()[-3:]
        print(f"[{time.perf_counter() - begin:.0f} s] {name}: {' '.join(said)}", flush=True)
        return done.returncode == 0

    commit, right = provenance("")["commit"], {}
    if options.verdicts is not None and not options.check:
        known = json.loads(options.verdicts.read_text())
        right = known["right"] if known["commit"] == commit else {}
    left = [name for name in options.only if name not in right]
    with ThreadPoolExecutor(options.workers) as pool:
        for name, fine in zip(left, pool.map(alone, left), strict=True):
            right[name] = fine
            if options.verdicts is not None and options.check:  # as they come: a check that is stopped keeps them
                options.verdicts.write_text(json.dumps({"commit": commit, "right": right}))
    rows: dict[str, Any] = {}
    peers: dict[Any, dict[str, float]] = {}
    heads = [f"{what} / softmax, ms | times | goal | from Python, times" for what in ("forward", "step")]
    print(f"| call | {' | '.join(heads)} | host us, forward (SDPA) | step (SDPA) |\n|" + "---|" * 11, flush=True)
    for name in () if options.check else options.only:
        if not right[name]:
            print(f"| {name} | wrong: no time |", flush=True)
            continue
        try:
            rows[name] = measure(EVERY[name], peers) | {"goal": EVERY[name].goal}
        except RuntimeError as problem:
            print(f"| {name} | {str(problem).splitlines()[0]} |", flush=True)
            continue
        print(line(name, rows[name], EVERY[name].goal), f"[{time.perf_counter() - begin:.0f} s]", flush=True)
        if os.environ.get("OUT"):
            wrong = [name for name, fine in right.items() if not fine]
            command = "python benchmarks/gpu_called.py" + " --sinks" * options.sinks
            found = provenance(command, gpu=True) | {"cases": rows, "wrong": wrong, "called": FROM_PYTHON}
            file = "gpu_sinks.json" if options.sinks else "gpu_called.json"
            Path(os.environ["OUT"], file).write_text(json.dumps(found, indent=1, default=str))
    for name in options.profile:
        print(name, flush=True)
        profile(EVERY[name])
    print(f"[{time.perf_counter() - begin:.0f} s] done", flush=True)
    sys.exit(0 if all(right[name] for name in options.only) else 1)


if __name__ == "__main__":
    main()
