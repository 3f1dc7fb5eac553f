"""The kernels of cluster attention one by one: inputs, times, other configurations, and their compilation beforehand.

What gpu_cluster.py measures with; see there.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from typing import Any, NamedTuple

QUICK = "--quick" in sys.argv
if QUICK:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch  # noqa: E402
import torch.nn.functional as F  # noqa: E402
import triton  # noqa: E402
from torch import Tensor  # noqa: E402

from cumulant.kernels.cluster import host as triton_cluster  # noqa: E402
from cumulant.kernels.cluster import plan as cluster_plan  # noqa: E402
from cumulant.kernels.launch import Config, layout  # noqa: E402

DEVICE = "cpu" if QUICK else "cuda"
HEADS, WIDTH, TILE = (1, 32, 32) if QUICK else (12, 64, 128)
Row = dict[str, Any]
Save = Callable[[Row], None]


class Form(NamedTuple):
    """One way to call cluster attention, with 2 near clusters unless said otherwise."""

    clusters: int
    response: int | str | None
    rank: str = "mean"
    near: int = 2

    @property
    def options(self) -> dict[str, Any]:
        return dict(self._asdict(), near_rows=TILE)

    @property
    def number(self) -> int:
        """The response as kernels take it."""
        return {None: -1, "pooled": -2}.get(self.response, self.response)  # type: ignore[return-value, arg-type]


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


def runners(L: int, form: Form, keep: bool = True) -> dict[str, Callable[[], Any]]:
    """A call of each kernel on inputs of length L."""
    t, (q, k, v, g) = triton_cluster, inputs(L)
    starts = [-(-c * L // form.clusters) for c in range(form.clusters + 1)]
    options: dict[str, Any] = {"tile": TILE, "near": form.near, "response": form.number, "rank": form.rank}
    call = cluster_plan.of_blocks(q, k, v, None, starts, WIDTH**-0.5, **options)
    plan, outputs = cluster_plan.plan_for(call), t.run_forward(call, keep)
    vectors, responding = outputs[2], outputs[6]
    dq, dk, dv = (torch.empty_like(x) for x in (q, k, v))
    at = layout(q, k, v, outputs[0], g, dq, dk, dv)
    per_query, rest = t._backward_queries(plan, call, g, dq, outputs, *at)
    matrices = t._backward_matrices(plan, call, g, rest[1], responding, vectors, *at)
    sums = (per_query, t._backward_vectors(plan, call, g, rest, vectors, *at)[0], matrices)
    t._backward_keys(plan, call, g, dk, dv, outputs, *sums, *at)
    return {
        "statistics": lambda: t.find_statistics(plan, call, outputs, *at),
        "choose": lambda: t._choose(plan, call, outputs, *at),
        "attend": lambda: t._attend(plan, call, outputs, *at),
        "query_gradients": lambda: t._backward_queries(plan, call, g, dq, outputs, *at),
        "vector_gradients": lambda: t._backward_vectors(plan, call, g, rest, vectors, *at),
        "matrix_gradients": lambda: t._backward_matrices(plan, call, g, rest[1], responding, vectors, *at),
        "key_gradients": lambda: t._backward_keys(plan, call, g, dk, dv, outputs, *sums, *at),
    }


def parts(L: int, form: Form, save: Save) -> None:
    """Time of each kernel, with the small ones around it."""
    times = {name: milliseconds(call) for name, call in runners(L, form).items()}
    forward = sum(times[name] for name in ("statistics", "choose", "attend"))
    row = {"L": L, "method": "parts", **form._asdict(), **times, "forward": forward, "both": sum(times.values())}
    print("  ".join(f"{a} {b:.4f}" if isinstance(b, float) else f"{a} {b}" for a, b in row.items()), flush=True)
    save(row)


# The configurations worth a try beside the table's: tokens of a block, warps, stages, clusters at once, stages of the
# near field, registers. "matrix_gradients": blocks of queries, and the programs of a multiprocessor in fifth place.
CANDIDATES: dict[str, list[Config]] = {
    "statistics": [Config(64, 4, 2, registers=128), Config(64, 4, 2), Config(128, 8, 2)],
    "query_moments": [Config(0, 8, 1), Config(0, 2, 1)],
    "choose_by_mean": [Config(2, 4, 1), Config(8, 4, 1), Config(4, 2, 1)],
    "attend_pooled": [
        Config(128, 8, 3, 32, 2, 128),
        Config(128, 8, 1, 64, 2, 128),
        Config(128, 8, 1, 32, 2, 128),
        Config(64, 8, 2, 32, 3, 128),
        Config(128, 8, 2, 64, 2),
    ],
    "query_gradients_pooled": [
        Config(64, 8, 1, 32, 2, 128),
        Config(64, 8, 2, 32, 3, 128),
        Config(64, 8, 2, 64, 2),
        Config(128, 8, 2, 32, 2, 128),
    ],
    "vector_gradients": [Config(128, 4, 1), Config(64, 8, 2), Config(64, 4, 3), Config(32, 4, 3)],
    "matrix_gradients": [Config(128, 4, 2, 4, 2)],
    "key_gradients": [Config(64, 4, 3), Config(64, 4, 2, registers=168), Config(128, 8, 2)],
}  # fmt: skip
CALLED = {"query_moments": "choose", "choose_by_mean": "choose"}  # what `runners` calls it by
TUNED = ((96, Form(6, "pooled")),) if QUICK else ((16384, Form(64, "pooled")), (65536, Form(128, "pooled")))
TABLE = dict(cluster_plan.CONFIGS)


def function_of(name: str) -> str:
    """The kernel that a line of the table is for."""
    return name.removesuffix("_pooled")


def use(name: str, config: Config) -> None:
    cluster_plan.CONFIGS[name] = (config, *cluster_plan.CONFIGS[name][1:])
    cluster_plan._plan_of.cache_clear()  # plans keep what they launch with


class Job(NamedTuple):
    """Kernels to compile for a form: all of them, or one line of the table with another configuration."""

    form: Form
    keep: bool = True
    name: str | None = None
    config: Config | None = None
    size: int = 256  # tokens of a cluster


def compile_one(job: Job) -> str:
    """Runs in a process of its own and only compiles, into Triton's cache on disk: tensors are on the CPU."""
    global DEVICE, HEADS
    DEVICE, HEADS = "cpu", 1

    def compiling(self: Any, grid: Any) -> Callable[..., None]:
        def launch(*arguments: Any, **options: Any) -> None:
            if job.name is None or self.fn.__name__ == function_of(job.name):
                self.run(*arguments, grid=grid, warmup=True, **options)

        return launch

    triton.runtime.jit.JITFunction.__getitem__ = compiling
    cluster_plan.CONFIGS.update(TABLE)
    if job.name is not None and job.config is not None:
        use(job.name, job.config)
    try:
        runners(job.size * job.form.clusters, job.form, job.keep)
    except Exception as problem:  # a configuration that does not fit the chip: skipped when it is measured
        return f"{job.name or 'table'}: {problem!r}"
    return ""


