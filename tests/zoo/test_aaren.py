"""Aaren against softmax attention of one query over every prefix, and the algebra of its triples."""

import math

import pytest
import torch
from random_tokens import draw
from torch import nn

from cumulant.zoo import aaren
from cumulant.zoo.aaren import AarenAttention, AarenStream, Triple, scan

AAREN = aaren.AAREN


def prefix_softmax(query, key, value, *, is_causal=True, mask=None):
    """Row by row: softmax of the first query over the keys up to the row. Shares no code with the scan."""
    heads, rows = query.shape[-3], query.shape[-2]
    key, value = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (key, value))
    out = query.new_zeros(*query.shape[:-1], value.shape[-1])
    weights = query.new_zeros(*query.shape[:-1], key.shape[-2])
    mask = torch.ones(key.shape[0], key.shape[-2]) if mask is None else mask
    for b in range(query.shape[0]):
        for h in range(heads):
            for t in range(rows):
                keys = [j for j in range(key.shape[-2]) if (not is_causal or j <= t) and mask[b, j] != 0]
                if not keys:
                    continue
                s = key[b, h, keys] @ query[b, h, 0] / math.sqrt(query.shape[-1]) + mask[b, keys].double().log()
                p = s.softmax(0)
                out[b, h, t] = p @ value[b, h, keys]
                weights[b, h, t, keys] = p
    return out, weights


