"""The figure of README and docs/performance.md, time a token against length: `python -m tools.pages` draws it.

Times of CUDA graphs: cumulant attention and the floor of gpu_dense.json, softmax of the same where it has any
(`--peers`, as benchmarks/gpu_all.py asks), else of gpu_called.json.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cumulant.style import COLOURS, SOFT, new_figure, save, styled

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


def caption(dense: Any, called: Any) -> str:
    """What was measured, and of which code; two commits where the lines are not of one run."""
    ours = dense.get("commit", "that was not recorded")
    made = f"`benchmarks/gpu_all.py`, commit {ours}"
    lengths = [row["L"] for row in dense["rows"] if "sdpa_forward_ms" in row]
    if called["commit"] != ours and not lengths:
        made = f"softmax `benchmarks/gpu_called.py`, commit {called['commit']}; ours `gpu_dense.py`, a commit {ours}"
    elif called["commit"] != ours:
        made += f", softmax of more than {max(lengths):,} tokens {called['commit']}"
    return f"One H200, bf16, {HEADS} heads of {WIDTH}; {made}."


@styled
def draw(dense: Any, called: Any, out: Path) -> None:
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
    save(figure, out, ("svg",))
