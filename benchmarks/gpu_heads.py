"""Do routing and fewer heads save time? Layers of `cumulant.nn.heads` against the plain layer, on one GPU, in one run.

    PYTHONPATH=src python benchmarks/gpu_heads.py            all cases (about a minute)
    PYTHONPATH=src python benchmarks/gpu_heads.py --warm     the same; kernels of all cases compile side by side first
    PYTHONPATH=src python benchmarks/gpu_heads.py --quick    tiny sizes on the CPU: that all of it runs

Every layer is checked first, output and gradients, else no time is printed: in bfloat16 against float32, with about
twice the plain error; gathered rows against all rows; ComplexFormer, whose phases jump, in float32 against float64.
What is computed without gradients, where kernels of their own serve, is compared with what gradients are recorded for.
`--profile` says which kernels a forward pass consists of.
Times are medians of interleaved rounds of four calls in a row, as layers of a model follow each other, in bfloat16:
forward without gradients, and forward with backward; "host" is how long the host is busy with one forward call, waits
for the device inside it included, and "graph" a forward call replayed as a CUDA graph, where it can be one: the device
alone. JSON goes to $OUT/gpu_heads.json if OUT is set.
"""

from __future__ import annotations

import argparse
import copy
import json
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cumulant import create_model
from cumulant.bench.provenance import provenance
from cumulant.nn import create_layer

QUICK = "--quick" in sys.argv
DEVICE = "cpu" if QUICK else "cuda"
DTYPE = torch.bfloat16
ROUNDS, CALLS = (2, 1) if QUICK else (10, 4)


@dataclass
class Variant:
    """A layer, or a model, and the arguments of its calls."""

    name: str
    make: Callable[[], nn.Module]
    call: dict[str, Any] = field(default_factory=dict)


@dataclass
class Case:
    """Variants to be timed beside each other on tokens of one shape; the first is what the others are divided by.

    `goal` maps a variant to the largest ratio of its forward time to the first's that the issue asks for.
    """

    name: str
    tokens: Callable[[], Tensor]
    variants: list[Variant]
    goal: dict[str, float] = field(default_factory=dict)
    backward: bool = True
    checked: int = 1024  # tokens of the comparison
    check: Callable[[], float] | None = None  # relative error of the variants against dense masks, in place of it
    rounds: int = ROUNDS
    alike: bool = True  # compare what is computed with and without gradients too


def layer(name: str, dim: int, heads: int, attention: str = "softmax", **options: Any) -> Callable[[], nn.Module]:
    return lambda: create_layer(name, dim, heads, attention=attention, **options)


def tokens(length: int, dim: int, batch: int = 1) -> Callable[[], Tensor]:
    return lambda: torch.randn(batch, 256 if QUICK else length, dim)


def words(length: int) -> Callable[[], Tensor]:
    return lambda: torch.randint(0, 256, (1, 256 if QUICK else length))


def moh(length: int, attention: str) -> Case:
    """Dense is all heads; then half of them, computed densely and by gathered rows."""
    half = {"shared": 4, "top": 4, "attention": attention}
    return Case(
        f"MoH, 8 of 16 heads, {attention}, {length} tokens", tokens(length, 1024),
        [
            Variant("multihead", layer("multihead", 1024, 16, attention)),
            Variant("moh", layer("moh", 1024, 16, sparse=True, **half)),
            Variant("moh, all rows", layer("moh", 1024, 16, sparse=False, **half)),
        ],
        goal={"moh": 1 / 1.4} if attention == "softmax" and length == 16384 else {},
    )  # fmt: skip


def sqa(length: int, is_causal: bool) -> Case:
    """The text model's layer: width 256, 16 heads of 16 channels."""
    call = {"is_causal": is_causal}
    kinds = [Variant(kind, layer("sqa", 256, 16, variant=kind), call) for kind in ("sqa", "ssqa", "xsqa")]
    way = "causal" if is_causal else "full"
    return Case(
        f"SQA layer, {way}, {length} tokens", tokens(length, 256),
        [Variant("multihead", layer("multihead", 256, 16), call), *kinds], goal={"sqa": 0.53, "xsqa": 0.36},
    )  # fmt: skip


