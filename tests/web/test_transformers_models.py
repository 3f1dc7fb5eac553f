"""Models of transformers in the explorer: saved with save_pretrained, opened from the folder, shown as they are."""

import json

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("transformers")

import transformers
from small_explorer import ask, local_client, noise

import cumulant
from cumulant.inspect.opening import open_model
from cumulant.web import Example, create_app
from cumulant.web.opening import explorable, open_models

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 32}
SIZES |= {"image_size": 32, "patch_size": 8, "num_labels": 4}
# class, config, tokens before the patches, classes
KINDS = {
    "ViT": ("ViTForImageClassification", "ViTConfig", 1, 4),
    "DeiT": ("DeiTForImageClassificationWithTeacher", "DeiTConfig", 2, 4),
    "DINOv2": ("Dinov2ForImageClassification", "Dinov2Config", 1, 4),
    "DINOv2 without a head": ("Dinov2Model", "Dinov2Config", 1, 0),
    "DINOv2 with registers": ("Dinov2WithRegistersForImageClassification", "Dinov2WithRegistersConfig", 5, 4),
}


def saved(folder, kind, **options):
    """A small model with random weights in a folder, and the model itself."""
    name, config, _, _ = KINDS[kind]
    torch.manual_seed(0)
    model = getattr(transformers, name)(getattr(transformers, config)(**{**SIZES, **options})).eval()
    model.save_pretrained(folder)
    return model


def shown(place):
    return explorable(open_model(place, pickles=False))


@pytest.mark.parametrize("kind", KINDS)
def test_a_saved_model_is_shown_with_its_own_maps(tmp_path, kind):
    model = saved(tmp_path / "mine", kind)
    model.set_attn_implementation("eager")
    models, recipe = open_models([str(tmp_path / "mine")])
    assert (list(models), recipe) == (["mine"], None)
    _, _, prefix, classes = KINDS[kind]
    client = local_client(create_app(models, [Example(noise(0, 40), "noise")]))
    (info,) = client.get("/api/info").json()["models"]
    assert (info["prefix"], info["grid"], info["classes"]) == (prefix, [4, 4], classes)
    weights = torch.tensor(ask(client, "attention", model="mine", image="example-0", query=9)["weights"])
    own = model(models["mine"].images(noise(0, 40)), output_attentions=True).attentions
    torch.testing.assert_close(weights, torch.stack([a[0, :, 9] for a in own]).detach(), atol=3e-6, rtol=0)


def test_classes_and_preprocessing_come_from_the_folder(tmp_path):
    saved(tmp_path, "ViT", id2label=dict(enumerate(("cat", "dog", "owl", "elk"))))
    given = {"image_mean": [0.1, 0.2, 0.3], "image_std": [0.5, 0.6, 0.7], "size": {"height": 32, "width": 32}}
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(given))
    one = shown(tmp_path)
    assert one.classes == ("cat", "dog", "owl", "elk")
    assert (one.mean, one.std, one.size) == ((0.1, 0.2, 0.3), (0.5, 0.6, 0.7), 32)


def test_dinov2_is_shown_at_the_size_that_its_preprocessing_asks_for(tmp_path):
    saved(tmp_path, "DINOv2", image_size=64)
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({"crop_size": {"height": 40, "width": 40}}))
    client = local_client(create_app({"dino": shown(tmp_path)}, [Example(noise(0, 40), "")]))
    assert client.get("/api/info").json()["models"][0]["grid"] == [5, 5]


def test_a_model_without_a_classifier_has_maps_and_importance_but_no_prediction(tmp_path):
    saved(tmp_path, "DINOv2 without a head")
    client = local_client(create_app({"dino": shown(tmp_path)}, [Example(noise(0, 40), "")]))
    image = {"model": "dino", "image": "example-0"}
    assert ask(client, "prediction", **image)["choices"] == []
    importance = ask(client, "importance", **image, layer=1)
    assert (importance["divergence"], importance["drop"]) == (None, None)
    assert all(value > 0 for value in importance["feature"])
    relevance = client.post("/api/flow", json={**image, "query": 0, "kind": "relevance"})
    assert relevance.json()["error"] == "no_relevance"


def test_the_attention_of_a_model_can_be_swapped_and_compared(tmp_path):
    saved(tmp_path / "vit", "ViT", initializer_range=0.5)
    place = str(tmp_path / "vit")
    models, _ = open_models([place, f"{place}@cumulant2"])
    assert list(models) == ["vit", "vit cumulant2"]
    client = local_client(create_app(models, [Example(noise(0, 40), "")]))
    assert [model["attention"] for model in client.get("/api/info").json()["models"]] == ["softmax", "cumulant2"]
    mass = {name: ask(client, "attention", model=name, image="example-0", query=3)["negative_mass"] for name in models}
    assert torch.tensor(mass["vit"]).max() == 0
    assert torch.tensor(mass["vit cumulant2"]).max() > 0.01


def test_the_lens_at_logit_scale_one_ends_in_the_models_own_softmax(tmp_path):
    saved(tmp_path, "ViT", initializer_range=0.5)
    client = local_client(create_app({"vit": shown(tmp_path)}, [Example(noise(0, 40), "")]))
    question = {"model": "vit", "image": "example-0", "query": 5}
    own = torch.tensor(ask(client, "attention", **question)["weights"][1])
    lens = ask(client, "lens", **question, layer=1)["maps"][-1]
    torch.testing.assert_close(torch.tensor(lens["weights"]), own, atol=3e-6, rtol=0)


def test_video_models_of_transformers_get_their_frames_first(tmp_path):
    config = transformers.VivitConfig(**{**SIZES, "num_frames": 4, "tubelet_size": [2, 16, 16]})
    transformers.VivitForVideoClassification(config).save_pretrained(tmp_path)
    one = shown(tmp_path)
    assert one.images([noise(seed, 32) for seed in range(4)]).shape == (1, 4, 3, 32, 32)
    client = local_client(create_app({"vivit": one}, [Example(noise(0, 40), "")]))
    (info,) = client.get("/api/info").json()["models"]
    assert (info["times"], info["grid"]) == (2, [2, 2])


def test_models_of_text_and_pickled_weights_are_refused(tmp_path):
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32}
    text = transformers.BertModel(transformers.BertConfig(**sizes, vocab_size=50))
    text.save_pretrained(tmp_path / "text")
    with pytest.raises(ValueError, match="holds bert of transformers; the explorer shows models of square images"):
        shown(tmp_path / "text")
    model = saved(tmp_path / "pickled", "ViT")
    (tmp_path / "pickled" / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pickled" / "pytorch_model.bin")
    with pytest.raises(OSError, match="safetensors"):
        shown(tmp_path / "pickled")


def test_a_converted_model_is_shown_as_what_it_computes(tmp_path):
    model = saved(tmp_path / "vit", "ViT", initializer_range=0.5)
    cumulant.convert(model, layers={0: "cumulant3"})
    cumulant.convert.save(model, tmp_path / "swapped")
    models, _ = open_models([str(tmp_path / "swapped")])
    client = local_client(create_app(models, [Example(noise(0, 40), "")]))
    assert client.get("/api/info").json()["models"][0]["attention"] == "mixed"
    mass = torch.tensor(ask(client, "attention", model="swapped", image="example-0", query=3)["negative_mass"])
    assert mass[0].max() > 0.01
    assert mass[1].max() == 0
