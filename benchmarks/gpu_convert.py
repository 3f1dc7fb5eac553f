"""ViT-B/16 with softmax (SDPA) and converted: images a second, peak memory and share of time in attention, by size.

    PYTHONPATH=src python benchmarks/gpu_convert.py              224 to 2,048 pixels, about 2 minutes on an H200
    PYTHONPATH=src python benchmarks/gpu_convert.py --sizes --compile    2,048 pixels with torch.compile, block by block
    PYTHONPATH=src python benchmarks/gpu_convert.py --quick      a tiny model on any machine, in seconds

timm's ViT with random weights (ours where timm is not installed), bf16 weights and activations, about 65,000 tokens a
batch, and one image of 2,048 pixels alone. "graph" is the forward pass as a CUDA graph, without the host; "step" is
forward, backward and fused AdamW. Medians of CUDA events; peak memory counts weights and activations.
"attention" is the share of the time that goes when every attention layer keeps its projections and mixes nothing;
below 0 for a folded layer, which is cheaper than its own projections. A variant is timed only if its error against
float32 (plain torch) is at most 1.5 times the larger of bf16 softmax's and bf16 plain-torch's own. JSON goes to
benchmarks/results/convert-gpu.json (with --compile, convert-gpu-compile.json), and to a file of the same name in $OUT
where OUT is set, after each size.
"""

from __future__ import annotations

import argparse
import copy
import gc
import json
import os
import statistics
import time
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cumulant.bench.provenance import provenance
from cumulant.conversion import convert

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
DTYPE = torch.bfloat16
BATCH = {224: 256, 512: 64, 1024: 16, 2048: 4}
STREAM: torch.cuda.Stream | None = None  # on which graphs are recorded
GOAL = {"cumulant2": 4.0, "cumulant2, folded": 5.0, "cumulant3": 4.0}


def base(px: int, quick: bool, own: bool = False) -> nn.Module:
    """The softmax model in float32, kept on the CPU so that it does not count as memory."""
    sizes = {"embed_dim": 64, "depth": 2, "num_heads": 2} if quick else {"embed_dim": 768, "depth": 12, "num_heads": 12}
    torch.manual_seed(0)
    try:
        if own:
            raise ImportError
        from timm.models.vision_transformer import VisionTransformer

        model: nn.Module = VisionTransformer(img_size=px, patch_size=16, num_classes=1000, **sizes)
    except (ImportError, RuntimeError):
        from cumulant.models.vit import VisionTransformer as Own

        model = Own(img_size=px, patch_size=16, num_classes=1000, **sizes)
    return model.eval()


def variant(model: nn.Module, name: str, image: Tensor) -> nn.Module:
    """The model on the device in the image's dtype with: softmax; cumulant2 or cumulant3; the same ", folded" where
    the library folds; the same by ", plain torch"."""
    model, attention = copy.deepcopy(model).to(image), name.split(",")[0]
    if attention == "softmax":
        return model
    options = {"backend": "reference"} if name.endswith("plain torch") else None
    convert(model, attention, options=options, example=image)
    for module in model.modules():
        if hasattr(module, "fold"):
            module.fold = name.endswith("folded")
    return model


