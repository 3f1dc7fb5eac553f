import copy

import pytest
import torch
from small_models import WORDS, bert, llama, loud, transformers, vit

import cumulant
from cumulant.conversion import DistillRecipe, convert, count_calls, distill, load
from cumulant.conversion.distill_losses import answer_loss, unexplained
from cumulant.inspect.batches import answer, call

STEPS = 8


class KilledError(Exception):
    """Stands for the end of a process."""


class Batches:
    """Noise images that depend on epoch and step alone; `kill` ends the run when that step is asked for."""

    def __init__(self, steps=STEPS, kill=None, shape=(1, 8, 8)):
        self.steps, self.kill, self.shape, self.asked = steps, kill, shape, 0

    def __len__(self):
        return self.steps

    def epoch(self, epoch, first_step=0):
        for step in range(first_step, self.steps):
            if self.kill is not None and epoch * self.steps + step == self.kill and self.asked:
                raise KilledError
            self.asked += 1
            generator = torch.Generator().manual_seed(1000 * epoch + step)
            yield torch.randn(4, *self.shape, generator=generator)


def pair(attention="cumulant3", **how):
    """A small ViT of ours whose attention is far from uniform, and a converted copy."""
    torch.manual_seed(0)
    teacher = cumulant.create_model("vit_nano_patch2_8", num_classes=10, init_std=0.2).eval()
    model = copy.deepcopy(teacher)
    convert(model, attention, **how)
    return model, teacher


def quick(**kw):
    return DistillRecipe(**{"epochs": 1, "layer_share": 0.5, "layer_lr": 3e-3, "lr": 1e-3, "checkpoint_steps": 2, **kw})


def weights(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def same(a, b):
    return all(torch.equal(a[name], b[name]) for name in a)


def test_the_first_part_trains_the_replaced_layers_and_nothing_else():
    model, teacher = pair(layers=[1, 2])
    before = weights(model)
    result = distill(model, teacher, Batches(), quick(layer_share=1.0, epochs=3))
    changed = {
        name.rsplit(".", 2)[0] for name, tensor in weights(model).items() if not torch.equal(tensor, before[name])
    }
    assert changed == {"blocks.1.attn", "blocks.2.attn"}
    start, after = (sum(pair[at] for pair in result.layers.values()) for at in (0, 1))
    assert after < 0.5 * start


def test_layers_are_compared_on_the_inputs_of_the_teacher():
    """The last layer alone, before any step: its miss must not depend on what stands before it in the student."""
    model, teacher = pair(layers=[3])
    both, _ = pair()
    alone = distill(model, teacher, Batches(1), quick(layer_share=0.0)).layers["blocks.3.attn"][0]
    among = distill(both, teacher, Batches(1), quick(layer_share=0.0)).layers["blocks.3.attn"][0]
    assert alone == pytest.approx(among, rel=1e-5)


def test_the_second_part_brings_the_answers_nearer():
    model, teacher = pair("cumulant3+apart=0")
    images = next(Batches().epoch(9))
    result = distill(model, teacher, Batches(), quick(layer_share=0.0, epochs=4), measure=images)
    assert result.change[1] < 0.7 * result.change[0]
    assert result.losses["answers"][1] < result.losses["answers"][0]


@pytest.mark.parametrize("kill", [1, 2, 3, 6])
def test_a_killed_run_goes_on_to_the_same_weights_bit_for_bit(kill, tmp_path):
    """Killed in the first part, at its end, in the second part, and in the second epoch."""
    recipe = quick(epochs=2, layer_share=0.25, checkpoint_steps=1)
    whole, teacher = pair(layers=[1])
    distill(whole, teacher, Batches(4), recipe, out=tmp_path / "whole")
    model, _ = pair(layers=[1])
    with pytest.raises(KilledError):
        distill(model, teacher, Batches(4, kill=kill), recipe, out=tmp_path / "killed")
    again, _ = pair(layers=[1])
    later = Batches(4)
    distill(again, teacher, later, recipe, out=tmp_path / "killed")
    assert same(weights(again), weights(whole))
    assert later.asked == 8 - kill + 1  # and the batch on which layers are compared
    log = [(tmp_path / name / "log.jsonl").read_text().count("\n") for name in ("whole", "killed")]
    assert log[0] == log[1]


def test_the_saved_model_loads_with_one_line_and_is_the_converted_one(tmp_path):
    model, teacher = pair(layers=[0, 2, 3])
    images = next(Batches().epoch(5))
    distill(model, teacher, Batches(), quick(), out=tmp_path)
    loaded = load(tmp_path)
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))
    assert count_calls(loaded, images, ["blocks.0.attn", "blocks.2.attn", "blocks.3.attn"])
    assert not same(weights(loaded), weights(teacher))
    assert [block.attn.mechanism.name for block in loaded.blocks] == ["cumulant3", "softmax", "cumulant3", "cumulant3"]
    assert not list(tmp_path.glob("state*"))


