"""ComplexFormer: what its page lets one check without trained weights."""

import math

import pytest
import torch

from cumulant.nn import MultiheadAttention, create_layer
from cumulant.nn.probes import draw


def made(**options):
    torch.manual_seed(0)
    return create_layer("complexformer", 32, 4, dtype=torch.float64, **options)


def plain_of(layer):
    plain = MultiheadAttention(32, 4, qkv_bias=False, proj_bias=False, dtype=torch.float64)
    plain.load_state_dict({key: value for key, value in layer.state_dict().items() if key not in ("delta", "b")})
    return plain


def unlearned(layer):
    with torch.no_grad():
        layer.delta.fill_(1)
        layer.b.zero_()
    return layer


def cosines(layer, x):
    """The scores as the page writes them, with a cosine for every pair of tokens and channel."""
    query, key, _ = MultiheadAttention.project(layer, x)
    h = layer.head_dim // 2

    def polar(z):
        return (z[..., :h].square() + z[..., h:].square() + 1e-9).sqrt(), torch.atan2(z[..., h:], z[..., :h])

    (mq, pq), (mk, pk) = polar(query), polar(key)
    at = torch.arange(x.shape[-2], dtype=x.dtype)
    g = 10000 ** (-2 * torch.arange(h, dtype=x.dtype) / layer.head_dim)
    place = (at[:, None] - at)[..., None] * g
    delta, b = layer.delta[:, None, None], layer.b[:, None, None]
    angle = delta * (pq[..., :, None, :] - pk[..., None, :, :]) + b + place
    return (mq[..., :, None, :] * mk[..., None, :, :] * angle.cos()).sum(-1)


@pytest.mark.parametrize("scale", [1.0, None])
def test_the_product_of_turned_vectors_is_the_sum_of_cosines(scale):
    layer, x = made(scale=scale), draw(2, 7, 32)
    with torch.no_grad():
        layer.b.copy_(draw(4, 4))
    weights = (cosines(layer, x) * (1.0 if scale else 8**-0.5)).softmax(-1)
    torch.testing.assert_close(layer.scores(x), weights, rtol=1e-6, atol=1e-9)


def test_with_delta_one_and_no_places_it_is_plain_attention():
    layer = unlearned(made(scale=None, places=False))
    torch.testing.assert_close(layer(draw(2, 7, 32)), plain_of(layer)(draw(2, 7, 32)), rtol=1e-5, atol=1e-6)


def test_with_delta_one_it_is_rotary_attention():
    layer, x = unlearned(made(scale=None)), draw(2, 7, 32)
    query, key, value = MultiheadAttention.project(layer, x)
    at = torch.arange(7, dtype=x.dtype)[:, None] * 10000 ** (-2 * torch.arange(4, dtype=x.dtype) / 8)

    def turned(z):
        a, b = z.chunk(2, -1)
        return torch.cat((a * at.cos() - b * at.sin(), a * at.sin() + b * at.cos()), -1)

    out = torch.nn.functional.scaled_dot_product_attention(turned(query), turned(key), value)
    wanted = out.transpose(1, 2).flatten(-2) @ layer.proj.weight.mT
    torch.testing.assert_close(layer(x), wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("attention", ["softmax", "cumulant2", "cumulant3+full"])
def test_only_distances_between_places_count(attention):
    layer, x = made(attention=attention, scale=None), draw(2, 7, 32)
    before = layer(x)
    layer.first_place = 100
    torch.testing.assert_close(layer(x), before, rtol=1e-6, atol=1e-8)


def test_the_diagonal_third_order_knows_places_beyond_their_distances():
    """It is taken in the coordinates of the keys, which places turn."""
    layer, x = made(attention="cumulant3", scale=None), draw(2, 7, 32)
    before = layer(x)
    layer.first_place = 100
    assert not torch.allclose(layer(x), before, rtol=1e-3)


def test_with_delta_zero_the_sign_of_a_query_does_not_matter():
    layer, x = made(), draw(2, 7, 32)
    with torch.no_grad():
        layer.delta.zero_()
    before = layer.scores(x)
    with torch.no_grad():
        layer.qkv.weight[:32] *= -1
    torch.testing.assert_close(layer.scores(x), before)


def test_a_whole_turn_of_b_changes_nothing():
    layer, x = made(), draw(2, 7, 32)
    before = layer(x)
    with torch.no_grad():
        layer.b[1, 2] += 2 * math.pi
    torch.testing.assert_close(layer(x), before)


def test_a_query_of_zero_has_finite_gradients():
    layer, x = made(), draw(1, 5, 32)
    x[0, 2] = 0
    x.requires_grad_()
    layer(x).sum().backward()
    assert x.grad.isfinite().all()
    assert layer.delta.grad.isfinite().all()
