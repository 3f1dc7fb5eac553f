"""LAMA: what its page lets one check without trained weights."""

import math

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode

from cumulant.nn import create_layer
from cumulant.nn.probes import draw


def made(heads=4, **options):
    torch.manual_seed(0)
    return create_layer("lama", 16, heads, dtype=torch.float64, **options)


def test_weights_sum_to_one_and_leave_padding_out_however_much_there_is():
    layer, x = made(), draw(2, 9, 16)
    mask = torch.arange(9).lt(torch.tensor([[6], [9]]))
    weights = layer.scores(x, mask)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 4, 9, dtype=torch.float64))
    assert weights[0, :, :, 6:].eq(0).all()
    torch.testing.assert_close(layer.pool(x, mask)[0], layer.pool(x[:1, :6])[0])


def test_the_order_of_tokens_does_not_matter_to_what_is_pooled():
    layer, x = made(), draw(2, 9, 16)
    torch.testing.assert_close(layer.pool(x.flip(1)), layer.pool(x))


def test_scores_are_the_bilinear_form_before_their_bounds():
    layer, x = made(bounded=False), draw(2, 9, 16)
    c = x.mean(1)
    W = torch.einsum("cm,nm->mcn", layer.P, layer.Q)
    torch.testing.assert_close(layer.keys(x, c[:, None]), torch.einsum("bc,mcn,bln->blm", c, W, x))


def test_a_token_has_a_unit_vector_of_scores_and_no_weight_exceeds_its_bound():
    layer, x = made(), 10 * draw(2, 9, 16)
    f = layer.keys(x, x.mean(1, keepdim=True))
    torch.testing.assert_close(f.norm(dim=-1), torch.ones(2, 9, dtype=torch.float64))
    assert layer.scores(x).max() <= math.e**2 / (math.e**2 + 8)


def test_without_a_context_attention_is_a_mean_with_finite_gradients():
    layer, x = made(), draw(2, 9, 16).requires_grad_()
    torch.nn.init.zeros_(layer.P)
    pooled = layer.pool(x)
    torch.testing.assert_close(pooled, x.mean(1, keepdim=True).expand(2, 4, 16))
    pooled.square().sum().backward()
    assert all(p.grad is None or p.grad.isfinite().all() for p in layer.parameters())
    assert x.grad.isfinite().all()


def test_attention_has_two_vectors_a_head():
    layer = made()
    assert layer.P.numel() + layer.Q.numel() == 2 * 16 * 4
    assert {name for name, _ in layer.named_parameters()} == {"P", "Q", "proj.weight", "proj.bias"}


def test_without_bounds_it_is_cross_attention_with_one_query_a_head():
    layer, x = made(bounded=False), draw(2, 9, 16)
    query = ((x.mean(1) @ layer.P)[..., None] * layer.Q.mT)[:, :, None]  # (B, m, 1, C)
    tokens = x[:, None].expand(2, 4, 9, 16)
    wanted = F.scaled_dot_product_attention(query, tokens, tokens, scale=1.0).squeeze(2)
    torch.testing.assert_close(layer.pool(x), wanted)


def test_work_doubles_with_the_tokens():
    layer = made(attention="cumulant2+backend=reference").float()

    def work(length):
        with FlopCounterMode(display=False) as flops, torch.no_grad():
            layer.pool(torch.randn(1, length, 16))
        return flops.get_total_flops()

    assert work(512) <= 2.01 * work(256)


def test_a_causal_row_is_the_pooling_of_its_past():
    """With a learned context; the mean of the past is another for every token."""
    layer, x = made(context="learned"), draw(2, 9, 16)
    out = layer(x, is_causal=True)
    for t in (0, 4, 8):
        torch.testing.assert_close(out[:, t], layer.proj(layer.pool(x[:, : t + 1]).flatten(-2)))


@pytest.mark.parametrize("order", [2, 3])
def test_cumulants_come_close_because_scores_are_bounded(order):
    x = draw(2, 200, 16)
    exact, found = (made(attention=name).pool(x) for name in ("softmax", f"cumulant{order}"))
    spread = exact - x.mean(1, keepdim=True)
    assert (found - exact).norm() < {2: 0.25, 3: 0.1}[order] * spread.norm()


def test_rank_adds_scores_and_diversity_adds_a_loss():
    layer, x = made(rank=2, diversity=0.1).train(), draw(2, 9, 16)
    assert layer.keys(x, x.mean(1, keepdim=True)).shape == (2, 9, 4)
    layer(x)
    A = layer.scores(x)[:, :, 0]
    wanted = 0.1 * (A @ A.mT - torch.eye(4, dtype=A.dtype)).square().sum((-2, -1)).mean()
    torch.testing.assert_close(layer.losses()["diversity"], wanted)
