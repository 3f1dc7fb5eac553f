"""Configurations of single kernels, timed inside the public calls of gpu_called.py: what one visit to a GPU decides.

    PYTHONPATH=src:benchmarks python benchmarks/gpu_tuning.py                    every family below
    PYTHONPATH=src:benchmarks python benchmarks/gpu_tuning.py --only cluster --seconds 60

Each configuration is compiled in a process of its own, that kernel alone; meanwhile the calls themselves are compared
with float64 (`check` of gpu_called.py), once with the first configurations. Then each configuration in turn takes its
place in the table: ms of its kernel by torch's profiler, and how far outputs and gradients are from those with the
tables as they are; nothing is timed where that is more than rounding. Lines are printed as they are found, and also go
to $OUT/gpu_tuning.json if OUT is set; after `--seconds` nothing new is begun.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Callable
from concurrent.futures import Future, ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, NamedTuple

os.environ["CUMULANT_REPLAY"] = "0"  # before cumulant is imported: a repeated call would keep its first configuration

import torch
import triton
from gpu_called import CASES, check, inputs
from torch import Tensor

from cumulant.bench.provenance import provenance
from cumulant.cluster import run as cluster_run
from cumulant.kernels.causal import plan as causal_plan
from cumulant.kernels.cluster import plan as cluster_plan
from cumulant.kernels.dense import plan as dense_plan
from cumulant.kernels.launch import Config

START = time.perf_counter()
APART = 1e-2  # of two right results in bfloat16, at most


def _cluster(place: int) -> Callable[[str, Config], None]:
    """The configuration of heads of up to 64 (place 0) or 128 (1)."""

    def put(name: str, config: Config) -> None:
        kinds = list(cluster_plan.CONFIGS[name])
        kinds[place] = config
        cluster_plan.CONFIGS[name] = (kinds[0], kinds[1], kinds[2])
        cluster_plan._plan_of.cache_clear()  # plans keep what they launch with

    return put


def _past(tile: int) -> Callable[[str, Config], None]:
    """Causal clusters with so many rows in a tile."""

    def put(name: str, config: Config) -> None:
        cluster_run.past_tile = lambda call: tile
        _cluster(name, config)

    return put


def _causal(order: int) -> Callable[[str, Config], None]:
    def put(name: str, config: Config) -> None:
        _at(order, causal_plan.TABLE[name], config)

    return put


def _dense(order: int) -> Callable[[str, Config], None]:
    """In fourth place the programs of a multiprocessor, where the table has no keys."""

    def put(name: str, config: Config) -> None:
        if config.keys and name in dense_plan.PROGRAMS:
            dense_plan.PROGRAMS[name], config = config.keys, config._replace(keys=0)
        _at(order, dense_plan.TABLE[name], config)
        dense_plan._plan_of.cache_clear()

    return put


def _at(order: int, table: dict[int, tuple[Config, Config]], config: Config) -> None:
    """The configuration of an order, of heads of 64."""
    second, third = table[64]
    table[64] = (config, third) if order == 2 else (second, config)


class Family(NamedTuple):
    """A call of gpu_called.py, how a configuration gets into its table, those to try, and the call's other kernels."""

    case: str
    put: Callable[[str, Config], None]
    configs: dict[str, list[Config]]
    others: tuple[str, ...]


def of(*configs: tuple[Any, ...]) -> list[Config]:
    return [Config(*config) for config in configs]