def test_a_finished_run_is_only_read(tmp_path):
    model, teacher = pair()
    first = distill(model, teacher, Batches(), quick(), out=tmp_path)
    again, _ = pair()
    data = Batches()
    assert distill(again, teacher, data, quick(), out=tmp_path) == first
    assert data.asked == 0
    assert same(weights(again), weights(model))


def test_another_recipe_or_teacher_in_the_same_folder_is_refused_by_name(tmp_path):
    model, teacher = pair()
    distill(model, teacher, Batches(), quick(), out=tmp_path)
    again, _ = pair()
    with pytest.raises(ValueError, match=r"lr was 0.001, now 0.5"):
        distill(again, teacher, Batches(), quick(lr=0.5), out=tmp_path)
    other = copy.deepcopy(teacher)
    with torch.no_grad():
        other.head.bias += 1
    with pytest.raises(ValueError, match="teacher"):
        distill(again, other, Batches(), quick(), out=tmp_path)
    distill(again, other, Batches(), quick(), out=tmp_path, fresh=True)


def test_weights_that_are_frozen_by_name_stay_in_both_parts():
    model, teacher = pair()
    before = weights(model)
    distill(model, teacher, Batches(4), quick(frozen=("patch_embed", "blocks.0.")))
    changed = {name for name, weight in weights(model).items() if not torch.equal(weight, before[name])}
    assert changed
    assert not any(name.startswith(("patch_embed", "blocks.0.")) for name in changed)


def test_models_are_left_as_they_were_but_for_weights():
    model, teacher = pair()
    model.train()
    frozen = model.head.weight.requires_grad_(False)
    before = weights(teacher)
    distill(model, teacher, Batches(2), quick())
    assert model.training
    assert not frozen.requires_grad
    assert model.blocks[0].attn.qkv.weight.requires_grad
    assert model.blocks[0].attn.qkv.weight.grad is None
    assert same(weights(teacher), before)


@pytest.mark.parametrize("wrong", ["converted teacher", "same model", "not converted", "no batch"])
def test_what_cannot_be_distilled_is_said(wrong):
    model, teacher = pair()
    if wrong == "converted teacher":
        with pytest.raises(ValueError, match="teacher is converted"):
            distill(model, copy.deepcopy(model), Batches())
    elif wrong == "same model":
        with pytest.raises(ValueError, match="teacher"):
            distill(model, model, Batches())
    elif wrong == "not converted":
        with pytest.raises(ValueError, match="is not converted"):
            distill(copy.deepcopy(teacher), teacher, Batches())
    else:
        with pytest.raises(ValueError, match="no batch"):
            distill(model, teacher, [])


def test_a_loss_that_is_no_number_names_the_rate():
    model, teacher = pair()
    with pytest.raises(FloatingPointError, match=r"layer_lr \(now 1e\+30\)"):
        distill(model, teacher, Batches(), quick(layer_lr=1e30, layer_share=1.0, clip=None))


