"""Hybrids through plain `from_pretrained`: a model that transformers makes from a converted config is converted too."""

from __future__ import annotations

from functools import wraps
from typing import Any

from torch import nn

from . import hf
from .choice import KEPT, Choice
from .plan import OWN_CONFIGS, apply, attention_layers, forget, is_converted, remember, set_implementation

WATCHED = "_cumulant_watched"  # attribute of the method that has been wrapped


def watch() -> None:
    """From now on models of transformers look, when they are made, whether their config has a plan of `convert`.

    So AutoModel, SentenceTransformer and a class with a new head load a hybrid as they load any model.
    """
    from transformers import PreTrainedModel

    plain = PreTrainedModel.post_init
    if getattr(plain, WATCHED, False):
        return

    @wraps(plain)
    def post_init(self: Any, *args: Any, **kw: Any) -> Any:
        done = plain(self, *args, **kw)
        config = self.config
        stored = getattr(config, "cumulant", None)
        if stored and config._attn_implementation == hf.MIXED:
            arrive(self, stored["layers"])
        return done

    setattr(post_init, WATCHED, True)
    PreTrainedModel.post_init = post_init  # type: ignore[method-assign]


def arrive(model: nn.Module, stored: dict[str, Any]) -> None:
    """Put the choices by layer into a model that may be a part of the one they were made for, or hold it.

    Where a layer of the plan is not found, the others are not declared softmax: they say so when they run.
    """
    names = {name: _here(model, name) for name in stored}
    plan = {here: Choice.from_json(stored[name]) for name, here in names.items() if here is not None}
    if not plan:
        return
    for part in model.modules():
        if part is not model and is_converted(part):  # made first, from the same config
            forget(part)
    model.__dict__[OWN_CONFIGS] = True  # parts that are made one after the other, from one config, keep it in common
    set_implementation(model, "sdpa")  # what `restore` goes back to
    kept = {} if None in names.values() else dict.fromkeys(attention_layers(model), KEPT)
    remember(model, plan, apply(model, {**kept, **plan}))


def _here(model: nn.Module, name: str) -> str | None:
    """The name of a layer in this model: the same, without the name of the part that this model is, or with it."""
    there = dict(model.named_modules())
    prefix = getattr(model, "base_model_prefix", "")
    for other in (name, name.removeprefix(f"{prefix}."), f"{prefix}.{name}"):
        if other in there:
            return other
    return None
