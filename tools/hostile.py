"""Wrong calls of everything public, and what came of each: `python tools/hostile.py [PART OF A NAME ...]`.

A wrong call must raise a ValueError or TypeError whose text holds the name of the argument. Every other one is listed:
those that return something, those that raise something else, and those whose error names nothing. Exit status 1 if
there are any. On a CPU in a minute or two; values are only looked at where that costs nothing, so that wrong values on
a GPU (negative weights, offsets that fall) are not in the list.
"""

# mypy: disable-error-code="arg-type,misc,assignment"
from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

import cumulant
from cumulant import Moments, explain, nn, zoo
from cumulant.cluster import Blocks, KMeans, MergedStream
from cumulant.conversion import DistillRecipe
from cumulant.nn.streams import stream_of
from cumulant.train import TrainRecipe
from cumulant.zoo.registry import own_options

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


MERGED = {"sinks": ("0",), "recent": (), "chunk": (), "sample": (), "span": ()}  # counts, and those that are right

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


def attention() -> Iterator[Wrong]:
    q, k, v = tokens(), tokens(), tokens()
    yield from wrong_tensors("attention", cumulant.attention, ("query", "key", "value"))
    yield from wrong_values("attention", partial(cumulant.attention, q, k, v), CALL | FORM)
    yield from wrong_values(
        "attention around the mean",
        partial(cumulant.attention, q, k, v, around="mean"),
        {"query_mask": MASKS, "apart": {**only(COUNTS, "0"), "too many": L + 1}},
    )
    yield from wrong_tensors("scores", cumulant.scores, ("query", "key"))
    yield from wrong_values("scores", partial(cumulant.scores, q, k), CALL | only(FORM, "backend"))
    places = {
        "floats": torch.arange(L).float(),
        "NaN": torch.full((L,), NAN),
        "negative": torch.arange(L) - 3,
        "too few": torch.arange(3),
        "text": "x",
        "number": 3,
        "bools": torch.ones(L) > 0,
        "2-D": torch.zeros(L, 1, dtype=torch.long),
        "list of floats": [0.5] * L,
        "list of words": ["a"] * L,
    }
    for causal in (True, False):
        yield from wrong_values("scores", partial(cumulant.scores, q, k, is_causal=causal), {"positions": places})


def varlen() -> Iterator[Wrong]:
    T = 12
    q, k, v = tokens(T, H, D), tokens(T, H, D), tokens(T, H, D)
    good = {"query": q, "key": k, "value": v, "cu_seq_q": torch.tensor([0, 5, T]), "cu_seq_k": torch.tensor([0, 7, T])}
    sized = {"max_q": 7, "max_k": 7}
    offsets = {
        **only(OBJECTS, "list"),
        "falling": torch.tensor([0, 9, 3]),
        "not from 0": torch.tensor([1, 5, T]),
        "short": torch.tensor([0, 5, T - 1]),
        "long": torch.tensor([0, 5, T + 1]),
        "floats": torch.tensor([0.0, 5.0, T]),
        "empty": torch.tensor([], dtype=torch.long),
        "2-D": torch.tensor([[0, 5, T]]),
        "negative": torch.tensor([0, -5, T]),
        "more sequences": torch.tensor([0, 2, 5, T]),
        "bools": torch.tensor([False, True, True]),
        "complex": torch.tensor([0, 5, T]) * 1j,
        "without numbers": torch.tensor([0, 5, T], device="meta"),
        "nested": nested(2, 1).long(),
    }
    for what, function in (
        ("attention_varlen", cumulant.attention_varlen),
        ("softmax.varlen", zoo.get("softmax").varlen),
        ("linear.varlen", zoo.get("linear").varlen),
    ):
        for more in ({}, sized):
            for name in ("cu_seq_q", "cu_seq_k"):
                for kind, x in offsets.items():
                    told = (name, "cu_seq_q", "cu_seq_k") if kind == "more sequences" else (name,)
                    call = partial(function, **{**good, **more, name: x})
                    yield Wrong(f"{what}: {name} {kind}{' with maxima' * bool(more)}", told, call)
        for name in ("max_q", "max_k"):
            for kind, x in {"too small": 3, "2.5": 7.5, "text": "7", "negative": -1, "NaN": NAN, "True": True}.items():
                yield Wrong(f"{what}: {name} {kind}", (name,), partial(function, **{**good, **sized, name: x}))
        for name, x in (("query", q), ("key", k), ("value", v)):
            bad = OBJECTS | {"4-D": x[None], "2-D": x[0], "integers": x.long(), "other dtype": x.double()}
            bad |= {"other heads": x[:, :3], "a token less": x[:-1]} | (
                {} if name == "value" else {"narrow": x[..., :3]}
            )
            for kind, one in bad.items():
                told = (
                    ("query", "key", "value", "cu_seq")
                    if kind in ("other heads", "a token less", "narrow")
                    else (name,)
                )
                yield Wrong(f"{what}: {name} {kind}", told, partial(function, **{**good, name: one}))
        yield from wrong_values(what, partial(function, **good), {"scale": SCALES, "is_causal": FLAGS})
    yield from wrong_values("attention_varlen", partial(cumulant.attention_varlen, **good), FORM)