def tokens(count=6):
    """Texts of 7 tokens, every second padded after the fifth."""
    made = []
    for number in range(count):
        ids = torch.randint(3, WORDS, (4, 7), generator=torch.Generator().manual_seed(number))
        mask = torch.ones_like(ids)
        mask[1::2, 5:] = 0
        made.append({"input_ids": ids * mask, "attention_mask": mask})
    return made


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_models_of_transformers_come_nearer_with_padding_and_causal_rows(kind, tmp_path):
    transformers()
    torch.manual_seed(0)
    teacher = {"bert": bert, "llama": llama}[kind](initializer_range=0.3)
    model = copy.deepcopy(teacher)
    convert(model, "cumulant3")
    implementation = teacher.config._attn_implementation
    recipe = quick(epochs=4, layer_lr=1e-2)
    result = distill(model, teacher, tokens(), recipe, out=tmp_path, measure=tokens(1))
    assert all(after < start for start, after in result.layers.values())
    assert result.change[1] < result.change[0]
    assert teacher.config._attn_implementation == implementation
    assert model.config.use_cache == teacher.config.use_cache
    batch = tokens(1)[0]
    with torch.no_grad():
        assert torch.equal(answer(call(load(tmp_path).eval(), batch)), answer(call(model, batch)))


@pytest.mark.timm
def test_a_model_of_timm_comes_nearer():
    torch.manual_seed(0)
    teacher = loud(vit())
    model = copy.deepcopy(teacher)
    convert(model, "cumulant2+apart=0")
    images = torch.randn(4, 3, 32, 32)
    recipe = quick(epochs=4, loss="mse", layer_lr=3e-4, lr=1e-4)  # its first weights are small
    result = distill(model, teacher, Batches(shape=(3, 32, 32)), recipe, measure=images)
    assert result.change[1] < result.change[0]


def test_bfloat16_keeps_weights_in_float32():
    model, teacher = pair()
    result = distill(model, teacher, Batches(4), quick(precision="bf16"))
    assert model.blocks[0].attn.qkv.weight.dtype == torch.float32
    assert result.losses["layers"][1] < 1


def test_padding_does_not_count_in_the_losses():
    wanted, found = torch.randn(2, 3, 5), torch.randn(2, 3, 5)
    mask = torch.tensor([[1, 1, 0], [1, 1, 1]])
    changed = found.clone()
    changed[0, 2] = 100
    for kind in ("kl", "mse", "cosine"):
        assert torch.equal(answer_loss(kind, found, wanted, mask, 1.0), answer_loss(kind, changed, wanted, mask, 1.0))
    kept = mask.bool()
    assert unexplained(found, wanted, mask) == pytest.approx(float(unexplained(found[kept][None], wanted[kept][None])))


def test_losses_vanish_for_equal_answers_only():
    x = torch.randn(4, 6)
    for kind in ("kl", "mse", "cosine"):
        assert float(answer_loss(kind, x, x, None, 2.0)) == pytest.approx(0, abs=1e-6)
        assert float(answer_loss(kind, x + torch.randn(4, 6), x, None, 2.0)) > 1e-3


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"loss": "l1"}, "loss must be one of auto, kl, mse, cosine, got 'l1'"),
        ({"precision": "fp16"}, "precision must be one of fp32, bf16, got 'fp16'"),
        ({"layer_share": 2.0}, "layer_share must be from 0 to 1, got 2.0"),
    ],
    ids=["loss", "precision", "share"],
)
def test_a_wrong_value_of_the_recipe_is_told_at_once(wrong, message):
    with pytest.raises(ValueError, match=message):
        DistillRecipe(**wrong)


def test_a_teacher_without_the_replaced_layers_is_refused_by_their_names():
    student, teacher = (cumulant.create_model("vit_nano_patch2_8", num_classes=10, depth=n) for n in (2, 1))
    convert(student)
    with pytest.raises(ValueError, match=r"it has no layer blocks\.1\.attn"):
        distill(student, teacher, torch.randn(2, 1, 8, 8))
