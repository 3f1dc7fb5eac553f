"""Masked tokens are absent tokens, packed sequences are a loop over them, and empty sequences are no special case."""

import pytest
import torch
from cases import PADDING_MOVES, calls, fixed, having, tokens

from cumulant import zoo
from cumulant.zoo.probes import own_way

KEPT = torch.tensor([[0, 1, 3, 4, 7, 8, 11], [0, 2, 3, 5, 6, 9, 12]])  # of 13 tokens, in two sequences


def kept(x, index=KEPT):
    """Rows `index` (B, n) of x (B, H, L, D)."""
    return x.gather(-2, index[:, None, :, None].expand(*x.shape[:2], index.shape[1], x.shape[-1]))


def mask_of(index=KEPT, length=13):
    return torch.zeros(index.shape[0], length, dtype=torch.bool).scatter(1, index, True)


def query_mask(mechanism, mask):
    return {"query_mask": mask} if mechanism.wants_query_mask else {}


@having("key_mask", "noncausal", "cross", "order_free")
def test_masked_keys_are_removed_keys(name):
    query, key, value = tokens()
    expected = zoo.get(name)(query, kept(key), kept(value))
    torch.testing.assert_close(zoo.get(name)(query, key, value, key_mask=mask_of()), expected)


@calls("key_mask")
def test_padding_at_the_end_changes_nothing_exactly_where_declared(name, is_causal):
    """Self attention over the first 8 of 13 tokens: the padded call gives the same rows."""
    mechanism = zoo.get(name)
    query, key, value = tokens()
    mask = torch.arange(13).lt(8).expand(2, 13)
    options = fixed(name, 13)
    short = mechanism(*(x[..., :8, :] for x in (query, key, value)), is_causal=is_causal, **options)
    options |= query_mask(mechanism, mask)
    long = mechanism(query, key, value, key_mask=mask, is_causal=is_causal, **options)
    if name in PADDING_MOVES:
        assert not torch.allclose(long[..., :8, :], short)
    else:
        torch.testing.assert_close(long[..., :8, :], short)


@calls("key_mask")
@pytest.mark.parametrize("kind", ["bool", "weights"])
def test_nan_in_masked_tokens_reaches_neither_output_nor_gradient(name, is_causal, kind):
    mechanism = zoo.get(name)
    query, key, value = tokens()
    mask = mask_of() if kind == "bool" else mask_of().double()
    clean = mechanism(query, key, value, key_mask=mask, is_causal=is_causal)
    absent = ~mask_of()[:, None, :, None]
    key, value = (x.masked_fill(absent, float("nan")).requires_grad_() for x in (key, value))
    query.requires_grad_()
    out = mechanism(query, key, value, key_mask=mask, is_causal=is_causal)
    torch.testing.assert_close(out, clean)
    out.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (query, key, value))


@having("key_mask", "wants_query_mask")
def test_nan_in_masked_queries_reaches_no_other_row(name):
    mechanism, mask = zoo.get(name), mask_of()
    query, key, value = tokens()
    shared = {"key_mask": mask, "query_mask": mask, **own_way(mechanism)}
    clean = mechanism(query, key, value, **shared)
    query = query.masked_fill(~mask[:, None, :, None], float("nan"))
    torch.testing.assert_close(kept(mechanism(query, key, value, **shared)), kept(clean))


@calls("key_mask")
def test_weights_of_zero_and_one_are_a_mask(name, is_causal):
    query, key, value = tokens()
    boolean = zoo.get(name)(query, key, value, key_mask=mask_of(), is_causal=is_causal)
    weights = zoo.get(name)(query, key, value, key_mask=mask_of().float(), is_causal=is_causal)
    torch.testing.assert_close(weights, boolean)


@calls("key_mask")
def test_a_sequence_without_any_key_gives_zero(name, is_causal):
    query, key, value = (x.requires_grad_() for x in tokens())
    mask = mask_of()
    mask[0] = False
    out = zoo.get(name)(query, key, value, key_mask=mask, is_causal=is_causal)
    assert (out[0] == 0).all()
    assert (out[1] != 0).any()
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in (query, key, value))


@calls()
def test_no_tokens_give_no_rows(name, is_causal):
    out = zoo.get(name)(*tokens(0, 0), is_causal=is_causal)
    assert out.shape == (2, 2, 0, 6)


@having("cross", "noncausal")
@pytest.mark.parametrize(("queries", "keys"), [(0, 3), (3, 0)])
def test_no_queries_give_no_rows_and_no_keys_give_zero(name, queries, keys):
    out = zoo.get(name)(*tokens(queries, keys))
    assert out.shape == (2, 2, queries, 6)
    assert (out == 0).all()


@having("cross", "weights")
@pytest.mark.parametrize(("queries", "keys"), [(0, 5), (5, 0)])
def test_weights_without_queries_or_keys_are_empty(name, queries, keys):
    query, key, _ = tokens(queries, keys)
    assert zoo.get(name).scores(query, key).shape == (2, 2, queries, keys)


@calls()
def test_one_token_is_finite(name, is_causal):
    assert zoo.get(name)(*tokens(1, 1), is_causal=is_causal).isfinite().all()


LENGTHS_Q, LENGTHS_K = [4, 0, 7, 1], [5, 3, 0, 9]


def looped(mechanism, inputs, lengths_q, lengths_k, **options):
    parts = zip(*(x.split(n) for x, n in zip(inputs, (lengths_q, lengths_k, lengths_k), strict=True)), strict=True)
    return torch.cat(
        [mechanism(*(x.transpose(0, 1)[None] for x in part), **options)[0].transpose(0, 1) for part in parts]
    )


def bounds(lengths):
    return torch.tensor([0, *lengths]).cumsum(0)


@calls("ragged")
def test_packed_sequences_are_a_loop_over_them(name, is_causal):
    mechanism = zoo.get(name)
    query, key, value = (x[0].transpose(0, 1) for x in tokens(12, 12))
    at = bounds(LENGTHS_Q)
    packed = mechanism.varlen(query, key, value, at, at, 7, 7, is_causal=is_causal)
    expected = looped(mechanism, (query, key, value), LENGTHS_Q, LENGTHS_Q, is_causal=is_causal)
    torch.testing.assert_close(packed, expected)


@having("ragged", "cross", "noncausal")
def test_packed_cross_attention_is_a_loop_too(name):
    mechanism = zoo.get(name)
    query, key, value = (x[0].transpose(0, 1) for x in tokens(12, 17))
    packed = mechanism.varlen(query, key, value, bounds(LENGTHS_Q), bounds(LENGTHS_K))
    torch.testing.assert_close(packed, looped(mechanism, (query, key, value), LENGTHS_Q, LENGTHS_K))


@having("ragged")
def test_offsets_that_do_not_fit_are_refused(name):
    query, key, value = (x[0].transpose(0, 1) for x in tokens(12, 12))
    with pytest.raises(ValueError, match=r"cu_seq_q must rise from 0 to the number of tokens, 12"):
        zoo.get(name).varlen(query, key, value, bounds([4, 4]), bounds([4, 8]))


@having(missing=("ragged",))
def test_what_takes_no_packed_sequences_says_so(name):
    assert zoo.get(name).varlen is None
    with pytest.raises(ValueError, match=r"ragged was asked for.*nearest mechanism that can"):
        zoo.get(name).require("ragged")
