"""Sizes and tuning of the kernels of cluster attention: what is compiled for, and in which tiles.

Shape legend: that of parts.py.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from itertools import pairwise
from typing import Any, NamedTuple, TypeVar, cast

import torch
import triton.language as tl
from torch import Tensor

from ..launch import Config, cdiv, dot_precision, multiprocessors, padded, shared_memory
from .bounds import padding, tables
from .parts import CLOSURE_NUMBER

T = TypeVar("T")
CHUNK = 64  # clusters whose masses a program holds at once
THIRD_STAGE = 115_000  # bytes of shared memory that programs take with three stages of near tokens

# Kernel -> Config(tokens of a block, warps, stages of the loop over clusters, -, stages of the loop over near tokens),
# for 16-bit inputs and heads of up to 64, for 16-bit and up to 128, and for float32. "_pooled": of launches without a
# matrix for each cluster. "attend_pooled" and "query_gradients": in fourth place the clusters whose masses are held at
# once (0: a chunk). "choose_by_...": tiles of a program. "matrix_gradients": blocks of queries, in fourth place the
# clusters of a program, in fifth the programs of a multiprocessor.
CONFIGS: dict[str, tuple[Config, Config, Config]] = {
    "statistics": (Config(64, 4, 3, registers=128), Config(64, 4, 2), Config(32, 4, 1)),
    "points": (Config(0, 4, 1), Config(0, 4, 1), Config(0, 4, 1)),
    "pool": (Config(128, 4, 1), Config(128, 4, 1), Config(128, 4, 1)),
    "choose": (Config(0, 8, 1), Config(0, 4, 1), Config(0, 8, 1)),
    "query_moments": (Config(0, 2, 1), Config(0, 8, 1), Config(0, 8, 1)),
    "choose_by_mean": (Config(4, 4, 1), Config(4, 8, 1), Config(4, 4, 1)),
    "choose_alone": (Config(1, 4, 1), Config(1, 4, 1), Config(1, 4, 1)),
    "choose_by_products": (Config(16, 4, 1), Config(16, 4, 1), Config(16, 4, 1)),
    "attend": (Config(128, 8, 3, 0, 2, 128), Config(64, 8, 2, 0, 2), Config(32, 8, 1, 0, 1)),
    "attend_pooled": (Config(128, 8, 2, 32, 3, 128), Config(128, 8, 2, 32, 2), Config(32, 8, 1, 0, 1)),
    "query_gradients": (Config(64, 8, 3, 32, 2, 128), Config(64, 8, 1, 0, 1), Config(32, 8, 1, 0, 1)),
    "query_gradients_pooled": (Config(64, 8, 2, 32, 3, 128), Config(64, 8, 1, 32, 2), Config(32, 8, 1, 0, 1)),
    "vector_gradients": (Config(64, 4, 2), Config(64, 8, 1), Config(32, 8, 1)),
    "matrix_gradients": (Config(64, 4, 3, 4, 2), Config(64, 8, 2, 1, 2), Config(32, 8, 1, 1, 2)),
    "listed_gradients": (Config(0, 8, 2), Config(0, 8, 2), Config(0, 8, 1)),
    "key_terms": (Config(64, 4, 1), Config(64, 8, 1), Config(64, 4, 1)),
    "key_gradients": (Config(64, 4, 3, registers=168), Config(64, 4, 2), Config(32, 8, 1)),
    # Those of kernels/past; fifth: stages of the loop over the window. "_pooled": in third place stages of the loop
    # over clusters, in fourth whether what the loop over tokens reads is asked for at the start, where heads have 128
    # bytes. "past_vector_gradients": rows at once (0: a tile), in fourth place clusters at once, in fifth the programs
    # of a multiprocessor.
    "past_attend": (Config(64, 8, 3, 0, 2, 128), Config(64, 8, 2, 0, 2), Config(32, 8, 1, 0, 1)),
    "past_attend_pooled": (Config(64, 8, 2, 1, 3, 128), Config(64, 8, 1, 0, 2), Config(32, 8, 1, 0, 1)),
    "past_query_gradients_pooled": (Config(32, 8, 2, 1, 3, 128), Config(64, 8, 1, 0, 1), Config(32, 8, 1, 0, 1)),
    "past_query_gradients": (Config(64, 8, 3, 0, 2, 128), Config(64, 8, 1, 0, 1), Config(32, 8, 1, 0, 1)),
    "past_vector_gradients": (Config(0, 4, 2, 32, 2), Config(0, 8, 1, 32, 2), Config(0, 8, 1, 32, 2)),
    "past_vector_gradients_with_pools": (Config(64, 8, 2, 64, 6, 128), Config(0, 8, 1, 32, 2), Config(0, 8, 1, 32, 2)),
    "past_matrix_gradients": (Config(64, 4, 3, 4), Config(64, 8, 2, 1), Config(32, 8, 1, 1)),
    "past_pool_gradients": (Config(64, 4, 3), Config(64, 8, 2), Config(32, 8, 1)),
    "past_key_gradients": (Config(64, 4, 2, registers=168), Config(64, 4, 2), Config(32, 8, 1)),
    "past_key_gradients_pooled": (Config(64, 4, 2, 1, registers=168), Config(64, 4, 2), Config(32, 8, 1)),
    "past_choose": (Config(0, 4, 1), Config(0, 8, 1), Config(0, 4, 1)),
    "past_answers": (Config(64, 8, 3, registers=128), Config(64, 8, 2), Config(32, 8, 1)),
    "past_pair_gradients": (Config(32, 8, 3, registers=128), Config(64, 8, 1), Config(32, 8, 1)),
}


class Call(NamedTuple):
    """One call -> (B, H, Lq, E). Tables (bounds, logs, order) are those of parts.py, with S = 1, B or B Hk of them."""

    query: Tensor  # (B, H, Lq, D)
    key: Tensor  # (B, Hk, Lk, D); query head h reads key head h // (H / Hk)
    value: Tensor  # (B, Hk, Lk, E)
    which: Tensor | None  # near clusters of each tile, (tiles, near), -1 for none; None: the heaviest
    bounds: Tensor  # (S, 2, KP + 1) int32, first token and end of each cluster, those of the prefix last
    logs: Tensor  # (S, KP) float32, log2 of the sizes
    order: Tensor | None  # (S, Lk) int32, where the tokens lie; None: as they are
    clusters: int
    longest: int  # tokens of the largest cluster, at most; 0: not known
    equal: bool  # all clusters have as many
    scale: float
    tile: int = 128  # queries in a row that share their near clusters
    near: int = 0
    response: int = -1  # clusters that answer with their covariance; -1: all, -2: all with the mean of theirs by size
    closure: str = "tanh"
    rank: str = "mass"  # as of `cluster_attention`
    prefix: int = 0  # tokens that are near to every query
    masked: bool = False  # some tokens take no part


class Shape(NamedTuple):
    """Its sizes; hashable, so plans are kept."""

    batch: int
    heads: int  # of the keys
    group: int  # query heads of each
    length_q: int
    length_k: int
    D: int
    E: int
    sets: int  # S
    ordered: bool
    clusters: int
    longest: int
    equal: bool
    tile: int
    near: int
    response: int
    closure: str
    rank: str
    listed: bool  # near clusters are given, not chosen
    prefix: int
    masked: bool


@dataclass(frozen=True, eq=False)
class Plan:
    """What a launch needs beside its tensors."""

    shape: Shape
    dtype: torch.dtype
    precision: str
    head_tiles: int  # tiles of a query head
    tiles: int  # those of all query heads of a key head
    BD: int
    BE: int
    KP: int
    CK: int
    kept: dict[Any, Any] = field(default_factory=dict)

    @cached_property
    def pairs(self) -> int:
        """Key heads of all sequences."""
        return self.shape.batch * self.shape.heads

    @cached_property
    def per(self) -> int:
        """Key heads in a row that share their clusters."""
        return self.pairs // self.shape.sets

    @cached_property
    def listed(self) -> int:
        """Numbers in the list of a tile: near clusters, and the prefix."""
        return self.shape.near + (self.shape.prefix > 0)

    @cached_property
    def prefix_block(self) -> int:
        """Tokens of the prefix that a program takes for their gradients."""
        return min(self.config("key_gradients").block, padded(self.shape.prefix, 16))

    @cached_property
    def loose(self) -> bool:
        """Whether near clusters have sizes that only the device knows."""
        return self.shape.near > 0 and not self.shape.longest

    @cached_property
    def usual(self) -> int:
        """Tokens of a near cluster: of the largest, or where that is not known of the mean."""
        return self.shape.longest or cdiv(self.shape.length_k, self.shape.clusters)

    def blocks(self, block: int) -> tuple[int, int]:
        """Blocks of a near cluster, at most, and those of all in the list of a tile, the prefix included."""
        each = cdiv(self.shape.longest or self.shape.length_k, block)
        return each, self.shape.near * each + cdiv(self.shape.prefix, block)

    @cached_property
    def copies(self) -> bool:
        """Whether keys and values are put in order first: where each is read eight times or more."""
        shape = self.shape
        return shape.ordered and not shape.masked and shape.near * self.usual * self.tiles >= 8 * shape.length_k

    def config(self, name: str) -> Config:
        kinds = CONFIGS[name]
        if self.response in (0, 3):
            kinds = CONFIGS.get(f"{name}_pooled", kinds)
        if self.dtype == torch.float32:
            return kinds[2]
        return kinds[0] if max(self.BD, self.BE) <= 64 else kinds[1]

    def near_config(self, name: str) -> Config:
        """The same for a loop over near tokens: half a block where no cluster, or no row of them, has more tokens."""
        config, longest = self.config(name), self.shape.near * self.usual if self.loose else self.shape.longest
        half = 64 <= config.block // 2 and 0 < longest <= config.block // 2
        return config._replace(block=config.block // 2) if half else config

    def resources(self, name: str, rows: int | None = None) -> dict[str, Any]:
        """Warps and registers of a launch: those of the table for 128 rows, fewer for less: 8 warps for 128 rows, or as
        many more as the table has."""
        config, rows = self.config(name), self.shape.tile if rows is None else rows
        # Loops that are worth a pipeline name its stages themselves; the others must not take shared memory for one.
        most = rows // 16 * max(1, config.warps // 8)
        return {"num_warps": max(1, min(config.warps, most)), "num_stages": 1, "maxnreg": config.registers}

    def once(self, name: str, make: Callable[[], T]) -> T:
        """make(), kept."""
        found = self.kept.get(name)
        if found is None:
            found = self.kept[name] = make()
        return cast(T, found)

    @cached_property
    def fused(self) -> bool:
        """Whether `attend` chooses the clusters of a tile itself: it holds the masses of all."""
        known = self.shape.listed or self.shape.rank == "mean"
        return self.KP == self.CK and not known and (self.shape.near > 0 or self.response == 2)

    @cached_property
    def wide(self) -> int:
        """Columns that near tokens have beyond the first 64, where 64 and these hold heads that BD would pad further;
        else 0. A quarter fewer products for heads of 96."""
        shape, columns = self.shape, padded(self.shape.D - 64) if self.shape.D > 64 else 64
        narrow = self.listed > 0 and shape.D == shape.E and columns < 64
        return columns if narrow and self.dtype != torch.float32 else 0

    @cached_property
    def shares_sums(self) -> bool:
        """Whether the gradient of the one matrix is summed with those of the vectors."""
        narrow = self.dtype != torch.float32 and max(self.BD, self.BE) <= 64
        return self.response == 3 and self.KP == self.CK and narrow

    def even(self, block: int) -> bool:
        """Whether near tokens are clusters of whole blocks."""
        whole = self.shape.equal and self.shape.longest % block == 0
        return whole and not self.shape.listed and not self.shape.prefix

    def near_stages(self, config: Config, device: torch.device) -> int:
        """Stages of the loop over near tokens: a third where the list alone says where these are (elsewhere it was not
        seen to help), on devices that have the shared memory."""
        stages = config.key_stages or config.stages
        return stages if self.even(config.block) and shared_memory(device) > THIRD_STAGE else min(stages, 2)

    @cached_property
    def response(self) -> int:
        """0: means only, 1: all clusters respond, 2: those listed, 3: all with one matrix."""
        return {0: 0, -1: 1, -2: 3}.get(self.shape.response, 2)

    def by_products(self, device: torch.device) -> bool:
        """Whether tiles choose their clusters by products. One by one is quicker, or nobody looked, for wide heads, for
        float32, for many clusters, and where there are too few tiles for all multiprocessors."""
        seen = self.dtype != torch.float32 and max(self.BD, self.BE) <= 64 and self.KP <= 256
        programs = self.pairs * cdiv(self.tiles, self.config("choose_by_products").block)
        return seen and programs >= multiprocessors(device)

    def many_clusters(self, device: torch.device) -> bool:
        """Whether what the clusters of a head measure tokens from is found once, by a launch of its own: where
        multiprocessors have several clusters each. In float32 each cluster has its own."""
        return self.dtype != torch.float32 and self.pairs * self.KP >= 8 * multiprocessors(device)

    def few_tiles(self, device: torch.device) -> bool:
        """Whether tiles that choose by their mean have a multiprocessor each: then one launch does all of it."""
        return self.pairs * self.tiles <= multiprocessors(device)

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
        shape = self.shape
        known = {
            "D": shape.D, "E": shape.E, "BD": self.BD, "BE": self.BE, "M": shape.tile, "CK": self.CK, "KP": self.KP,
            "CLOSURE": CLOSURE_NUMBER[shape.closure], "NEAR": self.listed, "GROUP": shape.group,
            "PREFIX": int(shape.prefix > 0), "ORDERED": shape.ordered, "RESPONSE": self.response,
            "SQUARE": tl.bfloat16 if self.dtype == torch.bfloat16 else tl.float32,
            "PRECISION": self.precision, "WHOLE": shape.length_q % shape.tile == 0,
        }  # fmt: skip
        return {name: known[name] for name in names}


def plan_for(call: Call) -> Plan:
    query, (B, Hk, Lk, D), K = call.query, call.key.shape, call.clusters
    shape = Shape(
        B, Hk, query.shape[1] // Hk, query.shape[2], Lk, D, call.value.shape[-1], call.bounds.shape[0],
        call.order is not None, K, call.longest, call.equal, call.tile, call.near,
        -1 if call.response >= K - call.near else call.response, call.closure, call.rank, call.which is not None,
        call.prefix, call.masked,
    )  # fmt: skip
    return kept_plan(shape, query.dtype)


def kept_plan(shape: Shape, dtype: torch.dtype) -> Plan:
    return _plan_of(shape, dtype, dot_precision(dtype))


@lru_cache(256)
def _plan_of(shape: Shape, dtype: torch.dtype, usual: str) -> Plan:
    # As of all kernels, but float32 without tf32 multiplies three times in tf32: to 22 digits, on tensor cores.
    precision = "tf32x3" if usual == "ieee" else usual
    tiles, KP = cdiv(shape.length_q, shape.tile), padding(shape.clusters)
    widths = padded(shape.D, 32), padded(shape.E, 32)
    return Plan(shape, dtype, precision, tiles, tiles * shape.group, *widths, KP, min(KP, CHUNK))


def of_blocks(
    query: Tensor, key: Tensor, value: Tensor, which: Tensor | None, starts: Sequence[int], scale: float, **options: Any
) -> Call:
    """A call with clusters that hold the keys from starts[c] to starts[c + 1], K + 1 numbers."""
    sizes = [b - a for a, b in pairwise(starts)]
    even = max(sizes), max(sizes) == min(sizes)
    return Call(query, key, value, which, *tables(starts, 0, key.device), None, len(sizes), *even, scale, **options)


@cache
def no_numbers(device: torch.device) -> Tensor:
    """What stands for a list that a kernel does not read."""
    return torch.zeros(1, dtype=torch.int32, device=device)
