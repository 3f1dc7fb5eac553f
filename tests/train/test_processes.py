"""Two processes train as one does: the same loss curve, the same weights, with DDP and with FSDP2."""

import json
import multiprocessing
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from small_runs import PLAIN, few_digits, kill_self, outcome

from cumulant.train import optimise, read_log, read_recipe, state, train
from cumulant.train.checkpoint import read_header
from cumulant.train.state import PARTS, damage, mend_state, read_progress

RECIPE = replace(PLAIN, log_steps=1)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


def dies_writing(number):
    """Of this process the `number`-th part of a state is cut short, and the process with it."""
    write, calls = state.write_atomically, iter(range(1, 1 << 30))

    def cut_short(path, content, before=None):
        if path.match("state-*-*.safetensors") and next(calls) == number:
            path.with_name(f".{path.name}.1").write_bytes(content[: len(content) // 2])
            kill_self()
        write(path, content, before=before)

    state.write_atomically = cut_short


def work(rank, port, recipe, folder, dies_at, signals):
    os.environ.update(RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", MASTER_ADDR="127.0.0.1", MASTER_PORT=port)
    apply, calls = optimise.apply, iter(range(1, 1 << 30))

    def counted(*arguments):
        call = next(calls)
        if call == dies_at:
            kill_self()
        for number in signals if call == 8 else ():
            os.kill(os.getpid(), number)
        apply(*arguments)

    optimise.apply = counted
    if rank and isinstance(dies_at, str):
        dies_writing(int(dies_at))
    try:
        train(recipe, folder, source=few_digits(), device="cpu")
    except KeyboardInterrupt:
        os._exit(77)


def train_with_two(recipe, folder, dies_at=None, signals=((), ())):
    context, port = multiprocessing.get_context("fork"), free_port()
    both = [context.Process(target=work, args=(rank, port, recipe, folder, dies_at, signals[rank])) for rank in (0, 1)]
    for process in both:
        process.start()
    for process in both:
        process.join(120)
    return [process.exitcode for process in both]


def losses(folder):
    return [(line["step"], line["loss"]) for line in read_log(folder) if line["kind"] == "train"]


def assert_same_run(folder, other):
    steps, values = zip(*losses(folder), strict=True)
    other_steps, other_values = zip(*losses(other), strict=True)
    assert steps == other_steps
    assert values == pytest.approx(other_values, rel=2e-4)
    weights, expected = (load_file(one / "last.safetensors") for one in (folder, other))
    for name in expected:
        torch.testing.assert_close(weights[name], expected[name], rtol=1e-2, atol=1e-3)
    accuracy, expected_accuracy = (
        [line["top5"] for line in read_log(one) if line["kind"] == "test"] for one in (folder, other)
    )
    assert accuracy == pytest.approx(expected_accuracy, abs=0.041)  # two of 50 images at the border


@pytest.fixture(scope="module")
def alone(tmp_path_factory):
    folder = tmp_path_factory.mktemp("alone")
    train(RECIPE, folder, source=few_digits(), device="cpu")
    return folder


SHARDS = replace(RECIPE, parallel="fsdp")


@pytest.fixture(scope="module")
def calm(tmp_path_factory):
    """The folder of two processes that nothing disturbed."""
    folder = tmp_path_factory.mktemp("calm")
    assert train_with_two(SHARDS, folder) == [0, 0]
    return folder


def test_two_processes_follow_the_loss_curve_of_one(alone, tmp_path):
    assert train_with_two(RECIPE, tmp_path) == [0, 0]
    assert_same_run(tmp_path, alone)


def test_two_processes_with_shards_follow_the_loss_curve_of_one(alone, calm):
    assert_same_run(calm, alone)


@pytest.fixture(scope="module")
def killed(tmp_path_factory):
    """The folder of two processes that were killed in step 9: states after steps 5 and 6."""
    folder = tmp_path_factory.mktemp("killed")
    assert train_with_two(SHARDS, folder, dies_at=9) == [-9, -9]
    return folder


def test_shards_killed_in_the_middle_end_as_shards_that_were_left_alone(calm, killed, tmp_path):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    assert train_with_two(SHARDS, tmp_path) == [0, 0]
    assert outcome(tmp_path) == outcome(calm)


def test_shards_killed_in_the_middle_go_on_as_shards_and_then_in_one_process(alone, killed, tmp_path):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    assert train_with_two(SHARDS, tmp_path, dies_at=7) == [-9, -9]  # begins after step 6: seven more
    train(RECIPE, tmp_path, source=few_digits(), device="cpu")
    assert_same_run(tmp_path, alone)
    assert not list(tmp_path.glob("state*"))


def cut_short(part, _other):
    part.write_bytes(part.read_bytes()[:-100])


def missing(part, _other):
    part.unlink()


def of_another_state(part, other):
    shutil.copy(other, part)


@pytest.mark.parametrize("spoil", [cut_short, missing, of_another_state])
def test_a_state_with_a_spoiled_part_gives_way_to_the_one_before_it(killed, tmp_path, spoil):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    newest, older = (
        [tmp_path / name for name in json.loads(read_header(tmp_path / first)[PARTS])]
        for first in ("state.safetensors", "state-before.safetensors")
    )
    assert len(newest) == len(older) == 1
    (tmp_path / "state-00000000-1.safetensors").write_bytes(b"of a state that was never finished")
    assert damage(tmp_path / "state.safetensors") is None
    spoil(newest[0], older[0])
    with pytest.warns(UserWarning, match=f"its part {newest[0].name}: .*, after step 5"):
        mend_state(tmp_path)
    mend_state(tmp_path)
    assert read_progress(tmp_path / "state.safetensors").step == 5
    assert list(tmp_path.glob("state-*-*")) == older


def test_a_process_killed_while_it_writes_its_part_leaves_the_state_before_it(alone, tmp_path, capfd):
    assert train_with_two(SHARDS, tmp_path, dies_at="2") == [1, -9]
    assert "ConnectionError: another process of this run is gone" in capfd.readouterr().err
    assert read_progress(tmp_path / "state.safetensors").step == 5
    assert damage(tmp_path / "state.safetensors") is None
    train(RECIPE, tmp_path, source=few_digits(), device="cpu")
    assert_same_run(tmp_path, alone)


STOPS = {
    "Ctrl-C to the second": ((), (signal.SIGINT,)),
    "SIGTERM to the first": ((signal.SIGTERM,), ()),
    "SIGTERM to both and passed on by their parent": ((signal.SIGTERM,) * 2, (signal.SIGTERM,) * 2),
}


@pytest.mark.parametrize("stop", STOPS)
def test_two_processes_that_are_stopped_keep_one_state_to_go_on_from(alone, tmp_path, stop):
    assert train_with_two(replace(RECIPE, checkpoint_steps=0), tmp_path, signals=STOPS[stop]) == [77, 77]
    assert read_progress(tmp_path / "state.safetensors").step == 9  # asked in step 8, known to both after the next
    train(RECIPE, tmp_path, source=few_digits(), device="cpu")
    assert_same_run(tmp_path, alone)


def test_an_indivisible_batch_is_refused_with_the_number_of_processes(tmp_path, capfd):
    assert train_with_two(replace(RECIPE, batch_size=18, accumulate=6, repeats=1), tmp_path) == [1, 1]
    assert "got batch_size=18, 2 processes, accumulate=6" in capfd.readouterr().err


def test_what_the_first_process_refuses_is_told_by_both(killed, tmp_path, capfd):
    shutil.copytree(killed, tmp_path, dirs_exist_ok=True)
    assert train_with_two(replace(SHARDS, lr=1e-4), tmp_path) == [1, 1]
    said = capfd.readouterr().err
    assert said.count("RecipeError: ") == said.count("holds a run with another recipe (lr: 0.002 -> 0.0001)") == 2
    assert "Connection" not in said


def test_torchrun_starts_the_command_anew_when_a_process_was_killed(tmp_path):
    recipe, two = tmp_path / "short.toml", tmp_path / "two"
    recipe.write_text(
        'data = "digits"\nimage_size = 8\nmodel = "vit_nano_patch2_8"\nepochs = 2\nbatch_size = 64\n'
        "warmup_epochs = 0\nlog_steps = 5\nworkers = 0\nclip = 1.0\ncheckpoint_steps = 7\n[model_options]\n"
        "in_chans = 3\ndepth = 1\n[augmentation]\nmixup = 0.8\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", "--max-restarts=1"]
    command += ["-m", "cumulant.cli", "train", str(recipe), "--out", str(two), "--device", "cpu"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    child = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, **pipes)
    while not (two / "state.safetensors").exists():
        assert child.poll() is None, child.communicate()[1]
        time.sleep(0.01)
    workers = Path(f"/proc/{child.pid}/task/{child.pid}/children").read_text().split()
    os.kill(int(workers[-1]), signal.SIGKILL)
    out, err = child.communicate(timeout=120)
    assert child.returncode == 0, err
    assert out.count("top-1") == 1
    assert "going on after step" in err
    train(read_recipe(recipe), tmp_path / "one", device="cpu")
    assert losses(two) == [(step, pytest.approx(loss, rel=2e-4)) for step, loss in losses(tmp_path / "one")]
