"""Studies are found by name, and each has what a study has."""

import pytest

from cumulant import studies


@pytest.mark.parametrize("name", studies.names())
def test_a_study_has_a_plan_and_a_claim(name):
    module = studies.get(name)
    if hasattr(module, "planned"):
        assert callable(module.planned)
        assert getattr(module, "CLAIM", None) or module.CLAIMS
        return
    several = {layer: module.study(layer) for layer in module.LAYERS} if name == "heads" else {name: module.STUDY}
    for title, study in several.items():
        assert study.name == title
        small = study.settings["small"]
        assert study.plan(small)
        assert all(one.least < one.most for one in study.statements(small))


def test_a_wrong_name_is_answered_with_the_right_ones():
    with pytest.raises(ValueError, match="unknown study 'mechanism'; did you mean 'mechanisms'"):
        studies.get("mechanism")
