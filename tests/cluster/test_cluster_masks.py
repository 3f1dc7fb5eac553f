"""Masks, weights and grouped queries: absent tokens are as if they had never been there."""

import pytest
import torch
from cluster_cases import softmax, tokens

from cumulant.cluster import Blocks, KMeans, cluster_attention

KEPT = torch.tensor([0, 1, 3, 4, 7, 8, 11, 12, 13, 17, 20, 22])
MASK = torch.zeros(2, 24, dtype=torch.bool)
MASK[:, KEPT] = True
FORMS = {
    "blocks": {"clusters": 4},
    "uneven blocks": {"clusters": 5, "near": 1},
    "more blocks than tokens left": {"clusters": 20, "near": 2},
    "neighbours": {"clusters": 4, "near": "neighbours"},
    "k-means": {"clusters": KMeans(4), "near": 1},
    "prefix": {"clusters": 3, "prefix": 2},
    "all near": {"clusters": 4, "near": 4},
}
forms = pytest.mark.parametrize("form", FORMS)


@pytest.mark.parametrize("form", [form for form in FORMS if form not in ("neighbours", "prefix")])
def test_masked_keys_are_removed_keys(form):
    query, key, value = tokens(5)
    out = cluster_attention(query, key, value, key_mask=MASK, **FORMS[form])
    expected = cluster_attention(query, key[..., KEPT, :], value[..., KEPT, :], **FORMS[form])
    torch.testing.assert_close(out, expected)


def test_masked_keys_are_removed_for_neighbours_too():
    query, key, value = tokens()
    out = cluster_attention(query, key, value, key_mask=MASK, clusters=4, near="neighbours")
    left = (x[..., KEPT, :] for x in (query, key, value))
    torch.testing.assert_close(out[..., KEPT, :], cluster_attention(*left, clusters=4, near="neighbours"))


@forms
@pytest.mark.parametrize("is_causal", [False, True])
def test_nan_in_masked_tokens_reaches_neither_output_nor_gradient(form, is_causal):
    options = FORMS[form] if not is_causal else {"clusters": Blocks(3, keep=0), "is_causal": True}
    query, key, value = tokens()
    clean = cluster_attention(query, key, value, key_mask=MASK, **options)
    absent = ~MASK[:, None, :, None]
    inputs = [query.requires_grad_(), *(x.masked_fill(absent, float("nan")).requires_grad_() for x in (key, value))]
    out = cluster_attention(*inputs, key_mask=MASK, **options)
    torch.testing.assert_close(out, clean)
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.square().sum(), inputs))


@forms
def test_a_sequence_without_any_key_gives_zero(form):
    query, key, value = (x.requires_grad_() for x in tokens())
    mask = MASK.clone()
    mask[0] = False
    out = cluster_attention(query, key, value, key_mask=mask, **FORMS[form])
    assert (out[0] == 0).all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (query, key, value)))


@pytest.mark.parametrize("near", [0, 1])
def test_a_weight_of_two_is_the_token_twice(near):
    query, key, value = tokens(5, 8)
    weights = torch.tensor([1.0, 2, 1, 1, 3, 1, 1, 1], dtype=torch.float64)
    place = torch.arange(8).repeat_interleave(weights.long())
    ids = torch.tensor([0, 0, 0, 1, 1, 1, 2, 2])
    out = cluster_attention(query, key, value, clusters=ids, near=near, key_mask=weights)
    repeated = cluster_attention(query, key[..., place, :], value[..., place, :], clusters=ids[place], near=near)
    torch.testing.assert_close(out, repeated)


@pytest.mark.parametrize("is_causal", [False, True])
def test_weights_in_the_exact_limit_are_those_of_softmax(is_causal):
    query, key, value = tokens()
    weights = torch.rand(2, 24, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    clusters = Blocks(1, keep=30) if is_causal else 24
    out = cluster_attention(query, key, value, clusters=clusters, key_mask=weights, is_causal=is_causal)
    torch.testing.assert_close(out, softmax(query, key, value, weights, is_causal))


@pytest.mark.parametrize(
    "options",
    [*FORMS.values(), {"clusters": 4, "near": 1, "near_rows": 5}, {"clusters": Blocks(5, keep=1), "is_causal": True}],
    ids=str,
)
def test_grouped_queries_are_repeated_key_heads(options):
    query, key, value = tokens(heads=4)
    if isinstance(options["clusters"], KMeans):  # the metric is that of all queries of a key head
        options = options | {"clusters": KMeans(4, metric="none")}
    grouped = cluster_attention(query, key, value, enable_gqa=True, **options)
    repeated = (x.repeat_interleave(2, -3) for x in (key, value))
    torch.testing.assert_close(grouped, cluster_attention(query, *repeated, **options))
