"""A finished miniature study, made once for all tests of this folder."""

import json

import pytest
from small_studies import SMALL, quickly

from cumulant.studies import cumulant_vit as room
from cumulant.studies.command import Reproduce


@pytest.fixture(scope="session")
def study(tmp_path_factory):
    """(settings, results) of one epoch, two seeds, two mechanisms, short sequences."""
    out = tmp_path_factory.mktemp("study") / "out"
    settings = Reproduce(attention=("softmax", "cumulant3"), seeds=2, epochs=1, workers=1, out=out, change=SMALL)
    with pytest.MonkeyPatch.context() as patch:
        quickly(patch)
        results = room.reproduce(settings)
    return settings, json.loads(json.dumps(results))
