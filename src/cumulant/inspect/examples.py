"""A small batch of the kind that a model takes, made from its class and config and tried on it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ..nn.swapped.plan import library_of
from .batches import Batch, call, check_model, evaluating, placed
from .named_inputs import NamedInputs
from .pictures import images

TRIALS = 24


def example_for(model: nn.Module) -> Batch:
    """A small batch of noise that the model was seen to take; an error that asks for one where none was found."""
    check_model(model)
    said = ""
    for made in _candidates(model):
        batch = placed(model, made)
        try:
            with evaluating(model), torch.no_grad():
                call(model, batch)
        except Exception as error:  # of the model, which may be anything
            first = str(error).strip().partition("\n")[0]
            said = said or f" (it answers {describe(batch)} with {type(error).__name__}: {first[:160]})"
        else:
            return batch
    library_of(model)  # an error for models without attention: no batch would help them
    raise ValueError(
        f"cannot tell what {type(model).__name__} takes{said}; pass example=batch, a tensor, tuple or mapping to call "
        "the model with, or on the command line --example FILE"
    )


def expected_input(model: nn.Module) -> Batch | None:
    """What the model is likely to take, not tried; None where nothing tells."""
    made = next(_candidates(model), None)
    return None if made is None else placed(model, made)


def describe(batch: Batch) -> str:
    """Names and shapes."""
    if isinstance(batch, Tensor):
        return f"a tensor of shape {tuple(batch.shape)}"
    items = batch.items() if isinstance(batch, dict) else enumerate(batch)
    return ", ".join(f"{name} {tuple(x.shape)}" for name, x in items if isinstance(x, Tensor)) or type(batch).__name__


def _candidates(model: nn.Module) -> Iterator[Batch]:
    if hasattr(model, "main_input_name") and hasattr(model, "config"):
        seen: list[str] = []
        for made in NamedInputs(model).batches():
            if describe(made) not in seen:
                seen.append(describe(made))
                yield made
            if len(seen) == TRIALS:
                return
    else:
        yield from images(model)
