"""Does any kernel touch memory that is not its own? compute-sanitizer's memcheck over small trainings, side by side.

    PYTHONPATH=src python benchmarks/gpu_memcheck.py                        all cases, about two minutes on 16 cores
    PYTHONPATH=src python benchmarks/gpu_memcheck.py --only vision,planted  groups whose name holds one of these words

Memory is not cached (PYTORCH_NO_CUDA_MEMORY_CACHING=1), so that every tensor has bounds of its own; groups named
"graph" keep the cache and record CUDA graphs, as trainings do. "planted" writes behind a tensor and must be found. Each
case is called often enough that calls are repeated from memory (kernels/replay.py). gpu_memcheck.json goes to $OUT or
benchmarks/results: by group, which cases ended and what the checker said.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl
import vision_layers
from torch import nn

import cumulant
from cumulant.bench.provenance import provenance
from cumulant.data import Source, TensorImages
from cumulant.studies.cab.backbones import fitted
from cumulant.studies.cab.study import trained
from cumulant.studies.cab.tasks import tasks_of
from cumulant.studies.loop import Schedule
from cumulant.train import train

RESULTS = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
TOOL = ["compute-sanitizer", "--tool", "memcheck", "--report-api-errors", "no", "--print-limit", "6"]
BATCH, SIDE = 32, 64
USES = ("cumulant3", "cluster16", "cumulant2", "lla", "mala", "combiner", "focused_linear", "flow", "aaren",
        "cosformer", "linear", "cumulant1", "cluster4", "cluster64")  # fmt: skip
GROUPS = {
    "planted": ["planted"],
    "vision plain": ["vision multihead cumulant3", "vision moh cumulant3", "vision multihead cluster4"],
    "vision regions": ["vision biformer cumulant3", "vision gda cumulant3", "vision biformer softmax"],
    "vision sparse": ["vision sparsifiner cumulant3", "vision sparsifiner softmax", "vision sqa cumulant3"],
    "vision dropped": ["vision ia_red2 cumulant3", "vision ia_red2 softmax", "vision gaam cumulant3"],
    "vision turned": ["vision complexformer cumulant3", "vision moh softmax", "vision lama softmax"],
    "calls": ["call 2 65 32", "call 3 65 32", "call 3 1000 64", "call 2 257 48"],
    "causal calls": ["causal 2 512 32", "causal 3 512 32", "causal 2 65 64"],
    "cluster calls": ["cluster 16 1024 64", "cluster 4 65 32", "cluster 16 257 32"],
    **{f"restore {name}": [f"restore CS {name}"] for name in USES},
    "restore cross": ["restore CC cumulant3"],
    "restore cross, clusters": ["restore CC cluster16"],
    **{f"graph {name}": [f"graph {name}"] for name in ("cumulant3", "cluster16", "cumulant2", "mala", "lla")},
    "graph vision": ["train multihead", "train moh", "train lama"],
}


@triton.jit
def beyond(x, n, N: tl.constexpr):  # type: ignore[no-untyped-def]
    i = tl.arange(0, N)
    tl.store(x + i, 1.0, mask=i < n)


def planted() -> None:
    beyond[(1,)](torch.zeros(1000, device="cuda"), 1024, N=1024)
    torch.cuda.synchronize()


def steps(model: nn.Module, *inputs: torch.Tensor, count: int = 5) -> None:
    """Forward and backward passes in bfloat16, then two answers, the last of a shorter batch."""
    for _ in range(count):
        model.zero_grad(set_to_none=True)
        with torch.autocast("cuda", torch.bfloat16):
            loss = model(*inputs).float().square().mean()
        loss.backward()
    model.eval()
    with torch.no_grad(), torch.autocast("cuda", torch.bfloat16):
        for many in (len(inputs[0]), len(inputs[0]) // 2 + 1):
            model(*(one[:many] for one in inputs))


def vision(layer: str, attention: str) -> None:
    options = {**vision_layers.options(layer, False), "depth": 1 if layer == "lama" else 2}
    model = cumulant.create_model(
        vision_layers.VIT, attention=attention, num_classes=100, img_size=SIDE, device="cuda", **options
    )
    steps(model, torch.randn(BATCH, 3, SIDE, SIDE, device="cuda"))


def restore(use: str, attention: str) -> None:
    task = tasks_of("full")["restore"]
    size, _ = fitted(task.build, task.size, {use: attention})
    steps(task.build(size, {use: attention}).cuda(), *(torch.randint(1, 200, (64, 64), device="cuda") for _ in "ab"))


def graph(attention: str) -> None:
    counts = {"train_source": 640, "train": 640, "test_source": 165, "test": 165}
    data = {key: torch.randint(1, 200, (count, 64), device="cuda").to(torch.uint8) for key, count in counts.items()}
    trained(tasks_of("full")["restore"], data, {"CS": attention}, 0, Schedule(8, 1e-3), "cuda")


def training(layer: str) -> None:
    recipe = vision_layers.recipe(layer, "softmax" if layer == "lama" else "cumulant3", 0, False)
    recipe = dataclasses.replace(recipe, epochs=1, batch_size=BATCH, warmup_epochs=0.5)
    images = torch.randint(0, 256, (8 * BATCH, 3, SIDE, SIDE), dtype=torch.uint8)
    part = TensorImages(images, torch.arange(len(images)) % 100, "train")
    with tempfile.TemporaryDirectory() as out:
        train(recipe, out, source=Source("random", "image", part, part, tuple(map(str, range(100)))))


def call(kind: str, what: int, length: int, width: int) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        for heads in (3, 2):
            for _ in range(5):
                shape = (2, heads, length, width)
                q, k, v = (torch.randn(shape, device="cuda", dtype=dtype, requires_grad=True) for _ in range(3))
                if kind == "cluster":
                    out = cumulant.cluster_attention(q, k, v, clusters=what)
                else:
                    out = cumulant.attention(q, k, v, order=what, is_causal=kind == "causal")
                out.float().square().sum().backward()


def run_group(name: str) -> None:
    """The cases of a group, one after the other, in this process."""
    work: dict[str, Any] = {"planted": planted, "vision": vision, "restore": restore, "graph": graph, "train": training}
    for case in GROUPS[name]:
        kind, *words = case.split()
        torch.manual_seed(0)
        work[kind](*words) if kind in work else call(kind, *map(int, words))
        torch.cuda.synchronize()
        print(f"ended: {case}", flush=True)


def check(names: list[str], at_once: int, limit: float) -> Iterator[dict[str, Any]]:
    """Every group in a process of its own under the checker, so many at a time; each as it ends."""
    folder, waiting = Path(tempfile.mkdtemp()), list(enumerate(names))
    running: dict[str, tuple[subprocess.Popen[bytes], Path, float]] = {}
    while waiting or running:
        while waiting and len(running) < at_once:
            number, name = waiting.pop(0)
            around = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
            around |= {} if name.startswith("graph") else {"PYTORCH_NO_CUDA_MEMORY_CACHING": "1"}
            place = folder / str(number)
            line = [*TOOL, "--log-file", f"{place}.log", sys.executable, __file__, "--group", name]
            with open(f"{place}.out", "wb") as out:
                process = subprocess.Popen(line, env=around, stdout=out, stderr=out, start_new_session=True)
            running[name] = process, place, time.monotonic()
        time.sleep(0.5)
        for name, (process, place, began) in list(running.items()):
            late = time.monotonic() - began > limit
            if process.poll() is None and not late:
                continue
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
            said = Path(f"{place}.out").read_text(errors="replace")
            log = Path(f"{place}.log").read_text(errors="replace") if Path(f"{place}.log").exists() else ""
            errors = re.findall(r"(?:Invalid|Misaligned) .*|ERROR SUMMARY: .*", log)
            del running[name]
            yield {"group": name, "ended": re.findall("ended: (.*)", said), "of": len(GROUPS[name]), "late": late,
                   "said": errors[:6] or said[-200:], "seconds": round(time.monotonic() - began, 1)}  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="groups whose name holds one of these words, with commas between")
    parser.add_argument("--processes", type=int, default=16)
    parser.add_argument("--limit", type=float, default=100, help="seconds of one group")
    parser.add_argument("--group", choices=list(GROUPS), help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.group:
        run_group(asked.group)
        return
    names = [name for name in GROUPS if any(word in name for word in asked.only.split(","))]
    about, rows = provenance("PYTHONPATH=src python benchmarks/gpu_memcheck.py"), []
    if torch.cuda.is_available():
        about["machine"]["gpu"] = torch.cuda.get_device_name()
    for row in check(names, asked.processes, asked.limit):
        rows.append(row)
        print(f"{row['group']:26} {len(row['ended'])} of {row['of']} cases; {row['said']}", flush=True)
        text = json.dumps({**about, "rows": rows}, indent=1) + "\n"
        (RESULTS / "gpu_memcheck.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
