"""What training a model costs: floating-point operations of an item, memory of a step."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cumulant import zoo
from cumulant.bench.scaling import peak_bytes
from cumulant.grammar import read_blocks
from cumulant.train.processes import chosen_device

if TYPE_CHECKING:
    from cumulant.data.part import Source
    from cumulant.train import TrainRecipe


def costs(recipe: TrainRecipe, source: Source, device: str | None) -> dict[str, Any]:
    """FLOPs of one item (forward) by torch's counter, and the peak memory of one training step, not compiled."""
    where = chosen_device(device)
    return {"flops": flops(recipe, source), "step_bytes": step_bytes(recipe, source, where), "device": where.type}


@torch.no_grad()
def flops(recipe: TrainRecipe, source: Source) -> int:
    """Floating-point operations (2 a multiply-add) of matrix products and convolutions for one item."""
    from cumulant.train.build import build_model

    if any(
        "backend" in zoo.get(name).options for name in read_blocks(recipe.attention)
    ):  # a fused kernel hides its products from the counter
        recipe = replace(recipe, attention_options={**recipe.attention_options, "backend": "reference"})
    model = build_model(recipe, source).eval()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(_items(recipe, source, 1))
    return counter.get_total_flops()


def step_bytes(recipe: TrainRecipe, source: Source, device: torch.device) -> int | None:
    """Bytes of activations and gradients at the peak of one forward and backward pass; None if they do not fit."""
    from cumulant.train.build import build_model

    model = build_model(recipe, source).to(device).train()
    count = recipe.batch_size // recipe.accumulate
    items = _items(recipe, source, count).to(device)
    labels = torch.zeros(count, dtype=torch.long, device=device)
    half = torch.autocast(device.type, torch.bfloat16) if recipe.precision == "bf16" else nullcontext()

    def step() -> None:
        with half:
            loss = F.cross_entropy(model(items).float(), labels)
        loss.backward()

    try:
        step()
        model.zero_grad(set_to_none=True)
        return peak_bytes(step, device.type)
    except torch.OutOfMemoryError:
        return None


def _items(recipe: TrainRecipe, source: Source, count: int) -> torch.Tensor:
    frames = (recipe.frames,) if source.kind == "video" else ()
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, *frames, recipe.image_size, recipe.image_size, generator=generator)
