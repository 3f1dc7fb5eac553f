"""Wrong calls of functions on tensors: attention, clusters, moments, streams and the mechanisms of the zoo."""

# mypy: disable-error-code="arg-type,misc,assignment"
from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cumulant
from cumulant import Moments, zoo
from cumulant.cluster import Blocks, KMeans, MergedStream
from cumulant.zoo.registry import own_options
from tools.wrong_values import (
    ABOVE_0,
    CALL,
    COUNTS,
    FLAGS,
    FORM,
    MASKS,
    NAN,
    OBJECTS,
    OPTIONS,
    SCALES,
    SMALL,
    B,
    D,
    H,
    L,
    Wrong,
    bad_shapes,
    bad_tensors,
    nested,
    only,
    tokens,
    words,
    wrong_tensors,
    wrong_values,
)

MERGED = {"sinks": ("0",), "recent": (), "chunk": (), "sample": (), "span": ()}  # counts, and those that are right


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
