"""`cumulant bench cab`: uses of attention found by running, backbones that replace one use, leaderboard, going on."""

import gzip
import json
import math
import sys
from dataclasses import replace
from io import StringIO

import numpy as np
import pytest
import torch

from cumulant.cli import main
from cumulant.studies.cab import backbones, data, leaderboard, study, synthetic, tasks
from cumulant.studies.cab.study import NotReachedError, trained
from cumulant.studies.command import Cab
from cumulant.studies.loop import Schedule

SMALL = tasks.tasks_of("small")
TINY = backbones.Size(16, 2, 1, 32)


# Uses of attention


@pytest.mark.parametrize("name", ["softmax", "cumulant3"])
def test_softmax_and_cumulant_attention_serve_all_four_uses(name):
    assert backbones.support(name, 32, 4) == dict.fromkeys(backbones.PATTERNS, "")


def test_what_lacks_a_use_says_why():
    found = backbones.support("agent", 32, 4)
    assert found["NS"] == found["NC"] == ""
    assert "causal was asked for" in found["CS"]
    assert "changes by" in found["CC"]  # agents are pooled from all queries


def test_a_bidirectional_layer_in_the_place_of_a_causal_one_fails_the_test_of_prefixes():
    layer = backbones.layer_of("NS", "softmax", 32, 4, 50, dtype=torch.float64)
    x = torch.randn(2, 50, 32, dtype=torch.float64)
    with torch.no_grad():
        assert backbones.prefix_gap(layer, x) > 1e-2
        assert backbones.prefix_gap(lambda part: layer(part, is_causal=True), x) < 1e-9


# Backbones


def test_only_the_use_that_is_named_is_replaced():
    model = backbones.Translator(TINY, {"CC": "linear"}, 12, 12)
    layer = model.decoder.layers[0]
    assert layer.cross.mechanism.name == "linear"
    assert layer.attn.mechanism.name == model.encoder.layers[0].attn.mechanism.name == "softmax"


@pytest.mark.parametrize("use", ["CS", "CC"])
def test_a_translator_never_sees_what_it_is_asked_for(use):
    torch.manual_seed(0)
    model = backbones.Translator(TINY, {use: "cumulant3"}, 12, 12).double().eval()
    source, target = torch.randint(1, 256, (2, 12)), torch.randint(1, 256, (2, 12))
    with torch.no_grad():
        before = model(source, target)
        target[:, 7:] = 1
        after = model(source, target)
    torch.testing.assert_close(after[:, :7], before[:, :7])
    assert not torch.allclose(after[:, 7:], before[:, 7:])


def test_padding_of_words_and_sentences_changes_nothing():
    torch.manual_seed(0)
    model = backbones.Hierarchy(TINY, {"NS": "cumulant2"}, (6, 8), 50, 2).double().eval()
    words = torch.zeros(2, 6, 8, dtype=torch.long)
    words[:, :3, :5] = torch.randint(1, 50, (2, 3, 5))
    with torch.no_grad():
        torch.testing.assert_close(model(words), model(words[:, :3, :5]))


def test_a_mechanism_with_parameters_of_its_own_stays_within_a_tenth_of_the_backbone():
    task = SMALL["mlm"]
    size, ratio = backbones.fitted(task.build, task.size, {"NS": "mala"})
    assert backbones.counted(task.build(task.size, {"NS": "mala"})) > 1.1 * backbones.counted(task.build(task.size, {}))
    assert 1 < ratio <= 1.1
    assert size.hidden < task.size.hidden
    assert backbones.fitted(task.build, task.size, {"NS": "cumulant3"}) == (task.size, 1.0)


# Tasks


@pytest.mark.parametrize("name", SMALL)
def test_every_task_trains_in_every_use_and_gives_its_metrics(name):
    task = SMALL[name]
    tensors = synthetic.made(task)
    for use in task.uses:
        made = trained(task, tensors, {use: "cumulant2"}, 0, Schedule(2), "cpu")
        assert made["metrics"].keys() == task.metrics.keys()
        assert all(map(math.isfinite, made["metrics"].values()))


def test_training_lowers_the_loss_and_the_seed_decides_it():
    task = SMALL["reviews"]
    tensors = synthetic.made(task)
    first, again, other = (trained(task, tensors, {}, seed, Schedule(25), "cpu") for seed in (0, 0, 1))
    assert first["metrics"] == again["metrics"]
    assert first["loss"] != other["loss"]
    assert first["loss"] < 0.5 < math.log(2)


