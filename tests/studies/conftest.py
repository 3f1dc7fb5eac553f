"""A finished miniature study, made once for all tests of this folder."""

import importlib
import json

import pytest

from cumulant.studies import digits, runs
from cumulant.studies.settings import Reproduce


@pytest.fixture(scope="session", autouse=True)
def source_that_stands_still():
    """An editor that saves a file of the package while the tests run must not make their finished runs stale."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runs, "SOURCES", ("py.typed",))
        yield


@pytest.fixture(scope="session")
def study(tmp_path_factory, source_that_stands_still):
    """(settings, results) of one epoch, two seeds, two mechanisms, short sequences."""
    out = tmp_path_factory.mktemp("study") / "out"
    settings = Reproduce(attention=("softmax", "cumulant3"), seeds=2, epochs=1, workers=1, out=out)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(importlib.import_module("cumulant.bench.scaling"), "LENGTHS", (16, 32))
        results = digits.reproduce(settings)
    return settings, json.loads(json.dumps(results))
