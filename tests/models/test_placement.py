"""Models made on the meta device and in float64 are the models they would be anywhere else."""

import pytest
import torch
import torch.nn.functional as F

from cumulant.models import create_model
from cumulant.models.parts import resize_positions
from cumulant.models.tubelet import resize_time

SMALL = {"depth": 2, "embed_dim": 16, "num_heads": 2, "num_classes": 3, "drop_path": 0.5}


@pytest.mark.parametrize("name", ["vit_nano_patch2_8", "vivit_nano_patch4x2_16"])
def test_stochastic_depth_is_there_again_after_the_meta_device(name):
    model = create_model(name, device="meta", **SMALL).to_empty(device="cpu")
    for buffer in model.buffers():
        buffer.fill_(torch.nan)  # what fresh memory may hold
    model.reset_parameters()
    assert [block.drop_path.keep.item() for block in model.blocks] == [1.0, 0.5]


def test_positions_in_float64_are_resized_in_float64():
    table = torch.randn(1, 1 + 16, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    image = table[:, 1:].mT.unflatten(-1, (4, 4))
    wide = F.interpolate(image, size=(6, 5), mode="bicubic", antialias=True).flatten(2).mT
    torch.testing.assert_close(resize_positions(table, (4, 4), (6, 5))[:, 1:], wide, rtol=0, atol=0)
    times = F.interpolate(table[:, 1:].mT, size=7, mode="linear").mT
    torch.testing.assert_close(resize_time(table, 1, 7)[:, 1:], times, rtol=0, atol=0)
