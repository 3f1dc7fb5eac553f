"""Maps of a model are the weights its attention really uses."""

import pytest
import torch

from cumulant import zoo
from cumulant.models import create_model
from cumulant.studies.maps import examples, inked_patch, locality, negative_mass, projections, score_maps, tokens_used


@pytest.fixture(params=["softmax", "linear", "cumulant2", "cumulant3"])
def model(request):
    torch.manual_seed(0)
    model = create_model("vit_nano_patch2_8", attention=request.param, num_classes=10).eval()
    for block in model.blocks:
        block.attn.qkv.weight.data.mul_(20)  # logits that matter
    return model


def test_a_map_times_the_values_is_what_the_layer_mixes(model):
    images = torch.randn(2, 1, 8, 8)
    name = model.blocks[0].attn.mechanism.name
    for weights, (query, key, value) in zip(score_maps(model, images), projections(model, images), strict=False):
        torch.testing.assert_close(weights @ value, zoo.get(name)(query, key, value), rtol=1e-3, atol=1e-4)


def test_there_is_a_map_for_every_layer_but_the_last_and_it_sums_to_one(model):
    maps = score_maps(model, torch.randn(2, 1, 8, 8))
    assert len(maps) == len(model.blocks) - 1
    assert maps[0].shape == (2, 4, 17, 17)
    torch.testing.assert_close(torch.stack(maps).sum(-1), torch.ones(3, 2, 4, 17), rtol=1e-4, atol=1e-4)


def test_a_map_on_one_token_uses_one_and_an_even_map_uses_all():
    assert tokens_used(torch.tensor([0.0, 1.0, 0.0, 0.0])) == pytest.approx(1)
    assert tokens_used(torch.full((17,), 1 / 17)) == pytest.approx(17)


def test_negative_mass_is_the_sum_of_the_negative_weights():
    assert negative_mass(torch.tensor([1.3, -0.1, -0.2])) == pytest.approx(0.3)


def test_locality_is_an_average_within_its_bounds(model):
    measured = locality(model, torch.randn(5, 1, 8, 8))
    assert 1 <= measured["tokens_used"] <= 17
    assert measured["negative_mass"] >= 0


def test_the_query_is_the_patch_with_most_ink():
    image = torch.zeros(8, 8)
    image[2:4, 6:8] = 1
    assert inked_patch(image, 2) == 7


def test_examples_are_the_first_image_of_each_class(model):
    images, labels = torch.randn(6, 1, 8, 8), torch.tensor([3, 0, 0, 7, 3, 7])
    shown = examples({"a": model}, images, labels, classes=(0, 3, 9))
    assert [(one["label"], one["test_image"]) for one in shown["examples"]] == [(0, 1), (3, 0)]
    first = shown["examples"][0]
    row = score_maps(model, images[[1]])[1][0, 2, first["query"] + 1]
    assert first["scores"]["a"][1][2] == pytest.approx(row.tolist(), abs=1e-4)
    assert min(map(min, first["image"])) >= 0
    assert max(map(max, first["image"])) <= 1
