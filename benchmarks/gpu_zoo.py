"""Every mechanism of the zoo on the GPU against the public formulation of it: correct first, then time and memory.

    python benchmarks/gpu_zoo.py                       all cases, about 2 minutes
    python benchmarks/gpu_zoo.py --only linear mala    those whose name begins so
    python benchmarks/gpu_zoo.py --quick               small shapes, nothing compiled: seconds, on a CPU too

bfloat16, D 64, H 12, B 16 x 4,096 tokens (what forms an L x L or L x D x E tensor: B 4 x 1,024). The public formulation
(`benchmarks/public_formulations.py`) and ours must be the same function in float64, outputs and gradients of q, k, v;
in bfloat16 the error of ours against its own float64 result may be at most twice that of the public formulation, or
one rounding of bfloat16 (2^-8) where that is less. Only then is anything timed: ours as called ("eager"), ours and the
public one under torch.compile, forward alone and forward + backward, medians by CUDA events with a cold L2, one run.
The ratio is public compiled over ours compiled: above 1 ours is faster. (lla: ours is as called in both columns, it
looks while it runs whether its solver has converged; the public one is compiled in parts.) `floor`: the share of the
time in which 4 tensors (forward; 11 with backward) move at the copy bandwidth of the same run. Cases compile side by
side, each in a process of its own; the clock runs only when all are ready, one case at a time. JSON: $OUT/zoo_gpu.json.
Run with PYTHONPATH=src.
"""

from __future__ import annotations

import argparse
import functools
import json
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
SAME = 1e-5  # relative, in float64: lla stops its conjugate gradients where it is exact to about 1e-6
PARTS = ("out", "dq", "dk", "dv")
PHASES = ("forward", "both")


def ours(case: Case) -> Operator:
    return partial(zoo.get(case.mechanism), is_causal=case.is_causal, **case.options)


def tokens(case: Case, device: str, dtype: torch.dtype) -> list[Tensor]:
    """q, k, v and a gradient of the output."""
    generator = torch.Generator(device).manual_seed(0)
    drawn = [torch.randn(case.shape, device=device, generator=generator) for _ in range(4)]
    return [(x + mean).to(dtype) for x, mean in zip(drawn, (0.2, 0.5, 0.5, 0.0), strict=True)]


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


def quartiles(call: Callable[[], Any], device: str) -> tuple[float, float, float]:
    """Median, lower and upper quartile in milliseconds of single calls, the device synchronised by events."""
    if device == "cuda":
        from triton.testing import do_bench

        taken = do_bench(call, warmup=20, rep=80, return_mode="all")
    else:
        taken = []
        for _ in range(5):
            start = time.perf_counter()
            call()
            taken.append(1e3 * (time.perf_counter() - start))
    low, median, high = statistics.quantiles(taken, n=4, method="inclusive") if len(taken) > 1 else taken * 3
    return median, low, high


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
    if case.in_parts:
        return {"ours, eager": mine, "ours": mine, "public": partial(theirs, compiled=functools.cache(call))}
    return {
        "ours, eager": mine,
        "ours": call(lambda q, k, v: mine(q, k, v)),
        "public": call(lambda q, k, v: theirs(q, k, v)),
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
            call()
    return row, calls


def measure(row: dict[str, Any], calls: dict[str, dict[str, Callable[[], Any]]], device: str) -> dict[str, Any]:
    for phase in PHASES:
        for label, one in calls.items():
            row.setdefault("milliseconds", {}).setdefault(phase, {})[label] = quartiles(one[phase], device)
            row.setdefault("peak_bytes", {}).setdefault(phase, {})[label] = peak(one[phase], device)
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
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"  # there is a process for each case already
    context = get_context("spawn")
    ends, processes = {}, {}
    for name in names:
        ends[name], other = context.Pipe()
        processes[name] = context.Process(target=worker, args=(name, device, small, other), daemon=True)
        processes[name].start()
        other.close()
    deadline = time.monotonic() + seconds
    said: dict[str, Any] = {}
    for name, pipe in ends.items():
        try:
            said[name] = pipe.recv() if pipe.poll(max(0.0, deadline - time.monotonic())) else "late"
        except EOFError:
            said[name] = "ended"
    print(f"compiled in {seconds - (deadline - time.monotonic()):.0f} s", flush=True)
    for name in [name for name, word in said.items() if word == "late"]:  # it would still use the GPU
        processes[name].terminate()
    for name, pipe in ends.items():
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
    return 2 * source.numel() / (quartiles(lambda: target.copy_(source), "cuda")[0] * 1e-3)


COLUMNS = ("ours", "eager", "public", "ratio", "eager", "floor", "ours", "public")
UNITS = ("ms", "ms", "ms", "", "ratio", "", "MiB", "MiB")
WIDTHS = (9, 9, 9, 7, 7, 7, 9, 9)
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
        if speed:
            row.setdefault("floor_share", {})[phase] = moved * size / speed / (times["ours"] * 1e-3)
        share = f"{row['floor_share'][phase]:7.2f}" if speed else f"{'-':>7}"
        memory = row["peak_bytes"][phase]
        cells = "".join(f"{'-' if memory[x] is None else round(memory[x] / 2**20):>9}" for x in ("ours", "public"))
        errors = "  " + " ".join(f"{row['error'][p]:.0e}/{row['public_error'][p]:.0e}" for p in PARTS)
        print(
            f"{row['case'] if phase == 'forward' else '':24}{'forward' if phase == 'forward' else 'fwd+bwd':8}"
            f"{times['ours']:9.3f}{times['ours, eager']:9.3f}{times['public']:9.3f}{row['ratio'][phase]:7.2f}"
            f"{row['eager_ratio'][phase]:7.2f}{share}{cells}{errors if phase == 'forward' else ''}",
            flush=True,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small shapes, nothing compiled")
    parser.add_argument("--only", nargs="*", default=[], help="beginnings of the names of cases")
    parser.add_argument("--seconds", type=float, default=120, help="longest time for compiling")
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
    results["rows"] = []
    rows = (
        (measure(*prepare(name, device, True), device) for name in names)
        if options.quick
        else side_by_side(names, device, options.seconds)
    )
    print(HEADER, flush=True)
    for row in rows:
        show(row, None if options.quick else speed)
        results["rows"].append(row)
        if "OUT" in os.environ:
            Path(os.environ["OUT"], "zoo_gpu.json").write_text(json.dumps(results, indent=1) + "\n")
    done = [row for row in results["rows"] if not row["wrong"]]
    for phase in PHASES:
        behind = [f"{row['case']} {row['ratio'][phase]:.2f}" for row in done if row["ratio"][phase] < 1]
        print(f"{phase}: {len(done) - len(behind)} of {len(done)} at least as fast as the public formulation compiled"
              + (f"; behind: {', '.join(behind)}" if behind else ""))  # fmt: skip
    if len(done) < len(names):
        raise SystemExit(f"{len(names) - len(done)} cases were wrong or did not run")


if __name__ == "__main__":
    main()
