"""The registry finds mechanisms by name, refuses what it does not know and what a mechanism cannot do."""

import copy
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from cumulant import cluster_attention, zoo
from cumulant.grammar import json_or_word, read_option
from cumulant.zoo import Mechanism
from cumulant.zoo.registry import _MECHANISMS


def qkv(heads=2, length=5, dim=4, batch=2):
    torch.manual_seed(0)
    return torch.randn(3, batch, heads, length, dim).unbind(0)


def test_the_first_mechanisms_are_registered_in_order():
    assert zoo.names()[:5] == ["softmax", "linear", "cumulant1", "cumulant2", "cumulant3"]


@pytest.mark.parametrize("name", zoo.names())
def test_every_mechanism_describes_itself(name):
    mechanism = zoo.get(name)
    assert mechanism.name == name
    assert mechanism.summary
    assert mechanism.paper
    assert mechanism.cost
    assert 2014 <= mechanism.year <= 2030


def test_an_unknown_name_is_answered_with_the_nearest_and_all_others():
    with pytest.raises(ValueError, match=r"'cumulnt3'.*did you mean 'cumulant3'\?.*softmax, linear"):
        zoo.get("cumulnt3")


@pytest.mark.parametrize(
    ("text", "value"),
    [("3", 3), ("true", True), ("[2, 8]", [2, 8]), ("null", None), ("mean", "mean"), ("none", "none"), ("", "")],
)
def test_a_value_is_json_where_it_is_json_and_else_a_word(text, value):
    assert json_or_word(text) == value


@pytest.mark.parametrize("word", ["none", "None", "null"])
def test_an_option_without_a_value_is_none_however_it_is_written(word):
    assert read_option(f"clip={word}", "here") == ("clip", None)
    assert read_option(f'clip="{word}"', "here") == ("clip", word)


def test_a_name_can_be_taken_only_once():
    with pytest.raises(ValueError, match="'softmax' is registered already"):
        zoo.register(zoo.get("softmax"))


def test_only_mechanisms_can_be_registered():
    with pytest.raises(TypeError, match="must be a Mechanism, got function"):
        zoo.register(lambda q, k, v: v)


def test_a_registered_mechanism_is_found_under_its_name():
    mean = Mechanism("mean", "mean of values", "none", 2020, "L E", lambda call: call.value.mean(-2, keepdim=True))
    try:
        assert zoo.register(mean) is zoo.get("mean")
        assert "mean" in zoo.names()
    finally:
        del _MECHANISMS["mean"]


def test_clusters_may_be_any_number_though_three_are_listed():
    q, k, v = qkv(length=9)
    many = zoo.get("cluster7")
    torch.testing.assert_close(many(q, k, v), cluster_attention(q, k, v, clusters=7, least=2))
    assert "cluster7" not in zoo.names()
    assert pickle.loads(pickle.dumps(many)) is many
    chosen = zoo.get("cluster256+near=2")
    assert copy.deepcopy(chosen) is zoo.get("cluster256+near=2")


def test_numbers_that_are_not_listed_compile_into_one_graph():
    """Other tests do not ask for these: both are made while the graph is."""

    def function(x):
        return zoo.get("cluster11")(x, x, x) + zoo.get("cluster13")(x, x, x, near=1)

    torch._dynamo.reset()
    x = qkv(length=40)[0]
    said = torch.compile(function, fullgraph=True, backend="eager")(x)
    torch.testing.assert_close(said, function(x))


@pytest.mark.parametrize("name", ["cluster0", "cluster", "cluster064", "cluster-4", "cluster4.0", "softmax4", "4"])
def test_what_is_no_number_of_clusters_is_unknown(name):
    with pytest.raises(ValueError, match=f"unknown attention mechanism '{name}'"):
        zoo.get(name)


@pytest.mark.parametrize(
    ("capability", "arguments", "message"),
    [
        ("causal", {"is_causal": True}, "is_causal=True, but 'softmax' has no causal form"),
        ("key_mask", {"key_mask": torch.ones(2, 5, dtype=torch.bool)}, "'softmax' takes no key mask"),
        ("grouped_queries", {"enable_gqa": True}, "'softmax' has no grouped queries"),
    ],
)
def test_what_a_mechanism_does_not_declare_is_refused(capability, arguments, message):
    limited = replace(zoo.get("softmax"), **{capability: False})
    with pytest.raises(ValueError, match=f"{message}.*nearest mechanism that can: '"):
        limited(*qkv(), **arguments)


def test_the_nearest_alternative_has_what_was_asked_for_and_shares_most_of_the_rest():
    assert zoo.nearest(replace(zoo.get("softmax"), name="mine", causal=False), "causal") == "softmax"
    assert zoo.get(zoo.nearest(zoo.get("rala"), "causal")).subquadratic
    assert zoo.nearest(zoo.get("softmax"), "subquadratic") in zoo.names()


def test_a_mechanism_without_full_form_or_cross_attention_refuses_them():
    causal = replace(zoo.get("softmax"), noncausal=False, cross=False)
    query, key, value = qkv()
    with pytest.raises(ValueError, match="is_causal=False, but 'softmax' has only a causal form"):
        causal(query, key, value)
    with pytest.raises(ValueError, match="3 queries and 5 keys, but 'softmax' has no cross attention"):
        causal(query[..., :3, :], key, value, is_causal=True)
    aligned = replace(zoo.get("softmax"), causal_cross=False)
    with pytest.raises(ValueError, match="is_causal=True with 3 queries and 5 keys"):
        aligned(query[..., :3, :], key, value, is_causal=True)


