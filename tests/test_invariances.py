"""Section 3 of the mathematics as properties: what every implementation must keep, whatever the data."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from oracles import relative

from cumulant import attention, scores

ORDERS = [(1, False), (2, False), (3, False), (3, True)]
orders = st.sampled_from(ORDERS)
lengths = st.integers(1, 140)
widths = st.integers(1, 9)
seeds = st.integers(0, 2**31)
flags = st.booleans()
backends = st.sampled_from(["auto", "reference"])


def draw(seed, L, D, E, dtype=torch.float64):
    make = torch.Generator().manual_seed(seed)
    return tuple(torch.randn(1, 2, L, width, generator=make, dtype=dtype) for width in (D, D, E))


@given(seeds, lengths, widths, widths, orders, flags, backends, st.floats(-1e3, 1e3))
def test_shifting_the_keys_changes_nothing(seed, L, D, E, order, is_causal, backend, c):
    q, k, v = draw(seed, L, D, E)
    options = dict(order=order[0], full=order[1], is_causal=is_causal, backend=backend)
    assert relative(attention(q, k + c, v, **options), attention(q, k, v, **options)) < 1e-8


@given(seeds, lengths, widths, widths, orders, flags, backends, st.floats(-1e3, 1e3))
def test_shifting_the_values_shifts_the_output(seed, L, D, E, order, is_causal, backend, c):
    q, k, v = draw(seed, L, D, E)
    options = dict(order=order[0], full=order[1], is_causal=is_causal, backend=backend)
    difference = attention(q, k, v + c, **options) - attention(q, k, v, **options)
    assert (difference - c).abs().max() < 1e-9 * (1 + abs(c))


@given(seeds, lengths, widths, widths, orders, backends)
def test_token_order_does_not_matter(seed, L, D, E, order, backend):
    q, k, v = draw(seed, L, D, E)
    shuffle = torch.randperm(L, generator=torch.Generator().manual_seed(seed))
    options = dict(order=order[0], full=order[1], backend=backend)
    assert (
        relative(attention(q, k[..., shuffle, :], v[..., shuffle, :], **options), attention(q, k, v, **options)) < 1e-9
    )


@given(seeds, lengths, widths, widths, orders, backends)
def test_duplicating_every_token_changes_nothing(seed, L, D, E, order, backend):
    q, k, v = draw(seed, L, D, E)
    options = dict(order=order[0], full=order[1], backend=backend)
    twice = attention(q, torch.cat((k, k), -2), torch.cat((v, v), -2), **options)
    assert relative(twice, attention(q, k, v, **options)) < 1e-9


@given(seeds, lengths, widths, widths, orders, flags, backends, st.sampled_from([float("nan"), float("inf"), 1e300]))
def test_tokens_of_weight_zero_do_not_matter(seed, L, D, E, order, is_causal, backend, junk):
    q, k, v = draw(seed, L, D, E)
    keep = torch.rand(1, L, generator=torch.Generator().manual_seed(seed)) > 0.5
    options = dict(order=order[0], full=order[1], is_causal=is_causal, backend=backend, key_mask=keep)
    absent = ~keep[:, None, :, None]
    clean = [x.clone().requires_grad_() for x in (q, k, v)]
    dirty = [q.clone().requires_grad_(), *(x.masked_fill(absent, junk).requires_grad_() for x in (k, v))]
    for tensors in (clean, dirty):
        attention(*tensors, **options).square().sum().backward()
    assert torch.equal(attention(*clean, **options), attention(*dirty, **options))
    for a, b in zip(clean, dirty, strict=True):
        assert torch.equal(a.grad, b.grad)
    for x in dirty[1:]:
        assert not x.grad.masked_select(absent).any()


@given(seeds, st.integers(2, 140), widths, widths, orders, backends)
def test_a_weight_of_two_is_two_tokens(seed, L, D, E, order, backend):
    q, k, v = draw(seed, L, D, E)
    w = torch.randint(0, 3, (1, L), generator=torch.Generator().manual_seed(seed))
    w[0, 0] = 1
    options = dict(order=order[0], full=order[1], backend=backend)
    repeated = attention(q, k.repeat_interleave(w[0], -2), v.repeat_interleave(w[0], -2), **options)
    assert relative(attention(q, k, v, key_mask=w.double(), **options), repeated) < 1e-9


@given(seeds, lengths, widths, orders, flags)
def test_scores_sum_to_one(seed, L, D, order, is_causal):
    q, k, _ = draw(seed, L, D, 1)
    total = scores(q, k, order=order[0], full=order[1], is_causal=is_causal).sum(-1)
    assert (total - 1).abs().max() < 1e-9


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize(("dtype", "shift", "bound"), [(torch.float32, 1e3, 1e-5), (torch.bfloat16, 1e2, 1e-2)])
def test_far_off_keys_lose_no_digits(is_causal, order, backend, dtype, shift, bound):
    """Judged against float64 on the same inputs as rounded; the first-order part, which is exact, is taken out."""
    q, k, v = (x.to(dtype) for x in draw(3, 1000, 16, 16, torch.float32))
    k = (k + shift * torch.tensor([1.0, -1.0]).repeat(8).to(dtype)).to(dtype)
    options = dict(order=order, is_causal=is_causal)
    exact = attention(q.double(), k.double(), v.double(), backend="reference", **options)
    mean = attention(q.double(), k.double(), v.double(), order=1, is_causal=is_causal)
    out = attention(q, k, v, backend=backend, **options)
    assert relative(out.double() - mean, exact - mean) < bound * (1 if dtype == torch.float32 else 3)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("order", [2, 3])
def test_far_off_values_lose_no_more_than_their_rounding(order, backend):
    q, k, v = draw(4, 1000, 16, 16, torch.float32)
    v = v + 1e3
    exact = attention(q.double(), k.double(), v.double(), order=order, backend="reference")
    assert (attention(q, k, v, order=order, backend=backend) - exact).abs().max() < 3e-4  # 1000 has ulps of 6e-5


@pytest.mark.parametrize("order", [2, 3])
def test_a_drifting_causal_sequence_keeps_its_digits(order):
    """Every later token lies further from the first: raw sums about a fixed origin would lose float32's digits."""
    q, k, v = draw(5, 4000, 8, 8, torch.float32)
    k = k + torch.linspace(0, 300, 4000)[:, None]
    options = dict(order=order, is_causal=True, scale=1e-2)
    exact = attention(q.double(), k.double(), v.double(), **options)
    assert relative(attention(q, k, v, **options), exact) < 1e-5