def clusters() -> Iterator[Wrong]:
    q, k, v = tokens(), tokens(), tokens()
    run = partial(cumulant.cluster_attention, clusters=4)
    yield from wrong_tensors("cluster_attention", run, ("query", "key", "value"))
    bad: dict[str, Mapping[str, Any]] = CALL | {
        "near": {"-1": -1, "2.5": 2.5, "text": "far", "NaN": NAN, "list": [1]},
        "closure": words(),
        "variance": words(),
        "response": {"-1": -1, "2.5": 2.5, "text": "much", "list": [1]},
        "near_rows": only(COUNTS, "True"),
        "rank": words(),
        "least": only(COUNTS, "True"),
        "offset": {"-1": -1, "2.5": 2.5, "without causal": 3, "text": "x"},
        "grid": {"other size": (3, 3), "text": "4x4", "1-D": (16,), "floats": (4.0, 4.0), "number": 16, "0": (0, 4)},
        "prefix": {"-1": -1, "2.5": 2.5, "too many": L + 1, "text": "1", "NaN": NAN},
        "backend": words(),
        "queries": words(),
    }
    yield from wrong_values("cluster_attention", partial(run, q, k, v), bad)
    kinds = {**only(COUNTS, "list"), "None": None, "ids of floats": torch.zeros(B, H, L), "few ids": torch.zeros(3)}
    kinds |= {"negative ids": -torch.ones(B, H, L, dtype=torch.long)}
    for kind, x in kinds.items():
        yield Wrong(f"clusters {kind}", ("clusters",), partial(cumulant.cluster_attention, q, k, v, clusters=x))
    yield from wrong_values("cluster_scores", partial(cumulant.cluster_scores, q, k, clusters=4), CALL)
    sizes = {"size": COUNTS, "keep": only(COUNTS, "0"), "recent": only(COUNTS, "0")}
    yield from wrong_values("Blocks", lambda **kw: Blocks(**{"size": 4, **kw}), sizes)
    kmeans = {"count": COUNTS, "seed": only(COUNTS, "0", "-1"), "metric": words(), "start": words()}
    yield from wrong_values("KMeans", lambda **kw: KMeans(**{"count": 4, **kw}), kmeans)


