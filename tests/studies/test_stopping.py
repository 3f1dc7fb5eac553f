"""A stopped `cumulant reproduce` keeps the state of every run that was being trained, and goes on from there."""

import os
import signal
import time
from pathlib import Path

import fresh
import pytest
from small_studies import SMALL

from cumulant.studies.plan import epochs_done
from cumulant.train import read_log

TWO_ENDLESS_RUNS = ["--attention", "softmax", "linear", "--seeds=1", "--control=0", "--workers=2", "--epochs=100000"]


def reproduce(out):
    """The command in a group of its own, as a shell starts it."""
    words = ["reproduce", "--out", str(out), *TWO_ENDLESS_RUNS, "--change", *SMALL, "log_steps=1"]
    return fresh.begun(*fresh.CUMULANT, *words, folder=out)


def folders(out):
    return sorted(path for path in (out / "runs").glob("*") if (path / "log.jsonl").is_file() and read_log(path))


def wait_until(seen, otherwise):
    for _ in range(1200):
        if seen():
            return
        time.sleep(0.1)
    raise AssertionError(otherwise)


def wait_until_both_train(child, out):
    wait_until(lambda: len(folders(out)) == 2 or child.poll() is not None, "the two runs did not begin")
    assert child.poll() is None, child.err
    return folders(out)


def ctrl_c(child):
    """What a terminal does: one SIGINT to every process of the group."""
    os.killpg(child.pid, signal.SIGINT)


def timeout(child):
    """What `timeout -s INT` does: a signal to the command, and then what Ctrl-C does, one more to its group."""
    child.send_signal(signal.SIGINT)
    ctrl_c(child)


def ended(child):
    """The command alone is told to end, as `kill` does."""
    child.send_signal(signal.SIGTERM)


def everyone(child):
    """A batch system ends all processes of a job, each by itself."""
    for number in below(child.pid):
        os.kill(number, signal.SIGTERM)
    child.send_signal(signal.SIGTERM)


def below(number):
    """The processes that this one has started, and those that they have."""
    own = map(int, Path(f"/proc/{number}/task/{number}/children").read_text().split())
    return [one for child in own for one in (*below(child), child)]


def assert_kept(child, there):
    """It ends, and says of every run how far it came."""
    assert child.wait() == 130
    said = child.err
    for name, folder in zip(("linear", "softmax"), there, strict=True):
        assert f"{name}, seed 0: kept after {epochs_done(folder):.2f} epochs" in said
        assert epochs_done(folder) > 0


@pytest.mark.parametrize("stop", [timeout, everyone])
def test_a_stop_keeps_every_running_run_and_says_so(tmp_path, stop):
    child = reproduce(tmp_path)
    there = wait_until_both_train(child, tmp_path)
    stop(child)
    assert_kept(child, there)


def test_the_same_command_goes_on_where_workers_without_a_parent_have_stopped_and_is_ended(tmp_path):
    child = reproduce(tmp_path)
    there = wait_until_both_train(child, tmp_path)
    child.send_signal(signal.SIGKILL)  # nothing can be said any more; the workers notice that they are alone
    child.wait()
    wait_until(lambda: min(map(epochs_done, there)) > 0, "the workers kept nothing")
    before = {path: epochs_done(path) for path in there}
    child = reproduce(tmp_path)
    try:
        beyond = lambda: all(read_log(path)[-1]["epoch"] > done + 1 for path, done in before.items())  # noqa: E731
        wait_until(beyond, "the runs did not go on")
    finally:
        ended(child)
    assert_kept(child, there)
    for path in there:
        steps = [line["step"] for line in read_log(path) if line["kind"] == "train"]
        assert steps == list(range(1, len(steps) + 1)), "no step was done twice or left out"