BOUNDED = [(64, 4, stages, 0, 0, registers) for stages in (1, 2) for registers in (168, 128)]
FAMILIES: dict[str, Family] = {
    "causal 3": Family(
        "causal 3, 16k", _causal(3),
        {
            "query_gradients": of((64, 4, 1), *BOUNDED),
            "key_gradients": of((64, 4, 1), (64, 4, 2)),
            "outputs": of((64, 4, 1), (64, 4, 2), (64, 4, 3)),
            "row_sums": of((64, 4, 2), (64, 4, 3), (64, 4, 1)),
        },
        ("part_sums", "prefixes", "suffixes"),
    ),
    "cluster": Family(
        "cluster", _cluster(0),
        {
            "attend_pooled": of((128, 8, 2, 32, 3, 128), (128, 8, 3, 32, 3, 128)),
            "statistics": of((64, 4, 3, 0, 0, 168), (64, 4, 3, 0, 0, 128), (32, 4, 4, 0, 0, 128)),
            "query_gradients_pooled": of((64, 8, 2, 32, 3, 128), (64, 8, 3, 32, 3, 128)),
            "vector_gradients": of((64, 4, 2), (32, 4, 4), (32, 8, 4, 0, 0, 128)),
            "key_gradients": of((64, 4, 2, 0, 0, 168), (64, 4, 3, 0, 0, 168), (64, 4, 3)),
        },
        ("points", "pool", "query_moments", "choose_by_products", "tiles_of_clusters", "key_terms", "add_up"),
    ),
    "grid": Family(
        "grid 64k", _cluster(1),
        {
            "attend_pooled": of((128, 8, 2, 32, 2), (128, 8, 2, 32, 3), (64, 8, 2, 32, 4)),
            "query_gradients_pooled": of((64, 8, 1, 32, 2), (64, 8, 1, 32, 3)),
            "key_gradients": of((64, 4, 2), (64, 4, 3)),
            "statistics": of((64, 4, 2), (64, 8, 3), (32, 4, 4)),
        },
        ("pool", "query_moments", "choose_by_mean", "vector_gradients", "matrix_gradients",
         "tiles_of_clusters", "key_terms", "reorder", "add_up"),
    ),
    # Of two stages a loop waits for what it asked for just before; of three for what it asked for a turn ago.
    "causal cluster": Family(
        "causal 64", _past(128),
        {
            "past_query_gradients_pooled": of(
                (64, 8, 2, 1, 3, 128), (64, 8, 2, 1, 2, 128), (64, 8, 1, 1, 3, 128), (64, 8, 2, 0, 3, 128),
                (32, 8, 2, 1, 3, 128),
            ),
            "past_key_gradients_pooled": of(
                (64, 4, 2, 1), (64, 4, 3, 1), (64, 4, 2, 1, 0, 168), (64, 4, 3, 1, 0, 168), (128, 8, 2, 1)
            ),
            "past_attend_pooled": of(
                (64, 8, 2, 1, 3, 128), (64, 8, 3, 1, 3, 128), (64, 8, 1, 1, 3, 128), (64, 8, 2, 0, 3, 128)
            ),
            # All but the last give what "pool_gradients" finds for that: compare ms of all kernels.
            "past_vector_gradients_with_pools": of(
                (32, 8, 3, 64, 6, 128), (32, 8, 4, 64, 6, 128), (64, 8, 2, 64, 6, 128), (0, 4, 2, 32, 4)
            ),
        },
        ("statistics", "pools", "handed_back", "add_up"),
    ),
    "causal cluster 64": Family(
        "causal 64", _past(64),
        {
            "past_query_gradients_pooled": of((64, 8, 1, 1, 3, 128), (32, 8, 2, 1, 3, 128)),
            "past_attend_pooled": of((64, 8, 1, 1, 2, 128)),
            "past_key_gradients_pooled": of((64, 4, 2, 1)),
            "past_vector_gradients_with_pools": of((32, 8, 3, 64, 6, 128)),
        },
        (),
    ),
    "dense 3": Family(
        "order 3, 16k", _dense(3),
        {
            "partial_moments": of(
                (32, 4, 3, 3, 0, 168), (64, 4, 2, 3, 0, 168), (64, 8, 2, 6, 0, 128), (64, 4, 3, 6),
                (32, 4, 4, 3, 0, 168),
            ),
            "read_out": of((32, 4, 4, 16, 0, 168), (64, 4, 3, 16, 0, 168), (64, 4, 3, 16, 0, 128), (64, 4, 4, 8)),
        },
        ("merge", "backward_queries", "reduce", "backward_keys"),
    ),
    "causal 2": Family(
        "causal 2, 16k", _causal(2),
        {
            "query_gradients": of((64, 4, 3), (64, 4, 2), (64, 4, 1)),
            "key_gradients": of((64, 4, 3), (64, 4, 1)),
            "outputs": of((64, 4, 3), (64, 4, 2), (64, 4, 1), (64, 4, 2, 0, 0, 168), (64, 4, 1, 0, 0, 168)),
        },
        ("part_sums", "prefixes", "suffixes"),
    ),
}  # fmt: skip


def function_of(name: str) -> str:
    """The kernel that a line of a table is for."""
    return name.removeprefix("past_").removesuffix("_with_pools").removesuffix("_pooled")


def call_of(case: str, B: int = 0, alone: bool = False) -> Callable[[], list[Tensor]]:
    """A training step, or the forward pass `alone`."""
    found = CASES[case]
    leaves, grad, options = inputs(found, B=B)
    if alone:
        return lambda: [found.function(*leaves, **options)]
    leaves = [x.requires_grad_() for x in leaves]

    def call() -> list[Tensor]:
        out = found.function(*leaves, **options)
        return [out.detach(), *torch.autograd.grad(out, leaves, grad)]

    return call


