"""SAM 2 at 4,096 pixels: time and error of its global layers, and of the whole compiled encoder, beside softmax.

    PYTHONPATH=src:. python benchmarks/sam2_speed.py MODEL PICTURES [--size 4096] [--names ...] [--whole NAME ...]

Layers: queries, keys and values of every global layer, captured in bfloat16 from one picture; out as called, in a CUDA
graph; softmax is the quicker of cuDNN and flash of the same run. The error is ||out - softmax|| / ||softmax - <v>||,
squared in the second column, over all queries. No time is printed where the output has no numbers. `--whole` compiles
the encoder with each of these in its global layers and takes time and peak memory (beyond the weights) of a forward
pass, all in turns: softmax by cuDNN and flash in all layers is "softmax", by what torch takes itself "softmax, as
called"; ratios are to the quicker of those that were asked for. `--profile` says which kernels of these passes take
longest. On a CPU layers are not timed, and passes have no peak. JSON goes to $OUT/sam2_speed_SIZE_BATCH.json if OUT is
set, row by row.
"""

from __future__ import annotations

import argparse
import copy
import json
import math
import os
import statistics
import sys
import time
import warnings
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from real_models import global_layers, load, pictures, replaced, share_of_work
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cumulant import zoo
from cumulant.bench.provenance import provenance
from cumulant.call import Call
from cumulant.kernels.notice import SlowPathWarning
from cumulant.nn.swapped.choice import Choice, observing
from cumulant.nn.swapped.plan import attention_layers

SOFTMAX = ("softmax", "softmax, as called")
PEERS = {"cudnn": SDPBackend.CUDNN_ATTENTION, "flash": SDPBackend.FLASH_ATTENTION}
NAMES = (
    *(f"cluster64+near={t}" for t in (1, 2, 4)),
    *(f"cluster256+near={t}" for t in (2, 4, 8, 16)),
    "cluster256+near=4+near_rows=64",
    *(f"cluster256+find=tree+near={t}" for t in (2, 4, 8)),
    "cluster256+find=tree+near=4+near_rows=128",
)


def captured(model: Any, x: Tensor) -> dict[str, Call]:
    """The calls of the global layers for a picture."""
    found: dict[str, Call] = {}
    encoder = model.vision_encoder
    names = {encoder.get_submodule(name): name for name in global_layers(model)}

    def see(module: torch.nn.Module, call: Call) -> None:
        if module in names:
            found[names[module]] = call._replace(
                **{key: getattr(call, key).clone() for key in ("query", "key", "value")}
            )

    with replaced(model, "softmax"), observing(see):
        encoder(x)
    return found


