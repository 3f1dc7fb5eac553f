"""Maps of a model are the weights its attention really uses."""

import base64
from dataclasses import replace

import pytest
import torch

from cumulant import zoo
from cumulant.data.source import digits_source
from cumulant.explain.metrics import negative_mass, tokens_used
from cumulant.models import create_model
from cumulant.studies.maps import (
    clip_grid,
    example_maps,
    first_of_classes,
    locality,
    look,
    mapped_layers,
    projections,
    row_of,
    score_maps,
    striking_patch,
)
from cumulant.train import read_recipe
from cumulant.train.build import augment_of


def sharpened(model):
    for block in model.blocks:
        block.attn.qkv.weight.data.mul_(20)  # logits that matter
    return model.eval()


@pytest.fixture(params=["softmax", "linear", "cumulant2", "cumulant3"])
def model(request):
    torch.manual_seed(0)
    return sharpened(create_model("vit_nano_patch2_8", attention=request.param, num_classes=10))


def test_a_map_times_the_values_is_what_the_layer_mixes(model):
    images = torch.randn(2, 1, 8, 8)
    name = model.blocks[0].attn.mechanism.name
    for weights, (query, key, value) in zip(score_maps(model, images), projections(model, images), strict=False):
        torch.testing.assert_close(weights @ value, zoo.get(name)(query, key, value), rtol=1e-3, atol=1e-4)


def test_there_is_a_map_for_every_layer_but_the_last_and_it_sums_to_one(model):
    maps = list(score_maps(model, torch.randn(2, 1, 8, 8)))
    assert len(maps) == len(model.blocks) - 1
    assert maps[0].shape == (2, 4, 17, 17)
    torch.testing.assert_close(torch.stack(maps).sum(-1), torch.ones(3, 2, 4, 17), rtol=1e-4, atol=1e-4)


def test_with_mean_pooling_the_last_layer_counts_too():
    model = create_model("vit_nano_patch2_8", pool="gap", num_classes=10)
    assert len(mapped_layers(model)) == len(model.blocks)


def test_a_map_on_one_token_uses_one_and_an_even_map_uses_all():
    assert tokens_used(torch.tensor([0.0, 1.0, 0.0, 0.0])) == pytest.approx(1)
    assert tokens_used(torch.full((17,), 1 / 17)) == pytest.approx(17)


def test_negative_mass_is_the_sum_of_the_negative_weights():
    assert negative_mass(torch.tensor([1.3, -0.1, -0.2])) == pytest.approx(0.3)


def test_locality_is_an_average_within_its_bounds(model):
    measured = locality(model, torch.randn(5, 1, 8, 8))
    assert 1 <= measured["tokens_used"] <= 17
    assert measured["negative_mass"] >= 0
    assert measured["tokens"] == 17


def test_the_query_is_the_patch_with_most_contrast_away_from_the_border():
    picture = torch.zeros(3, 8, 8)
    picture[:, 2, 4] = 0.5
    picture[:, 0, 0] = 1.0
    assert striking_patch(picture, (4, 4)) == 6
    assert striking_patch(picture, (2, 2)) == 0, "of a few patches all are at the border"


def test_items_to_show_are_the_first_of_classes_spread_over_all():
    part = digits_source().test
    shown = first_of_classes(part, 10, 4)
    assert part.labels[shown].tolist() == [0, 3, 6, 9]
    assert all(not (part.labels[:item] == part.labels[item]).any() for item in shown)


def test_shown_maps_are_the_rows_of_the_marked_patch():
    torch.manual_seed(0)
    model = sharpened(create_model("vit_nano_patch2_8", attention="cumulant3", num_classes=10, in_chans=3))
    source, augment = digits_source(), augment_of(read_recipe("digits"), 10)
    shown = example_maps(model, source.test, [5, 9], 8, augment)
    assert shown["layers"] == [1, 2, 3]
    assert (shown["grid"], shown["prefix"]) == ([1, 4, 4], 1)
    inputs = augment.evaluate(torch.stack([source.test.decode(item, 8) for item in (5, 9)]))
    second = list(score_maps(model, inputs))[1]
    row = second[1, 2, 1 + shown["items"][1]["query"]]
    assert shown["scores"][1][1][2] == pytest.approx(row.tolist(), abs=1e-4)
    pixels = base64.b64decode(shown["items"][0]["pixels"])
    assert pixels == source.test.decode(5, 8).permute(1, 2, 0).contiguous().numpy().tobytes()


@pytest.mark.parametrize("variant", [1, 2, 3, 4, "average"])
def test_maps_of_clips_hold_every_frame_and_sum_to_one(variant):
    torch.manual_seed(0)
    model = sharpened(
        create_model("vivit_nano_patch4x2_16", variant=variant, num_classes=3, in_chans=3, zero_head=False)
    )
    grid, prefix, frame, patch = clip_grid(model), model.num_prefix_tokens, 2, 5
    assert grid == (4, 4, 4)
    weights = next(score_maps(model, torch.randn(2, 3, 8, 16, 16)))
    row = row_of(weights, 1, frame, patch, grid, prefix)
    assert row.shape == (4, 1 + 64)
    if variant in (1, 4):  # one map over the whole clip
        torch.testing.assert_close(row.sum(-1), torch.ones(4))
        expected = weights[1, :, prefix + frame * 16 + patch, prefix:]
        torch.testing.assert_close(row[:, 1:], expected)
    else:  # a map of its own in every frame
        of_frame = row[:, 1 + 16 * frame : 17 + 16 * frame]
        torch.testing.assert_close(row[:, 0] + of_frame.sum(-1), torch.ones(4))


def test_a_mechanism_without_weights_has_nothing_to_look_at():
    model = create_model("vit_nano_patch2_8", attention="linear", num_classes=10, in_chans=3)
    for block in model.blocks:
        block.attn.mechanism = replace(block.attn.mechanism, row_weights=None)
    assert look(model, read_recipe("digits"), digits_source(), examples=True) is None
