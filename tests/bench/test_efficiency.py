"""Time and memory against length: structure, gates and fits. No test looks at a time."""

import dataclasses

import pytest
import torch

from cumulant import zoo
from cumulant.bench import efficiency
from cumulant.bench.cab import checks, crossing_text, crossings, table
from cumulant.bench.command import Efficiency
from cumulant.bench.efficiency import MATRIX_SOFTMAX, Row, contenders, measure, quartiles, run
from cumulant.bench.variants import parse, select

LENGTHS = (256, 512, 1024, 2048)


def small(**given):
    options = {"lengths": (16, 24, 40), "heads": 2, "dim": 8, "calls": 3, "device": "cpu"}
    return Efficiency(**{**options, **given})


def costed(name, length, milliseconds, size):
    phases = ("forward", "both")
    return Row(name, length, dict.fromkeys(phases, (milliseconds,) * 3), dict.fromkeys(phases, size))


def exact_rows():
    """Costs of which the crossings are known: 300 tokens in time, 150 in memory."""
    for n in LENGTHS:
        yield costed(MATRIX_SOFTMAX, n, n * n, 2 * n * n)
        yield costed("softmax", n, n * n, 7 * n)
        yield costed("linear", n, 300 * n, 300 * n)
        yield costed("cumulant2", n, 310 * n, 200 * n)
        yield costed("cumulant3", n, 320 * n, 250 * n)


def test_every_contender_is_measured_at_every_length_in_both_phases():
    result = run(small(attention=("linear", "cumulant3+full")), progress=lambda _: None)
    names = ["softmax", MATRIX_SOFTMAX, "linear", "cumulant3+full"]
    assert [(r["name"], r["length"]) for r in result["rows"]] == [(n, length) for length in (16, 24, 40) for n in names]
    for row in result["rows"]:
        assert not row["note"]
        for phase in ("forward", "both"):
            median, low, high = row["milliseconds"][phase]
            assert 0 < low <= median <= high
        assert row["peak_bytes"]["both"] > row["peak_bytes"]["forward"] >= 2 * row["length"] * 8 * 4  # the output
    assert {c["name"] for c in result["crossings"]} == {"linear", "cumulant3+full"}
    assert len(result["crossings"]) == 2 * 2 * 2 * 2  # names, quantities, phases, opponents


@pytest.mark.parametrize("pattern", ["causal", "cross"])
def test_both_forms_of_softmax_agree_in_every_pattern(pattern):
    settings = small(pattern=pattern)
    q, k, v, _ = efficiency.draw(settings, 1, 24, "cpu", torch.float32)
    assert (k.shape[-2] == 24) == (pattern == "causal")
    both = contenders([], pattern)
    torch.testing.assert_close(both["softmax"].function(q, k, v), both[MATRIX_SOFTMAX].function(q, k, v))


@pytest.mark.parametrize("name", zoo.names())
def test_every_mechanism_passes_the_gates(name):
    one = contenders([parse(name)], "noncausal")[name]
    assert efficiency.off_definition(one, 8) is None
    tokens = efficiency.draw(small(), 1, 20, "cpu", torch.float32)
    assert efficiency._off_float64(one, *tokens[:3]) < 1e-4


def test_a_result_that_is_off_gets_no_time():
    right = contenders([parse("linear")], "noncausal")["linear"]
    wrong = dataclasses.replace(right, function=lambda q, k, v: 1.01 * right.function(q, k, v))
    (row,) = measure({"linear": wrong}, efficiency.draw(small(), 1, 16, "cpu", torch.float32), small())
    assert "off by 1.0e-02" in row.note
    assert not row.milliseconds
    assert not row.peak_bytes


def test_a_formula_that_is_off_its_weights_gets_no_time(monkeypatch):
    right = zoo.get("linear")
    wrong = dataclasses.replace(right, function=lambda *t, **o: 1.01 * right.function(*t, **o))
    monkeypatch.setattr(zoo, "get", lambda name: wrong)
    result = run(small(attention=("linear",), lengths=(16,)), progress=lambda _: None)
    (row,) = [row for row in result["rows"] if row["name"] == "linear"]
    assert "off its own weights" in row["note"]
    assert not row["milliseconds"]


def test_a_contender_that_fails_is_reported_and_not_fatal():
    def broken(q, k, v):
        raise RuntimeError("no kernel for this")

    one = dataclasses.replace(contenders([], "noncausal")["softmax"], function=broken)
    (row,) = measure({"softmax": one}, efficiency.draw(small(), 1, 16, "cpu", torch.float32), small())
    assert row.note == "did not run: no kernel for this"


