"""Values: the oracle, the definition, every pattern, every way to pass the same thing."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from oracles import by_definition, relative, softmax_taylor

import cumulant
from cumulant import attention
from cumulant.moments import Moments, full_third_by_pairs

ORDERS = [(1, False), (2, False), (3, False), (3, True)]
f64 = torch.float64


def inputs(B=2, Hq=4, H=4, Lq=9, Lk=9, D=5, E=6, dtype=f64, offset=0.7):
    return (
        torch.randn(B, Hq, Lq, D, dtype=dtype),
        torch.randn(B, H, Lk, D, dtype=dtype) + offset,
        torch.randn(B, H, Lk, E, dtype=dtype) + offset,
    )


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("order", [1, 2, 3])
def test_full_expansion_is_the_taylor_polynomial_of_softmax(order, backend):
    q, k, v = inputs()
    out = attention(q, k, v, order=order, full=order == 3, scale=0.3, backend=backend)
    assert relative(out, softmax_taylor(0.3 * q, k, v, order)) < 1e-12


def test_weighted_expansion_is_the_taylor_polynomial_of_weighted_softmax():
    q, k, v = inputs(B=1)
    w = torch.rand(1, 9, dtype=f64) + 0.1
    out = attention(q, k, v, full=True, key_mask=w, scale=0.3)
    assert relative(out, softmax_taylor(0.3 * q, k, v, 3, w)) < 1e-12


@pytest.mark.parametrize("mask", [None, "some", "none"])
def test_pairs_of_tokens_give_the_full_third_order_of_the_moments(mask):
    q, k, v = (x.requires_grad_() for x in inputs(Lk=12, offset=3))
    weights = {None: None, "some": torch.rand(2, 1, 12, dtype=f64), "none": torch.zeros(2, 1, 12)}[mask]
    ways = (full_third_by_pairs(q, k, v, weights, 0.3), Moments.of(k, v, full=True, key_mask=weights).apply(q, 0.3))
    torch.testing.assert_close(*ways)
    torch.manual_seed(1)
    upstream = torch.randn_like(ways[0])
    torch.testing.assert_close(*(torch.autograd.grad(out, (q, k, v), upstream) for out in ways))


def test_the_space_that_a_thread_keeps_is_its_own_and_serves_training_after_inference():
    q, k, v = inputs(Lk=50)
    with torch.inference_mode():
        attention(q, k, v, backend="cpu")
    q.requires_grad_()
    exact = torch.autograd.grad(attention(q, k, v, backend="reference").sum(), q)[0]
    many = [(q * (i + 1), k + i, v) for i in range(8)]
    alone = [attention(*one, backend="cpu") for one in many]
    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(lambda one: attention(*one, backend="cpu"), many * 10))
    assert all(torch.equal(out, alone[i % 8]) for i, out in enumerate(together))
    assert relative(torch.autograd.grad(attention(q, k, v, backend="cpu").sum(), q)[0], exact) < 1e-12


def test_higher_orders_come_closer_to_softmax_at_small_logits():
    q, k, v = inputs(Lk=50)
    exact = torch.nn.functional.scaled_dot_product_attention(q, k, v, scale=0.05)
    errors = [relative(attention(q, k, v, order=o, full=o == 3, scale=0.05), exact) for o in (1, 2, 3)]
    assert errors[2] < 0.1 * errors[1] < 0.01 * errors[0]


@pytest.mark.parametrize(("order", "full"), ORDERS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("Lq", "Lk"), [(9, 9), (70, 70), (3, 130), (130, 3), (1, 1), (1, 7), (7, 1)])
@pytest.mark.parametrize("mask", [None, "bool", "float"])
def test_every_pattern_follows_the_definition(order, full, is_causal, Lq, Lk, mask):
    q, k, v = inputs(Lq=Lq, Lk=Lk, H=2) if Lq < 70 else inputs(Lq=Lq, Lk=Lk, Hq=2, H=1)
    weights = {
        None: None,
        "bool": torch.rand(2, Lk) > 0.4,
        "float": torch.rand(2, Lk, dtype=f64) * (torch.rand(2, Lk) > 0.3),
    }[mask]
    for normalization in ("mean", "sum"):
        options = dict(order=order, full=full, is_causal=is_causal, normalization=normalization)
        exact = by_definition(q, k, v, weights=weights, **options)
        for backend in ("auto", "reference", "cpu"):
            out = attention(q, k, v, key_mask=weights, enable_gqa=True, backend=backend, **options)
            assert (out - exact).abs().max() < 1e-11 * (1 + exact.abs().max()), (normalization, backend)


def test_zero_query_gives_the_mean_and_the_sum_form_is_larger_by_the_length():
    q, k, v = inputs()
    mean = v.mean(-2, keepdim=True).expand(2, 4, 9, 6)
    assert relative(attention(0 * q, k, v), mean) < 1e-14
    assert relative(attention(0 * q, k, v, normalization="sum"), 9 * mean) < 1e-14


@pytest.mark.parametrize("lead", [(), (3,), (2, 3), (2, 1, 3)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_any_leading_dimensions(lead, is_causal):
    q, k, v = (torch.randn(*lead, 4, 9, 5, dtype=f64) for _ in range(3))
    mask = torch.rand(*lead, 9) > 0.3
    out = attention(q, k, v, key_mask=mask, is_causal=is_causal)
    flat = attention(*(x.reshape(-1, 4, 9, 5) for x in (q, k, v)), key_mask=mask.reshape(-1, 9), is_causal=is_causal)
    assert out.shape == (*lead, 4, 9, 5)
    assert torch.equal(out.reshape(-1, 4, 9, 5), flat)


def test_leading_dimensions_broadcast():
    q, k, v = torch.randn(5, 4, 9, 5), torch.randn(1, 4, 7, 5), torch.randn(1, 4, 7, 6)
    together = attention(q, k, v)
    assert relative(together, torch.cat([attention(x[None], k, v) for x in q])) < 1e-6


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("order", "full"), ORDERS)
def test_grouped_heads_equal_repeated_keys(order, full, is_causal):
    q, k, v = inputs(Hq=6, H=2, Lq=11, Lk=11)
    out = attention(q, k, v, order=order, full=full, is_causal=is_causal, enable_gqa=True)
    repeated = attention(
        q, k.repeat_interleave(3, 1), v.repeat_interleave(3, 1), order=order, full=full, is_causal=is_causal
    )
    assert relative(out, repeated) < 1e-13


@pytest.mark.parametrize(("Lq", "Lk"), [(0, 5), (5, 0), (0, 0)])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("order", "full"), ORDERS)
def test_empty_sequences_give_empty_or_zero(Lq, Lk, is_causal, order, full):
    q, k, v = (x.requires_grad_() for x in inputs(Lq=Lq, Lk=Lk))
    out = attention(q, k, v, order=order, full=full, is_causal=is_causal)
    assert out.shape == (2, 4, Lq, 6)
    assert not out.any()
    out.sum().backward()
    assert all(not x.grad.any() for x in (q, k, v))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_a_row_without_any_key_gives_zero(is_causal, backend):
    q, k, v = inputs()
    mask = torch.ones(2, 9, dtype=torch.bool)
    mask[0] = False
    mask[1, :4] = False
    out = attention(q, k, v, key_mask=mask, is_causal=is_causal, backend=backend)
    assert not out[0].any()
    assert not out[1, :, :4].any() or not is_causal
    assert out[1, :, 4:].abs().min() > 0


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_low_precision_error_is_at_most_twice_the_plain_one(order, dtype):
    """The bound FlashAttention's tests use: against float64 on the same rounded inputs."""
    q, k, v = (x.to(dtype) for x in inputs(Lq=257, Lk=257, D=64, E=64))
    exact = by_definition(q[:1, :1], k[:1, :1], v[:1, :1], order=order)
    dk, dv = k - k.mean(-2, keepdim=True), v - v.mean(-2, keepdim=True)
    x = q * 64**-0.5
    plain = v.mean(-2, keepdim=True) + x @ (dk.mT @ dv / 257)
    if order == 3:
        plain = plain + 0.5 * (x * x) @ ((dk * dk).mT @ dv / 257)
    for backend in ("auto", "reference"):
        out = attention(q, k, v, order=order, backend=backend)
        assert out.dtype == dtype
        assert relative(out[:1, :1], exact) <= 2 * relative(plain[:1, :1], exact)