def sqa_model(length: int) -> Case:
    """The published ratios are of a whole model: 8 layers of width 256."""

    def model(name: str | None) -> Callable[[], nn.Module]:
        size = {"embed_dim": 256, "depth": 1 if QUICK else 8, "num_heads": 16, "num_classes": 256}
        return lambda: create_model("lm_tiny", layer=name, **size)

    names = {"multihead": None, "sqa": "sqa", "xsqa": "sqa+variant=xsqa"}
    return Case(
        f"SQA, language model of 8 layers, {length} tokens", words(length),
        [Variant(name, model(made)) for name, made in names.items()], goal={"sqa": 0.53, "xsqa": 0.36}, backward=False,
    )  # fmt: skip


def complexformer(length: int) -> Case:
    variants = [Variant(name, layer(name, 512, 8)) for name in ("multihead", "complexformer")]
    variants.insert(1, Variant("multihead, rotary", layer("multihead", 512, 8, rotary=True)))
    return Case(f"ComplexFormer, {length} tokens", tokens(length, 512), variants, goal={"complexformer": 1.15})


def gda(length: int) -> Case:
    variants = [Variant("multihead", layer("multihead", 512, 8)), Variant("gda", layer("gda", 512, 8))]
    return Case(f"GDA, 6 signal and 2 noise heads, {length} tokens", tokens(length, 512), variants)


def relative(found: Tensor, exact: Tensor) -> float:
    return float((found - exact).norm() / exact.norm())


def by_dense_mask(made: Any, x: Tensor, kept: Tensor, factor: float, **call: Any) -> float:
    """Error of a layer's heads against softmax over the pairs (B, H, L, L) that it keeps."""
    asked = made.asked(x, **call)
    logits = (asked.query * factor @ asked.key.mT).masked_fill(~kept, -torch.inf)
    return relative(made.mix_tokens(asked, x), logits.softmax(-1) @ asked.value)


@torch.no_grad()
def check_biformer() -> float:
    made: Any = create_layer("biformer", 64, 2, top=4, lce=0).to(DEVICE).eval()
    x, side, n = torch.randn(2, 784, 64, device=DEVICE), 28, 7
    at = torch.arange(784, device=DEVICE)
    region = at // side // (side // n) * n + at % side // (side // n)
    chosen = torch.zeros(2, n * n, n * n, dtype=torch.bool, device=DEVICE)
    chosen.scatter_(2, made.choose(x, grid=(side, side)), True)
    kept = chosen[:, region][:, :, region].unsqueeze(1)
    return by_dense_mask(made, x, kept, 64**-0.5, grid=(side, side))


def biformer(side: int, batch: int) -> Case:
    """Stage 1 of BiFormer-T at four times the pixels: width 64, heads of 32, 7 x 7 regions, against full softmax."""
    side = 14 if QUICK else side
    call = {"grid": (side, side)}
    kinds = [Variant(f"biformer, k = {k}", layer("biformer", 64, 2, top=k), call) for k in (1, 4)]
    far = Variant("biformer, k = 4, far", layer("biformer", 64, 2, top=4, far=True), call)
    return Case(
        f"BiFormer, {side} x {side}, batch {batch}", lambda: torch.randn(batch, side * side, 64),
        [Variant("multihead", layer("multihead", 64, 2)), *kinds, *([far] if QUICK else [])],
        goal={kind.name: 1 / 3 for kind in kinds}, check=check_biformer,
    )  # fmt: skip


@torch.no_grad()
def check_sparsifiner() -> float:
    made: Any = create_layer("sparsifiner", 64, 2, tokens=256, block=32).to(DEVICE).eval()
    x = torch.randn(2, 256, 64, device=DEVICE)
    guess = made.guess(made._flat(made.asked(x))).unflatten(2, (-1, 32)).sum(3)
    guess = guess - 1e-10 * torch.arange(256, device=DEVICE)
    kept = torch.zeros_like(guess, dtype=torch.bool).scatter(-1, guess.topk(64).indices, True)
    return by_dense_mask(made, x, kept.repeat_interleave(32, 2), 32**-0.5)


