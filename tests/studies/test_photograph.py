"""The dial on a photograph: closer to softmax with every step, for more work, and the same every time."""

import pytest

pytest.importorskip("sklearn")

from cumulant.studies import figures, measured


@pytest.fixture(scope="module")
def dial():
    return measured.dial_on_a_photograph()


def test_the_dial_goes_from_linear_attention_to_softmax(dial):
    errors, costs = ([row[key] for row in dial["rows"]] for key in ("error", "cost"))
    assert errors == sorted(errors, reverse=True)
    assert costs == sorted(costs)
    assert errors[0] > 0.5
    assert errors[-2] < 0.02
    assert (errors[-1], costs[-1]) == (0.0, 1.0)


def test_every_map_covers_the_picture_and_sums_to_one(dial):
    for row in dial["rows"]:
        assert len(row["weights"]) == dial["tokens"] == dial["grid"][0] * dial["grid"][1]
        assert sum(row["weights"]) == pytest.approx(1, abs=2e-3)  # rounded to six digits


def test_the_crossing_is_where_softmax_becomes_and_stays_the_slower_one():
    def rows(*seconds):
        return [{"length": 64 * 2**i, "seconds": one} for i, one in enumerate(seconds)]

    name, length = figures.crossing({"softmax": rows(1, 2, 8), "cumulant3": rows(2, 4, 4)}, "seconds")
    assert (name, length) == ("cumulant3", pytest.approx(128 * 2**0.5))
    assert figures.crossing({"softmax": rows(3, 2, 8), "cumulant3": rows(1, 1, 1)}, "seconds") is None
    assert figures.crossing({"softmax": rows(1, 1, 1), "cumulant3": rows(2, 2, 2)}, "seconds") is None
