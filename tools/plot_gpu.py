"""The figure of docs/performance.md from results that are there: time a token against length, one H200.

python -m tools.plot_gpu       writes docs/figures/gpu_time.svg

Cumulant attention and the floor are of results/gpu_dense.json (CUDA graphs), softmax of results/gpu_dense_peers.json
(called from Python, with batches so large that this does not show).
"""

from __future__ import annotations

import json
from pathlib import Path

from cumulant.style import COLOURS, SOFT, new_figure, save, styled

ROOT = Path(__file__).parents[1]
LINES = (
    ("softmax (best of flash, cuDNN)", "sdpa", 2, COLOURS["softmax"], "s"),
    ("cumulant, order 2", "", 2, COLOURS["cumulant2"], "o"),
    ("cumulant, order 3", "", 3, COLOURS["cumulant3"], "^"),
)
RESULTS = ("gpu_dense", "gpu_dense_peers")
HEADS, WIDTH = 12, 64
NAMES = {"forward": "forward", "both": "forward and backward"}


@styled
def main() -> None:
    ours, peers = (json.loads((ROOT / f"benchmarks/results/{name}.json").read_text()) for name in RESULTS)
    figure, (axes,) = new_figure(1, 2, (9.6, 3.9), sharey=True)
    for axis, (which, title) in zip(axes, NAMES.items(), strict=True):
        for label, peer, order, colour, marker in LINES:
            name = f"{peer}_{which}_ms" if peer else f"{which}_ms"
            rows = [r for r in (peers if peer else ours)["rows"] if r["order"] == order and r.get(name) is not None]
            points = [(r["L"], r[name] * 1e6 / (r["B"] * r["L"])) for r in rows]
            axis.plot(*zip(*points, strict=True), marker=marker, markersize=4, color=colour, label=label)
        tensors = 4 if which == "forward" else 11
        floor = tensors * HEADS * WIDTH * 2 / ours["copy_bytes_per_second"] * 1e9
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
