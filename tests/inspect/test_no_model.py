"""What somebody gives who has not opened a model yet: names, classes and numbers are told as such, at every door."""

import pytest
import torch

import cumulant
from cumulant import bench, conversion, explain
from cumulant.conversion import DistillRecipe
from cumulant.train import TrainRecipe

DOORS = {
    "convert": cumulant.convert,
    "diagnose": conversion.diagnose,
    "choose_layers": conversion.choose_layers,
    "find_sites": explain.find_sites,
    "model_info": explain.model_info,
    "capture": lambda model: explain.capture(model).__enter__(),
}


@pytest.mark.parametrize("door", DOORS)
@pytest.mark.parametrize(
    ("given", "said"), [("bert", "str 'bert'"), (torch.nn.Linear, "the class Linear"), (5, "int 5")]
)
def test_what_is_no_model_is_told_with_how_to_open_one(door, given, said):
    with pytest.raises(TypeError, match=f"model must be a torch.nn.Module, got {said}; open it first: "):
        DOORS[door](given)


@pytest.mark.parametrize("data", [5, "images", True])
def test_what_is_no_batch_is_told(data):
    model = cumulant.create_model("vit_nano_patch4_32", num_classes=10, depth=1)
    with pytest.raises(TypeError, match=r"data and example must be a batch that the model is called with .*, got "):
        conversion.diagnose(model, data)


def test_maps_are_asked_for_by_the_way_to_get_them():
    with pytest.raises(TypeError, match=r"captured must be the maps of a forward pass \(with capture.*got list"):
        explain.rollout([])


@pytest.mark.parametrize(("settings", "name"), [(TrainRecipe, "lr"), (TrainRecipe, "epochs"), (DistillRecipe, "lr")])
def test_a_number_in_quotes_is_no_number(settings, name):
    with pytest.raises(TypeError, match=rf"{name} must be a number, \d or more, got '0.1'"):
        settings(**{name: "0.1"})


def test_one_name_is_no_list_of_names():
    with pytest.raises(TypeError, match=r"mechanisms must be a list of names, got 'softmax'; pass \['softmax'\]"):
        bench.scaling("softmax")


def test_a_cache_is_made_for_a_language_model():
    pytest.importorskip("transformers")
    with pytest.raises(TypeError, match="model must be a language model of transformers, got int"):
        conversion.MergedCache(5)
