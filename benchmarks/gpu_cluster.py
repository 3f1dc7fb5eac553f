"""Cluster attention on the GPU: correct first, then forward and training step beside every backend of SDPA.

    python benchmarks/gpu_cluster.py            lengths 16,384, 65,536 and 4,096: times and memory, all responses first;
                                                then the time of each kernel
    python benchmarks/gpu_cluster.py --plain    the same, with plain torch beside it up to 16,384
    python benchmarks/gpu_cluster.py --tune     at 16,384: the time of each kernel, then of a few other configurations
                                                of each, then 16,384 and 65,536 tokens with the best of them
    python benchmarks/gpu_cluster.py --tune KERNEL ...     everything with the table first, then other configurations
                                                of these kernels and 16,384 tokens with the best of them
    python benchmarks/gpu_cluster.py --parts    time of each kernel, with and without near field and responses
    python benchmarks/gpu_cluster.py --check    outputs and gradients for many shapes and types (compiles for minutes)
    python benchmarks/gpu_cluster.py --quick    tiny sizes, on the CPU in Triton's interpreter: that all of it runs

bfloat16, B 1, H 12, D 64, one near field for 128 queries in a row, medians over replays of a CUDA graph (events where
one call takes more than 20 ms). Tokens are smooth in time with noise on top, so that blocks mean something; the error
is that against softmax on sampled queries, ||out - softmax|| / ||softmax - mean of v||. Kernels are compiled in
parallel first. JSON goes to $OUT/gpu_cluster.json if OUT is set. Run with PYTHONPATH=src.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

QUICK = "--quick" in sys.argv
if QUICK:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import triton  # noqa: E402
from torch import Tensor  # noqa: E402
from torch.nn.attention import SDPBackend, sdpa_kernel  # noqa: E402

from cumulant.cluster import cluster_attention  # noqa: E402
from cumulant.kernels import cluster_plan, triton_cluster  # noqa: E402
from cumulant.kernels.launch import Config  # noqa: E402

DEVICE = "cpu" if QUICK else "cuda"
HEADS, WIDTH, TILE = (1, 32, 32) if QUICK else (12, 64, 128)
LENGTHS = (192,) if QUICK else (16384, 65536, 4096)
PEERS = {
    "flash": SDPBackend.FLASH_ATTENTION,
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
}
GOALS = {16384: (8, 6), 65536: (25, 25)}  # times faster than the best backend of SDPA: forward, training step
Row = dict[str, Any]


def cases(L: int) -> list[Row]:
    """Clusters, near field and responses measured at length L."""
    if QUICK:
        return [dict(clusters=6, near=2, response=None), dict(clusters=6, near=2, response=2)]
    rows = [dict(clusters=64, near=2, response=r) for r in (None, 16)]
    return rows if L < 65536 else [*rows, dict(clusters=256, near=2, response=16)]


def milliseconds(function: Callable[[], Any], rep: int = 20) -> float:
    """Time on the device: replays of a CUDA graph, so that Python and launches do not enter."""
    if QUICK or DEVICE == "cpu":
        start = time.perf_counter()
        function()
        return (time.perf_counter() - start) * 1e3
    function()
    once = min(_by_events(function) for _ in range(2))
    if once > 20:
        return min(once, _by_events(function))
    with torch.cuda.stream(torch.cuda.Stream()):
        return float(triton.testing.do_bench_cudagraph(function, rep=rep, return_mode="median"))


def _by_events(function: Callable[[], Any]) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    function()
    end.record()
    torch.cuda.synchronize()
    return float(start.elapsed_time(end))


def eager_milliseconds(function: Callable[[], Any]) -> float:
    """Time as called from Python, one call after the other."""
    if QUICK:
        return milliseconds(function)
    return float(triton.testing.do_bench(function, warmup=5, rep=20, return_mode="median"))


def inputs(L: int, D: int = WIDTH, E: int = WIDTH, dtype: torch.dtype = torch.bfloat16, B: int = 1) -> list[Tensor]:
    """query, key, value and a gradient of the output: smooth in time, noise on top, logits of spread about 2."""
    generator = torch.Generator(DEVICE).manual_seed(L + D)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, device=DEVICE)

    def smooth(width: int, noise: float) -> Tensor:
        slow = F.interpolate(draw(B * HEADS, width, max(4, L // 100)), L, mode="linear").mT
        return (slow + noise * draw(B * HEADS, L, width)).view(B, HEADS, L, width)

    q, k, v, grad = smooth(D, 0.3) * 1.5, smooth(D, 0.5) + 0.5, smooth(E, 0.5) + 0.5, draw(B, HEADS, L, E)
    return [x.to(dtype).contiguous() for x in (q, k, v, grad)]


def check(responses: Sequence[int | None], many: bool = False) -> bool:
    """Outputs and gradients beside plain torch in float64 and in the same precision; a line for each case."""
    right = True
    half = torch.bfloat16
    # Where two clusters of a tile have the same mass to 4 digits, kernel and float64 may take one for near that the
    # other does not, and gradients of its keys differ by more than rounding: that does not happen in these tokens.
    here = [(4096, 64, 64, half, dict(clusters=64, near=2, near_rows=128, response=r)) for r in responses]
    wide: list[tuple[int, int, int, torch.dtype, dict[str, Any]]] = [
        (1000, 64, 64, half, dict(clusters=33, near=3, near_rows=64, closure="langevin")),
        (1777, 80, 40, half, dict(clusters=100, near=1, near_rows=128, rank="error")),
        (1500, 128, 128, half, dict(clusters=24, near=2, near_rows=128)),
        (900, 32, 32, torch.float16, dict(clusters=16, near=2, near_rows=32, closure="gauss")),
        (1024, 64, 64, torch.float16, dict(clusters=32, near=0)),
        (700, 64, 64, torch.float32, dict(clusters=16, near=2, near_rows=64)),
        (900, 64, 64, half, dict(clusters=(5, 5), grid=(30, 30), near=0, response=0)),
    ]
    tiny = [(70, 32, 24, half, dict(clusters=6, near=2, near_rows=32, response=2)),
            (70, 32, 24, torch.float32, dict(clusters=6, near=1, near_rows=32))]  # fmt: skip
    for L, D, E, dtype, options in tiny if QUICK else [*here, *(wide if many else [])]:
        *tokens, grad = inputs(L, D, E, dtype)
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


def measure(L: int, save: Callable[[Row], None], peers: dict[int, Row], response: int | None, plain: bool) -> None:
    """Softmax, once for a length, and the cases with as many responses."""
    q, k, v, grad = inputs(L)
    leaves = [x.requires_grad_() for x in (q, k, v)]
    if L not in peers:
        peers[L] = peer_times(leaves, grad)
        print(f"L {L}: " + "  ".join(f"{name} {t:.3f}" for name, t in peers[L].items()), flush=True)
        save({"L": L, "method": "softmax", **peers[L]})
    for case in cases(L):
        if case["response"] != response:
            continue

        def call(backend: str = "triton", case: Row = case) -> Tensor:
            return cluster_attention(*leaves, near_rows=TILE, backend=backend, **case)

        def step(backend: str = "triton", call: Callable[..., Tensor] = call) -> tuple[Tensor, ...]:
            return torch.autograd.grad(call(backend), leaves, grad)

        row: Row = {"L": L, "method": "cluster", **case}
        with torch.no_grad():
            row["error"] = error(call(), q, k, v)
            row["forward_ms"], row["forward_eager_ms"] = milliseconds(call), eager_milliseconds(call)
            row["forward_mib"] = memory(call)
        row["both_ms"], row["both_eager_ms"] = milliseconds(step), eager_milliseconds(step)
        row["both_mib"] = memory(step)
        row["forward_times"] = peers[L]["sdpa_forward_ms"] / row["forward_ms"]
        row["both_times"] = peers[L]["sdpa_both_ms"] / row["both_ms"]
        if plain and case["response"] is None and L <= 16384:
            with torch.no_grad():
                row["plain_forward_ms"] = eager_milliseconds(lambda call=call: call("reference"))  # type: ignore[misc]
            row["plain_both_ms"] = eager_milliseconds(lambda step=step: step("reference"))  # type: ignore[misc]
        goal = GOALS.get(L, (0, 0))
        print(
            f"L {L:6d} K {case['clusters']:4d} near {case['near']} response {case['response']!s:5s}"
            f" error {row['error']:.3f} | forward {row['forward_ms']:.4f} ms (eager {row['forward_eager_ms']:.3f})"
            f" {row['forward_times']:.1f} x"
            f" (goal {goal[0]}) {row['forward_mib']:.0f} MiB | both {row['both_ms']:.4f} ms (eager"
            f" {row['both_eager_ms']:.3f}) {row['both_times']:.1f} x (goal {goal[1]}) {row['both_mib']:.0f} MiB"
            + (
                f" | plain {row['plain_forward_ms']:.1f}, {row['plain_both_ms']:.1f} ms"
                if "plain_both_ms" in row
                else ""
            ),
            flush=True,
        )
        save(row)


def runners(
    L: int, near: int = 2, response: int = -1, clusters: int = 64, keep: bool = True
) -> dict[str, Callable[[], Any]]:
    """A call of each kernel on inputs of length L."""
    t, (q, k, v, g) = triton_cluster, inputs(L)
    starts = [-(-c * L // clusters) for c in range(clusters + 1)]
    scale, shape = WIDTH**-0.5, (TILE, near, response, "tanh", False)
    plan = t.plan_of(q, k, v, None, starts, *shape)
    first, logs = cluster_plan.starts_on(starts, plan, q.device), cluster_plan.logs_on(starts, plan, q.device)
    out, *state = t.run_forward(q, k, v, None, starts, scale, *shape, keep)
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    per_query, rest = t._backward_queries(plan, q, k, v, out, g, dq, (first, logs), state, scale)
    grad_vectors = t._backward_vectors(plan, q, g, rest, state[1], scale)
    grad_matrices = t._backward_matrices(plan, q, g, rest[1], state[5], state[1])
    keys = (first, state[1], state[4], per_query, grad_vectors, grad_matrices, scale)
    t._backward_keys(plan, q, k, v, g, dk, dv, *keys)
    return {
        "statistics": lambda: t._statistics(plan, k, v, first, state, scale),
        "choose": lambda: t._choose(plan, q, None, logs, state, scale),
        "attend": lambda: t._attend(plan, q, k, v, out, (first, logs), state, scale),
        "query_gradients": lambda: t._backward_queries(plan, q, k, v, out, g, dq, (first, logs), state, scale),
        "vector_gradients": lambda: t._backward_vectors(plan, q, g, rest, state[1], scale),
        "matrix_gradients": lambda: t._backward_matrices(plan, q, g, rest[1], state[5], state[1]),
        "key_gradients": lambda: t._backward_keys(plan, q, k, v, g, dk, dv, *keys),
    }


PARTS = ((2, 2),) if QUICK else ((2, -1), (2, 16), (2, 0), (0, -1), (0, 0))  # near clusters, responses (-1: all)
FORMS_TUNED = PARTS[:2]


def parts(L: int, save: Callable[[Row], None], forms: Sequence[tuple[int, int]]) -> None:
    """Time of each kernel, with parts of the work left out."""
    for near, response in forms:
        times = {name: milliseconds(call) for name, call in runners(L, near, response, 6 if QUICK else 64).items()}
        forward = sum(times[name] for name in ("statistics", "choose", "attend"))
        row = {"L": L, "method": "parts", "near": near, "response": response, **times, "forward": forward}
        print("  ".join(f"{a} {b:.4f}" if isinstance(b, float) else f"{a} {b}" for a, b in row.items()), flush=True)
        save(row)


# The configurations worth a try beside the table's: tokens of a block, warps, stages, clusters at once, stages of the
# near field, registers. "matrix_gradients": blocks of queries, and the programs of a multiprocessor in fifth place.
CANDIDATES: dict[str, list[Config]] = {
    "statistics": [Config(64, 4, 3)],
    "attend": [Config(64, 8, 3, 0, 2, 128), Config(64, 4, 3, 0, 2)],
    "query_gradients": [Config(64, 8, 4, 32, 3, 128), Config(64, 8, 3, 0, 3)],
    "vector_gradients": [Config(0, 4, 2)],
    "matrix_gradients": [Config(128, 4, 2, 4, 2), Config(64, 4, 4, 4, 2)],
    "listed_gradients": [Config(0, 8, 3), Config(0, 4, 3), Config(0, 8, 4)],
    "key_gradients": [Config(64, 4, 2), Config(64, 4, 4), Config(64, 4, 3, registers=168)],
}  # fmt: skip
RESPONSES = (-1, 16)
FORMS_OF = {"matrix_gradients": (-1,), "listed_gradients": (16,)}  # both forms, where a kernel is not named here
CALLED = {"listed_gradients": "matrix_gradients"}  # what `runners` calls it by


def use(kernel: str, config: Config) -> None:
    cluster_plan.CONFIGS[kernel] = (config, *cluster_plan.CONFIGS[kernel][1:])


class Job(NamedTuple):
    """One kernel to compile: with a configuration or that of the table, for a form of the response."""

    kernel: str
    response: int = -1
    clusters: int = 64
    config: Config | None = None
    keep: bool = True


TABLE = dict(cluster_plan.CONFIGS)
FORMS = ((-1, 64), (16, 64), (16, 256))
MEASURED = [
    *(Job("attend", r, K, keep=keep) for r, K in FORMS for keep in (True, False)),
    *(Job("query_gradients", r, K) for r, K in FORMS),
    *(Job("matrix_gradients" if r < 0 else "listed_gradients", r, K) for r, K in FORMS),
    *(Job(kernel, 16, K) for kernel in ("key_gradients", "vector_gradients") for K in (64, 256)),
    Job("choose", 16, 256),
    Job("tiles_of_clusters"),
    Job("statistics"),
]


def compile_one(job: Job) -> str:
    """Runs in a process of its own and only compiles, into Triton's cache on disk: tensors are on the CPU."""
    global DEVICE, HEADS
    DEVICE, HEADS = "cpu", 1

    def compiling(self: Any, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            if self.fn.__name__ == job.kernel:
                self.run(*arguments, grid=grid, warmup=True, **options)

        return launch

    triton.runtime.jit.JITFunction.__getitem__ = compiling
    cluster_plan.CONFIGS.update(TABLE)
    if job.config is not None:
        use(job.kernel, job.config)
    try:
        runners(256 * job.clusters, 2, job.response, job.clusters, job.keep)
    except Exception as problem:  # a configuration that does not fit the chip: skipped when it is measured
        return f"{job.kernel}: {problem!r}"
    return ""


def compile_all(pool: ProcessPoolExecutor, tuned: Sequence[str]) -> list[Future[str]]:
    """Compiles what is measured (waits for it), and what the tuning tries (goes on in the background)."""
    waiting = [pool.submit(compile_one, job) for job in MEASURED]
    tried = [
        Job(kernel, response, config=config)
        for kernel, configs in CANDIDATES.items()
        for config in configs
        for response in FORMS_OF.get(kernel, RESPONSES)
    ]
    later = [pool.submit(compile_one, job) for job in tried if job.kernel in tuned]
    for future in waiting:
        if future.result():
            print("could not compile", future.result()[:300], flush=True)
    return later


def tune(L: int, save: Callable[[Row], None], tuned: Sequence[str]) -> None:
    """Other configurations of each kernel; the best of them, over both forms of the response, stay in use."""
    calls = {response: runners(L, 2, response) for response in RESPONSES}
    for kernel in tuned:
        configs, usual = CANDIDATES[kernel], cluster_plan.CONFIGS[kernel][0]
        times: dict[Config, list[float]] = {}
        forms, called = FORMS_OF.get(kernel, RESPONSES), CALLED.get(kernel, kernel)
        for config in dict.fromkeys((usual, *configs)):
            use(kernel, config)
            try:
                times[config] = [milliseconds(calls[response][called], 5) for response in forms]
            except Exception as problem:
                print("skipped", kernel, tuple(config), type(problem).__name__, flush=True)
        best = min(times, key=lambda c: sum(times[c]))
        use(kernel, best)
        print(f"{kernel:17s} table {tuple(usual)}  best {tuple(best)} | response {forms}: ", end="")
        print("  ".join(f"{tuple(c)} " + " ".join(f"{x:.4f}" for x in t) for c, t in times.items()), flush=True)
        save({"L": L, "method": "tune", "kernel": kernel, "times": [(tuple(c), t) for c, t in times.items()]})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name in ("quick", "plain", "parts", "check"):
        parser.add_argument(f"--{name}", action="store_true")
    parser.add_argument("--tune", nargs="*", choices=list(CANDIDATES), metavar="KERNEL")
    parser.add_argument("--lengths", type=int, nargs="*", default=list(LENGTHS))
    options = parser.parse_args()
    results: list[Row] = []
    begin = time.perf_counter()

    def save(row: Row) -> None:
        results.append(row)
        if os.environ.get("OUT"):
            Path(os.environ["OUT"], "gpu_cluster.json").write_text(json.dumps(results, indent=1))

    def say(what: str) -> None:
        print(f"[{time.perf_counter() - begin:.0f} s] {what}", flush=True)

    def right(which: Sequence[int | None]) -> None:
        if not check(which, options.check):
            sys.exit("the kernels are wrong: no speed is measured")
        say("checked")

    responses, peers = (None, 2 if QUICK else 16), dict[int, Row]()
    tuned = [] if options.tune is None else options.tune or list(CANDIDATES)
    with ProcessPoolExecutor(1 if QUICK else 15, mp_context=get_context("spawn")) as pool:
        later = [] if QUICK else compile_all(pool, tuned)
        say("compiled")
        if options.check:
            right(responses)
            return
        if options.tune != [] and not options.parts:
            for response in responses:
                right([response])
                for L in options.lengths:
                    measure(L, save, peers, response, options.plain)
            say("measured")
        elif not QUICK:
            right(responses)
        parts(LENGTHS[0], save, PARTS if options.parts or QUICK else FORMS_TUNED)
        say("parts")
        if tuned:
            for future in later:
                future.result()
            tune(LENGTHS[0], save, tuned)
            say("tuned; with the best of each kernel:")
            for response in responses:
                for L in LENGTHS[: 1 if options.tune else 2]:
                    measure(L, save, peers, response, options.plain)
        say("done")


if __name__ == "__main__":
    main()
