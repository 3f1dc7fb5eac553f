"""Sizes and tuning of the kernels of cluster attention: what is compiled for, and in which tiles.

Shape legend: that of parts.py.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache, lru_cache
from itertools import pairwise
from math import inf, log2
from typing import Any, NamedTuple

import torch
import triton.language as tl
from torch import Tensor

from ..launch import Config, cdiv, dot_precision, multiprocessors, padded
from .parts import CLOSURE_NUMBER

CHUNK = 64  # clusters whose masses a program holds at once

# Kernel -> Config(tokens of a block, warps, stages of the loop over clusters, -, stages of the loop over near tokens),
# for 16-bit inputs and heads of up to 64, for 16-bit and up to 128, and for float32. "_pooled": of launches without a
# matrix for each cluster. "attend_pooled" and "query_gradients": in fourth place the clusters whose masses are held at
# once (0: a chunk). "choose_by_mean": tiles of a program. "matrix_gradients": blocks of queries, in fourth place the
# clusters of a program, in fifth the programs of a multiprocessor.
CONFIGS: dict[str, tuple[Config, Config, Config]] = {
    "statistics": (Config(64, 4, 2, registers=168), Config(64, 4, 2), Config(32, 4, 1)),
    "pool": (Config(128, 4, 1), Config(128, 4, 1), Config(128, 4, 1)),
    "choose": (Config(0, 8, 1), Config(0, 8, 1), Config(0, 8, 1)),
    "query_moments": (Config(0, 4, 1), Config(0, 8, 1), Config(0, 8, 1)),
    "choose_by_mean": (Config(4, 4, 1), Config(4, 8, 1), Config(4, 4, 1)),
    "attend": (Config(128, 8, 3, 0, 2, 128), Config(64, 8, 2, 0, 2), Config(32, 8, 1, 0, 1)),
    "attend_pooled": (Config(128, 8, 2, 32, 2, 128), Config(64, 8, 1, 0, 2), Config(32, 8, 1, 0, 1)),
    "query_gradients": (Config(64, 8, 3, 32, 2, 128), Config(64, 8, 1, 0, 1), Config(32, 8, 1, 0, 1)),
    "query_gradients_pooled": (Config(64, 8, 2, 32, 2, 128), Config(64, 8, 1, 0, 1), Config(32, 8, 1, 0, 1)),
    "vector_gradients": (Config(64, 4, 2), Config(64, 8, 1), Config(32, 8, 1)),
    "matrix_gradients": (Config(64, 4, 3, 4, 2), Config(64, 8, 2, 1, 2), Config(32, 8, 1, 1, 2)),
    "listed_gradients": (Config(0, 8, 2), Config(0, 8, 2), Config(0, 8, 1)),
    "key_gradients": (Config(64, 4, 3, registers=168), Config(64, 8, 1), Config(32, 8, 1)),
}


class Call(NamedTuple):
    """One call -> (B, H, Lq, E)."""

    query: Tensor  # (B, H, Lq, D)
    key: Tensor  # (B, H, Lk, D)
    value: Tensor  # (B, H, Lk, E)
    which: Tensor | None  # near clusters of each tile, (tiles, near), -1 for none; None: the heaviest
    starts: Sequence[int]  # cluster c holds the keys from starts[c] to starts[c + 1]: K + 1 numbers, the last Lk
    scale: float
    tile: int = 128  # queries in a row that share their near clusters
    near: int = 0
    response: int = -1  # clusters that answer with their covariance; -1: all, -2: all with the mean of theirs by size
    closure: str = "tanh"
    rank: str = "mass"  # as of `cluster_attention`


class Shape(NamedTuple):
    """Its sizes: B sequences of H heads, lengths, widths, clusters and near field; hashable, so plans are kept."""

    batch: int
    heads: int
    length_q: int
    length_k: int
    D: int
    E: int
    clusters: int
    longest: int  # tokens of the largest cluster
    equal: bool  # all clusters have as many
    tile: int  # queries that share their near clusters
    near: int
    response: int  # clusters of a tile that respond; -1: all, -2: all with one matrix
    closure: str
    rank: str  # near clusters are those of largest "mass", "error" or "mean" mass of a tile
    listed: bool  # near clusters are given, not chosen


class Plan(NamedTuple):
    """What a launch needs beside its tensors."""

    shape: Shape
    dtype: torch.dtype
    tiles: int
    BD: int
    BE: int
    KP: int
    CK: int

    @property
    def pairs(self) -> int:
        """Heads of all sequences."""
        return self.shape.batch * self.shape.heads

    def config(self, name: str) -> Config:
        kinds = CONFIGS[name]
        if self.response in (0, 3):
            kinds = CONFIGS.get(f"{name}_pooled", kinds)
        if self.dtype == torch.float32:
            return kinds[2]
        return kinds[0] if max(self.BD, self.BE) <= 64 else kinds[1]

    def resources(self, name: str, rows: int | None = None) -> dict[str, Any]:
        """Warps and registers of a launch: those of the table for 128 rows, fewer for less (16 rows a warp)."""
        config, rows = self.config(name), self.shape.tile if rows is None else rows
        # Loops that are worth a pipeline name its stages themselves; the others must not take shared memory for one.
        return {"num_warps": max(1, min(config.warps, rows // 16)), "num_stages": 1, "maxnreg": config.registers}

    @property
    def precision(self) -> str:
        """As of all kernels, but float32 without tf32 multiplies three times in tf32: to 22 digits, on tensor cores."""
        usual = dot_precision(self.dtype)
        return "tf32x3" if usual == "ieee" else usual

    @property
    def fused(self) -> bool:
        """Whether `attend` chooses the clusters of a tile itself: it holds the masses of all."""
        known = self.shape.listed or self.shape.rank == "mean"
        return self.KP == self.CK and not known and (self.shape.near > 0 or self.response == 2)

    def even(self, block: int) -> bool:
        """Whether near clusters are whole blocks of tokens."""
        return self.shape.equal and self.shape.longest % block == 0 and not self.shape.listed

    @property
    def response(self) -> int:
        """0: means only, 1: all clusters respond, 2: those listed, 3: all with one matrix."""
        return {0: 0, -1: 1, -2: 3}.get(self.shape.response, 2)

    def split(self, programs: int, device: torch.device, resident: int, cost: float) -> tuple[int, int]:
        """Tiles of a program, and programs for all tiles, where the rest of the grid has `programs`.

        As many as fill the multiprocessors, `resident` each, most evenly; one more is worth `cost` of the whole work,
        for the sums that it writes.
        """
        slots = resident * multiprocessors(device)
        most = max(1, min(cdiv(4 * slots, programs), self.tiles // 4))
        wanted = min(range(1, most + 1), key=lambda s: cdiv(programs * s, slots) / s + cost * s)
        span = cdiv(self.tiles, wanted)
        return span, cdiv(self.tiles, span)

    def constants(self, *names: str) -> dict[str, Any]:
        known = {
            "D": self.shape.D, "E": self.shape.E, "BD": self.BD, "BE": self.BE, "M": self.shape.tile,
            "CK": self.CK, "KP": self.KP, "CLOSURE": CLOSURE_NUMBER[self.shape.closure], "NEAR": self.shape.near,
            "RESPONSE": self.response, "SQUARE": tl.bfloat16 if self.dtype == torch.bfloat16 else tl.float32,
            "PRECISION": self.precision, "WHOLE": self.shape.length_q % self.shape.tile == 0,
        }  # fmt: skip
        return {name: known[name] for name in names}


def plan_for(call: Call) -> Plan:
    B, H, Lq, D = call.query.shape
    sizes, K = [b - a for a, b in pairwise(call.starts)], len(call.starts) - 1
    shape = Shape(
        B, H, Lq, call.key.shape[2], D, call.value.shape[-1], K, max(sizes), max(sizes) == min(sizes), call.tile,
        call.near, -1 if call.response >= K - call.near else call.response, call.closure, call.rank,
        call.which is not None,
    )  # fmt: skip
    return _plan_of(shape, call.query.dtype)


@lru_cache(256)
def _plan_of(shape: Shape, dtype: torch.dtype) -> Plan:
    # Products with 16 columns are miscompiled by the assembler that Triton 3.6 carries, so nothing is below 32.
    KP = padded(shape.clusters, 32)
    tiles = cdiv(shape.length_q, shape.tile)
    return Plan(shape, dtype, tiles, padded(shape.D, 32), padded(shape.E, 32), KP, min(KP, CHUNK))


@lru_cache(64)
def tables(starts: tuple[int, ...], KP: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """First token of each cluster, (KP + 1,), and log2 of their sizes, (KP,); those that only pad are empty. Kept."""
    first = [*starts, *[starts[-1]] * (KP + 1 - len(starts))]
    logs = [log2(b - a) if b > a else -inf for a, b in pairwise(first)]
    return (
        torch.tensor(first, dtype=torch.int32, device=device),
        torch.tensor(logs, dtype=torch.float32, device=device),
    )


@cache
def no_numbers(device: torch.device) -> Tensor:
    """What stands for a list that a kernel does not read."""
    return torch.zeros(1, dtype=torch.int32, device=device)