def folds(model: nn.Module, px: int) -> bool:
    from cumulant.nn.fold import pays

    width = model.blocks[0].attn.qkv.in_features
    return pays((px // 16) ** 2 + 1, width, model.blocks[0].attn.num_heads, DEVICE)


def without_mixing(model: nn.Module) -> nn.Module:
    """The same model whose attention layers project and mix nothing: the value of each token is its output."""
    model = copy.deepcopy(model)
    for block in model.blocks:
        attn = block.attn

        def forward(x: Tensor, *_: Any, attn: Any = attn, **__: Any) -> Tensor:
            return attn.proj(F.linear(x, attn.qkv.weight, attn.qkv.bias)[..., 2 * x.shape[-1] :])

        attn.forward = forward
    return model


def milliseconds(f: Callable[[], Any], budget: float = 0.5) -> float:
    """Median time of f, after warming up, over up to 30 calls within about `budget` seconds (at least 5)."""
    for _ in range(2):
        f()
    if DEVICE == "cpu":
        times = []
        for _ in range(3):
            start = time.perf_counter()
            f()
            times.append(1e3 * (time.perf_counter() - start))
        return statistics.median(times)
    torch.cuda.synchronize()
    start = time.perf_counter()
    f()
    torch.cuda.synchronize()
    count = min(30, max(5, int(budget / (time.perf_counter() - start))))
    events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]
    for event in events[:-1]:
        event.record()
        f()
    events[-1].record()
    torch.cuda.synchronize()
    return statistics.median(a.elapsed_time(b) for a, b in pairwise(events))


def recorded(f: Callable[[], Any]) -> Callable[[], None]:
    """f as a CUDA graph: its kernels without the host."""
    global STREAM
    stream = STREAM = STREAM or torch.cuda.Stream()  # one for all: cuBLAS keeps 32 MiB for each stream that it has seen
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        f()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        f()
    return graph.replay


def peak(f: Callable[[], Any]) -> float | None:
    """MiB allocated at most during f, weights included."""
    if DEVICE == "cpu":
        return None
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    f()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() / 2**20


def timed(
    model: nn.Module, images: Tensor, *, memory: bool = True, compiled: bool = False, training: bool = True
) -> dict[str, Any]:
    """Forward pass, eager and as a CUDA graph, and training step: milliseconds and peak MiB."""
    if compiled:
        for block in model.blocks:
            block.compile(dynamic=False)
    row: dict[str, Any] = {}

    def forward() -> Any:
        with torch.no_grad():
            return model(images)

    row["forward_ms"] = milliseconds(forward)
    if memory:
        row["forward_mib"] = peak(forward)
    if DEVICE == "cuda":
        row["graph_ms"] = milliseconds(recorded(forward))
        clean()
    if not training:
        return row
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6, fused=True)
    labels = torch.zeros(len(images), dtype=torch.long, device=DEVICE)

    def step() -> None:
        F.cross_entropy(model(images).float(), labels).backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    row["step_ms"] = milliseconds(step, 0.8)
    if memory:
        row["step_mib"] = peak(step)
    return row


class Gate:
    """Errors of bf16 models of one size against float32 in plain torch, on one image."""

    def __init__(self, exact: nn.Module, image: Tensor) -> None:
        self.exact, self.image = exact, image
        self.known: dict[str, tuple[Tensor, float]] = {}
        self.floor = self._reference("softmax")[1]

    def _reference(self, attention: str) -> tuple[Tensor, float]:
        """What the float32 model gives, and the error of the same computation in bf16."""
        if attention not in self.known:
            model = variant(self.exact, attention + ", plain torch" * (attention != "softmax"), self.image.float())
            with torch.no_grad():
                wanted = model.forward_features(self.image.float()).double().cpu()  # not in what is measured
                found = model.to(self.image.dtype).forward_features(self.image).double().cpu()
            self.known[attention] = wanted, float((found - wanted).norm() / wanted.norm())
        return self.known[attention]

    def __call__(self, name: str, model: nn.Module) -> dict[str, float]:
        """The error of this variant and the most that it may be; an exit if it is more."""
        wanted, plain = self._reference(name.split(",")[0])
        with torch.no_grad():
            found = model.forward_features(self.image).double().cpu()
        here, allowed = float((found - wanted).norm() / wanted.norm()), 1.5 * max(plain, self.floor)
        if not here <= allowed:
            raise SystemExit(f"{name}: relative error {here:.1e}, allowed {allowed:.1e}: no speed is printed")
        return {"error": here, "allowed": allowed}


def clean() -> None:
    """Nothing of an earlier model is left in memory."""
    gc.collect()
    if DEVICE == "cuda":
        torch._C._cuda_clearCublasWorkspaces()
        torch.cuda.empty_cache()


