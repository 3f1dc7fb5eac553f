"""What a run starts from, what chooses its best weights, and where else its log goes."""

import io
import json
import subprocess
import sys
import types
from dataclasses import replace

import pytest
import torch
from small_runs import FULL, PLAIN, few_digits

from cumulant import create_model
from cumulant.data import Augmentation, Source, TensorImages
from cumulant.data.holdout import split_off
from cumulant.data.order import mix
from cumulant.data.text import sentences_source
from cumulant.train import evaluate_checkpoint, load, read_log, read_recipe, save, train
from cumulant.train.build import AUGMENT, DROPOUT, INITIAL, build_model
from cumulant.train.checkpoint import read_header, start_from

ONE = replace(PLAIN.lasting(1), warmup_epochs=0.0, checkpoint_steps=0)
SMALL = {"depth": 1, "embed_dim": 32, "num_classes": 10, "in_chans": 3}


def test_the_streams_of_random_numbers_share_no_seed_with_the_order_of_any_epoch():
    steps = torch.arange(2000).numpy()
    order = {int(mix(0, epoch)) for epoch in range(2000)}
    assert int(mix(0, INITIAL)) not in order
    slots = {int(one) for epoch in range(8) for one in mix(0, epoch, steps)}
    assert slots.isdisjoint(mix(0, AUGMENT, steps).tolist())
    assert len({INITIAL, AUGMENT, DROPOUT}) == 3
    assert max(INITIAL, AUGMENT, DROPOUT) < 0  # epochs count from 0


def test_the_best_weights_are_chosen_on_the_hold_out_and_scored_on_the_test_part(tmp_path):
    result = train(replace(FULL, epochs=4), tmp_path, source=few_digits())
    lines = read_log(tmp_path)
    held = {line["epoch"]: line["top1"] for line in lines if line["kind"] == "holdout"}
    tested = {line["epoch"]: line["top1"] for line in lines if line["kind"] == "test"}
    best = max(epoch for epoch, top1 in held.items() if top1 == max(held.values()))
    assert (result.best_epoch, result.best_top1) == (best, tested[best])
    assert int(read_header(tmp_path / "best.safetensors")["epoch"]) == best
    chosen = Source("held", "image", few_digits().train, split_off(few_digits().train, FULL.holdout)[1],
                    few_digits().classes)  # fmt: skip
    found, _ = evaluate_checkpoint(tmp_path / "best.safetensors", source=chosen)
    assert found.top(1) == held[best]


def test_without_a_hold_out_everything_is_trained_on_and_only_the_last_weights_are_kept(tmp_path):
    result = train(replace(ONE, holdout=0.0), tmp_path, source=few_digits())
    assert result.steps == 112 // 16
    assert (result.best_epoch, result.best_top1) == (1, result.top1)
    assert not (tmp_path / "best.safetensors").exists()


def test_of_a_text_the_end_is_held_out(tmp_path):
    text = sentences_source(context=64)
    kept, held = split_off(text.train, 0.1)
    assert torch.equal(torch.cat([kept.tokens, held.tokens]), text.train.tokens)
    assert len(held.tokens) == len(text.train.tokens) // 10
    assert held.bytes_per_token == pytest.approx(text.train.bytes_per_token, rel=1e-3)
    recipe = replace(read_recipe("sentences").lasting(1), holdout=0.5, warmup_epochs=0.0, batch_size=256)
    small = {"embed_dim": 16, "depth": 1, "num_heads": 2}
    result = train(replace(recipe, model_options={**recipe.model_options, **small}), tmp_path)
    assert result.best_nats == result.nats
    assert [line["kind"] for line in read_log(tmp_path)][-2:] == ["holdout", "test"]


def test_training_sees_nothing_of_the_hold_out(tmp_path):
    """Other pixels and labels there, other test pixels too: the same weights in the end."""
    known = few_digits()
    kept, held = split_off(known.train, FULL.holdout)
    images = known.train.images.clone()
    taken = torch.tensor([any(torch.equal(one, other) for other in held.images) for one in images])
    assert taken.sum() == len(held)
    images[taken] = 255 - images[taken]
    other = Source("few digits", "image", TensorImages(images, known.train.labels), known.test, known.classes)
    weights = [load(train(ONE, tmp_path / str(i), source=one).out).state_dict() for i, one in enumerate((known, other))]
    assert all(torch.equal(tensor, weights[1][name]) for name, tensor in weights[0].items())
    assert len(kept) + len(held) == len(known.train)


