"""The figure of docs/performance.md from results that are there: time a token against length, one H200.

python -m tools.plot_gpu       writes docs/figures/gpu_time.svg

Times of CUDA graphs: cumulant attention and the floor of results/gpu_dense.json, softmax of the same where it has any
(`--peers`), and of results/gpu_called.json.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cumulant.style import COLOURS, SOFT, new_figure, save, styled

ROOT = Path(__file__).parents[1]
LINES = (
    ("softmax (best of flash, cuDNN)", "sdpa_", 2, COLOURS["softmax"], "s"),
    ("cumulant, order 2", "", 2, COLOURS["cumulant2"], "o"),
    ("cumulant, order 3", "", 3, COLOURS["cumulant3"], "^"),
)
BESIDE = {  # cases of gpu_called.json: batch and tokens
    "order 2, 64": (256, 64), "order 2, 197": (64, 197), "4k": (8, 4096), "cluster": (8, 16384), "long": (2, 65536),
}  # fmt: skip
HEADS, WIDTH = 12, 64
NAMES = {"forward": "forward", "both": "forward and backward"}


def points(dense: Any, called: Any, prefix: str, order: int, which: str) -> list[tuple[int, float]]:
    """Tokens of a sequence, and nanoseconds a token."""
    name = f"{prefix}{which}_ms"
    rows = [r for r in dense["rows"] if r["order"] == order and r.get(name) is not None]
    found = [(r["L"], r[name] * 1e6 / (r["B"] * r["L"])) for r in rows]
    for case, (batch, length) in BESIDE.items() if prefix else ():
        time = called["cases"].get(case, {}).get("softmax_forward" if which == "forward" else "softmax_step")
        if time is not None and length not in dict(found):
            found.append((length, time * 1e6 / (batch * length)))
    return sorted(found)


@styled
def main() -> None:
    results = (ROOT / "benchmarks/results").joinpath
    dense, called = (json.loads(results(name).read_text()) for name in ("gpu_dense.json", "gpu_called.json"))
    figure, (axes,) = new_figure(1, 2, (9.6, 3.9), sharey=True)
    for axis, (which, title) in zip(axes, NAMES.items(), strict=True):
        for label, prefix, order, colour, marker in LINES:
            shown = points(dense, called, prefix, order, which)
            axis.plot(*zip(*shown, strict=True), marker=marker, markersize=4, color=colour, label=label)
        tensors = 4 if which == "forward" else 11
        floor = tensors * HEADS * WIDTH * 2 / dense["copy_bytes_per_second"] * 1e9
        axis.axhline(floor, color=SOFT, linestyle="--", label="memory floor")
        axis.set(xscale="log", yscale="log", xlabel="tokens in a sequence", title=title)
        axis.grid(alpha=0.3, which="major")
    axes[0].set_ylabel("nanoseconds a token, 12 heads of 64")
    axes[0].legend(frameon=False)
    out = ROOT / "docs/figures/gpu_time.svg"
    save(figure, out, ("svg",))
    print(f"wrote {out.relative_to(ROOT)}")


if __name__ == "__main__":
    main()
