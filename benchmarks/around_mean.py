"""A vision transformer trained with softmax, its attention expanded around 0 and around the mean query: no training.

    python benchmarks/around_mean.py CHECKPOINT IMAGES [--images 2000]

Error of each order on queries, keys and values of every layer, ||out - softmax|| / ||softmax - mean of v||, and top-1
on test images with the attention of all layers replaced. Class tokens have a mean of their own. One core, about 6
minutes for 2,000 images; results in benchmarks/results/around_mean.json.
"""

from __future__ import annotations

import argparse
import copy
import json
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F

from cumulant import zoo
from cumulant.bench.pareto import from_checkpoint
from cumulant.bench.provenance import provenance
from cumulant.call import Call
from cumulant.inspect import labelled_items, open_model

SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {"softmax": ("softmax", {})} | {
    f"order {order}, around {around}": (f"cumulant{order}", {"around": around})
    for order in (1, 2, 3)
    for around in ("zero", "mean")
}


def options_for(options: dict[str, Any], prefix: int) -> dict[str, Any]:
    return options | {"apart": prefix} if options.get("around") == "mean" else options


def error(layer: Call, name: str, options: dict[str, Any]) -> float:
    q, k, v = layer.query, layer.key, layer.value
    exact = F.scaled_dot_product_attention(q, k, v)
    out = zoo.get(name)(q, k, v, **options_for(options, layer.prefix))
    return ((out - exact).norm() / (exact - v.mean(-2, keepdim=True)).norm()).item()


def replaced(model: Any, name: str, options: dict[str, Any]) -> Any:
    """A copy of the model with another mechanism in all its layers."""
    changed = copy.deepcopy(model)
    for block in changed.blocks:
        layer = block.attn
        layer.mechanism, place = zoo.get(name), {"grid_size": layer.grid_size, "prefix": layer.prefix}
        layer.mix = layer.mechanism.build(layer.dim, layer.num_heads, **place, **options_for(options, layer.prefix))
    return changed


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkpoint", type=Path, help="a vision transformer trained with softmax")
    parser.add_argument("data", help="folder of its data")
    parser.add_argument("--images", type=int, default=2000, help="test images for the accuracy")
    given = parser.parse_args()
    layers, words = from_checkpoint(given.checkpoint, data=given.data, images=16)
    opened = open_model(given.checkpoint)
    pixels, labels, _ = labelled_items(opened, given.data, given.images)
    model: Any = opened.model.float()
    results = provenance("python benchmarks/around_mean.py CHECKPOINT IMAGES") | {"model": words, "images": len(labels)}
    results["rows"] = []
    for label, (name, options) in SETTINGS.items():
        errors = [error(layer, name, options) for layer in layers.values()]
        changed = replaced(model, name, options)
        answers = torch.cat([changed(part).argmax(-1) for part in pixels.split(100)])
        top1 = (answers == labels).float().mean().item()
        results["rows"].append({"setting": label, "errors": errors, "top1": top1})
        print(f"{label:22} top-1 {top1:.2%}   error " + " ".join(f"{x:.2f}" for x in errors), flush=True)
        path = Path(__file__).parent / "results" / "around_mean.json"
        path.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
