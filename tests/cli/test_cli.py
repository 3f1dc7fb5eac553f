"""The command line as a user meets it."""

import inspect
import json
import os
import subprocess
import sys
import warnings
from pathlib import Path

import fresh
import pytest
import torch

import cumulant
from cumulant import cli, zoo
from cumulant.listing import counted
from cumulant.models.registry import input_shape
from cumulant.studies import cumulant_vit as study
from cumulant.studies.runs import RunError, TimeOverError


def output_of_help(capsys, *words):
    with pytest.raises(SystemExit) as stop:
        cli.main([*words, "--help"])
    assert stop.value.code == 0
    return capsys.readouterr().out


def test_help_names_every_command_briefly(capsys):
    text = output_of_help(capsys)
    assert all(f" {name} " in text for name in cli.COMMANDS)
    assert len(text.splitlines()) < 45


@pytest.mark.parametrize("word", ["--version", "-V"])
def test_the_version_is_told(capsys, word):
    assert cli.main([word]) == 0
    assert capsys.readouterr().out == f"cumulant {cumulant.__version__}\n"


def test_python_m_cumulant_is_the_command(tmp_path):
    assert fresh.python("-m", "cumulant", "--version", folder=tmp_path).strip() == f"cumulant {cumulant.__version__}"


def test_an_unknown_command_is_answered_with_those_there_are(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["trane"])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert "reproduce, train, evaluate" in captured.out + captured.err


def test_a_reader_that_has_seen_enough_is_no_error():
    script = f"{sys.executable} -m cumulant.cli train digits --help | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines()[1] in ("141", "0")  # 0: all was written before the reader went
    assert done.stderr == ""


@pytest.mark.parametrize("command", ["reproduce", "list", "explore", "convert", "diagnose"])
def test_the_help_of_every_command_shows_an_example(capsys, command):
    assert f"Example: cumulant {command}" in output_of_help(capsys, command)