def moments() -> Iterator[Wrong]:
    k, v = tokens(), tokens()
    for name in ("key", "value"):
        x = {"key": k, "value": v}[name]
        bad = OBJECTS | {
            "integers": x.long(),
            "bool": x > 0,
            "complex": x * 1j,
            "scalar": x[0, 0, 0, 0],
            "1-D": x[0, 0, 0],
        }
        bad |= {
            "other batch": x[:1],
            "a token less": x[..., :-1, :],
            "other heads": x[:, :3],
            "other dtype": x.double(),
        }
        for kind, one in bad.items():
            call = partial(Moments.of, **{"key": k, "value": v, name: one})
            yield Wrong(f"Moments.of: {name} {kind}", ("key", "value"), call)
    weights = {kind: x for kind, x in MASKS.items() if kind not in ("other device", "a column", "by query")}
    per_head = {kind: x.unsqueeze(1) if isinstance(x, Tensor) and x.ndim == 2 else x for kind, x in weights.items()}
    yield from wrong_values("Moments.of", partial(Moments.of, k, v), {"key_mask": per_head})
    yield from wrong_values("Moments.of", partial(Moments.of, k, v), {"order": FORM["order"], "full": FLAGS})
    whole = Moments.of(k, v)
    others: dict[str, Any] = {
        "text": "x",
        "None": None,
        "order 2": Moments.of(k, v, order=2),
        "narrow keys": Moments.of(k[..., :1], v),
        "narrow values": Moments.of(k, v[..., :1]),
        "other batch": Moments.of(k[:1].repeat(3, 1, 1, 1), v[:1].repeat(3, 1, 1, 1)),
        "other dtype": Moments.of(k.double(), v.double()),
        "other device": whole.to("meta"),
    }
    more = Moments.of(torch.cat((k, k), -2), torch.cat((v, v), -2))
    for kind, one in others.items():
        yield Wrong(f"Moments.merge: {kind}", ("other", "moments"), partial(whole.merge, one))
        yield Wrong(f"Moments.remove: {kind}", ("other", "moments"), partial(whole.remove, one))
    yield Wrong("Moments.remove: more than there is", ("other", "moments"), partial(whole.remove, more))
    for kind, x in bad_tensors(tokens()).items():
        if kind not in ("2-D", "other dtype"):
            yield Wrong(f"Moments.apply: query {kind}", ("query",), partial(whole.apply, x))
    for kind, x in {
        "narrow": tokens(B, H, 3, 5),
        "other batch": tokens(3, H, 3, D),
        "heads": tokens(B, 3, 3, D),
    }.items():
        yield Wrong(f"Moments.apply: query {kind}", ("query",), partial(whole.apply, x))
    yield from wrong_values("Moments.apply", partial(whole.apply, tokens()), {"scale": SCALES})


