"""The rate warms up and falls, matrices decay and nothing else, frozen weights are left out."""

import pytest
from torch import nn

from cumulant.models import create_model
from cumulant.train import TrainRecipe
from cumulant.train.optimise import decay_groups, learning_rate, set_drop_path


def nano(**kw):
    return create_model("vit_nano_patch2_8", **({"num_classes": 10, "init_std": 0.1, "depth": 1} | kw))


def test_only_matrices_decay():
    model = nano(qk_norm=True, distilled=True)
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, kept = decay_groups(model, 0.3)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    in_block = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    matrices = ["patch_embed.proj", *(f"blocks.0.{layer}" for layer in in_block), "head", "head_dist"]
    assert {names[id(p)] for p in decayed["params"]} == {f"{layer}.weight" for layer in matrices}
    assert len(decayed["params"]) + len(kept["params"]) == len(names)


def test_frozen_parameters_are_left_out():
    model = nano()
    model.pos_embed.requires_grad_(False)
    given = {id(p) for group in decay_groups(model, 0.3) for p in group["params"]}
    assert id(model.pos_embed) not in given
    assert len(given) == len(list(model.parameters())) - 1


def test_the_rate_warms_up_linearly_and_falls_as_a_cosine():
    recipe = TrainRecipe(epochs=12, warmup_epochs=2, lr=1.0, min_lr=0.2)
    rates = [learning_rate(recipe, epoch) for epoch in (0.0, 1.0, 2.0, 7.0, 12.0)]
    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.6, 0.2])
    assert learning_rate(TrainRecipe(epochs=1, warmup_epochs=5, lr=1.0), 1.0) == pytest.approx(0.2)


def test_the_stochastic_depth_grows_to_the_last_block():
    model = nano(depth=2)
    set_drop_path(model, 0.3)
    assert [block.drop_path.rate for block in model.blocks] == [0.0, 0.3]
    with pytest.raises(ValueError, match=r"drop_path=0.3 in the recipe, but Sequential has no set_drop_path"):
        set_drop_path(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), 0.3)
