"""Tensors rounded to a few bits a number, in one file: for machines that nothing can be fetched to.

Each row of a tensor is its largest number times whole numbers of `bits` bits; these are kept in as many bits as their
spread needs. 8 bits of normal numbers take 7, 6 bits take 5. Small tensors are kept as they are.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SMALL = 1 << 12  # numbers of a tensor
LEAST = 32  # numbers of a row; where the last axis has fewer, all axes but the first are one


def pack(tensors: Mapping[str, Tensor], path: Path, bits: int = 8, whole: Collection[str] = ()) -> Path:
    """Write these tensors to `path`, those called as in `whole` as they are."""
    if not 2 <= bits <= 8:
        raise ValueError(f"bits of a number are 2 to 8, got {bits}")
    path.parent.mkdir(parents=True, exist_ok=True)
    given = {name: x.detach().cpu().float() for name, x in tensors.items()}
    torch.save({name: _packed(x, 32 if name in whole else bits) for name, x in given.items()}, path)
    return path


def unpack(path: Path) -> dict[str, Tensor]:
    """What `pack` wrote, rounded, in float32."""
    kept = torch.load(path, weights_only=True)
    return {name: _unpacked(x) for name, x in kept.items()}


def _packed(x: Tensor, bits: int) -> dict[str, Any]:
    if x.ndim < 2 or x.numel() <= SMALL or bits > 8:
        return {"whole": x.clone()}
    rows = _rows(x)
    most = 2 ** (bits - 1) - 1
    scale = (rows.abs().amax(-1, keepdim=True) / most).clamp(min=1e-30).bfloat16()
    steps = (rows / scale.float()).round().clamp(-most, most).to(torch.int8)
    squeeze = zlib.compressobj(9, zlib.DEFLATED, 15, 9, zlib.Z_HUFFMAN_ONLY)
    data = squeeze.compress(steps.numpy().tobytes()) + squeeze.flush()
    return {"shape": tuple(x.shape), "scale": scale, "steps": torch.frombuffer(bytearray(data), dtype=torch.uint8)}


def _unpacked(kept: dict[str, Any]) -> Tensor:
    if "whole" in kept:
        return kept["whole"]
    steps = np.frombuffer(zlib.decompress(kept["steps"].numpy().tobytes()), np.int8)
    scale = kept["scale"].float()
    return (torch.from_numpy(steps.copy()).view(len(scale), -1) * scale).reshape(kept["shape"])


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.shape[-1] >= LEAST else x.flatten(1)
