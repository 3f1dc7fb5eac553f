"""The training loop learns, repeats itself bit for bit, decays what it should, and stops at a NaN."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from cumulant.data import Split, digits
from cumulant.models import create_model
from cumulant.train import Recipe, evaluate, fit
from cumulant.train.loop import decay_groups, learning_rate


def nano(seed=0, **kw):
    torch.manual_seed(seed)
    return create_model("vit_nano_patch2_8", **({"num_classes": 10, "init_std": 0.1, "depth": 1} | kw))


def few(count=96):
    """A small part of the digits, for tests that only need something to train on."""
    whole = digits()
    return Split(
        whole.train_images[:count], whole.train_labels[:count], whole.test_images[:50], whole.test_labels[:50], 10
    )


SHORT = Recipe(epochs=2, batch_size=32, warmup_epochs=1)


@pytest.mark.parametrize("attention", ["softmax", "cumulant3"])
def test_a_nano_vit_learns_the_digits(attention):
    model = nano(attention=attention, depth=2)
    history = fit(model, digits(), Recipe(epochs=8))
    assert history.loss[-1] < 0.6 * history.loss[0]
    assert history.test_accuracy[-1] > 0.8


def test_history_has_one_entry_per_epoch_and_ends_with_the_models_accuracy():
    model, split, seen = nano(), few(), []
    history = fit(model, split, SHORT, on_epoch=lambda epoch, so_far: seen.append((epoch, len(so_far.loss))))
    assert seen == [(1, 1), (2, 2)]
    assert len(history.loss) == len(history.seconds) == len(history.test_accuracy) == 2
    assert history.test_accuracy[-1] == evaluate(model, split.test_images, split.test_labels)


def train(seed, **changes):
    model = nano(drop_path=0.2, drop_rate=0.1)
    history = fit(model, few(), replace(SHORT, seed=seed, shift=1, **changes))
    return history.loss, model.state_dict()


def test_a_seed_fixes_the_result_bit_for_bit():
    torch.manual_seed(1)
    loss, state = train(seed=5)
    torch.manual_seed(2)
    again, same = train(seed=5)
    assert loss == again
    assert all(torch.equal(state[name], same[name]) for name in state)
    assert loss != train(seed=6)[0]


def test_the_random_state_of_the_caller_is_left_alone():
    model = nano(drop_rate=0.1)
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    fit(model, few(), SHORT)
    assert torch.equal(torch.rand(4), expected)


def test_every_image_is_used_once_an_epoch_also_in_a_last_smaller_batch():
    class Counter(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear, self.seen = nn.Linear(64, 10), []

        def forward(self, x):
            if self.training:
                self.seen.append(x.detach().clone())
            return self.linear(x.flatten(1))

    model, split = Counter(), few(70)
    fit(model, split, replace(SHORT, epochs=1))
    assert [len(batch) for batch in model.seen] == [32, 32, 6]
    used, all_images = torch.cat(model.seen).flatten(1), split.train_images.flatten(1)
    assert not torch.equal(used, all_images)
    assert torch.equal(used.sum(1).sort().values, all_images.sum(1).sort().values)


def test_only_matrices_decay():
    model = nano(qk_norm=True, distilled=True)
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, kept = decay_groups(model, 0.3)
    assert (decayed["weight_decay"], kept["weight_decay"]) == (0.3, 0.0)
    in_block = ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
    matrices = ["patch_embed.proj", *(f"blocks.0.{layer}" for layer in in_block), "head", "head_dist"]
    assert {names[id(p)] for p in decayed["params"]} == {f"{layer}.weight" for layer in matrices}
    assert len(decayed["params"]) + len(kept["params"]) == len(names)


def test_frozen_parameters_stay_as_they_are():
    model = nano()
    model.pos_embed.requires_grad_(False)
    before = model.pos_embed.clone()
    fit(model, few(), SHORT)
    assert torch.equal(model.pos_embed, before)


def test_the_rate_warms_up_linearly_and_falls_as_a_cosine():
    recipe = Recipe(epochs=12, warmup_epochs=2, lr=1.0, min_lr=0.2)
    rates = [learning_rate(recipe, epoch) for epoch in (0.0, 1.0, 2.0, 7.0, 12.0)]
    assert rates == pytest.approx([0.0, 0.5, 1.0, 0.6, 0.2])
    assert learning_rate(Recipe(epochs=1, warmup_epochs=5, lr=1.0), 1.0) == pytest.approx(0.2)


def test_the_recipe_sets_the_stochastic_depth_of_the_model():
    model = nano(depth=2)
    fit(model, few(), replace(SHORT, epochs=1, drop_path=0.3))
    assert [block.drop_path.rate for block in model.blocks] == [0.0, 0.3]
    with pytest.raises(ValueError, match=r"drop_path=0.3 in the recipe, but Sequential has no set_drop_path"):
        fit(nn.Sequential(nn.Flatten(), nn.Linear(64, 10)), few(), replace(SHORT, drop_path=0.3))


def test_a_loss_that_is_not_finite_is_an_error_that_says_so():
    split = few()
    split.train_images[3] = float("nan")
    with pytest.raises(FloatingPointError, match=r"loss became nan in epoch 1; lower lr \(now 0.002\)"):
        fit(nano(), split, SHORT)


def test_evaluation_counts_and_restores_the_mode():
    model = nn.Sequential(nn.Flatten(), nn.Linear(4, 3, bias=False))
    model[1].weight.data = torch.eye(3, 4)
    images = torch.eye(4)[[0, 1, 2, 0]].reshape(4, 1, 2, 2)
    assert evaluate(model, images, torch.tensor([0, 1, 2, 2]), batch_size=3) == 0.75
    assert model.training
    with pytest.raises(ValueError, match="must not be empty"):
        evaluate(model, images[:0], torch.tensor([]))


@pytest.mark.parametrize(
    ("field", "value"),
    [("epochs", 0), ("batch_size", 0), ("lr", -1.0), ("label_smoothing", 1.0), ("clip", 0.0), ("shift", -1)],
)
def test_a_recipe_refuses_values_that_make_no_sense(field, value):
    with pytest.raises(ValueError, match=f"{field} must .*got {value}"):
        Recipe(**{field: value})
