"""Flow attention against both published forms written out, and the conservation identities of its page."""

import pytest
import torch
from random_tokens import draw

from cumulant import zoo
from cumulant.call import Call
from cumulant.zoo.flow import flow

FLOW = zoo.get("flow")
EPS = 1e-6


def quadratic(query, key, value, clamp=1.0, eps=EPS):
    """The normal version with its L x S matrix."""
    q, k, L, S = query.sigmoid(), key.sigmoid(), query.shape[-2], key.shape[-2]
    incoming = 1 / ((q + eps) @ (k.sum(-2, keepdim=True) + eps).mT)
    outgoing = 1 / ((k + eps) @ (q.sum(-2, keepdim=True) + eps).mT)
    cs = (q + eps) @ ((k * outgoing).sum(-2, keepdim=True) + eps).mT
    cr = (k + eps) @ ((q * incoming).sum(-2, keepdim=True) + eps).mT
    cr = cr if clamp is None else cr.clamp(-clamp, clamp)
    A = (cs * L / S).sigmoid() * (q @ k.mT) * incoming * (cr.softmax(-2) * S).mT
    return A @ value


def recurrent(query, key, value, clamp=1.0, eps=EPS):
    """The causal version token by token, every sum taken anew."""
    q, k = query.sigmoid(), key.sigmoid()
    incoming, outgoing, cs, cr, rows = [], [], [], [], []
    for t in range(1, q.shape[-2] + 1):
        qt, kt = q[..., t - 1, :] + eps, k[..., t - 1, :] + eps
        incoming.append(1 / (qt * (k[..., :t, :].sum(-2) + eps)).sum(-1))
        outgoing.append(1 / (kt * (q[..., :t, :].sum(-2) + eps)).sum(-1))
        flow_k = sum(k[..., s, :] * ((s + 1) * outgoing[s])[..., None] for s in range(t))
        flow_q = sum(q[..., s, :] * ((s + 1) * incoming[s])[..., None] for s in range(t))
        cs.append((qt * (flow_k + eps)).sum(-1) / t)
        source = (kt * (flow_q + eps)).sum(-1) / t
        cr.append(source if clamp is None else source.clamp(-clamp, clamp))
    competition = [(t + 1) * cr[t].exp() / sum(c.exp() for c in cr[: t + 1]) for t in range(len(cr))]
    for t in range(len(cr)):
        state = sum(
            (k[..., s, :] * competition[s][..., None])[..., :, None] * value[..., s, None, :] for s in range(t + 1)
        )
        row = (q[..., t, :] * incoming[t][..., None])[..., None, :] @ state
        rows.append(cs[t].sigmoid()[..., None] * row.squeeze(-2))
    return torch.stack(rows, -2)


@pytest.mark.parametrize("clamp", [1.0, None, 5.0])
@pytest.mark.parametrize(("queries", "keys"), [(11, 11), (6, 11), (11, 6)])
def test_the_linear_form_is_the_quadratic_one(clamp, queries, keys):
    query, key, value = draw((2, 3, queries, 5), (2, 3, keys, 5), (2, 3, keys, 4))
    torch.testing.assert_close(FLOW(query, key, value, clamp=clamp), quadratic(query, key, value, clamp))


@pytest.mark.parametrize("clamp", [1.0, None])
@pytest.mark.parametrize("chunk", [1, 4, 64])
def test_the_causal_form_is_the_recurrence_whatever_the_chunk(clamp, chunk):
    query, key, value = draw((2, 2, 11, 5), (2, 2, 11, 5), (2, 2, 11, 4))
    out = FLOW(query, key, value, is_causal=True, clamp=clamp, chunk=chunk)
    torch.testing.assert_close(out, recurrent(query, key, value, clamp))


@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (6, 15)])
def test_flows_are_conserved(queries, keys):
    """mean cr = L/S, mean cs = S/L, mean comp = 1, and incoming weights sum to 1; exact as eps goes to 0."""
    query, key, _ = draw((1, 2, queries, 5), (1, 2, keys, 5), (1,))
    q, k, eps = query.sigmoid(), key.sigmoid(), 1e-13
    incoming, outgoing = 1 / (q @ k.sum(-2, keepdim=True).mT), 1 / (k @ q.sum(-2, keepdim=True).mT)
    cr = k @ (q * incoming).sum(-2, keepdim=True).mT
    cs = q @ (k * outgoing).sum(-2, keepdim=True).mT
    ratio = torch.full((1, 2), queries / keys, dtype=torch.float64)
    torch.testing.assert_close(cr.mean((-2, -1)), ratio)
    torch.testing.assert_close(cs.mean((-2, -1)), 1 / ratio)
    rows, sources, allocation = flow(Call(query, key, key), None, eps)
    torch.testing.assert_close((rows @ k.mT).sum(-1), torch.ones(1, 2, queries, dtype=torch.float64))
    torch.testing.assert_close((sources / k).mean((-2, -1)), torch.ones(1, 2, dtype=torch.float64))
    torch.testing.assert_close(allocation, (cs * queries / keys).sigmoid())