def test_no_command_shows_the_help(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    assert stop.value.code == 0
    assert "reproduce" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "names"),
    [([], zoo.names), (["layers"], cumulant.nn.layers), (["studies"], cumulant.studies.names)],
    ids=["mechanisms", "layers", "studies"],
)
def test_every_list_has_all_names_and_fits_a_terminal_of_100_columns(capsys, words, names):
    assert cli.main(["list", *words]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert set(names()) <= {line.split(" ")[0] for line in lines}
    assert max(map(len, lines)) <= 100


def test_models_are_listed_with_their_parameters_and_input(capsys):
    assert cli.main(["list", "models", "--json"]) == 0
    rows = {row["name"]: row for row in json.loads(capsys.readouterr().out)}
    assert list(rows) == cumulant.models.names()
    tokens, width = 197, 192
    block = 12 * tokens * width**2 + 2 * tokens**2 * width  # projections and MLP; logits and mixing
    embedding, head = 196 * (3 * 16 * 16) * width, 1000 * width
    assert rows["vit_tiny_patch16_224"] == {
        "name": "vit_tiny_patch16_224", "parameters": 5_717_416, "macs": 12 * block + embedding + head,
        "input": [3, 224, 224],
    }  # fmt: skip
    assert rows["vivit_nano_patch4x2_16"]["input"] == [1, 8, 16, 16]
    smallest: dict[str, str] = {}
    for name in sorted(rows, key=lambda name: rows[name]["macs"] or 0):
        smallest.setdefault(name.split("_")[0], name)
    for name in smallest.values():  # tools/models_page.py writes them
        assert (rows[name]["parameters"], rows[name]["macs"]) == counted(name), name


@pytest.mark.parametrize("name", ["vit_nano_patch2_8", "vivit_nano_patch4x2_16"])
def test_a_listed_model_takes_the_input_that_is_listed(name):
    model = cumulant.create_model(name, num_classes=10)
    assert model(torch.zeros(1, *input_shape(name))).shape == (1, 10)


def test_an_unknown_list_is_answered_with_those_there_are(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["list", "mechanism"])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert "layers" in captured.out + captured.err


def test_list_as_json_holds_names_costs_and_abilities(capsys):
    assert cli.main(["list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == zoo.names()
    linear = next(row for row in rows if row["name"] == "linear")
    assert linear["subquadratic"] is True
    assert linear["cost"]


def test_an_unknown_mechanism_ends_with_the_names_there_are(capsys, tmp_path):
    assert cli.main(["reproduce", "--attention", "softmx", "--out", str(tmp_path / "x")]) == 2
    message = capsys.readouterr().err
    assert "softmx" in message
    assert "cumulant3" in message
    assert "Traceback" not in message


@pytest.mark.parametrize(
    "words",
    [["train", "digits", "--attention", "softmax,cumulant3"], ["reproduce", "--attention", "softmax,cumulant3"]],
    ids=["train", "reproduce"],
)
def test_several_mechanisms_with_commas_are_told_apart(capsys, tmp_path, words):
    assert cli.main([*words, "--out", str(tmp_path / "x")]) == 2
    assert "'softmax,cumulant3'; give several as words, without commas" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["train", "digits"], ["reproduce"]], ids=" ".join)
def test_an_option_that_a_mechanism_does_not_have_is_told(capsys, tmp_path, words):
    assert cli.main([*words, "--attention", "cumulant3+fulll", "--out", str(tmp_path / "x")]) == 2
    message = capsys.readouterr().err
    assert "'fulll'" in message
    assert "did you mean 'full'?" in message


def test_a_value_out_of_range_ends_with_its_name(capsys):
    with pytest.raises(SystemExit) as stop:
        cli.main(["reproduce", "--seeds", "0"])
    assert stop.value.code == 2
    captured = capsys.readouterr()
    assert "seeds must be 1 or more, got 0" in captured.out + captured.err


def test_a_folder_that_cannot_be_written_ends_with_its_name(capsys, tmp_path):
    (tmp_path / "taken").write_text("")
    assert cli.main(["reproduce", "--out", str(tmp_path / "taken")]) == 1
    assert "taken" in capsys.readouterr().err


@pytest.mark.parametrize(("device", "words"), [("tpu", "must be cpu or cuda, got 'tpu'"), ("cuda:99", "needs a GPU")])
def test_a_device_that_is_not_there_is_told_before_a_folder_is_made(capsys, tmp_path, device, words):
    assert cli.main(["reproduce", "--device", device, "--out", str(tmp_path / "new")]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "new").exists()


def test_a_warning_is_one_line_for_a_user_and_as_it_was_afterwards(monkeypatch):
    before, said = warnings.formatwarning, []

    def warned(settings, progress):
        kinds = (UserWarning, DeprecationWarning)
        said.extend(warnings.formatwarning("2 items are damaged", kind, "a.py", 3) for kind in kinds)
        return {}

    monkeypatch.setattr(study, "reproduce", warned)
    assert cli.main(["reproduce", "--json"]) == 0
    assert said[0] == "cumulant: warning: 2 items are damaged\n"
    assert "a.py:3: DeprecationWarning" in said[1]
    assert warnings.formatwarning is before


@pytest.mark.parametrize(("flags", "advice"), [([], "the same command again"), (["--fresh"], "without --fresh again")])
def test_stopping_says_how_to_go_on(capsys, monkeypatch, flags, advice):
    def stopped(*_arguments, **_options):
        raise KeyboardInterrupt

    monkeypatch.setattr(study, "reproduce", stopped)
    assert cli.main(["reproduce", "--out", "runs/here", *flags]) == 130
    message = capsys.readouterr().err
    assert "runs/here" in message
    assert advice in message


def test_a_failed_run_is_an_error_without_a_traceback(capsys, monkeypatch):
    def failed(*_arguments, **_options):
        raise RunError("linear, seed 2: the loss became nan")

    monkeypatch.setattr(study, "reproduce", failed)
    assert cli.main(["reproduce"]) == 1
    assert capsys.readouterr().err == "cumulant: error: linear, seed 2: the loss became nan\n"


def test_json_prints_the_results_and_nothing_else(capsys, monkeypatch):
    monkeypatch.setattr(study, "reproduce", lambda settings, progress: {"seeds": settings.seeds})
    assert cli.main(["reproduce", "--json", "--seeds", "2"]) == 0
    assert json.loads(capsys.readouterr().out) == {"seeds": 2}


@pytest.mark.parametrize(("flags", "status"), [(["--minutes", "5"], 3), ([], 0)])
def test_runs_left_for_want_of_time_end_with_a_status_of_their_own(monkeypatch, flags, status):
    monkeypatch.setattr(study, "reproduce", lambda settings, progress: {"missing": [{"configuration": "linear"}]})
    assert cli.main(["reproduce", "--json", *flags]) == status


def test_no_time_for_a_single_run_is_told_with_that_status_too(capsys, monkeypatch):
    def over(*_arguments, **_options):
        raise TimeOverError(1)

    monkeypatch.setattr(study, "reproduce", over)
    assert cli.main(["reproduce", "--minutes", "1"]) == 3
    assert "no run was finished" in capsys.readouterr().err


@pytest.mark.parametrize("words", [["--version"], ["--help"], ["list", "--help"], ["bench", "--help"]], ids=" ".join)
def test_help_loads_nothing_that_only_running_a_command_needs(words):
    heavy = (
        *(
            "torch",
            "torch.distributed.tensor",
            "torch._dynamo",
            "transformers",
            "timm",
            "matplotlib",
            "sklearn",
            "tqdm",
        ),
        *("tqdm", "plotly", "jinja2", "scipy", "datasets", "pyarrow", "fastapi", "uvicorn", "PIL", "av"),
        *("cumulant.attention", "cumulant.zoo", "cumulant.studies.cumulant_vit", "cumulant.bench.speed"),
    )
    code = (
        "import sys, cumulant.cli\n"
        f"try: cumulant.cli.main({words!r})\n"
        "except SystemExit: pass\n"
        f"print(*(name for name in {heavy!r} if name in sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout
    assert done.stderr.split() == []


@pytest.mark.parametrize("name", list(cli.COMMANDS))
def test_the_table_says_of_a_command_what_its_own_help_begins_with(name):
    kind = cli.options_of(name)
    assert inspect.cleandoc(kind.__doc__).split("\n\n")[0] == cli.COMMANDS[name][1]
    assert callable(kind.run)


def written_to(monkeypatch, file, *words):
    """The status of a command that prints into this file, as its only owner: closing it must not complain."""
    with file, monkeypatch.context() as patch:
        patch.setattr(sys, "stdout", file)
        return cli.main(list(words))


@pytest.mark.parametrize("words", [["--version"], ["list", "--help"], ["list"]], ids=" ".join)
def test_a_short_text_without_a_reader_is_no_error_either(monkeypatch, capsys, words):
    gone, end = os.pipe()
    os.close(gone)
    assert written_to(monkeypatch, os.fdopen(end, "w"), *words) == 141
    assert capsys.readouterr().err == ""


def test_a_terminal_that_lacks_some_letters_still_shows_the_rest(monkeypatch, tmp_path):
    path = tmp_path / "screen"
    assert written_to(monkeypatch, path.open("w", encoding="ascii"), "list") == 0
    assert "causal: tokens see only the past ? cross" in path.read_text()


def test_a_full_disk_is_told_in_a_line(monkeypatch, capsys):
    if not Path("/dev/full").exists():
        pytest.skip("this system has no /dev/full")
    with Path("/dev/full").open("w") as full:
        assert written_to(monkeypatch, full, "--version") == 1
    assert capsys.readouterr().err == "cumulant: error: No space left on device\n"
