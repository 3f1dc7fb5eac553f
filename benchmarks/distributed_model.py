"""A cost model on paper for attention over many workers, from the figures of `distributed_link.py`.

    python benchmarks/distributed_model.py
    python benchmarks/distributed_model.py --figure     # and docs/figures/distributed.svg, from the records

One layer, forward, bfloat16 tokens, 12 heads of 64, order 3; statistics travel in float32. With W workers and L tokens:

    cumulants   4 L D E H / W multiply-adds, then (alpha + (W - 1) N / beta), or beyond 8 workers 2 (alpha + 2 N / beta)
    ring        L^2 (D + E) H / W multiply-adds, beside W - 1 messages of 2 L H D / W numbers: the larger counts

First the model is held against the measured link (its alpha and beta are those of the link, its speed that of the
processor), then it goes to GPUs, whose numbers are assumptions and not measurements.
"""

from __future__ import annotations

import argparse
import json
from math import log2
from pathlib import Path

from cumulant.style import COLOURS, new_figure, save, styled

H, D = 12, 64
N = H * (1 + 3 * D + 2 * D * D)  # numbers that merge
RECORD = Path(__file__).parent / "results" / "distributed_link.json"
# Assumed for a GPU of the H200 class: 400 TFLOP/s of softmax kernels, moments at half the bandwidth of its memory,
# 25 us to start a collective, 50 GB/s between machines and 400 GB/s inside one (8 GPUs).
FLOPS, MEMORY, START = 400e12, 2.4e12, 25e-6


def exchange(W: int, start: float, speed: float) -> float:
    if W == 1:
        return 0.0
    return start + (W - 1) * 4 * N / speed if W <= 8 else 2 * start * max(1, log2(W) / 3) + 2 * 4 * N / speed


def held_against_the_link() -> None:
    found = json.loads(RECORD.read_text())["seconds"]
    start, speed = 10e-3, 125e6
    message = exchange(4, start, speed)
    moved = 3 * (start + 2 * 16384 * H * D * 4 / speed)
    measured = found["cumulant3 forward"]["messages"], found["softmax ring forward"]["messages"]
    print(f"an exchange over the link: {1e3 * message:.0f} ms on paper, {1e3 * measured[0]:.0f} ms measured")
    print(f"a ring over the link:      {moved:.1f} s on paper, {measured[1]:.1f} s measured")


@styled
def figure(path: Path) -> None:
    """What a worker sends for a layer against the length (counted), and a step over the slow link (measured)."""
    counted = json.loads(RECORD.with_name("distributed_scaling.json").read_text())["seconds"]["counted"]
    link = json.loads(RECORD.read_text())["seconds"]
    sheet, ((left, right),) = new_figure(1, 2, (9.6, 3.6))
    lengths = [2**i for i in range(10, 27, 2)]
    for name, label, marker in (
        ("softmax ring", "ring softmax", "s"), ("cumulant3", "cumulant, order 3", "^"), ("cumulant2", "order 2", "o"),
    ):  # fmt: skip
        few, many = (counted[f"{name} W=4 n={n}"]["forward"]["bytes"] for n in (64, 256))
        a_token = (many - few) / (4 * (256 - 64))
        sent = [few + a_token * (L - 256) for L in lengths]
        left.plot(lengths, sent, marker=marker, markersize=4, color=COLOURS[name.split()[0]], label=label)
    left.set(xscale="log", yscale="log", xlabel="tokens in all, 4 workers", ylabel="bytes a worker sends, a layer")
    left.legend()
    rows = (("softmax ring", "larger"), ("cumulant3 causal", "sum"), ("cumulant3", "sum"), ("cumulant2", "sum"))
    for place, (name, which) in enumerate(reversed(rows)):
        seconds = link[f"{name} both"][which]
        right.barh(place, seconds, color=COLOURS[name.split()[0]], height=0.6)
        right.text(seconds * 1.15, place, f"{seconds:.3g} s", va="center")
    right.set(
        xscale="log", xlim=(0.1, 2000), yticks=range(len(rows)), yticklabels=[name for name, _ in reversed(rows)],
        xlabel="seconds: 65,536 tokens with gradients, 1 Gbit/s, 10 ms",
    )  # fmt: skip
    save(sheet, path, formats=("svg",))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--figure", action="store_true")
    if parser.parse_args().figure:
        figure(Path(__file__).parents[1] / "docs" / "figures" / "distributed.svg")
    held_against_the_link()
    print("| GPUs | tokens | cumulants: arithmetic | exchange | ring: arithmetic | messages | ring over cumulants |")
    print("|---|---|---|---|---|---|---|")
    for W, speed in ((8, 400e9), (512, 50e9)):
        for L in (10**6, 10**8):
            bytes_moved = 6 * (L / W) * H * D * 2  # q, k, v read, k and v again, the output written
            own, message = bytes_moved / MEMORY, exchange(W, START, speed)
            softmax = 2 * L * (L / W) * 2 * D * H / FLOPS
            moved = (W - 1) * (START + 2 * (L / W) * H * D * 2 / speed)
            ratio = max(softmax, moved) / (own + message)
            cells = (1e3 * own, 1e3 * message, 1e3 * softmax, 1e3 * moved)
            print(f"| {W} | {L:,} |", " | ".join(f"{x:,.2f} ms" for x in cells), f"| {ratio:,.0f} |")


if __name__ == "__main__":
    main()
