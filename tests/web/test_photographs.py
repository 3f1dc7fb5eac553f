"""Photographs that packages ship, models that learned to paint what is hidden in them, and the dial on them."""

import io

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("sklearn")

from PIL import Image
from small_explorer import local_client, noise

from cumulant.web import create_app, dial, matcher, photographs, segmenter, serve
from cumulant.web.command import Explore

SHORT = {**photographs.RECIPE, "steps": 3, "batch": 2, "width": 32, "depth": 1, "heads": 2}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    pictures = photographs.photographs()[:1]
    return photographs.photograph_models(pictures, tmp_path_factory.mktemp("cache"), recipe=SHORT)


@pytest.fixture(scope="module")
def client(models):
    return local_client(create_app(models, photographs.photographs()[:2]))


def test_the_photographs_of_scikit_learn_are_there():
    labels = [one.label for one in photographs.photographs()]
    assert labels[:2] == ["temple", "dahlia"]
    assert all(min(one.picture.size) >= 300 for one in photographs.photographs())


def test_the_models_are_trained_once_with_a_line_that_says_so_and_then_read(tmp_path):
    pictures, screen, quiet = photographs.photographs()[:1], io.StringIO(), io.StringIO()
    options = {"mechanisms": ("softmax",), "recipe": SHORT}
    first = photographs.photograph_models(pictures, tmp_path, **options, progress=screen)
    assert "training a small model of photographs with softmax (1 of 1)" in screen.getvalue()
    assert "3/3" in screen.getvalue()
    second = photographs.photograph_models(pictures, tmp_path, **options, progress=quiet)
    assert quiet.getvalue() == ""
    weights = [models["softmax (photos)"].painter.pixels.weight for models in (first, second)]
    assert torch.equal(*weights)


def test_another_recipe_is_trained_anew(tmp_path):
    pictures, screen = photographs.photographs()[:1], io.StringIO()
    photographs.photograph_models(pictures, tmp_path, mechanisms=("softmax",), recipe=SHORT)
    longer = {**SHORT, "steps": 4}
    photographs.photograph_models(pictures, tmp_path, mechanisms=("softmax",), recipe=longer, progress=screen)
    assert "4/4" in screen.getvalue()


def test_learning_paints_hidden_patches_better_than_their_mean():
    picture = Image.linear_gradient("L").convert("RGB")  # 256 x 256, black to white: what is hidden lies between
    learned = photographs.learn("softmax", [picture], {**SHORT, "steps": 60, "batch": 8, "side": 64})
    images = photographs.normalised(picture.crop((0, 64, 128, 192)))[None]
    hidden = photographs.half(1, 256, torch.Generator().manual_seed(1))
    painted, truth = (photographs.patches_of(x)[hidden] for x in (learned.painted(images, hidden), images))
    assert (painted - truth).square().mean() < 0.5 * (truth - truth.mean(0)).square().mean()


def test_what_is_not_hidden_is_left_as_it_is_and_the_hidden_is_not_seen(models):
    painter = models["softmax (photos)"].painter
    images = torch.randn(1, 3, 128, 128, generator=torch.Generator().manual_seed(0))
    hidden = photographs.half(1, 256, torch.Generator().manual_seed(1))
    painted = photographs.patches_of(painter.painted(images, hidden))
    assert torch.equal(painted[~hidden], photographs.patches_of(images)[~hidden])
    other = photographs.images_of(torch.where(hidden[..., None], 5.0, photographs.patches_of(images)), 128)
    torch.testing.assert_close(photographs.patches_of(painter.painted(other, hidden)), painted)


def test_the_dial_ends_at_the_model_itself_and_comes_closer_on_the_way(models):
    subject = dial.PaintingDial(models["softmax (photos)"].painter, "small", side=256)
    for module in subject.model.modules():
        if isinstance(module, torch.nn.Linear):
            module.weight.mul_(2)  # maps that are far from flat
    picture = photographs.photographs()[0].picture
    passes = {
        name: subject.passed("a", picture, name) for name in ("cumulant2", "cluster64+find=tree+near=4", "softmax")
    }
    far, near, same = (subject.compared(one, passes["softmax"], (0.5, 0.5)) for one in passes.values())
    assert far > near > same == 0
    costs = [subject.cost(name) for name in subject.steps]
    assert costs == sorted(costs)
    assert costs[-1] == 1
    plain = subject.run(picture)[0]  # nothing is left behind in the model
    torch.testing.assert_close(plain, passes["softmax"].kept[0])


