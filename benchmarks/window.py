"""How accurate a float32 sliding window stays over 100,000 single-token steps.

    python benchmarks/window.py         # table, and benchmarks/results/window.json

A window of 64 tokens, order 3, float32 state, keys three spreads from the origin, and one outlier of 1,000 spreads
on the way. Two ways: `merge` and `remove` alone, and `SlidingWindow`, which rebuilds its state from the tokens it
holds once per window. The error is relative to float64 on the same tokens, the worst of the last 1,000 steps.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from tqdm import tqdm

from cumulant import Moments, SlidingWindow
from cumulant.bench.provenance import provenance

STEPS, WINDOW = 100_000, 64


def worst_error(outlier: bool, rebuild: bool) -> float:
    torch.manual_seed(0)
    k, v, q = torch.randn(1, STEPS, 16) + 3, torch.randn(1, STEPS, 16), torch.randn(1, 8, 16)
    if outlier:
        k[:, STEPS // 2] = 1e3
    window = SlidingWindow(WINDOW)
    state = Moments.of(k[:, :0], v[:, :0])
    worst = 0.0
    for t in tqdm(range(STEPS), desc=f"outlier {outlier}, rebuild {rebuild}"):
        now = slice(t, t + 1)
        if rebuild:
            window.append(k[:, now], v[:, now])
            assert window.state is not None
            state = window.state
        else:
            state = state.merge(Moments.of(k[:, now], v[:, now]))
            if t >= WINDOW:
                old = slice(t - WINDOW, t - WINDOW + 1)
                state = state.remove(Moments.of(k[:, old], v[:, old]))
        if t >= STEPS - 1000:
            seen = slice(t + 1 - WINDOW, t + 1)
            exact = Moments.of(k[:, seen].double(), v[:, seen].double()).apply(q.double())
            worst = max(worst, ((state.apply(q) - exact).norm() / exact.norm()).item())
    return worst


def main() -> None:
    torch.set_num_threads(1)
    rows = [
        {"outlier": outlier, "rebuild": rebuild, "worst_relative_error": worst_error(outlier, rebuild)}
        for outlier in (False, True)
        for rebuild in (False, True)
    ]
    for row in rows:
        way = "SlidingWindow (rebuilds)" if row["rebuild"] else "merge and remove alone"
        print(f"{way:26} outlier {row['outlier']!s:5}  worst error {row['worst_relative_error']:.1e}")
    results = Path(__file__).parent / "results" / "window.json"
    results.write_text(
        json.dumps(
            {"steps": STEPS, "window": WINDOW, "rows": rows, **provenance("python benchmarks/window.py")}, indent=1
        )
        + "\n"
    )


if __name__ == "__main__":
    main()
