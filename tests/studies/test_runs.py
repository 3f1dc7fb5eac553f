"""Runs are trained side by side or one by one with the same result, and go on where they were stopped."""

import json
import multiprocessing
import os
import signal
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from small_studies import small_run, workshop

from cumulant.data import ClipPart, ClipSampling, Source, TensorImages, TensorVideos
from cumulant.studies.crews import Workers
from cumulant.studies.plan import Budget, Run, epochs_done, seeded
from cumulant.studies.runs import Queue, RunError, Workshop, _Team, complete, one_stop, train_all
from cumulant.train import read_log, trainer


def trained(folder, *wanted, workers=1, **options):
    shop = workshop(folder)
    records, epochs = {}, []

    def report(run, record):
        epochs.append(run) if record is None else records.update({run: record})

    left = train_all(wanted, shop, workers=workers, report=report, **options)
    return shop, records, epochs, left


def test_two_processes_give_the_same_result_as_one(tmp_path):
    wanted = small_run("softmax", 0), small_run("cumulant2+gate", 1)
    _, alone, _, _ = trained(tmp_path / "a", *wanted)
    shop, side_by_side, epochs, left = trained(tmp_path / "b", *wanted, workers=2)
    assert sorted(run.configuration for run in epochs) == ["cumulant2+gate", "softmax"]
    assert left == []
    for run in wanted:
        for key in ("accuracy", "loss", "test_accuracy", "confusion", "locality"):
            assert alone[run][key] == side_by_side[run][key]
        assert json.loads(shop.record(run).read_text()) == side_by_side[run]


def test_a_record_tells_what_was_reached(tmp_path):
    run = small_run("softmax", 3, epochs=2)
    _, records, _, _ = trained(tmp_path, run)
    record = records[run]
    assert record["accuracy"] == pytest.approx(record["test_accuracy"][-1], abs=1e-6)
    assert (record["evaluated"], len(record["loss"]), record["epochs"]) == ([1, 2], 2, 2)
    assert sum(sum(row[1::2]) for row in record["confusion"]) == record["data"]["test"] == 450
    assert record["configuration"] == "softmax"
    assert record["seed"] == 3


def train_until_killed(folder, run, at_epoch):
    """Train and be killed one step into an epoch, by a signal that nothing can catch."""
    step = trainer._Run._step

    def killed(self, *arguments):
        if self.done.step > at_epoch * self.steps:
            os.kill(os.getpid(), signal.SIGKILL)
        step(self, *arguments)

    trainer._Run._step = killed
    workshop(folder).kept(run)


def test_a_killed_run_goes_on_from_its_last_state_to_the_same_end(tmp_path):
    run = small_run("cumulant3", 0, epochs=4, checkpoint_epochs=1)
    child = multiprocessing.get_context("fork").Process(target=train_until_killed, args=(tmp_path / "killed", run, 2))
    child.start()
    child.join()
    assert child.exitcode == -signal.SIGKILL
    folder = workshop(tmp_path / "killed").folder(run)
    assert epochs_done(folder) == 2
    before = (folder / "log.jsonl").read_text().splitlines()
    _, resumed, _, _ = trained(tmp_path / "killed", run)
    assert (folder / "log.jsonl").read_text().splitlines()[: len(before)] == before, (
        "the first epochs were not repeated"
    )
    _, whole, _, _ = trained(tmp_path / "whole", run)
    for key in ("accuracy", "loss", "test_accuracy", "confusion"):
        assert resumed[run][key] == whole[run][key]


def test_a_run_that_was_finished_without_its_record_is_not_trained_again(tmp_path):
    run = small_run("softmax", 0)
    shop, first, _, _ = trained(tmp_path, run)
    shop.record(run).unlink()
    _, again, _, _ = trained(tmp_path, run)
    assert len(read_log(shop.folder(run))) == 2
    for key in ("accuracy", "seconds", "confusion"):
        assert again[run][key] == first[run][key]


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_outlasts_the_time_is_stopped_with_its_state(tmp_path, workers):
    wanted = [small_run("softmax", seed, epochs=10_000) for seed in range(workers)]
    folders = [workshop(tmp_path).folder(run) for run in wanted]

    def clock():
        """Stands still until every run has logged an epoch; then the time is over."""
        return 3600.0 * all((folder / "log.jsonl").exists() and read_log(folder) != [] for folder in folders)

    _, records, _, left = trained(tmp_path, *wanted, workers=workers, budget=Budget(1, clock))
    assert (records, left) == ({}, wanted)
    assert min(map(epochs_done, folders)) >= 1


