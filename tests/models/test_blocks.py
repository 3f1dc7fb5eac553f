"""Each block of a model may have a mechanism of its own, written one way at every door; and tokens may be causal."""

from dataclasses import replace

import pytest
import torch

import cumulant
from cumulant.grammar import read_blocks, write_blocks
from cumulant.studies.configuration import configured
from cumulant.train import TrainRecipe
from cumulant.train.recipe_files import from_json, parse_recipe, to_json

LIST = ["agent"] * 2 + ["softmax", "cumulant3+full"]
TEXT = "2xagent,softmax,cumulant3+full"
VIT, VIVIT = "vit_nano_patch2_8", "vivit_nano_patch4x2_16"


def names(blocks):
    return [block.attn.mechanism.name for block in blocks]


@pytest.mark.parametrize("given", [LIST, tuple(LIST), TEXT])
def test_every_block_has_its_own_mechanism(given):
    model = cumulant.create_model(VIT, attention=given, num_classes=10)
    assert names(model.blocks) == ["agent", "agent", "softmax", "cumulant3"]
    assert model.blocks[3].attn.attention_options == {"full": True}
    assert model.config["attention"] == TEXT
    again = cumulant.create_model(**model.config)
    again.load_state_dict(model.state_dict())
    images = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(again(images), model(images))


def test_the_text_is_read_and_written():
    assert read_blocks(TEXT) == LIST
    assert write_blocks(LIST) == TEXT
    assert read_blocks("agent+agents=[2,2],softmax") == ["agent+agents=[2,2]", "softmax"]
    assert read_blocks("softmax") == ["softmax"]


def test_options_reach_the_blocks_that_have_them():
    model = cumulant.create_model(VIT, attention=LIST, attention_options={"agents": 4}, num_classes=10)
    assert [block.attn.attention_options for block in model.blocks] == [{"agents": 4}] * 2 + [{}, {"full": True}]
    with pytest.raises(ValueError, match=r"unknown option 'agnets'.*did you mean 'agents'"):
        cumulant.create_model(VIT, attention=LIST, attention_options={"agnets": 4})


def test_a_video_model_takes_one_for_each_block_of_both_encoders():
    joint = cumulant.create_model(VIVIT, attention=["linear", "softmax", "cumulant2"], num_classes=3)
    assert names(joint.blocks) == ["linear", "softmax", "cumulant2"]
    two = cumulant.create_model(VIVIT, variant=2, attention="3xlinear,softmax", num_classes=3)
    assert (names(two.blocks), names(two.temporal_blocks)) == (["linear"] * 3, ["softmax"])
    three = cumulant.create_model(VIVIT, variant=3, pool="gap", attention="linear,2xsoftmax", num_classes=3)
    assert three.blocks[0].temporal_attn.mechanism.name == "linear"


def test_recipes_and_studies_write_it_alike():
    recipe = TrainRecipe(model=VIT, attention=LIST)
    assert recipe.attention == TEXT == parse_recipe(f"attention = {LIST}").attention
    assert parse_recipe(f'attention = "{TEXT}"').attention == from_json(to_json(recipe)).attention == TEXT
    named = configured(replace(recipe, attention="softmax"), "2xagent+agents=4,2xsoftmax+pool=gap")
    assert (named.attention, named.model_options) == ("2xagent+agents=4,2xsoftmax", {"pool": "gap"})


@pytest.mark.parametrize(
    ("given", "kind", "said"),
    [
        (["softmax"] * 3, ValueError, "one for each of the 4 blocks, got 3 names"),
        ("2xagent,softmax", ValueError, "one for each of the 4 blocks, got 3 names"),
        (["softmax", "sotfmax", "linear", "linear"], ValueError, "did you mean 'softmax'"),
        ("0xagent,4xsoftmax", ValueError, "written 4xagent,8xsoftmax"),
        ("softmax,,linear", ValueError, "written 4xagent,8xsoftmax"),
        ([], ValueError, "an empty list"),
        ([1, 2, 3, 4], TypeError, "attention must be a name"),
        (None, TypeError, "attention must be a name"),
    ],
)
def test_what_is_no_mechanism_for_each_block_is_said(given, kind, said):
    with pytest.raises(kind, match=said):
        cumulant.create_model(VIT, attention=given)


def test_a_causal_vit_with_aaren_reads_the_prefix_of_each_token_and_classifies_from_the_last():
    torch.manual_seed(0)
    model = cumulant.create_model(VIT, attention="aaren", is_causal=True, pool="last", num_classes=10).eval()
    images = torch.randn(2, 1, 8, 8)
    below = images.clone()
    below[:, :, 4:] += 1
    tokens, changed = model.forward_features(images), model.forward_features(below)
    torch.testing.assert_close(tokens[:, :8], changed[:, :8])  # the upper half of the image does not see the lower
    assert (tokens[:, 8:] - changed[:, 8:]).abs().amin((0, 2)).min() > 0
    torch.testing.assert_close(model(images), model.head(tokens[:, -1]))
    with pytest.raises(ValueError, match='pool="cls" reads the first token'):
        cumulant.create_model(VIT, is_causal=True)