def test_the_page_is_told_of_the_dial_and_gets_a_picture_of_each_step(client):
    (told,) = client.get("/api/info").json()["dials"]
    assert told["name"] == "softmax (photos)"
    assert [step["title"] for step in told["steps"]][:: len(told["steps"]) - 1] == ["linear", "softmax"]
    question = {"dial": told["name"], "image": "example-1", "step": 0}
    answer = client.post("/api/dial", json=question).json()
    assert answer["score"] > 0
    assert answer["seconds"] > 0
    assert answer["picture"].startswith("data:image/jpeg;base64,")
    for wrong, kind in (
        ({"step": 50}, "unknown_step"),
        ({"dial": "x"}, "unknown_dial"),
        ({"image": "x"}, "unknown_image"),
    ):
        refused = client.post("/api/dial", json={**question, **wrong})
        assert (refused.status_code, refused.json()["error"]) == (404, kind)


def test_the_page_opens_on_photographs_with_the_digits_beside_them(monkeypatch, models, tmp_path):
    from small_explorer import small_model

    monkeypatch.setattr(photographs, "photograph_models", lambda *_, **__: models)
    digits = {"softmax": small_model("softmax")}
    monkeypatch.setattr("cumulant.web.demo.digits_models", lambda *_, **__: digits)
    for room in (segmenter, matcher):  # models that somebody has fetched here are no part of this test
        monkeypatch.setattr(room, "CACHE", tmp_path)
    info = local_client(serve.prepare(Explore(images=3))).get("/api/info").json()
    assert [model["collection"] for model in info["models"]] == ["photographs", "photographs", ""]
    assert info["examples"][0]["label"] == "temple"
    assert [one["label"] for one in info["examples"] if one["collection"] == "digits"] == ["0", "3", "6"]


def test_a_folder_of_sam_2_is_told_from_others_by_its_config(tmp_path):
    assert not segmenter.is_segmenter(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    assert not segmenter.is_segmenter(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "sam2"}')
    assert segmenter.is_segmenter(str(tmp_path))
    assert segmenter.is_segmenter("transformers:facebook/sam2.1-hiera-tiny")


def test_a_segmenter_is_dialled_in_the_layers_that_see_the_whole_picture(tmp_path):
    transformers = pytest.importorskip("transformers")
    config = transformers.Sam2Config()
    backbone = config.vision_config.backbone_config
    backbone.hidden_size, backbone.blocks_per_stage, backbone.num_attention_heads = 8, [1, 1, 2, 1], 1
    backbone.embed_dim_per_stage, backbone.num_attention_heads_per_stage = [8, 16, 32, 64], [1, 2, 2, 4]
    backbone.global_attention_blocks, backbone.image_size = [3], [256, 256]
    config.vision_config.backbone_channel_list = [64, 32, 16, 8]
    config.vision_config.backbone_feature_sizes = [[64, 64], [32, 32], [16, 16]]
    config.prompt_encoder_config.image_size = 256
    torch.manual_seed(0)
    transformers.Sam2Model(config).save_pretrained(tmp_path)
    subject = segmenter.SegmentingDial(str(tmp_path), size=256)
    assert subject.layers == ("backbone.blocks.3.attn",)
    assert subject.cost("cumulant2") == 16 / 256
    picture = noise(0, 64)
    exact, linear = (subject.passed("a", picture, name) for name in ("softmax", "cumulant2"))
    assert not torch.equal(exact.kept[-1], linear.kept[-1])
    torch.testing.assert_close(subject.run(picture)[-1], exact.kept[-1])  # the model is left as it was
    assert subject.compared(exact, exact, (0.3, 0.6)) == 1
    assert subject.shown(picture, linear, (0.3, 0.6)).size == (512, 512)
