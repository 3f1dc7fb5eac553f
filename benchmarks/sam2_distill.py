"""SAM 2's encoder after minutes of distillation without labels: IoU with its own masks, before and after.

    PYTHONPATH=src:. python benchmarks/sam2_distill.py MODEL PICTURES FRAMES [--seconds 480] [--name ...]

The global layers get `--name`, and the encoder learns by `cumulant.convert.distill` to give the embedding that SAM 2
gives with softmax. It sees crops, flipped or not, of FRAMES, a folder of pictures; the masks are of PICTURES, which it
never saw. A name is one mechanism for all global layers, or one for each with " / " between. Blocks before the first
global layer stay as they are. The time of a step is taken first, and as many are planned as fit into `--seconds`; where
another program slows them down, training ends at that time. JSON goes to $OUT/sam2_distill.json if OUT is set: every
minute the masks of a few pictures, so that a run that is cut off has said something.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from real_models import ask, boxes_of, global_layers, iou, load, pictures, plan, points, share_of_work
from torch import Tensor

from cumulant import convert
from cumulant.bench.provenance import provenance
from cumulant.conversion import DistillRecipe, distill
from cumulant.kernels.notice import SlowPathWarning

TREE = "cluster64+find=tree+leaves=8+"
NAME = f"{TREE}opened=12+near=16+width=16 / {TREE}opened=14+near=20+width=24 / {TREE}opened=12+near=14+width=24"
FEW, TICK = 6, 60.0  # pictures whose masks are looked at on the way, and how often, in seconds
EPOCH, TRIAL = 16, 3  # steps of an epoch, and of the trial that says how long one takes


class LateError(Exception):
    """The time is spent."""


class Crops:
    """Batches of crops of pictures, each a function of the step: half to all of both sides, half of them flipped."""

    def __init__(self, shown: list[Tensor], batch: int, size: int, steps: int = EPOCH) -> None:
        self.shown, self.batch, self.size, self.steps = shown, batch, size, steps
        self.until, self.every, self.next = float("inf"), None, float("inf")
        self.step = 0

    def tell(self, every: Callable[[int], None], seconds: float) -> None:
        """Call `every` with the number of the step about so often."""
        self.every, self.seconds, self.next = every, seconds, time.perf_counter() + seconds

    def __len__(self) -> int:
        return self.steps

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Tensor]:
        for step in range(first_step, self.steps):
            if time.perf_counter() > self.until:
                raise LateError
            if self.every is not None and time.perf_counter() > self.next:
                self.every(self.step)
                self.next = time.perf_counter() + self.seconds
            self.step += 1
            draw = torch.Generator().manual_seed(epoch * EPOCH + step)
            yield torch.cat([self._one(draw) for _ in range(self.batch)])

    def _one(self, draw: torch.Generator) -> Tensor:
        x = self.shown[int(torch.randint(len(self.shown), (1,), generator=draw))]
        share, top, left, flip = torch.rand(4, generator=draw).tolist()
        rows, cols = (max(1, round(side * (0.5 + 0.5 * share))) for side in x.shape[-2:])
        y, z = round(top * (x.shape[-2] - rows)), round(left * (x.shape[-1] - cols))
        part = x[..., y : y + rows, z : z + cols].float()
        part = F.interpolate(part, (self.size, self.size), mode="bilinear", antialias=True)
        return part.flip(-1) if flip < 0.5 else part


def embedding(said: Any, _: Any) -> Tensor:
    """What the global layers have a part in, (B, tokens, channels): the last of the encoder's maps."""
    return said.fpn_hidden_states[-1].flatten(2).mT


@torch.no_grad()
def masks(own: Any, student: Any, shown: list[Any], size: int, number: int) -> list[dict[str, Any]]:
    device, rows = own.device, []
    for place, picture in enumerate(shown):
        x = picture.tensor(size).to(device)
        wanted_from, found_from = own.get_image_embeddings(x), student.get_image_embeddings(x)
        prompts = {"points": points(number, size, place).to(device)}
        prompts["boxes"] = boxes_of(ask(own, wanted_from, points=prompts["points"]).best, size)
        for kind, at in prompts.items():
            wanted, found = ask(own, wanted_from, **{kind: at}), ask(student, found_from, **{kind: at})
            each = [round(v, 4) for v in iou(found.best, wanted.best).tolist()]
            rows.append({"picture": picture.name, "prompts": kind, "iou": each})
    return rows


