"""Two pairs of processes, each of which shares sequences, train as one process does: the same gradients, weights,
scores and states.

AdamW hides a wrong scale of the gradients, so these are compared as they are applied.
"""

import json
from dataclasses import replace
from pathlib import Path

import fresh
import pytest
import torch
from context_worker import CASES, SMALL, trained
from safetensors.torch import load_file
from small_runs import few_digits
from test_processes import free_port

from cumulant.train import evaluate_checkpoint, read_log, train
from cumulant.train.predictions import Predictions
from cumulant.train.state import read_progress

WORLD = 4  # two groups of two: data x context


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    folder = tmp_path_factory.mktemp("many")
    worker = str(Path(__file__).with_name("context_worker.py"))
    fresh.forked(worker, str(folder), str(WORLD), free_port(), folder=folder)
    return folder


@pytest.mark.parametrize("name", CASES)
def test_a_split_sequence_gives_the_gradients_and_the_run_of_one_process(many, tmp_path, name):
    result = trained(CASES[name][0], tmp_path / "one")
    ours, theirs = load_file(tmp_path / "one.gradients"), load_file(many / f"{name}.gradients")
    for key, gradient in ours.items():
        torch.testing.assert_close(theirs[key], gradient, rtol=1e-3, atol=1e-5 * max(gradient.abs().max().item(), 1e-3))
    keys = ("step", "loss", "nats")
    logs = [[[one[k] for k in keys if k in one] for one in read_log(folder)] for folder in (result.out, many / name)]
    for own, other in zip(*logs, strict=True):
        assert own == pytest.approx(other, rel=2e-3)
    weights, expected = (load_file(folder / "last.safetensors") for folder in (many / name, result.out))
    for key in expected:
        torch.testing.assert_close(weights[key], expected[key], rtol=1e-2, atol=2e-3)


def test_a_run_goes_on_with_another_number_of_processes_to_a_sequence(many, tmp_path):
    assert read_progress(many / "stopped" / "state.safetensors").step > 2
    train(SMALL, many / "stopped", source=few_digits(), device="cpu")
    train(SMALL, tmp_path, source=few_digits(), device="cpu")
    weights, expected = (load_file(folder / "last.safetensors") for folder in (many / "stopped", tmp_path))
    for key in expected:
        torch.testing.assert_close(weights[key], expected[key], rtol=1e-2, atol=2e-3)


def test_an_evaluation_over_processes_counts_every_item_once(many):
    found = Predictions.load(many / "evaluated.safetensors")
    alone, _ = evaluate_checkpoint(many / "vit", source=few_digits(112, 49), batch_size=6, device="cpu")
    assert found.positions.tolist() == list(range(49))
    torch.testing.assert_close(found.probabilities, alone.probabilities)


@pytest.mark.parametrize(
    ("what", "said"),
    [
        (
            "does not divide the processes",
            f"context_parallel must divide the number of processes, got context_parallel=3, {WORLD}",
        ),
        ("another layer", "context_parallel=2 splits plain attention layers, got layer='moh'"),
        ("another network", "splits the tokens of vit_*, vivit_* and lm_* models, got model='ia_red2"),
        ("does not merge", "context_parallel=2, but 'agent' does not have mergeable"),
    ],
)
def test_what_cannot_be_split_is_refused_by_all(many, what, said):
    assert said in json.loads((many / "refused.json").read_text())[what]


def test_a_split_needs_more_than_one_process(tmp_path):
    with pytest.raises(ValueError, match=r"got context_parallel=2, 1 process \(start more with torchrun"):
        train(replace(SMALL, context_parallel=2), tmp_path, source=few_digits(), device="cpu")