def seconds(run: Callable[[], Any], repeats: int = 5) -> float:
    """Median of a few replays of a CUDA graph of several calls; as called where it cannot be recorded."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            run()
    torch.cuda.synchronize()
    calls = 4
    try:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            for _ in range(calls):
                run()
        again: Callable[[], Any] = graph.replay
    except RuntimeError:
        torch.cuda.synchronize()

        def again() -> None:
            for _ in range(calls):
                run()

    times = []
    for _ in range(repeats):
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        again()
        end.record()
        torch.cuda.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / calls)
    return statistics.median(times)


def exact(call: Call) -> Tensor:
    how = {"scale": call.scale, "is_causal": call.is_causal, "enable_gqa": call.enable_gqa}
    return F.scaled_dot_product_attention(*call[:3], **how)


def softmax(call: Call) -> tuple[float, str]:
    """Seconds of the quickest softmax, and its name."""
    best = (float("inf"), "none")
    for name, peer in PEERS.items():
        try:
            with sdpa_kernel(peer):
                best = min(best, (seconds(lambda: exact(call)), name))
        except RuntimeError as error:
            print(f"{name} does not take this: {error}")
    return best


Keep = Callable[[list[dict[str, Any]]], None]  # writes the rows so far


def layers(
    calls: dict[str, Call], names: list[str], keep: Keep = lambda _: None, timed: bool = True
) -> list[dict[str, Any]]:
    """Error, multiply-adds and seconds of each mechanism in each layer; seconds are None on a CPU and where an output
    has no numbers, errors are None there: JSON knows no NaN. Not `timed`, nothing is printed either."""
    rows: list[dict[str, Any]] = []
    for layer, call in calls.items():
        time, peer = softmax(call) if timed and call.query.is_cuda else (None, "not timed")
        wanted = exact(call).float()
        middle = call.value.float().mean(-2, keepdim=True)
        middle = middle.repeat_interleave(wanted.shape[-3] // middle.shape[-3], -3)
        size = (wanted - middle).square().sum().double()
        L, D = call.query.shape[-2:]
        if timed:
            print(f"{layer}: softmax {_ms(time)} ({peer})")
        for name in names:
            choice = Choice.named(name)
            mechanism = zoo.get(choice.attention)
            run = lambda m=mechanism, c=call, o=choice.options: m.run(c, **o)  # noqa: E731
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", SlowPathWarning)
                out = run().float()
            error = float((out - wanted).square().sum().double() / size)
            del out
            own = seconds(run) if timed and math.isfinite(error) and call.query.is_cuda else None
            work = None if call.is_causal else share_of_work(name, L, D)
            row = {"layer": layer, "name": name, "seconds": own, "softmax": time, "peer": peer}
            row |= {"squared_error": error, "work": work, "plain_torch": bool(caught)}
            if timed:
                print(line(row), flush=True)
            rows.append(row | {"squared_error": _finite(error), "work": _finite(work)})
            keep(rows)
    return rows


def line(row: dict[str, Any], spread: str = "") -> str:
    """A row of `layers` as it is printed, with `spread` behind its error."""
    own, time, error, work = (row[key] for key in ("seconds", "softmax", "squared_error", "work"))
    times = "" if own is None or time is None else f"  {time / own:5.1f} x"
    return (
        f"  {row['name']:46s} {_ms(own)}{times}  squared error {math.nan if error is None else error:.4f}{spread}  "
        f"{'' if work is None else f'multiply-adds {work:.1%}'}{'  plain torch' if row['plain_torch'] else ''}"
    )


def _ms(seconds: float | None) -> str:
    return "not timed" if seconds is None else f"{seconds * 1e3:7.3f} ms"


def _finite(x: float | None) -> float | None:
    return x if x is not None and math.isfinite(x) else None


def whole(
    model: Any, x: Tensor, names: list[str], keep: Keep = lambda _: None, profiled: bool = False
) -> list[dict[str, Any]]:
    """Seconds and peak memory of the compiled encoder, all in turns, so that a busy machine hits all."""
    runs: dict[str, Callable[[], Any]] = {}
    apart: set[str] = set()
    rows: list[dict[str, Any]] = []
    spent: dict[str, tuple[float, ...]] = {}
    peaks: dict[str, tuple[int | None, ...]] = {}
    with ExitStack() as stack:
        for name in names:
            own = copy.deepcopy(model)
            own.vision_encoder.set_attn_implementation("sdpa")
            if name not in SOFTMAX:
                stack.enter_context(replaced(own, name))
            own.vision_encoder(x)  # transformers puts its hooks in at the first call, which would break the graph
            call = _by_peers if name == SOFTMAX[0] else _plain
            runs[name] = partial(call, torch.compile(own.vision_encoder), x)
            start = time.perf_counter()
            try:
                runs[name]()
            except Exception as error:  # of a compiler that cannot: attention then stays outside the graphs
                print(f"{name}, compiled as a whole: {type(error).__name__}: {error}"[:600], flush=True)
                for layer in attention_layers(own.vision_encoder):
                    module = own.vision_encoder.get_submodule(layer)
                    module.forward = torch.compiler.disable(module.forward)
                apart.add(name)
                runs[name] = partial(call, torch.compile(own.vision_encoder), x)
                runs[name]()
            print(f"{name} compiled in {time.perf_counter() - start:.0f} s", flush=True)
            spent[name], peaks[name] = zip(*(_once(runs[name], x.is_cuda) for _ in range(3)), strict=True)
            rows = [_row(each, spent, peaks, each in apart) for each in spent]
            keep(rows)  # for the case that time ends with a later one
        spent = dict.fromkeys(runs, ())
        for _ in range(12 if x.is_cuda else 2):
            for name, run in runs.items():
                took, peak = _once(run, x.is_cuda)
                spent[name], peaks[name] = (*spent[name], took), (peak,)
            rows = [_row(name, spent, peaks, name in apart) for name in spent]
            keep(rows)
        for row, run in zip(rows, runs.values(), strict=True):
            peak = "" if row["peak"] is None else f", peak {row['peak'] / 2**30:.2f} GiB"
            times = "" if row["times"] is None else f", {row['times']:.2f} x"
            print(f"{row['name']:46s} {row['seconds'] * 1e3:.2f} ms{times}{peak}", flush=True)
            if profiled and x.is_cuda:
                row["kernels"] = kernels_of(run)
                print("".join(f"  {ms:8.3f} ms, {n:3d} x {kernel}\n" for kernel, ms, n in row["kernels"]), flush=True)
                keep(rows)
    return rows


def _row(
    name: str, spent: dict[str, tuple[float, ...]], peaks: dict[str, tuple[int | None, ...]], outside: bool
) -> dict[str, Any]:
    softmax = min((spent[own] for own in SOFTMAX if own in spent), key=statistics.median, default=None)
    times = softmax and statistics.median(a / b for a, b in zip(softmax, spent[name], strict=True))
    middle, least = statistics.median(spent[name]), min(spent[name])
    row = {"name": name, "seconds": middle, "fastest": least, "peak": peaks[name][-1], "times": times}
    return {**row, "attention_outside": outside}


def _once(run: Callable[[], Any], cuda: bool) -> tuple[float, int | None]:
    """Seconds of a pass, and its peak memory beyond what was there."""
    if not cuda:
        start = time.perf_counter()
        run()
        return time.perf_counter() - start, None
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize()
    return begin.elapsed_time(end) / 1e3, torch.cuda.max_memory_allocated() - before


def kernels_of(run: Callable[[], Any], most: int = 14) -> list[tuple[str, float, int]]:
    """Names, milliseconds and launches of the kernels of one pass that take longest in all."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA]) as seen:
        run()
        torch.cuda.synchronize()
    spent: dict[str, list[float]] = {}
    for event in seen.events():
        if "cuda" in str(event.device_type).lower():
            spent.setdefault(event.name[:90], []).append(event.time_range.elapsed_us() / 1e3)
    longest = sorted(spent.items(), key=lambda item: -sum(item[1]))[:most]
    return [(name, sum(each), len(each)) for name, each in longest]


