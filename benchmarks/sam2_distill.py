"""SAM 2's encoder after minutes of distillation without labels: IoU with its own masks, before and after.

    PYTHONPATH=src:. python benchmarks/sam2_distill.py MODEL PICTURES FRAMES [--seconds 480] [--name ...]

The global layers get `--name`, and the encoder learns by `cumulant.convert.distill` to give the embedding that SAM 2
gives with softmax. It sees crops, flipped or not, of FRAMES, a folder of pictures; the masks are of PICTURES, which it
never saw. A name is one mechanism for all global layers, or one for each with " / " between. Blocks before the first
global layer stay as they are.

Each of `--rates` gets its share of `--seconds`, from the same start. Of all of them and of the start, those weights are
kept whose embedding errs least on every eighth picture of FRAMES, from which nothing is learned: looked at each minute
(`--tick`) and at the end of a rate. PICTURES decide nothing.

As many steps are planned as fit into a rate's share; where another program slows them down, it ends at that time.
Steps are in float32, on a GPU with products in TF32: bfloat16 moves the embedding as far as clusters do. JSON goes to
$OUT/sam2_distill.json if OUT is set, at each look with the masks of a few pictures: a run that is cut off has said
something. With `--weights` a later call of the same goes on from what was kept by then, with the masks.

On a CPU a step of four crops takes 70 s of one core and 9.6 GB, 55 pictures about 12 minutes:

    ... MODEL PICTURES FRAMES --rates 1.5e-6 --steps 18 --seconds 2400 --tick 700 --few 1 --weights FILE --kept FOLDER
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from real_models import global_layers, iou, load, pictures, plan, share_of_work, shared_start
from sam2_masks import Own, answers, kept_answers
from sam2_speed import kernels_of
from torch import Tensor

from cumulant import convert
from cumulant.bench.provenance import provenance
from cumulant.conversion import DistillRecipe, distill
from cumulant.conversion.distill_losses import unexplained
from cumulant.kernels.notice import SlowPathWarning

NAME = " / ".join(
    f"cluster64+find=tree+leaves=4+opened={opened}+near={near}+width=24+exact={exact}"
    for opened, near, exact in ((16, 24, 92), (18, 32, 112), (16, 24, 84))
)
RATES = (5e-7, 1.5e-6)  # of AdamW: 1e-5 moves the embedding further in five steps than clusters do
FEW = 6  # pictures whose masks are looked at on the way
TIMED = 3  # steps that say how long one takes
APART = 8  # of so many pictures one is not learned from


class LateError(Exception):
    """The time is spent."""


class Crops:
    """Batches of crops of pictures, each a function of the step: half to all of both sides, half of them flipped."""

    def __init__(self, shown: list[Tensor], batch: int, size: int, steps: int = TIMED) -> None:
        self.shown, self.batch, self.size, self.steps = shown, batch, size, steps
        self.until, self.every, self.next = float("inf"), None, float("inf")
        self.step = 0  # steps taken

    def tell(self, every: Callable[[int], None], seconds: float) -> None:
        """Call `every` with the number of the step about so often."""
        self.every, self.seconds, self.next = every, seconds, time.perf_counter() + seconds

    def __len__(self) -> int:
        return self.steps

    def epoch(self, epoch: int, first_step: int = 0) -> Iterator[Tensor]:
        for step in range(first_step, self.steps):
            self.step = step
            if time.perf_counter() > self.until:
                raise LateError
            if self.every is not None and time.perf_counter() > self.next:
                self.every(self.step)
                self.next = time.perf_counter() + self.seconds
            draw = torch.Generator().manual_seed(epoch * self.steps + step)
            yield torch.cat([self._one(draw) for _ in range(self.batch)])
        self.step = self.steps

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


class Asked(NamedTuple):
    """A picture, normalised, the prompts, and what softmax answers."""

    name: str
    pixels: Tensor
    own: Own


@torch.no_grad()
def masks(student: Any, asked: Iterable[Asked]) -> list[dict[str, Any]]:
    """IoU with softmax's masks; blocks before the first global layer are those of softmax, which distillation keeps."""
    rows = []
    for name, x, own in asked:
        with shared_start(student, own.start):
            embeddings = student.get_image_embeddings(x)
        for kind, answer in answers(student, embeddings, own.prompts).items():
            each = [round(v, 4) for v in iou(answer.best, own.best[kind]).tolist()]
            rows.append({"picture": name, "prompts": kind, "iou": each})
    return rows


