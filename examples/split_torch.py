"""A context that several processes share, in plain torch.

python examples/split_torch.py
torchrun --nproc-per-node 2 examples/split_torch.py       # the same losses, half of the tokens on each
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from text import STEPS, loss_of, model, started, windows

from cumulant.distributed import context_parallel


def main() -> None:
    mesh = started()
    net = model().to(mesh.device_type)
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    tokens = torch.stack(windows()).to(mesh.device_type)
    for step in range(STEPS):
        with context_parallel(mesh):
            loss = loss_of(net, tokens, mesh)
            loss.backward()
        # Each process has the gradient that its own tokens make; that of the mean loss is their sum.
        for parameter in net.parameters():
            dist.all_reduce(parameter.grad)
        optimizer.step()
        optimizer.zero_grad()
        dist.all_reduce(total := loss.detach())
        if dist.get_rank() == 0:
            print(f"step {step} loss {total:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
