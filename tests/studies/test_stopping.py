"""A stopped `cumulant reproduce` keeps the state of every run that was being trained, and goes on from there."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from small_studies import SMALL

from cumulant import cli
from cumulant.studies import runs
from cumulant.studies.budget import epochs_done
from cumulant.train import read_log

TWO_ENDLESS_RUNS = ["--attention", "softmax", "linear", "--seeds=1", "--control=0", "--workers=2", "--epochs=100000"]


class Command:
    """`cumulant reproduce` in a group of its own, as a shell starts it.

    `fresh` is the command in a new interpreter, whose workers start anew too. Otherwise they are copies of this one,
    which saves four imports of torch: what is sent to whom, and what is done then, is the same.
    """

    def __init__(self, out, fresh=False):
        words = ["reproduce", "--out", str(out), *TWO_ENDLESS_RUNS, "--change", *SMALL, "log_steps=1"]
        self.told, self.status = out.with_name(f"{out.name}.err"), None
        with self.told.open("w") as errors:
            if fresh:
                line = [sys.executable, "-m", "cumulant.cli", *words]
                devnull = subprocess.DEVNULL
                self.pid = subprocess.Popen(line, stderr=errors, stdout=devnull, start_new_session=True).pid
                return
            import torch._dynamo  # noqa: F401  training does, and each worker would by itself

            self.pid = os.fork()
            if self.pid == 0:
                os.setsid()
                os.dup2(errors.fileno(), 2)
                os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
                sys.stderr, sys.stdout = (os.fdopen(number, "w", closefd=False) for number in (2, 1))  # not pytest's
                runs.START = "fork"
                status = 1
                try:
                    status = cli.main(words)
                finally:
                    sys.stderr.flush()
                    os._exit(status)

    def running(self):
        if self.status is None:
            process, status = os.waitpid(self.pid, os.WNOHANG)
            self.status = os.waitstatus_to_exitcode(status) if process else None
        return self.status is None

    def said(self):
        """What it told on the way to its end, which must come."""
        wait_until(lambda: not self.running(), "the command did not end")
        return self.told.read_text()


def folders(out):
    return sorted(path for path in (out / "runs").glob("*") if (path / "log.jsonl").is_file() and read_log(path))


def wait_until(seen, otherwise):
    for _ in range(1200):
        if seen():
            return
        time.sleep(0.1)
    raise AssertionError(otherwise)


def wait_until_both_train(command, out):
    wait_until(lambda: len(folders(out)) == 2 or not command.running(), "the two runs did not begin")
    assert command.running(), command.said()
    return folders(out)


def ctrl_c(command):
    """What a terminal does: one SIGINT to every process of the group."""
    os.killpg(command.pid, signal.SIGINT)


def timeout(command):
    """What `timeout -s INT` does: a signal to the command, and one more to its group."""
    os.kill(command.pid, signal.SIGINT)
    ctrl_c(command)


def ended(command):
    """The command alone is told to end, as `kill` does."""
    os.kill(command.pid, signal.SIGTERM)


def everyone(command):
    """A batch system ends all processes of a job, each by itself."""
    for number in Path(f"/proc/{command.pid}/task/{command.pid}/children").read_text().split():
        os.kill(int(number), signal.SIGTERM)
    ended(command)


@pytest.mark.parametrize(
    ("stop", "fresh"), [(ctrl_c, False), (timeout, True), (ended, False), (everyone, False)],
    ids=["ctrl_c", "timeout, in new interpreters", "ended", "everyone"],
)  # fmt: skip
def test_a_stop_keeps_every_running_run_and_says_so(tmp_path, stop, fresh):
    out = tmp_path / "out"
    command = Command(out, fresh)
    there = wait_until_both_train(command, out)
    stop(command)
    said = command.said()
    assert command.status == 130
    for name, folder in zip(("linear", "softmax"), there, strict=True):
        assert f"{name}, seed 0: kept after {epochs_done(folder):.2f} epochs" in said
        assert epochs_done(folder) > 0


def test_the_same_command_goes_on_where_workers_without_a_parent_have_stopped(tmp_path):
    out = tmp_path / "out"
    command = Command(out)
    there = wait_until_both_train(command, out)
    os.kill(command.pid, signal.SIGKILL)  # nothing can be said any more; the workers notice that they are alone
    command.said()
    wait_until(lambda: min(map(epochs_done, there)) > 0, "the workers kept nothing")
    before = {path: epochs_done(path) for path in there}
    command = Command(out)
    try:
        beyond = lambda: all(read_log(path)[-1]["epoch"] > done + 1 for path, done in before.items())  # noqa: E731
        wait_until(beyond, "the runs did not go on")
    finally:
        ended(command)
        command.said()
    for path in there:
        steps = [line["step"] for line in read_log(path) if line["kind"] == "train"]
        assert steps == list(range(1, len(steps) + 1)), "no step was done twice or left out"
