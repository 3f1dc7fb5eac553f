"""Studies are found by name, and each has what a study has."""

import pytest

from cumulant import studies


@pytest.mark.parametrize("name", studies.names())
def test_a_study_has_a_plan_and_a_claim(name):
    module = studies.get(name)
    if not hasattr(module, "STUDY"):
        assert callable(module.planned)
        assert getattr(module, "CLAIM", None) or module.CLAIMS
        return
    study = module.STUDY
    assert study.name == name
    small = study.settings["small"]
    assert study.plan(small)
    assert all(one.least < one.most for one in study.statements(small))


def test_a_wrong_name_is_answered_with_the_right_ones():
    with pytest.raises(ValueError, match="unknown study 'mechanism'; did you mean 'mechanisms'"):
        studies.get("mechanism")
