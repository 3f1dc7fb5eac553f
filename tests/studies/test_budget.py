"""A budget of time starts no run that would not end within it. The clock of these tests is moved by hand."""

import pytest
from small_studies import Clock, small_run, workshop

from cumulant.studies.plan import Budget
from cumulant.studies.runs import train_all
from cumulant.studies.study import Classifiers


def test_without_a_limit_everything_fits():
    assert Budget(None).fits("softmax", 10**9)


def test_a_run_is_judged_by_the_time_per_epoch_of_its_configuration():
    clock = Clock()
    budget = Budget(10, clock)
    budget.saw("softmax", 10, 100)
    budget.saw("cumulant3", 10, 300)
    clock.now = 350
    assert budget.left == 250
    assert budget.fits("softmax", 25)
    assert not budget.fits("softmax", 26)
    assert not budget.fits("cumulant3", 10)
    assert budget.fits("cumulant3", 8)


def test_what_was_not_seen_yet_is_taken_for_as_slow_as_the_slowest():
    budget = Budget(1, Clock())
    assert budget.fits("new", 1000), "nothing is known at first"
    budget.saw("fast", 1, 1)
    budget.saw("slow", 1, 20)
    assert not budget.fits("new", 4)


@pytest.fixture
def slow(monkeypatch):
    """Training takes 60 s of a clock that stands still otherwise, and ends at once."""
    clock = Clock()

    def make(_shop, run, *_):
        clock.now += 60
        return {"accuracy": 0.5, "epochs": run.recipe.epochs}

    monkeypatch.setattr(Classifiers, "make", make)
    return clock


def test_runs_that_would_not_end_in_time_are_left(tmp_path, slow):
    wanted = [small_run("softmax", seed) for seed in range(5)]
    done = []
    left = train_all(
        wanted, workshop(tmp_path), workers=1, report=lambda run, _: done.append(run), budget=Budget(3.5, slow)
    )
    assert (done, left) == (wanted[:3], wanted[3:])


def test_a_shorter_run_behind_a_long_one_still_has_its_turn(tmp_path, slow):
    wanted = [small_run("softmax", 0, epochs=2), small_run("linear", 0, epochs=9), small_run("softmax", 1, epochs=2)]
    left = train_all(wanted, workshop(tmp_path), workers=1, report=lambda *_: None, budget=Budget(3, slow))
    assert left == wanted[1:2]
