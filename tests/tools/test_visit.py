"""`python -m tools.visit`: many commands side by side within a limit of time."""

import sys
import time

from tools import visit

# Breaks off at its first start, and tells at each one whether processes share the GPU by the service.
BREAKS_OFF = f"""
import os, pathlib, sys
place = pathlib.Path(sys.argv[1])
place.open("a").write("shared " if {visit.PIPE!r} in os.environ else "alone ")
sys.exit(1 if place.read_text().count(" ") == 1 else 0)
"""


def test_a_command_that_breaks_off_is_given_again_without_the_service(tmp_path, monkeypatch):
    monkeypatch.setattr(visit, "SHORT", 0.0)
    times, told = [], tmp_path / "told"
    line = [sys.executable, "-c", BREAKS_OFF, str(told)]
    visit.follow(0, [line, line], tmp_path, {visit.PIPE: "there"}, time.monotonic() + 60, times)
    assert [one["ended"] for one in times] == ["exit 1", "exit 0", "exit 0"]
    assert told.read_text() == "shared alone alone "


def test_a_command_that_never_worked_is_not_given_again(tmp_path):
    times = []
    visit.follow(0, [[sys.executable, "-c", "raise SystemExit(1)"]], tmp_path, {}, time.monotonic() + 60, times)
    assert [one["ended"] for one in times] == ["exit 1"]


def test_a_command_whose_time_is_over_is_ended(tmp_path):
    times = []
    line = [sys.executable, "-c", "import time; time.sleep(60)"]
    visit.follow(0, [line], tmp_path, {}, time.monotonic() + 1 - visit.LAST / 2, times)  # not begun: no time
    assert not times
    code, took = visit.one(line, tmp_path / "log", {}, time.monotonic() + 1 - visit.LAST / 2)
    assert code is None
    assert took < 30


def test_cab_may_be_several_commands(tmp_path):
    asked = visit.Visit(cab=3, cab_options="--tasks lm then --tasks restore")
    first, second = visit.benchmark(asked, tmp_path, 1.0)
    assert first[-2:] == ["--tasks", "lm"]
    assert second[-2:] == ["--tasks", "restore"]
