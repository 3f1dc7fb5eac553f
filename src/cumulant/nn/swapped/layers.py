"""A layer of `cumulant.nn.layers()` in the place of a trained attention layer, whose projections it takes over."""

from __future__ import annotations

from typing import Any

from torch import nn

from ..attention import MultiheadAttention
from ..registry import create_layer, get_layer
from . import timm_layers
from .choice import Choice

OTHERS = "transformers and torch compute query, key and value in classes of their own"
EXTRAS = ("v_conv", "gate", "temperature")  # of our own layers: parts that the new layer does not know
FUSED = ("qkv", "proj")
ORIGINAL = "_cumulant_original"  # attribute of a layer that was put in: the module whose place it took


def put_in(model: nn.Module, name: str, choice: Choice) -> None:
    """Replace the module of that name by the layer of the choice, with the same projections and norms."""
    old = model.get_submodule(name)
    source = getattr(old, ORIGINAL, old)
    new = made(model, name, source, choice)
    new.__dict__[ORIGINAL] = source  # not a submodule: its weights are those of the new layer
    model.set_submodule(name, new)


def take_out(model: nn.Module, name: str) -> None:
    """Put back what was there, with the projections as they are by now."""
    new: Any = model.get_submodule(name)
    source = new.__dict__.pop(ORIGINAL)
    for part in (*FUSED, "q_norm", "k_norm"):
        setattr(source, part, getattr(new, part))
    model.set_submodule(name, source.train(new.training))


def made(model: nn.Module, name: str, source: Any, choice: Choice) -> nn.Module:
    """The new layer; an error where the projections of `source` do not fit it."""
    assert choice.layer is not None
    if not isinstance(source, MultiheadAttention) and timm_layers.class_name(source) not in timm_layers.SELF:
        raise ValueError(
            f"{name} is a {type(source).__name__}, which layer={choice.layer!r} cannot take the place of: {OTHERS}; "
            "models of this library and of timm can be converted this way"
        )
    given = _arguments(model, name, source)
    weight = source.proj.weight
    try:
        new: Any = create_layer(
            choice.layer, weight.shape[0], source.num_heads, attention=choice.attention,
            attention_options=dict(choice.options), **given,
        )  # fmt: skip
    except (TypeError, ValueError) as error:
        raise ValueError(f"{name} cannot be layer {choice.layer!r}: {error}") from error
    for part in FUSED:
        theirs, ours = getattr(source, part), getattr(new, part, None)
        shape = getattr(getattr(ours, "weight", None), "shape", None)
        if not isinstance(ours, nn.Linear) or shape != theirs.weight.shape:
            own = "none" if shape is None or not isinstance(ours, nn.Linear) else f"one of shape {tuple(shape)}"
            known = get_layer(choice.layer).name
            others = ", ".join(one for one in taking_over() if one != known)
            raise ValueError(
                f"{name} cannot be layer {choice.layer!r}: its {part} has shape {tuple(theirs.weight.shape)}, and the "
                f"layer has {own}, so that the weights have no place in it; train such a model from the start, "
                f"create_model(..., layer={known!r}), or take one of {others}"
            )
    new = new.to(weight.device, weight.dtype).train(source.training)
    for part in (*FUSED, "q_norm", "k_norm"):
        if isinstance(getattr(source, part, None), nn.Module):
            setattr(new, part, getattr(source, part))
    return new


def _arguments(model: Any, name: str, source: Any) -> dict[str, Any]:
    """What the new layer is told of the old one: biases, norms, dropout, places and the layout of the tokens."""
    if isinstance(source, MultiheadAttention):
        extra = [part for part in EXTRAS if getattr(source, part) is not None]
        if extra:
            raise ValueError(f"{name} has {extra[0]}, which a layer that takes its place would lose")
        given: dict[str, Any] = {"grid_size": source.grid_size, "prefix": source.prefix, "attn_drop": source.attn_drop}
        if source.num_kv_heads != source.num_heads:
            given["num_kv_heads"] = source.num_kv_heads
        if source.rotary is not None:
            given["rotary"] = source.rotary
    else:
        other = [part for part in ("gate", "rotate_half", "q_bias", "norm") if _there(getattr(source, part, None))]
        if not isinstance(getattr(source, "qkv", None), nn.Linear) or other or not source.qkv.out_features % 3 == 0:
            raise ValueError(f"{name} has {other[0] if other else 'no common projection qkv'}, which no layer here has")
        if abs(source.scale * (source.qkv.out_features // 3 // source.num_heads) ** 0.5 - 1) > 1e-6:
            raise ValueError(
                f"{name} scales its logits by {source.scale:g}; a layer here by the root of a head's width"
            )
        grid = getattr(getattr(model, "patch_embed", None), "grid_size", None)
        given = {
            "grid_size": None if grid is None else tuple(grid),
            "prefix": int(getattr(model, "num_prefix_tokens", 0)),
        }
        given["attn_drop"] = source.attn_drop.p
    given |= {"qkv_bias": source.qkv.bias is not None, "proj_bias": source.proj.bias is not None}
    drop = getattr(source, "proj_drop", None)
    given["proj_drop"] = drop.p if isinstance(drop, nn.Dropout) else 0.0
    return given


def _there(part: Any) -> bool:
    return part is not None and part is not False and not isinstance(part, nn.Identity)


def taking_over() -> list[str]:
    """Layers whose projections are those of an ordinary layer, found by making one of each."""
    from ..registry import layers

    plain, found = MultiheadAttention(8, 2), []
    for name in layers():
        try:
            one: Any = create_layer(name, 8, 2)
            same = all(
                isinstance(getattr(one, part, None), nn.Linear)
                and getattr(one, part).weight.shape == getattr(plain, part).weight.shape
                for part in FUSED
            )
        except ValueError:  # it wants other sizes, or a grid
            same = False
        if same and name != "multihead":
            found.append(name)
    return found