def test_a_warm_up_longer_than_the_runs_is_told_before_any_begins():
    with pytest.raises(ValueError, match="warmup_epochs must not exceed epochs, got a warm-up of 9 in"):
        small_run("softmax", 0, warmup_epochs=9.0)


@pytest.mark.parametrize("epoch", [0, 1])
def test_a_run_without_workers_that_is_stopped_is_kept_and_that_is_said(tmp_path, monkeypatch, epoch):
    run = small_run("softmax", 0, epochs=10_000)
    step = trainer._Run._step

    def stopped(self, *arguments):
        step(self, *arguments)
        if self.done.step == epoch * self.steps + 1:
            os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(trainer._Run, "_step", stopped)
    with pytest.raises(KeyboardInterrupt, match=rf"^softmax, seed 0: kept after {epoch}.\d\d epochs$"):
        trained(tmp_path, run)
    assert epochs_done(workshop(tmp_path).folder(run)) > epoch


def test_a_stop_while_workers_are_started_waits_for_all_of_them_and_ends_them(tmp_path, monkeypatch):
    crew = Workers(workshop(tmp_path), 2)
    start = type(crew.processes[0]).start

    def stopped(process):
        os.kill(os.getpid(), signal.SIGTERM)
        start(process)

    monkeypatch.setattr(type(crew.processes[0]), "start", stopped)
    with pytest.raises(KeyboardInterrupt), one_stop(), crew:
        pytest.fail("it was not stopped")
    assert [process.exitcode for process in crew.processes] == [0, 0]


def test_a_loss_that_is_no_number_ends_the_run_and_not_the_study(tmp_path):
    wrong, right = small_run("softmax", 4, lr=1e30, clip="none"), small_run("softmax", 5)
    shop, records, _, left = trained(tmp_path, wrong, right)
    assert "the training loss became" in records[wrong]["failed"]
    assert records[right]["accuracy"] > 0
    assert json.loads(shop.record(wrong).read_text()) == records[wrong]
    assert left == []


@pytest.mark.parametrize("workers", [1, 2])
def test_a_run_that_cannot_be_made_is_named(tmp_path, workers):
    wanted = small_run("softmax", 4, batch_size=4096), small_run("softmax", 5, batch_size=4096)
    with pytest.raises(RunError, match=r"softmax, seed [45]: ValueError: batch_size must not exceed the 1347"):
        trained(tmp_path, *wanted, workers=workers)


def test_a_worker_that_was_ended_from_outside_is_told_and_not_waited_for(tmp_path):
    shop, crew, given = workshop(tmp_path), Workers(workshop(tmp_path), 1), (lambda *_: None, Budget(None))
    crew.processes = [SimpleNamespace(exitcode=0)]  # after a SIGTERM it has saved its state and left
    team = _Team(crew, Queue([], shop, given[1], given[0], None), shop, *given)
    team.running[small_run()] = (0.0, 1.0, 0)
    with pytest.raises(RunError, match="a training process ended by itself with exit status 0"):
        team._listen()


@dataclass(frozen=True)
class Fragile(Workshop):
    """Loses its process `times` times at each run of seed 0: it dies, or its GPU has failed."""

    times: int = 1
    how: str = "dies"

    def make(self, run, shared=None, progress=None):
        told = self.out / "tries"
        with told.open("a") as file:
            file.write(f"{run.seed}\n")
        if run.seed == 0 and told.read_text().split().count("0") <= self.times:
            if self.how == "dies":
                os._exit(11)
            raise RuntimeError("Triton Error [CUDA]: unspecified launch failure")
        return {"made by": os.getpid()}

    def given_up(self, run, why):
        return {"failed": why}


