"""What the past costs a language model: numbers held and time of a token after a long text, by mechanism.

    python benchmarks/lm_cache.py        # table, and benchmarks/results/lm_cache.json

lm_tiny (four layers, width 128), one text, float32. A mechanism is timed only if its logits through the cache are those
of the whole text. A token's time is the median of ten after the text.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path

import torch

import cumulant
from cumulant.bench.provenance import provenance

NAMES, LENGTHS = ("softmax", "linear", "cumulant2", "cumulant3", "cluster16"), (256, 2048, 16384)
STEPS = 10
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def wait() -> float:
    if DEVICE == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


@torch.no_grad()
def measure(name: str) -> list[dict[str, object]]:
    torch.manual_seed(0)
    model = cumulant.create_model("lm_tiny", attention=name, num_classes=65, device=DEVICE).eval()
    tokens = torch.randint(0, 65, (1, max(LENGTHS) + STEPS + 1), device=DEVICE)
    whole, streams = model(tokens[:, :300]), model.streams()
    taken = [
        model.take(tokens[:, :290], streams, 0),
        *(model.take(tokens[:, t : t + 1], streams, t) for t in range(290, 300)),
    ]
    error = (torch.cat(taken, 1) - whole).abs().max() / whole.abs().max()
    if error > 1e-4:
        raise SystemExit(f"{name}: logits through the cache are off by {error:.1e}; nothing is timed")
    rows = []
    for length in LENGTHS:
        streams, times = model.streams(), []
        model.take(tokens[:, :length], streams, 0)
        for place in range(length, length + STEPS):
            start = wait()
            model.take(tokens[:, place : place + 1], streams, place)
            times.append(wait() - start)
        held = sum(stream.numel() for stream in streams)
        rows.append({"attention": name, "tokens": length, "held": held, "ms": 1e3 * statistics.median(times)})
    return rows


def main() -> None:
    rows = [row for name in NAMES for row in measure(name)]
    for row in rows:
        print(f"{row['attention']:10} {row['tokens']:6} tokens  {row['held']:10,} numbers  {row['ms']:8.2f} ms a token")
    results = Path(__file__).parent / "results" / "lm_cache.json"
    results.write_text(json.dumps({"rows": rows, **provenance("python benchmarks/lm_cache.py")}, indent=1) + "\n")


if __name__ == "__main__":
    main()