def test_ssim_is_the_published_formula():
    a, b = torch.rand(2, 1, 1, 13, 12, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    line = np.exp(-((np.arange(11) - 5.0) ** 2) / 4.5)
    window = np.outer(line, line) / np.outer(line, line).sum()
    found = []
    for i, j in np.ndindex(3, 2):
        x, y = (one[0, 0, i : i + 11, j : j + 11].numpy() for one in (a, b))
        mx, my = (window * x).sum(), (window * y).sum()
        vx, vy, both = ((window * p).sum() for p in ((x - mx) ** 2, (y - my) ** 2, (x - mx) * (y - my)))
        found.append(
            (2 * mx * my + 1e-4) * (2 * both + 9e-4) / ((mx**2 + my**2 + 1e-4) * (vx + vy + 9e-4))
        )  # fmt: skip
    assert tasks.ssim(a.float(), b.float()).item() == pytest.approx(np.mean(found), abs=1e-4)
    assert tasks.ssim(a.float(), a.float()).item() == pytest.approx(1)


def test_a_run_that_would_take_too_long_says_so():
    task = SMALL["lm"]
    with pytest.raises(NotReachedError, match=r"1000 steps would take .* s, the limit is 0.001 s"):
        trained(task, synthetic.made(task), {}, 0, Schedule(1000), "cpu", limit=0.001)


# Data


def test_the_source_of_a_restored_text_is_the_target_without_case_and_punctuation():
    found = data.restore_tensors(SMALL["restore"], "First Citizen:\nSpeak, speak! " * 40, "Let us kill him.\n" * 40)
    assert found["train"].shape == found["train_source"].shape
    target, source = (bytes(found[name][0].tolist()).rstrip(b"\0").decode() for name in ("train", "train_source"))
    assert target.startswith("First Citizen:\nSpeak,")
    assert source == data.plain(target)
    assert source.startswith("first citizen speak speak")


def test_the_test_part_of_a_series_has_the_past_of_its_first_hour_and_nothing_of_the_training():
    values = np.arange(40.0)[None, :, None] + np.zeros((2, 40, 7))
    found = data.series_tensors(values, np.zeros((40, 4)), 20, 10, past=3)
    raw = found["test"] * values[:, :20].std() + values[:, :20].mean()
    assert raw[0, :, 0].tolist() == pytest.approx(list(range(27, 40)), abs=1e-4)
    assert found["train"].mean().item() == pytest.approx(0, abs=1e-6)


def test_judgments_are_read_and_split_by_document(tmp_path):
    documents = [{"doc": n, "sentences": [f"word{n} and more"] * 10, "labels": ["Facts", "ARG"] * 5} for n in range(5)]
    folder = tmp_path / "legal-rhetorical-roles"
    folder.mkdir()
    with gzip.open(folder / "some.jsonl.gz", "wt") as file:
        file.writelines(json.dumps(one) + "\n" for one in documents)
    found = data.read(SMALL["roles"], tmp_path)
    assert found["train_labels"][0].tolist() == [0, 1] * 4
    assert found["test_labels"][1].tolist() == [0, 1] + [tasks.ABSENT] * 6
    assert found["test"][0, 0, 0] not in found["train"][..., 0]  # word4 is in no document of the training part


def test_a_data_set_that_is_not_there_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="ett-small is not there: task 'lstf'"):
        data.read(SMALL["lstf"], tmp_path)


# Leaderboard


def cells(values):
    """Records of {(use, task): {mechanism: [metrics of each seed]}}."""
    return {
        (use, task, name, seed, "control" if name == "softmax again" else "compared"): {
            "metrics": metrics, "parameters": 1, "ratio": 1.0, "seconds": 1.0, "graph": False,
        }
        for (use, task), column in values.items() for name, each in column.items() for seed, metrics in enumerate(each)
    }  # fmt: skip


def test_the_index_of_own_constants_is_zero_on_average_and_the_control_is_no_part_of_them():
    column = {"softmax": [4.0, 4.2], "linear": [5.0, 5.5], "cumulant3": [4.5, 4.4], "softmax again": [9.0, 9.0]}
    values = {("CS", "lm"): {name: [{"perplexity": x} for x in each] for name, each in column.items()}}
    found = leaderboard.judged(SMALL, cells(values))["index"]["CS"]["own"]
    assert sum(found[name]["index"] for name in ("softmax", "linear", "cumulant3")) == pytest.approx(0)
    assert found["softmax"]["index"] > found["cumulant3"]["index"] > found["linear"]["index"]
    assert found["softmax again"]["index"] < -3
    assert np.mean(found["linear"]["each"]) == pytest.approx(found["linear"]["index"])


