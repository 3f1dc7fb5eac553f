"""Two processes train as one does: the same loss curve, the same weights, with DDP and with FSDP2."""

import multiprocessing
import os
import signal
import socket
import subprocess
import sys
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from small_runs import PLAIN, few_digits, kill_self

from cumulant.train import optimise, read_log, read_recipe, train
from cumulant.train.state import read_progress

RECIPE = replace(PLAIN, log_steps=1)


def free_port():
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return str(listener.getsockname()[1])


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


@pytest.mark.parametrize("parallel", ["ddp", "fsdp"])
def test_two_processes_follow_the_loss_curve_of_one(alone, tmp_path, parallel):
    assert train_with_two(replace(RECIPE, parallel=parallel), tmp_path) == [0, 0]
    assert_same_run(tmp_path, alone)


def test_shards_killed_in_the_middle_go_on_as_shards_and_then_in_one_process(alone, tmp_path):
    shards = replace(RECIPE, parallel="fsdp")
    assert train_with_two(shards, tmp_path, dies_at=9) == [-9, -9]
    assert train_with_two(shards, tmp_path, dies_at=7) == [-9, -9]  # begins after step 6: seven more
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
    assert train_with_two(RECIPE, tmp_path) == [0, 0]
    assert_same_run(tmp_path, alone)


def test_an_indivisible_batch_is_refused_with_the_number_of_processes(tmp_path, capfd):
    assert train_with_two(replace(RECIPE, batch_size=18, accumulate=6, repeats=1), tmp_path) == [1, 1]
    assert "got batch_size=18, 2 processes, accumulate=6" in capfd.readouterr().err


def test_what_the_first_process_refuses_is_told_by_both(tmp_path, capfd):
    assert train_with_two(RECIPE, tmp_path, dies_at=9) == [-9, -9]
    assert train_with_two(replace(RECIPE, lr=1e-4), tmp_path) == [1, 1]
    said = capfd.readouterr().err
    assert said.count("RecipeError: ") == said.count("holds a run with another recipe (lr: 0.002 -> 0.0001)") == 2
    assert "Connection" not in said


def test_torchrun_starts_the_command_on_two_processes(tmp_path):
    recipe = tmp_path / "short.toml"
    recipe.write_text(
        'data = "digits"\nimage_size = 8\nmodel = "vit_nano_patch2_8"\nepochs = 1\nbatch_size = 64\n'
        "warmup_epochs = 0\nlog_steps = 5\nworkers = 0\nclip = 1.0\n[model_options]\nin_chans = 3\ndepth = 1\n"
        "[augmentation]\nmixup = 0.8\n"
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", free_port()]
    command += ["-m", "cumulant.cli", "train", str(recipe), "--out", str(tmp_path / "two"), "--device", "cpu"]
    done = subprocess.run(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("top-1") == 1
    train(read_recipe(recipe), tmp_path / "one", device="cpu")
    assert [loss for _, loss in losses(tmp_path / "two")] == pytest.approx(
        [loss for _, loss in losses(tmp_path / "one")], rel=2e-4
    )
