"""Split attention on a GPU with NCCL, one worker: exchanges and their gradients, attention, and CUDA graphs.

python benchmarks/gpu_distributed.py
"""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import cumulant
from cumulant.distributed import context_parallel
from cumulant.distributed.exchange import Gather, Scatter, Shift, Sum, exchange


def main() -> None:
    os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
    os.environ.setdefault("MASTER_PORT", "29533")
    dist.init_process_group("nccl", rank=0, world_size=1)
    mesh = init_device_mesh("cuda", (1,), mesh_dim_names=("cp",))
    q, k, v = (torch.randn(2, 4, 4096, 64, device="cuda") for _ in range(3))
    with context_parallel(mesh) as workers:
        for kind in (Gather(workers), Sum(workers), Scatter(workers), Shift(workers, 1)):
            x = torch.randn(1, 7, device="cuda", requires_grad=True)
            (out,) = exchange(kind, x)
            out.sum().backward()
            print(type(kind).__name__, tuple(out.shape), float((out.reshape(-1) - x.reshape(-1)).abs().max()))
        for is_causal in (False, True):
            leaves = [x.clone().requires_grad_() for x in (q, k, v)]
            out = cumulant.attention(*leaves, is_causal=is_causal)
            out.sum().backward()
            wanted = cumulant.attention(*(x.double() for x in (q, k, v)), is_causal=is_causal, backend="reference")
            print("causal" if is_causal else "full", "error", float((out - wanted).abs().max()))
            for _ in range(2):
                cumulant.attention(q, k, v, is_causal=is_causal)
            graph = torch.cuda.CUDAGraph()
            torch.cuda.synchronize()
            with torch.cuda.graph(graph):
                captured = cumulant.attention(q, k, v, is_causal=is_causal)
            graph.replay()
            torch.cuda.synchronize()
            print("  graph error", float((captured - wanted).abs().max()))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