def test_by_frozen_constants_vanilla_attention_has_the_published_scores():
    """CAB: super-resolution -0.0766 and masked language 0.5276 are the two that we measure too."""
    column = {"softmax": (23.18, 0.675, 3.42), "linear": (23.0, 0.66, 9.0)}
    values = {
        ("NS", "sr"): {name: [{"PSNR": psnr, "SSIM": ssim}] for name, (psnr, ssim, _) in column.items()},
        ("NS", "mlm"): {name: [{"perplexity": ppl}] for name, (_, _, ppl) in column.items()},
    }
    found = leaderboard.judged(SMALL, cells(values))["index"]["NS"]["frozen"]
    assert found["softmax"] == pytest.approx((-0.0766 + 0.5276) / 2, abs=1e-3)


def test_a_mechanism_without_all_columns_has_no_index_and_is_named():
    values = {
        ("CS", "lm"): {name: [{"perplexity": x}] for name, x in {"softmax": 1, "linear": 2, "flow": 3}.items()},
        ("CS", "restore"): {
            name: [{"perplexity": x, "accuracy": x}] for name, x in {"softmax": 1, "linear": 2}.items()
        },
    }
    found = leaderboard.judged(SMALL, cells(values))["index"]["CS"]
    assert found["incomplete"] == ["flow"]
    assert found["own"].keys() == {"softmax", "linear"}


def test_a_metric_in_which_all_are_equal_is_no_part_of_the_index():
    values = {
        ("CS", "restore"): {n: [{"perplexity": x, "accuracy": 0.5}] for n, x in {"softmax": 1, "linear": 2}.items()}
    }
    found = leaderboard.judged(SMALL, cells(values))["index"]["CS"]
    assert found["own"]["softmax"]["index"] == pytest.approx(2**-0.5)
    column = {("CS", "lm"): {name: [{"perplexity": 4.0}] for name in ("softmax", "linear")}}
    assert leaderboard.judged(SMALL, cells(column))["index"] == {}


@pytest.mark.parametrize(("slope", "verdict"), [(1, "confirmed"), (-1, "refuted")])
def test_correlation_between_uses_is_pearsons_and_judges_the_published_reading(slope, verdict):
    x = np.linspace(-1, 1, 8)
    y = slope * x + 0.1 * np.cos(7 * x)
    index = {"NS": x, "CS": y}
    (found,) = leaderboard.correlations(
        {use: {f"m{n}": {"index": value} for n, value in enumerate(values)} for use, values in index.items()}
    )
    assert found["r"] == pytest.approx(np.corrcoef(x, y)[0, 1])
    assert found["low"] < found["r"] < found["high"]
    assert found["verdict"] == verdict


def test_beyond_chance_takes_the_way_in_which_a_metric_is_better():
    column = {"softmax": [4.0, 4.1, 4.05], "linear": [5.0, 5.1, 5.05], "aaren": [4.0, 4.1, 4.1]}
    column["softmax again"] = [4.02, 4.1, 4.0]
    values = {("CS", "lm"): {name: [{"perplexity": x} for x in each] for name, each in column.items()}}
    rows = {row["mechanism"]: row["beyond"] for row in leaderboard.judged(SMALL, cells(values))["rows"]}
    assert rows == {"softmax": "", "linear": "below", "aaren": "level", "softmax again": ""}


# The command


def few(out, **changes):
    given = {"attention": ("linear", "agent"), "tasks": ("restore",), "steps": 2, "seeds": 1, "control": 1}
    return Cab(**{**given, "device": "cpu", "out": out, **changes})


def test_finished_runs_are_kept_and_a_changed_setting_is_told(tmp_path, monkeypatch):
    first = study.run(few(tmp_path))
    assert {(row["pattern"], row["mechanism"]) for row in first["rows"]} == {
        (use, name) for use in ("CS", "CC") for name in ("softmax", "softmax again", "linear")
    }  # fmt: skip
    assert len(list((tmp_path / "cab" / "records").glob("*.json"))) == 4  # both columns share the runs of softmax
    assert "left out: agent in CS, CC" in leaderboard.table(first)
    with monkeypatch.context() as patch:
        patch.setattr(study, "trained", lambda *_: pytest.fail("trained again"))
        assert study.run(few(tmp_path))["rows"] == first["rows"]
    said = StringIO()
    study.run(few(tmp_path, steps=3, attention=("softmax",), control=0), said)
    assert "not used: 4 records of other settings" in said.getvalue()


def test_records_made_elsewhere_give_the_same_table_without_data_or_device(tmp_path, monkeypatch):
    first = study.run(few(tmp_path / "there"))
    (tmp_path / "here").mkdir()
    (tmp_path / "there" / "cab").rename(tmp_path / "here" / "cab")
    monkeypatch.setattr(study, "trained", lambda *_: pytest.fail("trained again"))
    monkeypatch.setattr(study, "prepared", lambda *_: pytest.fail("data were read"))
    again = study.run(few(tmp_path / "here", device=None, report_only=True))
    assert again["rows"] == first["rows"]
    assert again["origins"] == first["origins"]
    more = study.run(few(tmp_path / "here", report_only=True, seeds=2))
    assert more["missing"] == ["restore all softmax, seed 1", "restore CS linear, seed 1", "restore CC linear, seed 1"]
    other = next((tmp_path / "here" / "cab" / "records").glob("*linear*.json"))
    other.write_text(json.dumps({**json.loads(other.read_text()), "content": "0" * 16}))
    with pytest.raises(ValueError, match="one content of each task"):
        study.run(few(tmp_path / "here", report_only=True))


