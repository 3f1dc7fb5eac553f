"""Sizes and tuning of the kernels of short clusters, and the tables of their slots. Shape legend: host.py."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from math import inf, log2
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..cluster.parts import CLOSURE_NUMBER
from ..launch import ROOM, Config, cdiv, dot_precision, padded, shared_memory

SLOTS = 64  # of a tile; a cluster has no more

# Kernel -> Config(queries of a tile, warps, stages of its loop), for 16-bit inputs and heads of up to 64, for 16-bit
# and up to 128, and for float32. "whole_gradients" are key_gradients that write dq too.
CONFIGS: dict[str, tuple[Config, Config, Config]] = {
    "attend": (Config(64, 4, 1, registers=128), Config(64, 4, 1), Config(16, 4, 1)),
    "query_gradients": (Config(64, 4, 2), Config(64, 4, 1), Config(16, 4, 1)),
    "key_gradients": (Config(64, 4, 2), Config(128, 8, 1), Config(16, 4, 1)),
    "whole_gradients": (Config(64, 4, 1), Config(64, 4, 1), Config(16, 4, 1)),
}
# Bytes of shared memory that `key_gradients` of heads of 65 to 128 takes, and its line for GPUs that have less.
TAKEN, SMALLER = 131_072, Config(64, 4, 1)


class Call(NamedTuple):
    """One call -> (B, H, Lq, E). Cost a query: Lk (D + E)."""

    query: Tensor  # (B, H, Lq, D)
    key: Tensor  # (B, H, Lk, D)
    value: Tensor  # (B, H, Lk, E)
    places: Sequence[int]  # keys of the clusters, each in `slots` of them, -1 in those that are empty
    slots: int  # a power of two up to 64
    scale: float
    prefix: int = 0  # the first keys, which are exact
    closure: str = "tanh"
    full: bool = False


class Plan(NamedTuple):
    """What a launch needs beside its tensors."""

    heads: int  # B H
    length_q: int
    D: int
    E: int
    tiles: int  # of slots
    slots: int  # of a cluster
    prefix: int
    closure: str
    full: bool
    ragged: bool  # some slot of a cluster is empty
    dtype: torch.dtype
    room: int = ROOM  # bytes of shared memory of a program

    @property
    def whole(self) -> bool:
        """Whether one kernel does the backward pass: all slots of a head are one tile, and its sums fit registers."""
        return self.tiles == 1 and max(self.widths) <= 64

    @property
    def clusters(self) -> int:
        return self.tiles * (SLOTS // self.slots)

    @property
    def widths(self) -> tuple[int, int]:
        # Products with 16 columns are miscompiled by the assembler that Triton 3.6 carries; 8 warps halve the columns.
        least = 64 if max(self.D, self.E) > 64 else 32
        return padded(self.D, least), padded(self.E, least)

    @property
    def square(self) -> torch.dtype:
        """What squares of queries and variances of keys are multiplied in: float16 has too small a range for them."""
        return torch.bfloat16 if self.dtype == torch.bfloat16 else torch.float32

    def config(self, name: str) -> Config:
        kinds = CONFIGS[name]
        if self.dtype == torch.float32:
            return kinds[2]
        if max(self.widths) <= 64:
            return kinds[0]
        return SMALLER if name == "key_gradients" and self.room < TAKEN else kinds[1]

    def queries(self, name: str) -> int:
        """Queries of a tile."""
        return min(self.config(name).block, padded(self.length_q, 32))

    def launch(self, name: str, prefix: bool = True) -> dict[str, Any]:
        """Constants and resources of a kernel that reads queries."""
        config, (BD, BE), usual = self.config(name), self.widths, dot_precision(self.dtype)
        return {
            "CLOSURE": CLOSURE_NUMBER[self.closure], "FULL": self.full, "RAGGED": self.ragged,
            "D": self.D, "E": self.E, "BD": BD, "BE": BE,
            "M": self.queries(name), "N": SLOTS, "MP": self.slots, "P": max(32, SLOTS // self.slots),
            "PP": padded(self.prefix, 32) if prefix and self.prefix else 0,
            "SQUARE": tl.bfloat16 if self.square == torch.bfloat16 else tl.float32, "STAGES": config.stages,
            "PRECISION": "tf32x3" if usual == "ieee" else usual,
            "num_warps": config.warps, "num_stages": config.stages, "maxnreg": config.registers,
        }  # fmt: skip


def plan_for(call: Call) -> Plan:
    B, H, Lq, D = call.query.shape
    return Plan(
        B * H, Lq, D, call.value.shape[-1], cdiv(len(call.places), SLOTS), call.slots, call.prefix, call.closure,
        call.full, -1 in call.places, call.query.dtype, shared_memory(call.query.device),
    )  # fmt: skip


@lru_cache(64)
def tables(places: tuple[int, ...], slots: int, tiles: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Token of each slot (tiles SLOTS,), -1 for none; log2 of the sizes of the clusters and 1 / size. Kept."""
    full = [*places, *[-1] * (tiles * SLOTS - len(places))]
    sizes = [sum(x >= 0 for x in full[c : c + slots]) for c in range(0, len(full), slots)]
    numbers = [[log2(n) if n else -inf for n in sizes], [1 / n if n else 0 for n in sizes]]
    return (
        torch.tensor(full, dtype=torch.int32, device=device),
        torch.tensor(numbers, dtype=torch.float32, device=device),
    )