@pytest.mark.parametrize("change", [{"row_weights": None}, {"stream": None, "streaming": False}, {"ragged": False}])
def test_a_capability_that_is_required_but_missing_is_named_with_an_alternative(change):
    limited = replace(zoo.get("linear"), **change)
    capability = {"row_weights": "weights", "stream": "streaming", "ragged": "ragged"}[next(iter(change))]
    with pytest.raises(ValueError, match=f"{capability} was asked for, but 'linear' does not have it; nearest"):
        limited.require(capability)
    zoo.get("linear").require(capability)


def test_patterns_are_read_off_the_declared_capabilities():
    assert zoo.get("softmax").patterns == ("noncausal self", "causal self", "noncausal cross", "causal cross")
    assert zoo.get("rala").patterns == ("noncausal self", "noncausal cross")
    assert replace(zoo.get("softmax"), noncausal=False).patterns == ("causal self",)


class Scaled(nn.Module):
    """A mechanism with a parameter, for the tests below."""

    def __init__(self, dim, num_heads, *, grid_size=None, prefix=0, device=None, dtype=None, start=1.0):
        super().__init__()
        self.built_for = (dim, num_heads, grid_size, prefix)
        self.factor = nn.Parameter(torch.full((), start, device=device, dtype=dtype))

    def forward(self, query, key, value, **shared):
        return self.factor * value


def test_a_mechanism_with_a_module_is_built_with_the_grid_of_its_layer():
    mechanism = replace(zoo.get("softmax"), name="scaled", module=Scaled)
    assert mechanism.options == ("start",)
    built = mechanism.build(8, 2, grid_size=(3, 4), prefix=1, dtype=torch.float64, start=2.0)
    assert built.built_for == (8, 2, (3, 4), 1)
    assert built.factor.dtype == torch.float64
    assert built.factor == 2
    with pytest.raises(ValueError, match=r"'strat' of mechanism 'scaled'; accepted: start \(did you mean 'start'"):
        mechanism.build(8, 2, strat=2.0)


@pytest.mark.parametrize("name", zoo.names())
def test_mechanisms_are_pickled_and_copied_by_name(name):
    mechanism = zoo.get(name)
    assert pickle.loads(pickle.dumps(mechanism)) is mechanism
    assert copy.deepcopy(mechanism) is mechanism


def test_options_are_those_the_function_takes_beyond_the_shared_ones():
    assert zoo.get("softmax").options == ()
    assert zoo.get("linear").options == ("chunk", "eps")
    assert zoo.get("cumulant3").options == ("full", "normalization", "closure", "around", "apart", "backend")


def test_build_binds_options_and_refuses_unknown_ones():
    query, key, value = qkv()
    built = zoo.get("cumulant3").build(dim=8, num_heads=2, full=True)
    assert torch.equal(built(query, key, value), zoo.get("cumulant3")(query, key, value, full=True))
    with pytest.raises(ValueError, match=r"unknown option 'chunks' of mechanism 'linear'; accepted: chunk, eps"):
        zoo.get("linear").build(dim=8, num_heads=2, chunks=3)


@pytest.mark.parametrize("name", zoo.names())
@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"query": torch.zeros(5, 4)}, ValueError, "query"),
        ({"key": torch.zeros(2, 3, 5, 4)}, ValueError, "heads"),
        ({"key": torch.zeros(2, 2, 5, 3)}, ValueError, "key"),
        ({"value": torch.zeros(2, 2, 6, 4)}, ValueError, "value"),
        ({"key": torch.zeros(3, 2, 5, 4)}, ValueError, "leading"),
        ({"value": torch.zeros(2, 2, 5, 4, dtype=torch.float64)}, TypeError, "value"),
        ({"query": torch.zeros(2, 2, 5, 4, dtype=torch.int64)}, TypeError, "query"),
        ({"key": [[1.0]]}, TypeError, "key"),
        ({"key_mask": torch.ones(2, 6, dtype=torch.bool)}, ValueError, r"key_mask.*\(2, 5\).*\(2, 6\)"),
        ({"key_mask": torch.ones(2, 5, 5, dtype=torch.bool)}, ValueError, "key_mask"),
        ({"key_mask": torch.full((2, 5), -1.0)}, ValueError, "key_mask"),
        ({"key_mask": torch.ones(2, 5, dtype=torch.int64)}, TypeError, "key_mask"),
        ({"scale": torch.tensor(1.0)}, TypeError, "scale"),
    ],
)
def test_bad_input_names_the_argument(name, change, error, message):
    mechanism = zoo.get(name)
    arguments = dict(zip(("query", "key", "value"), qkv(), strict=True)) | change
    arguments["is_causal"] = not mechanism.noncausal
    if "key_mask" in arguments and not mechanism.key_mask:
        error, message = ValueError, "takes no key mask"
    with pytest.raises(error, match=message):
        mechanism(arguments.pop("query"), arguments.pop("key"), arguments.pop("value"), **arguments)