def test_allocation_lies_between_one_half_and_one_and_bounds_the_output():
    query, key, value = draw((1, 2, 9, 5), (1, 2, 9, 5), (1, 2, 9, 4))
    _, sources, allocation = flow(Call(query, key, key), 1.0, EPS)
    assert ((allocation > 0.5) & (allocation < 1)).all()
    competition = (sources / key.sigmoid()).max()
    assert FLOW(query, key, value).abs().max() <= value.abs().max() * competition


def test_equal_keys_give_the_gated_mean():
    query, key, value = draw((1, 2, 6, 5), (1, 2, 1, 5), (1, 2, 9, 4))
    key = key.expand(1, 2, 9, 5)
    _, _, allocation = flow(Call(query, key, key), 1.0, EPS)
    expected = allocation * value.mean(-2, keepdim=True)
    torch.testing.assert_close(FLOW(query, key, value), expected, rtol=1e-5, atol=1e-6)
    constant = FLOW(query[..., :1, :].expand(query.shape), key, value)
    gate = torch.tensor(1.0, dtype=torch.float64).sigmoid()
    torch.testing.assert_close(
        constant, (gate * value.mean(-2, keepdim=True)).expand_as(constant), rtol=1e-5, atol=1e-6
    )


def test_the_first_causal_row_is_its_value_times_sigmoid_of_one():
    query, key, value = draw((1, 2, 5, 4), (1, 2, 5, 4), (1, 2, 5, 4))
    first = FLOW(query, key, value, is_causal=True)[..., 0, :]
    torch.testing.assert_close(first, 0.7310586 * value[..., 0, :], rtol=1e-5, atol=1e-6)


def test_the_causal_form_is_not_the_full_form_with_a_mask():
    query, key, value = draw((1, 2, 8, 4), (1, 2, 8, 4), (1, 2, 8, 4))
    assert not torch.allclose(FLOW(query, key, value, is_causal=True)[..., -1, :], FLOW(query, key, value)[..., -1, :])


def test_the_clamp_matters():
    query, key, value = draw((1, 2, 8, 4), (1, 2, 8, 4), (1, 2, 8, 4))
    assert not torch.allclose(FLOW(query, key, value), FLOW(query, key, value, clamp=None))


def test_a_negative_clamp_is_refused():
    """It would set all sources alike, and no competition were left."""
    with pytest.raises(ValueError, match=r"clamp must not be negative .*got -1"):
        zoo.get("flow")(*draw((1, 1, 5, 4), (1, 1, 5, 4), (1, 1, 5, 4)), clamp=-1.0)


def test_a_query_that_is_masked_does_not_act_on_other_rows():
    query, key, value = draw((1, 2, 8, 4), (1, 2, 8, 4), (1, 2, 8, 4))
    mask = torch.arange(8)[None] < 5
    masked = FLOW(query, key, value, query_mask=mask)[..., :5, :]
    torch.testing.assert_close(masked, FLOW(query[..., :5, :], key, value))
    assert not torch.allclose(masked, FLOW(query, key, value)[..., :5, :])


def test_integer_weights_mean_repeated_sources():
    query, key, value = draw((1, 2, 4, 4), (1, 2, 3, 4), (1, 2, 3, 4))
    repeats = torch.tensor([1, 2, 3])
    weighted = FLOW(query, key, value, key_mask=repeats[None].double())
    repeated = FLOW(query, key.repeat_interleave(repeats, -2), value.repeat_interleave(repeats, -2))
    torch.testing.assert_close(weighted, repeated)


def test_keys_before_the_first_query_that_counts_take_their_share_of_the_competition():
    """Such a key has no flow to conserve; it must not win over all later ones for that."""
    query, key, value = draw((1, 1, 6, 4), (1, 1, 6, 4), (1, 1, 6, 3))
    mask = torch.tensor([[False, False, True, True, True, True]])
    key.requires_grad_()
    options = {"query_mask": mask, "is_causal": True, "clamp": None}
    weights = zoo.get("flow").scores(query, key, **options)
    assert (weights[0, 0, 5, 2:] > 0.01).all()
    (gradient,) = torch.autograd.grad(zoo.get("flow")(query, key, value, **options)[..., 2:, :].sum(), key)
    assert gradient.abs().max() < 10
