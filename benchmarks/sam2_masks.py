"""SAM 2's masks with other attention in its global layers, nothing trained: IoU with its own masks.

    python -m tools.models sam2 pictures55
    PYTHONPATH=src:. python benchmarks/sam2_masks.py MODEL PICTURES [--size 1024] [--names ...] [--only 4]

A name is one mechanism for all global layers, or one for each with " / " between; "bfloat16" is softmax with the
encoder's products in bfloat16, and "another kernel" softmax by torch's memory-efficient or plain one: what rounding
alone changes. For each picture a grid of points and boxes around softmax's masks of them; each model shows the mask
that it calls best itself. Multiply-adds are those of the global layers, the search for clusters included, beside
softmax's. JSON goes to $OUT/sam2_masks_SIZE.json if OUT is set; a record that is there already is gone on with:
pictures and names that it holds are not run again. `--kept FOLDER` keeps what softmax answers, and the encoder up to
its first global layer (44 MB a picture), for later runs.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from real_models import (
    ANOTHER,
    ROUNDED,
    Masks,
    Picture,
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
    shared_start,
)
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

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


OTHERS = [SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


class Own(NamedTuple):
    """What softmax answers for a picture, and what every model's pass begins with."""

    prompts: dict[str, Tensor]
    best: dict[str, Tensor]  # (P, R, C) bool, for each kind of prompt
    number: dict[str, Tensor]  # (P,): which of three masks that is
    start: dict[int, Tensor]  # of `shared_start`


def answers(model: Any, embeddings: list[Tensor], prompts: dict[str, Tensor]) -> dict[str, Masks]:
    return {kind: ask(model, embeddings, **{kind: x}) for kind, x in prompts.items()}


def own_answers(model: Any, x: Tensor, places: Tensor) -> Own:
    """Of points at `places` (P, 2), and of boxes around their masks."""
    prompts, start = {"points": places}, {}
    with shared_start(model, start):
        embeddings = model.get_image_embeddings(x)
    found = answers(model, embeddings, prompts)
    prompts["boxes"] = boxes_of(found["points"].best, x.shape[-1])
    found |= answers(model, embeddings, {"boxes": prompts["boxes"]})
    number = {kind: y.scores.argmax(-1) for kind, y in found.items()}
    return Own(prompts, {kind: y.best for kind, y in found.items()}, number, start)


def kept_answers(folder: Path | None, model: Any, picture: Picture, size: int, number: int, place: int) -> Own:
    """Of `number` points and as many boxes of the picture at `place` among all; from `folder` what is there already."""
    path = None if folder is None else folder / f"{size}-{number}-{place}-{picture.name}.pt"
    if path is not None and path.exists():
        return Own(**torch.load(path, map_location=model.device))
    x = picture.tensor(size).to(model.device, model.dtype)
    own = own_answers(model, x, points(number, size, place).to(model.device))
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        torch.save(own._asdict(), path)
    return own


def compared(model: Any, x: Tensor, own: Own, name: str, layers: dict[str, str]) -> list[dict[str, Any]]:
    """IoU with softmax's masks of every prompt, with other attention in the global layers."""
    rounded = name == ROUNDED
    rounding = torch.autocast(x.device.type, torch.bfloat16, enabled=rounded)
    kernel = sdpa_kernel(OTHERS) if name == ANOTHER else nullcontext()
    with replaced(model, layers), rounding, kernel, shared_start(model, {} if rounded else own.start):
        embeddings = model.get_image_embeddings(x)
    rows = []
    for kind, answer in answers(model, [y.to(model.dtype) for y in embeddings], own.prompts).items():
        same = answer.logits[torch.arange(len(answer.logits)), own.number[kind]] > 0
        found = {"iou": iou(answer.best, own.best[kind]), "same_mask": iou(same, own.best[kind])}
        rows.append({"prompts": kind, **{key: [round(v, 4) for v in y.tolist()] for key, y in found.items()}})
    return rows


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--only", type=int, help="so many pictures")
    parser.add_argument("--prompts", type=int, default=10, help="points, and as many boxes, of a picture")
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--kept", type=Path, help="folder for what softmax answers, outside the repository")
    options = parser.parse_args()
    warnings.simplefilter("ignore", SlowPathWarning)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = load(options.model, options.size).to(device, getattr(torch, options.dtype))
    size, tokens = options.size, (options.size // 16) ** 2
    width = model.vision_encoder.backbone.blocks[5].attn.qkv.out_features // 3 // 4
    layers = global_layers(model)
    plans = {name: plan(name, layers) for name in options.names}
    made_by = " ".join(["python", "benchmarks/sam2_masks.py", "MODEL", "PICTURES", *sys.argv[3:]])
    record: dict[str, Any] = {"provenance": {"runs": []}, "size": size, "layers": layers, "work": {}, "found": {}}
    out = Path(os.environ["OUT"], f"sam2_masks_{size}.json") if "OUT" in os.environ else None
    if out is not None and out.exists():
        record = json.loads(out.read_text())
    record["provenance"]["runs"].append(provenance(made_by))
    for name, given in plans.items():
        record["work"][name] = sum(share_of_work(x, tokens, width) for x in given.values()) / len(layers)
        record["found"].setdefault(name, [])
    shown = pictures(options.pictures)[: options.only]
    began = time.perf_counter()
    for number, picture in enumerate(shown):
        lacking = [x for x in plans if all(row["picture"] != picture.name for row in record["found"][x])]
        if not lacking:
            continue
        x = picture.tensor(size).to(device, model.dtype)
        own = kept_answers(options.kept, model, picture, size, options.prompts, number)
        for name in lacking:
            rows = compared(model, x, own, name, plans[name])
            record["found"][name] += [{"picture": picture.name, **row} for row in rows]
            if out is not None:
                out.write_text(json.dumps(record))
        seconds = time.perf_counter() - began
        print(f"{number + 1} of {len(shown)} pictures, {seconds:.0f} s", file=sys.stderr, flush=True)
    print(table({name: record["found"][name] for name in plans}, record["work"]))


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
