"""`cumulant train` and `cumulant evaluate` as a user meets them."""

import json

import pytest

from cumulant import cli
from cumulant.train import Predictions, trainer

SHORT = ["--epochs", "1", "--warmup-epochs", "0", "--model-options", "depth=1", "--device", "cpu", "--workers", "0"]


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    folder = tmp_path_factory.mktemp("run")
    assert cli.main(["train", "digits", "--out", str(folder), *SHORT]) == 0
    return folder


@pytest.mark.parametrize("words", [["train"], ["train", "digits"], ["evaluate"]])
def test_the_help_shows_an_example(capsys, words):
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--help"])
    assert stop.value.code == 0
    assert f"Example: cumulant {words[0]}" in capsys.readouterr().out


def test_the_help_of_a_recipe_shows_its_values(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "tiny-imagenet-100", "--help"])
    text = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "(default: 1024)" in text
    assert "--model-options KEY=VALUE" in text
    assert "--mixup FLOAT" in text


def parsed(*words):
    return cli.parse(["train", *words])


def test_every_kind_of_value_can_be_given(tmp_path):
    command = parsed(
        "cifar10", "--epochs", "7", "--attention", "cumulant3", "--attention-options", "full=true", "--no-compile",
        "--clip", "None", "--mixup", "0.1", "--jitter", "0.1", "0.2", "0.3", "0", "--model-options", "pool=gap",
        "tubelet=[2,8,8]", "--precision", "fp32", "--seed", "4",
    )  # fmt: skip
    settings = command.settings
    assert (settings.epochs, settings.attention, settings.precision) == (7, "cumulant3", "fp32")
    assert settings.attention_options == {"full": True}
    assert settings.model_options == {"pool": "gap", "tubelet": [2, 8, 8]}
    assert settings.compile is False
    assert settings.clip is None
    assert (settings.augmentation.mixup, settings.augmentation.cutmix) == (0.1, 1.0)
    assert settings.augmentation.jitter == (0.1, 0.2, 0.3, 0.0)
    assert command.folder.as_posix() == "runs/cifar10-cumulant3-4"


def test_a_recipe_file_is_as_good_as_a_name(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text("epochs = 3\n[model_options]\ndepth = 2\n")
    command = parsed(str(path), "--model-options", "pool=gap")
    assert command.settings.model_options == {"depth": 2, "pool": "gap"}
    assert command.folder.as_posix() == "runs/mine-softmax-0"


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["digits", "--epoch", "3"], "--epochs"),
        (["digits", "--mixupp", "3"], "--mixup"),
        (["digits", "--epochs", "many"], "--epochs"),
        (["digits", "--epochs", "0"], "epochs must be 1 or more, got 0"),
        (["digits", "--model-options", "pool"], "key=value"),
    ],
)
def test_a_wrong_option_ends_with_the_nearest_or_what_is_right(capsys, words, wanted):
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", *words])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert wanted in captured.out + captured.err


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["digit"], "did you mean 'digits'?"),
        (["--epochs", "3", "digits"], "name the recipe first"),
        ([], "name the recipe first"),
        (["digits", "--attention", "sofmax", "--out", "OUT"], "softmax"),
        (["digits", "--model", "vit_tiny", "--out", "OUT"], "vit_tiny_patch16_224"),
        (["digits", "--data", "nowhere", "--out", "OUT"], "nowhere"),
    ],
)
def test_a_wrong_name_ends_with_what_is_known(capsys, tmp_path, words, wanted):
    words = [str(tmp_path / "run") if word == "OUT" else word for word in words]
    assert cli.main(["train", *words]) in (1, 2)
    message = capsys.readouterr().err
    assert wanted in message
    assert "Traceback" not in message


def test_training_prints_the_accuracy_and_where_everything_is(run, capsys):
    assert cli.main(["train", "digits", "--out", str(run), *SHORT]) == 0
    text = capsys.readouterr().out
    assert "top-1" in text
    assert str(run) in text
    assert cli.main(["train", "digits", "--out", str(run), *SHORT, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["epochs"] == 1


def test_another_recipe_in_the_folder_ends_with_the_difference(run, capsys):
    assert cli.main(["train", "digits", "--out", str(run), *SHORT, "--lr", "1e-3"]) == 2
    assert "lr: 0.002 -> 0.001" in capsys.readouterr().err


def test_evaluation_prints_what_training_found(run, capsys, tmp_path):
    result = json.loads((run / "result.json").read_text())["result"]
    written = tmp_path / "found.safetensors"
    words = ["evaluate", str(run / "last.safetensors"), "digits", "--device", "cpu"]
    assert cli.main([*words, "--json", "--per-class", "--predictions", str(written)]) == 0
    shown = json.loads(capsys.readouterr().out)
    assert (shown["top1"], shown["top5"], shown["items"]) == (result["top1"], result["top5"], 450)
    assert set(shown["per_class"]) == set("0123456789")
    assert Predictions.load(written).top(1) == result["top1"]
    assert cli.main([*words, "--per-class"]) == 0
    text = capsys.readouterr().out
    assert f"top-1 {result['top1']:.2%}" in text
    assert len(text.splitlines()) == 11


def test_a_checkpoint_that_is_none_and_data_of_other_classes_are_refused(run, capsys, tmp_path, monkeypatch):
    assert cli.main(["evaluate", str(tmp_path / "no.safetensors"), "digits"]) == 1
    assert "no checkpoint at" in capsys.readouterr().err
    from small_runs import few_digits

    from cumulant.data.part import Source

    digits = few_digits()
    other = Source("letters", "image", digits.train, digits.test, tuple("abcdefghij"))
    monkeypatch.setattr("cumulant.train.evaluation.open_recipe_source", lambda *_: other)
    assert cli.main(["evaluate", str(run), "letters", "--device", "cpu"]) == 2
    assert "but letters has 10 (a, b, c and 7 more)" in capsys.readouterr().err


def test_stopping_says_how_to_go_on(capsys, monkeypatch, tmp_path):
    def stopped(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer._Run, "go", stopped)
    assert cli.main(["train", "digits", "--out", str(tmp_path / "run"), "--device", "cpu"]) == 130
    assert "give the same command again" in capsys.readouterr().err
