"""Tensors rounded to travel come back as near as their bits allow."""

from pathlib import Path

import pytest
import torch

from tools.packing import SMALL, pack, unpack


@pytest.mark.parametrize("bits", [6, 8])
def test_no_number_moves_by_more_than_half_a_step_of_its_row(tmp_path: Path, bits: int) -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randn(70, 96, generator=draw) * torch.logspace(-3, 3, 70)[:, None]
    found = unpack(pack({"x": x}, tmp_path / "packed", bits))["x"]
    step = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert ((found - x).abs() <= 0.75 * step).all()  # the step itself is kept in 16 bits
    assert (found - x).abs().max() > 0


def test_kernels_of_a_convolution_are_rounded_by_the_channel_that_they_make(tmp_path: Path) -> None:
    x = torch.randn(40, 20, 3, 3, generator=torch.Generator().manual_seed(1))
    x[0] *= 1e4
    found = unpack(pack({"x": x}, tmp_path / "packed"))["x"]
    assert found.shape == x.shape
    assert (found[1:] - x[1:]).abs().max() < 0.05


def test_small_tensors_and_those_named_are_kept_as_they_are(tmp_path: Path) -> None:
    draw = torch.Generator().manual_seed(2)
    given = {"bias": torch.randn(3 * SMALL, generator=draw), "few": torch.randn(8, 8, generator=draw)}
    given["places"] = torch.randn(1, SMALL, 2, generator=draw)
    found = unpack(pack(given, tmp_path / "packed", whole=["places"]))
    assert all(torch.equal(found[name], x) for name, x in given.items())


def test_eight_bits_take_a_quarter_of_the_file(tmp_path: Path) -> None:
    x = {"x": torch.randn(512, 512, generator=torch.Generator().manual_seed(3))}
    assert pack(x, tmp_path / "packed").stat().st_size < x["x"].numel() + 8192


@pytest.mark.parametrize("bits", [9, 12, 16])
def test_more_than_eight_bits_move_no_number_by_more_than_half_a_step(tmp_path: Path, bits: int) -> None:
    draw = torch.Generator().manual_seed(4)
    x = torch.randn(70, 96, generator=draw) * torch.logspace(-3, 3, 70)[:, None]
    found = unpack(pack({"x": x}, tmp_path / "packed", bits))["x"]
    step = x.abs().amax(-1, keepdim=True) / (2 ** (bits - 1) - 1)
    assert ((found - x).abs() <= 0.51 * step).all()


def test_sixteen_bits_take_half_of_the_file(tmp_path: Path) -> None:
    x = {"x": torch.randn(512, 512, generator=torch.Generator().manual_seed(5))}
    assert pack(x, tmp_path / "packed", 16).stat().st_size < 2 * x["x"].numel() + 8192


def test_more_than_sixteen_bits_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="2 to 16, got 17"):
        pack({}, tmp_path / "packed", 17)
