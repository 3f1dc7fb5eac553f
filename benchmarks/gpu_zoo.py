"""Every mechanism of the zoo on the GPU against the public formulation of it: correct first, then time and memory.

    python benchmarks/gpu_zoo.py                       all cases, about 2 minutes
    python benchmarks/gpu_zoo.py --only linear mala    those whose name begins so
    python benchmarks/gpu_zoo.py --only mala --add benchmarks/results/zoo_gpu.json    and the other rows of that file
    python benchmarks/gpu_zoo.py --quick               small shapes, nothing compiled: seconds, on a CPU too

bfloat16, D 64, H 12, B 16 x 4,096 tokens (what forms an L x L or L x D x E tensor: B 4 x 1,024). The public formulation
(`benchmarks/public_formulations.py`) and ours must be the same function in float64, outputs and gradients of q, k, v;
in bfloat16 the error of ours against its own float64 result may be at most twice that of the public formulation, or
one rounding of bfloat16 (2^-8) where that is less. Only then is anything timed: ours as called ("eager"), ours and the
public one under torch.compile, forward alone and forward + backward, in one run, cold L2, medians.

Milliseconds are those of the device: the call is recorded as a CUDA graph and the graph is timed by events, because a
call of 0.1 ms waits longer for Python (guards, autograd, dispatch of custom operators) than for its kernels. Where a
call cannot be recorded, events stand around a call that was queued while the device was kept busy: `timed_by` in the
JSON says which. What single calls take with their host time is there too, as `called_milliseconds`, and in the column
"called" as a ratio.

The ratio is public compiled over ours compiled: above 1 ours is faster. (The public lla is compiled in parts.) `floor`:
the share of the time in which 4 tensors (forward; 11 with backward) move at the copy bandwidth of the same run. Cases
compile side by side, each in a process of its own, for at most --seconds; the clock runs only when all are ready, one
case at a time. JSON: $OUT/zoo_gpu.json. Run with PYTHONPATH=src.
"""

from __future__ import annotations

import argparse
import functools
import json
import math
import os
import statistics
import sys
import time
from collections.abc import Callable
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from public_formulations import Case, Operator, cases
from torch import Tensor

from cumulant import zoo
from cumulant.bench.provenance import provenance

ROUNDING = 2.0**-8
SAME = 1e-5  # relative, in float64
SLOW_TO_COMPILE = ("aaren", "hierarchical")  # a hundred kernels and more: they begin first, on several cores each
PARTS = ("out", "dq", "dk", "dv")
PHASES = ("forward", "both")


def ours(case: Case) -> Operator:
    return partial(zoo.get(case.mechanism), is_causal=case.is_causal, **case.options)


