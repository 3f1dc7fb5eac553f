"""The runner of GPU tests, on small files of tests instead of the suite's."""

import json
import subprocess
import sys

import pytest

from tools import test_gpu

GOOD = """
import pytest
pytestmark = pytest.mark.gpu
@pytest.mark.parametrize("n", range(5))
def test_good(n): pass
def test_left_out(): pytest.skip("not here")
"""
BAD = """
import os, pytest
pytestmark = pytest.mark.gpu
def test_fails(): assert 1 == 2
def test_dies(): os._exit(7)
def test_never_reached(): pass
"""
BROKEN = """
import no_such_package  # pytest.mark.gpu
"""
PLAIN = """
def test_without_a_gpu(): assert False
"""


@pytest.fixture(scope="module")
def record(tmp_path_factory):
    tmp_path = tmp_path_factory.mktemp("gpu")
    for name, text in (("good", GOOD), ("bad", BAD), ("broken", BROKEN), ("plain", PLAIN)):
        (tmp_path / f"test_{name}.py").write_text(text)
    out = tmp_path / "record.json"
    command = [sys.executable, test_gpu.__file__, str(tmp_path), "--out", str(out), "--jobs", "2", "--most", "6"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    return json.loads(out.read_text()), done.stdout


def test_failures_and_deaths_of_one_file_spoil_no_other(record):
    files, _ = record[0]["files"], record[1]
    found = {path.rpartition("_")[2]: (x["passed"], x["failed"], x["skipped"]) for path, x in files.items()}
    assert found == {"good.py": (5, 0, 1), "bad.py": (0, 3, 0), "broken.py": (0, 1, 0)}


def test_the_record_names_what_ran_where_and_the_table_every_problem(record):
    made, table = record
    assert {"commit", "machine", "torch", "triton", "python", "seconds", "left", "files"} <= made.keys()
    assert "exit status 7" in table
    assert "No module named 'no_such_package'" in table
    assert "test_without_a_gpu" not in table
    tests = {name for x in made["files"].values() for name in x["tests"]}
    assert {"test_good[0]", "test_left_out"} <= tests
    assert sum(name in table.partition("slowest: ")[2] for name in tests) == min(5, len(tests))


def test_a_run_that_is_stopped_has_told_what_ended_before(monkeypatch):
    monkeypatch.setattr(test_gpu, "tests_of", lambda path, limit: ([f"{path}::{i}" for i in range(5)], ""))
    monkeypatch.setattr(test_gpu, "run", lambda names, limit: test_gpu.Outcome(passed=len(names)))
    told = []
    test_gpu.run_all(
        ["a"], jobs=1, most=2, limit=1, heard=lambda found, left: told.append((found["a"].passed, left))
    )  # fmt: skip
    assert len(told) == 3
    assert {passed + left for passed, left in told} == {5}
    assert told[-1] == (5, 0)


def test_what_took_longest_before_begins_first(monkeypatch, tmp_path):
    begun = []

    def run(names, limit):
        begun.append(names[0][0])
        return test_gpu.Outcome(passed=len(names))

    monkeypatch.setattr(test_gpu, "tests_of", lambda path, limit: ([f"{path}::{i}" for i in range(2)], ""))
    monkeypatch.setattr(test_gpu, "run", run)
    before = tmp_path / "gpu_tests.json"
    counts = {"passed": 1, "failed": 1, "skipped": 0}
    files = {"a": {"seconds": 2.0, **counts}, "b": {"seconds": 9.0, **counts}, "c": {"seconds": 5.0, **counts}}
    before.write_text(json.dumps({"files": files}))
    test_gpu.run_all(["a", "b", "c"], 1, 2, 1, lambda *_: None, test_gpu.seconds_before(before))
    assert begun == ["b", "c", "a"]
    assert test_gpu.seconds_before(tmp_path / "none.json") == {}
