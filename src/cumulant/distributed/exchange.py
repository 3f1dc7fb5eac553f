"""Messages between the workers of one mesh dimension: gather, sum and shift of tensors, each one collective.

Shape legend: W workers, n bytes of a message; tensors of a message have any shapes, the same on every worker.

Every exchange is linear, so its gradient is the exchange turned round: a gather becomes a scatter with sums, a sum
stays a sum, a shift or a swap goes back. Each is one functional collective of torch.distributed, forward and backward.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from copy import copy
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from ..moments import Moments, added

# Up to so many workers all statistics are gathered: one collective, and sums in the same order everywhere. Beyond, they
# are reduced in two: a gather then moves W / 2 times the bytes.
GATHERED = 8
_c10d = torch.ops._c10d_functional
_known: dict[str, Workers] = {}


class Message(NamedTuple):
    """What lies in a message: shapes and dtypes of its tensors, in order."""

    shapes: tuple[torch.Size, ...]
    dtypes: tuple[torch.dtype, ...]

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> Message:
        return cls(tuple(x.shape for x in tensors), tuple(x.dtype for x in tensors))

    @property
    def _order(self) -> list[int]:
        """Wide numbers first, so that each lies where its dtype may."""
        return sorted(range(len(self.dtypes)), key=lambda i: -self.dtypes[i].itemsize)

    def pack(self, tensors: Sequence[Tensor]) -> Tensor:
        """As bytes (..., n); all tensors may have the same further leading dimensions."""
        lead = tensors[0].shape[: tensors[0].ndim - len(self.shapes[0])]
        parts = [tensors[i].contiguous().reshape(*lead, self.shapes[i].numel()).view(torch.uint8) for i in self._order]
        missing = self.size - sum(part.shape[-1] for part in parts)
        return torch.cat([*parts, parts[0].new_zeros(*lead, missing)], -1)

    @property
    def size(self) -> int:
        """Bytes: those of the tensors in whole words of 8, one at least."""
        content = sum(shape.numel() * dtype.itemsize for shape, dtype in zip(*self, strict=True))
        return max(8, content + -content % 8)

    def unpack(self, flat: Tensor) -> list[Tensor]:
        found: dict[int, Tensor] = {}
        at = 0
        for i in self._order:
            size = self.shapes[i].numel() * self.dtypes[i].itemsize
            part = flat[..., at : at + size].contiguous()
            found[i] = part.view(self.dtypes[i]).reshape(*flat.shape[:-1], *self.shapes[i])
            at += size
        return [found[i] for i in range(len(self.shapes))]


class Pending(NamedTuple):
    """A collective that was started: its bytes, (rows, n) once it is done, what lies in a row, and where it belongs."""

    flat: Tensor
    message: Message
    workers: Workers
    device: torch.device

    def rows(self) -> list[Tensor]:
        with self.workers.told():
            flat = _c10d.wait_tensor(self.flat).to(self.device)
        return self.message.unpack(flat.unflatten(0, (-1, self.message.size)))


class Gather(NamedTuple):
    """Tensors of every worker, (W, ...) each."""

    workers: Workers

    def start(self, tensors: Sequence[Tensor]) -> Pending:
        message = Message.of(tensors)
        return self.workers.everywhere(message.pack(tensors), message)

    def finish(self, pending: Pending) -> list[Tensor]:
        return pending.rows()

    @property
    def turned(self) -> Kind:
        return Scatter(self.workers)


class Scatter(NamedTuple):
    """Of tensors (W, ...) of every worker, the sum of those with our number."""

    workers: Workers

    def start(self, tensors: Sequence[Tensor]) -> Pending:
        message = Message.of([x[0] for x in tensors])
        return self.workers.swapped(message.pack(tensors), message)

    def finish(self, pending: Pending) -> list[Tensor]:
        return [x.sum(0) for x in pending.rows()]

    @property
    def turned(self) -> Kind:
        return Gather(self.workers)


class Sum(NamedTuple):
    """Sums over the workers, the same on all of them."""

    workers: Workers

    def start(self, tensors: Sequence[Tensor]) -> Pending:
        message = Message.of(tensors)
        if self.workers.size <= GATHERED:
            return self.workers.everywhere(message.pack(tensors), message)
        widest = max((x.dtype for x in tensors), key=lambda dtype: dtype.itemsize)
        message = message._replace(dtypes=(widest,) * len(tensors))
        return self.workers.reduced(message.pack([x.to(widest) for x in tensors]), message, widest)

    def finish(self, pending: Pending) -> list[Tensor]:
        return [x.sum(0) for x in pending.rows()]

    @property
    def turned(self) -> Kind:
        return self


class Shift(NamedTuple):
    """The tensors of the worker `by` places before us; zeros where there is none."""

    workers: Workers
    by: int

    def start(self, tensors: Sequence[Tensor]) -> Pending:
        message = Message.of(tensors)
        return self.workers.passed_on(message.pack(tensors), message, self.by)

    def finish(self, pending: Pending) -> list[Tensor]:
        rows = pending.rows()
        if rows[0].shape[0]:
            return [x[0] for x in rows]
        return [x.new_zeros(x.shape[1:]) for x in rows]

    @property
    def turned(self) -> Kind:
        return Shift(self.workers, -self.by)


class Swap(NamedTuple):
    """Of rows (n, w), the first `to[0]` to worker 0, the next `to[1]` to worker 1, ...; `of[r]` rows come from each."""

    workers: Workers
    to: tuple[int, ...]
    of: tuple[int, ...]

    def start(self, tensors: Sequence[Tensor]) -> Pending:
        message = Message.of([x[0] if len(x) else x.new_empty(x.shape[1:]) for x in tensors])
        return self.workers.sent(message.pack(tensors), message, self.to, self.of)

    def finish(self, pending: Pending) -> list[Tensor]:
        return pending.rows()

    @property
    def turned(self) -> Kind:
        return Swap(self.workers, self.of, self.to)


Kind = Gather | Scatter | Sum | Shift | Swap


class _Exchange(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: Kind, pending: Pending | None, *tensors: Tensor) -> tuple[Tensor, ...]:
        ctx.kind = kind
        found = kind.finish(kind.start(tensors) if pending is None else pending)
        return tuple(x.to(given.dtype) for x, given in zip(found, tensors, strict=True))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, None, *_Exchange.apply(ctx.kind.turned, None, *grads)


def exchange(kind: Kind, *tensors: Tensor, pending: Pending | None = None) -> tuple[Tensor, ...]:
    """`tensors` after an exchange; with `pending` one that was started before. Differentiable any number of times."""
    found: tuple[Tensor, ...] = _Exchange.apply(kind, pending, *tensors)
    return found


class Workers:
    """The workers along one dimension of a mesh, of which this process is number `rank`."""

    def __init__(self, group: dist.ProcessGroup, dim: str) -> None:
        self.dim, self.group = dim, group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        backends = str(dist.get_backend_config(group))
        self._nccl, on_cpu = "nccl" in backends, "cpu:gloo" in backends or not torch.cuda.is_available()
        self.device = torch.device(
            "cpu" if on_cpu else f"cuda:{torch.cuda.current_device()}"
        )  # of our own small messages
        self.halves = False
        self._agreed: set[tuple[Any, ...]] = set()

    @classmethod
    def of(cls, mesh: DeviceMesh, dim: str = "cp") -> Workers:
        """Those along `dim` of the mesh; the same object each time, so that what they agreed on is known."""
        if not isinstance(mesh, DeviceMesh):
            raise TypeError(f"mesh must be a torch.distributed DeviceMesh, got {type(mesh).__name__}")
        names = mesh.mesh_dim_names or ()
        if dim not in names:
            raise ValueError(
                f"mesh has no dimension {dim!r}, its dimensions are {names}: pass one of them as `dim`, or make the "
                f"mesh with init_device_mesh(..., mesh_dim_names=(..., {dim!r}))"
            )
        group = mesh.get_group(dim)
        known = _known.get(group.group_name)
        if (
            known is None or known.group is not group or known.dim != dim
        ):  # a group of that name may have been destroyed
            known = _known[group.group_name] = cls(group, dim)
        return known

    @contextmanager
    def told(self) -> Iterator[None]:
        """Failures of a collective, said in terms of who waited for whom."""
        try:
            yield
        except RuntimeError as error:
            raise RuntimeError(
                f"worker {self.rank} of {self.size} on mesh dimension {self.dim!r} did not get its message from the "
                "others: one of them has stopped, calls attention another number of times, or holds tokens of another "
                f"kind (heads, widths, dtype, order). The backend says: {error}"
            ) from error

    def everywhere(self, flat: Tensor, message: Message) -> Pending:
        """Starts sending bytes (n,) to everyone."""
        if self._by_host(flat):  # gloo gathers round a ring, W - 1 messages one after the other; these go at once
            return self.swapped(flat.expand(self.size, -1), message)
        with self.told():
            found = _c10d.all_gather_into_tensor(flat, self.size, self.group.group_name)
        return Pending(found, message, self, flat.device)

    def swapped(self, rows: Tensor, message: Message) -> Pending:
        """Starts sending row r of (W, n) to worker r."""
        sizes = [rows.shape[1]] * self.size
        return self._swap(rows.reshape(-1), sizes, sizes, message)

    def sent(self, rows: Tensor, message: Message, to: Sequence[int], of: Sequence[int]) -> Pending:
        """Starts sending rows (n, bytes), `to[r]` of them to worker r, and receiving `of[r]` from it."""
        size = message.size
        return self._swap(rows.reshape(-1), [n * size for n in of], [n * size for n in to], message)

    def passed_on(self, flat: Tensor, message: Message, by: int) -> Pending:
        """Starts sending bytes (n,) to the worker `by` places after us."""
        to, of = ([len(flat) * (r == self.rank + step) for r in range(self.size)] for step in (by, -by))
        return self._swap(flat if sum(to) else flat[:0], of, to, message)

    def turned(self, flat: Tensor, message: Message) -> Pending:
        """Starts sending bytes to the next worker round the ring; `message` is what comes from the one before."""
        to, of = (
            [n * (r == (self.rank + step) % self.size) for r in range(self.size)]
            for n, step in ((len(flat), 1), (message.size, -1))
        )
        return self._swap(flat, of, to, message)

    def reduced(self, flat: Tensor, message: Message, dtype: torch.dtype) -> Pending:
        given = flat.cpu() if self._by_host(flat) else flat
        with self.told():
            total = _c10d.all_reduce(given.view(dtype), "sum", self.group.group_name)
        return Pending(total.view(torch.uint8), message, self, flat.device)

    def _by_host(self, flat: Tensor) -> bool:
        """Whether a message lies in the memory of the host: gloo takes those of a GPU by way of it."""
        return not (self._nccl and flat.is_cuda)

    def _swap(self, flat: Tensor, of: list[int], to: list[int], message: Message) -> Pending:
        given = flat.cpu() if self._by_host(flat) else flat
        with self.told():
            return Pending(_c10d.all_to_all_single(given, of, to, self.group.group_name), message, self, flat.device)

    def add(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        """Sums over all workers, in one message."""
        return tensors if self.size == 1 else exchange(Sum(self), *tensors)

    def largest(self, x: Tensor) -> Tensor:
        """The largest over all workers, element by element; no gradient."""
        return self.rows(x)[0].amax(0)

    def gathered(self, *tensors: Tensor) -> tuple[Tensor, ...] | None:
        """Tensors of every worker, (W, ...) each, in one message; None where there are so many that sums are less."""
        if self.size > GATHERED:
            return None
        return tuple(x.unsqueeze(0) for x in tensors) if self.size == 1 else exchange(Gather(self), *tensors)

    def rows(self, *tensors: Tensor) -> list[Tensor]:
        """Tensors of every worker, (W, ...) each, in one message; no gradient."""
        given = [x.detach() for x in tensors]
        return [x.unsqueeze(0) for x in given] if self.size == 1 else Gather(self).finish(Gather(self).start(given))

    def merge(self, moments: Moments) -> Moments:
        """Moments of the tokens of all workers. One collective, or two where there are many workers."""
        if self.size == 1:
            return moments
        rows = self.gathered(*moments.kept())
        return moments.union(self.add) if rows is None else moments.filled(rows).union(added)

    def merging(self, moments: Moments) -> Callable[[], Moments]:
        """`merge`, started: what is returned waits for it. No gradient."""
        if self.size == 1 or self.size > GATHERED:
            found = self.merge(moments)
            return lambda: found
        pending = Gather(self).start(moments.kept())
        return lambda: moments.filled(pending.rows()).union(added)

    def adding(self, *tensors: Tensor) -> Callable[[], tuple[Tensor, ...]]:
        """`add`, started: what is returned waits for it. No gradient."""
        if self.size == 1:
            return lambda: tensors
        kind = Sum(self)
        pending = kind.start(tensors)
        return lambda: tuple(x.to(given.dtype) for x, given in zip(kind.finish(pending), tensors, strict=True))

    def in_halves(self) -> Workers:
        """The same workers, who send what they can in two halves: one is under way while the other is computed."""
        same = copy(self)
        same.halves = True
        return same

    def numbers(self, own: int) -> list[int]:
        """A whole number of every worker."""
        given = torch.tensor([own], device=self.device)
        (rows,) = self.rows(given)
        return [int(n) for n in rows.flatten().tolist()]

    def any(self, own: bool) -> bool:
        """Whether it is so on any worker."""
        return own if self.size == 1 else any(self.numbers(int(own)))

    def agree(self, kind: str, *facts: Any) -> None:
        """Raises, on every worker, unless all call with the same facts; looked at once for each kind of call.

        Facts are written as text of at most 240 bytes, so that all send the same number of bytes.
        """
        own = (kind, *facts)
        if self.size == 1 or own in self._agreed or torch.compiler.is_compiling():
            return
        text = " ".join(map(str, own)).encode()[:240]
        said = torch.tensor(list(text.ljust(240)), dtype=torch.uint8, device=self.device)
        (rows,) = self.rows(said)
        texts = [bytes(row.tolist()).decode(errors="replace").strip() for row in rows.cpu()]
        if len(set(texts)) > 1:
            listed = "; ".join(f"worker {r}: {text}" for r, text in enumerate(texts))
            raise ValueError(
                f"the parts of a sequence must be of one kind on all workers of {self.dim!r}, got {listed}"
            )
        self._agreed.add(own)
