"""Softmax stays away from the backend whose gradients are NaN, and only there."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from cumulant.zoo import fused
from cumulant.zoo.softmax import softmax_attention


@pytest.mark.parametrize(("keys", "avoided"), [(64, True), (192, True), (65, False), (128, False), (63, False)])
def test_a_half_empty_last_tile_is_avoided(keys, avoided):
    key = SimpleNamespace(is_cuda=True, shape=(2, 3, keys, 8))
    assert fused.half_tile(key) is avoided
    with torch.no_grad():
        assert not fused.half_tile(key)
    assert not fused.half_tile(torch.zeros(2, 3, keys, 8))


@pytest.mark.parametrize("avoided", [True, False])
def test_cudnn_is_off_during_the_call_alone(avoided, monkeypatch):
    seen, attend = [], F.scaled_dot_product_attention

    def watched(*arguments, **options):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*arguments, **options)

    monkeypatch.setattr(fused, "half_tile", lambda key: avoided)
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    fused.fused_softmax(*torch.randn(3, 1, 2, 5, 4))
    assert seen == [False if avoided else before]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_the_choice_of_backends_does_not_break_a_compiled_graph(monkeypatch):
    monkeypatch.setattr(fused, "half_tile", lambda key: True)
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    compiled = torch.compile(fused.fused_softmax, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 65, 192])
def test_rows_of_very_negative_logits_have_finite_gradients(tokens):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, tokens, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q[..., 0], k[..., 0] = 8.0, -120.0  # q.k / 8 is about -120 for all keys
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    softmax_attention(q, k, v).sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))
