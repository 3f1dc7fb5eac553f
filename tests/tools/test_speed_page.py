"""The tables of the speed page say what the records say, and what was not measured."""

from __future__ import annotations

from tools import speed_page

ORIGIN = {
    "commit": "abc", "date": "2026-11-18 01:00 UTC", "versions": {"python": "3.12", "torch": "2.11"},
    "machine": {"gpu": "NVIDIA H200", "processor": "x"},
}  # fmt: skip
CASE = {
    "forward": 1.0, "softmax_forward": 16.0, "forward_times": 16.0, "forward_called_times": 15.5,
    "step": 5.0, "softmax_step": 50.0, "step_times": 10.0, "step_called_times": 9.5, "goal": (15, 12),
}  # fmt: skip


def test_a_goal_is_reached_missed_or_not_measured() -> None:
    rows = speed_page.goals_block({"gpu_called": {**ORIGIN, "cases": {"cluster": CASE}}}).splitlines()
    forward, step, longer = rows[2:5]
    assert forward.endswith("| at least 15 | 16 | yes |")
    assert step.endswith("| at least 12 | 10 | **no** |")
    assert longer.endswith("| at least 40 | not measured |  |")
    assert len(rows) == 2 + len(speed_page.GOALS)


def test_the_first_table_says_how_many_times_as_long_softmax_takes_at_each_length() -> None:
    ours = {"B": 4, "forward_ms": 2.0, "both_ms": 5.0}
    rows = [
        {"L": 64, "order": 2, **ours, "sdpa_forward_ms": 3.0, "sdpa_both_ms": 20.0},
        {"L": 16384, "order": 2, **ours},
    ]
    called = {**ORIGIN, "cases": {"cluster": CASE}}
    block = speed_page.front_block({"gpu_dense": {**ORIGIN, "rows": rows}, "gpu_called": called})
    assert "| tokens | 64 | 16,384 |" in block
    assert "| `attention(order=2)` | 1.5 / 4.0 | 4.0 / 5.0 |" in block  # 16 ms for 8 sequences, 2 ms for 4
    assert "65,536) |  | 16.0 / 10.0 |" in block
    cpu = {**ORIGIN, "speed": [{"L": 256, "order": 2, "softmax_over_ours": {"ratio": 2.5}}], "clusters": []}
    assert "| `attention(order=2)` | 2.5 |" in speed_page.front_block({"cpu": cpu})


def test_a_call_that_was_wrong_has_no_time() -> None:
    block = speed_page.called_block({**ORIGIN, "cases": {"cluster": CASE}, "wrong": ["causal 3, 16k"]})
    assert "| 1.000 (16) | 16.0 | 15 | 15.5 | 5.000 (50) | 10.0 | 12 | 9.5 |" in block
    assert "off by more than twice plain torch" in block
    assert "Commit abc, NVIDIA H200" in block


def test_host_times_are_given_beside_those_of_sdpa() -> None:
    record = {**ORIGIN, "calls": {"f": {"repeated": [31.0, 205.0, 20.0, 160.0]}}}
    assert "| `f` | 31 (20) | +11 | 205 (160) | +45 |" in speed_page.host_block(record)
    rows = speed_page.goals_block({"gpu_host": record})
    assert "| host, forward, microseconds more than SDPA | at most 25 | 11 | yes |" in rows
    assert "| host, step, microseconds more than SDPA | at most 25 | 45 | **no** |" in rows


def test_without_records_the_page_says_so() -> None:
    blocks = speed_page.blocks({})
    assert blocks["gpu_called"] == blocks["gpu_more"] == blocks["speed_front"] == "Not run yet."