def test_a_mechanism_that_fails_costs_no_other_run_and_is_tried_again(tmp_path, monkeypatch):
    def broken(task, tensors, uses, *rest):
        if uses:
            raise RuntimeError("no such kernel")
        return trained(task, tensors, uses, *rest)

    with monkeypatch.context() as patch:
        patch.setattr(study, "trained", broken)
        result = study.run(few(tmp_path, tasks=("lm",), attention=("linear",)))
    assert result["failed"] == ["CS lm, linear: RuntimeError: no such kernel"]
    assert {row["mechanism"] for row in result["rows"]} == {"softmax", "softmax again"}
    assert study.run(few(tmp_path, tasks=("lm",), attention=("linear",)))["failed"] == []


def test_the_command_writes_table_figure_and_page(tmp_path, capsys):
    words = "bench cab --attention linear cumulant2 cumulant3 --tasks lm --steps 2 --seeds 2 --control 1 --device cpu"
    assert main([*words.split(), "--out", str(tmp_path)]) == 0
    assert "CS" in capsys.readouterr().out
    assert all((tmp_path / f"cab.{kind}").stat().st_size for kind in ("json", "svg", "png"))
    assert "Four uses of attention" in (tmp_path / "report.html").read_text()


def test_without_the_packages_of_the_page_runs_are_made_and_kept(tmp_path, capsys, monkeypatch):
    """A GPU machine may lack them; the report is then made elsewhere, from the records."""
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    words = "bench cab --attention linear --tasks lm --steps 2 --seeds 1 --control 0 --device cpu --json"
    assert main([*words.split(), "--out", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["rows"]
    assert len(list((tmp_path / "cab" / "records").glob("*.json"))) == 2
    assert not (tmp_path / "report.html").exists()


def test_an_unknown_task_is_named_with_those_there_are(tmp_path, capsys):
    assert main(["bench", "cab", "--tasks", "summary", "--out", str(tmp_path)]) == 2
    assert "unknown task 'summary' of CAB" in capsys.readouterr().err


def test_a_gpu_that_has_failed_ends_the_process_instead_of_failing_every_run_after_it(tmp_path, monkeypatch):
    """Such a process made 165 records of one failure: each further run fails at once, and takes the next."""
    said = ["Triton Error [CUDA]: unspecified launch failure"]

    def broken(*_):
        raise RuntimeError(said[0])

    monkeypatch.setattr(study, "_loaded", lambda *_: {})
    monkeypatch.setattr(study, "trained", broken)
    shop = study.Shop(tmp_path, "cpu", {}, False)
    run = study.Training(
        "lm all softmax", 0, "compared", "mark", task=SMALL["lm"], uses={}, schedule=Schedule(1), tensors=tmp_path,
        about={},
    )  # fmt: skip
    with pytest.raises(RuntimeError, match="launch failure"):
        shop.make(run)
    assert "launch failure" in shop.given_up(run, said[0])["failed"]  # after its second process
    assert "launch failure" in json.loads(shop.record(run).read_text())["failed"]
    said[0] = "shapes do not fit"
    assert "shapes do not fit" in shop.make(run)["failed"]


def test_one_use_of_a_task_may_be_asked_for(tmp_path):
    settings = Cab(tasks=("restore",), uses=("CC",), attention=("softmax", "linear"), steps=1, seeds=1, control=0,
                   device="cpu", out=tmp_path)  # fmt: skip
    assert {row["pattern"] for row in study.run(settings)["rows"]} == {"CC"}
    with pytest.raises(ValueError, match="unknown use 'C' of attention"):
        study.chosen_uses(["C"])
    with pytest.raises(ValueError, match="none of restore has NC: restore has CS and CC"):
        study.run(replace(settings, uses=("NC",)))


def test_one_mechanism_alone_is_trained_and_drawn_without_an_index(tmp_path, capsys):
    few = ["--steps", "1", "--seeds", "1", "--control", "0", "--device", "cpu", "--out", str(tmp_path)]
    assert main(["bench", "cab", "--attention", "softmax", "--tasks", "lm", *few]) == 0
    assert (tmp_path / "cab.svg").is_file()
    assert json.loads((tmp_path / "cab.json").read_text())["index"] == {}
