"""The vision layers over softmax and over cumulant3 in one ViT: parameters, multiply-adds, time and accuracy.

    OMP_NUM_THREADS=1 python benchmarks/vision_layers.py count                  parameters, multiply-adds, one core
    PYTHONPATH=src python benchmarks/vision_layers.py time                      alone on a GPU, microseconds an image
    PYTHONPATH=src python benchmarks/vision_layers.py train --data FOLDER/tiny-imagenet-100 --seconds 460

Tiny-ImageNet-100 (64 pixels) in patches of 8: 65 tokens with the class token, width 128, 4 blocks, 4 heads. One recipe
for all; control runs are plain layers with other seeds. `count` also has the throughput of forward passes of 8 on one
core: the median of interleaved rounds, over that of plain softmax in the same round. `train` runs side by side (see
side_by_side.py) and says no time; `time` is that of more_tokens.py: forward with backward, and forward, as CUDA graphs
in bfloat16. Records are vision_layers.json, vision_layers_time.json and vision_layers_train.json in $OUT or
benchmarks/results; `python -m tools.zoo_page` puts them on docs/layers/index.md. `--quick`: a toy on the CPU.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from more_tokens import passes
from side_by_side import SIDE, arguments, take_runs, train_all

from cumulant import create_model
from cumulant.bench.provenance import provenance
from cumulant.bench.work import WorkCounter
from cumulant.data.augmentation import Augmentation
from cumulant.train import TrainRecipe

RESULTS = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
LAYERS = {
    "multihead": None, "moh": "moh", "biformer": "biformer+regions=4+top=4", "gda": "gda+ratio=1",
    "complexformer": "complexformer+scale=none", "gaam": "gaam", "ia_red2": "ia_red2", "lama": "lama",
    "sqa": "sqa+variant=lsqa+query_heads=2+key_heads=1", "sparsifiner": "sparsifiner+block=16",
}  # fmt: skip
ALONE = ("lama",)  # layers that are over no mechanism
ATTENTIONS = ("softmax", "cumulant3")
VIT = "vit_nano_patch4_32"
MODEL: dict[str, Any] = {"patch_size": 8, "embed_dim": 128, "depth": 4, "num_heads": 4, "mlp_ratio": 2}
EPOCHS, BATCH, ROUNDS = 8, 512, 31
SEEDS = (1, 2, 3)  # of plain layers again: what chance does
TAKES = {"moh": 20, "biformer": 30, "gaam": 25, "sparsifiner": 18}  # microseconds an image alone, about; 12 else


def pairs() -> list[tuple[str, str]]:
    return [
        (name, attention) for attention in ATTENTIONS for name in LAYERS if attention == "softmax" or name not in ALONE
    ]


def options(name: str, quick: bool) -> dict[str, Any]:
    layer = {} if LAYERS[name] is None else {"layer": LAYERS[name]}
    return {**MODEL, "init_std": 0.05, **({"embed_dim": 32, "depth": 1} if quick else {}), **layer}


def made(name: str, attention: str, quick: bool = False, **given: Any) -> torch.nn.Module:
    return create_model(VIT, attention=attention, num_classes=100, img_size=SIDE, **options(name, quick), **given)


def recipe(name: str, attention: str, seed: int, quick: bool) -> TrainRecipe:
    return TrainRecipe(
        data="tiny-imagenet-100", image_size=SIDE, mean=(0.480, 0.448, 0.398), std=(0.277, 0.269, 0.282),
        model=VIT, model_options=options(name, quick), attention=attention, epochs=1 if quick else EPOCHS,
        optimizer="muon", batch_size=8 if quick else BATCH, lr=2e-3, min_lr=1e-5, warmup_epochs=0.5 if quick else 1.0,
        weight_decay=0.05, label_smoothing=0.1, clip=1.0, augmentation=Augmentation(flip=0.5, shift=4),
        precision="fp32" if quick else "bf16", in_memory="yes", eval_epochs=EPOCHS, checkpoint_epochs=0, seed=seed,
    )  # fmt: skip


def plan() -> list[list[Any]]:
    """Layer, mechanism and seed: every pair once, then the control, then second seeds, as far as the time goes.

    Long runs begin early; what all are compared with is the first.
    """
    base = [["multihead", attention, 0] for attention in ATTENTIONS]
    runs = base + sorted(([*pair, 0] for pair in pairs() if pair[0] != "multihead"), key=lambda run: -gpu_seconds(*run))
    runs += [["multihead", attention, seed] for seed in SEEDS for attention in ATTENTIONS]
    return runs + [[*pair, 1] for pair in pairs() if pair[0] != "multihead"]


def gpu_seconds(name: str, attention: str, seed: int) -> float:
    return TAKES.get(name, 12) * 50_000 * EPOCHS / 1e6


def told(name: str, attention: str, seed: int) -> dict[str, Any]:
    return {"layer": LAYERS[name] or name, "attention": attention, "seed": seed}


def write(name: str, command: str, **content: Any) -> None:
    origin = provenance(f"python benchmarks/vision_layers.py {command}")
    if torch.cuda.is_available():
        origin["machine"]["gpu"] = torch.cuda.get_device_name()
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({**origin, **content}, indent=1) + "\n", encoding="utf-8")


@torch.no_grad()
def count(settings: argparse.Namespace) -> None:
    rows: list[dict[str, Any]] = []
    models, one, some = [], torch.randn(1, 3, SIDE, SIDE), torch.randn(8, 3, SIDE, SIDE)
    for name, attention in pairs():
        model = made(name, attention, settings.quick).eval()
        backend = torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH)  # whose products are counted
        with backend, WorkCounter() as counter:
            model(one)
        row = {"layer": LAYERS[name] or name, "attention": attention}
        rows.append({**row, "parameters": sum(x.numel() for x in model.parameters()), "work": counter.work.total})
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
    write("vision_layers", "count", model=MODEL, rows=rows)


def measure(settings: argparse.Namespace) -> None:
    device, rows = "cpu" if settings.quick else "cuda", []
    for name, attention in pairs():
        torch.manual_seed(0)
        count = 2 if settings.quick else BATCH
        images, labels = torch.randn(count, 3, SIDE, SIDE, device=device), torch.zeros(count, device=device).long()
        row: dict[str, Any] = {"layer": LAYERS[name] or name, "attention": attention, "batch": count}
        try:
            row |= passes(made(name, attention, settings.quick, device=device), images, labels)
        except RuntimeError as error:
            row["failure"] = str(error).splitlines()[0]
        rows.append(row)
        print(row, flush=True)
        write("vision_layers_time", "time", model=MODEL, rows=rows)


def start(settings: argparse.Namespace) -> None:
    before = json.loads(Path(settings.after).read_text())["runs"] if settings.after else []
    done = [(run["layer"], run["attention"], run["seed"]) for run in before]
    wanted = settings.only or [*LAYERS]
    todo = [run for run in plan() if run[0] in wanted and tuple(told(*run).values()) not in done]

    def record(runs: list[dict[str, Any]]) -> None:
        write("vision_layers_train", "train", model=MODEL, epochs=EPOCHS, runs=before + runs)

    for run in before + train_all(__file__, settings, todo, record):
        print(f"{run['layer']:45} {run['attention']:10} seed {run['seed']}  {run['top1']:.2%}  {run['seconds']:.0f} s")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    work = {"count": count, "time": measure, "train": start,
            "one": lambda settings: take_runs(settings, recipe, gpu_seconds, told)}  # fmt: skip
    parser.add_argument("what", choices=work)
    arguments(parser)
    parser.add_argument("--only", nargs="+", choices=list(LAYERS), help="train these layers alone")
    settings = parser.parse_args()
    work[settings.what](settings)


if __name__ == "__main__":
    main()