@pytest.mark.parametrize("how", ["dies", "fails"])
def test_a_run_whose_process_is_lost_is_made_again_by_another(tmp_path, how):
    runs, found = [Run("x", seed, "compared", "mark") for seed in range(3)], {}
    shop = Fragile(tmp_path, "cpu", {}, False, how=how)
    left = train_all(runs, shop, report=lambda run, record: record and found.update({run.seed: record}), workers=2)
    assert not left
    assert sorted(found) == [0, 1, 2]
    assert not any("failed" in one for one in found.values())
    assert (tmp_path / "tries").read_text().split().count("0") == 2
    log = (tmp_path / "workers.log").read_text()
    assert log.count("x, seed 0: begins") == 2
    assert log.count("x, seed 0: ended") == 1


def test_a_run_that_loses_its_process_twice_is_given_up_and_the_others_are_made(tmp_path):
    runs, found = [Run("x", seed, "compared", "mark") for seed in range(3)], {}
    shop = Fragile(tmp_path, "cpu", {}, False, times=9, how="fails")
    train_all(runs, shop, report=lambda run, record: record and found.update({run.seed: record}), workers=2)
    assert "launch failure" in found[0]["failed"]
    assert "2 times" in found[0]["failed"]
    assert {"made by"} == found[1].keys() == found[2].keys()


def test_a_finished_run_without_its_record_takes_no_time_of_the_budget(tmp_path):
    run = small_run()
    shop, _, _, _ = trained(tmp_path, run)
    assert epochs_done(shop.folder(run)) == 1.0


class Coins(Workshop):
    """A study without training: each run tosses a coin ten times."""

    def make(self, run, shared=None, progress=None):
        return {"heads": int((torch.rand(10, generator=torch.Generator().manual_seed(run.seed)) < 0.5).sum())}


def test_a_study_of_any_kind_is_completed_from_what_is_kept(tmp_path, monkeypatch):
    runs = [Run(*one, fingerprint="fair") for one in seeded(["coin"], "coin", seeds=3, controls=2)]
    shop = Coins(tmp_path, "cpu", {})
    first = complete(runs[:4], shop)
    assert list(first) == runs[:4]
    monkeypatch.setattr(Coins, "make", lambda *_: {"heads": 99})
    assert complete(runs, shop) == first | {runs[4]: {"heads": 99}}


def test_the_number_of_threads_is_left_as_it_was(tmp_path):
    before = torch.get_num_threads()
    trained(tmp_path, small_run("cumulant1"))
    assert torch.get_num_threads() == before


def test_only_the_first_seed_keeps_maps_to_show(tmp_path):
    first, second = small_run("linear", 0), small_run("linear", 1)
    shop, records, _, _ = trained(tmp_path, first, second)
    assert (shop.maps(first).exists(), shop.maps(second).exists()) == (True, False)
    assert records[second]["locality"]["tokens"] == 17


@pytest.mark.parametrize("kind", ["image", "video"])
def test_data_is_decoded_once_for_runs_that_follow_each_other(kind, monkeypatch, tmp_path):
    pixels, labels = torch.arange(4 * 192).remainder(251).to(torch.uint8).view(4, 3, 8, 8), torch.tensor([0, 1])
    if kind == "image":
        train = test = TensorImages(pixels[:2], labels)
    else:
        videos = TensorVideos([pixels, pixels[:2]], labels)
        train, test = (ClipPart(videos, ClipSampling(2, 1, views=2), jitter=jitter) for jitter in (True, False))
    opened = []

    def open_source(recipe):
        opened.append(recipe)
        return Source("few", kind, train, test, ("a", "b"))

    monkeypatch.setattr("cumulant.studies.training.open_recipe_source", open_source)
    run, shop = small_run(image_size=8), workshop(tmp_path)
    held = shop.share(run)
    assert shop.share(replace(run, seed=1)) is held
    assert len(opened) == 1
    for part, own in ((held.train, train), (held.test, test)):
        assert torch.equal(part.labels, own.labels)
        for index in range(len(own)):
            assert torch.equal(part.decode(index, 8), own.decode(index, 8))