def test_a_run_starts_from_the_weights_of_another_and_makes_a_head_for_other_classes(tmp_path):
    first = train(ONE, tmp_path / "first", source=few_digits())
    half = Source(
        "half", "image", *(TensorImages(p.images[p.labels < 5], p.labels[p.labels < 5])
                           for p in (few_digits().train, few_digits().test)), tuple("01234"),
    )  # fmt: skip
    screen = io.StringIO()
    recipe = replace(ONE, data="half", init=str(first.out), lr=0.0, min_lr=0.0, weight_decay=0.0, ema=0.0)
    second = train(recipe, tmp_path / "second", source=half, progress=screen)
    known, found = (load(run.out).state_dict() for run in (first, second))
    assert [name for name in known if not torch.equal(known[name], found[name])] == ["head.weight", "head.bias"]
    told = screen.getvalue().splitlines()[0]
    assert f"begins with the weights of {first.out}, but for head.weight, head.bias" in told


def test_weights_for_another_size_have_their_positions_resized(tmp_path):
    small, large = (create_model("vit_nano_patch2_8", img_size=size, **SMALL) for size in (8, 16))
    start_from(large, str(save(small, tmp_path / "small.safetensors")))
    twin = create_model("vit_nano_patch2_8", img_size=16, **SMALL)
    twin.load_state_dict(small.state_dict())
    images = torch.rand(2, 3, 16, 16)
    assert torch.equal(large.eval()(images), twin.eval()(images))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"depth": 2}, r"has nothing for blocks.1.norm1.weight"),
        ({"embed_dim": 64}, r"size mismatch for cls_token"),
        ({"pool": "gap"}, r"has no cls_token: give the model the options that those weights have"),
        ({"in_chans": 1}, r"size mismatch for patch_embed.proj.weight"),
    ],
)
def test_weights_that_do_not_fit_are_refused_by_name(tmp_path, options, message):
    file = save(create_model("vit_nano_patch2_8", **SMALL), tmp_path / "small.safetensors")
    with pytest.raises(ValueError, match=rf"small.safetensors' does not fit vit_nano_patch2_8.*{message}"):
        start_from(create_model("vit_nano_patch2_8", **{**SMALL, **options}), str(file))


def test_parameters_that_only_another_mechanism_has_stay_as_made_and_are_told(tmp_path):
    file = save(create_model("vit_nano_patch2_8", **SMALL), tmp_path / "softmax.safetensors")
    model = create_model("vit_nano_patch2_8", attention="focused_linear", **SMALL)
    fresh = start_from(model, str(file))
    assert fresh
    assert all(".attn." in name for name in fresh)


def test_a_state_dict_of_torch_under_the_names_of_timm_is_read_and_code_in_it_is_not_run(tmp_path):
    model, other = (create_model("vit_nano_patch2_8", **SMALL) for _ in range(2))
    wrapped = {f"module.{name}": tensor for name, tensor in model.state_dict().items()}
    torch.save({"state_dict": wrapped}, tmp_path / "timm.pth")
    assert start_from(other, str(tmp_path / "timm.pth")) == []
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), other.parameters(), strict=True))
    torch.save({"model": subprocess.Popen}, tmp_path / "code.pth")
    with pytest.raises(ValueError, match=r"code.pth holds no plain tensors"):
        start_from(other, str(tmp_path / "code.pth"))


def test_a_video_model_starts_from_an_image_model(tmp_path):
    sizes = {"depth": 1, "embed_dim": 32, "num_classes": 10}
    image = create_model("vit_nano_patch4_32", img_size=16, in_chans=1, **sizes)
    video = create_model("vivit_nano_patch4x2_16", variant=1, **sizes)
    start_from(video, str(save(image, tmp_path / "image.safetensors")))
    assert torch.equal(video.blocks[0].attn.qkv.weight, image.blocks[0].attn.qkv.weight)


def test_a_missing_start_is_told_before_anything_is_trained(tmp_path):
    with pytest.raises(FileNotFoundError, match="no checkpoint at nowhere"):
        train(replace(ONE, init="nowhere"), tmp_path, source=few_digits())


