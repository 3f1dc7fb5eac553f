"""A real Ray on this machine, where the package is installed: a worker that is killed gives its run back."""

import os
import signal
import sys

import pytest
from test_claims import RUNS, Coins

from cumulant.studies.runs import complete

ray = pytest.importorskip("ray")
FATAL = RUNS[1].seed


class Fatal(Coins):
    """One of its runs kills the worker that makes it, the first time."""

    def make(self, run, shared=None, progress=None):
        record = super().make(run, shared, progress)
        tries = (self.out / "made").read_text().splitlines().count(f"ray {FATAL}")
        if run.seed == FATAL and tries == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return record


def test_a_killed_worker_gives_its_run_back(tmp_path):
    path = os.pathsep.join(x for x in sys.path if x)
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=80 << 20, log_to_driver=False, logging_level="ERROR",
        runtime_env={"env_vars": {"PYTHONPATH": path}},
    )  # fmt: skip
    try:
        found = complete(RUNS, Fatal(tmp_path, "cpu", {"by": "ray"}), on="ray")
    finally:
        ray.shutdown()
    assert found == {run: {"heads": run.seed} for run in RUNS}
    made = [int(line.split()[1]) for line in (tmp_path / "made").read_text().splitlines()]
    assert sorted(made) == sorted([*(run.seed for run in RUNS), FATAL])