@pytest.mark.parametrize("order", [2, 3])
def test_strided_views_of_a_projection_give_the_same(order):
    qkv = torch.randn(3, 37, 3, 4, 8)
    q, k, v = qkv.permute(2, 0, 3, 1, 4).unbind(0)
    out = attention(q, k, v, order=order)
    assert relative(out, attention(q.contiguous(), k.contiguous(), v.contiguous(), order=order)) < 1e-6
    assert out.transpose(1, 2).is_contiguous(), "joining the heads should not need a copy"
    last = torch.randn(4, 8, 37).mT  # innermost stride is not 1
    assert relative(attention(last, last, last), attention(*[last.contiguous()] * 3)) < 1e-6


def test_autocast_computes_in_its_dtype_with_exact_statistics():
    q, k, v = inputs(dtype=torch.float32, Lk=300)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = attention(q, k, v)
        mixed = attention(q.bfloat16(), k, v)
    assert out.dtype == torch.bfloat16
    assert torch.equal(out, attention(q.bfloat16(), k.bfloat16(), v.bfloat16()))
    assert torch.equal(out, mixed)


def test_the_public_names_are_there():
    for name in ("attention", "attention_varlen", "scores", "Moments", "nn", "zoo", "create_model"):
        assert hasattr(cumulant, name), name


@pytest.mark.parametrize("masked", [False, True])
def test_the_default_device_does_not_matter(masked):
    q, k, v = inputs()
    mask = torch.rand(2, 9) > 0.4 if masked else None
    expected = attention(q, k, v, key_mask=mask)
    with torch.device("meta"):
        assert torch.equal(attention(q, k, v, key_mask=mask), expected)


@pytest.mark.parametrize("backend", ["reference", "cpu"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_weights_below_what_the_statistics_hold_are_zero(backend, is_causal):
    """Those of causal rows are float64: other weights that a row sees may be as small."""
    q, k, v = inputs(dtype=torch.float32)
    w = torch.full((2, 9), 1e300 if is_causal else 1.0, dtype=f64)
    w[:, 4] = 1e-60
    expected = attention(q, k, v, key_mask=w * (w > 0.5), is_causal=is_causal, backend=backend)
    k[:, :, 4] = float("nan")
    assert torch.equal(attention(q, k, v, key_mask=w, is_causal=is_causal, backend=backend), expected)


@pytest.mark.parametrize("is_causal", [False, True])
def test_tensors_without_numbers_give_shapes(is_causal):
    from torch._subclasses.fake_tensor import FakeTensorMode

    tensors = (*inputs(), torch.rand(2, 9))
    with FakeTensorMode() as mode:
        q, k, v, w = (mode.from_tensor(x) for x in tensors)
        assert attention(q, k, v, key_mask=w, is_causal=is_causal).shape == (2, 4, 9, 6)
