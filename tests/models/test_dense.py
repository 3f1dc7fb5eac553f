"""A class for every pixel: the head over any backbone, scenes with known masks, and mIoU through the trainer."""

import pytest
import torch

import cumulant
from cumulant.data import ScenePart, Source, open_source
from cumulant.data.digits import scenes_source
from cumulant.train import TrainRecipe, evaluate_checkpoint, train
from cumulant.train.tasks import PixelScores

SMALL = {"maxvit_nano": {"pad": True}, "tic_nano": {}, "spectformer_nano": {}, "vit_nano_patch4_32": {"depth": 2}}


@pytest.mark.parametrize("head", ["linear", "pyramid"])
@pytest.mark.parametrize("backbone", SMALL)
def test_every_pixel_is_given_logits_over_any_backbone(backbone, head):
    options = SMALL[backbone]
    model = cumulant.create_model(
        "segmenter", backbone=backbone, backbone_options=options, head=head, num_classes=5, img_size=32, width=8,
        attention="cumulant2",
    )  # fmt: skip
    images = torch.randn(2, 3, 36, 40)
    answer = model(images)
    assert answer.shape == (2, 5, 36, 40)
    answer.square().sum().backward()
    assert model.head.read.weight.grad.abs().sum() > 0
    again = cumulant.create_model(**model.config)
    again.load_state_dict(model.state_dict())
    torch.testing.assert_close(again.eval()(images), model.eval()(images))


def test_one_place_tells_its_own_pixels():
    model = cumulant.create_model("segmenter", num_classes=3, img_size=16, head="linear").eval()
    maps = [torch.randn(1, 64, 4, 4)]
    before = model.head(maps)
    maps[-1][0, :, 1, 2] += 1
    changed = (model.head(maps) != before).any(1)[0]
    assert changed[4:8, 8:12].all()
    assert changed.sum() == 16


def test_scenes_are_digits_with_their_masks():
    source = scenes_source(64, counts=(6, 3))
    again = open_source("scenes", size=64)
    assert again.classes == ("ground", *"0123456789")
    assert len(source.train) == 6
    scene = source.train.images[:, -1]
    assert scene.shape == (6, 64, 64)
    assert scene.max() <= 10
    bright, ground = (source.train.images[:, :3].float().mean(1)[where].mean() for where in (scene > 0, scene == 0))
    assert bright > ground + 30
    other = scenes_source(64, counts=(6, 3))
    assert torch.equal(other.train.images, source.train.images)
    with pytest.raises(ValueError, match="multiple of 32 pixels, got 50"):
        scenes_source(50)


def test_intersection_over_union_is_counted_by_hand():
    table = torch.tensor([[5, 1, 0], [2, 4, 0], [0, 0, 0]])  # the third class is neither there nor answered
    scores = PixelScores(table, torch.tensor(12))
    assert scores.unions[:2].tolist() == pytest.approx([5 / 8, 4 / 7])
    assert scores.miou == pytest.approx((5 / 8 + 4 / 7) / 2)
    assert scores.top(1) == pytest.approx(9 / 12)


def test_the_trainer_learns_masks_and_a_checkpoint_is_tested_at_another_size(tmp_path):
    """The left half of every picture is bright and of class 1."""
    generator = torch.Generator().manual_seed(0)

    def part(count, side):
        masks = torch.zeros(count, side, side, dtype=torch.uint8)
        masks[:, :, : side // 2] = 1
        noise = torch.randint(0, 60, (count, 3, side, side), generator=generator, dtype=torch.uint8)
        return ScenePart(noise + 150 * masks.unsqueeze(1), masks)

    recipe = TrainRecipe(
        data="mine", image_size=16, mean=(0.5,) * 3, std=(0.3,) * 3, model="segmenter", epochs=3, batch_size=8, lr=3e-3,
        warmup_epochs=0.5, holdout=0.25,
        model_options={"backbone_options": {"depth": 1, "embed_dim": 16, "init_std": 0.1}, "width": 8},
    )  # fmt: skip
    source = Source("mine", "scene", part(64, 16), part(8, 16), ("dark", "bright"))
    found = train(recipe, tmp_path, source=source)
    assert found.miou > 0.9
    assert found.predictions.miou == found.miou
    larger = Source("mine", "scene", part(8, 24), part(4, 24), ("dark", "bright"))
    scores, _ = evaluate_checkpoint(tmp_path, source=larger)
    assert scores.confusion.sum() == 4 * 24 * 24


def test_what_scenes_cannot_have_is_refused(tmp_path):
    part = ScenePart(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4, 8, 8, dtype=torch.uint8))
    source = Source("mine", "scene", part, part, ("a", "b"))
    with pytest.raises(ValueError, match="take one of segmenter"):
        train(TrainRecipe(model="vit_nano_patch2_8", image_size=8, batch_size=2), tmp_path / "a", source=source)
    with pytest.raises(ValueError, match="masks must be uint8"):
        ScenePart(torch.zeros(4, 3, 8, 8, dtype=torch.uint8), torch.zeros(4, 8, 4, dtype=torch.uint8))
    with pytest.raises(ValueError, match="num_classes must be positive"):
        cumulant.create_model("segmenter", num_classes=0)