def sparsifiner(length: int, dim: int, heads: int, batch: int, blocks: tuple[int, ...], reduce_n: int) -> Case:
    """A quarter of the keys; rows alone as published, or so many in a row that share their keys."""
    given = {"tokens": 256 if QUICK else length, "reduce_n": reduce_n}
    kinds = [Variant(f"sparsifiner, {r} rows", layer("sparsifiner", dim, heads, block=r, **given)) for r in blocks]
    return Case(
        f"Sparsifiner, a quarter of the keys, {length} tokens, batch {batch}",
        tokens(length, dim, 1 if QUICK else batch),
        [Variant("multihead", layer("multihead", dim, heads)), *kinds], check=check_sparsifiner,
    )  # fmt: skip


@torch.no_grad()
def check_ia_red2() -> float:
    made: Any = create_layer("ia_red2", 64, 2, sparse=True).to(DEVICE).eval()
    x = torch.randn(3, 300, 64, device=DEVICE)
    gathered = made(x)
    made.sparse = False
    return relative(gathered, made(x))


def ia_red2(length: int, batch: int, attention: str) -> Case:
    """Fresh interpreters keep about half of the tokens."""
    kinds = [Variant(f"ia_red2{name}", layer("ia_red2", 384, 6, attention, sparse=sparse))
             for name, sparse in (("", True), (", masked", False))]  # fmt: skip
    return Case(
        f"IA-RED2 layer, half of {length} tokens, {attention}, batch {batch}", tokens(length, 384, batch),
        [Variant("multihead", layer("multihead", 384, 6, attention)), *kinds], backward=False, check=check_ia_red2,
    )  # fmt: skip


def ia_red2_model(batch: int) -> Case:
    """A DeiT-small whose three interpreters keep what fresh ones keep."""
    name = "nano_patch2_8" if QUICK else "small_patch16_224"
    side, channels = (8, 1) if QUICK else (224, 3)

    def model(kind: str) -> nn.Module:
        made = create_model(f"{kind}_{name}", num_classes=10).eval()
        for part in getattr(made, "interpreters", ()):
            part.qk.weight.data *= 16  # fresh ones say 0.5 of all tokens, and rounding would choose
        return made

    kinds = [Variant(kind, lambda kind=kind: model(kind)) for kind in ("vit", "ia_red2")]
    return Case(
        f"IA-RED2, ViT-small, batch {batch}", lambda: torch.randn(batch, channels, side, side), kinds, backward=False,
        check=check_ia_red2,
    )  # fmt: skip


CASES: list[Callable[[], Case]] = [
    lambda: moh(16384, "softmax"),
    lambda: biformer(112, 8),
    lambda: complexformer(16384),
    lambda: ia_red2(4096, 8, "softmax"),
    lambda: ia_red2(1024, 8, "softmax"),
    lambda: ia_red2(16384, 8, "softmax"),
    lambda: sparsifiner(16384, 1024, 16, 1, (128,), 64),
    lambda: sparsifiner(197, 384, 6, 64, (1,), 6),
    lambda: ia_red2(4096, 8, "cumulant3"),
    lambda: moh(16384, "cumulant3"),
    lambda: complexformer(32768),
    lambda: ia_red2_model(64),
    lambda: gda(8192),
    lambda: sqa(32768, False),
    lambda: sqa(32768, True),
    lambda: sqa_model(32768),
]


def errors(one: nn.Module, two: nn.Module, x: Tensor, call: dict[str, Any]) -> tuple[float, float]:
    """How far the second is from the first: of the output, and of the gradient of all parameters."""
    found = []
    for module in (one, two):
        out = module(x.to(next(module.parameters()).dtype) if x.is_floating_point() else x, **call)
        out.double().square().mean().backward()
        grads = [p.grad.double().flatten() for p in module.parameters() if p.grad is not None]
        found.append((out.detach().double(), torch.cat(grads)))
    (a, da), (b, db) = found
    return float((a - b).norm() / a.norm()), float((da - db).norm() / da.norm())


def unalike(case: Case, x: Tensor) -> dict[str, str]:
    """Variants whose output without gradients is another one than with them, in bfloat16, with how far."""
    faults = {}
    for variant in case.variants:
        torch.manual_seed(0)
        made = variant.make().to(DEVICE, DTYPE).eval()
        with torch.no_grad():
            alone = made(x, **variant.call)
        error = relative(alone.double(), made(x, **variant.call).detach().double())
        if not error < 0.02:
            faults[variant.name] = f"without gradients {error:.1e} off"
    return faults


