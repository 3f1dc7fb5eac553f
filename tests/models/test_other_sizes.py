"""A checkpoint made for one image size loads at another, tables of the mechanism included: the model is the same."""

import pytest
import torch

import cumulant

TABLES = ["agent+agents=4", "focused_linear", "hierarchical+position=3", "hierarchical+position=3+levels=1"]


def drawn(name, **kw):
    torch.manual_seed(0)
    model = cumulant.create_model(name, num_classes=10, dtype=torch.float64, **kw).eval()
    for parameter in model.parameters():  # positions of some mechanisms start at 0
        torch.nn.init.normal_(parameter, std=0.3)
    return model


@pytest.mark.parametrize("attention", TABLES)
@pytest.mark.parametrize("other", [12, 4, (8, 12)])
def test_a_model_of_another_size_is_the_same_model(attention, other):
    small = drawn("vit_nano_patch2_8", attention=attention)
    large = cumulant.create_model(
        "vit_nano_patch2_8", attention=attention, img_size=other, num_classes=10, dtype=torch.float64
    ).eval()
    large.load_state_dict(small.state_dict())
    height, width = (other, other) if isinstance(other, int) else other
    images = torch.randn(2, 1, height, width, dtype=torch.float64)
    torch.testing.assert_close(large(images), small(images))


@pytest.mark.parametrize("attention", ["agent+agents=4", "focused_linear"])
def test_so_is_a_video_model_for_other_frames(attention):
    made = {"attention": attention, "variant": 3, "pool": "gap"}
    short = drawn("vivit_nano_patch4x2_16", **made)
    long = cumulant.create_model(
        "vivit_nano_patch4x2_16", frames=16, num_classes=10, dtype=torch.float64, **made
    ).eval()
    long.load_state_dict(short.state_dict())
    clips = torch.randn(1, 1, 16, 16, 16, dtype=torch.float64)
    torch.testing.assert_close(long(clips), short(clips))


def test_tables_of_other_heads_are_still_refused():
    small = cumulant.create_model("vit_nano_patch2_8", attention="hierarchical+position=3", num_classes=10)
    other = cumulant.create_model("vit_nano_patch2_8", attention="hierarchical+position=2", img_size=12, num_classes=10)
    with pytest.raises(RuntimeError, match="size mismatch"):
        other.load_state_dict(small.state_dict())
