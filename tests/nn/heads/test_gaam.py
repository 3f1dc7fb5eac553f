"""GAAM: what its page lets one check without trained weights."""

import pytest
import torch

from cumulant.nn import create_layer
from cumulant.nn.heads.gaam import GaussianDensity, StackedDensity, importance_factor
from cumulant.nn.probes import draw


def density(heads=2, gaussians=3, seed=0):
    made = GaussianDensity(heads, gaussians, dtype=torch.float64)
    with torch.no_grad():
        made.offset.copy_(0.3 * draw(heads, gaussians, seed=seed))
        made.width.copy_(0.5 + draw(heads, gaussians, seed=seed + 1).abs())
    return made


def product(made, x):
    """The product of Gaussians over its sum, as the package has it, head by head."""
    parts = []
    for h, part in enumerate(x.chunk(made.num_heads, -1)):
        mean, std = part.mean(-1, keepdim=True), (part.var(-1, keepdim=True) + 1e-8).sqrt()
        w = torch.ones_like(part)
        for o, c in zip(made.offset[h], made.width[h], strict=True):
            y = (part - (mean + o)) / std
            w = w * (-y.square() / (2 * c**2)).exp() / (2 * torch.pi * c**2).sqrt()
        parts.append(w / w.sum(-1, keepdim=True).clamp(min=1e-8))
    return torch.cat(parts, -1)


def test_the_softmax_is_the_product_of_gaussians_over_its_sum():
    made, x = density(), draw(4, 12)
    torch.testing.assert_close(made.weights(x), product(made, x))
    torch.testing.assert_close(made.weights(x).chunk(2, -1)[0].sum(-1), torch.ones(4, dtype=torch.float64))
    torch.testing.assert_close(made(x), x * product(made, x))


def test_endless_widths_weigh_all_alike():
    made, x = density(), draw(4, 12)
    with torch.no_grad():
        made.width.fill_(1e9)
    torch.testing.assert_close(made(x), x / 6)
    stacked, layers = StackedDensity(2, 5, dtype=torch.float64), draw(3, 8, 4, 5)
    with torch.no_grad():
        stacked.width.fill_(1e12)
    torch.testing.assert_close(stacked(layers), layers)


def test_a_shift_changes_no_weight_and_a_factor_only_with_offsets():
    made, x = density(), draw(4, 12)
    torch.testing.assert_close(made.weights(x + 5), made.weights(x))
    assert not torch.allclose(made.weights(3 * x), made.weights(x))
    torch.nn.init.zeros_(made.offset)
    torch.testing.assert_close(made.weights(3 * x), made.weights(x), rtol=1e-6, atol=1e-9)


def test_the_peak_is_at_the_mean_and_its_offset_and_two_offsets_make_one_peak():
    one, two, x = density(1, 1), density(1, 2), draw(1, 40)
    with torch.no_grad():
        one.offset.fill_(0.7)
        two.offset.copy_(torch.tensor([[0.7, -0.7]]))
        two.width.fill_(1.0)
    assert one.weights(x).argmax() == (x - x.mean() - 0.7).abs().argmin()
    assert two.weights(x).argmax() == (x - x.mean()).abs().argmin()


def test_elements_may_change_places_within_a_chunk_and_not_across():
    made, x = density(), draw(4, 12)
    within = torch.tensor([3, 0, 5, 1, 2, 4, 6, 7, 8, 9, 10, 11])
    across = torch.arange(12).roll(3)
    torch.testing.assert_close(made.weights(x[:, within]), made.weights(x)[:, within])
    assert not torch.allclose(made.weights(x[:, across]), made.weights(x)[:, across])


def test_the_last_head_takes_the_rest_of_an_uneven_axis():
    made, x = density(), draw(4, 13)
    w = made.weights(x)
    torch.testing.assert_close(w[:, :6].sum(-1) + w[:, 6:].sum(-1), torch.full((4,), 2.0, dtype=torch.float64))


@pytest.mark.parametrize("form", ["package", "experiment"])
def test_over_tokens_the_future_acts_on_the_past_and_padding_does_not(form):
    layer, x = create_layer("gaam", 8, 2, axis="tokens", form=form, dtype=torch.float64), draw(1, 9, 8)
    before = layer(x)
    later = x.clone()
    later[0, -1] += 1
    assert not torch.allclose(layer(later)[0, 4:8], before[0, 4:8])  # the second head's tokens
    mask = torch.arange(9).lt(7)[None]
    padded = x.masked_fill(~mask[..., None], 1e3)
    torch.testing.assert_close(layer(padded, mask)[mask], layer(x, mask)[mask])
    assert sum(p.numel() for p in layer.parameters()) == (2 * 5 * 2 if form == "package" else 2 * 8 * 2)


@pytest.mark.parametrize("call", [{"is_causal": True}, {"context": draw(1, 4, 8)}])
def test_over_tokens_there_is_no_causal_form_and_no_context(call):
    with pytest.raises(ValueError, match=r"axis=\"tokens\" of layer 'gaam' takes the mean of all tokens"):
        create_layer("gaam", 8, 2, axis="tokens", dtype=torch.float64)(draw(1, 9, 8), **call)


def test_too_few_tokens_for_a_variance_are_refused():
    with pytest.raises(ValueError, match=r"2 heads of layer 'gaam' split at least 4, got 3; .* num_heads=1"):
        create_layer("gaam", 8, 2, axis="tokens", dtype=torch.float64)(draw(1, 3, 8))


def test_stacked_features_are_weighted_by_their_mean_over_time():
    made, x = StackedDensity(2, 5, dtype=torch.float64), draw(3, 8, 4, 5)
    with torch.no_grad():
        made.offset.copy_(0.1 * draw(2, 5))
        made.width.copy_(1 + draw(2, 5, seed=1).abs())
    y = x.mean(2)
    parts = []
    for h, part in enumerate(y.chunk(2, 1)):
        mean, var = part.mean(1, keepdim=True), part.var(1, keepdim=True, unbiased=False) + 1e-8
        z = (part - (mean + made.offset[h])) / (var + 1e-5).sqrt()
        parts.append((-z.square() / (2 * made.width[h])).exp())
    torch.testing.assert_close(made(x), x * torch.cat(parts, 1)[:, :, None])
    made.raw_view = True
    torch.testing.assert_close(made(x[:, :, :1]), x[:, :, :1] * made.weights(x[:, :, :1])[:, :, None])
    assert not torch.allclose(made(x), x * torch.cat(parts, 1)[:, :, None])


@pytest.mark.parametrize("make", [lambda: density(), lambda: StackedDensity(2, 4, dtype=torch.float64)])
def test_gradients_agree_with_differences(make):
    made = make()
    x = draw(2, 6, 2, 4).requires_grad_() if isinstance(made, StackedDensity) else draw(2, 8).requires_grad_()
    names, given = zip(*made.named_parameters(), strict=True)
    call = lambda x, *p: torch.func.functional_call(made, dict(zip(names, p, strict=True)), (x,))  # noqa: E731
    assert torch.autograd.gradcheck(call, (x, *given), fast_mode=True)


def test_importance_runs_from_zero_to_one():
    assert importance_factor(torch.tensor([1.0, 3.0, 2.0])).tolist() == [0.0, 1.0, 0.5]
