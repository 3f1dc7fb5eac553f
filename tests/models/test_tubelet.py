"""Tubelet embedding: a convolution without im2col, kernels and positions made from those of an image model."""

import pytest
import torch
import torch.nn.functional as F

from cumulant.models.tubelet import TubeletEmbed, evenly_spaced, over_time, resize_clip_positions, resize_time
from cumulant.zoo.grid import guess_grid


def clips(frames=6, size=8):
    return torch.randn(2, 3, frames, size, size, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def embed(tubelet=(2, 4, 4), **kw):
    return TubeletEmbed(tubelet, 3, 16, dtype=torch.float64, **kw)


@pytest.fixture
def flat():
    """A 2-D patch embedding."""
    return torch.nn.Conv2d(3, 16, 4, stride=4, dtype=torch.float64)


def patches(flat, frames):
    """Frames (B, 3, n, H, W) to tokens (B, n S, C) through a 2-D patch embedding."""
    return torch.cat([flat(frames[:, :, i]).flatten(2).mT for i in range(frames.shape[2])], 1)


def with_kernel(flat, frames, method):
    video = embed((frames, 4, 4))
    with torch.no_grad():
        video.proj.weight.copy_(over_time(flat.weight, frames, method))
        video.proj.bias.copy_(flat.bias)
    return video


@pytest.mark.parametrize("tubelet", [(2, 4, 4), (1, 2, 4), (3, 8, 2)])
def test_the_matrix_product_is_the_convolution(tubelet):
    video, x = embed(tubelet), clips()
    torch.testing.assert_close(video(x), video.proj(x).flatten(2).mT)
    assert video(x).shape[1] == video.grid(6, 8, 8)[0] * video.grid(6, 8, 8)[1] * video.grid(6, 8, 8)[2]


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_a_central_kernel_sees_what_the_image_kernel_sees_in_the_central_frames(flat, frames):
    x = clips()
    central = x[:, :, frames // 2 :: frames]
    torch.testing.assert_close(with_kernel(flat, frames, "central")(x), patches(flat, central))


@pytest.mark.parametrize("frames", [1, 2, 3])
def test_an_inflated_kernel_on_a_static_clip_is_the_image_kernel(flat, frames):
    still = clips(frames=1).expand(-1, -1, frames, -1, -1)
    torch.testing.assert_close(with_kernel(flat, frames, "inflate")(still), patches(flat, still[:, :, :1]))


def test_drawn_kernels_have_the_structure_that_the_method_names():
    video = embed((3, 4, 4))
    video.reset_parameters("central")
    weight = video.proj.weight
    assert not weight[:, :, [0, 2]].any()
    assert weight[:, :, 1].std().item() == pytest.approx((3 * 16) ** -0.5 / 3**0.5, rel=0.1)
    video.reset_parameters("inflate")
    assert torch.equal(video.proj.weight[:, :, 0], video.proj.weight[:, :, 2])
    video.reset_parameters("random")
    assert not torch.equal(video.proj.weight[:, :, 0], video.proj.weight[:, :, 2])


def test_sampled_frames_lie_in_the_middle_of_equal_parts():
    assert evenly_spaced(32, 4) == [4, 12, 20, 28]
    assert evenly_spaced(6, 3) == [1, 3, 5]  # the central frames of tubelets of two
    assert evenly_spaced(7, 3) == [1, 3, 5]
    assert evenly_spaced(5, 5) == [0, 1, 2, 3, 4]


def test_sampling_frames_embeds_those_frames_alone(flat):
    video = embed((1, 4, 4), sample_frames=3)
    with torch.no_grad():
        video.proj.weight.copy_(flat.weight.unsqueeze(2))
        video.proj.bias.copy_(flat.bias)
    x = clips(frames=7)
    assert video.grid(7, 8, 8) == (3, 2, 2)
    torch.testing.assert_close(video(x), patches(flat, x[:, :, [1, 3, 5]]))


def test_positions_over_time_are_interpolated_and_prefix_rows_kept():
    table = torch.cat([torch.full((1, 1, 1), 9.0), torch.arange(4.0).reshape(1, 4, 1)], 1)
    longer = resize_time(table, 1, 8)
    assert longer[0, 0, 0] == 9.0
    torch.testing.assert_close(longer[0, 2:-1, 0], torch.arange(0.25, 3.0, 0.5))
    assert resize_time(table, 1, 4) is table


def test_positions_on_a_clip_follow_space_and_time():
    time, row = torch.arange(4.0)[:, None, None], torch.arange(6.0)[:, None]
    table = (10 * time + row + torch.zeros(6)).reshape(1, -1, 1)
    frames = resize_clip_positions(table, (4, 6, 6), (8, 6, 6)).reshape(8, 6, 6)
    torch.testing.assert_close(frames[1:-1], 10 * torch.arange(0.25, 3.0, 0.5)[:, None, None] + row + torch.zeros(6))
    larger = resize_clip_positions(table, (4, 6, 6), (4, 12, 12)).reshape(4, 12, 12)
    expected = F.interpolate(table.reshape(4, 1, 6, 6), (12, 12), mode="bicubic", antialias=True)[:, 0]
    torch.testing.assert_close(larger, expected)
    single = resize_clip_positions(table[:, :36], (1, 6, 6), (3, 6, 6)).reshape(3, 36)
    torch.testing.assert_close(single, table[:, :36, 0].expand(3, 36))  # an image's positions are repeated over time


def test_the_clip_a_table_was_made_for_is_guessed_only_where_there_is_one_answer():
    assert guess_grid(16 * 9, (8, 3, 3)) == (16, 3, 3)
    assert guess_grid(8 * 16, (8, 3, 3)) == (8, 4, 4)
    for rows in (8 * 36, 8 * 7):
        with pytest.raises(ValueError, match=f"positions for {rows} tokens do not tell"):
            guess_grid(rows, (8, 3, 3))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: embed().grid(5, 8, 8), r"multiple of the tubelet \(2, 4, 4\), got \(5, 8, 8\)"),
        (lambda: embed().grid(4, 8, 6), r"got \(4, 8, 6\)"),
        (lambda: embed((2, 4)), r"three positive numbers .* got \(2, 4\)"),
        (lambda: embed(sample_frames=3), r"needs a tubelet of one frame, got sample_frames=3, tubelet=\(2, 4, 4\)"),
        (lambda: embed((1, 4, 4), sample_frames=9).grid(6, 8, 8), "sample_frames=9 needs at least as many .* got 6"),
        (lambda: embed().reset_parameters("centre"), "tubelet_init must be one of .* got 'centre'"),
    ],
)
def test_clips_that_do_not_fit_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()