def streams() -> Iterator[Wrong]:
    makers: dict[str, Callable[..., Any]] = {
        name: partial(zoo.get(name).stream, **more)
        for name in zoo.names()
        if zoo.get(name).stream is not None
        for more in [{"cosformer": {"max_len": 64}, "combiner": {"segment": 4}}.get(name, {})]
    }
    for name, make in makers.items():
        own = {option: OPTIONS[option] for option in own_options(zoo.get(name).stream) if option in OPTIONS}
        own |= {"max_len": only(OPTIONS["max_len"], "too small")} if "max_len" in own else {}  # only steps know
        yield from wrong_values(f"{name}.stream", make, {"scale": SCALES} | own)
        one = [tokens(B, H, 1, D) for _ in range(3)]
        parts = dict(zip(("query", "key", "value"), one, strict=True))
        for begun in (False, True):
            for part, x in parts.items():
                bad = {kind: y for kind, y in bad_tensors(x).items() if kind != "other dtype" or begun}
                bad |= {"other batch": x[:1], "other heads": x[:, :3], "two tokens": x.repeat(1, 1, 2, 1)}
                bad |= {"narrow": x[..., :3]} if part != "value" or begun else {}
                for kind, y in bad.items():
                    call = partial(_step, make, begun, parts, {part: y})
                    yield Wrong(f"{name}.step{' after others' * begun}: {part} {kind}", ("query", "key", "value"), call)
        if not hasattr(make(), "append") or name == "aaren":
            continue
        for part in ("key", "value"):
            x = tokens(B, H, 3, D)
            given = {"key": x, "value": x}
            bad = bad_tensors(x) | {"other batch": x[:1], "other heads": x[:, :2], "narrow": x[..., :3]}
            for kind, y in bad.items():
                call = partial(_append, make, parts, {**given, part: y})
                yield Wrong(f"{name}.append: {part} {kind}", ("key", "value"), call)
            both = {"key": bad_shapes("key", x)["other batch"], "value": bad_shapes("value", x)["other batch"]}
            yield Wrong(f"{name}.append: other batch of both", ("key", "value"), partial(_append, make, parts, both))
            heads = {"key": x[:, :1], "value": x[:, :1]}
            yield Wrong(f"{name}.append: one head of both", ("key", "value"), partial(_append, make, parts, heads))
    window = cumulant.SlidingWindow
    yield from wrong_values(
        "SlidingWindow", lambda **kw: window(**{"window": 4, **kw}), {"window": COUNTS, "full": FLAGS}
    )
    for part in ("key", "value"):
        x = tokens(B, H, 1, D)
        bad = only(bad_tensors(x), "2-D", "1-D") | {"other batch": x[:1], "other heads": x[:, :3], "narrow": x[..., :3]}
        for kind, y in bad.items():
            call = partial(
                _append, partial(window, 4), {"query": x, "key": x, "value": x}, {"key": x, "value": x, part: y}
            )
            yield Wrong(f"SlidingWindow.append: {part} {kind}", ("key", "value"), call)
    merged = {"tokens": COUNTS, "softcap": {**ABOVE_0, "tensor": torch.ones(2)}, "prior": SMALL, "scale": SCALES}
    merged |= {name: only(COUNTS, *lacking) for name, lacking in MERGED.items()}
    yield from wrong_values("MergedStream", lambda **kw: MergedStream(**{"tokens": 64, **kw}), merged)
    new = {part: tokens(B, H, L, D) for part in ("query", "key", "value")}
    few: dict[str, Any] = {"tokens": 64, "chunk": 2, "sample": 2, "span": 8}
    for begun in (False, True):
        bad_steps = {part: {"double": x.double(), "no heads": x[:, :0], **bad_tensors(x)} for part, x in new.items()}
        for name, values in {**bad_steps, "weights": only(MASKS, "a column")}.items():
            for kind, x in values.items():
                call = partial(_merged_step, few, begun, new, {name: x})
                yield Wrong(f"MergedStream.step{' after others' * begun}: {name} {kind}", (name, "query", "key"), call)
    yield Wrong("SlidingWindow.apply: nothing yet", ("append",), partial(window(4).apply, tokens()))


def _step(make: Callable[..., Any], begun: bool, good: dict[str, Tensor], bad: dict[str, Any]) -> Any:
    stream = make()
    if begun:
        stream.step(**good)
    try:
        return stream.step(**{**good, **bad})
    except (ValueError, TypeError) as error:
        _left_alone(stream, make, begun, good, error)
        raise


def _left_alone(stream: Any, make: Callable[..., Any], begun: bool, good: dict[str, Tensor], error: Exception) -> None:
    """A step that failed must have kept nothing: the next one answers as if it had not been."""
    fresh = make()
    if begun:
        fresh.step(**good)
    if not torch.equal(stream.step(**good), fresh.step(**good)):
        raise RuntimeError("the failed step kept its token") from error


def _merged_step(few: dict[str, Any], begun: bool, good: dict[str, Tensor], bad: dict[str, Any]) -> Any:
    stream = MergedStream(**few)
    if begun:
        stream.step(**good)
    return stream.step(**{**good, **bad})


def _append(make: Callable[..., Any], first: dict[str, Tensor], bad: dict[str, Any]) -> Any:
    stream = make()
    stream.append(first["key"], first["value"])
    return stream.append(**bad)


