"""A run that is killed at any moment and started again ends bit for bit as if nothing had happened."""

import errno
import os
import random
import signal
import subprocess
import time
from dataclasses import replace
from pathlib import Path

import fresh
import pytest
from small_runs import FULL, few_digits, in_child, kill_self, outcome

from cumulant.train import RecipeError, files, optimise, read_log, read_recipe, train
from cumulant.train import log as log_module


def nth_call(module, name, number, instead, file=""):
    """Replace a function so that its `number`-th call, counted from 1, goes to `instead(original, *arguments)`.

    With `file` only calls count whose last argument is a path or an open file of that name.
    """
    original, calls = getattr(module, name), iter(range(1, 1 << 30))

    def counted(*arguments, **options):
        here = not file or file in str(
            os.readlink(f"/proc/self/fd/{last}") if isinstance(last := arguments[-1], int) else last
        )
        if here and next(calls) == number:
            return instead(original, *arguments, **options)
        return original(*arguments, **options)

    setattr(module, name, counted)


def halve_file(_original, handle):
    os.ftruncate(handle, os.fstat(handle).st_size // 2)
    kill_self()


def halve_line(_original, log, record):
    log.file.write('{"kind": "train", "st')
    log.file.flush()
    kill_self()


def after(original, *arguments, **options):
    original(*arguments, **options)
    kill_self()


MOMENTS = {
    "in the first step": (optimise, "apply", 1, kill_self),
    "after the first epoch's last update": (optimise, "apply", 6, after),
    "between the update and the average": (optimise.Average, "update", 8, kill_self),
    "in the last step": (optimise, "apply", 18, kill_self),
    "while the recipe is written": (os, "fsync", 1, halve_file, "recipe.json"),
    "while the first state is written": (os, "fsync", 1, halve_file, "state.safetensors"),
    "while a later state is written": (os, "fsync", 3, halve_file, "state.safetensors"),
    "right after a state is in its place": (os, "replace", 2, after, "state.safetensors"),
    "while the best weights are written": (os, "fsync", 1, halve_file, "best.safetensors"),
    "in the middle of a log line": (log_module.Log, "write", 3, halve_line),
    "after logging, before the state": (log_module.Log, "write", 6, after),
    "when only the result is missing": (os, "replace", 1, kill_self, "result.json"),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_run_killed_at_this_moment_ends_as_an_undisturbed_one(undisturbed, tmp_path, moment):
    def work():
        nth_call(*MOMENTS[moment])
        train(FULL, tmp_path, source=few_digits())

    assert in_child(work) == -signal.SIGKILL
    assert not (tmp_path / "result.json").exists()
    train(FULL, tmp_path, source=few_digits())
    assert outcome(tmp_path) == undisturbed


def test_a_run_killed_again_and_again_ends_as_an_undisturbed_one(undisturbed, tmp_path):
    chance, deaths = random.Random(0), 0

    def work():
        nth_call(optimise, "apply", chance.randint(2, 12), chance.choice([kill_self, after]))
        train(FULL, tmp_path, source=few_digits())

    while in_child(work) == -signal.SIGKILL:
        chance.random()
        deaths += 1
        assert deaths < 50
    assert deaths >= 2
    assert outcome(tmp_path) == undisturbed


def test_the_killed_command_goes_on_when_it_is_given_again(tmp_path):
    recipe = tmp_path / "short.toml"
    recipe.write_text(
        'data = "digits"\nimage_size = 8\nmodel = "vit_nano_patch2_8"\nepochs = 3\nbatch_size = 64\ndrop_path = 0.2\n'
        "warmup_epochs = 1\nlog_steps = 10\ncheckpoint_steps = 7\nworkers = 0\n[model_options]\nin_chans = 3\n"
        "depth = 2\n[augmentation]\nshift = 1\nmixup = 0.8\n"
    )
    killed, calm = tmp_path / "killed", tmp_path / "calm"
    command = [*fresh.CUMULANT, "train", str(recipe), "--out", str(killed), "--device", "cpu"]
    process = fresh.begun(*command, folder=tmp_path)
    while not (killed / "state.safetensors").exists():
        assert process.poll() is None, process.err
        time.sleep(0.01)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not (killed / "result.json").exists()
    fresh.forked(*command, folder=tmp_path)
    train(read_recipe(recipe), calm)
    assert outcome(killed) == outcome(calm)


def test_no_step_is_logged_twice(undisturbed):
    marks = [(line["kind"], line["step"]) for line in undisturbed["log"]]
    train_steps = [step for kind, step in marks if kind == "train"]
    assert train_steps == [4, 6, 8, 12, 16, 18]
    assert [step for kind, step in marks if kind == "test"] == [6, 12, 18]


def test_half_a_line_is_left_out_by_readers_and_repaired_by_the_next_run(tmp_path):
    path = tmp_path / "log.jsonl"
    path.write_bytes(b'{"step": 1}\n{"step": 2}\n{"step": 3, "lo')
    assert [line["step"] for line in read_log(tmp_path)] == [1, 2]
    log_module.Log(tmp_path, after=1).file.close()
    assert path.read_bytes() == b'{"step": 1}\n'


def test_a_finished_run_is_read_not_trained(undisturbed, tmp_path, monkeypatch):
    first = train(FULL, tmp_path, source=few_digits())
    monkeypatch.setattr(optimise, "apply", lambda *_: pytest.fail("trained again"))
    assert train(FULL, tmp_path, source=few_digits()) == first


def test_a_finished_run_is_read_from_a_disk_that_takes_nothing(calm, monkeypatch):
    def refuse(*_arguments, **_options):
        raise OSError(errno.EROFS, "Read-only file system")

    before = {path.name: path.stat().st_mtime_ns for path in (calm, *calm.iterdir())}
    monkeypatch.setattr(Path, "unlink", refuse)
    assert train(replace(FULL, log_steps=1), calm, source=few_digits()).steps == 18
    assert {path.name: path.stat().st_mtime_ns for path in (calm, *calm.iterdir())} == before


def test_another_recipe_in_the_folder_is_an_error_that_names_the_difference_and_the_way_out(tmp_path):
    def work():
        nth_call(optimise, "apply", 8, kill_self)
        train(FULL, tmp_path, source=few_digits())

    in_child(work)
    state = (tmp_path / "state.safetensors").read_bytes()
    other = replace(FULL, lr=1e-3, model_options={**FULL.model_options, "depth": 3})
    with pytest.raises(RecipeError, match=r"lr: 0.002 -> 0.001; model_options.depth: 2 -> 3.*--fresh") as caught:
        train(other, tmp_path, source=few_digits())
    assert "seed" not in str(caught.value)
    assert (tmp_path / "state.safetensors").read_bytes() == state


def test_what_does_not_touch_the_weights_may_change_between_two_parts_of_a_run(undisturbed, tmp_path):
    def work():
        nth_call(optimise, "apply", 8, kill_self)
        train(FULL, tmp_path, source=few_digits())

    in_child(work)
    train(replace(FULL, checkpoint_steps=0, checkpoint_epochs=2, in_memory="no"), tmp_path, source=few_digits())
    different = outcome(tmp_path)
    assert different["log"] == undisturbed["log"]
    assert different["predictions.safetensors"] == undisturbed["predictions.safetensors"]


def test_a_fresh_start_forgets_the_run_that_was_there(undisturbed, tmp_path):
    train(replace(FULL, epochs=1, warmup_epochs=0.0, seed=7), tmp_path, source=few_digits())
    train(FULL, tmp_path, source=few_digits(), fresh=True)
    assert outcome(tmp_path) == undisturbed


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_stopped_run_saves_its_last_step_first(undisturbed, tmp_path, number):
    def work():
        nth_call(optimise, "apply", 9, lambda original, *rest: (original(*rest), os.kill(os.getpid(), number)))
        try:
            train(FULL, tmp_path, source=few_digits())
        except KeyboardInterrupt:
            os._exit(77)

    assert in_child(work) == 77

    def rest():
        nth_call(optimise, "apply", 9 + 1, kill_self)  # 9 of 18 steps are left: there is no tenth
        train(FULL, tmp_path, source=few_digits())

    assert in_child(rest) == 0
    assert outcome(tmp_path) == undisturbed


def to_its_group(number):
    """From elsewhere: to a worker that its own trainer ends torch has nothing to say."""
    subprocess.run(["kill", f"-{number}", "--", f"-{os.getpgrp()}"], start_new_session=True, check=True)


def to_each(number):
    """The workers first."""
    workers = Path(f"/proc/self/task/{os.getpid()}/children").read_text().split()
    assert len(workers) > 1
    subprocess.run(["kill", f"-{number}", *workers], start_new_session=True, check=True)
    time.sleep(0.1)
    os.kill(os.getpid(), number)


@pytest.mark.parametrize(
    ("number", "whom"), [(signal.SIGINT, to_its_group), (signal.SIGTERM, to_its_group), (signal.SIGTERM, to_each)]
)
def test_a_signal_to_all_its_processes_stops_a_run_as_one_to_itself_does(undisturbed, tmp_path, number, whom):
    streamed = replace(FULL, in_memory="no", workers=2)

    def signal_all(original, *rest):
        original(*rest)
        whom(number)
        time.sleep(0.5)  # time for workers to end, if they hear of it, and for torch to notice

    def work():
        os.setpgrp()
        nth_call(optimise, "apply", 9, signal_all)
        try:
            train(streamed, tmp_path, source=few_digits())
        except KeyboardInterrupt:
            os._exit(77)

    assert in_child(work) == 77
    assert (tmp_path / "state.safetensors").is_file()
    train(streamed, tmp_path, source=few_digits())
    assert outcome(tmp_path)["log"] == undisturbed["log"]


def test_workers_of_a_killed_run_do_not_keep_its_folder(tmp_path):
    streamed = replace(FULL, in_memory="no", workers=2)

    def work():
        nth_call(optimise, "apply", 9, kill_self)
        train(streamed, tmp_path, source=few_digits())

    in_child(work)
    with files.sole_owner(tmp_path):  # at once, while they have not noticed yet
        pass


def test_a_folder_in_use_is_refused(tmp_path):
    with files.sole_owner(tmp_path), pytest.raises(OSError, match="another process is training into"):
        train(FULL, tmp_path, source=few_digits())
    assert Path(tmp_path / "state.safetensors").exists() is False
