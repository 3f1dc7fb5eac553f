"""What a class token that stays softmax is worth when the other rows of a trained ViT are converted.

    PYTHONPATH=src python benchmarks/class_tokens.py digits --epochs 20                     minutes on a core
    PYTHONPATH=src python benchmarks/class_tokens.py digits --epochs 20 --transformers      a ViT of transformers
    PYTHONPATH=src python benchmarks/class_tokens.py cifar10 --data FOLDER --epochs 60

Trains the recipe with softmax and a class token, swaps every layer, and compares the class token as the mechanism has
it (apart=0) with that of softmax (what `convert` does unasked): accuracy, and how far the probabilities moved,
KL(softmax || converted). Prints the mean over the seeds; writes class_tokens_RECIPE.json, with every seed, to $OUT or
benchmarks/results.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from cumulant.bench.provenance import provenance
from cumulant.conversion import convert
from cumulant.data import open_source
from cumulant.train import TrainRecipe, predict, read_recipe, train
from cumulant.train.build import augment_of, loader_of
from cumulant.train.checkpoint import load
from cumulant.train.processes import Processes

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
MECHANISMS = ("cumulant2", "cumulant3", "cumulant2+around=mean", "cumulant3+around=mean")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe")
    parser.add_argument("--data")
    parser.add_argument("--epochs", type=int, required=True)
    parser.add_argument("--transformers", action="store_true", help="its ViT, trained by a plain loop")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    recipe = replace(read_recipe(given.recipe).lasting(given.epochs), drop_path=0.0)
    options = {**recipe.model_options, "pool": "cls"}
    recipe = replace(recipe, data=given.data or recipe.data, model_options=options)
    rows = [row for seed in given.seeds for row in swapped(replace(recipe, seed=seed), given.transformers)]
    for name in dict.fromkeys(row["attention"] for row in rows):
        its = [row for row in rows if row["attention"] == name]
        top1, moved = (sum(row[key] for row in its) / len(its) for key in ("top1", "kl"))
        print(f"{name:36} top-1 {top1:.1%}  KL {moved:.3f}")
    seeds = " ".join(map(str, given.seeds))
    theirs = " --transformers" if given.transformers else ""
    about = f"python benchmarks/class_tokens.py {given.recipe} --epochs {given.epochs} --seeds {seeds}{theirs}"
    record = {**provenance(about), "device": str(DEVICE), "rows": rows}
    name = f"class_tokens_{given.recipe}{theirs.replace(' --', '_')}.json"
    path = Path(os.environ.get("OUT", "benchmarks/results"), name)
    path.write_text(json.dumps(record, indent=1) + "\n")


def swapped(recipe: TrainRecipe, theirs: bool) -> list[dict[str, Any]]:
    """Accuracy of one trained model and of its conversions."""
    source = open_source(recipe.data)
    recipe, augment = replace(recipe, compile=False), augment_of(recipe, len(source.classes))
    loader = loader_of(recipe, source.test, Processes(DEVICE), None)
    pixels = augment.evaluate(next(iter(loader.epoch(0)))[0][:64])
    if theirs:
        images = loader_of(recipe, source.train, Processes(DEVICE), None)
        teacher: nn.Module = trained([(augment.evaluate(x), y) for x, y, *_ in images.epoch(0)], recipe)
    else:
        with tempfile.TemporaryDirectory() as folder:
            train(recipe, folder, device=DEVICE)
            teacher = load(folder, device=DEVICE).float().eval()

    def said(model: nn.Module) -> Any:
        model = Logits(model) if theirs else model
        return predict(model, loader, augment, classes=len(source.classes), team=Processes(DEVICE))

    exact = said(teacher)
    rows = [{"attention": "softmax", "seed": recipe.seed, "top1": exact.top(1), "kl": 0.0}]
    whole = exact.probabilities.double().clamp_min(1e-12)
    for name in (f"{mechanism}{apart}" for mechanism in MECHANISMS for apart in ("+apart=0", "")):
        model = copy.deepcopy(teacher)
        convert(model, name, data=pixels, force=True)
        found = said(model)
        moved = (whole * (whole / found.probabilities.double().clamp_min(1e-12)).log()).sum(-1).mean().item()
        rows.append({"attention": name, "seed": recipe.seed, "top1": found.top(1), "kl": moved})
        print(rows[-1], flush=True)
    return rows


class Logits(nn.Module):
    """A classifier of transformers that says its logits."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, pixels: Tensor) -> Tensor:
        return self.model(pixel_values=pixels).logits


def trained(batches: list[tuple[Tensor, Tensor]], recipe: TrainRecipe) -> nn.Module:
    """A ViT of transformers in the size of vit_nano_patch2_8, with AdamW and a cosine; no augmentation."""
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 64, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 256}
    torch.manual_seed(recipe.seed)
    kind = {"image_size": recipe.image_size, "patch_size": 2, "num_labels": 10, "initializer_range": 0.1}
    model = ViTForImageClassification(ViTConfig(**sizes, **kind)).to(DEVICE)
    optimizer = torch.optim.AdamW(model.parameters(), recipe.lr, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.epochs * len(batches))
    for _ in range(recipe.epochs):
        for at in torch.randperm(len(batches)).tolist():
            pixels, labels = (x.to(DEVICE) for x in batches[at])
            order = torch.randperm(len(labels))
            loss = nn.functional.cross_entropy(model(pixel_values=pixels[order]).logits, labels[order])
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), recipe.clip)
            optimizer.step()
            schedule.step()
    return model.eval()


if __name__ == "__main__":
    main()
