"""Some 6,000 wrong calls: each is an error that names what was wrong; none is answered with nonsense."""

import pytest

from cumulant.kernels import launch
from tools.hostile import PARTS, verdict


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("part", PARTS, ids=lambda part: part.__name__)
def test_wrong_calls_are_named(part, monkeypatch):
    monkeypatch.setattr(launch, "HAS_TRITON", False)  # what is right in a step before the wrong one is interpreted
    said = {wrong.what: verdict(wrong) for wrong in part()}
    assert len(said) > 50
    assert not {what: answer for what, answer in said.items() if answer is not None}
