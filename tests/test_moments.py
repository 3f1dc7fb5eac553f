"""Moments form a commutative monoid with partial inverses, and every way to build them agrees."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cumulant import Moments
from cumulant.moments import added

KINDS = [(1, False), (2, False), (3, False), (3, True)]
kinds = st.sampled_from(KINDS)
seeds = st.integers(0, 2**31)
counts = st.integers(0, 20)


def tokens(seed, n, offset=0.0, dtype=torch.float64):
    make = torch.Generator().manual_seed(seed)
    k, v = (torch.randn(2, n, width, generator=make, dtype=dtype) + offset for width in (3, 4))
    return k, v


def same(a, b, tolerance=1e-9):
    scale = max(1.0, *(x.abs().max().item() for x in a if x is not None and x.numel()))
    return all(
        (x is None and y is None)
        or (x.shape == y.shape and ((x - y).abs().max() if x.numel() else 0) <= tolerance * scale)
        for x, y in zip(a, b, strict=True)
    )


def moments(seed, n, kind, offset=0.0):
    return Moments.of(*tokens(seed, n, offset), order=kind[0], full=kind[1])


@given(seeds, counts, counts, kinds, st.floats(-100, 100))
def test_merging_equals_concatenating(seed, n, m, kind, offset):
    (k, v), (k2, v2) = tokens(seed, n), tokens(seed + 1, m, offset)
    whole = Moments.of(torch.cat((k, k2), 1), torch.cat((v, v2), 1), order=kind[0], full=kind[1])
    assert same(whole, moments(seed, n, kind).merge(moments(seed + 1, m, kind, offset)))


@given(seeds, counts, counts, counts, kinds)
def test_merge_is_associative_and_commutative(seed, n, m, p, kind):
    A, B, C = (moments(seed + i, count, kind, 3.0 * i) for i, count in enumerate((n, m, p)))
    assert same(A.merge(B).merge(C), A.merge(B.merge(C)))
    assert same(A.merge(B), B.merge(A))


@given(seeds, counts, kinds)
def test_the_empty_set_is_the_identity(seed, n, kind):
    A, empty = moments(seed, n, kind, 5.0), moments(seed, 0, kind)
    assert not any(x.any() for x in empty if x is not None)
    assert same(A, A.merge(empty), 0)
    assert same(A, empty.merge(A), 0)
    assert same(A, A.remove(empty), 1e-15)


@given(seeds, counts, counts, kinds)
def test_remove_undoes_merge(seed, n, m, kind):
    A, B = moments(seed, n, kind), moments(seed + 1, m, kind, 2.0)
    assert same(A.merge(B).remove(B), A)


@given(seeds, counts, kinds)
def test_removing_everything_leaves_the_empty_set(seed, n, kind):
    A = moments(seed, n, kind, 4.0)
    assert not any(x.any() for x in A.remove(A) if x is not None)


@given(seeds, st.integers(1, 20), kinds)
def test_weights_of_one_and_no_mask_agree(seed, n, kind):
    k, v = tokens(seed, n)
    masked = Moments.of(k, v, order=kind[0], full=kind[1], key_mask=torch.ones(2, n, dtype=torch.bool))
    assert same(masked, moments(seed, n, kind), 1e-14)


@pytest.mark.parametrize("kind", KINDS)
def test_leading_dimensions_broadcast(kind):
    k, v = tokens(0, 7)
    options = dict(order=kind[0], full=kind[1])
    one = Moments.of(k[0], v[0], **options)
    both = Moments.of(k, v, **options)
    assert same(both.merge(one), both.merge(Moments.of(k[:1].expand(2, -1, -1), v[:1].expand(2, -1, -1), **options)))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_statistics_are_at_least_float32(dtype):
    A = Moments.of(*tokens(0, 9, dtype=torch.float32)).to(torch.float32)
    k, v = (x.to(dtype) for x in tokens(0, 9, dtype=torch.float32))
    wanted = torch.float64 if dtype == torch.float64 else torch.float32
    B = Moments.of(k, v)
    assert all(x.dtype == wanted for x in (B.weight, B.S, B.P, B.T))
    assert B.key_mean.dtype == B.value_mean.dtype == torch.float64
    assert B.apply(k).dtype == dtype
    assert same(A.to(wanted), B, 0.05)


def test_low_precision_tokens_far_from_zero_keep_their_spread():
    k, v = tokens(1, 500, 100.0, torch.float32)
    k, v = k.bfloat16(), v.bfloat16()
    assert same(Moments.of(k.double(), v.double()), Moments.of(k, v).to(torch.float64), 1e-5)


def test_to_moves_every_field():
    A = moments(0, 5, (3, False)).to(torch.float32)
    assert all(x.dtype == torch.float32 for x in A)


def test_weighted_sets_far_from_zero_unite_without_losing_digits():
    torch.manual_seed(0)
    k, v = torch.randn(8, 20, 4) + 1e4, torch.randn(8, 20, 3) + 1e4
    w = torch.rand(8, 20)
    united = Moments.of(k, v, key_mask=w).union(added)
    whole = Moments.of(*(x.flatten(0, 1).double() for x in (k, v)), key_mask=w.flatten())
    for found, exact in zip(united, whole, strict=True):
        assert (found - exact).norm() < 1e-6 * exact.norm()
    assert (united.key_mean - whole.key_mean).abs().max() < 1e-6  # of a spread of 1


@pytest.mark.parametrize("unit", [1e-40, 1e-32, 1e32, 1e38])
def test_weights_whose_sums_float32_cannot_hold_are_refused(unit):
    k, v = torch.randn(2, 9, 4), torch.randn(2, 9, 3)
    weights = torch.rand(2, 9) + 0.1
    with pytest.raises(ValueError, match="must sum to 0 or to a number between"):
        Moments.of(k, v, key_mask=weights * unit)
    assert Moments.of(k.double(), v.double(), key_mask=weights * unit).apply(k.double()).isfinite().all()
    assert Moments.of(k, v, key_mask=weights * 0.0).weight.eq(0).all()


def test_order_and_full_are_known_from_the_fields():
    assert [(moments(0, 3, kind).order, moments(0, 3, kind).full) for kind in KINDS] == KINDS


def test_moments_of_different_kinds_do_not_combine():
    with pytest.raises(ValueError, match="order 2"):
        moments(0, 3, (3, False)).merge(moments(0, 3, (2, False)))
    with pytest.raises(ValueError, match="full=True"):
        moments(0, 3, (3, False)).remove(moments(0, 3, (3, True)))
    with pytest.raises(TypeError, match="Moments"):
        moments(0, 3, (3, False)).merge(3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", KINDS)
def test_autocast_leaves_the_moments_in_float32(kind):
    k, v = tokens(0, 9, dtype=torch.float32)
    order, full = kind
    plain = Moments.of(k, v, order=order, full=full)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = Moments.of(k, v, order=order, full=full)
        out = under.apply(k)
    for x, y in zip(under, plain, strict=True):
        assert x is y is None or torch.equal(x, y)
    assert torch.equal(out, plain.apply(k))


@pytest.mark.parametrize(("order", "full"), [(0, False), (4, False), (2, True), (2.0, False)])
def test_orders_that_do_not_exist_are_refused(order, full):
    with pytest.raises(ValueError, match="order"):
        Moments.of(*tokens(0, 3), order=order, full=full)