def profiled(case: Case) -> dict[str, float]:
    """Milliseconds that the kernels of one forward pass of each variant take, and which they are, the longest first."""
    times: dict[str, float] = {}
    x = case.tokens().to(DEVICE)
    x = x.to(DTYPE) if x.is_floating_point() else x
    for variant in case.variants:
        made = variant.make().to(DEVICE, DTYPE).eval()
        with torch.no_grad():
            for _ in range(3):
                made(x, **variant.call)
            with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
                made(x, **variant.call)
                torch.cuda.synchronize()
        found = [one for one in seen.key_averages() if one.self_device_time_total > 0]
        found.sort(key=lambda one: -one.self_device_time_total)
        count = sum(one.count for one in found)
        total = sum(one.self_device_time_total for one in found)
        print(f"  {variant.name}: {total:.0f} us in {count} kernels", flush=True)
        for one in found[:9]:
            print(f"    {one.self_device_time_total:8.1f} us {one.count:4d} x {one.key[:90]}", flush=True)
        times[variant.name] = total / 1e3
    return times


def sound(case: Case) -> dict[str, str]:
    """Why a variant may not be timed, by name; empty where all are right."""
    whole = case.tokens().to(DEVICE)
    whole = whole.to(DTYPE) if whole.is_floating_point() else whole
    faults = unalike(case, whole) if case.alike else {}
    if faults:
        return faults
    if case.check is not None:
        error = case.check()
        return {} if error < 1e-3 else {v.name: f"error {error:.1e} of float32 rows" for v in case.variants[1:]}
    x = case.tokens()[:, : case.checked].to(DEVICE)
    base = (0.0, 0.0)
    for variant in case.variants:
        torch.manual_seed(0)
        made: Any = variant.make().to(DEVICE)
        allowed = tuple(2.5 * error + 0.005 for error in base)  # a layer with other parameters rounds otherwise
        if variant.name == "complexformer":
            found, allowed = errors(copy.deepcopy(made).double(), made, x, variant.call), (1e-3, 1e-2)
        elif hasattr(made, "sparse"):  # rounding chooses other heads at ties, so both are rounded alike
            made = made.to(DTYPE)
            all_rows = copy.deepcopy(made)
            all_rows.sparse = False
            found = errors(all_rows, made, x, variant.call)
        else:
            found = errors(made, copy.deepcopy(made).to(DTYPE), x, variant.call)
        if variant is case.variants[0]:
            base = found
        elif not all(error < most for error, most in zip(found, allowed, strict=True)):
            faults[variant.name] = f"errors {found[0]:.1e}, {found[1]:.1e}, allowed {allowed[0]:.1e}, {allowed[1]:.1e}"
    return faults


def seconds(run: Callable[[], Any]) -> float:
    if DEVICE == "cpu":
        begin = time.perf_counter()
        for _ in range(CALLS):
            run()
        return (time.perf_counter() - begin) / CALLS
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(CALLS):
        run()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / 1e3 / CALLS


def replayed(runs: dict[str, Callable[[], Any]], rounds: int) -> dict[str, float]:
    """Milliseconds of those calls that can be a CUDA graph: they wait for nothing."""
    found: dict[str, float] = {}
    for name, run in runs.items() if DEVICE != "cpu" else ():
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                run()
        except RuntimeError as error:
            print(f"  {name} is no graph: {str(error).splitlines()[0]}", flush=True)
            torch.cuda.synchronize()
            continue
        found[name] = 1e3 * statistics.median(seconds(graph.replay) for _ in range(rounds + 2))
    return found


