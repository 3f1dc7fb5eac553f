"""Records of single runs go from a visit into the repository and back, whole."""

import json
import tarfile

import pytest
import torch
from safetensors.torch import save

from tools import records, visit

RUNS = {
    "softmax-0-aa": {"seed": 0, "provenance": {"commit": "abc"}, "settings": {"steps": 3}, "values": {"loss": 0.1}},
    "softmax-1-aa": {"seed": 1, "provenance": {"commit": "abc"}, "settings": {"steps": 3}, "values": {"loss": 0.3}},
}


def written(folder, study, runs):
    for name, one in runs.items():
        path = folder / study / "records" / f"{name}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(one))


def test_what_runs_share_is_written_once_and_comes_back():
    packed = records.packed(RUNS)
    assert packed["shared"] == [{"commit": "abc"}, {"steps": 3}]
    assert records.unpacked(json.loads(records.lines(packed))) == RUNS


def test_records_of_two_visits_join_and_are_laid_out_again(tmp_path):
    kept, first, second = tmp_path / "kept", tmp_path / "first", tmp_path / "second"
    written(first, "sinks", {"softmax-0-aa": RUNS["softmax-0-aa"]})
    written(second, "sinks", RUNS)
    assert records.take(first, kept) == {"sinks": 1}
    assert records.take(second, kept) == {"sinks": 1}, "the record that is there already is not new"
    assert records.put(tmp_path / "work", kept) == 2
    assert records.found(tmp_path / "work") == {"sinks": RUNS}


def test_records_of_a_layers_ordering_lie_below_heads(tmp_path):
    written(tmp_path / "first" / "heads", "moh", RUNS)
    assert records.take(tmp_path / "first", tmp_path / "kept") == {"moh": 2}
    assert records.put(tmp_path / "work", tmp_path / "kept") == 2
    assert len(list((tmp_path / "work" / "heads" / "moh" / "records").iterdir())) == 2
    assert records.found(tmp_path / "work") == {"moh": RUNS}


def test_a_visit_writes_only_what_is_new(tmp_path):
    written(tmp_path / "work", "sinks", {"softmax-0-aa": RUNS["softmax-0-aa"]})
    before = records.found(tmp_path / "work")
    written(tmp_path / "work", "sinks", RUNS)
    assert visit.write_new(tmp_path / "work", before, tmp_path / "studies.json") == 1
    assert records.take(tmp_path / "studies.json", tmp_path / "kept") == {"sinks": 1}
    assert list(records.kept(tmp_path / "kept")["sinks"]) == ["softmax-1-aa"]


def test_tensors_of_other_content_are_refused(tmp_path, monkeypatch):
    task = visit.tasks_of("small")["lm"]
    monkeypatch.setattr(visit, "tasks_of", lambda size: {"lm": task})
    with tarfile.open(tmp_path / "t.tar.xz", "w:xz") as tar:
        visit.add(tar, "lm.safetensors", save({"train": torch.arange(9, dtype=torch.uint8)}))
        visit.add(tar, "digests.json", json.dumps({"lm": "0123456789abcdef"}).encode())
    with pytest.raises(ValueError, match=r"lm has digest [0-9a-f]{16} here, 0123456789abcdef where it was packed"):
        visit.lay_tensors(tmp_path / "t.tar.xz", tmp_path)


def test_the_kept_records_are_those_of_the_leaderboard():
    """Names are keys: a run whose name is not in the plan of the benchmark would never be found again."""
    from cumulant.studies.cab.tasks import tasks_of

    kept = records.kept()["cab"]
    assert len(kept) > 250
    metrics = {name: set(task.metrics) for name, task in tasks_of("full").items()}
    assert all(set(one["metrics"]) == metrics[one["task"]] for one in kept.values())
    assert len({(one["task"], one["content"]) for one in kept.values()}) == len(metrics), "one content a task"


def test_studies_of_a_lane_follow_each_other(tmp_path):
    asked = visit.Visit(cab=3, study=("pavlovian:2 then random-features:4:cuda", "sinks:1:cpu:--setting paper"))
    first, second = visit.lanes(asked, tmp_path, 1.5)
    assert [line[3:5] for line in visit.benchmark(asked, tmp_path, 1.5)] == [["bench", "cab"]]
    assert [line[4] for line in first] == ["pavlovian", "random-features"]
    assert [line[line.index("--device") + 1] for line in first] == ["cpu", "cuda"]
    assert "--setting paper" in " ".join(second[0])


def test_a_command_that_outlasts_the_visit_is_ended_with_its_children(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(visit, "LAST", 0)
    forever = [visit.sys.executable, "-c", "import time; print('begun', flush=True); time.sleep(600)"]
    times = []
    visit.follow(0, [forever, forever], tmp_path, {}, visit.time.monotonic() + 0.5, times)
    said = capsys.readouterr().out
    assert said.count("still running, ended") == 1, "the second is not begun"
    assert [one["ended"] for one in times] == ["still running, ended"]
