"""Data is known by what it holds: two folders of one name share nothing, one data set in two places shares all."""

import io
import json
import os
import shutil

import pytest
import torch
from small_studies import MADE, SMALL, quickly

from cumulant.cli import main
from cumulant.data import open_source
from cumulant.studies import cumulant_vit as room
from cumulant.studies import mechanisms
from cumulant.studies import study as flow
from cumulant.studies.command import Reproduce, TrainBench
from cumulant.studies.report import terminal_summary
from cumulant.studies.study import Classifiers
from cumulant.train import RecipeError


def write_images(folder, count, shade=0):
    """A few grey squares of two classes: `count` training images of each."""
    from PIL import Image

    for part, many in (("train", count), ("test", 2)):
        for label, name in enumerate("ab"):
            (folder / part / name).mkdir(parents=True)
            for number in range(many):
                pixels = torch.full((8, 8, 3), 40 * label + shade + number, dtype=torch.uint8).numpy()
                Image.fromarray(pixels).save(folder / part / name / f"{number}.png")
    return folder


def study(data, out, **more):
    settings = {"attention": ("softmax",), "seeds": 1, "control": 0, "epochs": 1, "workers": 1, "recipe": "digits"}
    change = (*SMALL[:-1], "batch_size=4")
    return Reproduce(**(settings | {"data": str(data), "out": out, "change": change, "device": "cpu"} | more))


@pytest.fixture
def trained(tmp_path, monkeypatch):
    """A study of A/data, and other data of the same name, as many images of the same classes."""
    quickly(monkeypatch)
    data = write_images(tmp_path / "A" / "data", 6), write_images(tmp_path / "B" / "data", 6, shade=120)
    room.reproduce(study(data[0], tmp_path / "out"))
    return *data, tmp_path / "out"


def test_other_data_of_the_same_name_is_trained_anew_and_keeps_what_was_there(trained):
    a, b, out = trained
    screen = io.StringIO()
    first, second = room.reproduce(study(a, out)), room.reproduce(study(b, out), progress=screen)
    assert first["data"]["digest"] != second["data"]["digest"]
    assert first["runs"][0]["fingerprint"] != second["runs"][0]["fingerprint"]
    said = screen.getvalue()
    assert "data: 12 train and 4 test images of 2 classes" in said
    assert "records that are left alone and not used: 1 of other data that is also named data" in said
    assert room.reproduce(study(a, out))["runs"] == first["runs"]
    assert len(list((out / "records").glob("*-0-????????.json"))) == 2


def test_the_same_data_elsewhere_and_of_another_name_goes_on_with_its_records(trained, tmp_path, monkeypatch):
    a, _, out = trained
    monkeypatch.setattr(flow, "train_all", lambda missing, *_, **__: pytest.fail("trained again") if missing else [])
    moved = shutil.copytree(a, tmp_path / "moved" / "renamed")
    assert room.reproduce(study(moved, out))["data"]["digest"] == room.reproduce(study(a, out))["data"]["digest"]


@pytest.mark.parametrize("kind", [Classifiers, mechanisms.Bench])
def test_a_run_on_data_that_is_not_what_its_study_began_with_is_refused(tmp_path, kind):
    """It changed in between, or lies on another machine under the same name."""
    data = write_images(tmp_path / "data", 6)
    settings = study(data, tmp_path / "out")
    (run,) = room.planned(settings, open_source(data).identity()["digest"])
    next(data.glob("train/b/*.png")).unlink()
    told = r"data holds other data now, or on this machine, .*data: 11 train and 4 test"
    with pytest.raises(RecipeError, match=told):
        kind(tmp_path / "out", "cpu", MADE).kept(run)
    assert not (tmp_path / "out").exists()


