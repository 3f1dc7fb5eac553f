"""What may stand in the place of an argument by mistake, and calls in which one argument is such a value."""

# mypy: disable-error-code="arg-type,misc,assignment"
from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

B, H, L, D = 2, 4, 16, 8
NAN, INF = float("nan"), float("inf")


class Wrong(NamedTuple):
    """A call that must fail, and the names of which its error must hold one."""

    what: str
    names: tuple[str, ...]
    call: Callable[[], Any]


def tokens(*shape: int) -> Tensor:
    return torch.randn(*(shape or (B, H, L, D)))


class Marked(Tensor):
    """A tensor that is one of a class of its own, with numbers like any other."""


def nested(*lengths: int) -> Tensor:
    with warnings.catch_warnings(action="ignore"):
        return torch.nested.nested_tensor([torch.ones(length) for length in lengths])


# What may stand in the place of an argument by mistake, by its kind.
ARRAY = np.ones(3)
OBJECTS: dict[str, Any] = {"None": None, "text": "x", "list": [1.0, 2.0], "number": 3.0, "dict": {}, "array": ARRAY}
SCALES: dict[str, Any] = {
    "NaN": NAN,
    "inf": INF,
    "-inf": -INF,
    "text": "0.5",
    "True": True,
    "tensor": torch.ones(2),
    "list": [1.0],
    "complex": 1j,
    "array": ARRAY,
    "class": float,
}
FLAGS: dict[str, Any] = {"text": "no", "1": 1, "None": None, "tensor": torch.ones(3), "0.0": 0.0, "array": ARRAY}
COUNTS: dict[str, Any] = {"0": 0, "-1": -1, "2.5": 2.5, "text": "2", "NaN": NAN, "True": True, "list": [1]}
COUNTS |= {"complex": 3 + 0j, "array": ARRAY, "tensor": torch.ones(2)}
MASKS: dict[str, Any] = {
    "text": "x",
    "list": [True],
    "number": 1.0,
    "one short": torch.ones(B, L - 1, dtype=torch.bool),
    "other batch": torch.ones(B + 1, L),
    "a column": torch.ones(B, 1),
    "by query": torch.ones(B, 1, L, L),
    "integers": torch.ones(B, L, dtype=torch.long),
    "negative": -torch.ones(B, L),
    "NaN": torch.full((B, L), NAN),
    "inf": torch.full((B, L), INF),
    "additive": torch.zeros(B, L).fill_(-INF),
    "complex": torch.ones(B, L) * 1j,
    "scalar": torch.tensor(1.0),
    "other device": torch.ones(B, L, device="meta"),
    "array": np.ones((B, L)),
    "float8": torch.ones(B, L).to(torch.float8_e5m2),
    "sparse": torch.ones(B, L).to_sparse(),
    "nested": nested(*[L] * B),
    "negative of another class": (-torch.ones(B, L)).as_subclass(Marked),
}


def bad_tensors(x: Tensor) -> dict[str, Any]:
    """Tensors and other things that cannot stand for x (B, H, L, D)."""
    return OBJECTS | {
        "integers": x.long(),
        "bool": x > 0,
        "complex": x * 1j,
        "float8": x.to(torch.float8_e4m3fn),
        "scalar": x[0, 0, 0, 0],
        "1-D": x[0, 0, 0],
        "2-D": x[0, 0],
        "other dtype": x.double(),
        "other device": x.to("meta"),
        "sparse": x.to_sparse(),
        "nested": torch.nested.nested_tensor(list(x)),
        "jagged": torch.nested.nested_tensor(list(x), layout=torch.jagged),
    }


def bad_shapes(name: str, x: Tensor) -> dict[str, Any]:
    """Tensors of the right kind that do not belong to the others."""
    found = {"other width": x[..., :3], "other batch": x.repeat(3, 1, 1, 1)[:3], "other heads": x[:, :3]}
    if name != "query":
        found["one token less"] = x[..., :-1, :]
    if name == "value":
        del found["other width"]
    return found