def _plain(encoder: Any, x: Tensor) -> Any:
    return encoder(x)


def _by_peers(encoder: Any, x: Tensor) -> Any:
    with sdpa_kernel(list(PEERS.values()), set_priority=True):
        return encoder(x)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--size", type=int, default=4096)
    parser.add_argument("--names", nargs="*", default=NAMES)
    parser.add_argument("--whole", nargs="*", default=())
    parser.add_argument("--picture", default="truck")
    parser.add_argument("--batch", type=int, default=1)
    parser.add_argument("--profile", action="store_true")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(options.model, options.size).to(device, torch.bfloat16)
    shown = {picture.name: picture for picture in pictures(options.pictures, crops=False)}
    if options.picture not in shown:
        raise SystemExit(f"no picture {options.picture!r} in {options.pictures}; there are {', '.join(shown)}")
    x = shown[options.picture].tensor(options.size).to(device, torch.bfloat16).repeat(options.batch, 1, 1, 1)
    record: dict[str, Any] = {
        "provenance": provenance(
            " ".join(["python", "benchmarks/sam2_speed.py", *("MODEL", "PICTURES", *sys.argv[3:])])
        ),
        "size": options.size,
        "batch": options.batch,
    }

    def keep(what: str, rows: list[dict[str, Any]]) -> None:
        record[what] = rows
        if out := os.environ.get("OUT"):
            Path(out, f"sam2_speed_{options.size}_{options.batch}.json").write_text(json.dumps(record))

    if options.whole:
        whole(model, x, list(options.whole), partial(keep, "whole"), options.profile)
    if options.names:
        layers(captured(model, x), list(options.names), partial(keep, "layers"))


if __name__ == "__main__":
    main()
