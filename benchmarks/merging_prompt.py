"""Processor time of merging a prompt into an eighth, beside its softmax: one layer with the heads of SmolLM2, on a CPU.

    PYTHONPATH=src:. python benchmarks/merging_prompt.py [--tokens 8192] [--out FILE]

Keys are drawn: time does not depend on them. Median of --repeats, in seconds of the processor, one thread.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
import torch.nn.functional as F

from cumulant.bench.provenance import provenance
from cumulant.cluster import MergedStream


def seconds(run: Callable[[], object], repeats: int) -> float:
    found = []
    for _ in range(repeats):
        start = time.process_time()
        run()
        found.append(time.process_time() - start)
    return statistics.median(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.manual_seed(0)
    torch.set_num_threads(1)
    q, k, v = (torch.randn(1, heads, options.tokens, 64) for heads in (9, 3, 3))
    softmax = seconds(lambda: F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True), options.repeats)
    whole = seconds(lambda: MergedStream(options.tokens // 8).step(q, k, v), options.repeats)
    line = {"tokens": options.tokens, "softmax_s": softmax, "prompt_s": whole, "merging_s": whole - softmax}
    print("  ".join(f"{name} {x:.2f}" for name, x in line.items()))
    if options.out is not None:
        options.out.write_text(json.dumps({**provenance("benchmarks/merging_prompt.py"), **line}, indent=1) + "\n")


if __name__ == "__main__":
    main()