def test_records_that_do_not_say_which_data_they_are_of_are_not_used_and_that_is_said(trained):
    a, _, out = trained
    (path,) = (out / "records").glob("*-0-????????.json")
    old = json.loads(path.read_text())
    old["fingerprint"] = room.planned(study(a, out))[0].fingerprint  # as it was before data was known by its content
    del old["data"]["digest"]
    path.write_text(json.dumps(old))
    screen = io.StringIO()
    again = room.reproduce(study(a, out), progress=screen)
    assert "not used: 1 from an earlier version, which did not write down what their data held" in screen.getvalue()
    assert again["runs"][0]["data"]["digest"]


def test_a_report_without_the_data_at_hand_is_made_where_its_name_is_enough(trained):
    a, b, out = trained
    wanted = study("gone/data", out, report_only=True)
    (out / "results.json").unlink()
    assert room.remake_report(wanted)["missing"] == []
    room.reproduce(study(b, out))
    (out / "results.json").unlink()
    with pytest.raises(ValueError, match="there are records of different data named data; say with --data where"):
        room.remake_report(wanted)
    assert room.remake_report(study(a, out, report_only=True))["missing"] == []


def test_a_report_made_again_is_of_the_data_that_is_named(trained):
    a, b, out = trained
    room.reproduce(study(b, out))  # its results.json lies in the folder now
    common = {"recipe": "digits", "out": out, "report_only": True}
    digests = [room.remake_report(study(data, out, report_only=True))["data"]["digest"] for data in (a, b)]
    assert len(set(digests)) == 2
    assert room.remake_report(Reproduce(data=str(b), **common))["data"]["digest"] == digests[1]
    with pytest.raises(FileNotFoundError, match=r"no record .* belongs to a run of this study"):
        room.remake_report(Reproduce(data=str(a), **common))  # not the results of the other that lie there


def test_terminal_and_page_say_what_data_was_found(trained):
    a, _, out = trained
    found = "data: 12 training and 4 test images of 2 classes"
    assert found in terminal_summary(room.remake_report(study(a, out)))
    assert found in (out / "report.html").read_text()


def test_a_bench_of_other_data_of_the_same_name_takes_no_run_of_it(tmp_path, capsys):
    a, b = write_images(tmp_path / "A" / "data", 6), write_images(tmp_path / "B" / "data", 5)
    recipe = tmp_path / "small.toml"
    recipe.write_text(
        'model = "vit_nano_patch2_8"\nimage_size = 8\nepochs = 1\nwarmup_epochs = 0.0\nbatch_size = 4\n'
        "[model_options]\ndepth = 1\nembed_dim = 32\nnum_heads = 2\nin_chans = 3\n"
    )
    common = {"recipe": str(recipe), "attention": ("softmax",), "control": 1, "device": "cpu", "out": tmp_path / "out"}
    result = mechanisms.run(TrainBench(data=str(a), **common))
    (tmp_path / "new").mkdir()
    (tmp_path / "new" / "train.json").write_text(json.dumps(result))
    screen = io.StringIO()
    other = mechanisms.run(TrainBench(data=str(b), **common | {"out": tmp_path / "new"}), screen)
    assert "not used: 2 runs of another recipe, of other data, or of an earlier version" in screen.getvalue()
    assert {run["recipe_digest"] for run in other["runs"]}.isdisjoint(run["recipe_digest"] for run in result["runs"])
    words = ["bench", "train", "--recipe", str(recipe), "--data", str(b), "--out", str(tmp_path / "out")]
    assert main([*words, "--attention", "softmax", "--control", "1", "--device", "cpu"]) == 2
    assert "holds a run on other data" in capsys.readouterr().err


def test_a_class_whose_folder_is_not_named_in_utf_8_has_its_report(tmp_path, monkeypatch):
    quickly(monkeypatch)
    data = write_images(tmp_path / "data", 6)
    for part in ("train", "test"):
        (data / part / "a").rename(data / part / os.fsdecode(b"caf\xe9"))
    room.reproduce(study(data, tmp_path / "out"))
    assert "caf?" in (tmp_path / "out" / "report.html").read_text()
