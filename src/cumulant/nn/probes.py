"""What a layer can do, found out by running it: the marks that `cumulant list layers` shows.

Shape legend: B = 2 sequences, L = 12 tokens, C = 32 width, H = 4 heads; all probes run in float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from .. import zoo
from ..tensors import threads
from ..zoo.probes import LENGTH, draw, same
from .registry import CLAIMS, create_layer, get_layer

DIM, HEADS, GRID = 32, 4, (3, 2, 2)
MECHANISM = "cumulant2"  # which has all that a layer can ask for


def marks(name: str) -> dict[str, bool]:
    """What the layer of that name, with options behind it, can do: {"causal": True, ...}, each found by a small run.

    A mark is False if the use raises or if its result is not what the use requires.
    """
    with threads(1):
        found = {claim: probe(name, claim) for claim in CLAIMS}
        return {**found, "any_mechanism": not refusing(name)}


def mechanism_for(name: str) -> str:
    """What a layer is probed with: a mechanism that has all that it can ask for, or softmax."""
    return "softmax" if MECHANISM in get_layer(name).not_over else MECHANISM


def probe(name: str, claim: str, attention: str | None = None) -> bool:
    """Whether the layer really has one of CLAIMS over a mechanism that has it."""
    try:
        with torch.no_grad():
            return _PROBES[claim](small(name, attention))
    except (ValueError, TypeError, NotImplementedError, AttributeError):
        return False


def small(name: str, attention: str | None = None, **options: Any) -> Any:
    """The layer in float64 with numbers that depend on nothing else, ready for inference."""
    torch.manual_seed(0)
    given: dict[str, Any] = {"grid_size": GRID, "dtype": torch.float64, **options}
    return create_layer(name, DIM, HEADS, attention=attention or mechanism_for(name), **given).eval()


def tokens(length: int = LENGTH, seed: int = 0) -> Tensor:
    return draw(2, length, DIM, seed=seed)


def refusing(name: str) -> dict[str, str]:
    """Mechanisms of the zoo with which the layer cannot be made or run, and what it says."""
    found = {}
    for attention in zoo.names():
        mechanism = zoo.get(attention)
        causal = not mechanism.noncausal
        options = dict(mechanism.pattern_options.get("causal", {})) if causal else {}
        try:
            with torch.no_grad():
                layer = small(name, attention, attention_options=options)
                fits = layer(tokens(), is_causal=causal).isfinite().all()
            if not fits:
                found[attention] = "the output is not finite"
        except (ValueError, TypeError, NotImplementedError) as error:
            found[attention] = str(error)
    return found


def _causal(layer: Any) -> bool:
    x = tokens()
    out = layer(x, is_causal=True)
    alone = all(same(out[:, :t], layer(x[:, :t], is_causal=True)) for t in (1, 5, LENGTH - 1))
    return alone and not same(out[:, :-1], layer(x)[:, :-1])


def _cross(layer: Any) -> bool:
    one, two = (layer(tokens(5), context=tokens(9, seed=s)) for s in (1, 2))
    return one.shape == (2, 5, DIM) and bool(one.isfinite().all()) and not same(one, two)


def _key_mask(layer: Any) -> bool:
    x = tokens()
    mask = torch.arange(LENGTH).lt(torch.tensor([[8], [LENGTH]]))
    out = layer(x, attn_mask=mask)
    again = layer(x.masked_fill(~mask[..., None], 1e3), attn_mask=mask)
    return same(out[mask], again[mask]) and same(out[1], layer(x)[1])


def _ragged(layer: Any) -> bool:
    x = tokens()[0]
    at = torch.tensor([0, 5, 6, LENGTH])
    packed = layer.forward_packed(x, at)
    return same(packed, torch.cat([layer(part[None])[0] for part in x.split([5, 1, 6])]))


def _streaming(layer: Any) -> bool:
    x = tokens()
    out, stream = layer(x, is_causal=True), layer.stream()
    return all(same(stream.step(x[:, t : t + 1]), out[:, t : t + 1]) for t in range(LENGTH))


def _equivariant(layer: Any) -> bool:
    x = tokens()
    order = torch.randperm(LENGTH, generator=torch.Generator().manual_seed(1))
    return same(layer(x[:, order]), layer(x)[:, order])


def _losses(layer: Any) -> bool:
    layer.train()(tokens())
    return bool(layer.losses())


def _weights(layer: Any) -> bool:
    A = layer.scores(tokens())
    return A.shape[-2:] == (LENGTH, LENGTH) and bool(A.isfinite().all())


_PROBES: dict[str, Callable[[Any], bool]] = {claim: globals()[f"_{claim}"] for claim in CLAIMS}
