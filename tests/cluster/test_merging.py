"""A stream in a fixed number of places: exact while all tokens have one, and near softmax when they have not."""

import pytest
import torch
import torch.nn.functional as F

from cumulant.cluster import MergedStream, merging
from cumulant.cluster.merging import merged

PARTS = ((0, 7), (7, 8), (8, 150), (150, 200))


def tokens(length=200, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return [torch.randn(2, heads, length, width, dtype=dtype) for heads, width in ((6, 8), (2, 8), (2, 5))]


def softmax(query, key, value):
    return F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)


def stepped(stream, query, key, value, parts=PARTS, weights=None):
    def part(x, at):
        return None if x is None else x[..., at, :] if x.ndim == 4 else x[:, at]

    rows = [stream.step(*(part(x, slice(a, b)) for x in (query, key, value, weights))) for a, b in parts]
    return torch.cat(rows, 2)


def test_while_every_token_has_a_place_the_rows_are_those_of_softmax():
    query, key, value = tokens()
    out = stepped(MergedStream(300), query, key, value)
    torch.testing.assert_close(out, softmax(query, key, value))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_logits_in_the_tens_lose_no_digits_in_16_bits(dtype):
    query, key, value = tokens(dtype=dtype)
    query = query * 12
    exact = softmax(*(x.double() for x in (query, key, value)))
    ours, plain = (
        (x.double() - exact).norm() for x in (stepped(MergedStream(300), query, key, value), softmax(query, key, value))
    )
    assert ours <= 2 * plain


def test_tokens_that_are_alike_merge_without_loss():
    """Ten keys and values, each twenty times: ten clusters say all."""
    query, key, value = tokens()
    key, value = (x[:, :, :10].repeat(1, 1, 20, 1) for x in (key, value))
    stream = MergedStream(64, sinks=0, recent=1, chunk=16, sample=8)
    torch.testing.assert_close(stepped(stream, query, key, value), softmax(query, key, value))
    assert stream.used < 60


def test_weights_and_sums_of_all_tokens_survive_every_merge():
    query, key, value = tokens()
    stream = MergedStream(80, chunk=16, sample=16)
    stepped(stream, query, key, value)
    k, v, w = (x[:, :, : stream.used] for x in stream.state[:3])
    torch.testing.assert_close(w.sum(-1), torch.full_like(w.sum(-1), 200))
    for mean, all_tokens in ((k, key), (v, value)):
        torch.testing.assert_close((w.unsqueeze(-1) * mean).sum(2), all_tokens.sum(2), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("parts", [((0, 200),), ((0, 1), (1, 200)), PARTS])
def test_the_numbers_held_never_exceed_those_of_so_many_tokens(parts):
    stream = MergedStream(90, chunk=16, sample=16)
    stepped(stream, *tokens(), parts)
    assert sum(x.numel() for x in stream.state) <= 2 * 2 * 90 * (8 + 5)
    assert stream.length == 200


@pytest.mark.parametrize("pairs", [1, 1 << 20])
def test_the_cheapest_pair_is_that_of_the_formula(pairs, monkeypatch):
    """However few pairs are met at once; a token that nobody looks at costs nothing."""
    monkeypatch.setattr(merging, "PAIRS", pairs)
    torch.manual_seed(0)
    logits, value = torch.randn(2, 3, 31, 7, dtype=torch.float64), torch.randn(2, 3, 31, 5, dtype=torch.float64)
    share = torch.rand(2, 3, 31, dtype=torch.float64)
    share[..., 4] = 0
    far, apart = (torch.cdist(x[:, :, ::2], x[:, :, 1::2]).square() for x in (logits, value))
    first, second = share[..., ::2, None], share[..., None, 1::2]
    cost = first * second / (first + second) * far * (apart + 0.3 * apart.mean((-2, -1), keepdim=True))
    least, partner = merging._cheapest(logits, value, share)
    torch.testing.assert_close(least, cost.amin(-1))
    assert (least[..., 2] == 0).all()
    assert torch.equal(partner[..., 3:], cost.argmin(-1)[..., 3:])


def test_a_token_that_queries_look_at_stays_itself():
    query, key, value = tokens()
    looked_at = query.unflatten(1, (2, 3)).mean((2, 3))
    key[:, :, 50] = 30 * looked_at / looked_at.norm(dim=-1, keepdim=True)
    query = query + 5 * looked_at.repeat_interleave(3, 1).unsqueeze(2) / looked_at.norm()
    ones, rows = torch.ones(2, 2, 200), query.unflatten(1, (2, 3)).flatten(2, 3)
    k, _, w, _ = merged(key, value, ones, ones, rows, 20)
    near = (k - key[:, :, 50:51]).norm(dim=-1).argmin(-1, keepdim=True)
    assert (w.gather(-1, near) == 1).all()


def test_merging_by_what_queries_see_is_closer_than_forgetting():
    query, key, value = tokens(dtype=torch.float32)
    exact = softmax(query, key, value)[:, :, -20:]
    out = stepped(MergedStream(80, chunk=16, sample=16), query, key, value)[:, :, -20:]
    window = softmax(query[:, :, -80:], key[:, :, -80:], value[:, :, -80:])[:, :, -20:]
    assert (out - exact).norm() < 0.7 * (window - exact).norm()


def test_absent_tokens_count_for_nothing():
    query, key, value = tokens()
    weights = torch.ones(2, 200)
    weights[:, :30] = 0
    out = stepped(MergedStream(300), query, key, value, weights=weights)
    torch.testing.assert_close(out[:, :, 30:], softmax(query[:, :, 30:], key[:, :, 30:], value[:, :, 30:]))
    assert (out[:, :, :30] == 0).all()


def test_capped_logits_are_those_of_softmax_over_capped_logits():
    query, key, value = tokens(60)
    logits = query @ key.repeat_interleave(3, 1).mT * 8**-0.5
    seen = torch.ones(60, 60, dtype=torch.bool).tril()
    exact = (0.7 * (logits / 0.7).tanh()).masked_fill(~seen, float("-inf")).softmax(-1) @ value.repeat_interleave(3, 1)
    out = stepped(MergedStream(300, softcap=0.7), query, key, value, ((0, 7), (7, 8), (8, 60)))
    torch.testing.assert_close(out, exact, rtol=1e-6, atol=1e-6)
    with pytest.raises(ValueError, match="softcap must be None or a number above 0, got 0"):
        MergedStream(300, softcap=0)


def test_what_leaves_no_place_for_clusters_is_said():
    query, key, value = tokens(10)
    with pytest.raises(ValueError, match=r"tokens=100 leaves no cluster beside sinks=4.*take more tokens"):
        MergedStream(100).step(query, key, value)
    with pytest.raises(ValueError, match="tokens must be at least 1"):
        MergedStream(0)
    with pytest.raises(ValueError, match="as many queries as keys"):
        MergedStream(300).step(query[:, :, :4], key, value)
