"""What a class token that stays softmax is worth when the other rows of a trained ViT are converted.

    PYTHONPATH=src python benchmarks/class_tokens.py digits --epochs 20                     minutes on a core
    PYTHONPATH=src python benchmarks/class_tokens.py cifar10 --data FOLDER --epochs 60

Trains the recipe with softmax and a class token, swaps every layer, and compares the class token as the mechanism has
it (apart=0) with that of softmax (apart=1): accuracy, and how far the probabilities moved, KL(softmax || converted).
Prints the mean over the seeds; writes class_tokens_RECIPE.json, with every seed, to $OUT or benchmarks/results.
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
from torch import nn

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
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    given = parser.parse_args()
    recipe = replace(read_recipe(given.recipe).lasting(given.epochs), drop_path=0.0)
    options = {**recipe.model_options, "pool": "cls"}
    recipe = replace(recipe, data=given.data or recipe.data, model_options=options)
    rows = [row for seed in given.seeds for row in swapped(replace(recipe, seed=seed))]
    for name in dict.fromkeys(row["attention"] for row in rows):
        its = [row for row in rows if row["attention"] == name]
        top1, moved = (sum(row[key] for row in its) / len(its) for key in ("top1", "kl"))
        print(f"{name:36} top-1 {top1:.1%}  KL {moved:.3f}")
    seeds = " ".join(map(str, given.seeds))
    about = f"python benchmarks/class_tokens.py {given.recipe} --epochs {given.epochs} --seeds {seeds}"
    record = {**provenance(about), "device": str(DEVICE), "rows": rows}
    path = Path(os.environ.get("OUT", "benchmarks/results"), f"class_tokens_{given.recipe}.json")
    path.write_text(json.dumps(record, indent=1) + "\n")


def swapped(recipe: TrainRecipe) -> list[dict[str, Any]]:
    """Accuracy of one trained model and of its conversions."""
    with tempfile.TemporaryDirectory() as folder:
        train(recipe, folder, device=DEVICE)
        teacher = load(folder, device=DEVICE).float().eval()
    source = open_source(recipe.data)
    recipe, augment = replace(recipe, compile=False), augment_of(recipe, len(source.classes))
    loader = loader_of(recipe, source.test, Processes(DEVICE), None)
    pixels = augment.evaluate(next(iter(loader.epoch(0)))[0][:64])

    def said(model: nn.Module) -> Any:
        return predict(model, loader, augment, classes=len(source.classes), team=Processes(DEVICE))

    exact = said(teacher)
    rows = [{"attention": "softmax", "seed": recipe.seed, "top1": exact.top(1), "kl": 0.0}]
    whole = exact.probabilities.double().clamp_min(1e-12)
    for name in (f"{mechanism}+apart={apart}" for mechanism in MECHANISMS for apart in (0, 1)):
        model = copy.deepcopy(teacher)
        convert(model, name, data=pixels, force=True)
        found = said(model)
        moved = (whole * (whole / found.probabilities.double().clamp_min(1e-12)).log()).sum(-1).mean().item()
        rows.append({"attention": name, "seed": recipe.seed, "top1": found.top(1), "kl": moved})
        print(rows[-1], flush=True)
    return rows


if __name__ == "__main__":
    main()