def compile_one(family: str, name: str, config: Config | None) -> str:
    """Runs in a process of its own: compiles one kernel into Triton's cache on disk, and launches nothing."""

    def compiling(self: Any, grid: Any) -> Callable[..., Any]:
        def launch(*arguments: Any, **options: Any) -> Any:
            if self.fn.__name__ == function_of(name):
                return self.run(*arguments, grid=grid, warmup=True, **options)
            return None

        return launch

    triton.runtime.jit.JITFunction.__getitem__ = compiling
    if config is not None:
        FAMILIES[family].put(name, config)
    try:
        call_of(FAMILIES[family].case, B=1)()
        if function_of(name) == "attend":
            call_of(FAMILIES[family].case, B=1, alone=True)()
    except Exception as problem:  # a configuration that does not fit the chip: skipped when it is measured
        return f"{name} {config}: {problem!r}"[:300]
    return ""


def kernel_times(call: Callable[[], Any], runs: int = 3) -> dict[str, float]:
    """Milliseconds of each kernel in one call, by the profiler."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            call()
        torch.cuda.synchronize()
    return {e.key: e.device_time_total / runs / 1e3 for e in profile.key_averages() if e.device_time_total > 0}


def apart(found: list[Tensor], usual: list[Tensor]) -> float:
    return max(float((x.float() - y.float()).norm() / y.float().norm()) for x, y in zip(found, usual, strict=True))


def tune(
    family: str, compiling: dict[tuple[str, Config | None], Future[str]], end: float, keep: Callable[..., None]
) -> None:
    case, put, configs, others = FAMILIES[family]
    for name, config in [(name, None) for name in others] + [(name, tried[0]) for name, tried in configs.items()]:
        compiling[name, config].result()
    for name, tried in configs.items():
        put(name, tried[0])
    print(f"[{time.perf_counter() - START:.0f} s] {case}: ", end="", flush=True)
    if not check(CASES[case]):  # prints PASS or FAIL, and errors beside plain torch's: output, dq, dk, dv
        return
    call, usual = call_of(case), None
    for name, tried in configs.items():
        best: tuple[float, Config] | None = None
        for config in tried:
            if time.perf_counter() - START > end:
                break
            problem = compiling[name, config].result()
            if problem:
                print("could not compile", problem, flush=True)
                continue
            put(name, config)
            found = call()
            usual = found if usual is None else usual
            distance = apart(found, usual)
            if not distance < APART:
                print(f"WRONG {family} {name} {tuple(config)}: {distance:.1e} apart", flush=True)
                continue
            times, alone = kernel_times(call), {}
            if function_of(name) == "attend":
                alone = kernel_times(call_of(case, alone=True))
            ms = times.get(function_of(name), float("nan"))
            print(
                f"[{time.perf_counter() - START:.0f} s] {family:9s} {name:24s} {tuple(config)!s:28s} {ms:.4f} ms of"
                f" {sum(times.values()):.3f}, {distance:.0e} apart"
                + (f"; without gradients {alone.get('attend', 0):.4f} of {sum(alone.values()):.3f}" if alone else ""),
                flush=True,
            )  # fmt: skip
            keep(family=family, kernel=name, config=tuple(config), ms=ms, all_ms=sum(times.values()), apart=distance)
            best = min(best or (ms, config), (ms, config))
        if best is not None:  # later kernels are timed beside the best
            put(name, best[1])
    if usual is not None:
        every = sorted(kernel_times(call).items(), key=lambda x: -x[1])[:14]
        print(f"   {family} with the best:", ", ".join(f"{name[:40]} {ms:.4f}" for name, ms in every), flush=True)
        keep(family=family, best=dict(every))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", choices=list(FAMILIES), default=list(FAMILIES))
    parser.add_argument("--seconds", type=float, default=180.0)
    parser.add_argument("--workers", type=int, default=14)
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu_tuning.py needs a CUDA device")
    record: dict[str, Any] = {
        **provenance("PYTHONPATH=src:benchmarks python " + " ".join(sys.argv), gpu=True),
        "rows": [],
    }

    def keep(**row: Any) -> None:
        record["rows"].append(row)
        if "OUT" in os.environ:
            Path(os.environ["OUT"], "gpu_tuning.json").write_text(json.dumps(record, indent=1))

    with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
        compiling: dict[str, dict[tuple[str, Config | None], Future[str]]] = {}
        for family in options.only:
            _, _, tried, others = FAMILIES[family]
            jobs: list[tuple[str, Config | None]] = [(name, config) for name in tried for config in tried[name]]
            jobs += [(name, None) for name in others]
            compiling[family] = {job: pool.submit(compile_one, family, *job) for job in jobs}
        for family in options.only:
            tune(family, compiling[family], options.seconds, keep)
        for futures in compiling.values():
            for future in futures.values():
                future.cancel()


if __name__ == "__main__":
    main()
