"""A disk that is full or cannot be written stops a run before it trains, or leaves the last good state whole."""

import errno
import os
import resource
from dataclasses import replace

import pytest
from safetensors.torch import load_file
from small_runs import FULL, few_digits, in_child, outcome

from cumulant.train import files, optimise, train
from cumulant.train.files import claim_room, write_atomically


def test_too_little_room_is_noticed_before_the_first_step(tmp_path, monkeypatch):
    monkeypatch.setattr(optimise, "apply", lambda *_: pytest.fail("a step was made"))

    def work():
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # no file can grow beyond this: as on a full disk
        with pytest.raises(OSError, match=r"cannot write the [\d.]+ MB that the checkpoints need into .*--out"):
            train(FULL, tmp_path, source=few_digits())

    assert in_child(work) == 0
    assert not (tmp_path / "log.jsonl").exists()
    assert not (tmp_path / ".room").exists()


def test_a_folder_that_cannot_be_made_is_named(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match=r"cannot write .* into .*file.*choose another folder"):
        train(FULL, tmp_path / "file" / "run", source=few_digits())


def test_a_system_without_fallocate_is_probed_by_writing(tmp_path, monkeypatch):
    monkeypatch.delattr(os, "posix_fallocate")
    sizes = []
    write = os.write
    monkeypatch.setattr(os, "write", lambda handle, block: sizes.append(len(block)) or write(handle, block))
    claim_room(tmp_path, 3_000_000)
    assert sum(sizes) == 3_000_000
    assert os.listdir(tmp_path) == []


def full_disk_from(monkeypatch, name, number):
    """From its `number`-th writing on, the file of that name finds the disk full, after half of it is written."""
    fsync, calls = os.fsync, iter(range(1, 1 << 30))

    def sync(handle):
        path = os.readlink(f"/proc/self/fd/{handle}")
        if f".{name}." in path and next(calls) >= number:
            os.ftruncate(handle, os.fstat(handle).st_size // 2)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        fsync(handle)

    monkeypatch.setattr(files.os, "fsync", sync)


@pytest.mark.parametrize("number", [1, 3])
def test_a_disk_that_fills_up_later_leaves_the_last_state_whole_and_the_run_goes_on_from_it(
    undisturbed, tmp_path, monkeypatch, number
):
    with monkeypatch.context() as patch:
        full_disk_from(patch, "state.safetensors", number)
        message = r"cannot write the state after step (5|10) .*No space left on device.*give the same command again"
        with pytest.raises(OSError, match=message):
            train(FULL, tmp_path / "full", source=few_digits())
    state = tmp_path / "full" / "state.safetensors"
    assert state.exists() == (number > 1)
    if state.exists():
        assert float(load_file(state)["optimizer.step.head.weight"]) == 6
    train(FULL, tmp_path / "full", source=few_digits())
    assert outcome(tmp_path / "full") == undisturbed


@pytest.mark.parametrize("name", ["best.safetensors", "last.safetensors", "result.json"])
def test_any_other_file_that_cannot_be_written_is_named_and_the_run_goes_on_later(
    undisturbed, tmp_path, monkeypatch, name
):
    with monkeypatch.context() as patch:
        full_disk_from(patch, name, 1)
        with pytest.raises(OSError, match=r"cannot write .*No space left on device; what was saved before is whole"):
            train(FULL, tmp_path / "full", source=few_digits())
    train(FULL, tmp_path / "full", source=few_digits())
    assert outcome(tmp_path / "full") == undisturbed


def test_a_failed_write_leaves_the_old_file_and_nothing_else(tmp_path, monkeypatch):
    write_atomically(tmp_path / "a.json", b"old")
    full_disk_from(monkeypatch, "a.json", 1)
    with pytest.raises(OSError, match="No space left"):
        write_atomically(tmp_path / "a.json", b"new")
    assert (tmp_path / "a.json").read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["a.json"]


def test_the_room_that_is_claimed_is_enough_for_what_a_run_writes(tmp_path, monkeypatch):
    claimed, most = [], [0]
    monkeypatch.setattr(
        "cumulant.train.trainer.claim_room", lambda folder, size: claim_room(folder, size) or claimed.append(size)
    )
    replace_file = os.replace

    def measured(source, target):
        most[0] = max(most[0], sum(entry.stat().st_size for entry in os.scandir(tmp_path)))
        replace_file(source, target)

    monkeypatch.setattr(files.os, "replace", measured)
    train(
        replace(FULL, model_options={**FULL.model_options, "embed_dim": 64, "depth": 4}), tmp_path, source=few_digits()
    )
    assert 0.4 * max(claimed) < most[0] <= max(claimed)
