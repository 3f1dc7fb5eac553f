"""Files of the bench: JSON with its origin, figures, and one page that needs no network."""

import json
import re
from pathlib import Path

import pytest
from bench_records import baseline, record

from cumulant.bench import report
from cumulant.bench.command import Efficiency, Error, Speed
from cumulant.bench.plots import with_room
from cumulant.bench.provenance import provenance
from cumulant.cli import main
from cumulant.studies.command import TrainBench
from cumulant.studies.mechanisms import judged


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """All three results, by the commands where that is quick."""
    out = tmp_path_factory.mktemp("bench")
    common = ["--attention", "linear", "cumulant2", "--out", str(out)]
    assert main(["bench", "error", *common, "--sizes", "0.5", "--length", "20", "--dim", "8"]) == 0
    assert main(["bench", "efficiency", *common, "--lengths", "16", "24", "40", "--heads", "1", "--device", "cpu",
                 "--calls", "3"]) == 0  # fmt: skip
    records = [*baseline(0.5, 0.6), record("linear", 0.4)]
    result = {
        "bench": "train", "recipe": "digits", "data": "digits", "model": "vit", "epochs": 1, "batch_size": 64,
        "test_items": 450, "baseline": "softmax", "seeds": 1, "runs": records, **judged(records, "softmax"),
    }  # fmt: skip
    report.publish(result, TrainBench(out=out, epochs=1))
    return out


@pytest.mark.parametrize("name", ["error", "efficiency", "train"])
def test_a_result_is_a_json_file_with_its_origin_and_two_figures(folder, name):
    result = json.loads((folder / f"{name}.json").read_text())
    assert result["command"].startswith(f"cumulant bench {name}")
    assert {"commit", "versions", "machine", "date"} <= set(result)
    assert str(folder) not in json.dumps(result)
    assert "<svg" in (folder / f"{name}.svg").read_text()
    assert (folder / f"{name}.png").read_bytes().startswith(b"\x89PNG")


def test_one_page_holds_all_three_and_fetches_nothing(folder):
    page = (folder / "report.html").read_text()
    for place in ("error", "efficiency", "train", "error-0", "time-both", "memory-forward", "accuracy-flops"):
        assert f'id="{place}"' in page
    own = re.sub(r"<script>.*?</script>", "", page, flags=re.DOTALL)
    assert not re.search(r'(src|href)="(https?:)?//', own)
    assert "Plotly" in page


def test_every_figure_has_its_place_on_the_page(folder):
    page = (folder / "report.html").read_text()
    data = json.loads(re.search(r"const page = (\{.*\});", page).group(1))
    assert set(data) == set(re.findall(r'class="plot" id="([^"]+)"', page))


def test_the_tables_show_every_mechanism(folder):
    page = (folder / "report.html").read_text()
    body = page[: page.index("<script>")]
    for label in ("linear", "cumulant2"):
        assert body.count(f"</span>{label}</td>") >= 3  # error, time, memory


def test_a_page_of_one_result_has_one_section(folder):
    results = report.read(folder)
    page = report.render({"train": results["train"]})
    assert 'id="train"' in page
    assert 'id="error"' not in page


def test_an_empty_folder_has_no_page(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"must hold error\.json"):
        report.read(tmp_path)


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        (Error(attention=("all",), checkpoint=Path("some/where/softmax-0")),
         "cumulant bench error --attention all --checkpoint softmax-0"),
        (Efficiency(lengths=(8, 16), pattern="causal", out=Path("else/where")),
         "cumulant bench efficiency --lengths 8 16 --pattern causal"),
        (TrainBench(recipe="tiny-imagenet-100", data="some/where/tiny", fresh=True),
         "cumulant bench train --recipe tiny-imagenet-100 --data tiny"),
        (Speed(lengths=(40,), heads=2, causal=True), "cumulant bench speed --lengths 40 --heads 2 --causal"),
    ],
)  # fmt: skip
def test_the_command_names_what_was_chosen_and_no_path(settings, words):
    assert report.command(settings) == words


def test_a_folder_that_cannot_be_written_is_told_before_measuring(tmp_path, capsys):
    (tmp_path / "file").write_text("")
    assert main(["bench", "efficiency", "--out", str(tmp_path / "file")]) == 1
    assert "cannot write files into" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["error", "--attention", "cumulnt2"], "did you mean"),
        (["efficiency", "--attention", "agent", "--pattern", "causal"], "'agent' cannot take part"),
        (["train", "--recipe", "digitz"], "unknown recipe 'digitz'"),
    ],
)
def test_wrong_names_are_answered_with_status_2(words, message, tmp_path, capsys):
    assert main(["bench", *words, "--out", str(tmp_path)]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("given", "message"),
    [({"causal": True}, "--causal needs --attention"), ({"data": "digits"}, "--data digits needs --checkpoint")],
)
def test_options_that_would_be_ignored_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        Error(**given)


def test_the_result_can_be_printed_as_json(tmp_path, capsys):
    words = ["bench", "error", "--attention", "linear", "--sizes", "1", "--length", "12", "--dim", "4"]
    assert main([*words, "--json", "--out", str(tmp_path)]) == 0
    assert json.loads(capsys.readouterr().out)["variants"] == ["linear"]


@pytest.mark.parametrize(
    "content", [b"{damaged", b"[]", b'{"bench": "efficiency"}', b"\xff"], ids=["cut", "list", "bare", "bytes"]
)
def test_a_damaged_result_in_the_folder_is_named_before_measuring(tmp_path, capsys, content):
    (tmp_path / "efficiency.json").write_bytes(content)
    assert main(["bench", "error", "--attention", "linear", "--sizes", "1", "--out", str(tmp_path)]) == 2
    assert "efficiency.json is" in capsys.readouterr().err
    assert not (tmp_path / "error.json").exists()


def test_records_of_a_gpu_can_be_put_together_where_there_is_none(tmp_path, monkeypatch):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    result = report.record({"bench": "train", "runs": [{"device": "cuda"}]}, TrainBench(out=tmp_path))
    assert "gpu" not in result["machine"]


def test_the_page_names_what_no_time_was_left_for():
    records = [*baseline(0.5, 0.6), record("linear", 0.5)]
    result = {
        **judged(records, "softmax"), **provenance("cumulant bench train"), "bench": "train", "recipe": "digits",
        "data": "digits", "model": "vit", "epochs": 1, "batch_size": 1, "test_items": 100, "baseline": "softmax",
        "seeds": 1, "missing": ["flow, seed 0"], "runs": records,
    }  # fmt: skip
    assert "No time was left for flow, seed 0." in report.render({"train": result})


def test_names_of_points_that_lie_together_are_not_written_over_each_other():
    points = [(1.0, 0.9), (1.0, 0.9), (1.1, 0.901), (1.1, 0.5), (2.0, 0.9)]
    assert with_room(points) == [True, False, False, True, True]
    assert with_room([(1.0, 0.5)]) == [True]


def test_the_page_says_how_many_runs_there_are_where_they_differ(folder):
    result = report.read(folder)["train"]
    row = next(row for row in result["ranking"] if row["variant"] == "linear")
    mixed = {**result, "ranking": [*result["ranking"], {**row, "variant": "flow", "seeds": 5}], "seeds": 5}
    assert "for all, 1 or 5 runs each." in report.render({"train": mixed})
    assert "for all, 1 run each." in report.render({"train": result})