def test_options_that_do_not_go_together_are_reported_and_not_fatal():
    result = run(small(attention=("hierarchical+levels=-1", "linear"), lengths=(16,)), progress=lambda _: None)
    notes = {row["name"]: row["note"] for row in result["rows"]}
    assert "did not run: levels must not be negative" in notes["hierarchical+levels=-1"]
    assert notes["linear"] == ""


def test_the_matrix_is_not_formed_where_it_does_not_fit():
    result = run(small(attention=("linear",), lengths=(16, 64), memory_limit=1e-4), progress=lambda _: None)
    assert [r["length"] for r in result["rows"] if r["name"] == MATRIX_SOFTMAX] == [16]
    assert "GiB from L = 64 on" in result["given_up"][MATRIX_SOFTMAX]


def test_what_was_too_slow_is_left_out_of_longer_lengths_and_named():
    result = run(small(attention=("linear",), lengths=(16, 24), time_limit=0.0), progress=lambda _: None)
    assert {row["length"] for row in result["rows"]} == {16}
    assert set(result["given_up"]) == {"softmax", MATRIX_SOFTMAX, "linear"}


def test_mechanisms_without_the_pattern_are_left_out_or_refused():
    _, left_out = select(("all",), "causal")
    assert "hierarchical" in left_out
    with pytest.raises(ValueError, match="'hierarchical' cannot take part"):
        run(small(attention=("hierarchical",), pattern="causal"))


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"lengths": (1, 8)}, "lengths must be 2 or more, got 1"),
        ({"heads": 0}, "heads must be 1"),
        ({"time_limit": float("nan")}, "time_limit must be 0 or more, got nan"),
        ({"memory_limit": -1.0}, "memory_limit must be 0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        run(small(**given))


def test_known_costs_give_their_crossings():
    found = crossings(list(exact_rows()), {"linear"})
    by_key = {(c["quantity"], c["opponent"]): c for c in found if c["phase"] == "both"}
    assert by_key["time", "naive"]["length"] == pytest.approx(300)
    assert by_key["time", "naive"]["measured"] == 512
    assert by_key["memory", "naive"]["length"] == pytest.approx(150)
    assert by_key["memory", "fused"]["length"] is None
    assert crossing_text(by_key["memory", "fused"]) == "more / -"
    assert crossing_text(by_key["time", "naive"]) == "300 / 512"


def test_what_cab_expects_on_any_machine_is_said_to_be_seen_or_not():
    rows = list(exact_rows())
    seen = checks(rows, crossings(rows, {"linear", "cumulant2", "cumulant3"}))
    assert seen == [
        "Memory of cumulant2 <= cumulant3 < textbook softmax from L = 256 on: seen.",
        "The memory crossing comes no later than the time crossing (forward, against the textbook softmax) for 3 of 3 "
        "mechanisms.",
    ]
    rows[-1] = costed("cumulant3", LENGTHS[-1], 1, 1)  # less than cumulant2
    assert "not seen" in checks(rows, [])[0]


def test_the_table_names_what_was_left_out():
    rows = list(exact_rows())
    found = crossings(rows, {"linear"})
    text = table({"crossings": found, "checks": ["A check."], "left_out": {"rala": "no"}, "given_up": {"lla": "slow"}})
    assert [line for line in text.splitlines() if line.startswith("linear")]
    assert text.endswith("A check.\nleft out: rala: no\nnot measured further: lla: slow")


def test_quartiles_lie_around_the_median():
    assert quartiles([1.0, 2.0, 3.0, 4.0, 100.0]) == (3.0, 2.0, 4.0)
    assert quartiles([7.0]) == (7.0, 7.0, 7.0)


def test_when_the_minutes_are_over_no_further_length_is_begun_and_that_is_said():
    result = run(small(attention=("linear",)), progress=lambda _: None, minutes=1e-9)
    assert {row["length"] for row in result["rows"]} == {16}
    assert "no time for L = 24, 40" in result["given_up"]["all"]
    assert "not measured further: all" in table(result)


def test_tokens_that_do_not_fit_end_it_and_shorter_lengths_are_kept():
    result = run(Efficiency(attention=("linear",), lengths=(8, 10**12), heads=1, dim=4, calls=3, device="cpu"), str)
    assert {row["length"] for row in result["rows"]} == {8}
    assert "no tokens of L = 1,000,000,000,000: did not run" in result["given_up"]["all"]
