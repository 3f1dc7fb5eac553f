"""The run that nothing disturbs, trained once for all tests of this folder."""

import pytest
from small_runs import FULL, few_digits, outcome

from cumulant.train import train


@pytest.fixture(scope="session")
def calm(tmp_path_factory):
    """Its folder; to be copied, not changed."""
    folder = tmp_path_factory.mktemp("calm")
    train(FULL, folder, source=few_digits())
    return folder


@pytest.fixture(scope="session")
def undisturbed(calm):
    """All that it left behind."""
    return outcome(calm)
