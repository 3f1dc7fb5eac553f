"""RALA: its quadratic form, its weights alpha, and the layer of the released code, from its page."""

import pytest
import torch
import torch.nn.functional as F
from random_tokens import draw

from cumulant import zoo
from cumulant.zoo.grid import rotary_angles, rotate
from cumulant.zoo.linear import feature_map
from cumulant.zoo.rala import RankAugmentedAttention
from cumulant.zoo.rala import alpha as alpha_and_sum

RALA, LINEAR = zoo.get("rala"), zoo.get("linear")


def alpha(q, k):
    """The weights of the keys for features q and k, (..., H, Lk, 1)."""
    kernel, total = alpha_and_sum(q, k, None, None, k.shape[-1] ** -0.5)
    return kernel / total


def rope(x, rows, cols):
    """2-D rotary positions of x (..., rows cols, D), one pair of channels at a time."""
    D, out = x.shape[-1], torch.empty_like(x)
    theta = 10000.0 ** -torch.linspace(0, 1, D // 4, dtype=x.dtype)
    for token in range(rows * cols):
        row, col = divmod(token, cols)
        for pair in range(D // 2):
            angle = row * theta[pair] if pair < D // 4 else col * theta[pair - D // 4]
            a, b = x[..., token, 2 * pair], x[..., token, 2 * pair + 1]
            out[..., token, 2 * pair] = a * angle.cos() - b * angle.sin()
            out[..., token, 2 * pair + 1] = b * angle.cos() + a * angle.sin()
    return out


def released(query, key, value, rows, cols):
    """Steps 1 to 7 of the released code, with all its factors N."""
    N, D = key.shape[-2:]
    q, k = F.elu(query) + 1, F.elu(key) + 1
    weights = torch.softmax(k @ q.mean(-2, keepdim=True).mT * D**-0.5, -2)
    k = k * weights * N
    qr, kr = rope(q, rows, cols), rope(k, rows, cols)
    z = 1 / (q @ k.mean(-2, keepdim=True).mT + 1e-6)
    return qr @ ((kr * N**-0.5).mT @ (value * N**-0.5)) * z


@pytest.mark.parametrize(("queries", "keys"), [(9, 9), (5, 9)])
def test_without_rotary_turns_it_is_the_quadratic_form(queries, keys):
    query, key, value = draw((2, 2, queries, 8), (2, 2, keys, 8), (2, 2, keys, 6))
    q, k = F.elu(query) + 1, F.elu(key) + 1
    a = torch.softmax((k * q.mean(-2, keepdim=True)).sum(-1) * 8**-0.5, -1)
    A = q @ k.mT * a[..., None, :]
    expected = A @ value / (A.sum(-1, keepdim=True) + 1e-6)
    torch.testing.assert_close(RALA(query, key, value), expected, rtol=1e-10, atol=1e-12)


def test_with_rotary_turns_it_is_the_released_code_whose_rows_do_not_sum_to_one():
    query, key, value = draw((2, 2, 12, 8), (2, 2, 12, 8), (2, 2, 12, 8))
    out = RALA(query, key, value, use_rope=True, grid=(3, 4))
    torch.testing.assert_close(out, released(query, key, value, 3, 4))
    sums = RALA.scores(query, key, use_rope=True, grid=(3, 4)).sum(-1)
    assert (sums - 1).abs().max() > 0.01
    torch.testing.assert_close(RALA.scores(query, key).sum(-1), torch.ones_like(sums), rtol=1e-5, atol=1e-5)


def test_alpha_is_a_distribution_over_keys_that_sees_queries_only_by_their_mean():
    query, key, _ = draw((2, 2, 9, 8), (2, 2, 7, 8), (1,))
    q, k = feature_map(query), feature_map(key)
    weights = alpha(q, k)
    assert (weights >= 0).all()
    torch.testing.assert_close((weights * 7).mean(-2), torch.ones(2, 2, 1, dtype=torch.float64))
    order = torch.randperm(9, generator=torch.Generator().manual_seed(1))
    torch.testing.assert_close(alpha(q[..., order, :], k), weights)


def test_equal_keys_or_no_alpha_give_plain_linear_attention():
    query, key, value = draw((1, 2, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8))
    equal = key[..., :1, :].expand(key.shape)
    torch.testing.assert_close(RALA(query, equal, value), LINEAR(query, equal, value), rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(
        RALA(query, key, value, use_alpha=False), LINEAR(query, key, value), rtol=1e-5, atol=1e-6
    )


def test_longer_mapped_keys_sharpen_alpha():
    query, key, _ = draw((1, 1, 9, 8), (1, 1, 9, 8), (1,))
    q, k = feature_map(query), feature_map(key)
    entropies = [-(a * a.log()).sum().item() for a in (alpha(q, c * k) for c in (0.5, 1.0, 2.0))]
    assert entropies[0] > entropies[1] > entropies[2]


def test_alpha_changes_the_singular_values_of_the_buffer_but_not_the_bound_on_its_rank():
    query, key, value = draw((1, 1, 60, 4), (1, 1, 60, 4), (1, 1, 60, 16))
    q, k = feature_map(query), feature_map(key)
    weights = alpha(q, k)
    buffer = (k * weights).mT @ value
    assert torch.linalg.matrix_rank(buffer).item() <= 4
    assert torch.linalg.matrix_rank(RALA(query, key, value)).item() <= 4


def test_a_gate_multiplies_ranks():
    a, b, c, d = draw((20, 2), (2, 12), (20, 3), (3, 12))
    assert torch.linalg.matrix_rank((a @ b) * (c @ d)).item() == 6


def test_rotary_turns_keep_norms_and_see_only_the_offset_on_the_grid():
    x, y = draw((1, 8), (1, 8))
    angles = rotary_angles((5, 6), 0, 8, dtype=torch.float64)
    turned_x, turned_y = (rotate(z.expand(30, 8), angles) for z in (x, y))
    torch.testing.assert_close(turned_x.norm(dim=-1), x.norm().expand(30))
    products = (turned_x @ turned_y.mT).reshape(5, 6, 5, 6)
    torch.testing.assert_close(products[1, 2, 3, 5], products[0, 0, 2, 3])
    torch.testing.assert_close(products[4, 1, 2, 4], products[3, 0, 1, 3])


def test_prefix_tokens_are_not_turned_and_frames_share_their_angles():
    angles = rotary_angles((2, 3), 2, 8, dtype=torch.float64)
    assert (angles[:2] == 0).all()
    clip = rotary_angles((4, 2, 3), 2, 8, dtype=torch.float64)
    torch.testing.assert_close(clip[2:].unflatten(0, (4, 6)), angles[2:].expand(4, 6, 4))


def test_a_layer_is_the_released_one_with_its_convolution_and_gate():
    module = RankAugmentedAttention(16, 2, grid_size=(3, 4), dtype=torch.float64)
    query, key, value = draw((2, 2, 12, 8), (2, 2, 12, 8), (2, 2, 12, 8))
    (x,) = draw((2, 12, 16), seed=1)
    merged = value.transpose(1, 2).flatten(2)
    conv = torch.nn.Conv2d(16, 16, 5, padding=2, groups=16, dtype=torch.float64)
    conv.load_state_dict(module.lepe.state_dict())
    local = conv(merged.mT.reshape(2, 16, 3, 4)).flatten(2).mT
    tokens = released(query, key, value, 3, 4).transpose(1, 2).flatten(2)
    expected = (tokens + local) * module.gate(x)
    torch.testing.assert_close(module(query, key, value, x=x).transpose(1, 2).flatten(2), expected)


def test_a_gate_of_one_is_no_gate_and_prefix_tokens_get_no_convolution():
    module = RankAugmentedAttention(16, 2, grid_size=(2, 3), prefix=1, dtype=torch.float64)
    with torch.no_grad():
        module.gate.weight.zero_()
        module.gate.bias.fill_(1)
    query, key, value = draw((1, 2, 7, 8), (1, 2, 7, 8), (1, 2, 7, 8))
    gated = module(query, key, value, x=draw((1, 7, 16))[0])
    module.gate = None
    torch.testing.assert_close(module(query, key, value), gated)
    operator = RALA(query, key, value, use_rope=True, grid=(2, 3), prefix=1)
    torch.testing.assert_close(gated[..., :1, :], operator[..., :1, :])
    assert not torch.allclose(gated[..., 1:, :], operator[..., 1:, :])


def test_initial_weights_are_those_of_the_released_block():
    torch.manual_seed(0)
    module = RankAugmentedAttention(64, 2)
    for weight in (module.gate.weight, module.lepe.weight):
        assert 0.015 < weight.std() < 0.025
    assert (module.gate.bias == 0).all()
    assert (module.lepe.bias == 0).all()


def test_what_a_layer_cannot_do_is_said_with_the_option_to_change():
    query, key, value = draw((1, 2, 6, 8), (1, 2, 9, 8), (1, 2, 9, 8))
    with pytest.raises(ValueError, match=r"6 and 9 tokens.*use_lepe=False"):
        RankAugmentedAttention(16, 2, dtype=torch.float64)(query, key, value)
    with pytest.raises(ValueError, match=r"6 and 9 tokens.*use_rope=False"):
        RankAugmentedAttention(16, 2, use_lepe=False, use_gate=False, dtype=torch.float64)(query, key, value)
    with pytest.raises(ValueError, match="needs x="):
        RankAugmentedAttention(16, 2, dtype=torch.float64)(query, key[..., :6, :], value[..., :6, :])
    with pytest.raises(ValueError, match="multiple of 4, got 6; pass use_rope=False"):
        RankAugmentedAttention(12, 2)
