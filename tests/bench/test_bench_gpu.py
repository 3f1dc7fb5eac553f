"""On a GPU: every mechanism passes the gates in half precision, and memory is that of the device."""

import pytest
import torch

from cumulant.bench import efficiency
from cumulant.bench.command import Efficiency
from cumulant.studies import mechanisms
from cumulant.studies.command import TrainBench

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("pattern", ["noncausal", "causal", "cross"])
def test_every_mechanism_is_measured(pattern):
    settings = Efficiency(lengths=(128, 256, 512), heads=2, batch=1, device="cuda", pattern=pattern)
    result = efficiency.run(settings, progress=lambda _: None)
    # Options of a mechanism (written behind a plus) need not go together with every pattern; its own form must.
    rows = [row for row in result["rows"] if "+" not in row["name"]]
    assert [(row["name"], row["length"], row["note"]) for row in rows if row["note"]] == []
    for row in rows:
        assert set(row["milliseconds"]) == {"forward", "both"}
        assert row["peak_bytes"]["forward"] >= 2 * row["length"] * 64 * 2, row["name"]  # the output in bfloat16


def test_the_peak_of_one_call_does_not_hold_that_of_the_one_before():
    large = efficiency.peak_bytes(lambda: torch.empty(1 << 26, dtype=torch.uint8, device="cuda"), "cuda")
    small = efficiency.peak_bytes(lambda: torch.empty(1 << 20, dtype=torch.uint8, device="cuda"), "cuda")
    assert (large, small) == (1 << 26, 1 << 20)


def test_a_model_is_trained_and_its_step_measured_on_the_device(tmp_path):
    settings = TrainBench(attention=("softmax", "cumulant3"), epochs=1, control=1, device="cuda", out=tmp_path)
    result = mechanisms.run(settings)
    assert not result["failed"]
    assert {run["device"] for run in result["runs"]} == {"cuda"}
    assert all(run["step_bytes"] > 1 << 20 for run in result["runs"])