def mechanisms() -> Iterator[Wrong]:
    for name in zoo.names():
        mechanism = zoo.get(name)
        causal = {"is_causal": not mechanism.noncausal}
        yield from wrong_tensors(name, partial(mechanism, **causal), ("query", "key", "value"))
        good = {"query": tokens(), "key": tokens(), "value": tokens(), **causal}
        bad: dict[str, Mapping[str, Any]] = {"scale": SCALES, "is_causal": FLAGS, "enable_gqa": FLAGS}
        bad |= {"key_mask": MASKS} if mechanism.key_mask else {}
        bad |= {"query_mask": MASKS} if mechanism.wants_query_mask and not name.startswith("cumulant") else {}
        if mechanism.wants_grid:
            bad |= {"grid": {"other size": (3, 3), "text": "4x4", "1-D": (16,), "floats": (4.0, 4.0), "number": 16}}
            bad |= {"prefix": {"-1": -1, "2.5": 2.5, "too many": L + 1, "text": "1"}}
        bad |= {"dropout_p": {"2": 2.0, "-1": -1.0, "text": "x", "NaN": NAN}} if mechanism.dropout else {}
        bad |= {option: OPTIONS[option] for option in mechanism.function_options if option in OPTIONS}
        bad |= {"nonsense": {"number": 3}}
        yield from wrong_values(name, lambda mechanism=mechanism, good=good, **kw: mechanism(**good | kw), bad)
        if mechanism.scores is not None:
            pair = {key: x for key, x in good.items() if key != "value"}
            run = lambda mechanism=mechanism, pair=pair, **kw: mechanism.scores(**pair | kw)  # noqa: E731
            yield from wrong_values(f"{name}.scores", run, {"scale": SCALES, "nonsense": {"number": 3}})
        build = lambda mechanism=mechanism, **kw: mechanism.build(32, 4, grid_size=(4, 4), **kw)  # noqa: E731
        own = {option: OPTIONS[option] for option in mechanism.options if option in OPTIONS and mechanism.module}
        own |= {"tree": only(OPTIONS["tree"], "few")} if "tree" in own else {}  # only a call knows how many tokens
        yield from wrong_values(f"{name}.build", build, own | {"nonsense": {"number": 3}})


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