def said(rows: list[dict[str, Any]]) -> str:
    every = torch.tensor([v for row in rows for v in row["iou"]])
    of_pictures = torch.tensor([sum(row["iou"]) / len(row["iou"]) for row in rows])
    return (
        f"mean IoU {every.mean():.4f}, above 0.9 {(every > 0.9).float().mean():.1%}, lowest of a picture's kinds "
        f"{of_pictures.min():.3f}, 1 % of prompts below {every.quantile(0.01):.2f} ({len(every)} prompts)"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("frames", type=Path)
    parser.add_argument("--name", default=NAME)
    parser.add_argument("--seconds", type=float, default=480, help="of training")
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=10, help="points, and as many boxes, of a picture")
    parser.add_argument("--only", type=int, help="so many pictures for the masks")
    parser.add_argument("--lr", type=float, default=3e-5)
    parser.add_argument("--layer-lr", type=float, default=3e-5)
    parser.add_argument("--layer-share", type=float, default=0.2)
    options = parser.parse_args()
    warnings.simplefilter("ignore", SlowPathWarning)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    own = load(options.model, options.size).to(device)
    shown, learned = pictures(options.pictures, crops=False)[: options.only], pictures(options.frames, crops=False)
    names = global_layers(own)
    given = plan(options.name, names)
    first = int(names[0].split(".")[2])
    frozen = ("backbone.patch_embed", "backbone.pos_embed", *(f"backbone.blocks.{i}." for i in range(first)))
    student = copy.deepcopy(own)
    x = shown[0].tensor(options.size).to(device)
    convert(student.vision_encoder, layers=given, data=x, force=True)
    width = own.vision_encoder.backbone.blocks[first].attn.qkv.out_features // 12
    work = sum(share_of_work(x, (options.size // 16) ** 2, width) for x in given.values()) / len(given)
    record: dict[str, Any] = {
        "provenance": provenance(" ".join(["python benchmarks/sam2_distill.py MODEL PICTURES FRAMES", *sys.argv[4:]])),
        "name": options.name,
        "work": work,
        "learned": len(learned),
    }

    def keep(**lines: Any) -> None:
        record.update(lines)
        if out := os.environ.get("OUT"):
            Path(out, "sam2_distill.json").write_text(json.dumps(record))

    def measured(when: str, some: list[Any]) -> list[dict[str, Any]]:
        student.vision_encoder.eval()
        torch.set_float32_matmul_precision("highest")
        rows = masks(own, student, some, options.size, options.prompts)
        torch.set_float32_matmul_precision("high")
        print(f"{when}: {said(rows)}", flush=True)
        return rows

    print(f"{options.name}: {work:.1%} of softmax's multiply-adds; {len(learned)} pictures to learn from", flush=True)
    keep(before=measured("before", shown))
    seen = shown[:: max(1, len(shown) // FEW)][:FEW]
    on_the_way: list[dict[str, Any]] = []
    data = Crops([p.tensor(max(p.pixels.shape[:2])).to(device) for p in learned], options.batch, options.size)
    recipe = {
        "lr": options.lr, "layer_lr": options.layer_lr, "frozen": frozen, "layer_weight": 0.1,
        "precision": "bf16" if device == "cuda" else "fp32", "checkpoint_steps": 0,
    }  # fmt: skip
    teacher = own.vision_encoder
    trial = copy.deepcopy(student.vision_encoder)
    few = Crops(data.shown, options.batch, options.size, TRIAL)
    spent = {}
    for share in (1.0, 0.0):
        for _ in range(2):  # the first is slow
            start = time.perf_counter()
            distill(trial, teacher, few, DistillRecipe(epochs=1, layer_share=share, **recipe), output=embedding)
            spent[share] = (time.perf_counter() - start) / TRIAL
    del trial
    share = options.layer_share
    of_step = share * spent[1.0] + (1 - share) * spent[0.0]
    epochs = max(1, int(options.seconds / of_step / EPOCH))
    print(f"steps of {spent[1.0]:.3f} and {spent[0.0]:.3f} s: {epochs * EPOCH} of them", flush=True)
    start = time.perf_counter()
    data.until = start + options.seconds

    def tell(step: int) -> None:
        rows = measured(f"step {step}, {time.perf_counter() - start:.0f} s, {len(seen)} pictures", seen)
        on_the_way.append({"step": step, "seconds": time.perf_counter() - start, "rows": rows})
        keep(on_the_way=on_the_way)

    data.tell(tell, TICK)
    keep(planned=epochs * EPOCH, batch=options.batch)
    try:
        result = distill(
            student.vision_encoder, teacher, data, DistillRecipe(epochs=epochs, layer_share=share, **recipe),
            output=embedding,
        )  # fmt: skip
        keep(result=result.to_json())
        print(result, flush=True)
    except LateError:
        print("ended by the time", flush=True)
    keep(seconds=time.perf_counter() - start, steps=data.step)
    keep(after=measured("after", shown))


if __name__ == "__main__":
    main()
