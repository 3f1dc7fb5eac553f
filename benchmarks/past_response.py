"""Causal clusters that answer with their means, with one covariance for all of a row's past, or each with its own.

    PYTHONPATH=src:. python benchmarks/past_response.py MODEL TEXT [--tokens 4096]

Squared errors ||out - softmax||^2 / ||softmax - <v>||^2, where <v> is the mean of the values that a row sees, of layers
3 and 15 of SmolLM2-135M in a book (as `captured_qkv.py` takes them), and of two kinds of numbers: keys and values that
neighbours share ("smooth"), and values that are a linear map of random keys ("linear"). float32. JSON goes to
$OUT/past_response.json if OUT is set.
"""

from __future__ import annotations

import argparse
import json
import os
from pathlib import Path

import torch
import torch.nn.functional as F
from captured_qkv import of_smollm2
from torch import Tensor

from cumulant.bench.provenance import provenance
from cumulant.cluster import Blocks, cluster_attention

KINDS = {"means": 0, "pooled": "pooled", "each": None}


def drawn(L: int) -> dict[str, tuple[Tensor, Tensor, Tensor]]:
    make = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=make)

    smooth = [0.6 * draw(1, 4, L // 32, 64).repeat_interleave(32, 2) + 0.8 * draw(1, 4, L, 64) for _ in range(3)]
    key = draw(1, 4, L, 64)
    return {"smooth": (smooth[0], smooth[1], smooth[2]), "linear": (draw(1, 4, L, 64), key, key @ draw(64, 64) / 8)}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=4096)
    options = parser.parse_args()
    calls = {f"SmolLM2, layer {n.split('.')[2]}": c[:3] for n, c in
             of_smollm2(options.model, options.text, options.tokens, "cpu").items()}  # fmt: skip
    rows = []
    for name, (q, k, v) in (calls | drawn(options.tokens)).items():
        exact = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        seen = v.cumsum(-2) / torch.arange(1, v.shape[-2] + 1)[:, None]
        away = (exact - seen.repeat_interleave(q.shape[1] // v.shape[1], 1)).square().sum()
        for blocks in (Blocks(64, recent=1), Blocks(64, recent=4), Blocks(256)):
            found = {"of": name, "size": blocks.size, "recent": blocks.recent}
            for kind, response in KINDS.items():
                how = {"clusters": blocks, "is_causal": True, "prefix": 4, "response": response, "enable_gqa": True}
                found[kind] = ((cluster_attention(q, k, v, **how) - exact).square().sum() / away).item()
            rows.append(found)
            print({key: round(x, 4) if isinstance(x, float) else x for key, x in found.items()}, flush=True)
    if out := os.environ.get("OUT"):
        command = f"python benchmarks/past_response.py MODEL TEXT --tokens {options.tokens}"
        Path(out, "past_response.json").write_text(
            json.dumps({"provenance": provenance(command), "rows": rows}, indent=1)
        )


if __name__ == "__main__":
    main()