MASKS = {
    "none": None,
    "bool": torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1], [1] * 11]).bool(),
    "weights": torch.arange(22.0, dtype=torch.float64).reshape(2, 11).remainder(4),
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("queries", [5, 11, 17])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_the_scan_is_softmax_over_every_prefix(mask, is_causal, queries, key_heads):
    query, key, value = draw((2, 4, queries, 3), (2, key_heads, 11, 3), (2, key_heads, 11, 6))
    output, weights = prefix_softmax(query, key, value, is_causal=is_causal, mask=MASKS[mask])
    shared = {"key_mask": MASKS[mask], "is_causal": is_causal, "enable_gqa": key_heads != 4}
    torch.testing.assert_close(AAREN(query, key, value, chunk=3, **shared), output, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(AAREN.scores(query, key, **shared), weights, rtol=1e-12, atol=1e-12)


def test_gradients_are_those_of_causal_softmax_attention_with_equal_queries():
    query, key, value = draw((2, 2, 1, 3), (2, 2, 37, 3), (2, 2, 37, 5))
    (cotangent,) = draw((2, 2, 37, 5), seed=1)

    def gradients(function):
        leaves = [x.clone().requires_grad_() for x in (query, key, value)]
        out = function(leaves[0].expand(2, 2, 37, 3), *leaves[1:])
        return torch.autograd.grad(out, leaves, cotangent)

    softmax = gradients(lambda *x: nn.functional.scaled_dot_product_attention(*x, is_causal=True))
    for chunk in (2, 5, 64):
        ours = gradients(lambda *x, chunk=chunk: AAREN(*x, is_causal=True, chunk=chunk))
        for got, wanted in zip(ours, softmax, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-11, atol=1e-12)


@pytest.mark.parametrize("length", [1, 2, 3, 64, 65, 200])
@pytest.mark.parametrize("chunk", [2, 7, 64])
def test_neither_length_nor_chunk_needs_to_be_a_power_of_two(length, chunk):
    query, key, value = draw((1, 1, length, 3), (1, 1, length, 3), (1, 1, length, 2))
    wanted = nn.functional.scaled_dot_product_attention(query[..., :1, :].expand_as(query), key, value, is_causal=True)
    torch.testing.assert_close(AAREN(query, key, value, is_causal=True, chunk=chunk), wanted, rtol=1e-12, atol=1e-12)


def triples(count, seed=0):
    m, u, w = draw((count, 4), (count, 4), (count, 4, 3), seed=seed)
    return [Triple(30 * a, b.abs() + 1, c) for a, b, c in zip(m, u, w, strict=True)]


def same(a, b):
    torch.testing.assert_close(a.m, b.m)
    torch.testing.assert_close(a.u, b.u)
    torch.testing.assert_close(a.w, b.w)


def test_merging_is_associative_and_commutative():
    a, b, c, d = triples(4)
    same(a.merge(b).merge(c).merge(d), a.merge(b.merge(c.merge(d))))
    same(a.merge(b).merge(c.merge(d)), a.merge(b.merge(c)).merge(d))
    same(a.merge(b), b.merge(a))


def test_the_empty_set_is_the_identity_also_for_itself():
    (a,) = triples(1)
    empty = Triple(torch.full_like(a.m, -math.inf), torch.zeros_like(a.u), torch.zeros_like(a.w))
    same(a.merge(empty), a)
    same(empty.merge(a), a)
    same(empty.merge(empty), empty)
    assert torch.equal(empty.read(), torch.zeros_like(a.w))


@pytest.mark.parametrize("sizes", [[1] * 13, [13], [4, 1, 8], [12, 1]])
def test_streaming_in_any_split_is_the_scan(sizes):
    query, key, value = draw((2, 4, 13, 3), (2, 4, 13, 3), (2, 4, 13, 5))
    wanted = AAREN(query, key, value, is_causal=True)
    stream, at = AarenStream(), 0
    for size in sizes:
        stream.append(
            query[..., at : at + size - 1, :], key[..., at : at + size - 1, :], value[..., at : at + size - 1, :]
        )
        at += size
        out = stream.step(query[..., :1, :], key[..., at - 1 : at, :], value[..., at - 1 : at, :])
        torch.testing.assert_close(out, wanted[..., at - 1 : at, :], rtol=1e-12, atol=1e-12)
    assert sum(x.numel() for x in stream.state) == 8 * (3 + 1 + 1 + 5)


def test_gradients_flow_through_the_stream():
    query, key, value = (x.requires_grad_() for x in draw((1, 1, 4, 2), (1, 1, 4, 2), (1, 1, 4, 2)))
    stream = AarenStream()
    rows = [stream.step(*(x[..., t : t + 1, :] for x in (query, key, value))) for t in range(4)]
    streamed = torch.autograd.grad(torch.cat(rows, -2).square().sum(), (query, key, value))
    full = torch.autograd.grad(AAREN(query, key, value, is_causal=True).square().sum(), (query, key, value))
    for a, b in zip(streamed, full, strict=True):
        torch.testing.assert_close(a, b)


@pytest.mark.parametrize("size", [1e4, -1e4])
def test_huge_scores_of_both_signs_stay_finite_in_float32(size):
    query, key, value = draw((1, 1, 70, 2), (1, 1, 70, 2), (1, 1, 70, 3), dtype=torch.float32)
    query[..., 0, :] = abs(size)
    key[..., :20, :] = size / abs(size) * key[..., :20, :].abs()
    inputs = [x.requires_grad_() for x in (query, key, value)]
    out = AAREN(*inputs, is_causal=True, chunk=8)
    exact, _ = prefix_softmax(query.double(), key.double(), value.double())
    assert out.isfinite().all()
    # Scores of 1e4 carry a rounding of 1e-3 in float32, which the weights inherit.
    torch.testing.assert_close(out.double(), exact, rtol=2e-2, atol=2e-2)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_a_stream_of_very_negative_scores_does_not_underflow():
    query, key = torch.full((1, 1, 1, 1), 1.0), torch.full((1, 1, 3, 1), -200.0)
    value = torch.tensor([1.0, 2.0, 6.0]).reshape(1, 1, 3, 1)
    stream = AarenStream()
    out = [stream.step(query, key[..., t : t + 1, :], value[..., t : t + 1, :]).item() for t in range(3)]
    assert out == [1.0, 1.5, 3.0]


def test_adding_a_constant_to_all_scores_changes_nothing():
    s, value = draw((2, 30), (2, 30, 3))
    torch.testing.assert_close(
        scan(Triple.leaf(s + 77, value), chunk=4).read(), scan(Triple.leaf(s, value), chunk=4).read()
    )


def test_the_order_within_a_prefix_does_not_matter_at_its_end():
    query, key, value = draw((1, 1, 9, 3), (1, 1, 9, 3), (1, 1, 9, 3))
    order = [3, 0, 5, 1, 4, 2, 6, 7, 8]
    out = AAREN(query, key, value, is_causal=True)
    mixed = AAREN(query, key[..., order, :], value[..., order, :], is_causal=True)
    torch.testing.assert_close(mixed[..., 5:, :], out[..., 5:, :])
    assert not torch.allclose(mixed[..., :5, :], out[..., :5, :])


def test_outputs_are_means_of_the_values():
    query, key, value = draw((1, 2, 40, 3), (1, 2, 40, 3), (1, 2, 40, 4))
    ones = AAREN(query, key, torch.ones_like(value), is_causal=True, chunk=8)
    torch.testing.assert_close(ones, torch.ones_like(ones))
    out = AAREN(query, key, value, is_causal=True, chunk=8)
    assert (out <= value.cummax(-2).values + 1e-12).all()
    assert (out >= value.cummin(-2).values - 1e-12).all()


def test_two_keys_keep_the_ratio_of_their_weights():
    query, key = draw((1, 1, 9, 3), (1, 1, 9, 3))
    weights = AAREN.scores(query, key, is_causal=True)[0, 0]
    ratios = weights[4:, 4] / weights[4:, 1]
    torch.testing.assert_close(ratios, ratios[:1].expand(5))


def test_without_a_causal_mask_every_row_is_the_pooled_sequence():
    query, key, value = draw((1, 2, 7, 3), (1, 2, 9, 3), (1, 2, 9, 4))
    out = AAREN(query, key, value)
    torch.testing.assert_close(out, out[..., :1, :].expand_as(out))
    same_query = query[..., :1, :].expand(1, 2, 9, 3)
    torch.testing.assert_close(out[..., 0, :], AAREN(same_query, key, value, is_causal=True)[..., -1, :])


@pytest.mark.parametrize("is_causal", [False, True])
def test_masked_tokens_do_not_matter_whatever_they_hold(is_causal):
    query, key, value = draw((2, 2, 9, 4), (2, 2, 9, 4), (2, 2, 9, 4))
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[:, [0, 4]] = False
    kept = mask[0]
    removed = AAREN(*(x[..., kept, :] for x in (query, key, value)), is_causal=is_causal)
    for x in (query, key, value):
        x[..., ~kept, :] = float("nan")
    inputs = [x.requires_grad_() for x in (query, key, value)]
    out = AAREN(*inputs, key_mask=mask, query_mask=mask, is_causal=is_causal, chunk=2)
    torch.testing.assert_close(out[..., kept, :], removed)
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_a_masked_token_carries_the_previous_output_over_and_an_empty_prefix_gives_zero():
    query, key, value = draw((1, 1, 4, 2), (1, 1, 4, 2), (1, 1, 4, 2))
    out = AAREN(query, key, value, key_mask=torch.tensor([[False, True, False, True]]), is_causal=True)
    assert torch.equal(out[..., 0, :], torch.zeros(1, 1, 2, dtype=out.dtype))
    assert torch.equal(out[..., 2, :], out[..., 1, :])


@pytest.mark.parametrize("detach", [True, False])
def test_gradients_of_the_scan_are_right_with_and_without_the_maxima(detach):
    s, value = (x.requires_grad_() for x in draw((1, 7), (1, 7, 2)))
    assert torch.autograd.gradcheck(lambda s, v: scan(Triple.leaf(s, v), chunk=3, detach=detach).read(), (s, value))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_keeps_float32_sums(dtype):
    query, key, value = draw((1, 1, 3000, 8), (1, 1, 3000, 8), (1, 1, 3000, 8), dtype=dtype)
    exact = AAREN(query.double(), key.double(), value.double(), is_causal=True)
    out = AAREN(query, key, value, is_causal=True)
    assert out.dtype == dtype
    assert (out.double() - exact).abs().max() <= torch.finfo(dtype).eps * exact.abs().max()


def test_the_layer_learns_one_query_and_ignores_those_of_the_tokens():
    layer = AarenAttention(8, 2, dtype=torch.float64)
    query, key, value = draw((2, 2, 6, 4), (2, 2, 6, 4), (2, 2, 6, 4))
    out = layer(query, key, value, is_causal=True)
    assert torch.equal(out, layer(query + 1, key, value, is_causal=True))
    torch.testing.assert_close(out, prefix_softmax(layer.query.expand(2, 2, 6, 4), key, value)[0])
    stream = layer.stream()
    rows = [stream.step(*(x[..., t : t + 1, :] for x in (query, key, value))) for t in range(6)]
    torch.testing.assert_close(torch.cat(rows, -2), out)
    out.sum().backward()
    assert layer.query.grad.abs().sum() > 0


def test_an_encoder_layer_of_width_512_grows_by_512_parameters():
    from cumulant.nn import MultiheadAttention

    rest = nn.Sequential(nn.Linear(512, 2048), nn.Linear(2048, 512), nn.LayerNorm(512), nn.LayerNorm(512))
    sizes = {
        name: sum(p.numel() for m in (MultiheadAttention(512, 8, attention=name), rest) for p in m.parameters())
        for name in ("softmax", "aaren")
    }
    assert sizes == {"softmax": 3_152_384, "aaren": 3_152_896}


def test_a_chunk_below_two_is_refused():
    with pytest.raises(ValueError, match="chunk must be at least 2, got 1"):
        AAREN(*draw((1, 1, 4, 8), (1, 1, 4, 8), (1, 1, 4, 8)), is_causal=True, chunk=1)
