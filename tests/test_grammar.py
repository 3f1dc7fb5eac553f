"""Names with options: one grammar, read and written."""

import pytest

from cumulant.grammar import parse, write


@pytest.mark.parametrize(
    ("text", "name", "options"),
    [
        ("softmax", "softmax", {}),
        ("cumulant3+full", "cumulant3", {"full": True}),
        ("cumulant3+apart=1+around=mean", "cumulant3", {"around": "mean", "apart": 1}),
        ("agent+agents=[7, 7]", "agent", {"agents": [7, 7]}),
        ("flow+clamp=null", "flow", {"clamp": None}),
        ("cumulant3+full=false", "cumulant3", {"full": False}),
    ],
)
def test_what_is_written_is_what_was_read(text, name, options):
    assert parse(text) == (name, options)
    assert write(name, options) == text


def test_the_old_spelling_is_read_and_named():
    with pytest.warns(DeprecationWarning, match=r"written 'agent\+agents=16', no longer 'agent:agents=16'"):
        assert parse("agent:agents=16") == ("agent", {"agents": 16})


def test_an_option_without_a_name_or_value_is_refused():
    with pytest.raises(ValueError, match=r"\+name or \+name=value, got 'apart='"):
        parse("cumulant3+apart=")
