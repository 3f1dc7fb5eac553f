"""The vision layers over softmax and over cumulant3 in one model: parameters, multiply-adds and throughput on one core.

    OMP_NUM_THREADS=1 python benchmarks/vision_layers.py

ViT-Ti on pictures of 64 pixels, 100 classes (the recipe tiny-imagenet-100): 65 tokens. Multiply-adds are counted for
one picture; throughput is that of forward passes of 8, the median of interleaved rounds, over that of plain softmax in
the same round. Results in benchmarks/results/vision_layers.json; `python -m tools.zoo_page` puts them on
docs/layers/index.md.
"""

from __future__ import annotations

import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from cumulant import create_model
from cumulant.bench.provenance import provenance
from cumulant.bench.work import WorkCounter

LAYERS = {
    "": None, "moh": "moh", "biformer": "biformer+regions=4+top=4", "gda": "gda+ratio=2",
    "complexformer": "complexformer+scale=none", "gaam": "gaam", "ia_red2": "ia_red2",
    "sqa": "sqa+variant=lsqa+query_heads=2+key_heads=1", "sparsifiner": "sparsifiner+block=16",
}  # fmt: skip
ROUNDS = 7


@torch.no_grad()
def main() -> None:
    size = {"img_size": 64, "patch_size": 8, "num_classes": 100}
    one, some = torch.randn(1, 3, 64, 64), torch.randn(8, 3, 64, 64)
    rows, models = [], []
    for attention in ("softmax", "cumulant3"):
        for layer in LAYERS.values():
            model = create_model("vit_tiny_patch16_224", attention=attention, layer=layer, **size).eval()
            backend = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)  # whose products are counted
            with backend, WorkCounter() as counter:
                model(one)
            parameters = sum(weight.numel() for weight in model.parameters())
            row: dict[str, Any] = {"layer": layer or "multihead", "attention": attention, "parameters": parameters}
            rows.append({**row, "work": counter.work.total})
            models.append(model)
    times: list[list[float]] = [[] for _ in models]
    for number in range(ROUNDS + 1):
        for model, taken in zip(models, times, strict=True):
            begin = time.perf_counter()
            model(some)
            if number:
                taken.append(time.perf_counter() - begin)
    for row, taken in zip(rows, times, strict=True):
        row["throughput"] = len(some) / statistics.median(taken)
        row["relative"] = statistics.median(base / own for base, own in zip(times[0], taken, strict=True))
        print(row, flush=True)
    content = {**provenance("OMP_NUM_THREADS=1 python benchmarks/vision_layers.py"), "rows": rows}
    results = Path(__file__).parent / "results" / "vision_layers.json"
    results.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
