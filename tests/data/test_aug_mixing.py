"""Soft targets, erasing, mixup and cutmix as pure functions, and the Beta distribution they draw from."""

import pytest
import torch
from scipy import stats

from cumulant.data import mixing


def test_smoothed_targets_sum_to_one_and_equal_those_of_cross_entropy():
    labels, logits = torch.tensor([2, 0, 3]), torch.randn(3, 4)
    targets = mixing.soft_targets(labels, 4, 0.1)
    torch.testing.assert_close(targets.sum(1), torch.ones(3))
    ours = torch.nn.functional.cross_entropy(logits, targets)
    torch.testing.assert_close(ours, torch.nn.functional.cross_entropy(logits, labels, label_smoothing=0.1))


def test_without_smoothing_targets_are_one_hot():
    labels = torch.tensor([2, 0, 3])
    assert torch.equal(mixing.soft_targets(labels, 4), torch.nn.functional.one_hot(labels, 4).float())


def test_erasing_fills_the_box_and_nothing_else():
    x = torch.randn(3, 2, 4, 9, 9)
    box = torch.tensor([[1, 5, 2, 9], [0, 9, 0, 1], [4, 4, 0, 9]]).T  # the last one is empty
    noise = torch.randn(1000) + 100
    result = mixing.erase(x, box, noise, torch.tensor([0, 7, 500]))
    for sample, (top, bottom, left, right) in enumerate(box.T.tolist()):
        changed = result[sample] != x[sample]
        inside = torch.zeros(9, 9, dtype=torch.bool)
        inside[top:bottom, left:right] = True
        assert torch.equal(changed, inside.expand_as(changed))
        assert torch.equal(result[sample, :, 0][changed[:, 0]], result[sample, :, 3][changed[:, 3]])  # all frames alike
    expected = noise[7 : 7 + 2 * 81].view(2, 9, 9)[:, :, 0]
    assert torch.equal(result[1, :, 0, :, 0], expected)


def test_mixup_weighs_pixels_and_targets_alike():
    x, targets = torch.randn(4, 3, 1, 5, 5), torch.eye(4)
    own = torch.tensor([0.3, 0.9, 1.0, 0.0])
    mixed, soft = mixing.mix(x, targets, own, torch.zeros(4, dtype=torch.bool), torch.zeros(4, 4))
    other = x[[1, 0, 3, 2]]
    weight = own[:, None, None, None, None]
    torch.testing.assert_close(mixed, weight * x + (1 - weight) * other)
    assert torch.equal(mixed[2], x[2])
    assert torch.equal(mixed[3], x[2])
    torch.testing.assert_close(soft, torch.diag(own) + torch.diag(1 - own)[:, [1, 0, 3, 2]])


def test_cutmix_takes_the_box_from_the_partner_and_its_share_of_the_target():
    x, targets = torch.randn(2, 3, 1, 8, 8), torch.eye(2)
    box = torch.tensor([[2, 6, 0, 4], [0, 0, 0, 0]]).T
    mixed, soft = mixing.mix(x, targets, torch.tensor([0.5, 0.5]), torch.tensor([True, True]), box)
    assert torch.equal(mixed[0, ..., 2:6, 0:4], x[1, ..., 2:6, 0:4])
    assert torch.equal(mixed[0, ..., :, 4:], x[0, ..., :, 4:])
    assert torch.equal(mixed[1], x[1])
    assert soft.tolist() == [[0.75, 0.25], [0.0, 1.0]]


@pytest.mark.parametrize(
    ("alpha", "error"), [(0.1, 2e-6), (0.2, 2e-6), (0.8, 2e-6), (1.0, 2e-6), (2.5, 1e-4), (8.0, 4e-3), (32.0, 1e-2)]
)
def test_beta_quantiles_are_those_of_scipy(alpha, error):
    probability = torch.linspace(0, 1, 4001)[1:-1]
    ours = mixing.beta_quantile(mixing.beta_table(alpha), alpha, probability).double()
    exact = torch.from_numpy(stats.beta(alpha, alpha).ppf(probability.double().numpy()))
    torch.testing.assert_close(ours, exact, rtol=0, atol=error)


def test_beta_quantiles_of_zero_and_one_are_the_ends():
    ends = mixing.beta_quantile(mixing.beta_table(0.8), 0.8, torch.tensor([0.0, 0.5, 1.0]))
    assert ends.tolist() == [0.0, 0.5, 1.0]