def wrong_tensors(what: str, function: Callable[..., Any], names: tuple[str, ...], **given: Any) -> Iterator[Wrong]:
    """One tensor at a time wrong; errors about shapes may name any of those that do not agree."""
    good = {name: tokens() for name in names}
    for name in names:
        for kind, x in bad_tensors(good[name]).items():
            yield Wrong(f"{what}: {name} {kind}", (name,), partial(function, **{**good, name: x}, **given))
        for kind, x in bad_shapes(name, good[name]).items():
            if kind == "one token less" and "value" not in names:
                continue  # nothing wrong without values
            yield Wrong(f"{what}: {name} {kind}", names, partial(function, **{**good, name: x}, **given))


def wrong_values(
    what: str, function: Callable[..., Any], bad: Mapping[str, Mapping[str, Any]], names: tuple[str, ...] = ()
) -> Iterator[Wrong]:
    for name, values in bad.items():
        for kind, x in values.items():
            yield Wrong(f"{what}: {name} {kind}", (name, *names), partial(function, **{name: x}))


def only(values: Mapping[str, Any], *left_out: str) -> dict[str, Any]:
    return {kind: x for kind, x in values.items() if kind not in left_out}


def words(*known: Any) -> dict[str, Any]:
    """What is none of the words that an option knows."""
    return {"text": "nonsense", "number": 17, "list": ["x"], "array": ARRAY, "tensor": torch.ones(2)}


CALL = {"key_mask": MASKS, "is_causal": FLAGS, "scale": SCALES, "enable_gqa": FLAGS}
FORM = {
    "order": {**COUNTS, "4": 4, "None": None},
    "full": FLAGS,
    "normalization": {**words(), "None": None},
    "closure": words(),
    "around": {**words(), "None": None},
    "apart": only(COUNTS, "0"),
    "backend": {**words(), "None": None},
}

ABOVE_0 = {"0": 0.0, "-1": -1.0, "NaN": NAN, "text": "x", "inf": INF, "list": [1.0]}
SMALL = {"-1": -1.0, "NaN": NAN, "text": "x", "inf": INF, "list": [1.0]}
SWITCH = {"text": "no", "3": 3}
OPTIONS: dict[str, Mapping[str, Any]] = {
    "agents": {"0": 0, "-1": -1, "no square": 5.5, "text": "x", "list of words": ["a", "b"], "True": True},
    "branching": {"1": 1, "-1": -1, "text": "x", "2.5": 2.5},
    "levels": {"-1": -1, "2.5": 2.5, "text": "x"},
    "energy": words(),
    "tree": {"text": "x", "few": [0, 1], "floats": [0.5, 1]},
    "power": ABOVE_0,
    "chunk": only(COUNTS, "True"),
    "eps": SMALL,
    "clamp": only(SMALL, "inf"),
    "max_len": {**only(COUNTS, "True"), "too small": 3},
    "ridge": ABOVE_0,
    "solver": words(),
    "iterations": COUNTS,
    "tolerance": SMALL,
    "block": COUNTS,
    "segment": COUNTS,
    "variant": words(),
    "pooling": words(),
    "summary_key": {"text": "nonsense", "number": 17},
    "near": {"-1": -1, "2.5": 2.5},
    "closure": words(),
    "variance": words(),
    "rank": words(),
    "read_exponent": {"NaN": NAN, "text": "x", "inf": INF},
    "residual": {"NaN": NAN, "text": "x", "inf": INF},
    "order": {},
    "normalization": words(),
    "backend": words(),
    "around": words(),
    "apart": only(COUNTS, "0"),
    "full": FLAGS,
    "kernel": {"2": 2, "0": 0, "-1": -1, "text": "x", "2.5": 2.5},
    "query_std": {"-1": -1.0, "NaN": NAN, "text": "x"},
    "position": {"-1": -1, "2.5": 2.5, "text": "x"},
    "use_rope": SWITCH,
    "use_lepe": SWITCH,
    "use_gate": SWITCH,
    "use_conv": SWITCH,
    "use_position": SWITCH,
    "use_alpha": SWITCH,
    "scaled": SWITCH,
    "exclude_own": SWITCH,
    "qk_norm": SWITCH,
    "precondition": SWITCH,
    "learn_ridge": SWITCH,
    "position_bias": SWITCH,
    "conv": SWITCH,
}
