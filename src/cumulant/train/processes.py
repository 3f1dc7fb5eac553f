"""One process or many: who this one is, the model spread over all of them, and tensors made whole again."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import TYPE_CHECKING, Any, TypeGuard, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor

Answer = TypeVar("Answer")
LOST = ("gloo", "Connection closed by peer", "Connection reset by peer", "Broken pipe")


@dataclass(frozen=True)
class Processes:
    """This process among `world` of them, and the device it works on."""

    device: torch.device
    rank: int = 0
    world: int = 1
    context: int = 1  # so many processes in a row share each sequence
    mesh: DeviceMesh | None = None  # of data x context

    @property
    def first(self) -> bool:
        """Whether this process writes the files."""
        return self.rank == 0

    @property
    def data_rank(self) -> int:
        """Number of this process's share of a batch, of `data_world`."""
        return self.rank // self.context

    @property
    def data_world(self) -> int:
        return self.world // self.context

    def sharing(self, context: int) -> Processes:
        """These processes with so many in a row for each sequence."""
        if self.world % context:
            raise ValueError(
                f"context_parallel must divide the number of processes, got context_parallel={context}, "
                f"{self.world} process{'es' if self.world > 1 else ''} (start more with torchrun --nproc-per-node)"
            )
        if context == 1:
            return self
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh(self.device.type, (self.world // context, context), mesh_dim_names=("dp", "cp"))
        return replace(self, context=context, mesh=mesh)

    def split(self, tokens: int | None = None) -> AbstractContextManager[Any]:
        """While this is held, attention sees the tokens of all processes that share a sequence; `tokens`: its length,
        where it is cut before the model sees it."""
        if self.mesh is None:
            return nullcontext()
        from ..distributed import context_parallel

        ends = [(tokens or 0) * r // self.context for r in range(self.context + 1)]
        lengths = None if tokens is None else [b - a for a, b in pairwise(ends)]
        return context_parallel(self.mesh, lengths=lengths)

    def sum(self, tensor: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        if self.world > 1:
            dist.all_reduce(tensor)
        return tensor

    def wait(self) -> None:
        """Until every process is here."""
        if self.world > 1:
            dist.barrier()

    def lead(self, work: Callable[[], Answer]) -> Answer | None:
        """Let the first process do the work, whose answer it gets, while the others wait; its error is everyone's."""
        if self.world == 1:
            return work()
        answer: Answer | None = None
        told: list[Exception | None] = [None]
        if self.first:
            try:
                answer = work()
            except Exception as error:
                told = [error]
        dist.broadcast_object_list(told, src=0, device=self.device if self.device.type == "cuda" else None)
        if told[0] is not None:
            raise told[0]
        return answer

    def spread(self, model: nn.Module, how: str) -> nn.Module:
        """The module to call in training: the model itself, DDP around it, or the model cut into FSDP2 shards."""
        if self.world == 1:
            return model
        if how == "ddp":
            devices = [self.device] if self.device.type == "cuda" else None
            return nn.parallel.DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh(self.device.type, (self.world,))
        blocks = [
            block for name, module in model.named_modules() if name.split(".")[-1] == "blocks"
            for block in module.children()
        ]  # fmt: skip
        # Resharding after every forward, also of the root: an evaluation must not leave gathered weights behind that
        # the next one would take for the current ones.
        for module in (*blocks, model):
            fully_shard(module, mesh=mesh, reshard_after_forward=True)
        return model

    def without_exchange(self, core: nn.Module, quiet: bool) -> AbstractContextManager[Any]:
        """While `quiet`, gradients are only added up here: all parts of a batch but the last need no exchange."""
        if isinstance(core, nn.parallel.DistributedDataParallel):
            return core.no_sync() if quiet else nullcontext()
        if self.world > 1:
            core.set_requires_gradient_sync(not quiet)  # type: ignore[operator]
        return nullcontext()


class Agreement:
    """What any process says, known to all one question later: the answer travels while they work on."""

    def __init__(self) -> None:
        self.group = dist.new_group(backend="gloo")  # numbers on the host, whatever the device
        self.waiting: tuple[Tensor, Any] | None = None

    def any(self, yes: bool) -> bool:
        """Whether some process said yes at the last question. All ask equally often."""
        last, said = self.waiting, torch.tensor(int(yes))
        self.waiting = said, dist.all_reduce(said, group=self.group, async_op=True)
        if last is None:
            return False
        last[1].wait()
        return bool(last[0])


def chosen_device(device: torch.device | str | None = None) -> torch.device:
    """The device of that name, by default a GPU where there is one; an error that says so where it is not there."""
    if device is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        chosen = torch.device(device)
    except RuntimeError as error:
        raise ValueError(f"device must be cpu or cuda, got {str(device)!r}") from error
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        there = f"{torch.cuda.device_count()} of them" if torch.cuda.is_available() else "none"
        raise ValueError(f"device {str(device)!r} needs a GPU that torch {torch.__version__} can use; it finds {there}")
    return chosen


def join(backend: str) -> None:
    """Meet the other processes that torchrun started.

    Its agent may keep one store over all restarts: addresses that processes before these left there are not looked at.
    """
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    if attempt == "0":
        dist.init_process_group(backend)
        return
    store, rank, world = next(dist.rendezvous("env://"))
    apart = dist.PrefixStore(f"attempt {attempt} of {world}", store)
    dist.init_process_group(backend, store=apart, rank=rank, world_size=world)


@contextmanager
def telling_of_lost_processes() -> Iterator[None]:
    """What a collective says when another process is gone, or did not come in time, with what to do."""
    try:
        yield
    except RuntimeError as error:
        said = str(error)
        if not isinstance(error, dist.DistError) and not any(word in said for word in LOST):
            raise
        raise ConnectionError(
            f"another process of this run is gone or did not answer in time ({said.splitlines()[0][:200]}): it was "
            "killed, or its own message says why. What was saved before is whole: give the same command again to go on "
            "from there (torchrun --max-restarts 3 does so by itself)"
        ) from error


@contextmanager
def processes(device: torch.device | str | None = None) -> Iterator[Processes]:
    """The processes that torchrun started, joined for as long as this is held; alone without torchrun."""
    chosen = chosen_device(device)
    world = int(os.environ.get("WORLD_SIZE", "1"))
    if world == 1:
        yield Processes(chosen)
        return
    if chosen.type == "cuda":
        chosen = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
        torch.cuda.set_device(chosen)
    ours = not dist.is_initialized()
    if ours:
        join("nccl" if chosen.type == "cuda" else "gloo")
    try:
        with telling_of_lost_processes():
            yield Processes(chosen, dist.get_rank(), dist.get_world_size())
    finally:
        if ours:
            gc.collect()  # a model in DDP, part of a cycle, would keep the group's threads until the interpreter ends
            dist.destroy_process_group()


def cut(tensor: Tensor) -> TypeGuard[DTensor]:
    """Whether this is a shard. Where there is one, its module is imported; to import it for nothing takes a second."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local(tensor: Tensor) -> Tensor:
    """The part of a tensor that is here; it shares memory with it."""
    return tensor.to_local() if cut(tensor) else tensor


def whole(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor on the CPU. Every process must ask at the same time."""
    full = tensor.full_tensor() if cut(tensor) else tensor
    return full.detach().to("cpu", copy=True).contiguous()
