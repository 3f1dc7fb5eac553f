"""`cumulant train` and `cumulant evaluate` as a user meets them."""

import json

import pytest
import torch
from small_runs import few_digits

from cumulant import cli
from cumulant.conversion import convert
from cumulant.conversion import load as load_converted
from cumulant.conversion import save as save_converted
from cumulant.data import open_source
from cumulant.data.part import Source
from cumulant.models import create_model
from cumulant.train import Predictions, evaluate_checkpoint, recipe_names, trainer
from cumulant.train.build import augment_of
from cumulant.train.checkpoint import read_header
from cumulant.train.recipe_files import from_json, recipe_head

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
        cli.main(["train", "tiny-imagenet-100", "--help-all"])
    text = " ".join(capsys.readouterr().out.replace("│", "").split())
    assert "(default: 1024)" in text
    assert "--model-options KEY=VALUE" in text
    assert "--mixup FLOAT" in text


def test_the_help_is_a_page_long_and_names_where_the_rest_is(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["train", "tiny-imagenet-100", "--help"])
    text = capsys.readouterr().out
    assert stop.value.code == 0
    assert len(text.splitlines()) <= 60
    assert "cumulant train RECIPE --help-all" in text
    assert "(default: 1024)" in text  # the recipe's own
    assert "--mixup" not in text


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


@pytest.mark.parametrize("word", ["none", "None", "NONE", "null"])
def test_no_value_is_written_as_a_user_would(word):
    settings = parsed("digits", "--clip", word, "--workers", word, "--max-bad", word).settings
    assert (settings.clip, settings.workers, settings.max_bad) == (None, None, None)
    assert cli.parse(["evaluate", "here", "--workers", word]).workers is None
    assert cli.parse(["reproduce", "--minutes", word]).minutes is None


@pytest.mark.parametrize("words", [["--help-all"], ["--clip", "off"]])
def test_help_and_error_show_how_no_value_is_written(capsys, words):
    with pytest.raises(SystemExit):
        cli.main(["train", "digits", *words])
    captured = capsys.readouterr()
    assert "--clip none|FLOAT" in captured.out + captured.err


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
    assert "convert" not in captured.out + captured.err  # nothing about another command
    assert "tyro" not in captured.out + captured.err


@pytest.mark.parametrize(
    ("words", "wanted"),
    [
        (["digit"], "did you mean 'digits'?"),
        (["--epochs", "3", "digits"], "name the recipe first"),
        ([], "name the recipe first"),
        (["digits", "--attention", "sofmax", "--out", "OUT"], "softmax"),
        (["digits", "--model", "vit_tiny", "--out", "OUT"], "vit_tiny_patch16_224"),
        (["digits", "--data", "nowhere", "--out", "OUT"], "nowhere"),
        (["digits", "--model-options", "depht=3", "--out", "OUT"], "did you mean 'depth'?"),
        (["digits", "--model-options", "depth=deep", "--out", "OUT"], "depth must be a whole number"),
        (["digits", "--data-options", "testpart=test", "--out", "OUT"], "did you mean 'test_part'?"),
        (["digits", "--model", "vivit_nano_patch4x2_32", "--out", "OUT"], "digits holds images"),
        (["digits", "--device", "tpu", "--out", "OUT"], "device must be cpu or cuda, got 'tpu'"),
        (["digits", "--device", "cuda:99", "--out", "OUT"], "device 'cuda:99' needs a GPU"),
    ],
)
def test_a_wrong_name_ends_with_what_is_known(capsys, tmp_path, words, wanted):
    words = [str(tmp_path / "run") if word == "OUT" else word for word in words]
    assert cli.main(["train", *words]) in (1, 2)
    message = capsys.readouterr().err
    assert wanted in message
    assert "Traceback" not in message


def test_a_start_that_failed_does_not_hold_its_folder(capsys, tmp_path):
    command = ["train", "digits", "--out", str(tmp_path), *SHORT]
    assert cli.main([*command, "--data", "nowhere"]) == 1
    assert cli.main([*command, "--lr", "1e30", "--clip", "None"]) == 1
    assert "nothing was saved" in capsys.readouterr().err
    assert cli.main(command) == 0