def layers() -> Iterator[Wrong]:
    C = 32
    made: dict[str, Mapping[str, Any]] = {
        "dim": {**COUNTS, "no multiple": 30, "None": None},
        "num_heads": {**COUNTS, "no divisor": 5, "None": None},
        "num_kv_heads": {**only(COUNTS, "True"), "3": 3},
        "attn_drop": {"2": 2.0, "-1": -1.0, "NaN": NAN, "text": "x"},
        "proj_drop": {"2": 2.0, "-1": -1.0, "NaN": NAN, "text": "x"},
        "attention": {**words(), "None": None},
        "attention_options": {"unknown": {"nonsense": 1}, "text": "x", "list": ["full"]},
        "v_conv": {"2": 2, "text": "x", "-1": -1},
        "gate": words(),
        "temperature": words(),
        "grid_size": {"text": "4x4", "1-D": (16,), "number": 16, "0": (0, 4)},
        "prefix": {"-1": -1, "2.5": 2.5, "text": "x"},
        "nonsense": {"number": 3},
        "v_conv_init": words(),
    }
    for name in nn.layers():
        grid = (2, 2, 4) if nn.get_layer(name).needs_grid else (4, 4)

        def build(name: str = name, grid: Any = grid, **kw: Any) -> Any:
            extra = {"v_conv": 3} if "v_conv_init" in kw else {}
            return nn.create_layer(name, **{"dim": C, "num_heads": 4, "grid_size": grid, **extra, **kw})

        plain = name in ("multihead", "axial")  # others have more to say about their heads and extras
        own_rules = {"v_conv_init", "num_kv_heads"}
        kept = {arg: x if plain else only(x, "no multiple", "no divisor") for arg, x in made.items()}
        kept = {arg: x for arg, x in kept.items() if plain or arg not in own_rules}
        yield from wrong_values(f"layer {name}", build, kept, ("option",))
        x, layer = tokens(B, L, C), build()
        bad = OBJECTS | {
            "narrow": x[..., :7],
            "1-D": x[0, 0],
            "integers": x.long(),
            "complex": x * 1j,
            "double": x.double(),
        }
        for kind, one in bad.items():
            yield Wrong(f"layer {name}: x {kind}", ("x",), partial(layer, one))
        calls: dict[str, Mapping[str, Any]] = {"attn_mask": only(MASKS, "by query"), "is_causal": FLAGS}
        if nn.get_layer(name).needs_grid:
            calls |= {"grid": {"other size": (3, 3), "text": "4x4", "number": 16}}
        if nn.get_layer(name).key_mask:
            yield from wrong_values(f"layer {name}", partial(layer, x), calls)
        if nn.get_layer(name).cross:
            others = {"narrow": x[..., :7], "text": "x", "integers": x.long(), "other batch": x[:1].repeat(3, 1, 1)}
            yield from wrong_values(f"layer {name}", partial(layer, x), {"context": others}, ("leading dimensions",))
    cumulants = partial(nn.CumulantAttention, C, 4)
    own = {"order": {**COUNTS, "4": 4}, "fold": words(), "full": FLAGS, "normalization": words(), "nonsense": {"1": 1}}
    yield from wrong_values("CumulantAttention", cumulants, own)
    x = tokens(B, L, C)
    for fold in (True, False):
        layer = cumulants(order=2, fold=fold)
        bad = OBJECTS | {"narrow": x[..., :7], "1-D": x[0, 0], "integers": x.long(), "double": x.double()}
        for kind, one in bad.items():
            yield Wrong(f"CumulantAttention fold={fold}: x {kind}", ("x",), partial(layer, one))
        masks = {"attn_mask": MASKS, "is_causal": FLAGS}
        yield from wrong_values(f"CumulantAttention fold={fold}", partial(layer, x), masks)
        packed = partial(layer.forward_packed, x[0])
        at = {
            "falling": torch.tensor([0, 9, 3]),
            "text": "x",
            "floats": torch.tensor([0.0, 16.0]),
            "short": torch.tensor([0, 9]),
        }
        yield from wrong_values(f"CumulantAttention fold={fold} packed", packed, {"cu_seq": at})


