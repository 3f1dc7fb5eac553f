"""A run whose weights or files are spoiled: never kept, never gone on from, never taken for a finished one."""

import errno
import fcntl
import os
import re
import resource
import shutil
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import safetensors
import torch
from safetensors.torch import load_file, save
from small_runs import FULL, few_digits, in_child, kill_self, outcome, train_until

from cumulant.train import RecipeError, optimise, train
from cumulant.train import log as log_module
from cumulant.train.checkpoint import read_header
from cumulant.train.files import naming, sole_owner


@pytest.fixture(scope="module")
def stopped(tmp_path_factory):
    folder = tmp_path_factory.mktemp("stopped")
    train_until(folder, 9, FULL, few_digits())
    return folder


@pytest.mark.parametrize("step", [5, 6, 18], ids=["before a state", "before an evaluation", "in the last step"])
def test_weights_that_a_gradient_spoiled_are_not_kept_though_the_loss_was_a_number(tmp_path, monkeypatch, step):
    apply, calls = optimise.apply, iter(range(1, 1 << 30))

    def spoil(optimizer, parameters, clip):
        if next(calls) == step:
            optimizer.param_groups[0]["params"][0].grad.fill_(torch.inf)
        apply(optimizer, parameters, clip)

    monkeypatch.setattr(optimise, "apply", spoil)
    with pytest.raises(FloatingPointError, match=f"the weights are no longer finite at or shortly before step {step} "):
        train(FULL, tmp_path, source=few_digits())
    kept = [tensor for path in tmp_path.glob("*.safetensors") for tensor in load_file(path).values()]
    assert all(tensor.isfinite().all() for tensor in kept)
    assert not (tmp_path / "result.json").exists()


def cut_short(path):
    path.write_bytes(path.read_bytes()[:-100])


def flip_a_weight(path):
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    path.write_bytes(content)


def flip_the_step(path):
    path.write_bytes(re.sub(rb"(step\W+)6", rb"\g<1>7", path.read_bytes(), count=1))


def lose_the_checksum(path):
    path.write_bytes(path.read_bytes().replace(b"checksum", b"checksun", 1))


@pytest.mark.parametrize("spoil", [cut_short, flip_a_weight, flip_the_step, lose_the_checksum])
def test_a_damaged_state_is_told_and_the_run_goes_on_from_the_one_before_it(undisturbed, stopped, tmp_path, spoil):
    folder = shutil.copytree(stopped, tmp_path / "run")
    spoil(folder / "state.safetensors")
    with pytest.warns(UserWarning, match=r"state.safetensors is damaged \(.*\): .* the one before it, after step 5"):
        train(FULL, folder, source=few_digits())
    assert outcome(folder) == undisturbed


def test_the_state_before_is_not_lost_to_a_damaged_one_when_the_run_is_killed_again(undisturbed, stopped, tmp_path):
    folder = shutil.copytree(stopped, tmp_path / "run")
    cut_short(folder / "state.safetensors")
    train_until(folder, 1, FULL, few_digits())
    train(FULL, folder, source=few_digits())
    assert outcome(folder) == undisturbed


@pytest.mark.parametrize("moment", range(1, 7))
def test_a_stop_while_the_state_is_read_is_no_damage(stopped, tmp_path, monkeypatch, moment):
    folder = shutil.copytree(stopped, tmp_path / "run")
    before = {path.name: path.read_bytes() for path in folder.glob("state*")}
    reads, calls = safetensors.safe_open, iter(range(1, 1 << 30))

    def interrupted(*arguments, **options):  # as compiled code answers a KeyboardInterrupt
        try:
            if next(calls) == moment:
                signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            raise ValueError("could not determine the shape") from None
        return reads(*arguments, **options)

    monkeypatch.setattr(safetensors, "safe_open", interrupted)
    with pytest.raises(KeyboardInterrupt):
        train(FULL, folder, source=few_digits())
    assert {path.name: path.read_bytes() for path in folder.glob("state*")} == before


def test_a_run_killed_between_two_renamings_goes_on_from_the_state_before(undisturbed, stopped, tmp_path):
    folder = shutil.copytree(stopped, tmp_path / "run")
    (folder / "state.safetensors").unlink()
    train(FULL, folder, source=few_digits())
    assert outcome(folder) == undisturbed


def test_two_damaged_states_are_told_with_the_way_out(stopped, tmp_path):
    folder = shutil.copytree(stopped, tmp_path / "run")
    cut_short(folder / "state.safetensors")
    flip_a_weight(folder / "state-before.safetensors")
    told = r"state.safetensors is not a state .*incomplete metadata.*state-before.safetensors \(its contents.*--fresh"
    with pytest.raises(ValueError, match=told):
        train(FULL, folder, source=few_digits())


def test_a_state_from_before_there_were_checksums_is_gone_on_from(undisturbed, stopped, tmp_path):
    folder = shutil.copytree(stopped, tmp_path / "run")
    path = folder / "state.safetensors"
    header = {key: value for key, value in read_header(path).items() if key != "checksum"}
    path.write_bytes(save(load_file(path), metadata=header))
    for name in ("state-before.safetensors", "data.json"):
        (folder / name).unlink()
    train(FULL, folder, source=few_digits())
    assert outcome(folder) == undisturbed


