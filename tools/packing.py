"""Tensors rounded to a few bits a number, in one file: for machines that nothing can be fetched to.

Each row of a tensor is its largest number times whole numbers of `bits` bits; these are kept in as many bits as their
spread needs. 6 bits of normal numbers take 5, 8 take 7, 16 take 15: those are off by a 65,000th of the row's largest
number at most, as much as a model in float16 at its best. Small tensors are kept as they are.
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
MOST = 16  # bits of a number
LEAST = 32  # numbers of a row; where the last axis has fewer, all axes but the first are one


def pack(tensors: Mapping[str, Tensor], path: Path, bits: int = 8, whole: Collection[str] = ()) -> Path:
    """Write these tensors to `path`, those called as in `whole` as they are."""
    if not 2 <= bits <= MOST:
        raise ValueError(f"bits of a number are 2 to {MOST}, got {bits}")
    path.parent.mkdir(parents=True, exist_ok=True)
    given = {name: x.detach().cpu().float() for name, x in tensors.items()}
    torch.save({name: _packed(x, 32 if name in whole else bits) for name, x in given.items()}, path)
    return path


def unpack(path: Path) -> dict[str, Tensor]:
    """What `pack` wrote, rounded, in float32."""
    kept = torch.load(path, weights_only=True)
    return {name: _unpacked(x) for name, x in kept.items()}


def _packed(x: Tensor, bits: int) -> dict[str, Any]:
    if x.ndim < 2 or x.numel() <= SMALL or bits > MOST:
        return {"whole": x.clone()}
    rows, most = _rows(x), 2 ** (bits - 1) - 1
    scale = (rows.abs().amax(-1, keepdim=True) / most).clamp(min=1e-30)
    scale = scale.bfloat16() if bits <= 8 else scale  # 8 bits of the scale do for 8 bits of a number
    steps = (rows / scale.float()).round().clamp(-most, most).numpy().astype("<i2")
    if bits <= 8:
        return {"shape": tuple(x.shape), "scale": scale, "steps": _squeezed(steps.astype(np.int8))}
    high = (steps >> 8).astype(np.int8)
    return {
        "shape": tuple(x.shape), "scale": scale, "steps": _squeezed(high),
        "low": _squeezed((steps & 255).astype(np.uint8)),
    }  # fmt: skip


def _unpacked(kept: dict[str, Any]) -> Tensor:
    if "whole" in kept:
        return kept["whole"]
    steps = _stretched(kept["steps"], np.int8).astype(np.float32)
    if "low" in kept:
        steps = steps * 256 + _stretched(kept["low"], np.uint8)
    scale = kept["scale"].float()
    return (torch.from_numpy(steps).view(len(scale), -1) * scale).reshape(kept["shape"])


def _squeezed(numbers: np.ndarray) -> Tensor:
    squeeze = zlib.compressobj(9, zlib.DEFLATED, 15, 9, zlib.Z_HUFFMAN_ONLY)
    data = squeeze.compress(numbers.tobytes()) + squeeze.flush()
    return torch.frombuffer(bytearray(data), dtype=torch.uint8)


def _stretched(data: Tensor, kind: type[np.generic]) -> np.ndarray:
    return np.frombuffer(zlib.decompress(data.numpy().tobytes()), kind)


def _rows(x: Tensor) -> Tensor:
    return x.flatten(0, -2) if x.shape[-1] >= LEAST else x.flatten(1)