def kernels_of(form: Form) -> list[str]:
    """Lines of the table that a form launches, the slowest to compile first."""
    pooled = "_pooled" if form.response in (0, "pooled") else ""
    names = [f"query_gradients{pooled}", f"attend{pooled}", "key_gradients", "vector_gradients", "statistics"]
    names += ["choose_by_mean", "query_moments"] if form.rank == "mean" else []
    if isinstance(form.response, int):
        names += ["listed_gradients"] + (["choose"] if form.rank == "mean" else [])
    else:
        names += ["matrix_gradients"] + (["pool"] if pooled else [])
    return names


def compile_all(pool: ProcessPoolExecutor, forms: Sequence[Form], tuned: Sequence[str]) -> list[Future[str]]:
    """Compiles what is measured (waits for it), and what the tuning tries (goes on in the background)."""
    jobs = [Job(form, name=name) for form in forms for name in kernels_of(form)]
    jobs += [Job(form, False, name) for form in forms for name in kernels_of(form)[1:2]]
    waiting = [pool.submit(compile_one, job) for job in [*jobs, Job(forms[0], name="tiles_of_clusters")]]
    later = [
        pool.submit(compile_one, Job(form, name=name, config=config))
        for name in tuned
        for config in CANDIDATES[name]
        for _, form in TUNED
    ]
    for future in waiting:
        if future.result():
            print("could not compile", future.result()[:300], flush=True)
    return later


def tune(save: Save, tuned: Sequence[str]) -> None:
    """Other configurations of each kernel; those stay in use that take the smallest share of the table's time."""
    for name in tuned:
        usual = cluster_plan.CONFIGS[name][0]
        times: dict[Config, list[float]] = {}
        for config in dict.fromkeys((usual, *CANDIDATES[name])):
            use(name, config)
            try:
                called = CALLED.get(name, function_of(name))
                times[config] = [milliseconds(runners(L, form)[called], 5) for L, form in TUNED]
            except Exception as problem:
                print("skipped", name, tuple(config), type(problem).__name__, flush=True)
        best = min(times, key=lambda c: sum(a / b for a, b in zip(times[c], times[usual], strict=True)))
        use(name, best)
        print(f"{name:17s} table {tuple(usual)}  best {tuple(best)} | {[L for L, _ in TUNED]}: ", end="")
        print("  ".join(f"{tuple(c)} " + " ".join(f"{x:.4f}" for x in t) for c, t in times.items()), flush=True)
        save({"method": "tune", "kernel": name, "times": [(tuple(c), t) for c, t in times.items()]})