def tokens(case: Case, device: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and a gradient of the output, (B, H, L, D): noise on waves along the rows and columns of a grid.

    Without waves all averages over many tokens are nearly equal, and gradients that are differences of them (of agent
    attention in q, say) would be made of rounding alone, in any implementation.
    """
    generator = torch.Generator(device).manual_seed(0)
    B, H, L, D = case.shape
    side = math.isqrt(L)
    place = torch.arange(side, device=device)[:, None] / side
    found = []
    for mean in (0.2, 0.5, 0.5, 0.0):
        turns = torch.randint(1, 3, (2, B, H, 1, D), device=device, generator=generator)
        phase = torch.rand(2, B, H, 1, D, device=device, generator=generator)
        rows, columns = (2 * math.pi * (turns * place + phase)).cos()  # each (B, H, side, D)
        noise = torch.randn(B, H, side, side, D, device=device, generator=generator)
        x = 0.7 * noise + rows[:, :, :, None] + columns[:, :, None] + mean
        found.append(x.to(dtype).flatten(2, 3))
    return found


def with_gradients(function: Operator, inputs: list[Tensor]) -> list[Tensor]:
    """The output and the gradients of q, k, v; zero where a mechanism does not look at one of them."""
    leaves = [x.detach().requires_grad_() for x in inputs[:3]]
    out = function(*leaves)
    grads = torch.autograd.grad(out, leaves, inputs[3], allow_unused=True)
    return [out.detach(), *(torch.zeros_like(x) if g is None else g for x, g in zip(leaves, grads, strict=True))]


def distances(found: list[Tensor], exact: list[Tensor]) -> dict[str, float]:
    """Relative errors by part; where the exact one is zero (a gradient that does not exist) the norm itself."""
    pairs = zip(PARTS, found, exact, strict=True)
    return {name: float((x.double() - y.double()).norm() / (y.double().norm() or 1.0)) for name, x, y in pairs}


def check(name: str, device: str, dtype: torch.dtype, small: bool) -> dict[str, Any]:
    """Same function in float64, and how far both are from it in `dtype`, on one sequence. `wrong` says what fails."""
    case, exact_case = cases(device, dtype, small)[name], cases(device, torch.float64, small)[name]
    inputs = [x[:1] for x in tokens(case, device, dtype)]
    wide = [x.double() for x in inputs]
    exact = with_gradients(ours(exact_case), wide)
    apart = distances(with_gradients(exact_case.public, wide), exact)
    own = distances(with_gradients(ours(case), inputs), exact)
    public = distances(with_gradients(case.public, inputs), exact)
    if device == "cuda":
        torch.cuda.empty_cache()  # the other cases share the device
    wrong = [f"{part} not the public function: {x:.1e}" for part, x in apart.items() if not x < SAME]
    if dtype == torch.bfloat16:
        wrong += [
            f"{part} off by {own[part]:.1e}, public {public[part]:.1e}"
            for part in PARTS
            if not own[part] <= max(2 * public[part], ROUNDING)
        ]
    return {"apart_in_float64": apart, "error": own, "public_error": public, "wrong": "; ".join(wrong)}


def phases(function: Operator, inputs: list[Tensor]) -> dict[str, Callable[[], Any]]:
    q, k, v, grad = inputs
    leaves = [x.detach().requires_grad_() for x in (q, k, v)]

    def forward() -> Tensor:
        with torch.no_grad():
            return function(q, k, v)

    return {"forward": forward, "both": lambda: torch.autograd.grad(function(*leaves), leaves, grad, allow_unused=True)}


Quartiles = tuple[float, float, float]  # median, lower and upper, in milliseconds


def quartiles(taken: list[float]) -> Quartiles:
    low, median, high = statistics.quantiles(taken, n=4, method="inclusive") if len(taken) > 1 else taken * 3
    return median, low, high


def recorded(call: Callable[[], Any]) -> Callable[[], Any] | None:
    """The kernels of a call as a CUDA graph, or None where a call cannot be recorded."""
    try:
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(2):
                call()
        torch.cuda.current_stream().wait_stream(stream)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            kept = call()  # noqa: F841  # its memory belongs to the graph
    except RuntimeError:
        torch.cuda.synchronize()
        return None
    return graph.replay


def by_events(call: Callable[[], Any], milliseconds: float, ahead: bool = False) -> Quartiles:
    """Single calls for about `milliseconds` in all, L2 emptied before each.

    `ahead` keeps the device busy until the host has queued the call, so that only the device's time counts.
    """
    flush = torch.empty(1 << 28, dtype=torch.uint8, device="cuda")
    taken: list[float] = []
    deadline = time.perf_counter() + 3 * milliseconds * 1e-3
    while len(taken) < 5 or (sum(taken) < milliseconds and len(taken) < 200 and time.perf_counter() < deadline):
        pairs = [[torch.cuda.Event(enable_timing=True) for _ in range(2)] for _ in range(5)]
        for start, end in pairs:
            flush.zero_()
            if ahead:
                torch.cuda._sleep(10_000_000)  # some 5 ms
            start.record()
            call()
            end.record()
        torch.cuda.synchronize()
        taken += [start.elapsed_time(end) for start, end in pairs]
    return quartiles(taken)


def device_time(call: Callable[[], Any]) -> tuple[Quartiles, str]:
    """What the device needs for a call, and how that was measured."""
    replay = recorded(call)
    return (by_events(call, 40, ahead=True), "queued") if replay is None else (by_events(replay, 40), "graph")


def on_cpu(call: Callable[[], Any]) -> Quartiles:
    taken = []
    for _ in range(5):
        start = time.perf_counter()
        call()
        taken.append(1e3 * (time.perf_counter() - start))
    return quartiles(taken)


def peak(call: Callable[[], Any], device: str) -> int | None:
    """Bytes held at the peak of a call beyond what was there before."""
    if device != "cuda":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    kept = call()  # noqa: F841  # alive until the peak is read
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def contenders(case: Case, compiled: bool) -> dict[str, Operator]:
    call = partial(torch.compile, dynamic=False) if compiled else lambda f: f
    # A partial has no code of its own for the compiler to look at.
    mine, theirs = ours(case), case.public
    in_parts = partial(theirs, compiled=functools.cache(call)) if case.in_parts else None
    return {
        "ours, eager": mine,
        "ours": call(lambda q, k, v: mine(q, k, v)),
        "public": in_parts or call(lambda q, k, v: theirs(q, k, v)),
    }


def compiled_is_right(table: dict[str, Operator], inputs: list[Tensor], row: dict[str, Any]) -> str:
    """What is wrong with the compiled forms at full size, judged by ours as called, whose own error is known by now."""
    expected = with_gradients(table["ours, eager"], inputs)
    for name, errors in (("ours", row["error"]), ("public", row["public_error"])):
        found = distances(with_gradients(table[name], inputs), expected)
        for part in PARTS:
            if not found[part] <= 4 * max(errors[part], row["error"][part], ROUNDING):
                return f"{part} of {name} compiled is off by {found[part]:.1e}"
    return ""


def prepare(name: str, device: str, small: bool) -> tuple[dict[str, Any], dict[str, dict[str, Callable[[], Any]]]]:
    """Correctness, then everything compiled and called once; the row so far and what is to be timed."""
    dtype = torch.bfloat16
    case = cases(device, dtype, small)[name]
    row: dict[str, Any] = {"case": name, "mechanism": case.mechanism, "shape": case.shape}
    row |= check(name, device, dtype, small)
    if row["wrong"]:
        return row, {}
    table, inputs = contenders(case, compiled=device == "cuda"), tokens(case, device, dtype)
    row["wrong"] = compiled_is_right(table, inputs, row)
    calls = {} if row["wrong"] else {label: phases(function, inputs) for label, function in table.items()}
    for one in calls.values():
        for call in one.values():
            for _ in range(3 if device == "cuda" else 1):  # kernels are chosen among several in the first calls
                call()
    return row, calls


def measure(row: dict[str, Any], calls: dict[str, dict[str, Callable[[], Any]]], device: str) -> dict[str, Any]:
    kinds = ("milliseconds", "called_milliseconds", "timed_by", "peak_bytes")
    for phase in PHASES:
        for label, one in calls.items():
            called = by_events(one[phase], 20) if device == "cuda" else on_cpu(one[phase])
            taken, how = device_time(one[phase]) if device == "cuda" else (called, "called")
            for kind, value in zip(kinds, (taken, called, how, peak(one[phase], device)), strict=True):
                row.setdefault(kind, {}).setdefault(phase, {})[label] = value
    return row


def worker(name: str, device: str, small: bool, pipe: Any) -> None:
    """A process of its own: gets ready, says so, measures when it is told to."""
    try:
        row, calls = prepare(name, device, small)
        pipe.send("ready")
        pipe.recv()
        pipe.send(measure(row, calls, device) if calls else row)
    except Exception as error:  # one mechanism must not cost the others
        pipe.send({"case": name, "wrong": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"})


def side_by_side(names: list[str], device: str, seconds: float, small: bool = False) -> Any:
    """Rows as they come: all cases compile at the same time, then one is measured after the other."""
    context = get_context("spawn")
    ends, processes = {}, {}
    for name in sorted(names, key=lambda name: not name.startswith(SLOW_TO_COMPILE)):
        # A process inherits it; for most cases their own process is enough.
        os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "4" if name.startswith(SLOW_TO_COMPILE) else "1"
        ends[name], other = context.Pipe()
        processes[name] = context.Process(target=worker, args=(name, device, small, other), daemon=True)
        processes[name].start()
        other.close()
    deadline = time.monotonic() + seconds
    said: dict[str, Any] = {}
    for name in names:
        pipe = ends[name]
        try:
            said[name] = pipe.recv() if pipe.poll(max(0.0, deadline - time.monotonic())) else "late"
        except EOFError:
            said[name] = "ended"
    print(f"compiled in {seconds - (deadline - time.monotonic()):.0f} s", flush=True)
    for name in [name for name, word in said.items() if word == "late"]:  # it would still use the GPU
        processes[name].terminate()
    for name in names:
        pipe = ends[name]
        if said[name] == "ready":
            pipe.send("go")
            try:
                yield pipe.recv()
            except EOFError:
                yield {"case": name, "wrong": "its process ended while it was measured"}
        elif isinstance(said[name], dict):
            yield said[name]
        else:
            yield {"case": name, "wrong": f"not ready within {seconds:.0f} s: {said[name]}"}
        processes[name].join(5)


def bandwidth() -> float:
    """Bytes a second, read and written, of a device-to-device copy of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (by_events(lambda: target.copy_(source), 40)[0] * 1e-3)


COLUMNS = ("ours", "eager", "public", "ratio", "eager", "called", "floor", "ours", "public")
UNITS = ("ms", "ms", "ms", "", "ratio", "ratio", "", "MiB", "MiB")
WIDTHS = (9, 9, 9, 7, 7, 7, 7, 9, 9)
HEADER = "\n".join(
    f"{'':32}" + "".join(f"{word:>{width}}" for word, width in zip(words, WIDTHS, strict=True)) + more
    for words, more in ((COLUMNS, "  errors of out, dq, dk, dv: ours / public"), (UNITS, ""))
)


def show(row: dict[str, Any], speed: float | None) -> None:
    if row["wrong"]:
        print(f"{row['case']:24}  WRONG, not timed: {row['wrong']}", flush=True)
        return
    size = 2 * torch.Size(row["shape"]).numel()
    for phase, moved in zip(PHASES, (4, 11), strict=True):
        times = {label: taken[0] for label, taken in row["milliseconds"][phase].items()}
        row.setdefault("ratio", {})[phase] = times["public"] / times["ours"]
        row.setdefault("eager_ratio", {})[phase] = times["public"] / times["ours, eager"]
        called = {label: taken[0] for label, taken in row["called_milliseconds"][phase].items()}
        row.setdefault("called_ratio", {})[phase] = called["public"] / called["ours"]
        if speed:
            row.setdefault("floor_share", {})[phase] = moved * size / speed / (times["ours"] * 1e-3)
        share = f"{row['floor_share'][phase]:7.2f}" if speed else f"{'-':>7}"
        memory = row["peak_bytes"][phase]
        cells = "".join(f"{'-' if memory[x] is None else round(memory[x] / 2**20):>9}" for x in ("ours", "public"))
        errors = "  " + " ".join(f"{row['error'][p]:.0e}/{row['public_error'][p]:.0e}" for p in PARTS)
        print(
            f"{row['case'] if phase == 'forward' else '':24}{'forward' if phase == 'forward' else 'fwd+bwd':8}"
            f"{times['ours']:9.3f}{times['ours, eager']:9.3f}{times['public']:9.3f}{row['ratio'][phase]:7.2f}"
            f"{row['eager_ratio'][phase]:7.2f}{row['called_ratio'][phase]:7.2f}{share}{cells}"
            f"{errors if phase == 'forward' else ''}",
            flush=True,
        )


def slower(times: dict[str, Quartiles]) -> bool:
    """Whether ours is behind the public form by more than both vary: the middle halves of their times do not meet."""
    return times["ours"][1] > times["public"][2]


def kept(earlier: Path | None, names: list[str]) -> list[dict[str, Any]]:
    """Rows of an earlier file that are not measured now; each says when it was."""
    if earlier is None:
        return []
    found = json.loads(earlier.read_text())
    origin = {name: found[name] for name in ("commit", "date")}
    return [origin | row for row in found["rows"] if row["case"] not in names]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small shapes, nothing compiled")
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of the names of cases")
    parser.add_argument("--add", type=Path, help="a file of results whose other cases are kept, with their own date")
    parser.add_argument("--seconds", type=float, default=105, help="longest time for compiling")
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu" and not options.quick:
        raise SystemExit("benchmarks/gpu_zoo.py needs a CUDA device, or --quick")
    names = [n for n in cases("cpu", torch.float64, True) if not options.only or n.startswith(tuple(options.only))]
    missing = set(zoo.names()) - {case.mechanism for case in cases("cpu", torch.float64, True).values()}
    print(f"mechanisms without a formulation: {', '.join(missing) or 'none'}")
    if not names:
        raise SystemExit(f"no case begins with {' or '.join(options.only)}")
    speed = None if device == "cpu" else bandwidth()
    results = provenance(" ".join(["python", "benchmarks/gpu_zoo.py", *sys.argv[1:]]))
    if speed is not None:
        results |= {"device": torch.cuda.get_device_name(), "copy_bytes_per_second": speed}
        print(f"{torch.cuda.get_device_name()}, copy {speed / 1e12:.2f} TB/s, torch {torch.__version__}", flush=True)
    results["rows"] = kept(options.add, names)
    rows = (
        (measure(*prepare(name, device, True), device) for name in names)
        if options.quick
        else side_by_side(names, device, options.seconds)
    )
    print(HEADER, flush=True)
    for row in rows:
        show(row, None if options.quick else speed)
        results["rows"].append(row | {name: results[name] for name in ("commit", "date")})
        if "OUT" in os.environ:
            Path(os.environ["OUT"], "zoo_gpu.json").write_text(json.dumps(results, indent=1) + "\n")
    done = [row for row in results["rows"] if row["case"] in names and not row["wrong"]]
    for phase in PHASES:
        behind = [f"{row['case']} {row['ratio'][phase]:.2f}" for row in done if slower(row["milliseconds"][phase])]
        print(f"{phase}: {len(done) - len(behind)} of {len(done)} at least as fast as the public formulation compiled"
              + (f"; behind: {', '.join(behind)}" if behind else ""))  # fmt: skip
    if len(done) < len(names):
        raise SystemExit(f"{len(names) - len(done)} cases were wrong or did not run")


if __name__ == "__main__":
    main()
