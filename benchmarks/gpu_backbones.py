"""Vision networks on one GPU: training throughput against timm's, and of linear-time attention against softmax.

    PYTHONPATH=src python benchmarks/gpu_backbones.py --warm              compiles only, into torch's cache
    PYTHONPATH=src python benchmarks/gpu_backbones.py                     everything, then about two minutes, alone
    PYTHONPATH=src python benchmarks/gpu_backbones.py --only tnt shvit    these networks
    PYTHONPATH=src python benchmarks/gpu_backbones.py --hold FILE         compiles beside others, times when FILE is
    PYTHONPATH=src python benchmarks/gpu_backbones.py --quick             tiny sizes on the CPU: that all of it runs

A step is forward, backward and fused AdamW under bf16 autocast, with drop rates 0. Ours and timm's have equal batches
and are compiled alike, block by block (with --eager neither is), and replayed as CUDA graphs: a busy host is not timed.
Nothing is timed before it is checked: ours gives timm's answers from timm's weights in float32, and bf16 with
another mechanism is off by at most twice what it is with softmax. "values" is the same network whose attention gives
back its values: what no attention could be quicker than.
Networks compile side by side in processes of their own; they are timed one after another, when all have compiled:
medians of CUDA events. JSON goes to $OUT/gpu_backbones.json after each network if OUT is set; with --profile the
kernels that took longest, of each network and attention, to profile_NETWORK_WHICH.txt beside it.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
import threading
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as mp
import torch.nn.functional as F
from torch import Tensor, nn

from cumulant import create_model
from cumulant.bench.provenance import provenance

# Ours, timm's, pixels and images.
AGAINST: dict[str, tuple[str, str, int, int]] = {
    "vit": ("vit_small_patch16_224", "vit_small_patch16_224", 224, 128),
    "tnt": ("tnt_s", "tnt_s_patch16_224", 224, 64),
    "crossvit": ("crossvit_15", "crossvit_15_240", 240, 128),
    "shvit": ("shvit_s4", "shvit_s4", 256, 256),
    "maxvit": ("maxvit_t", "maxvit_tiny_tf_224", 224, 64),
}
# Classes, ours and timm's, that are compiled; not what is inside of one that is.
COMPILED = ("Block", "TNTBlock", "ClassFusion", "CrossAttentionBlock", "SHViTBlock", "BasicBlock", "Residual",
            "PatchMerging", "ActivatorBlock", "MaxxVitBlock", "MaxViTBlock",
            "SpectralBlock")  # fmt: skip
ATTENTIONS = ("softmax", "cumulant3", "values")
# Ours, its arguments, and pixels with images; tokens of the longest attention in the key.
SWAPS: dict[str, tuple[str, dict[str, Any], dict[int, tuple[int, int]]]] = {
    "vit": ("vit_small_patch16_224", {}, {1024: (512, 32), 4096: (1024, 8)}),
    "tnt": ("tnt_s", {}, {1024: (512, 16), 4096: (1024, 4)}),
    "crossvit": ("crossvit_15", {}, {1600: (480, 32), 6400: (960, 8)}),
    "shvit": ("shvit_s4", {}, {1024: (1024, 16), 4096: (2048, 4)}),
    "activator": ("activator", {"mixer": "attention", "drop_rate": 0.0}, {1024: (128, 128), 4096: (256, 32)}),
    "maxvit": ("maxvit_t", {"partition": "global"}, {3136: (224, 32)}),
    "spectformer": ("spectformer_s", {}, {1024: (512, 32), 4096: (1024, 8)}),
}
SHARE = 0.2  # of the GPU's memory that a network may take: others may be beside it
LONGEST = 900  # seconds that a compiled network waits to be timed
GOAL = 1.5  # times softmax, from 1,024 tokens on


class Values:
    """In place of a mechanism: each query gets the value of its own place."""

    def run(self, call: Any, x: Tensor | None = None) -> Tensor:
        return call.value[..., : call.query.shape[-2], :]


def made(name: str, attention: str, **given: Any) -> nn.Module:
    """A network with a mechanism, or with nothing but values where cumulant3 would be."""
    model = create_model(name, attention="cumulant3" if attention == "values" else attention, **given)
    for module in model.modules():
        swapped = attention == "values" and getattr(module, "mechanism", None)
        if swapped and swapped.name == "cumulant3":
            module.mix = Values()
    return model


class Step:
    """One training step of a model on fixed images."""

    def __init__(self, model: nn.Module, px: int, batch: int, device: str, compiled: bool = True) -> None:
        self.device, self.batch = device, batch
        self.model = model.to(device, memory_format=torch.channels_last).train()
        if device == "cuda" and compiled:
            compile_inside(self.model)
        self.images = torch.randn(batch, 3, px, px, device=device).contiguous(memory_format=torch.channels_last)
        self.labels = torch.randint(0, 1000, (batch,), device=device)
        self.optimiser = torch.optim.AdamW(
            self.model.parameters(), lr=1e-4, fused=device == "cuda", capturable=device == "cuda"
        )

    def __call__(self) -> Tensor:
        with torch.autocast(self.device, torch.bfloat16):
            loss = F.cross_entropy(self.model(self.images).float(), self.labels)
        loss.backward()
        self.optimiser.step()
        self.optimiser.zero_grad(set_to_none=True)
        return loss

    def ms(self, rounds: int) -> float:
        if self.device == "cpu":
            start = time.perf_counter()
            self()
            return 1e3 * (time.perf_counter() - start)
        run = self._graph()
        marks = [torch.cuda.Event(enable_timing=True) for _ in range(rounds + 1)]
        for mark in marks[:-1]:
            mark.record()
            run()
        marks[-1].record()
        torch.cuda.synchronize()
        return statistics.median(a.elapsed_time(b) for a, b in pairwise(marks))

    def _graph(self) -> Callable[[], Any]:
        """The step as a CUDA graph: what the host does beside it is not in its time."""
        stream = torch.cuda.Stream()
        with torch.cuda.stream(stream):
            for _ in range(2):
                self()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, stream=stream):
            self()
        graph.replay()
        return graph.replay


def compile_inside(module: nn.Module) -> None:
    for child in module.children():
        if type(child).__name__ in COMPILED:
            child.compile(dynamic=False)
        else:
            compile_inside(child)


def off(model: nn.Module, images: Tensor) -> float:
    """Relative error of the answers in bf16."""
    model.eval()
    with torch.no_grad():
        exact = model(images)
        with torch.autocast(images.device.type, torch.bfloat16):
            said = model(images).float()
    return float((said - exact).norm() / exact.norm())


def drawn(model: nn.Module) -> nn.Module:
    """Norms that start at 0 would hide what is behind them."""
    for module in model.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.ones_(module.weight)
    return model


def against(name: str, which: str, asked: argparse.Namespace, device: str) -> dict[str, Step]:
    import timm

    ours, theirs, px, batch = AGAINST[name]
    if asked.warm:
        return {
            which: Step(
                create_model(ours) if which == "ours" else timm.create_model(theirs), px, batch, device, not asked.eager
            )
        }
    torch.manual_seed(0)
    other = drawn(timm.create_model(theirs)).to(device)
    own = create_model(ours).to(device)
    own.load_state_dict(other.state_dict())
    images = torch.randn(2, 3, px, px, device=device)
    with torch.no_grad():
        gap = float((own.eval()(images) - other.eval()(images)).norm() / other(images).norm())
    if gap > 1e-3:
        raise ValueError(f"{ours} is off timm's {theirs} by {gap:.2g}: nothing is timed")
    model = own if which == "ours" else other
    return {which: Step(model, px, 2 if asked.quick else batch, device, not asked.eager)}


def swaps(name: str, asked: argparse.Namespace, device: str) -> dict[str, Step]:
    ours, given, sizes = SWAPS[name]
    steps, plain = {}, None
    for tokens, (px, batch) in [*sizes.items()][: asked.sizes]:
        for attention in asked.attentions:
            torch.manual_seed(0)
            model = drawn(made(ours, attention, img_size=px, **given)).to(device)
            error = 0.0 if asked.warm else off(model, torch.randn(1, 3, px, px, device=device))
            plain = error if attention == "softmax" else plain
            if plain is not None and not error <= 2 * plain + 1e-3:
                print(f"{name} {attention}: bf16 is off by {error:.2g}, softmax by {plain:.2g}: not timed", flush=True)
                continue
            steps[f"{attention}@{tokens}"] = Step(model, px, 2 if asked.quick else batch, device, not asked.eager)
            if asked.quick:
                break
    return steps


def work(kind: str, name: str, which: str, asked: argparse.Namespace, gates: Any, told: Any) -> None:
    torch._inductor.config.compile_threads = 2
    torch._dynamo.config.recompile_limit = 64
    quick, device = asked.quick, "cpu" if asked.quick else "cuda"
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    ready, turn, few = gates
    if device == "cuda":
        torch.cuda.set_per_process_memory_fraction(SHARE)
    start, rows, steps = time.perf_counter(), [], {}
    try:
        steps = against(name, which, asked, device) if kind == "against" else swaps(name, asked, device)
        for label in list(steps):
            with few:
                if asked.compiling and time.perf_counter() - start > asked.compiling:
                    steps.pop(label)
                    continue
                try:
                    for _ in range(1 if quick or asked.warm else 2):
                        steps[label]()
                except Exception as error:  # one that does not run must not stop the others
                    print(f"{kind} {name} {label}: {type(error).__name__}: {str(error)[:500]}", flush=True)
                    steps.pop(label)
                if device == "cuda":
                    torch.cuda.synchronize()
                    torch.cuda.empty_cache()
    except Exception as error:
        print(f"{kind} {name} {which}: {type(error).__name__}: {str(error)[:500]}", flush=True)
    print(f"{kind} {name} {which} ready after {time.perf_counter() - start:.0f} s", flush=True)
    if asked.warm:
        return told.put([])
    with contextlib.suppress(threading.BrokenBarrierError):  # some are slow: the others go on
        ready.wait(max(1.0, asked.wait - (time.perf_counter() - start)))
    while asked.hold and not Path(asked.hold).exists() and time.perf_counter() - start < LONGEST:
        time.sleep(0.1)
    with turn:
        for label, step in steps.items():
            try:
                ms = step.ms(8)
            except RuntimeError as error:
                print(f"{kind} {name} {label}: {str(error)[:300]}", flush=True)
                continue
            rows.append({"kind": kind, "network": name, "which": label, "compiled": not asked.eager,
                         "batch": step.batch, "ms": ms, "images": 1e3 * step.batch / ms,
                         "alone": not ready.broken})  # fmt: skip
            if asked.profile and label.split("@")[0] != "values" and "OUT" in os.environ:
                told_by = profiled(step)
                Path(os.environ["OUT"], f"profile_{name}_{label}.txt").write_text(told_by)
            if device == "cuda":
                torch.cuda.empty_cache()
        steps.clear()
    told.put(rows)


def profiled(step: Step) -> str:
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
        for _ in range(2):
            step()
        torch.cuda.synchronize()
    return found.key_averages().table(sort_by="self_cuda_time_total", row_limit=25, max_name_column_width=90)


def shown(rows: list[dict[str, Any]]) -> str:
    found = {(row["kind"], row["network"], row["which"]): row["images"] for row in rows}
    lines = [f"{'network':24} {'ours':>9} {'timm':>9}  images/s, ratio"]
    for name in AGAINST:
        ours, theirs = (found.get(("against", name, which)) for which in ("ours", "timm"))
        if ours and theirs:
            lines.append(f"{AGAINST[name][0]:24} {ours:9,.0f} {theirs:9,.0f}  {ours / theirs:.2f}")
    lines.append(f"\n{'network, tokens':24} " + " ".join(f"{attention:>10}" for attention in ATTENTIONS) + "  ratios")
    for name, (ours, _, sizes) in SWAPS.items():
        for tokens in sizes:
            rates = [found.get(("swap", name, f"{attention}@{tokens}")) for attention in ATTENTIONS]
            if rates[0]:
                ratios = " ".join("-" if rate is None else f"{rate / rates[0]:.2f}" for rate in rates[1:])
                met = "" if rates[1] is None or rates[1] >= GOAL * rates[0] else f"  below {GOAL}"
                cells = " ".join(f"{'-' if rate is None else format(rate, ',.0f'):>10}" for rate in rates)
                lines.append(f"{ours + f', {tokens:,}':24} {cells}  {ratios}{met}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="*", default=[*{**AGAINST, **SWAPS}])
    parser.add_argument("--kinds", nargs="*", default=["against", "swap"])
    parser.add_argument("--sizes", type=int, default=2, help="of the images with other attention, from the smallest on")
    parser.add_argument("--attentions", nargs="*", default=[*ATTENTIONS], choices=ATTENTIONS)
    parser.add_argument("--wait", type=float, default=400, help="seconds that the slowest may take to compile")
    parser.add_argument("--compiling", type=float, default=0, help="seconds after which nothing more is compiled")
    parser.add_argument("--warm", action="store_true", help="compile into torch's cache, time nothing")
    parser.add_argument("--hold", default="", help="compile, then wait with timing until this file is there")
    parser.add_argument("--eager", action="store_true", help="nothing compiled")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--beside", type=int, default=16, help="networks that compile at one time")
    parser.add_argument("--quick", action="store_true")
    asked = parser.parse_args()
    from cumulant.models import names

    jobs = [("against", name, which) for name in AGAINST for which in ("ours", "timm") if AGAINST[name][0] in names()]
    jobs += [("swap", name, "") for name in SWAPS if SWAPS[name][0] in names()]
    jobs = [job for job in jobs if job[1] in asked.only and job[0] in asked.kinds]
    context = mp.get_context("spawn")
    told, gates = context.Queue(), (context.Barrier(len(jobs)), context.Lock(), context.Semaphore(asked.beside))
    started = [context.Process(target=work, args=(*job, asked, gates, told)) for job in jobs]
    for process in started:
        process.start()
    rows: list[dict[str, Any]] = []
    for _ in jobs:
        rows += told.get()
        if "OUT" in os.environ:
            command = " ".join(["python benchmarks/gpu_backbones.py", *sys.argv[1:]])
            record = {**provenance(command), "gpu": None if asked.quick else torch.cuda.get_device_name(), "rows": rows}
            (Path(os.environ["OUT"]) / "gpu_backbones.json").write_text(json.dumps(record, indent=1, default=str))
    for process in started:
        process.join()
    if asked.warm:
        return 0
    print(shown(rows))
    if not all(row["alone"] for row in rows):
        print("some were timed while others still compiled")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
