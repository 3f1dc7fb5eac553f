"""A ViT trained with softmax, converted: accuracy after plain swap, hybrid, and distillation for 1, 5 and 20 epochs.

    PYTHONPATH=src python benchmarks/convert_vit.py WEIGHTS DATA            about 4 minutes on an H200
    PYTHONPATH=src python benchmarks/convert_vit.py WEIGHTS DATA --quick    a few steps on few images, on any machine
    PYTHONPATH=src python benchmarks/convert_vit.py WEIGHTS DATA --around   around 0 and around the mean query, and a
        short distillation layer by layer, on 20 training images of each class: 10 minutes on one CPU core

WEIGHTS is what `cumulant train tiny-imagenet-100` wrote (any run of it with softmax), DATA the folder of the data set.
Distillation uses the images of the training part with the augmentation of the recipe in WEIGHTS, the data in device
memory, and no labels. Learning rates are compared by the loss of the 5-epoch runs, which is one of training; test
images are looked at for the table only. Prints each row as it comes and writes benchmarks/results/convert-vit.json
(and $OUT/convert-vit.json where OUT is set) after each.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cumulant.bench.provenance import provenance
from cumulant.conversion import DistillRecipe, convert, diagnose, distill
from cumulant.conversion.distill_data import Images
from cumulant.data import open_source
from cumulant.data.part import Source
from cumulant.train import predict
from cumulant.train.build import augment_of, loader_of
from cumulant.train.checkpoint import load, read_header
from cumulant.train.processes import Processes
from cumulant.train.recipe_files import from_json

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
SWAPS = ("cumulant1", "linear", "cumulant2", "cumulant3", "cluster4", "cluster16")


class Some:
    """The first `count` items of every class."""

    views = 1

    def __init__(self, part: Any, count: int) -> None:
        self.part = part
        self.at = torch.cat([(part.labels == label).nonzero()[:count, 0] for label in part.labels.unique()])
        self.labels = part.labels[self.at]

    def __len__(self) -> int:
        return len(self.at)

    def name(self, index: int) -> str:
        return self.part.name(int(self.at[index]))

    def decode(self, index: int, size: int, seed: int | None = None) -> Tensor:
        return self.part.decode(int(self.at[index]), size, seed)


class Study:
    """The teacher, the data on the device, and the rows found so far."""

    def __init__(self, weights: str, data: str, quick: bool, minutes: float, around: bool = False) -> None:
        self.began, self.limit, self.quick = time.perf_counter(), 60 * minutes, quick
        self.recipe = from_json(read_header(weights)["recipe"])
        self.batch = 40 if quick else 64 if around else 1024
        self.name = "convert-vit-around.json" if around else "convert-vit.json"
        precision = "bf16" if DEVICE.type == "cuda" else "fp32"
        self.recipe = replace(self.recipe, batch_size=self.batch, precision=precision, compile=False, workers=None)
        source = open_source(data)
        if quick or around:
            train, test = (
                (Some(source.train, 2), Some(source.test, 1)) if quick else (Some(source.train, 20), source.test)
            )
            source = Source(source.name, source.kind, train, test, source.classes)
        self.source = source
        self.images = Images(
            source, self.batch, size=self.recipe.image_size, augmentation=self.recipe.augmentation,
            mean=self.recipe.mean, std=self.recipe.std, device=DEVICE,
        )  # fmt: skip
        self.augment = augment_of(self.recipe, len(source.classes))
        self.test = loader_of(self.recipe, source.test, Processes(DEVICE), None)
        self.teacher = load(weights, device=DEVICE).float().eval()
        pixels = next(iter(self.images.loader.epoch(0)))[0][: 32 if quick else 256]
        self.few = [self.augment.evaluate(pixels)]  # training images, for choosing layers
        self.result: dict[str, Any] = {
            **provenance("python benchmarks/convert_vit.py WEIGHTS DATA" + " --around" * around + " --quick" * quick),
            "device": torch.cuda.get_device_name() if DEVICE.type == "cuda" else "cpu",
            "train_images": len(source.train), "test_images": len(source.test), "batch_size": self.batch,
            "precision": precision, "rows": [],
        }  # fmt: skip
        print(f"data and teacher after {self.seconds():.0f} s", flush=True)

    def seconds(self) -> float:
        return time.perf_counter() - self.began

    def row(self, label: str, model: nn.Module, **more: Any) -> None:
        """Accuracy of the model, printed and written."""
        found = predict(
            model, self.test, self.augment, classes=len(self.source.classes), team=Processes(DEVICE),
            precision=self.recipe.precision,
        )  # fmt: skip
        row = {"label": label, "top1": found.top(1), "top5": found.top(5), **more, "clock": self.seconds()}
        self.result["rows"].append(row)
        teacher = self.result["rows"][0]["top1"]
        said = "  ".join(f"{key} {value:.4g}" for key, value in more.items() if isinstance(value, float))
        print(
            f"{label:48s} top-1 {row['top1']:.2%} ({row['top1'] - teacher:+.2%})  top-5 {row['top5']:.2%}  {said}",
            flush=True,
        )
        self.write()

    def write(self) -> None:
        text = json.dumps(self.result, indent=1)
        if not self.quick:
            Path("benchmarks/results", self.name).write_text(text)
        if "OUT" in os.environ:
            Path(os.environ["OUT"], self.name).write_text(text)

    def converted(self, attention: str, layers: Any = None) -> nn.Module:
        model = copy.deepcopy(self.teacher)
        convert(model, attention, layers=layers, data=self.few, force=True)
        return model

    def distilled(self, label: str, attention: str, layers: Any, epochs: int, lr: float) -> float:
        """A row after distillation; returns the last training loss."""
        expected = epochs * self.result.get("seconds_an_epoch", 0.0)
        if self.seconds() + expected > self.limit:
            print(f"{label}, {epochs} epochs: left out, it would take {expected:.0f} s of a time that is over")
            self.result.setdefault("left_out", []).append(f"{label}, {epochs} epochs")
            return float("inf")
        model = self.converted(attention, layers)
        precision: Any = "bf16" if DEVICE.type == "cuda" else "fp32"
        how = DistillRecipe(epochs=epochs, lr=lr, precision=precision)
        found = distill(model, self.teacher, self.images, how)
        self.result["seconds_an_epoch"] = found.seconds / epochs
        missed = [sum(pair[at] for pair in found.layers.values()) / len(found.layers) for at in (0, 1)]
        loss = found.losses["answers"][1]
        self.row(
            f"{label}, {epochs} epochs", model, epochs=epochs, lr=lr, loss=loss, missed_before=missed[0],
            missed_after=missed[1], seconds=found.seconds, attention=attention, replaced=len(found.layers),
        )  # fmt: skip
        return loss


def around(study: Study) -> None:
    """Around 0 and around the mean query: all layers swapped; then each trained to give what its original gave."""
    study.row("softmax, the teacher", study.teacher)
    names = [f"cumulant{order}{where}" for order in (2, 3) for where in ("", "+around=mean")]
    if not study.quick:
        names.append("cumulant3+around=mean+apart=0")
    for name in names:
        study.row(f"all layers {name}, plain swap", study.converted(name), attention=name)
    for name in names[2:4]:
        model = study.converted(name)
        found = distill(model, study.teacher, study.images, DistillRecipe(epochs=1, layer_share=1.0))
        missed = [sum(pair[at] for pair in found.layers.values()) / len(found.layers) for at in (0, 1)]
        study.row(
            f"all layers {name}, {found.steps} steps by layer", model, attention=name, steps=found.steps,
            missed_before=missed[0], missed_after=missed[1], seconds=found.seconds,
        )  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("weights")
    parser.add_argument("data")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--around", action="store_true", help="compare the points to expand around, on less data")
    parser.add_argument("--minutes", type=float, default=4.0, help="runs that would end later are left out")
    parser.add_argument("--epochs", type=int, nargs="*", default=[1, 5, 20])
    parser.add_argument("--rates", type=float, nargs="*", default=[2.5e-4, 5e-4, 1e-3], help="highest learning rates")
    options = parser.parse_args()
    epochs, rates = ([1], options.rates[:1]) if options.quick else (options.epochs, options.rates)
    study = Study(options.weights, options.data, options.quick, options.minutes, options.around)
    if options.around:
        around(study)
        return
    study.row("softmax, the teacher", study.teacher)
    found = diagnose(study.teacher, study.few)
    study.result["diagnosis"] = found.to_json()
    print(found.table(), flush=True)
    for name in SWAPS[2:4] if options.quick else SWAPS:
        study.row(f"all layers {name}, plain swap", study.converted(name), attention=name)
    depth = len(found.layers)
    kept = depth // 4
    most = {name: {"attention": "cumulant3"} for name in found.best(depth - kept)}
    study.result["kept"] = [layer.name for layer in found.layers if layer.name not in most]
    for count in (depth // 2, depth - kept):
        chosen = {name: {"attention": "cumulant3"} for name in found.best(count)}
        study.row(f"the {count} safest of {depth} layers cumulant3, plain swap", study.converted("cumulant3", chosen))

    # The middle length chooses the rate for the others, by its training loss.
    probe = sorted(epochs)[len(epochs) // 2]
    losses = {lr: study.distilled("all layers cumulant3, distilled", "cumulant3", None, probe, lr) for lr in rates}
    best = min(losses, key=losses.__getitem__)
    study.result["rate"] = best
    rest = sorted((n for n in epochs if n != probe), reverse=True)
    hybrid = f"{depth - kept} of {depth} layers cumulant3, distilled"
    for count in rest:
        study.distilled("all layers cumulant3, distilled", "cumulant3", None, count, best)
    for count in [*rest, probe]:
        study.distilled(hybrid, "cumulant3", most, count, best)
    for name in () if options.quick else ("cumulant2", "cluster4"):
        study.distilled(f"all layers {name}, distilled", name, None, max(epochs), best)
    study.write()
    print(f"{study.seconds():.0f} s in all", flush=True)


if __name__ == "__main__":
    main()
