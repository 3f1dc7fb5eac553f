"""The same with accelerate, which wraps the model in DDP.

python examples/split_accelerate.py
accelerate launch --cpu --num_processes 2 examples/split_accelerate.py       # or torchrun --nproc-per-node 2
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from accelerate import Accelerator
from text import STEPS, loss_of, model, started, windows

from cumulant.distributed import context_parallel


def main() -> None:
    accelerator = Accelerator(cpu=not torch.cuda.is_available())
    mesh = started()  # of the processes that accelerate has brought together
    net = model()
    optimizer = torch.optim.AdamW(net.parameters(), lr=1e-3)
    net, optimizer = accelerator.prepare(net, optimizer)  # no loader: all processes see the same texts
    tokens = torch.stack(windows()).to(accelerator.device)
    for step in range(STEPS):
        with context_parallel(mesh):
            loss = loss_of(net, tokens, mesh)
            # DDP takes the mean of gradients where their sum is wanted: without this they come out W times too small.
            accelerator.backward(loss * mesh.size())
        optimizer.step()
        optimizer.zero_grad()
        total = accelerator.reduce(loss.detach(), "sum")
        if accelerator.is_main_process:
            print(f"step {step} loss {total:.5f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
