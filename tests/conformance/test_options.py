"""Every option of every mechanism has one spelling, `name+option=value`, and it opens every door."""

from dataclasses import replace

import pytest
import torch

import cumulant
from cumulant import cli, zoo
from cumulant.conversion import fitting
from cumulant.grammar import parse, write
from cumulant.nn.swapped.choice import Choice
from cumulant.train.recipe_files import from_json, read_recipe, to_json

# A value other than the default for each option; where the option depends on another, that one comes along.
VALUES = {
    "agents": 4, "apart": 1, "around": "mean", "backend": "reference", "block": 16, "branching": 4, "chunk": 16,
    "clamp": None, "closure": "langevin", "conv": False, "energy": "l2", "eps": 0.001, "exclude_own": False,
    "find": "tree", "leaves": 2, "opened": 2, "patch": 2, "width": 2, "exact": 2, "sinks": 2,
    "full": True, "iterations": 8, "kernel": 3, "learn_ridge": True, "levels": 1, "max_len": 64, "near": 1,
    "near_rows": 2, "normalization": "sum", "pooling": "mean", "position": 2, "position_bias": False, "power": 2.0,
    "precondition": True, "qk_norm": True, "query_std": 0.1, "rank": "error", "recent": 1, "response": 0,
    "read_exponent": 0.3, "residual": 0.075,
    "ridge": 2.0, "scaled": False, "segment": 5, "solver": "cg", "summary_key": "wsum", "tolerance": 1e-06,
    "training_free": True, "tree": [[0, 1], [2, 3]], "use_alpha": False, "use_conv": False, "use_gate": False,
    "use_lepe": False, "use_position": False, "use_rope": False, "variance": "full", "variant": "axial",
}  # fmt: skip
TOKENS = {"tree"}  # says how many tokens there are, so that only a call of so many can take it
ONLY_WITH = {("cumulant3", "apart"): {"around": "mean"}, ("cumulant2", "apart"): {"around": "mean"}}
for _count in (4, 16, 64):
    ONLY_WITH[f"cluster{_count}", "leaves"] = {"opened": 2, "find": "tree"}
    ONLY_WITH[f"cluster{_count}", "opened"] = {"leaves": 2, "find": "tree"}
    ONLY_WITH[f"cluster{_count}", "patch"] = {"find": "tree"}
    ONLY_WITH[f"cluster{_count}", "width"] = {"find": "tree"}
    ONLY_WITH[f"cluster{_count}", "exact"] = {"leaves": 2, "opened": 2, "near": 2, "find": "tree"}
# What a mechanism of another order, or another form of it, does not have.
LACKS = {("cumulant1", "full"), ("cumulant2", "full"), ("cumulant1", "closure"), ("cumulant3", "closure")}
CASES = [
    (name, option)
    for name in zoo.names()
    for option in zoo.get(name).options
    if option not in TOKENS and (name, option) not in LACKS
]
WORDS = [write(name, {option: VALUES[option], **ONLY_WITH.get((name, option), {})}) for name, option in CASES]


def test_the_table_has_a_value_for_every_option():
    assert {option for name in zoo.names() for option in zoo.get(name).options} <= set(VALUES)


@pytest.mark.parametrize("word", WORDS)
def test_a_name_with_an_option_opens_every_door(word):
    name, options = parse(word)
    mechanism = zoo.get(word)
    assert mechanism.name == write(name, options)
    own = {key: value for key, value in options.items() if key in zoo.get(name).function_options}
    q, k, v = torch.randn(3, 1, 2, 16, 8).double()
    given = {"is_causal": not mechanism.noncausal}
    called = zoo.get(name)(q, k, v, **own, **given)
    torch.testing.assert_close(mechanism(q, k, v, **given), called)
    if name.startswith("cumulant"):
        direct = cumulant.attention(q, k, v, order=int(name[-1]), **options)
        torch.testing.assert_close(direct, called)

    sizes = {"num_classes": 10, "depth": 1}
    model = cumulant.create_model("vit_nano_patch2_8", attention=word, **sizes)
    layer = model.blocks[0].attn
    assert (layer.mechanism.name, layer.attention_options) == (name, options)
    apart = cumulant.create_model("vit_nano_patch2_8", attention=name, attention_options=options, **sizes)
    apart.load_state_dict(model.state_dict())
    images = torch.randn(2, 1, 8, 8)
    torch.testing.assert_close(model.eval()(images), apart.eval()(images))

    command = cli.parse(["train", "digits", "--attention", word])
    assert command.settings.attention == word
    recipe = replace(read_recipe("digits"), attention=word)
    assert from_json(to_json(recipe)).attention == word
    if name in fitting():
        assert Choice.named(word) == Choice(name, None, options)
        assert Choice.named(word).name == mechanism.name


def test_an_unknown_option_is_named_at_every_door():
    message = "unknown option 'colour' of mechanism 'linear'; accepted: chunk, eps"
    for door in (
        lambda: zoo.get("linear+colour=red"),
        lambda: cumulant.nn.MultiheadAttention(16, 2, attention="linear+colour=red"),
        lambda: cumulant.create_model("vit_nano_patch2_8", attention="linear+colour=red"),
        lambda: Choice.named("linear+colour=red"),
    ):
        with pytest.raises(ValueError, match=message):
            door()
