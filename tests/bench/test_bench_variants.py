"""How mechanisms are named on the command line, and who takes part."""

import pytest
import torch

from cumulant import zoo
from cumulant.bench.variants import parse, select


def test_options_are_written_behind_the_name():
    variant = parse("cumulant3+normalization=sum+full")
    assert variant.label == "cumulant3+full+normalization=sum"
    assert variant.mechanism.name == "cumulant3"
    assert variant.options == {"full": True, "normalization": "sum"}


def test_none_is_a_word_that_an_option_may_have():
    query, key, value = torch.randn(3, 1, 2, 12, 4)
    expected = zoo.get("combiner")(query, key, value, variant="axial", summary_key="none")
    torch.testing.assert_close(parse("combiner+variant=axial+summary_key=none")(query, key, value), expected)


def test_a_variant_is_the_mechanism_with_these_options():
    query, key, value = torch.randn(3, 1, 2, 12, 4)
    expected = zoo.get("cumulant3")(query, key, value, full=True)
    torch.testing.assert_close(parse("cumulant3+full")(query, key, value), expected)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("cumulat3", "did you mean 'cumulant"),
        ("cumulant3+fall=true", "unknown option 'fall'.*did you mean 'full'"),
        ("agent+16", "unknown option '16'"),
        ("agent+=16", r"options are written \+name or \+name=value"),
    ],
)
def test_wrong_names_and_options_are_answered_with_right_ones(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


def test_options_of_a_layer_are_not_those_of_the_operator():
    with pytest.raises(ValueError, match="unknown option 'conv'"):
        parse("agent+conv=false")


def test_the_spelling_with_colons_still_works_and_says_what_to_write():
    with pytest.warns(DeprecationWarning, match=r"options are written 'agent\+agents=16', no longer 'agent:agents=16'"):
        assert parse("agent:agents=16") == parse("agent+agents=16")


@pytest.mark.parametrize("pattern", ["noncausal", "causal", "cross"])
def test_all_means_every_mechanism_that_has_the_pattern_and_the_others_are_named(pattern):
    variants, left_out = select(("all",), pattern)
    able = {name for name in zoo.names() if getattr(zoo.get(name), pattern)}
    assert {variant.mechanism.name for variant in variants} == able
    assert {label.split("+")[0] for label in left_out} == set(zoo.names()) - able


def test_a_mechanism_named_without_the_pattern_is_refused_with_an_alternative():
    with pytest.raises(ValueError, match=r"'rala' cannot take part.*nearest mechanism that can"):
        select(("linear", "rala"), "causal")


def test_nothing_named_is_refused():
    with pytest.raises(ValueError, match="at least one mechanism"):
        select(())
