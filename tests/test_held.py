"""Streams and moments take in only what is like what they hold, and a step that fails leaves nothing behind."""

import pytest
import torch

from cumulant import Moments, SlidingWindow, Stream, attention, scores, zoo

OPTIONS = {"cosformer": {"max_len": 16}, "combiner": {"segment": 3}}
STREAMS = [name for name in zoo.names() if zoo.get(name).stream is not None]


def tokens(*shape, seed=0):
    return torch.randn(3, *shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).unbind()


def row(x, t):
    return x[..., t : t + 1, :]


@pytest.mark.parametrize("scale", [None, 0.7])
@pytest.mark.parametrize("lead", [(), (2,), (2, 3)])
@pytest.mark.parametrize("name", STREAMS)
def test_a_stream_takes_any_leading_dimensions_and_a_scale(name, lead, scale):
    q, k, v = tokens(*lead, 2, 6, 4)
    options = OPTIONS.get(name, {})
    stream = zoo.get(name).stream(**options, scale=scale)
    rows = torch.cat([stream.step(row(q, t), row(k, t), row(v, t)) for t in range(6)], -2)
    torch.testing.assert_close(rows, zoo.get(name)(q, k, v, is_causal=True, scale=scale, **options))


@pytest.mark.parametrize("name", STREAMS)
def test_a_failed_step_keeps_nothing(name):
    q, k, v = tokens(2, 2, 1, 4)
    stream, other = (zoo.get(name).stream(**OPTIONS.get(name, {})) for _ in range(2))
    for one in (stream, other):
        one.step(q, k, v)
    for wrong in ((q[:1], k[:1], v[:1]), (q[..., :3], k, v), (q.long(), k, v), (q, k[:, :1], v[:, :1].float())):
        with pytest.raises((ValueError, TypeError), match=r"query|key|value"):
            stream.step(*wrong)
    torch.testing.assert_close(stream.step(q, k, v), other.step(q, k, v), rtol=0, atol=0)


@pytest.mark.parametrize(
    "make", [Stream, lambda: SlidingWindow(8), zoo.get("linear").stream, zoo.get("cluster4").stream]
)
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda x: x[:1], r"key must be as the tokens before it, \(2, 2, tokens, 4\), got \(1, 2, 3, 4\)"),
        (lambda x: x[:, :1], r"as the tokens before it, \(2, 2, tokens, 4\), got \(2, 1, 3, 4\)"),
        (lambda x: x[..., :3], "as wide as those before, 4 and 4, got 3 and 3"),
        (lambda x: x.float(), "kept in torch.float64 on cpu, got torch.float32"),
        (lambda x: x.long(), "key must be floating point"),
    ],
)
def test_tokens_that_follow_must_be_like_those_before(make, change, said):
    _, k, v = tokens(2, 2, 3, 4)
    stream = make()
    stream.append(k, v)
    with pytest.raises((ValueError, TypeError), match=said):
        stream.append(change(k), change(v))


def test_a_prompt_of_one_sequence_goes_on_as_several():
    q, k, v = tokens(3, 2, 1, 4)
    _, prompt, values = tokens(1, 2, 5, 4, seed=1)
    stream = Stream()
    stream.append(prompt, values)
    whole = [torch.cat((x.expand(3, -1, -1, -1), y), -2) for x, y in ((prompt, k), (values, v))]
    torch.testing.assert_close(stream.step(q, k, v), attention(q, *whole))


K, V = tokens(2, 4, 3)[:2]
WHOLE = Moments.of(K, V)


def weighed(weights):
    return Moments.of(K, V, key_mask=weights)


@pytest.mark.parametrize(
    ("call", "kind", "said"),
    [
        (lambda: weighed(-torch.ones(2, 4)), ValueError, "key_mask weights must be finite and not negative"),
        (lambda: weighed(torch.full((2, 4), float("nan"))), ValueError, "key_mask weights must be finite"),
        (lambda: weighed(torch.ones(2, 4, dtype=torch.long)), TypeError, "key_mask must be bool or floating"),
        (lambda: weighed(torch.ones(2, 5)), ValueError, r"key_mask must have shape \(2, 4\)"),
        (lambda: Moments.of(K.long(), V.long()), TypeError, "key must be floating point"),
        (lambda: Moments.of(K, V[:1]), ValueError, "key and value must have the same tokens"),
        (lambda: WHOLE.merge(Moments.of(K[..., :1], V)), ValueError, r"moments of widths \(3, 3\), got \(1, 3\)"),
        (lambda: WHOLE.merge(Moments.of(K.float(), V.float())), TypeError, "moments must share dtype and device"),
        (lambda: WHOLE.remove(WHOLE.merge(WHOLE)), ValueError, "other holds more than these moments of weight 4"),
        (lambda: WHOLE.apply(K.long()), TypeError, "query must be floating point"),
        (lambda: WHOLE.apply(K, scale=float("nan")), ValueError, "scale must be finite, got nan"),
        (lambda: WHOLE.apply(K[..., :2]), ValueError, r"query must have shape \(2, queries, 3\), got \(2, 4, 2\)"),
    ],
)  # fmt: skip
def test_moments_say_what_does_not_belong_to_them(call, kind, said):
    with pytest.raises(kind, match=said):
        call()


@pytest.mark.parametrize("positions", [torch.arange(4).float(), torch.full((4,), float("nan")), [0.5] * 4, ["a"] * 4])
def test_places_of_queries_are_whole_numbers(positions):
    q, k, _ = tokens(1, 2, 4, 3)
    with pytest.raises(TypeError, match="positions must be whole numbers"):
        scores(q, k, is_causal=True, positions=positions)


def test_places_of_queries_are_not_negative():
    q, k, _ = tokens(1, 2, 4, 3)
    with pytest.raises(ValueError, match="positions must not be negative, got -2"):
        scores(q, k, is_causal=True, positions=torch.arange(4) - 2)