def models() -> Iterator[Wrong]:
    made: dict[str, Mapping[str, Any]] = {
        "attention": {**words(), "None": None, "few": ["softmax"] * 2, "not words": [1, 2, 3, 4]},
        "layer": {"text": "nonsense", "number": 3},
        "num_classes": {"-1": -1, "2.5": 2.5, "text": "x"},
        "img_size": {"9": 9, "0": 0, "-8": -8, "text": "x", "3 sides": (8, 8, 8)},
        "patch_size": {"3": 3, "0": 0, "-1": -1, "text": "x", "2.5": 2.5},
        "depth": COUNTS,
        "num_heads": {**COUNTS, "5": 5},
        "embed_dim": COUNTS,
        "pool": {**words(), "None": None},
        "drop_path": {"1": 1.0, "-1": -1.0, "NaN": NAN, "text": "x"},
        "gelu": words(),
        "attention_options": {"unknown": {"nonsense": 1}},
        "attention_extras": {"unknown": {"nonsense": 1}},
        "nonsense": {"number": 3},
        "mlp_ratio": {"0": 0.0, "-1": -1.0, "NaN": NAN, "text": "x"},
        "in_chans": COUNTS,
        "attn_drop": {"2": 2.0, "text": "x"},
        "drop_rate": {"2": 2.0, "-1": -1.0, "text": "x", "NaN": NAN},
        "is_causal": SWITCH,
        "init_std": {"-1": -1.0, "NaN": NAN, "text": "x"},
    }
    image = partial(cumulant.create_model, "vit_nano_patch2_8")
    yield from wrong_values("create_model", image, made, ("option", "extra", "image size", "patch size", "layer"))
    video = partial(cumulant.create_model, "vivit_nano_patch4x2_16")
    some = {
        "variant": {"5": 5, "text": "x"},
        "frames": {**COUNTS, "7": 7},
        "tubelet": {"text": "x", "2-D": (2, 2), "0": (0, 4, 4)},
    }
    some |= {"tubelet_init": words(), "axis_order": words(), "drop_path_style": words(), "nonsense": {"number": 3}}
    yield from wrong_values("create_model video", video, some)
    x = tokens(2, 1, 8, 8)
    bad = OBJECTS | {"3-D": x[0], "channels": tokens(2, 3, 8, 8), "odd": tokens(2, 1, 9, 9), "integers": x.long()}
    for kind, one in bad.items():
        yield Wrong(f"ViT: images {kind}", ("images", "image"), partial(image(), one))
    for kind, one in (
        OBJECTS | {"4-D": x, "channels": tokens(2, 3, 8, 16, 16), "odd": tokens(2, 1, 7, 16, 16)}
    ).items():
        yield Wrong(f"ViViT: clips {kind}", ("clips", "clip"), partial(video(), one))
    for kind, name in {"text": "nonsense", "None": None, "number": 3}.items():
        yield Wrong(f"create_model: name {kind}", ("model", "name"), partial(cumulant.create_model, name))
        yield Wrong(f"zoo.get: name {kind}", ("mechanism", "name"), partial(zoo.get, name))
        yield Wrong(f"create_layer: name {kind}", ("layer", "name", "mechanism"), partial(nn.create_layer, name, 32, 4))


def kinds() -> Iterator[Wrong]:
    """Options of another kind than their annotation says: a word for a flag, a flag for a number."""
    flags, numbers, counts = FLAGS, {**only(SCALES, "inf", "-inf"), "None": None}, only(COUNTS, "0", "-1")
    x, some = tokens(B, L, 32), {"qkv_bias": flags, "proj_bias": flags, "qk_norm": flags, "scale_norm": flags}
    build = partial(nn.create_layer, "multihead", 32, 4)
    own = {"norm_layer": words(), "v_conv": {"2.5": 2.5, "None": None}, "rotary": only(numbers, "True")}
    yield from wrong_values("create_layer", build, {**some, **own, "attention_options": {"numbers": {3: 4}}})
    for name, bad in {
        "moh": {"top": counts, "balance": numbers | {"inf": INF}},
        "complexformer": {"places": flags, "base": numbers | {"0": 0.0, "inf": INF}},
        "lama": {"bounded": flags, "sharpness": numbers | {"-1": -1.0}, "wide_start": flags, "diversity": numbers},
        "gda": {"ratio": {**counts, "-1": -1}, "pairs": counts},
        "ia_red2": {"threshold": numbers, "sparse": words(), "interpreter_heads": {**counts, "0": 0}},
        "rcmha": {"relative": flags, "convolve": flags, "carry_query": flags},
        "sparsifiner": {"keep": numbers, "block": counts, "signed_basis": flags, "reduce_c": counts},
        "dual_stream": {"mix_qk": flags, "alpha": numbers},
        "marro": {"legacy_view": flags, "block_drop": numbers},
    }.items():
        yield from wrong_values(f"create_layer {name}", partial(nn.create_layer, name, 32, 4), bad)
        if nn.get_layer(name).ragged:
            layer: Any = nn.create_layer(name, 32, 4)
            packed = OBJECTS | {"integers": x[0].long(), "sparse": x[0].to_sparse(), "nested": nested(3, 4), "3-D": x}
            run = partial(layer.forward_packed, cu_seq=torch.tensor([0, 5, L]))
            yield from wrong_values(f"{name}.forward_packed", run, {"x": packed})
    for name in ("multihead", "rcmha"):
        steps = {"other batch": x[:1, :1], "double": x[:, :1].double(), "2-D": x[:, 0], "text": "x", "None": None}
        for kind, one in steps.items():
            yield Wrong(f"{name}, token by token: {kind}", ("x",), partial(_layer_step, name, x[:, :1], one))
    image = partial(cumulant.create_model, "vit_nano_patch2_8")
    made = {"qkv_bias": flags, "qk_norm": flags, "distilled": flags, "features_only": flags, "layer": {"3": 3}}
    yield from wrong_values("create_model", image, {**made, "num_classes": counts, "drop_path": numbers})
    recipe = {"epochs": counts, "lr": numbers, "compile": flags, "workers": counts, "ema": numbers, "data": {"3": 3}}
    recipe |= {"model_options": {"text": "a=1"}, "augmentation": {"text": "x"}, "std": {"0": (0.0,) * 3, "text": "x"}}
    yield from wrong_values("TrainRecipe", TrainRecipe, {**recipe, "mean": {"NaN": (NAN,) * 3, "number": 0.5}})
    distilling = {"epochs": counts, "warmup": numbers, "temperature": numbers}
    yield from wrong_values("DistillRecipe", DistillRecipe, distilling)
    model = image(num_classes=3).eval()
    with explain.capture(model, queries="all") as captured:
        model(tokens(2, 1, 8, 8))
    good: dict[str, Any] = {"maps": captured.maps(0), "tokens": captured.tokens}
    shown = {"sign": words(), "metric": words(), "axes": words(), "maps": OBJECTS, "tokens": OBJECTS}
    yield from wrong_values("mean_distance", lambda **kw: explain.mean_distance(**{**good, **kw}), shown)
    yield from wrong_values("entropy", explain.entropy, {"maps": OBJECTS})
    yield from wrong_values("rollout", partial(explain.rollout, captured), {"sign": words(), "residual": numbers})
    convert = partial(cumulant.convert, example=tokens(2, 1, 8, 8))
    asked = {"force": flags, "heads": flags, "batches": counts, "budget": only(numbers, "None"), "attention": {"3": 3}}
    yield from wrong_values("convert", lambda **kw: convert(image(num_classes=3), **kw), asked)


