"""Split attention on a GPU: correct, in our kernels, in CUDA graphs, and how long it takes beside the whole.

    PYTHONPATH=src python benchmarks/gpu_distributed.py            # table, and $OUT/gpu_distributed.json
    PYTHONPATH=src python benchmarks/gpu_distributed.py --check    # no times
    PYTHONPATH=src python benchmarks/gpu_distributed.py --tokens 256 --device cpu     # does it run

One worker over NCCL: exchanges and their gradients, outputs and gradients against float64, graphs of the full and the
causal form, times. Two workers share the GPU over gloo (NCCL wants a GPU for each): their parts, one longer than the
other, against the whole. No time is printed where something is off.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import cumulant
from cumulant.bench.provenance import provenance
from cumulant.distributed import context_parallel
from cumulant.distributed.exchange import Gather, Scatter, Shift, Sum, exchange
from cumulant.kernels.notice import SlowPathWarning

HEADS, WIDTH = 12, 64
FORMS = {
    "order 2": {"order": 2},
    "order 3": {"order": 3},
    "order 3, causal": {"order": 3, "is_causal": True},
    "order 2, masked": {"order": 2, "masked": True},
}


def tokens(length: int, device: str, dtype: torch.dtype) -> list[Tensor]:
    torch.manual_seed(length)
    return [torch.randn(1, HEADS, length, WIDTH).to(device, dtype) + m for m in (0, 1, -1)]


def gradients(inputs: list[Tensor], grad: Tensor, options: dict[str, Any], mask: Tensor | None) -> list[Tensor]:
    """Output and gradients of a call."""
    leaves = [x.detach().clone().requires_grad_() for x in inputs]
    out = cumulant.attention(*leaves, key_mask=mask, **options)
    out.backward(grad)
    return [out.detach(), *(x.grad for x in leaves)]


def apart(found: list[Tensor], exact: list[Tensor]) -> list[float]:
    return [float((x.double() - y).norm() / y.norm().clamp(min=1e-30)) for x, y in zip(found, exact, strict=True)]


def compared(mesh: Any, device: str, lengths: list[int], dtype: torch.dtype, name: str) -> dict[str, Any]:
    """Errors of out, dq, dk, dv of this worker's part, and those of plain torch on the whole, both against float64."""
    options = dict(FORMS[name])
    masked = options.pop("masked", False)
    rank, start = dist.get_rank(), sum(lengths[: dist.get_rank()])
    inputs = tokens(sum(lengths), device, dtype)
    mask = torch.arange(sum(lengths), device=device).unsqueeze(0) % 5 > 0 if masked else None
    grad = torch.randn(1, HEADS, sum(lengths), WIDTH, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    own = slice(start, start + lengths[rank])
    wide = [x.double() for x in inputs]
    exact = [x[:, :, own] for x in gradients(wide, grad.double(), {**options, "backend": "reference"}, mask)]
    plain = [x[:, :, own] for x in gradients(inputs, grad, {**options, "backend": "reference"}, mask)]
    with context_parallel(mesh), warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        cumulant.kernels.notice.forget()
        part = [x[:, :, own] for x in inputs]
        found = gradients(part, grad[:, :, own], options, None if mask is None else mask[:, own])
    slow = [str(one.message) for one in said if issubclass(one.category, SlowPathWarning)]
    ours, theirs = apart(found, exact), apart(plain, exact)
    least = {torch.float32: 3e-6, torch.bfloat16: 6e-3}[dtype]
    right = all(a <= max(2 * b, least) for a, b in zip(ours, theirs, strict=True))
    return {"ours": ours, "plain": theirs, "right": right, "kernels": not slow, "said": slow[:1]}


def clock(work: Callable[[], object], cuda: bool) -> float:
    """Milliseconds of a call, median of 20 after 5."""
    times = []
    for i in range(25):
        if cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        if cuda:
            torch.cuda.synchronize()
        if i >= 5:
            times.append(1e3 * (time.perf_counter() - start))
    return statistics.median(times)


def graphed(work: Callable[[], Tensor]) -> tuple[Callable[[], None], Tensor]:
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            work()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = work()
    return graph.replay, out


def one_worker(device: str, length: int, timed: bool, save: Callable[[dict[str, Any]], None]) -> None:
    cuda = device == "cuda"
    dist.init_process_group("nccl" if cuda else "gloo", store=dist.HashStore(), rank=0, world_size=1)
    mesh = init_device_mesh(device, (1,), mesh_dim_names=("cp",))
    with context_parallel(mesh) as workers:
        for kind in (Gather(workers), Sum(workers), Scatter(workers), Shift(workers, 1)):
            x = torch.randn(1, 7, device=device, requires_grad=True)
            (out,) = exchange(kind, x)
            out.sum().backward()
            off = float((out - (0 if isinstance(kind, Shift) else x)).detach().abs().max())
            save({"one worker, exchange": type(kind).__name__, "off": off})
    for dtype in (torch.float32, torch.bfloat16):
        for name in FORMS:
            found = compared(mesh, device, [min(length, 4096)], dtype, name)
            save({"one worker": name, "dtype": str(dtype), **found})
    for name in ("order 2", "order 3", "order 3, causal") if timed else ():
        options = FORMS[name]
        for L in (length // 4, length):
            inputs = tokens(L, device, torch.bfloat16)
            leaves = [x.requires_grad_() for x in inputs]
            grad = torch.randn_like(leaves[0])

            def forward(backend: str = "auto", options: Any = options, inputs: Any = inputs) -> Tensor:
                with torch.no_grad():
                    return cumulant.attention(*inputs, backend=backend, **options)

            def step(backend: str = "auto", options: Any = options, leaves: Any = leaves, grad: Any = grad) -> Any:
                out = cumulant.attention(*leaves, backend=backend, **options)
                return torch.autograd.grad(out, leaves, grad)

            row: dict[str, Any] = {"times of": name, "tokens": L}
            wanted = forward()
            for what, work in (("forward", forward), ("step", step)):
                row[f"whole, {what}"] = clock(work, cuda)
                with context_parallel(mesh):
                    row[f"split, {what}"] = clock(work, cuda)
                    if "causal" not in name:
                        row[f"split in plain torch, {what}"] = clock(lambda w=work: w("reference"), cuda)
            if cuda:
                replay, _ = graphed(forward)
                row["whole, forward, graph"] = clock(replay, cuda)
                try:
                    with context_parallel(mesh):
                        replay, out = graphed(forward)
                    out.fill_(float("nan"))
                    replay()
                    torch.cuda.synchronize()
                    row["graph off"] = float((out.double() - wanted.double()).abs().max())
                    row["split, forward, graph"] = clock(replay, cuda)
                except RuntimeError as error:
                    row["graph failed"] = str(error)[:300]
                    torch.cuda.synchronize()
            save(row)
    dist.destroy_process_group()


def two_workers(rank: int, path: str, device: str, length: int, answers: Any) -> None:
    torch.set_num_threads(4)
    dist.init_process_group("gloo", store=dist.FileStore(path, 2), rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("cp",))
    for lengths in ([length - length // 4, length // 4], [length, 0]):
        for dtype in (torch.float32, torch.bfloat16):
            for name in FORMS:
                found = compared(mesh, device, lengths, dtype, name)
                answers.put({"two workers": name, "lengths": lengths, "worker": rank, "dtype": str(dtype), **found})
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--check", action="store_true", help="no times")
    parser.add_argument("--tokens", type=int, default=65536)
    given = parser.parse_args()
    found: list[dict[str, Any]] = []
    origin = provenance("python benchmarks/gpu_distributed.py")
    to = Path(os.environ.get("OUT", ".")) / "gpu_distributed.json"

    def save(row: dict[str, Any]) -> None:
        found.append(row)
        print(json.dumps(row), flush=True)
        to.write_text(json.dumps({**origin, "rows": found}, indent=1) + "\n")

    with tempfile.TemporaryDirectory() as folder:
        context = mp.get_context("spawn")
        answers = context.SimpleQueue()
        arguments = (f"{folder}/store", given.device, min(given.tokens, 2048), answers)
        both = mp.start_processes(two_workers, arguments, 2, join=False)
        try:
            while not both.join(0.1):
                while not answers.empty():
                    save(answers.get())
        except Exception as error:
            save({"two workers failed": str(error)[-600:]})
        while not answers.empty():
            save(answers.get())
    one_worker(given.device, given.tokens, not given.check, save)
    wrong = [row for row in found if row.get("right") is False or "graph failed" in row or "two workers failed" in row]
    print(f"{len(found)} rows, {len(wrong)} wrong")
    for row in wrong:
        print("WRONG", json.dumps(row))


if __name__ == "__main__":
    main()
