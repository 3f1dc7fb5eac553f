"""How a call of the non-causal Triton kernels is cut up: the tuning table, and the plan that all its launches share.

The values for heads of 64 are the best of those tried on an H200 (benchmarks/gpu_tuning.py tries others), the rest
start from the registers and shared memory that the compiler reports: 3 or 4 programs to each multiprocessor without
spilling.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any

import torch

from ..batch import Batch
from ..launch import ROOM, Config, cdiv, dot_precision, multiprocessors, padded, shared_memory

# kernel -> widest of D and E, padded -> configurations at order 2 and at order 3
TABLE: dict[str, dict[int, tuple[Config, Config]]] = {
    "fused_forward": {
        64: (Config(64, 4, 2, 64, 2, 128), Config(64, 4, 4, 32, 4, 168)),
        128: (Config(64, 8, 2, 32, 2), Config(64, 8, 2, 32, 1)),
    },
    "fused_backward": {
        64: (Config(64, 4, 2, 64, 2, 168), Config(32, 4, 2, 64, 2, 168)),
        128: (Config(64, 8, 2, 64, 1), Config(64, 8, 1, 64, 1)),
    },
    "partial_moments": {
        64: (Config(64, 4, 3, registers=128), Config(32, 4, 4, registers=168)),
        128: (Config(64, 8, 2), Config(32, 8, 2)),
        256: (Config(64, 8, 2), Config(32, 8, 2)),
    },
    "read_out": {
        64: (Config(32, 4, 6, registers=128), Config(64, 4, 3, registers=168)),
        128: (Config(64, 4, 3), Config(64, 4, 2)),
        256: (Config(64, 8, 2), Config(64, 8, 2)),
    },
    "backward_queries": {
        64: (Config(64, 4, 2, registers=168), Config(64, 4, 3, registers=168)),
        128: (Config(64, 8, 2), Config(64, 8, 2)),
        256: (Config(64, 8, 1), Config(32, 8, 1)),
    },
    "backward_keys": {
        64: (Config(32, 4, 3, registers=128), Config(64, 4, 3)),
        128: (Config(64, 8, 1), Config(64, 8, 1)),
        256: (Config(64, 8, 1), Config(32, 8, 1)),
    },
}  # fmt: skip
# Of the first three programs share a multiprocessor, of the second two.
THREE_STAGES, FOUR_STAGES = Config(64, 4, 3, 64, 3, 168), Config(64, 4, 4, 64, 4)
# kernel, widest, order -> tokens beyond which another configuration is better, and that one; the last that fits holds
BEYOND: dict[tuple[str, int, int], tuple[tuple[int, Config], ...]] = {
    ("fused_forward", 64, 2): ((64, Config(64, 4, 4, 32, 4, 128)),),
    ("fused_backward", 64, 2): ((64, THREE_STAGES), (1024, FOUR_STAGES)),
    ("fused_backward", 64, 3): ((64, FOUR_STAGES),),
}
# The same -> bytes of shared memory that the line above takes, and one for GPUs that have less.
SMALLER = {("backward_keys", 128, 3): (107_520, Config(32, 8, 1))}
# float32 tiles take twice the room, and products without tensor cores hold the time
FLOAT32 = {64: Config(32, 8, 1), 128: Config(32, 8, 1), 256: Config(16, 8, 1)}
SHORT = 512  # tokens up to which one program does a whole head, however few heads there are
FILLING = 2  # heads for each multiprocessor from which on it does so for any length
LEAST = 512  # tokens, at least, of a program that writes partial sums
PARTIAL = ("partial_moments", "backward_queries")  # the kernels that write partial sums
# Programs for each multiprocessor, at most: one wave of those that write partial sums, several of the others.
PROGRAMS = {"partial_moments": 3, "backward_queries": 3, "read_out": 48, "backward_keys": 8}
FEWER = {("backward_keys", 3): 6, ("read_out", 3): 32}  # kernel, order -> those at that order
WIDE = 64  # columns that a program takes of wide heads: wider than 128 at order 2, than 64 at order 3
CELLS = 128  # cells of a moment that a program of `merge` holds, one a thread
MERGED = 8  # partial sums that a program of `reduce` loads at a time; one of `merge` takes 4 to 16
FUSED = ("KEYS", "KEY_STAGES", "ROWS", "SUM", "GROUP")  # what only kernels with both loops take


@dataclass(frozen=True)
class Plan:
    """What all kernels of one call share; made once for each kind of call (`_plan_of`)."""

    order: int
    ragged: bool
    total: bool  # normalization="sum"
    sequences: int
    heads: int
    group: int
    D: int
    E: int
    BD: int
    BE: int
    longest_q: int
    longest_k: int
    dtype: torch.dtype
    precision: str
    processors: int
    room: int = ROOM  # bytes of shared memory of a program

    @cached_property
    def width(self) -> int:
        return max(self.BD, self.BE)

    @cached_property
    def wide(self) -> bool:
        return self.width > (128 if self.order == 2 else 64)

    @property
    def fused(self) -> bool:
        """Whether one program does a whole head, forward; backward, which holds more, only if it is not wide."""
        short = max(self.longest_q * self.group, self.longest_k) <= SHORT
        return self.width <= 128 and (short or self.sequences * self.heads >= FILLING * self.processors)

    @cached_property
    def fused_backward(self) -> bool:
        """Whether one program does that too: not at order 3 where the last round of such programs, two of which share a
        multiprocessor, would leave much of the GPU idle and split ones would not."""
        if not self.fused or self.wide:
            return False
        heads, longest = self.sequences * self.heads, max(self.longest_q * self.group, self.longest_k)
        if self.order == 2 or longest <= SHORT or self.heavy or self.width > 64:
            return True
        queries = self.span("backward_queries", self.longest_q, heads * self.group, 64)[1] * heads * self.group
        keys = self.span("backward_keys", self.longest_k, heads, 64)[1] * heads
        split = 0.45 / self.evenness(queries, 3) + 0.55 / self.evenness(keys, 2)
        return 1 / self.evenness(heads, 2) < 1.2 * split

    @cached_property
    def even_with_three(self) -> bool:
        """Whether rounds of heads are more even with three programs a multiprocessor than with two."""
        heads = self.sequences * self.heads
        return self.evenness(heads, 3) > self.evenness(heads, 2)

    def evenness(self, programs: int, at_once: int) -> float:
        """The share of the time of its rounds in which a GPU is full, with so many programs a multiprocessor."""
        rounds = programs / (at_once * self.processors)
        return rounds / math.ceil(rounds)

    @cached_property
    def heavy(self) -> bool:
        """Whether tiles hold float32 operands: with float32 inputs, and as squares in wide float16 heads."""
        return self.dtype == torch.float32 or (self.dtype == torch.float16 and self.order == 3 and self.width > 64)

    def part(self, width: int) -> int:
        """Columns that one program takes of a padded width."""
        most = WIDE // 2 if self.heavy and self.width > 128 else WIDE
        return min(width, most) if self.wide else width

    def config(self, kernel: str, longest: int) -> Config:
        width = max(self.width, 64)
        config = FLOAT32[width] if self.heavy else TABLE[kernel][width][self.order - 2]
        for limit, other in () if self.heavy else BEYOND.get((kernel, width, self.order), ()):
            config = other if longest > limit else config
        if kernel == "fused_backward" and self.order == 2 and config == FOUR_STAGES and self.even_with_three:
            config = THREE_STAGES
        taken, smaller = SMALLER.get((kernel, width, self.order), (0, config))
        if not self.heavy and self.room < taken:
            config = smaller
        most = padded(max(1, longest))
        return config._replace(block=min(config.block, most), keys=min(config.keys, most))

    def span(self, kernel: str, longest: int, heads: int, block: int) -> tuple[int, int]:
        """Tokens for each program, and programs for each head."""
        least = LEAST if kernel in PARTIAL else block
        programs = FEWER.get((kernel, self.order), PROGRAMS[kernel])
        wanted = max(1, programs * self.processors // max(1, heads))
        splits = max(1, min(wanted, longest // least))
        span = cdiv(cdiv(max(1, longest), splits), block) * block
        return span, cdiv(max(1, longest), span)

    def constants(self, config: Config, *names: str, BD: int = 0, BE: int = 0) -> dict[str, Any]:
        """Compile-time arguments: those of every token kernel, and the named ones."""
        known = (config, names, BD, BE)
        found: dict[str, Any] | None = self.cache.get(known)
        if found is None:
            found = self.cache[known] = self._constants(config, names, BD or self.BD, BE or self.BE)
        return found

    def _constants(self, config: Config, names: tuple[str, ...], BD: int, BE: int) -> dict[str, Any]:
        size = 4 if self.dtype == torch.float32 else 2
        between = config.warps * 32 * (16 // size) // min(BD, BE)  # tokens between a thread's elements of a column
        keys, key_stages = config.keys or config.block, config.key_stages or config.stages
        some = {
            "KEYS": keys, "KEY_STAGES": key_stages, "ROWS": min(keys, config.block, max(16, between)),
            "SUM": self.total, "GROUP": self.group,
        }  # fmt: skip
        return {
            "ORDER": self.order, "RAGGED": self.ragged, "D": self.D, "E": self.E, "BD": BD, "BE": BE,
            "N": config.block, "STAGES": config.stages, "PRECISION": self.precision, "num_warps": config.warps,
            "maxnreg": config.registers, **{name: some[name] for name in names},
        }  # fmt: skip

    @cached_property
    def cache(self) -> dict[Any, Any]:
        return {}


_plan_of = lru_cache(1024)(Plan)


def plan_for(batch: Batch) -> Plan:
    query, D, E = batch.query, batch.query.shape[-1], batch.value.shape[-1]
    return _plan_of(
        batch.order, batch.cu_q is not None, batch.total, batch.sequences, batch.key.shape[1], batch.group, D, E,
        padded(D), padded(E), batch.max_q, batch.max_k, query.dtype, dot_precision(query.dtype),
        multiprocessors(query.device), shared_memory(query.device),
    )  # fmt: skip
