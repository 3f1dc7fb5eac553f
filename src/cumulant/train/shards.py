"""A state as torch.distributed.checkpoint saves and loads it: every process writes and reads what is its own.

Files are safetensors. The first process writes state.safetensors, whose header names the parts of the others with their
checksums; it takes its place when every part is on the disk. Before that the old state is the one that counts.
"""

from __future__ import annotations

import json
import os
import uuid
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from safetensors import safe_open
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadPlan, LoadPlanner, SavePlan, SavePlanner
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from .state import CUT, parts_of, write_part, write_state

FLAT = {"flatten_state_dict": False, "flatten_sharded_tensors": False}


def save_shards(folder: Path, tensors: Mapping[str, Tensor], header: dict[str, str]) -> None:
    """Save what all processes hold; each tensor, or piece of one, is written by one of them."""
    with plainly():
        dcp.save(dict(tensors), storage_writer=Writer(folder, header), planner=DefaultSavePlanner(**FLAT))


def load_shards(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Fill these tensors, whole or cut in any way, from a state that any number of processes has written."""
    with plainly(), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(dict(tensors), storage_reader=Reader(path), planner=DefaultLoadPlanner(**FLAT))


@contextmanager
def plainly() -> Iterator[None]:
    """The first error of any process as it is: a full disk, say, is an OSError for everyone."""
    try:
        yield
    except dcp.CheckpointException as error:  # which is no Exception
        raise next(failure for failure, _ in error.failures.values()) from error


class Writer(StorageWriter):
    """Pieces of a state into files of `folder`; `header` belongs to the whole."""

    def __init__(self, folder: Path, header: dict[str, str]) -> None:
        self.folder, self.header, self.first = folder, header, False
        self.own: tuple[dict[str, Tensor], dict[str, Any]] = {}, {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self.first = is_coordinator

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        name = uuid.uuid4().hex[:8]  # parts of an older state are never written over
        return [replace(plan, storage_data=f"state-{name}-{rank}.safetensors") for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        tensors, cut = self.own
        for item in plan.items:
            found = planner.resolve_data(item)
            assert isinstance(found, Tensor)
            assert item.tensor_data is not None
            if found.shape != item.tensor_data.size:
                if not found.numel():
                    continue
                cut[item.index.fqn] = [list(item.tensor_data.chunk.offsets), list(item.tensor_data.size)]
            tensors[item.index.fqn] = found.detach().to("cpu", copy=True).contiguous()
        results = []
        if not self.first and tensors:
            digest = write_part(self.folder / plan.storage_data, tensors, cut)
            results = [WriteResult(MetadataIndex(plan.storage_data), 0, digest)]
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        parts = {one.index.fqn: one.storage_data for own in results for one in own}
        write_state(self.folder, *self.own, self.header, parts)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False


class Reader(StorageReader):
    """The pieces of the state whose first file is `path`."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.files: dict[MetadataIndex, Path] = {}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None: ...

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        found: dict[str, Any] = {}
        for file in parts_of(self.path):
            with safe_open(file, framework="pt") as content:
                cut = json.loads((content.metadata() or {}).get(CUT, "{}"))
                for name in content.keys():  # noqa: SIM118
                    piece = content.get_slice(name)
                    shape = torch.Size(piece.get_shape())
                    kind = TensorProperties(dtype=(piece[:0] if shape else content.get_tensor(name)).dtype)
                    offsets, size = map(torch.Size, cut.get(name, ([0] * len(shape), shape)))
                    whole = found.setdefault(name, TensorStorageMetadata(kind, size, []))
                    whole.chunks.append(ChunkStorageMetadata(offsets, shape))
                    self.files[MetadataIndex(name, offsets)] = file
        return Metadata(state_dict_metadata=found)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None: ...

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        wanted: dict[Path, list[Any]] = {}
        for item in plan.items:
            wanted.setdefault(self.files[item.storage_index], []).append(item)
        for file, items in wanted.items():
            with safe_open(file, framework="pt") as content:
                for item in items:
                    name, ends = item.storage_index.fqn, zip(item.storage_offsets, item.lengths, strict=True)
                    where = tuple(slice(start, start + length) for start, length in ends)
                    target = planner.resolve_tensor(item).detach()
                    target.copy_(content.get_slice(name)[where] if where else content.get_tensor(name))
                    planner.commit_tensor(item, target)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return False
