"""Class tokens of models of transformers, which do not say that they have some, stay softmax like those of timm."""

import pytest
import torch
from small_models import bert, transformers, vision

from cumulant.conversion import convert, load, save
from cumulant.inspect.batches import call
from cumulant.inspect.examples import example_for
from cumulant.inspect.sites import swappable_sites
from tools.tiny_models import tiny_model

PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))


def sites(model):
    batch = example_for(model)
    with torch.no_grad():
        return {site.name: site.prefix for site in swappable_sites(model, lambda: call(model, batch))}


BEFORE = {"ViTModel": 1, "DeiTModel": 2, "Dinov2WithRegistersModel": 5, "ASTModel": 2, "YolosModel": 1}
NONE = {"IJepaModel": 0, "ViltModel": 0}  # no such token; words stand before it


@pytest.mark.parametrize(("name", "prefix"), {**BEFORE, **NONE}.items())
def test_as_many_tokens_are_found_as_stand_before_the_patches(name, prefix):
    model = tiny_model(getattr(transformers(), name))
    before = {key: value.clone() for key, value in model.state_dict().items()}
    assert list(sites(model).values()) == [prefix] * 2
    assert all(torch.equal(value, before[key]) for key, value in model.state_dict().items())


def test_towers_without_class_tokens_have_none_and_a_later_part_has_its_own():
    """What the picture's class token moves in FLAVA's last part are 17 tokens that are no class tokens there."""
    found = sites(tiny_model(transformers().CLIPModel))
    assert {name.split(".")[0]: count for name, count in found.items()} == {"vision_model": 1, "text_model": 0}
    found = sites(tiny_model(transformers().FlavaModel))
    parts = {name.split(".")[0]: count for name, count in found.items()}
    assert parts == {"image_model": 1, "text_model": 0, "multimodal_model": 1}
    assert set(sites(bert()).values()) == {0}


def test_the_row_of_a_class_token_is_that_of_softmax(tmp_path):
    torch.manual_seed(0)
    models = [vision("ViT", num_hidden_layers=1, initializer_range=0.3) for _ in range(3)]
    for other in models[1:]:
        other.load_state_dict(models[0].state_dict())
    _, converted, alike = models
    report = convert(converted, "cumulant2")
    assert str(*report.replaced.values()) == "cumulant2, apart=1"
    assert str(*convert(alike, "cumulant2+apart=0").replaced.values()) == "cumulant2"
    with torch.no_grad():
        softmax, found, without = (model(PIXELS).last_hidden_state for model in models)
        save(converted, tmp_path)
        again = load(tmp_path)(PIXELS).last_hidden_state
    torch.testing.assert_close(found[:, 0], softmax[:, 0], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(again, found)
    torch.testing.assert_close(found[:, 1:], without[:, 1:], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(without[:, 0], softmax[:, 0], atol=1e-2)
    assert not torch.allclose(found[:, 1:], softmax[:, 1:], atol=1e-2)


@pytest.mark.timm
@pytest.mark.parametrize("name", ["TimmWrapperModel", "TimmWrapperForImageClassification"])
def test_a_timm_model_inside_of_transformers_is_converted_saved_and_loaded(name, tmp_path):
    t = transformers()
    sizes = {"depth": 2, "img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 4}
    config = t.TimmWrapperConfig(architecture="vit_tiny_patch16_224", model_args=sizes, num_labels=5)
    torch.manual_seed(0)
    model = getattr(t, name)(config).eval()
    with torch.no_grad():
        for key, weight in model.named_parameters():
            if "qkv" in key:
                weight.mul_(8)
        said = model(pixel_values=PIXELS)[0]
        report = convert(model, "cumulant3", force=True)
        assert [str(choice) for choice in report.replaced.values()] == ["cumulant3, apart=1"] * 2
        found = model(pixel_values=PIXELS)[0]
        save(model, tmp_path)
        again = load(tmp_path)(pixel_values=PIXELS)[0]
    assert not torch.allclose(found, said, atol=1e-4)
    torch.testing.assert_close(again, found)