def test_the_help_names_every_recipe_and_shows_the_head_of_the_one_given(capsys):
    with pytest.raises(SystemExit):
        cli.main(["train", "--help"])
    text = capsys.readouterr().out
    assert all(name in text for name in recipe_names())
    with pytest.raises(SystemExit):
        cli.main(["train", "cifar10", "--help"])
    lines = [line.strip() for line in capsys.readouterr().out.splitlines()]
    assert all(line.strip() in lines for line in recipe_head("cifar10").splitlines())
    assert "Command:  cumulant train cifar10 --data FOLDER" in lines


def test_the_help_of_evaluation_names_what_it_takes(capsys):
    with pytest.raises(SystemExit):
        cli.main(["evaluate", "--help"])
    assert "CHECKPOINT [DATA]" in capsys.readouterr().out.splitlines()[0]


def test_training_prints_the_accuracy_and_where_everything_is(run, capsys):
    assert cli.main(["train", "digits", "--out", str(run), *SHORT]) == 0
    text, said = capsys.readouterr()
    assert "top-1" in text
    assert str(run) in text
    assert said == "this run is finished already (--fresh trains it again)\n"
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
    digits = few_digits()
    other = Source("letters", "image", digits.train, digits.test, tuple("abcdefghij"))
    monkeypatch.setattr("cumulant.train.evaluation.open_recipe_source", lambda *_: other)
    assert cli.main(["evaluate", str(run), "letters", "--device", "cpu"]) == 2
    wanted = "letters has 10, other ones from number 1 on: a, b, c and 7 more in place of 0, 1, 2 and 7 more"
    assert wanted in capsys.readouterr().err


def test_data_of_other_classes_are_told_from_the_first_that_differs_on(run, capsys, monkeypatch):
    digits = few_digits()
    classes = ("0", "1", "2", "tench, Tinca tinca", "stingray", "hammerhead, hammerhead shark", *"6789")
    other = Source("animals", "image", digits.train, digits.test, classes)
    monkeypatch.setattr("cumulant.train.evaluation.open_recipe_source", lambda *_: other)
    assert cli.main(["evaluate", str(run), "animals", "--device", "cpu"]) == 2
    wanted = "from number 4 on: tench, Tinca tinca; stingray; hammerhead, hammerhead shark; and 4 more in place of 3, 4"
    assert wanted in capsys.readouterr().err


def test_evaluation_reads_data_as_it_is_told(run, monkeypatch):
    asked = []

    def opened(recipe, data):
        asked.append((recipe.data_options, data))
        return few_digits()

    monkeypatch.setattr("cumulant.train.evaluation.open_recipe_source", opened)
    words = [
        "evaluate",
        str(run),
        "elsewhere",
        "--device",
        "cpu",
        "--data-options",
        "test_part=test",
        "label_column=none",
    ]
    assert cli.main(words) == 0
    assert asked == [({"test_part": "test"}, "elsewhere")]


def test_a_file_of_another_kind_is_no_checkpoint(run, capsys):
    assert cli.main(["evaluate", str(run / "log.jsonl"), "digits"]) == 2
    assert "log.jsonl is not a safetensors file" in capsys.readouterr().err


def test_the_weights_of_a_run_that_is_not_finished_are_pointed_to(run, capsys, tmp_path):
    (tmp_path / "best.safetensors").write_bytes((run / "best.safetensors").read_bytes())
    assert cli.main(["evaluate", str(tmp_path), "digits"]) == 1
    assert f"not finished, its best weights so far are {tmp_path / 'best.safetensors'}" in capsys.readouterr().err


def test_a_place_for_predictions_that_cannot_be_written_is_told_before_the_evaluation(run, capsys, tmp_path):
    (tmp_path / "taken").write_text("")
    assert cli.main(["evaluate", str(run), "--predictions", str(tmp_path / "taken" / "found.safetensors")]) == 1
    assert capsys.readouterr().err == f"cumulant: error: cannot write files into {tmp_path / 'taken'}: File exists; " \
        "choose another folder\n"  # fmt: skip