def measure(px: int, batch: int, options: argparse.Namespace, compiled: bool) -> list[dict[str, Any]]:
    exact = base(px, options.quick, options.own)
    images = torch.randn(batch, 3, px, px, device=DEVICE).to(DTYPE)
    gate = Gate(exact, images[:1])
    how = {"compiled": compiled, "training": not options.no_step}
    bare = timed(without_mixing(exact).to(images), images, memory=False, **how)
    rows: list[dict[str, Any]] = []
    for name in ("softmax", "cumulant2", "cumulant2, folded", "cumulant3"):
        if name.endswith("folded") and not (folds(exact, px) or options.quick):
            print(f"{px:5d} px: at this size the library does not fold the second order", flush=True)
            continue
        model = variant(exact, name, images[:1])
        row = {"px": px, "batch": batch, "tokens": (px // 16) ** 2 + 1, "attention": name, "compile": compiled}
        row |= gate(name, model)
        clean()  # models of the gate hold themselves in a cycle, and must not count
        row |= timed(model, images, **how)
        del model
        clean()
        rows.append(row)
        for what in ("forward", "graph", "step"):
            if f"{what}_ms" in row:
                row[f"{what}_images_a_second"] = 1e3 * batch / row[f"{what}_ms"]
                row[f"{what}_attention"] = 1 - bare[f"{what}_ms"] / row[f"{what}_ms"]
                row[f"{what}_speedup"] = rows[0][f"{what}_ms"] / row[f"{what}_ms"]
            if row.get(f"{what}_mib"):
                row[f"{what}_memory"] = row[f"{what}_mib"] / rows[0][f"{what}_mib"]
        show(row)
    return rows


def show(row: dict[str, Any]) -> None:
    parts = []
    for what in ("forward", "graph", "step"):
        if f"{what}_ms" not in row:
            continue
        memory = f" {row[f'{what}_mib']:.0f} MiB (x {row[f'{what}_memory']:.3f})" if f"{what}_memory" in row else ""
        parts.append(
            f"{what} {row[f'{what}_images_a_second']:8.1f} im/s (x {row[f'{what}_speedup']:.2f}){memory} "
            f"attention {row[f'{what}_attention']:5.1%}"
        )
    how = " compiled" if row["compile"] else ""
    print(f"{row['px']:5d} px B {row['batch']:3d} {row['attention'] + how:27s} " + " | ".join(parts), flush=True)


def goals(rows: list[dict[str, Any]]) -> None:
    largest = max(row["px"] for row in rows)
    for row in rows:
        if row["attention"] == "softmax":
            continue
        said = [f"{what} memory x {row[f'{what}_memory']:.4f}" for what in ("forward", "step")
                if row.get(f"{what}_memory", 0) > 1]  # fmt: skip
        if row["px"] == largest:
            goal = GOAL[row["attention"]]
            if row["forward_speedup"] < goal:
                said.append(f"forward x {row['forward_speedup']:.2f}, goal {goal:g}")
            if row["forward_attention"] >= 0.15:
                said.append(f"attention {row['forward_attention']:.1%} of the time, goal below 15 %")
        verdict = "; ".join(said) or "all goals met"
        how = ", compiled" if row["compile"] else ""
        print(f"{row['px']} px, batch {row['batch']}, {row['attention']}{how}: {verdict}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--sizes", type=int, nargs="*", default=list(BATCH))
    parser.add_argument("--no-step", action="store_true", help="leave the training step out")
    parser.add_argument("--own", action="store_true", help="this library's ViT in place of timm's")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--compiled-sizes", type=int, nargs="*", default=[2048])
    options = parser.parse_args()
    cases = [(px, BATCH.get(px, 1), False) for px in options.sizes]
    cases += [(px, 1, False) for px in options.sizes if px == 2048]
    if options.compile:
        cases += [(px, BATCH.get(px, 1), True) for px in options.compiled_sizes]
    if options.quick:
        cases = [(32, 2, False), (64, 1, False)] + [(64, 1, True)] * options.compile
    command = "python benchmarks/gpu_convert.py" + " --sizes" * (not options.sizes) + " --compile" * options.compile
    device = torch.cuda.get_device_name() if DEVICE == "cuda" else "cpu"
    result: dict[str, Any] = {**provenance(command + " --no-step" * options.no_step), "device": device, "rows": []}
    name = "convert-gpu-compile.json" if options.compile else "convert-gpu.json"
    began = time.perf_counter()
    for px, batch, compiled in cases:
        result["rows"] += measure(px, batch, options, compiled)
        result["seconds"] = time.perf_counter() - began
        text = json.dumps(result, indent=1)
        if not options.quick:
            Path("benchmarks/results", name).write_text(text)
        if "OUT" in os.environ:
            Path(os.environ["OUT"], name).write_text(text)
    goals(result["rows"])
    print(f"{result['seconds']:.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
