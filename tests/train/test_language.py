"""A language model through the trainer: it learns, stops and goes on exactly, and is evaluated by what was saved."""

import json
import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from small_runs import in_child, kill_self, outcome

from cumulant import cli
from cumulant.data import open_source
from cumulant.data.augmentation import Augmentation
from cumulant.train import evaluate_checkpoint, load, optimise, read_recipe, train
from cumulant.train.build import build_model, open_recipe_source

SHORT = replace(
    read_recipe("sentences"),
    attention="cumulant2",
    model_options={"embed_dim": 16, "depth": 1, "drop_rate": 0.1},
    data_options={"context": 128},
    epochs=2,
    batch_size=64,
    warmup_epochs=0.5,
    lr=1e-2,
    ema=0.9,
    accumulate=2,
    checkpoint_steps=5,
)


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("language")
    return train(SHORT, folder)


def test_it_learns_more_than_how_often_each_character_occurs(run):
    source = open_source("sentences", context=128)
    shares = torch.bincount(source.train.labels, minlength=len(source.classes)).double()
    frequencies = F.cross_entropy(shares.log().expand(len(source.test.labels), -1), source.test.labels).item()
    assert run.nats < frequencies
    assert run.bits_per_byte == pytest.approx(run.nats / math.log(2))
    assert 0 < run.top1 <= run.top5 <= 1
    assert run.best_nats <= run.nats + 1e-9
    assert run.best_top1 is None


def test_what_was_saved_says_the_same_again(run):
    found, classes = evaluate_checkpoint(run.out)
    assert found.nats == pytest.approx(run.nats, abs=1e-6)
    assert found.nats_each.allclose(run.predictions.nats_each, atol=1e-5)
    model = load(run.out)
    assert "".join(classes) == model.vocabulary.symbols
    assert model.generate("Ann has", 5).startswith("Ann has")


def test_its_loss_is_that_of_the_model_on_the_test_windows(run):
    model, part = load(run.out).eval(), open_source("sentences", context=128).test
    windows = torch.stack([part.decode(i, 0) for i in range(len(part))])
    with torch.no_grad():
        nats = F.cross_entropy(model(windows[:, :-1]).flatten(0, 1), windows[:, 1:].flatten())
    assert nats.item() == pytest.approx(run.nats, abs=1e-5)


def test_a_killed_run_ends_as_an_undisturbed_one(run, tmp_path):
    def work():
        original, steps = optimise.apply, iter(range(1, 100))

        def counted(*arguments):
            if next(steps) == 13:
                kill_self()
            return original(*arguments)

        optimise.apply = counted
        train(SHORT, tmp_path)

    assert in_child(work) == -9
    train(SHORT, tmp_path)
    assert outcome(tmp_path) == outcome(run.out)


def test_the_command_tells_nats_and_bits(run, capsys):
    assert cli.main(["evaluate", str(run.out), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["nats"] == pytest.approx(run.nats, abs=1e-6)
    assert cli.main(["evaluate", str(run.out)]) == 0
    assert "bits a byte, top-1" in capsys.readouterr().out
    assert cli.main(["evaluate", str(run.out), "--per-class"]) == 2
    assert "--per-class is for classes of images and videos" in capsys.readouterr().err


def test_bytes_are_256_classes():
    recipe = replace(SHORT, data_options={"tokens": "bytes", "context": 128})
    model = build_model(recipe, open_recipe_source(recipe))
    assert model.num_classes == 256
    assert model.decode(model.encode("é")) == "é"


@pytest.mark.parametrize(
    ("what", "wrong"),
    [
        (r"sentences holds texts, model vit_nano_patch2_8 is not .*lm_nano", {"model": "vit_nano_patch2_8"}),
        (r"sentences is a text, and augmentation is for images", {"augmentation": Augmentation(flip=0.5)}),
        (r"repeats must be 1, got 2", {"repeats": 2}),
        (r"unknown data option 'contxt'", {"data_options": {"contxt": 3}}),
    ],
)  # fmt: skip
def test_what_cannot_be_trained_is_told(tmp_path, what, wrong):
    with pytest.raises(ValueError, match=what):
        train(replace(SHORT, **wrong), tmp_path)
