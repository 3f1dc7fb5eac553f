"""Runs on a Ray cluster: what is sent, what comes back, and what a user is told where there is none.

The cluster here is a stand-in that calls at once; `make ray` runs the digits on a real one.
"""

import sys
from types import SimpleNamespace

import pytest
from test_claims import RUNS, Coins

from cumulant.studies.runs import RunError, complete


class LostError(Exception):
    pass


@pytest.fixture
def cluster(monkeypatch):
    """A Ray that makes a run when its answer is asked for; `lost` are seeds whose worker is gone for good."""
    fake = SimpleNamespace(lost=set(), cpus=2, asked={}, tasks={}, running=0, most=0)

    def submit(shop, run, *around):
        fake.running += 1
        fake.most = max(fake.most, fake.running)
        task = object()
        fake.tasks[task] = (shop, run, *around)
        return task

    def wait(tasks, num_returns=1, timeout=None):
        return tasks[:1], tasks[1:]

    def get(task):
        fake.running -= 1
        shop, run, *around = fake.tasks[task]
        if run.seed in fake.lost:
            raise LostError("The worker died unexpectedly\nmore")
        return fake.function(shop, run, *around)

    def remote(**needs):
        fake.needs = needs
        return lambda function: setattr(fake, "function", function) or SimpleNamespace(remote=submit)

    fake.exceptions = SimpleNamespace(RayError=LostError)
    fake.is_initialized, fake.init = (lambda: False), (lambda **given: fake.asked.update(given))
    fake.cluster_resources = lambda: {"CPU": fake.cpus}
    fake.wait, fake.get, fake.remote, fake.cancel = wait, get, remote, lambda *_, **__: None
    monkeypatch.setitem(sys.modules, "ray", fake)
    return fake


class Lonely(Coins):
    """What it writes lies in a folder that only the other machine sees."""

    def kept(self, run, shared=None, progress=None):
        record = super().kept(run, shared, progress)
        self.record(run).with_suffix(".maps.json").write_text("[1]")
        return record


def test_records_and_what_lies_beside_them_come_back_from_the_cluster(tmp_path, cluster):
    shop = Lonely(tmp_path, "cpu", {"by": "ray"})
    assert complete(RUNS, shop, on="ray") == {run: {"heads": run.seed} for run in RUNS}
    assert all(shop.record(run).is_file() and shop.record(run).with_suffix(".maps.json").is_file() for run in RUNS)
    assert (cluster.asked["address"], cluster.most, cluster.needs["max_retries"]) == ("auto", 2, 3)


def test_a_run_that_takes_every_worker_with_it_is_named(tmp_path, cluster):
    cluster.lost = {RUNS[2].seed}
    with pytest.raises(RunError, match=r"coin, seed 2: its worker was lost 4 times, .*: The worker died unexpectedly$"):
        complete(RUNS, Coins(tmp_path, "cpu", {"by": "ray"}), on="ray")


def test_an_error_of_a_run_on_the_cluster_says_where_it_comes_from(tmp_path, cluster, monkeypatch):
    monkeypatch.setattr(Coins, "make", lambda *_: 1 / 0)
    with pytest.raises(RunError, match=r"coin, seed 0: ZeroDivisionError: .* \(test_ray.py:\d+\)"):
        complete(RUNS, Coins(tmp_path, "cpu", {"by": "ray"}), on="ray")


def test_without_ray_its_extra_is_named(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"--on ray needs the package ray: pip install .*\[ray\]"):
        complete(RUNS, Coins(tmp_path, "cpu", {"by": "ray"}), on="ray")


def test_without_a_cluster_it_is_said_how_to_start_one(tmp_path, cluster):
    def none(**_):
        raise ConnectionError("Could not find any running Ray instance")

    cluster.init = none
    with pytest.raises(ConnectionError, match="start one with `ray start --head`"):
        complete(RUNS, Coins(tmp_path, "cpu", {"by": "ray"}), on="ray")


def test_a_cluster_without_gpus_is_told_before_a_run_waits_for_one(tmp_path, cluster):
    with pytest.raises(ValueError, match="device='cuda': no machine of the cluster has a GPU"):
        complete(RUNS, Coins(tmp_path, "cuda", {"by": "ray"}), on="ray")