def of_a_deeper_model(folder):
    train_until(folder / "other", 9, replace(FULL, model_options={**FULL.model_options, "depth": 3}), few_digits())
    shutil.copy(folder / "other" / "state.safetensors", folder)


def test_a_state_that_does_not_fit_is_told_with_the_way_out(stopped, tmp_path):
    folder = shutil.copytree(stopped, tmp_path / "run")
    of_a_deeper_model(folder)
    told = r"blocks\.2\S+: shape \S+ in the file, nothing in the model"
    with pytest.raises(ValueError, match=rf"state.safetensors is not a state that this run .*{told}.*--fresh"):
        train(FULL, folder, source=few_digits())


@pytest.mark.parametrize(
    "spoil",
    [Path.unlink, lambda path: path.write_text('{"lr":'), lambda path: path.write_text("null")],
    ids=["missing", "cut short", "no table"],
)
def test_files_of_a_run_whose_recipe_is_not_known_are_left_alone(stopped, tmp_path, spoil):
    folder = shutil.copytree(stopped, tmp_path / "run")
    spoil(folder / "recipe.json")
    log = (folder / "log.jsonl").read_bytes()
    with pytest.raises(RecipeError, match=r"recipe.json is missing or damaged .*--out.*--fresh"):
        train(replace(FULL, lr=1e-4), folder, source=few_digits())
    assert (folder / "log.jsonl").read_bytes() == log


@pytest.mark.parametrize("number", [2, 4])
def test_a_deletion_stopped_at_any_file_leaves_a_run_that_begins_anew(calm, undisturbed, tmp_path, number):
    folder = shutil.copytree(calm, tmp_path / "run")

    def work():
        unlink, calls = Path.unlink, iter(range(1, 1 << 30))

        def counted(path, **options):
            if not path.name.startswith(".") and next(calls) == number:
                kill_self()
            unlink(path, **options)

        Path.unlink = counted
        train(FULL, folder, source=few_digits(), fresh=True)

    assert in_child(work) == -signal.SIGKILL
    train(FULL, folder, source=few_digits())
    assert outcome(folder) == undisturbed


def test_a_run_killed_before_its_state_is_removed_is_finished_when_it_is_read(undisturbed, tmp_path):
    def work():
        rename = os.replace
        os.replace = lambda old, new: (rename(old, new), str(new).endswith("result.json") and kill_self())
        train(FULL, tmp_path, source=few_digits())

    assert in_child(work) == -signal.SIGKILL
    assert (tmp_path / "state.safetensors").exists()
    train(FULL, tmp_path, source=few_digits())
    assert outcome(tmp_path) == undisturbed


def test_a_result_that_is_cut_short_is_told(calm, tmp_path):
    folder = shutil.copytree(calm, tmp_path / "run")
    (folder / "result.json").write_text('{"result": {"top1": 0.5}}')
    with pytest.raises(ValueError, match=r"result.json is not the result of a run, or is cut short .*--fresh"):
        train(FULL, folder, source=few_digits())


def test_a_tuple_among_the_options_is_the_same_recipe_when_the_run_goes_on(tmp_path):
    recipe = replace(FULL, attention_extras={"v_conv": (3, 3)})
    train_until(tmp_path, 9, recipe, few_digits())
    train(recipe, tmp_path, source=few_digits())


def test_a_run_that_goes_on_needs_no_room_for_what_it_has_in_its_folder(stopped, tmp_path):
    folder = shutil.copytree(stopped, tmp_path / "run")
    held = sum(path.stat().st_size for path in folder.iterdir())

    def work(out, spare):
        _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
        weights = sum(tensor.nbytes for tensor in load_file(stopped / "best.safetensors").values())
        resource.setrlimit(resource.RLIMIT_FSIZE, ((1 << 20) + 14 * weights - spare, hard))
        train(FULL, out, source=few_digits())

    assert in_child(lambda: work(tmp_path / "new", held)) == 1
    assert in_child(lambda: work(folder, held)) == 0


def test_a_log_that_finds_the_disk_full_is_named_though_closing_it_fails_too(tmp_path):
    def write_on_full_disk():
        with log_module.Log(tmp_path) as log, naming("the log"):
            log.file.close()
            log.file = open("/dev/full", "a", encoding="utf-8")  # noqa: SIM115
            log.write({"kind": "train", "step": 1})

    with pytest.raises(OSError, match="cannot write the log: No space left on device; what was saved before is whole"):
        write_on_full_disk()


def test_a_file_system_without_locks_is_told_and_used(tmp_path, monkeypatch):
    def refuse(*_):
        raise OSError(errno.ENOSYS, os.strerror(errno.ENOSYS))

    monkeypatch.setattr(fcntl, "flock", refuse)
    with pytest.warns(UserWarning, match=r"cannot be locked \(Function not implemented\)"), sole_owner(tmp_path):
        pass


def test_a_model_that_answers_with_a_pair_is_refused_before_anything_is_trained(tmp_path):
    options = {"distilled": True, "distilled_training": True}
    recipe = replace(FULL, model_options={**FULL.model_options, **options})
    with pytest.raises(ValueError, match=r"distilled_training=true in model_options .* leave it out"):
        train(recipe, tmp_path, source=few_digits())
