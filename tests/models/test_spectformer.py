"""SpectFormer: exact counts, and filters of frequencies that are circular convolutions."""

import pytest
import torch

import cumulant
from cumulant.models.spectformer import SpectralGate, resize_filter

COUNTS = {
    "spectformer_t": 9_158_376, "spectformer_xs": 20_028_520, "spectformer_s": 32_449_768, "spectformer_b": 57_159_656,
    "spectformer_h_s": 21_777_928, "spectformer_h_b": 32_539_880, "spectformer_h_l": 54_162_792,
}  # fmt: skip
LABELLED = {"spectformer_h_s": 22_226_928, "spectformer_h_b": 33_052_880, "spectformer_h_l": 54_675_792}


def count(name, **kw):
    return sum(p.numel() for p in cumulant.create_model(name, device="meta", **kw).parameters())


def gate(grid, dim=3):
    torch.manual_seed(0)
    made = SpectralGate(dim, grid, dtype=torch.float64)
    torch.nn.init.normal_(made.complex_weight)
    return made


def tokens(grid, dim=3):
    return torch.randn(2, grid[0] * grid[1], dim, dtype=torch.float64)


def test_parameters_are_as_many_as_published():
    assert {name: count(name) for name in COUNTS} == COUNTS
    assert {name: count(name, token_head=True) for name in LABELLED} == LABELLED
    blocks = cumulant.create_model("spectformer_xs", device="meta").blocks
    assert [sum(p.numel() for p in blocks[n].parameters()) for n in (3, 4)] == [1_269_120, 1_774_464]


@pytest.mark.parametrize("grid", [(4, 6), (7, 7), (5, 4)])
def test_a_filter_is_a_circular_convolution(grid):
    made, x = gate(grid), tokens(grid)
    kernel = torch.fft.irfft2(torch.view_as_complex(made.complex_weight.detach()), s=grid, dim=(0, 1))
    image, expected = x.unflatten(1, grid), torch.zeros(2, *grid, 3, dtype=torch.float64)
    for row in range(grid[0]):
        for column in range(grid[1]):
            expected += kernel[row, column] * torch.roll(image, (row, column), (1, 2))
    torch.testing.assert_close(made(x, grid), expected.flatten(1, 2))


def test_a_filter_of_ones_does_nothing_and_filters_are_linear():
    made, x, y = gate((4, 6)), tokens((4, 6)), tokens((4, 6))
    torch.testing.assert_close(made(2 * x - 3 * y, (4, 6)), 2 * made(x, (4, 6)) - 3 * made(y, (4, 6)))
    made.complex_weight.data.copy_(torch.tensor([1.0, 0.0]))
    torch.testing.assert_close(made(x, (4, 6)), x)


@pytest.mark.parametrize(("old", "new"), [((4, 4), (6, 7)), ((5, 5), (8, 9)), ((6, 6), (7, 10))])
def test_on_a_larger_map_a_filter_has_the_same_kernel(old, new):
    weight = gate(old).complex_weight.detach()
    kernels = [torch.fft.irfft2(torch.view_as_complex(w), s=s, dim=(0, 1))
               for w, s in ((weight, old), (resize_filter(weight, old, new), new))]  # fmt: skip
    for row in range(-(old[0] // 2), (old[0] + 1) // 2):  # places around the middle, counted from 0 both ways
        for column in range(-(old[1] // 2), (old[1] + 1) // 2):
            torch.testing.assert_close(kernels[1][row, column], kernels[0][row, column])
    assert (kernels[1].abs().sum(-1) > 1e-12).sum() <= old[0] * old[1]


def test_a_spectral_block_has_one_residual():
    model = cumulant.create_model("spectformer_nano", dtype=torch.float64)
    block, x = model.blocks[0], torch.randn(1, 64, 64, dtype=torch.float64)
    last = block.mlp.fc2
    torch.nn.init.zeros_(last.weight)
    assert torch.equal(block(x, (8, 8)), x)  # whatever the filter is


def test_attention_may_stand_where_filters_do():
    model = cumulant.create_model("spectformer_nano", spectral="attention", attention="cumulant3", num_classes=10)
    assert model(torch.randn(1, 3, 32, 32)).shape == (1, 10)
    with pytest.raises(ValueError, match="spectral_layers must be at most depth=6"):
        cumulant.create_model("spectformer_nano", spectral_layers=7)


@pytest.mark.parametrize("side", [40, 24])
def test_a_checkpoint_of_another_size_is_the_same_network(side):
    torch.manual_seed(0)
    small = cumulant.create_model("spectformer_nano", num_classes=10, dtype=torch.float64).eval()
    other = cumulant.create_model("spectformer_nano", img_size=side, num_classes=10, dtype=torch.float64).eval()
    other.load_state_dict(small.state_dict())
    x = torch.randn(1, 3, side, side, dtype=torch.float64)
    torch.testing.assert_close(other(x), small(x))


def test_the_pyramid_runs_at_odd_sizes_and_the_token_head_adds_half_the_largest():
    small = {"widths": (8, 8, 16, 16), "heads": (1, 1, 2, 2), "depths": (1, 1, 1, 1), "img_size": 64, "stem_width": 8}
    model = cumulant.create_model("spectformer_h_s", num_classes=5, token_head=True, attention="cumulant2", **small)
    model.eval()
    x = torch.randn(1, 3, 70, 65)
    features, maps = model.forward_intermediates(x)
    assert [tuple(one.shape[1:]) for one in maps] == [(8, 18, 17), (8, 9, 9), (16, 5, 5), (16, 3, 3)]
    expected = model.head(features[:, 0]) + model.aux_head(features[:, 1:]).amax(1) / 2
    torch.testing.assert_close(model(x), expected)
    model.train()(torch.cat([x, x])).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in model.parameters())
