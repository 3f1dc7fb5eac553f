"""Rollout and relevance: what they say where the answer is known, for signed maps too."""

import pytest
import torch
from torch import Tensor, nn

import cumulant
from cumulant import explain


def vit(attention: str = "cumulant3", **kw) -> nn.Module:
    return cumulant.create_model("vit_nano_patch2_8", attention=attention, num_classes=10, init_std=0.2, **kw).eval()


def holding(*maps: Tensor) -> explain.Captured:
    captured = explain.Captured(list(range(len(maps))), None)
    captured._maps = {i: [m] for i, m in enumerate(maps)}
    captured._tokens = explain.TokenLayout(1, (2, 2))
    return captured


@pytest.mark.parametrize("sign", ["absolute", "positive", "signed"])
def test_rollout_of_distributions_is_the_same_for_every_way_to_treat_signs(sign: str) -> None:
    maps = [torch.rand(2, 3, 5, 5).softmax(-1) for _ in range(3)]
    A = [0.5 * torch.eye(5) + 0.5 * m.mean(1) for m in maps]
    torch.testing.assert_close(explain.rollout(holding(*maps), sign=sign), A[2] @ A[1] @ A[0])


def test_signed_rollout_keeps_the_sum_of_rows_and_may_be_negative() -> None:
    with explain.capture(vit("cumulant2", qk_norm=True), torch.randn(2, 1, 8, 8)) as captured:
        pass
    flow = explain.rollout(captured, sign="signed")
    torch.testing.assert_close(flow.sum(-1), torch.ones(2, 17), atol=1e-4, rtol=1e-4)
    assert bool((explain.rollout(captured) >= 0).all())

    maps = torch.eye(5).expand(1, 2, 5, 5) * 1.5 - 0.1  # rows sum to 1, with entries of -0.1
    assert float(explain.rollout(holding(maps), sign="signed", residual=0.0).min()) == pytest.approx(-0.1)


def test_rollout_needs_every_row() -> None:
    with explain.capture(vit(), torch.randn(1, 1, 8, 8), queries=[0]) as captured:
        pass
    with pytest.raises(ValueError, match='queries="all"'):
        explain.rollout(captured)


class OneLayer(nn.Module):
    """A class token that takes from patches by one attention, and a classifier that reads it: A and G are known."""

    def __init__(self, attention: str) -> None:
        super().__init__()
        self.attn = cumulant.nn.MultiheadAttention(8, 2, attention=attention)
        self.head = nn.Linear(8, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.attn(tokens)[:, 0])


@pytest.mark.parametrize("attention", ["softmax", "cumulant2", "cumulant3"])
@pytest.mark.parametrize("centred", [False, True])
def test_relevance_of_one_layer_is_weight_times_its_gradient(attention: str, centred: bool) -> None:
    """The gradient of the logit by the weights is found here by autograd through an explicit A v."""
    model, tokens = OneLayer(attention), torch.randn(2, 5, 8)
    attn = model.attn
    A = attn.scores(tokens).detach().requires_grad_()
    value = attn.project(tokens)[2].detach()
    logits = model.head(attn.proj((A @ value).transpose(1, 2).flatten(2))[:, 0])
    torch.testing.assert_close(logits, model(tokens))
    (G,) = torch.autograd.grad(logits[:, 1].sum(), A)
    if centred:
        G = G - (A * G).sum(-1, keepdim=True)
    for evidence, part in (("for", A * G), ("against", -A * G)):
        expected = torch.eye(5) + part.clamp(min=0).mean(1)
        found = explain.relevance(model, tokens, 1, evidence=evidence, centred=centred)
        torch.testing.assert_close(found, expected.detach())


def test_centred_relevance_does_not_change_when_all_values_are_shifted() -> None:
    model, tokens = OneLayer("cumulant3"), torch.randn(2, 5, 8)
    before = explain.relevance(model, tokens, 0, centred=True)
    with torch.no_grad():
        model.attn.qkv.bias[16:] += 3.0
    torch.testing.assert_close(explain.relevance(model, tokens, 0, centred=True), before, atol=1e-5, rtol=1e-4)
    assert not torch.allclose(explain.relevance(model, tokens, 0), before, atol=1e-3)


def test_relevance_takes_the_predicted_class_and_leaves_no_gradients() -> None:
    model, images = vit(), torch.randn(3, 1, 8, 8)
    said = model(images).argmax(-1)
    torch.testing.assert_close(explain.relevance(model, images), explain.relevance(model, images, said))
    assert all(p.grad is None for p in model.parameters())
    assert not images.requires_grad
    for p in model.parameters():
        p.requires_grad_(False)
    assert explain.relevance(model, images, 2).shape == (3, 17, 17)


def test_a_row_becomes_a_map_over_the_patches() -> None:
    flow = torch.rand(2, 5, 5)
    tokens = explain.TokenLayout(1, (2, 2))
    torch.testing.assert_close(explain.token_map(flow, tokens), flow[:, 0, 1:].reshape(2, 2, 2))
    torch.testing.assert_close(explain.token_map(flow, tokens, "mean"), flow[:, 1:, 1:].mean(1).reshape(2, 2, 2))


@pytest.mark.parametrize("extras", [{"gate": True}])
def test_layers_that_do_more_after_mixing_are_refused(extras: dict) -> None:
    with pytest.raises(ValueError, match="layer 0"):
        explain.relevance(vit(attention_extras=extras), torch.randn(1, 1, 8, 8))


@pytest.mark.parametrize("attention", ["rala", "mala"])
def test_a_gate_within_the_mechanism_is_refused_too(attention: str) -> None:
    model, images = vit(attention), torch.randn(1, 1, 8, 8)
    with pytest.raises(ValueError, match="does not mix all tokens into its projection directly"):
        explain.relevance(model, images)
    with pytest.raises(ValueError, match="directly"), explain.block_off(model, 0, 0, "patches to patches"):
        model(images)


@pytest.mark.parametrize("target", [10, -1, 1.5, torch.tensor([1, 2])], ids=str)
def test_a_target_that_is_no_class_of_each_image_is_told(target: Tensor | float) -> None:
    with pytest.raises(ValueError, match="target must be a class from 0 to 9, or one for each of the 3 images"):
        explain.relevance(vit(), torch.randn(3, 1, 8, 8), target)


def test_layers_are_rolled_out_in_the_order_in_which_they_run() -> None:
    model, images = vit(), torch.randn(2, 1, 8, 8)
    with explain.capture(model, layers=[2, 0]) as mixed, explain.capture(model, layers=[0, 2]) as ordered:
        model(images)
    assert torch.equal(explain.rollout(mixed), explain.rollout(ordered))
