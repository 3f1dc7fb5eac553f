"""Softmax stays away from the backend whose gradients are wrong."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from cumulant.zoo import fused
from cumulant.zoo.softmax import SOFTMAX


def test_cudnn_is_avoided_where_a_gpu_records_gradients():
    key = SimpleNamespace(is_cuda=True)
    assert fused.may_need_gradients(key)
    with torch.no_grad():
        assert not fused.may_need_gradients(key)
    assert not fused.may_need_gradients(torch.zeros(2, 3, 5, 8))


@pytest.mark.parametrize("avoided", [True, False])
def test_cudnn_is_off_during_the_call_alone(avoided, monkeypatch):
    seen, attend = [], F.scaled_dot_product_attention

    def watched(*arguments, **options):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*arguments, **options)

    monkeypatch.setattr(fused, "may_need_gradients", lambda key: avoided)
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    fused.fused_softmax(*torch.randn(3, 1, 2, 5, 4))
    assert seen == [False if avoided else before]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_the_choice_of_backends_does_not_break_a_compiled_graph(monkeypatch):
    monkeypatch.setattr(fused, "may_need_gradients", lambda key: True)
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
    SOFTMAX(q, k, v).sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 65, 512])
@pytest.mark.parametrize("by_heads", [True, False])
def test_gradients_do_not_depend_on_the_layout_of_those_of_the_output(tokens, by_heads):
    torch.manual_seed(0)
    x = torch.randn(4, tokens, 3, 3, 64, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(4, tokens, 3, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    exact, found = x.double().requires_grad_(), x.requires_grad_()
    for one, given in ((exact, grad.double()), (found, grad.contiguous() if by_heads else grad)):
        SOFTMAX(*(part.transpose(1, 2) for part in one.unbind(2))).backward(given)
    assert (found.grad - exact.grad).norm() < 0.01 * exact.grad.norm()
