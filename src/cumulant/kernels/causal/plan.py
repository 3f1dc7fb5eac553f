"""How a call of the causal Triton kernels is cut up: the tuning table, and the plan that its launches share."""

from __future__ import annotations

from typing import Any

import torch

from ..batch import Batch
from ..launch import Config, cdiv, dot_precision, multiprocessors, padded

# kernel -> widest of D and E (padded) -> order 2, order 3, for 16-bit inputs; benchmarks/gpu_tuning.py tries others.
# At order 3 `query_gradients` reads what `outputs` left for each tile: their tiles are equal, and so are those of
# `row_sums` and `key_gradients`.
TABLE: dict[str, dict[int, tuple[Config, Config]]] = {
    "part_sums": {
        64: (Config(64, 4, 3, registers=128), Config(64, 4, 3, registers=168)),
        128: (Config(64, 8, 2), Config(64, 8, 2)),
        256: (Config(32, 8, 1), Config(32, 8, 1)),
    },
    "outputs": {
        64: (Config(64, 4, 2), Config(64, 4, 1)),
        128: (Config(64, 8, 2), Config(64, 8, 1)),
        256: (Config(32, 8, 1), Config(32, 8, 1)),
    },
    "query_gradients": {
        64: (Config(64, 4, 2), Config(64, 4, 3)),
        128: (Config(64, 8, 1), Config(64, 8, 1)),
        256: (Config(32, 8, 1), Config(32, 8, 1)),
    },
    "row_sums": {  # of order 3 only
        64: (Config(64, 4, 3), Config(64, 4, 3)),
        128: (Config(32, 8, 1), Config(32, 8, 1)),
        256: (Config(16, 8, 1), Config(16, 8, 1)),
    },
    "key_gradients": {
        64: (Config(64, 4, 2), Config(64, 4, 1)),
        128: (Config(64, 8, 1), Config(32, 8, 1)),
        256: (Config(32, 8, 1), Config(16, 8, 1)),
    },
}
NARROWEST = 32  # at order 3, D is cut in halves where `query_gradients` spills registers otherwise, not below this
FLOAT32 = Config(16, 8, 1)  # float32 tiles take twice the room; products without tensor cores are the bottleneck
SCAN_WARPS = (2, 8)  # of `prefixes` and `suffixes`
ROWS = 16  # rows of D that a program of `prefixes` carries
SHORTEST = 256  # tokens of a part, at least
ENOUGH = 4  # programs a multiprocessor from which on sequences stay whole: then k and v are read once
WANTED = 6  # programs a multiprocessor when sequences are cut


def config(kernel: str, order: int, width: int, dtype: torch.dtype) -> Config:
    """The line of TABLE for the widest of D and E."""
    if dtype == torch.float32:
        return FLOAT32
    return TABLE[kernel][max(64, width)][order - 2]


def value_block(order: int, D: int, dtype: torch.dtype) -> int:
    """Columns of v that one program takes: its D x E accumulators, 2 at order 2 and 4 at order 3, fill registers."""
    room = 16384 if order == 2 else 8192
    return max(32, min(128, room // padded(D) // (4 if dtype == torch.float32 else 1)))


def cut(pairs: int, length: int, device: torch.device) -> tuple[int, int]:
    """Tokens of a part and parts of a sequence. Comparisons only, so that symbolic lengths stay symbolic."""
    processors = multiprocessors(device)
    parts = 1 if pairs >= ENOUGH * processors else cdiv(WANTED * processors, max(1, pairs))
    span = SHORTEST
    while span * parts < length:
        span *= 2
    return span, max(1, cdiv(length, span))


class Plan:
    """What the kernels of one call share: sizes, the cut of sequences into parts, compile-time arguments."""

    def __init__(self, batch: Batch) -> None:
        q, self.order = batch.query, batch.order
        self.ragged, self.dtype, self.D, E = batch.cu_q is not None, q.dtype, q.shape[-1], batch.value.shape[-1]
        self.Lq, self.Lk, self.H, self.group = batch.max_q, batch.max_k, batch.key.shape[1], batch.group
        self.pairs = batch.sequences * self.H
        self.span, self.splits = cut(self.pairs, max(self.Lq, self.Lk), q.device)
        self.BD, self.BE = padded(self.D), min(padded(E), value_block(self.order, self.D, self.dtype))
        self.state = (self.order - 1) * self.BD * self.BE + 4 * self.BD + 3 * self.BE + 16
        self.sums = (self.order - 1) * self.BD * self.BE + 2 * self.BD + self.BE
        # Tiles that each launch of `key_gradients` of order 3 walks over: in one program, what the first tile of a
        # sequence alone needs costs all others registers. float32 has no such tile.
        apart = self.splits > 1 and self.dtype != torch.float32
        self.walks = ("others", "first") if apart else ("all",)
        self.half = max(self.BD // 2, min(self.BD, NARROWEST))
        self.columns = [slice(e, min(e + self.BE, E)) for e in range(0, E, self.BE)]
        self.sizes = (self.Lq, self.Lk, self.H, self.span, self.splits)
        # Steps from one batch and head to the next in numbers of one for each row and head.
        self.at_rows = (0, q.shape[0]) if self.ragged else (q.shape[1] * self.Lq, self.Lq)
        self.scan = {"ORDER": self.order, "RAGGED": self.ragged, "BD": self.BD, "BE": self.BE, "STATE": self.state}
        self.rows = {"GROUP": self.group, "SUM": batch.total}

    def state_shape(self) -> tuple[int, ...]:
        """Sums before each part, for each range of value columns."""
        return len(self.columns), self.pairs, self.splits, self.state

    def walk(self, batch: Batch, E: int, unit: int) -> dict[str, Any]:
        """Compile-time arguments of what walks over E columns of values."""
        return {
            **self.scan, "D": self.D, "E": E, "WEIGHTED": batch.weights is not None, "MASKED": _masked(batch),
            "UNIT": unit, "PRECISION": dot_precision(self.dtype),
        }  # fmt: skip

    def tiles(self, kernel: str) -> int:
        """Tiles of a part."""
        return cdiv(min(self.span, max(self.Lq, self.Lk)), self.launch(kernel)["N"])

    def tiles_shape(self, keep: bool) -> tuple[int, ...]:
        """Sums before each tile, for each range of value columns; at order 3."""
        tiles = self.tiles("outputs") if keep and self.order == 3 else 0
        return len(self.columns), self.pairs, self.splits, tiles, 2 * self.BD + self.BE

    def launch(self, kernel: str) -> dict[str, Any]:
        c = config(kernel, self.order, max(self.BD, self.BE), self.dtype)
        return {"N": c.block, "num_warps": c.warps, "num_stages": c.stages, "maxnreg": c.registers}


def _masked(batch: Batch) -> bool:
    """Whether a row may come after the last key, or keys may not count: else tails of tiles need no masks."""
    if batch.weights is not None or batch.cu_q is None or batch.cu_k is None:
        return batch.weights is not None or batch.max_q > batch.max_k
    return batch.cu_q.data_ptr() != batch.cu_k.data_ptr()
