"""Attention over a sequence split over 1 to 8 workers: time, bytes and collectives.

    python benchmarks/distributed_scaling.py             # tables, and benchmarks/results/distributed_scaling.json
    python benchmarks/distributed_scaling.py --quick     # small, to see that it runs
    python benchmarks/distributed_scaling.py --weak      # weak scaling and what is sent

One process a worker, one thread each, pinned to a core of its own where there are as many, gloo over the loopback.
Float32, B 1, 12 heads of 64. Time is that of the slowest worker, the median of several rounds after a barrier; beside
it the processor time of a worker, all threads of its process counted: the least of its rounds, the mean over workers,
since other work on the machine can only add to it. Nothing is timed before its result agrees with one process.
Collectives are counted by `CommDebugMode`, bytes by what it is that they are handed for others, the most of any worker.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode
from torch.utils._python_dispatch import TorchDispatchMode

import cumulant
from cumulant import zoo
from cumulant.bench.provenance import provenance
from cumulant.distributed import context_parallel

RESULTS = Path(__file__).parent / "results" / "distributed_scaling.json"
HEADS, WIDTH = 12, 64
WORLD = 8


def tokens(n: int, seed: int = 0) -> list[Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(1, HEADS, n, WIDTH, generator=generator) for _ in range(3)]


def cumulants(order: int, is_causal: bool = False) -> Callable[..., Tensor]:
    return lambda q, k, v: cumulant.attention(q, k, v, order=order, is_causal=is_causal)


def softmax(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return zoo.get("softmax")(q, k, v)


CALLS = {"cumulant2": cumulants(2), "cumulant3": cumulants(3), "cumulant3 causal": cumulants(3, True)}


class Bytes(TorchDispatchMode):
    """Bytes that collectives of this worker are handed for others."""

    def __init__(self, workers: int) -> None:
        super().__init__()
        self.workers, self.sent = workers, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = str(func)
        if "c10d" in name and "wait" not in name:
            x = args[0]
            size = x.numel() * x.element_size()
            if "all_to_all" in name:  # what goes to ourselves stays here
                rank = dist.get_rank() % self.workers
                size = (sum(args[2]) - args[2][rank]) * x.element_size()
            elif "all_gather" in name:
                size *= self.workers - 1
            elif "all_reduce" in name:
                size = 2 * size * (self.workers - 1) // self.workers  # round a ring
            self.sent += size
        return func(*args, **(kwargs or {}))


def step(call: Callable[..., Tensor], parts: list[Tensor], backward: bool) -> None:
    leaves = [x.requires_grad_(backward) for x in parts]
    out = call(*leaves)
    if backward:
        torch.autograd.grad(out, leaves, out.detach())


def both_times(
    call: Callable[..., Tensor], parts: list[Tensor], backward: bool, rounds: int, group: Any
) -> tuple[float, float]:
    """Of the slowest worker on the clock, median of the rounds; in processor time the least, mean over the workers."""
    clock, processor = [], []
    for i in range(rounds + 1):
        dist.barrier(group)
        start = time.perf_counter(), time.process_time()
        step(call, parts, backward)
        spent, used = time.perf_counter() - start[0], time.process_time() - start[1]
        slowest = torch.tensor([spent])
        dist.all_reduce(slowest, dist.ReduceOp.MAX, group=group)
        if i:
            clock.append(float(slowest))
            processor.append(used)
    least = torch.tensor([min(processor)])
    dist.all_reduce(least, dist.ReduceOp.SUM, group=group)
    return statistics.median(clock), float(least) / dist.get_world_size(group)


def seconds(*asked: Any) -> float:
    return both_times(*asked)[0]


def check(mesh: DeviceMesh, call: Callable[..., Tensor]) -> None:
    """Refuses to go on where the parts do not give the whole."""
    rank, W = mesh.get_local_rank("cp"), mesh.size(1)
    whole = tokens(64 * W)
    wanted = call(*whole)[..., 64 * rank : 64 * (rank + 1), :]
    with context_parallel(mesh):
        found = call(*(x[..., 64 * rank : 64 * (rank + 1), :] for x in whole))
    error = float((found - wanted).abs().max())
    if error > 1e-4:
        raise SystemExit(f"worker {rank}: {error:.2g} from one process")


def counted(mesh: DeviceMesh, call: Callable[..., Tensor], n: int) -> dict[str, Any]:
    """Collectives and bytes of one call with n tokens a worker, forward and with the backward pass."""
    found: dict[str, Any] = {}
    with context_parallel(mesh):
        call(*tokens(n))  # workers look at each other's kind of tokens once
        for name, backward in (("forward", False), ("both", True)):
            with CommDebugMode() as comm, Bytes(mesh.size(1)) as sent:
                step(call, tokens(n), backward)
            most = torch.tensor([sum(comm.get_comm_counts().values()), sent.sent])
            dist.all_reduce(most, dist.ReduceOp.MAX)
            found[name] = dict(zip(("collectives", "bytes"), most.tolist(), strict=True))
    return found


def measure(rank: int, quick: bool, weak: bool, path: Path) -> dict[str, Any]:
    """Writes what it found after each number of workers."""
    n, whole, rounds = (512, 4096, 1) if quick else (8192, 65536, 4)
    found: dict[str, Any] = {"weak": {}, "weak, processor": {}, "strong": {}, "ring": {}, "counted": {}}
    for W in (1, 2, 4, 8):
        mesh = init_device_mesh("cpu", (WORLD // W, W), mesh_dim_names=("dp", "cp"))
        first = mesh.get_group("cp") if rank < W else None
        for name, call in CALLS.items():
            check(mesh, call)
            with context_parallel(mesh):
                # All eight cores are busy whatever W is: what changes with W is the exchange alone.
                each = n // 8 if "causal" in name else n  # which runs in plain torch
                clock, processor = both_times(call, tokens(each), True, rounds, dist.group.WORLD)
            found["weak"][f"{name} n={each} W={W}"] = clock
            found["weak, processor"][f"{name} n={each} W={W}"] = processor
            if rank < W and "causal" not in name and not weak:  # only W cores are busy
                with context_parallel(mesh):
                    for backward in (False, True):
                        which = "both" if backward else "forward"
                        time_ = seconds(call, tokens(whole // W), backward, rounds if W > 1 else 2, first)
                        found["strong"][f"{name} {which} W={W}"] = time_
            dist.barrier()
        if W > 1:
            for name, call in (*CALLS.items(), ("softmax ring", softmax)):
                for tokens_each in (64, 256):
                    found["counted"][f"{name} W={W} n={tokens_each}"] = counted(mesh, call, tokens_each)
        if W == 4 and not weak:
            check(mesh, softmax)
            with context_parallel(mesh):
                for length in (2048,) if quick else (8192,):
                    found["ring"][f"L={length} forward W=4"] = seconds(softmax, tokens(length // W), False, 1, None)
        if rank == 0:
            command = "python benchmarks/distributed_scaling.py" + " --quick" * quick + " --weak" * weak
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps({**provenance(command), "seconds": found}, indent=1) + "\n")
    return found


def run(rank: int, path: str, options: Any, answers: Any) -> None:
    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) >= WORLD:
        os.sched_setaffinity(0, {cores[rank * len(cores) // WORLD]})
    dist.init_process_group("gloo", store=dist.FileStore(path, WORLD), rank=rank, world_size=WORLD)
    found = measure(rank, options.quick, options.weak, options.out)
    if rank == 0:
        answers.put(found)
    dist.barrier()
    dist.destroy_process_group()


@contextmanager
def store() -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield f"{folder}/store"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--weak", action="store_true", help="leave out strong scaling and the ring")
    parser.add_argument("--out", type=Path, default=RESULTS)
    options = parser.parse_args()
    context = torch.multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    with store() as path:
        several = [context.Process(target=run, args=(r, path, options, answers)) for r in range(WORLD)]
        for one in several:
            one.start()
        found = answers.get()
        for one in several:
            one.join()
    for table, rows in found.items():
        print(f"\n{table}")
        for name, value in rows.items():
            print(f"  {name:32} {value if isinstance(value, dict) else f'{1e3 * value:9.1f} ms'}")


if __name__ == "__main__":
    main()
