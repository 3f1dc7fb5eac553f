"""Small runs and studies on the digits: models that train for an epoch in a fraction of a second."""

from copy import deepcopy
from dataclasses import replace
from functools import cache

from cumulant.bench.error import softmax_error
from cumulant.studies.command import Reproduce
from cumulant.studies.cumulant_vit import recipe_of
from cumulant.studies.measured import dial_on_a_photograph
from cumulant.studies.study import Classifiers
from cumulant.studies.training import trainings

SMALL = ("depth=2", "embed_dim=32", "num_heads=2", "batch_size=256")
MADE = {
    "source": "none",
    "provenance": {
        "command": "a test",
        "commit": None,
        "date": "2026-01-01 00:00 UTC",
        "versions": {"python": "3", "torch": "2"},
        "machine": {"system": "Linux"},
    },
}


class Clock:
    """Moved by hand."""

    now = 0.0

    def __call__(self):
        return self.now


def small_run(name="softmax", seed=0, epochs=1, role="compared", **changes):
    """A run of a small model."""
    change = (*SMALL, *(f"{key}={value}" for key, value in changes.items()))
    (run,) = trainings(recipe_of(Reproduce(epochs=epochs, change=change)), [name], name, 1, 0)
    return replace(run, seed=seed, role=role)


def workshop(folder, **options):
    """An empty place for runs on the CPU."""
    for name in ("records", "runs"):
        (folder / name).mkdir(parents=True, exist_ok=True)
    return Classifiers(folder, "cpu", MADE, **options)


once = cache(lambda measure: measure())


def quickly(monkeypatch):
    """Measure short sequences only, and once what is the same in every report."""
    monkeypatch.setattr("cumulant.studies.measured.LENGTHS", (16, 32))
    for same in (dial_on_a_photograph, softmax_error):
        answer = lambda same=same, on_size=None: deepcopy(once(same))  # noqa: E731
        monkeypatch.setattr(f"cumulant.studies.measured.{same.__name__}", answer)
