"""Machines that share a folder make every run once; what a lost machine held is made by another."""

import json
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
from small_studies import Clock

from cumulant.studies import runs as runs_module
from cumulant.studies.crews import Claims, place
from cumulant.studies.plan import Run, seeded
from cumulant.studies.runs import Workshop, complete

RUNS = [Run(*one, fingerprint="fair") for one in seeded(["coin"], "coin", seeds=4, controls=4)]


def test_a_claim_is_one_machines_until_it_is_given_back(tmp_path):
    first, second = Claims(tmp_path), Claims(tmp_path)
    assert first.take("run")
    assert not second.take("run")
    assert second.take("run.b")  # another run, whose name begins alike
    first.give_back("run")
    assert second.take("run")


def test_of_many_that_claim_at_once_one_has_it(tmp_path):
    def claimed(lost):
        ready, everyone = threading.Barrier(16), [Claims(tmp_path) for _ in range(16)]
        with ThreadPoolExecutor(16) as pool:
            answers = pool.map(lambda one: (ready.wait(), one.take("run"))[1], everyone)
        return sum(answers)

    assert claimed(lost=False) == 1
    held_by_the_dead(tmp_path)
    assert claimed(lost=True) == 1


def held_by_the_dead(folder):
    """A claim as a process of this machine leaves it that was killed."""
    process = subprocess.Popen(["true"])
    process.wait()
    for old in folder.glob("run.*.claim"):
        old.unlink()
    (folder / "run.1.claim").write_text(json.dumps({"place": place(), "process": process.pid}))


def test_a_claim_without_a_pulse_is_of_a_lost_machine(tmp_path):
    (tmp_path / "run.3.claim").write_text(json.dumps({"place": "another machine", "process": os.getpid()}))
    clock = Clock()
    claims = Claims(tmp_path, lease=60, clock=clock)
    assert not claims.take("run")
    clock.now = 59
    assert not claims.take("run")
    os.utime(tmp_path / "run.3.claim", (7, 7))  # whatever the other machine's clock says
    clock.now = 100
    assert not claims.take("run")
    clock.now = 161
    assert claims.take("run")
    assert [path.name for path in tmp_path.iterdir()] == ["run.4.claim"]


def test_the_owner_gives_its_claims_a_pulse_and_gives_them_back_at_the_end(tmp_path):
    with Claims(tmp_path, beat=0.01) as claims:
        assert claims.take("run")
        path = tmp_path / "run.1.claim"
        os.utime(path, (0, 0))
        for _ in range(500):
            if path.stat().st_mtime > 0:
                break
            time.sleep(0.01)
        assert path.stat().st_mtime > 0
    assert not path.exists()


class Coins(Workshop):
    """Runs that write down that they were made, and by whom."""

    def make(self, run, shared=None, progress=None):
        time.sleep(0.02)
        with (self.out / "made").open("a") as file:
            file.write(f"{self.made['by']} {run.seed}\n")
        return {"heads": run.seed}


def test_two_machines_share_the_runs_and_each_has_all_records(tmp_path, monkeypatch):
    monkeypatch.setattr(runs_module, "POLL", 0.02)
    held_by_the_dead(tmp_path)
    (tmp_path / "claims").mkdir()
    (tmp_path / "run.1.claim").rename(tmp_path / "claims" / f"{RUNS[0].name}.1.claim")
    with ThreadPoolExecutor(2) as pool:
        found = list(pool.map(lambda name: complete(RUNS, Coins(tmp_path, "cpu", {"by": name}), on="folder"), "ab"))
    made = [line.split() for line in (tmp_path / "made").read_text().splitlines()]
    assert sorted(int(seed) for _, seed in made) == sorted(run.seed for run in RUNS)
    assert {name for name, _ in made} == {"a", "b"}
    assert found[0] == found[1] == {run: {"heads": run.seed} for run in RUNS}
    assert list((tmp_path / "claims").iterdir()) == []


def test_training_anew_is_refused_where_others_share_the_folder(tmp_path):
    with pytest.raises(ValueError, match="leave it out of --on folder"):
        complete(RUNS, Coins(tmp_path, "cpu", {"by": "a"}, fresh=True), on="folder")
