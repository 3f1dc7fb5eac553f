"""Time and memory against length. No test looks at a time; memory is counted, so it can be tested."""

import dataclasses

import pytest
import torch

from cumulant import zoo
from cumulant.bench.scaling import (
    MATRIX_SOFTMAX,
    Measurement,
    _disturbed,
    matrix_softmax,
    peak_memory,
    scaling,
    threads,
)

FLOAT = 4


def test_peak_memory_counts_what_lives_at_the_same_time():
    def two_at_once():
        first = torch.empty(1000, 1000)
        second = torch.empty(500, 1000)
        del first
        return second + 1  # 500 + 500 thousand, less than the 1,500 thousand before

    assert peak_memory(two_at_once) == 1_500_000 * FLOAT


def test_peak_memory_ignores_what_was_there_before():
    held = torch.ones(1000, 1000)
    assert peak_memory(lambda: held.add_(1)) < 1000


def test_the_textbook_softmax_needs_four_times_the_memory_for_twice_the_length():
    short, long = torch.randn(1, 2, 512, 8), torch.randn(1, 2, 1024, 8)
    ratio = peak_memory(lambda: matrix_softmax(long, long, long)) / peak_memory(
        lambda: matrix_softmax(short, short, short)
    )
    assert ratio == pytest.approx(4, rel=0.1)


def test_the_textbook_softmax_is_softmax():
    query, key, value = torch.randn(3, 2, 10, 4)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(matrix_softmax(query, key, value), expected)


def test_every_mechanism_is_measured_at_every_length():
    result = scaling(("softmax", "cumulant2"), (32, 16), num_heads=2, dim=8, calls=3, num_threads=1)
    seen = [(one["name"], one["length"]) for one in result["measurements"]]
    assert seen == [(name, n) for n in (16, 32) for name in ("softmax", "cumulant2", MATRIX_SOFTMAX)]
    for one in result["measurements"]:
        assert 0 < one["seconds_low"] <= one["seconds"] <= one["seconds_high"]
        assert one["peak_bytes"] >= 2 * one["length"] * 8 * FLOAT  # the output at least


def test_a_mechanism_that_was_too_slow_is_left_out_of_longer_lengths_and_named():
    result = scaling(("linear",), (16, 32), num_heads=1, dim=4, calls=3, time_limit=0.0, num_threads=1)
    assert {one["length"] for one in result["measurements"]} == {16}
    assert "L = 16" in result["given_up"]["linear"]


def test_the_matrix_is_not_formed_beyond_the_memory_limit():
    result = scaling(("softmax",), (16, 64), num_heads=1, dim=4, calls=3, memory_limit=8 * 32**2, num_threads=1)
    assert [one["length"] for one in result["measurements"] if one["name"] == MATRIX_SOFTMAX] == [16]
    assert MATRIX_SOFTMAX in result["given_up"]


def test_a_wrong_result_is_not_timed(monkeypatch):
    right = zoo.get("cumulant2")
    wrong = dataclasses.replace(right, function=lambda *tensors, **options: 1.01 * right.function(*tensors, **options))
    monkeypatch.setattr(zoo, "get", lambda name: wrong)
    with pytest.raises(RuntimeError, match="cumulant2 is not timed"):
        scaling(("cumulant2",), (16,), num_heads=1, dim=4, calls=3)


@pytest.mark.parametrize(("medians", "disturbed"), [([1.1] * 10, False), ([1.1] * 8 + [9.0] * 2, True)])
def test_medians_far_above_the_quickest_call_mean_that_the_machine_was_busy(medians, disturbed):
    measured = [Measurement("x", 64, median, 1.0, 10.0, 5, 0) for median in medians]
    assert _disturbed(measured) == disturbed


def test_the_number_of_threads_is_put_back_even_after_an_error():
    before = torch.get_num_threads()
    with threads(before + 1):
        assert torch.get_num_threads() == before + 1
    assert torch.get_num_threads() == before
    with pytest.raises(RuntimeError), threads(before + 1):
        torch.empty(-1)
    assert torch.get_num_threads() == before
