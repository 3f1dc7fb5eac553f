"""How far a student is from its teacher: layer by layer, and in what the whole model says.

Shape legend: B batch, L tokens, C width, K classes; leading dimensions ... of any kind.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..inspect.batches import Batch

LOGITS = ("logits", "logits_per_image", "prediction_logits")


def present(batch: Batch) -> Tensor | None:
    """Which tokens (B, L) of a batch are no padding; None where all are there."""
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    return mask if isinstance(mask, Tensor) and mask.ndim == 2 else None


def unexplained(found: Tensor, wanted: Tensor, mask: Tensor | None = None) -> Tensor:
    """Share of the variance of `wanted` (..., C), over everything but channels, that `found` misses: 0 is equal.

    sum (found - wanted)^2 / sum (wanted - <wanted>)^2
    """
    found, wanted = found.float(), wanted.float()
    weight = _weight(wanted, mask)
    mean = wanted.flatten(0, -2).mean(0)
    if weight is not None:
        mean = (wanted * weight).flatten(0, -2).sum(0) / weight.sum()
    missed, size = (found - wanted).square(), (wanted - mean).square()
    if weight is not None:
        missed, size = missed * weight, size * weight
    return missed.sum() / size.sum().clamp(min=torch.finfo(size.dtype).tiny)


def divergence(found: Tensor, wanted: Tensor, mask: Tensor | None, temperature: float) -> Tensor:
    """T^2 KL(softmax(wanted / T) || softmax(found / T)), the mean over rows of logits (..., K)."""
    log_q, log_p = (F.log_softmax(x.float() / temperature, -1) for x in (found, wanted))
    rows = (log_p.exp() * (log_p - log_q)).sum(-1)
    return _row_mean(rows, wanted, mask) * temperature**2


def angle(found: Tensor, wanted: Tensor, mask: Tensor | None) -> Tensor:
    """1 - cos between rows (..., C), their mean."""
    return _row_mean(1 - F.cosine_similarity(found.float(), wanted.float(), dim=-1), wanted, mask)


def answer_loss(kind: str, found: Tensor, wanted: Tensor, mask: Tensor | None, temperature: float) -> Tensor:
    """The loss of that name between what student and teacher say."""
    if kind == "kl":
        return divergence(found, wanted, mask, temperature)
    if kind == "cosine":
        return angle(found, wanted, mask)
    return unexplained(found, wanted, mask)


def usual_loss(model: nn.Module, said: Any, custom: bool) -> str:
    """ "kl" where a model says logits, "mse" (`unexplained`) for hidden states and for an output of the user's own."""
    if custom:
        return "mse"
    if isinstance(said, Mapping):
        return "kl" if any(isinstance(said.get(name), Tensor) for name in LOGITS) else "mse"
    return "kl" if getattr(model, "num_classes", 0) else "mse"


def _weight(x: Tensor, mask: Tensor | None) -> Tensor | None:
    """The mask as a factor (B, L, 1) for x (B, L, C); None where x has no tokens of that mask."""
    if mask is None or x.ndim != 3 or x.shape[:2] != mask.shape:
        return None
    return (mask != 0).to(x.dtype).unsqueeze(-1)


def _row_mean(rows: Tensor, x: Tensor, mask: Tensor | None) -> Tensor:
    weight = _weight(x, mask)
    if weight is None:
        return rows.mean()
    weight = weight.squeeze(-1).to(rows.dtype)
    return (rows * weight).sum() / weight.sum()
