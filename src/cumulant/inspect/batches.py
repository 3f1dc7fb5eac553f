"""What a model is called with, and which of its answers counts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from itertools import islice
from typing import Any

import torch
from torch import Tensor, nn

from ..models import VisionTransformer, ViViT
from ..models.tubelet import TubeletEmbed

Batch = Any  # a tensor, a tuple of arguments, or a mapping of keyword arguments
ANSWERS = ("logits", "logits_per_image", "last_hidden_state", "prediction_logits", "image_embeds", "pooler_output")


def call(model: nn.Module, batch: Batch) -> Any:
    """model(batch), with tuples as positional and mappings as keyword arguments."""
    if isinstance(batch, Mapping):
        return model(**batch)
    return model(*batch) if isinstance(batch, tuple | list) else model(batch)


def answer(output: Any, batch: Batch = None) -> Tensor:
    """The tensor by which two models are compared: logits if there are any, else hidden states; padding set to 0."""
    found = output
    if isinstance(output, Mapping):
        named = [output[name] for name in ANSWERS if isinstance(output.get(name), Tensor)]
        found = named[0] if named else next((x for x in output.values() if isinstance(x, Tensor)), None)
    elif isinstance(output, tuple | list):
        found = next((x for x in output if isinstance(x, Tensor)), None)
    if not isinstance(found, Tensor):
        raise ValueError(f"no tensor in the model's output of type {type(output).__name__}; pass output=function")
    mask = batch.get("attention_mask") if isinstance(batch, Mapping) else None
    if mask is not None and found.ndim == 3 and found.shape[:2] == mask.shape:
        found = found * mask.unsqueeze(-1).to(found.dtype)
    return found


def answers(
    model: nn.Module, batches: Iterable[Batch], output: Callable[[Any, Batch], Tensor] | None = None
) -> list[Tensor]:
    """What the model says to each batch, without gradients."""
    with torch.no_grad():
        return [(output or answer)(call(model, batch), batch).double() for batch in batches]


def relative_error(found: Iterable[Tensor], wanted: Iterable[Tensor]) -> float:
    """||found - wanted|| / ||wanted|| over all batches together; infinite where something is NaN."""
    difference, size = 0.0, 0.0
    for a, b in zip(found, wanted, strict=True):
        difference += float((a - b).square().sum())
        size += float(b.square().sum())
    if size == 0 or math.isnan(difference):
        return 0.0 if difference == 0 else math.inf
    return (difference / size) ** 0.5


def check_numbers(model: nn.Module, said: Iterable[Tensor]) -> None:
    """Refuse a model that says NaN: nothing can be measured against that."""
    if any(bool(x.isnan().any()) for x in said):
        raise ValueError(f"{type(model).__name__} answers NaN before anything is replaced; look at weights and data")


def some(data: Iterable[Batch] | Batch, batches: int, model: nn.Module) -> list[Batch]:
    """The first few batches, on the model's device. A tensor or a mapping is one batch."""
    several = data if isinstance(data, Iterable) and not isinstance(data, Tensor | Mapping | tuple) else [data]
    kept = list(islice(several, batches))
    if not kept:
        raise ValueError("data holds no batch")
    place = next((p.device for p in model.parameters()), torch.device("cpu"))
    return [to_device(batch, place) for batch in kept]


def to_device(batch: Batch, device: torch.device) -> Batch:
    if isinstance(batch, Tensor):
        return batch.to(device)
    if isinstance(batch, Mapping):
        return {name: to_device(value, device) for name, value in batch.items()}
    return tuple(to_device(x, device) for x in batch) if isinstance(batch, tuple | list) else batch


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Evaluation mode for a while."""
    modes = {name: module.training for name, module in model.named_modules()}
    model.eval()
    try:
        yield
    finally:
        for name, module in model.named_modules():  # by name: a layer may have been replaced in between, or have parts
            module.training = modes.get(name, modes.get(name.rpartition(".")[0], module.training))


def example_for(model: nn.Module) -> Batch:
    """A small batch of noise of the kind that the model takes, from its config; an error where that does not say."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    made = _transformers_example(model) if hasattr(model, "main_input_name") else _vision_example(model)
    if made is None:
        raise ValueError(
            f"cannot tell what {type(model).__name__} takes; pass example=batch, a tensor, tuple or mapping to call "
            "the model with"
        )
    if isinstance(made, Tensor):
        return made.to(device, dtype)
    return {k: v.to(device, dtype if v.is_floating_point() else v.dtype) for k, v in made.items()}


def _vision_example(model: nn.Module) -> Tensor | None:
    generator = torch.Generator().manual_seed(0)
    embed = getattr(model, "patch_embed", None)
    if isinstance(model, VisionTransformer | ViViT):
        part = model.patch_embed
        cells = part.tubelet if isinstance(part, TubeletEmbed) else _pair(part.patch_size)
        sides = (g * c for g, c in zip(model.grid_size, cells, strict=True))
        return torch.randn(2, part.in_chans, *sides, generator=generator)
    size = getattr(embed, "img_size", None)
    config = getattr(model, "pretrained_cfg", None) or getattr(model, "default_cfg", None)
    weight = getattr(getattr(embed, "proj", None), "weight", None)
    if size is not None and weight is not None and weight.ndim == 4:
        return torch.randn(2, weight.shape[1], *_pair(size), generator=generator)
    if config:
        channels, height, width = config["input_size"]
        return torch.randn(2, channels, height, width, generator=generator)
    return None


def _pair(size: Any) -> tuple[int, int]:
    return (int(size), int(size)) if isinstance(size, int) else (int(size[-2]), int(size[-1]))


def _transformers_example(model: Any) -> dict[str, Tensor] | None:
    generator = torch.Generator().manual_seed(0)
    config = model.config
    vision, text = getattr(config, "vision_config", None), getattr(config, "text_config", None)

    def tokens(source: Any, length: int = 12) -> Tensor:
        longest = getattr(source, "max_position_embeddings", length) or length
        return torch.randint(0, source.vocab_size, (2, min(length, longest)), generator=generator)

    def pixels(source: Any) -> Tensor:
        size = _pair(source.image_size)
        frames = getattr(source, "num_frames", None)
        middle = () if frames is None else (frames,)
        return torch.randn(2, *middle, getattr(source, "num_channels", 3), *size, generator=generator)

    made: dict[str, Tensor] = {}
    if model.main_input_name == "input_features":
        made["input_features"] = torch.randn(
            2, config.num_mel_bins, 2 * config.max_source_positions, generator=generator
        )
    if model.main_input_name == "pixel_values" or vision is not None:
        source = vision or config
        if not hasattr(source, "image_size"):
            return None
        made["pixel_values"] = pixels(source)
    if model.main_input_name == "input_ids" or text is not None:
        made["input_ids"] = tokens(text or config)
        made["attention_mask"] = torch.ones_like(made["input_ids"])
    if getattr(config, "is_encoder_decoder", False):
        made["decoder_input_ids"] = tokens(config)
    return made or None
