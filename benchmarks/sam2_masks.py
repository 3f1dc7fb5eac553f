"""SAM 2's masks with other attention in its global layers, nothing trained: IoU with its own masks.

    PYTHONPATH=src:. python benchmarks/sam2_masks.py MODEL PICTURES [--size 1024] [--names ...] [--only 4]

A name is one mechanism for all global layers, or one for each with " / " between; "bfloat16" is softmax with the
encoder's products in bfloat16: what rounding alone changes. For each picture a grid of points and boxes around
softmax's masks of them; each model shows the mask that it calls best itself. Multiply-adds are those of the global
layers, the search for clusters included, beside softmax's. JSON goes to $OUT/sam2_masks_SIZE.json if OUT is set.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import torch
from real_models import (
    ROUNDED,
    Masks,
    ask,
    boxes_of,
    global_layers,
    iou,
    load,
    pictures,
    plan,
    points,
    replaced,
    share_of_work,
)

from cumulant.bench.provenance import provenance
from cumulant.kernels.notice import SlowPathWarning

SQUARES = "cluster64+near=4+near_rows=1+rank=mass"
NAMES = (
    "cumulant2",
    "window8",
    f"{SQUARES}+response=0",
    f"{SQUARES}+response=pooled",
    "cluster64+find=kmeans+near=4+response=pooled",
    "cluster64+find=tree+near=4+near_rows=1+rank=error+response=pooled",
    "cluster64+find=tree+near=4",
    "cluster64+find=tree+leaves=4+opened=8+near=8",
    "cluster64+find=tree+leaves=4+opened=10+near=12",
    "cluster64+find=tree+leaves=4+opened=16+near=16",
    "cluster64+find=tree+leaves=8+opened=16+near=28+width=32",
)


def answers(model: Any, embeddings: list[torch.Tensor], prompts: dict[str, torch.Tensor]) -> dict[str, Masks]:
    return {kind: ask(model, embeddings, **{kind: x}) for kind, x in prompts.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--only", type=int, help="so many pictures")
    parser.add_argument("--first", type=int, default=0, help="the number of the first picture, where a run goes on")
    parser.add_argument("--prompts", type=int, default=10, help="points, and as many boxes, of a picture")
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    warnings.simplefilter("ignore", SlowPathWarning)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(options.model, options.size).to(device, getattr(torch, options.dtype))
    size, tokens = options.size, (options.size // 16) ** 2
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in options.names}
    width = model.vision_encoder.backbone.blocks[5].attn.qkv.out_features // 3 // 4
    layers = global_layers(model)
    plans = {name: plan(name, layers) for name in options.names}
    work = {
        name: sum(share_of_work(x, tokens, width) for x in given.values()) / len(layers)
        for name, given in plans.items()
    }
    shown = pictures(options.pictures)[: options.only]
    began = time.perf_counter()
    for number, picture in list(enumerate(shown))[options.first :]:
        x = picture.tensor(size).to(device, model.dtype)
        prompts = {"points": points(options.prompts, size, number).to(device)}
        own = model.get_image_embeddings(x)
        prompts["boxes"] = boxes_of(ask(model, own, points=prompts["points"]).best, size)
        wanted = answers(model, own, prompts)
        for name in options.names:
            rounding = torch.autocast(device, torch.bfloat16, enabled=name == ROUNDED)
            with replaced(model, plans[name]), rounding:
                embeddings = model.get_image_embeddings(x)
            got = answers(model, [y.to(model.dtype) for y in embeddings], prompts)
            for kind, answer in got.items():
                found_iou = iou(answer.best, wanted[kind].best).tolist()
                same = wanted[kind].scores.argmax(-1)
                at = torch.arange(len(same), device=same.device)
                index = iou(answer.logits[at, same] > 0, wanted[kind].logits[at, same] > 0).tolist()
                found[name].append({"picture": picture.name, "prompts": kind, "iou": found_iou, "same_mask": index})
        print(
            f"{number + 1} of {len(shown)} pictures, {time.perf_counter() - began:.0f} s", file=sys.stderr, flush=True
        )
        if out := os.environ.get("OUT"):
            kept = {
                name: [
                    {**x, "iou": [round(v, 4) for v in x["iou"]], "same_mask": [round(v, 4) for v in x["same_mask"]]}
                    for x in rows
                ]
                for name, rows in found.items()
            }
            record = {
                "provenance": provenance(
                    " ".join(["python", "benchmarks/sam2_masks.py", *("MODEL", "PICTURES", *sys.argv[3:])])
                ),
                "size": size,
                "layers": layers,
                "work": work,
                "found": kept,
            }
            Path(out, f"sam2_masks_{size}.json").write_text(json.dumps(record))
    print(table(found, work))


def table(found: dict[str, list[dict[str, Any]]], work: dict[str, float]) -> str:
    """Mean, share above 0.9, and the spread: worst picture, 1st percentile of prompts."""
    heads = ["attention", "multiply-adds", "mean IoU", "above 0.9", "points, boxes", "lowest picture"]
    heads += ["1 % of prompts below", "same mask"]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for name, rows in found.items():
        every = torch.tensor([x for row in rows for x in row["iou"]])
        same = torch.tensor([x for row in rows for x in row["same_mask"]])
        kinds = [[x for r in rows if r["prompts"] == kind for x in r["iou"]] for kind in ("points", "boxes")]
        by_picture = {r["picture"]: [] for r in rows}
        for row in rows:
            by_picture[row["picture"]] += row["iou"]
        means = {name: sum(x) / len(x) for name, x in by_picture.items()}
        worst = min(means, key=means.__getitem__)
        each = ", ".join(f"{sum(x) / len(x):.3f}" for x in kinds)
        lines.append(
            f"| `{name}` | {work[name]:.1%} | {every.mean():.4f} | {(every > 0.9).float().mean():.1%} | {each} | "
            f"{means[worst]:.3f} ({worst}) | {every.quantile(0.01):.2f} | {same.mean():.4f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