def _layer_step(name: str, good: Tensor, bad: Any) -> Any:
    layer, claimed = nn.create_layer(name, 32, 4).eval(), nn.get_layer(name).streaming
    stream, fresh = (stream_of(layer, claimed) for _ in range(2))
    stream.step(good)
    fresh.step(good)
    try:
        return stream.step(bad)
    except (ValueError, TypeError) as error:
        if not torch.equal(stream.step(good), fresh.step(good)):
            raise RuntimeError("the failed step kept its token") from error
        raise


PARTS = (attention, varlen, clusters, moments, streams, mechanisms, layers, models, kinds)


def verdict(wrong: Wrong) -> str | None:
    """What is not as it should be with a call, or None."""
    try:
        out = wrong.call()
    except (ValueError, TypeError) as error:
        said = str(error)
        if any(name in said for name in wrong.names) and "unexpected keyword" not in said.replace("nonsense", ""):
            return None
        if "unexpected keyword" in said and "nonsense" in wrong.names:
            return None  # Python names it itself
        return f"{type(error).__name__} that names none of {', '.join(wrong.names)}: {said.splitlines()[0][:110]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    return f"returned {tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__}"


def main(chosen: list[str]) -> int:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    made: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    for part in PARTS:
        if chosen and not any(word in part.__name__ for word in chosen):
            continue
        for wrong in part():
            made[part.__name__] += 1
            said = verdict(wrong)
            if said is not None:
                bad[part.__name__] += 1
                print(f"{wrong.what} -> {said}", flush=True)
    print(f"{sum(made.values())} wrong calls, {sum(bad.values())} not answered as they should be")
    print(", ".join(f"{name} {bad[name]} of {count}" for name, count in made.items()))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
