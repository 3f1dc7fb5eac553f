"""Causally, a later key or query that is no number reaches no row before it, in outputs and in weights."""

import pytest
import torch

import cumulant
from cumulant import zoo

L, AT = 24, 17
CAUSAL = [name for name in zoo.names() if zoo.get(name).causal]
FORMS = {
    **{name: (zoo.get(name), {}) for name in CAUSAL},
    **{f"combiner {kind}": (zoo.get("combiner"), {"variant": kind}) for kind in ("logsparse", "axial")},
    "lla by steps": (zoo.get("lla"), {"solver": "cg"}),
    "attention, whole third order": (cumulant.attention, {"order": 3, "full": True}),
}
WEIGHTS = {
    **{name: (zoo.get(name).scores, {}) for name in CAUSAL if zoo.get(name).scores is not None},
    "whole third order": (cumulant.scores, {"order": 3, "full": True}),
}


def spoiled(x, bad):
    return torch.cat((x[..., :AT, :], torch.full_like(x[..., :1, :], bad), x[..., AT + 1 :, :]), -2)


def check(run, names):
    torch.manual_seed(0)
    good = {name: torch.randn(2, 2, L, 4) for name in names}
    before = run(**good)[..., :AT, :]
    for name in ("key", "query"):
        for bad in (float("nan"), float("inf")):
            after = run(**good | {name: spoiled(good[name], bad)})[..., :AT, :]
            torch.testing.assert_close(after, before, msg=lambda said, told=(name, bad): f"{told}: {said}")


@pytest.mark.parametrize("case", FORMS)
def test_what_is_no_number_reaches_no_earlier_row(case):
    function, options = FORMS[case]
    check(lambda **given: function(**given, is_causal=True, **options), ("query", "key", "value"))


@pytest.mark.parametrize("case", WEIGHTS)
def test_nor_its_weights(case):
    function, options = WEIGHTS[case]
    check(lambda **given: function(**given, is_causal=True, **options), ("query", "key"))


@pytest.mark.parametrize("name", ["lla", "combiner"])
def test_rows_that_see_it_have_no_numbers_themselves(name):
    q, k, v = torch.randn(3, 1, 2, L, 4)
    out = zoo.get(name)(q, spoiled(k, float("nan")), v, is_causal=True)
    assert out[..., AT:, :].isnan().all()