def host_seconds(run: Callable[[], Any]) -> float:
    """How long a call keeps the host, on an idle device."""
    if DEVICE != "cpu":
        torch.cuda.synchronize()
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def measure(case: Case) -> dict[str, Any]:
    """Milliseconds of each variant, their ratios to the first, and peak memory of a forward."""
    faults = sound(case)
    modules = {v.name: (v.make().to(DEVICE, DTYPE), v) for v in case.variants if v.name not in faults}
    x = case.tokens().to(DEVICE)
    x = x.to(DTYPE) if x.is_floating_point() else x
    runs: dict[str, dict[str, Callable[[], Any]]] = {"forward": {}, "both": {}}
    for name, (module, variant) in modules.items():

        def forward(module: nn.Module = module, variant: Variant = variant) -> None:
            with torch.no_grad():
                module(x, **variant.call)

        def both(module: nn.Module = module, variant: Variant = variant) -> None:
            module(x, **variant.call).sum().backward()

        runs["forward"][name] = forward
        if case.backward:
            runs["both"][name] = both
    row: dict[str, Any] = {"case": case.name, "faults": faults, "goal": case.goal, "milliseconds": {}, "ratio": {}}
    for which, functions in runs.items():
        times: dict[str, list[float]] = {name: [] for name in functions}
        for number in range(case.rounds + 2):
            for name, run in functions.items():
                taken = seconds(run)
                if number >= 2:
                    times[name].append(1e3 * taken)
        if times:
            middle = {name: statistics.median(found) for name, found in times.items()}
            row["milliseconds"][which] = middle
            base = middle[case.variants[0].name]
            row["ratio"][which] = {name: found / base for name, found in middle.items()}
    row["milliseconds"]["graph"] = replayed(runs["forward"], case.rounds)
    row["milliseconds"]["host"] = {
        name: 1e3 * statistics.median(host_seconds(run) for _ in range(case.rounds))
        for name, run in runs["forward"].items()
    }
    return row


def show(row: dict[str, Any]) -> None:
    print(row["case"], flush=True)
    for name, why in row["faults"].items():
        print(f"  {name:18} not timed: {why}")
    for name, ratio in row["ratio"]["forward"].items():
        goal = row["goal"].get(name)
        said = "" if goal is None else f"  goal {goal:.2f}: {'reached' if ratio <= goal else 'MISSED'}"
        both = row["ratio"].get("both", {}).get(name)
        more = "" if both is None else f"  with backward {row['milliseconds']['both'][name]:8.3f} ms {both:5.2f}"
        forward, host = (row["milliseconds"][which][name] for which in ("forward", "host"))
        graph = row["milliseconds"]["graph"].get(name, float("nan"))
        times = f"forward {forward:8.3f} ms {ratio:5.2f}  host {host:6.3f}  graph {graph:6.3f}"
        print(f"  {name:18} {times}{more}{said}", flush=True)


def warm(number: int) -> None:
    """Run everything of a case once, so that its kernels are compiled."""
    case = CASES[number]()
    try:
        sound(case)
        x = case.tokens().to(DEVICE)
        x = x.to(DTYPE) if x.is_floating_point() else x
        for variant in case.variants:
            made = variant.make().to(DEVICE, DTYPE)
            with torch.no_grad():
                made(x, **variant.call)
            if case.backward:
                made(x, **variant.call).sum().backward()
    except Exception as error:  # it will be told when the case is measured
        print(f"{case.name}: {type(error).__name__}: {str(error)[:300]}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, on the CPU")
    parser.add_argument("--profile", default="none", help="cases, as of --only, whose kernels are told too")
    parser.add_argument("--only", default="", help="cases whose name holds one of these words, with commas between")
    parser.add_argument("--warm", action="store_true", help="compile the kernels of all cases side by side first")
    settings = parser.parse_args()
    rows = []
    words = settings.only.lower().split(",")
    cases = {number: case for number, case in enumerate(make() for make in CASES)
             if any(word in case.name.lower() for word in words)}  # fmt: skip
    if settings.warm:
        children = [multiprocessing.get_context("spawn").Process(target=warm, args=(number,)) for number in cases]
        for child in children:
            child.start()
        for child in children:
            child.join()
        print("compiled", flush=True)
    for case in cases.values():
        try:
            row = measure(case)
        except Exception as error:  # the others are still worth measuring
            print(f"{case.name}\n  failed: {type(error).__name__}: {error}", flush=True)
            continue
        rows.append(row)
        show(row)
        if any(word in case.name.lower() for word in settings.profile.lower().split(",")):
            row["milliseconds"]["kernels"] = profiled(case)
        if "OUT" in os.environ:
            gpu = {} if QUICK else {"gpu": torch.cuda.get_device_name()}
            command = " ".join(["PYTHONPATH=src python benchmarks/gpu_heads.py", *sys.argv[1:]])
            content = {**provenance(command), **gpu, "rows": rows}
            Path(os.environ["OUT"], "gpu_heads.json").write_text(json.dumps(content, indent=1))


if __name__ == "__main__":
    main()