def test_a_folder_for_predictions_is_refused_before_the_evaluation(run, capsys, monkeypatch):
    monkeypatch.setattr("cumulant.train.evaluate_checkpoint", lambda *_, **__: pytest.fail("it was evaluated"))
    assert cli.main(["evaluate", str(run), "--predictions", str(run)]) == 2
    assert f"--predictions must be a file to write, got the folder {run}" in capsys.readouterr().err


def test_a_converted_run_is_evaluated_as_the_run_was(run, capsys, tmp_path):
    converted = tmp_path / "converted"
    assert (
        cli.main(["convert", str(run), "--out", str(converted), "--attention", "cumulant3+apart=0", "--device", "cpu"])
        == 0
    )
    capsys.readouterr()
    assert cli.main(["evaluate", str(converted), "--json"]) == 0
    reached = json.loads(capsys.readouterr().out)
    found, _ = evaluate_checkpoint(run, device="cpu")
    model, images = load_converted(converted), open_source("digits").test
    recipe = from_json(read_header(run / "last.safetensors")["recipe"])
    pixels = torch.stack([images.decode(i, recipe.loaded_size) for i in range(len(images))])
    with torch.no_grad():
        own = model(augment_of(recipe, 10).evaluate(pixels)).softmax(-1)
    assert reached["top1"] == pytest.approx((own.argmax(-1) == images.labels).float().mean().item())
    assert not torch.allclose(own, found.probabilities, atol=1e-3)


def test_a_converted_model_is_not_converted_again(run, capsys, tmp_path):
    assert cli.main(["convert", str(run), "--out", str(tmp_path / "converted"), "--device", "cpu"]) == 0
    capsys.readouterr()
    assert cli.main(["convert", str(tmp_path / "converted"), "--out", str(tmp_path / "again")]) == 2
    assert "holds a converted model already: name the model that it was made from" in capsys.readouterr().err


def test_a_converted_model_without_a_recipe_is_told(capsys, tmp_path):
    model = create_model("vit_nano_patch2_8", num_classes=3, depth=1)
    convert(model, "cumulant2")
    save_converted(model, tmp_path)
    assert cli.main(["evaluate", str(tmp_path), "digits"]) == 2
    assert "has no recipe inside: it must come from `cumulant train`" in capsys.readouterr().err


def test_evaluation_can_be_stopped(run, capsys, monkeypatch):
    def stopped(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr("cumulant.train.tasks.predict", stopped)
    assert cli.main(["evaluate", str(run), "digits", "--device", "cpu"]) == 130
    assert capsys.readouterr().err.endswith("stopped\n")


def test_a_gpu_without_room_is_answered_with_what_takes_less(capsys, monkeypatch, tmp_path):
    def full(*_arguments, **_options):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 9 GiB.\nmany more lines")

    monkeypatch.setattr(trainer._Run, "go", full)
    assert cli.main(["train", "digits", "--out", str(tmp_path / "run"), "--device", "cpu"]) == 1
    said = capsys.readouterr().err
    assert "Tried to allocate 9 GiB. " in said
    assert "--accumulate" in said
    assert len(said.splitlines()) == 1


def test_a_decoding_process_that_is_killed_during_a_step_is_told_in_one_line(run, capsys, monkeypatch, tmp_path):
    def killed(*_arguments, **_options):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed. ")  # torch raises it anywhere

    monkeypatch.setattr(trainer._Run, "_step", killed)
    monkeypatch.setattr("cumulant.train.tasks.predict", killed)
    for words in (["train", "digits", "--out", str(tmp_path / "run"), *SHORT], ["evaluate", str(run), "digits"]):
        assert cli.main(words) == 2
        said = capsys.readouterr().err
        assert "a process that decodes the data was killed" in said.splitlines()[-1]
        assert "Traceback" not in said


def test_stopping_says_how_to_go_on(capsys, monkeypatch, tmp_path):
    def stopped(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(trainer._Run, "go", stopped)
    assert cli.main(["train", "digits", "--out", str(tmp_path / "run"), "--device", "cpu"]) == 130
    assert "give the same command again" in capsys.readouterr().err
