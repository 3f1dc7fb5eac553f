"""A number that was expected is compared with the mean of the runs, and with what one run may be by chance."""

import pytest
import torch

from cumulant.studies.memories import hebb, signs, unit
from cumulant.studies.statements import interval
from tools import expected


def found(values):
    one = expected.Expected("sinks", "", "", [], {})
    records = {
        str(i): {"settings": {}, "role": "compared", "configuration": "x", "values": {"k": x}}
        for i, x in enumerate(values)
    }
    return expected.of_records(one, records)["x", "k"]


@pytest.mark.parametrize(
    ("known", "values", "verdict"),
    [
        (0.243, [0.244, 0.246, 0.245], expected.WITHIN),
        (0.243, [0.300, 0.301, 0.299], expected.OUTSIDE),
        (0.243, [0.20, 0.30, 0.40], expected.CHANCE),
        (0.243, [0.300], expected.OUTSIDE),
        (1.22, [1.45], expected.WITHIN),
    ],
)
def test_verdicts(known, values, verdict):
    line = expected.Line("risk", "softmax", {"L=40": known}, share=0.05, over=0.95)
    assert expected.judged(line, "L=40", found(values)) == verdict


def test_a_measurement_that_scatters_more_than_ours_is_judged_by_its_own_scatter():
    line = expected.Line("pairs", "x", {"a": 8.5, "b": 6.0}, 0.1, repeated={"a": (7, 11), "b": (7, 11)})
    ours = found([10.3, 10.2, 10.4])
    assert expected.judged(line, "a", ours) == expected.CHANCE
    assert expected.judged(line, "b", ours) == expected.OUTSIDE


def test_twelve_trials_count_pairs_as_widely_as_is_said():
    dice, counts = torch.Generator().manual_seed(1), []
    for _ in range(20):
        n = 2
        while True:
            key, value = unit(12, n, 128, generator=dice), signs(12, n, 128, generator=dice)
            if (hebb(key, value).sign() == value).all(-1).double().mean() < 0.99:
                break
            n += 1
        counts.append(n - 1)
    low, high = expected.TWELVE_TRIALS
    assert sum(low <= one <= high for one in counts) >= 17
    assert sum(one <= 9 for one in counts) >= 2  # "8 to 9" is no rare outcome


def test_only_records_of_the_asked_settings_count():
    one = expected.Expected("sinks", "", "", [expected.Line("a", "x", {"k": 1.0}, 0.1)], {"steps": 10})

    def record(steps, value, role="compared"):
        return {"settings": {"steps": steps}, "role": role, "configuration": "x", "values": {"k": value}}

    records = {"a": record(10, 1.05), "b": record(20, 9.0), "c": record(10, 9.0, "control")}
    lines, counts, seeds = expected.rows(one, expected.of_records(one, records))
    assert lines == [["a", "1 / 1.05", "1 of 1"]]
    assert (counts[expected.WITHIN], seeds) == (1, 1)


def test_a_table_of_results_gives_means_and_spreads():
    one = expected.Expected("sinks", "", "", [], {}, title="Risk")
    result = {"settings": {"seeds": 3}, "tables": [{"title": "Risk", "head": ["", "k"], "rows": [["x", "0.5 ± 0.2"]]}]}
    read = expected.of_table(one, result)["x", "k"]
    low, high = interval([0.5 - read.deviation, 0.5, 0.5 + read.deviation])
    assert (read.mean, read.seeds) == (0.5, 3)
    assert high - low == pytest.approx(0.4)


def test_what_was_not_run_is_said():
    one = expected.Expected("sinks", "", "", [expected.Line("a", "x", {"k": 1.0})], {})
    assert expected.rows(one, {})[0] == [["a", "1 / -", "not run"]]