class Apart(NamedTuple):
    """A picture that is not learned from, and the embedding that softmax gives."""

    pixels: Tensor
    wanted: Tensor


@torch.no_grad()
def missed(encoder: Any, apart: list[Apart]) -> float:
    """Share of the embedding's variance that the encoder misses, mean over pictures."""
    with exactly():
        each = [unexplained(embedding(encoder(x), None), wanted) for x, wanted in apart]
    return float(torch.stack(each).mean())


@contextmanager
def exactly() -> Iterator[None]:
    """Products in float32, not in TF32."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def said(rows: list[dict[str, Any]]) -> str:
    every = torch.tensor([v for row in rows for v in row["iou"]])
    of_pictures = torch.tensor([sum(row["iou"]) / len(row["iou"]) for row in rows])
    return (
        f"mean IoU {every.mean():.4f}, above 0.9 {(every > 0.9).float().mean():.1%}, lowest of a picture's kinds "
        f"{of_pictures.min():.3f}, 1 % of prompts below {every.quantile(0.01):.2f} ({len(every)} prompts)"
    )


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("frames", type=Path)
    parser.add_argument("--name", default=NAME)
    parser.add_argument("--seconds", type=float, default=480, help="of training, trials included")
    parser.add_argument("--size", type=int, default=1024)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--prompts", type=int, default=10, help="points, and as many boxes, of a picture")
    parser.add_argument("--only", type=int, help="so many pictures for the masks")
    parser.add_argument("--few", type=int, help="masks before of so many pictures only, and on the way")
    parser.add_argument("--rates", nargs="+", type=float, default=RATES)
    parser.add_argument("--steps", type=int, help="of each rate, if --seconds allow them: none is timed before")
    parser.add_argument("--tick", type=float, default=60, help="seconds between looks")
    parser.add_argument("--profile", action="store_true", help="which kernels take longest in a few steps, on a GPU")
    parser.add_argument("--weights", type=Path, help="file for the weights that are kept, outside the repository")
    parser.add_argument("--kept", type=Path, help="folder for what softmax answers, as of sam2_masks.py")
    return parser.parse_args(arguments)


def main() -> None:
    options = options_of()
    warnings.simplefilter("ignore", SlowPathWarning)
    device, size = "cuda" if torch.cuda.is_available() else "cpu", options.size
    own = load(options.model, size).to(device)
    shown, frames = pictures(options.pictures, crops=False)[: options.only], pictures(options.frames, crops=False)
    names = global_layers(own)
    given = plan(options.name, names)
    first = int(names[0].split(".")[2])
    student, teacher = copy.deepcopy(own), own.vision_encoder
    convert(student.vision_encoder, layers=given, data=shown[0].tensor(size).to(device), force=True)
    width = own.vision_encoder.backbone.blocks[first].attn.qkv.out_features // 12
    work = sum(share_of_work(x, (size // 16) ** 2, width) for x in given.values()) / len(given)
    frozen = ("backbone.patch_embed", "backbone.pos_embed", *(f"backbone.blocks.{i}." for i in range(first)))
    record: dict[str, Any] = {
        "provenance": provenance(
            " ".join(["python benchmarks/sam2_distill.py MODEL PICTURES FRAMES", *sys.argv[4:]]), gpu=True
        ),
        "name": options.name,
        "work": work,
        "batch": options.batch,
    }

    def keep(**lines: Any) -> None:
        record.update(lines)
        if out := os.environ.get("OUT"):
            Path(out, "sam2_distill.json").write_text(json.dumps(record))

    @torch.no_grad()
    def asked(places: Iterable[int]) -> Iterator[Asked]:
        for place in places:
            picture = shown[place]
            answered = kept_answers(options.kept, own, picture, size, options.prompts, place)
            yield Asked(picture.name, picture.tensor(size).to(device), answered)

    def measured(when: str, some: Iterable[Asked]) -> list[dict[str, Any]]:
        with exactly():
            rows = masks(student, some)
        print(f"{when}: {said(rows)}", flush=True)
        return rows

    def lesson(steps: int) -> Crops:
        return Crops(learned, options.batch, size, steps)

    def learn(encoder: Any, data: Crops, rate: float) -> Any:
        how = {"lr": rate, "min_lr": rate / 100, "frozen": frozen, "layer_share": 0.0, "checkpoint_steps": 0}
        return distill(encoder, teacher, data, DistillRecipe(epochs=1, **how), output=embedding)

    print(f"{options.name}: {work:.1%} of softmax's multiply-adds; {len(frames)} frames", flush=True)
    encoder, every = student.vision_encoder, range(len(shown))
    if options.weights is not None and options.weights.exists():
        held = torch.load(options.weights, map_location=device)
        encoder.load_state_dict(held["state"])
        keep(**held["record"])
        print(f"kept in {options.weights}: {record['kept']}", flush=True)
        keep(after=measured("after", asked(every)))
        return
    few = every[:: max(1, len(shown) // (options.few or FEW))][: options.few or FEW]
    keep(before=measured("before", asked(few if options.few else every)))
    seen = list(asked(few))
    with torch.no_grad():
        tensors = [picture.tensor(size).to(device) for picture in frames[::APART]]
        apart = [Apart(x, embedding(teacher(x), None)) for x in tensors]
    learned = [x.tensor(max(x.pixels.shape[:2])).to(device) for n, x in enumerate(frames) if n % APART]
    begun = time.perf_counter()
    start = copy.deepcopy(encoder.state_dict())
    best = (missed(encoder, apart), start, "the start")
    print(f"{best[0]:.3e} of the embedding is missed, of {len(apart)} frames", flush=True)
    keep(learned=len(learned), missed_before=best[0], looks=[])
    if device == "cuda":
        torch.set_float32_matmul_precision("high")
    of_step = 0.0
    if not options.steps:
        timed = []
        for steps in (TIMED, TIMED, 2 * TIMED):  # the first is slow, and each looks at the data once before
            now = time.perf_counter()
            learn(copy.deepcopy(encoder), lesson(steps), options.rates[0])
            timed.append(time.perf_counter() - now)
        of_step = max(1e-3, (timed[2] - timed[1]) / TIMED)
        print(f"{of_step:.3f} s a step; {TIMED} take {timed[1]:.1f} s, {2 * TIMED} {timed[2]:.1f} s", flush=True)
        keep(of_step=of_step)
    if options.profile and device == "cuda":
        own_copy = copy.deepcopy(encoder)
        for kernel, ms, count in kernels_of(lambda: learn(own_copy, lesson(TIMED), options.rates[0])):
            print(f"  {ms:9.2f} ms, {count:5d} x {kernel}", flush=True)

    def look(tried: str, step: int) -> None:
        nonlocal best
        error, seconds = missed(encoder, apart), time.perf_counter() - begun
        if error < best[0]:
            best = error, copy.deepcopy(encoder.state_dict()), f"{tried}, step {step}"
        rows = measured(f"{tried}, step {step}, {seconds:.0f} s: {error:.3e} missed; {len(seen)} pictures", seen)
        line = {"try": tried, "step": step, "seconds": seconds, "missed": error, "rows": rows}
        keep(looks=[*record["looks"], line], seconds=seconds, missed_after=best[0], kept=best[2])
        if options.weights is not None:
            torch.save({"state": best[1], "record": record}, options.weights)

    for number, rate in enumerate(options.rates):
        encoder.load_state_dict(start)
        now, tried = time.perf_counter(), f"rate {rate:g}"
        share = (options.seconds - (now - begun)) / (len(options.rates) - number)
        data = lesson(options.steps or max(TIMED, int(share / of_step)))
        data.until = now + share
        data.tell(partial(look, tried), options.tick)
        try:
            print(learn(encoder, data, rate), flush=True)
        except LateError:
            print(f"{tried}: ended by the time, of {data.steps} steps", flush=True)
        look(tried, data.step)
    encoder.load_state_dict(best[1])
    print(f"kept: {best[2]}, {record['missed_before']:.3e} missed before, {best[0]:.3e} after", flush=True)
    keep(after=measured("after", asked(every)))


if __name__ == "__main__":
    main()