@pytest.mark.timm
def test_the_weights_of_timm_give_its_outputs(tmp_path):
    import timm

    theirs = timm.create_model("vit_tiny_patch16_224", img_size=32, num_classes=7, depth=2).eval()
    torch.save(theirs.state_dict(), tmp_path / "theirs.pth")
    ours = create_model("vit_tiny_patch16_224", img_size=32, num_classes=7, depth=2).eval()
    assert start_from(ours, str(tmp_path / "theirs.pth")) == []
    images = torch.rand(2, 3, 32, 32)
    torch.testing.assert_close(ours(images), theirs(images), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "how", [{"mean": (0.3,), "std": (0.4,)}, {"model_options": {**PLAIN.model_options, "in_chans": 1}}]
)
def test_grey_images_train_a_model_of_one_channel_and_are_evaluated_with_it(tmp_path, how):
    options = {key: value for key, value in PLAIN.model_options.items() if key != "in_chans"}
    augmentation = Augmentation(randaugment_ops=2, jitter=(0.4, 0.4, 0.4, 0.0), flip=0.5)
    recipe = replace(ONE, augmentation=augmentation, **{"model_options": options, **how})
    grey = few_digits()
    grey = Source("few digits", "image", *(TensorImages(p.images[:, :1], p.labels) for p in (grey.train, grey.test)),
                  grey.classes)  # fmt: skip
    results = [train(recipe, tmp_path / name, source=one) for name, one in (("colour", few_digits()), ("grey", grey))]
    assert load(results[0].out).patch_embed.in_chans == 1
    probabilities = [result.predictions.probabilities for result in results]
    assert torch.equal(*probabilities)  # the digits have three equal channels
    found, _ = evaluate_checkpoint(results[0].out, source=few_digits())
    assert torch.equal(found.probabilities, probabilities[0])


def test_channels_that_no_image_has_are_refused_by_name():
    recipe = replace(ONE, model_options={**ONE.model_options, "in_chans": 4})
    with pytest.raises(ValueError, match="in_chans in model_options must be 3, or 1 for grey images, got 4"):
        build_model(recipe, few_digits())
    with pytest.raises(ValueError, match=r"mean and std must have 1 or 3 numbers each, got mean=\(0.5, 0.5\)"):
        replace(ONE, mean=(0.5, 0.5))


class FakeRun:
    def __init__(self, **options):
        self.options, self.lines, self.ended = options, [], None

    def define_metric(self, *_, **__):
        pass

    def log(self, values):
        self.lines.append(values)

    def finish(self, exit_code):
        self.ended = exit_code


def test_the_log_goes_to_weights_and_biases_and_a_run_that_goes_on_keeps_its_name_there(tmp_path, monkeypatch):
    runs = []
    fake = types.ModuleType("wandb")
    fake.init = lambda **options: runs.append(FakeRun(**options)) or runs[-1]
    monkeypatch.setitem(sys.modules, "wandb", fake)
    recipe = replace(PLAIN, wandb=True)
    monkeypatch.setattr("cumulant.train.trainer.Stop.poll", lambda self: setattr(self, "asked", True))
    with pytest.raises(KeyboardInterrupt):
        train(recipe, tmp_path, source=few_digits())
    monkeypatch.undo()
    monkeypatch.setitem(sys.modules, "wandb", fake)
    train(recipe, tmp_path, source=few_digits())
    assert len({run.options["id"] for run in runs}) == 1
    assert runs[0].options["config"]["lr"] == recipe.lr
    assert [run.ended for run in runs] == [1, 0]
    told = [line for run in runs for line in run.lines if "test/top1" in line]
    assert [line["test/top1"] for line in told] == [x["top1"] for x in read_log(tmp_path) if x["kind"] == "test"]


def test_a_missing_package_of_weights_and_biases_is_told(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "wandb", None)
    with pytest.raises(ImportError, match="wandb=true needs the package wandb: pip install wandb"):
        train(replace(ONE, wandb=True), tmp_path, source=few_digits())


def test_the_recipe_of_imagenet_1k_says_that_it_was_not_measured():
    from cumulant.train.recipe_files import recipe_head

    recipe = read_recipe("imagenet-1k")
    assert (recipe.model, recipe.epochs, recipe.augmentation.crops) == ("vit_small_patch16_224", 300, True)
    assert "NOT MEASURED" in recipe_head("imagenet-1k")


def test_a_record_of_a_run_says_what_it_started_from(tmp_path):
    first = train(ONE, tmp_path / "first", source=few_digits())
    run = train(replace(ONE, init=str(first.out)), tmp_path / "second", source=few_digits())
    assert json.loads((run.out / "recipe.json").read_text())["init"] == str(first.out)
