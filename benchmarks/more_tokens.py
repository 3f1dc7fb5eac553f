"""More tokens at linear cost: accuracy of one ViT at patches of 8, 4, 2 and 1 pixels, against what it takes.

    PYTHONPATH=src python benchmarks/more_tokens.py train --data FOLDER/tiny-imagenet-100 --seconds 460
    PYTHONPATH=src python benchmarks/more_tokens.py time          alone on its GPU: microseconds an image
    PYTHONPATH=src python benchmarks/more_tokens.py join FILE...  several records to one, later rows win
    PYTHONPATH=src python benchmarks/more_tokens.py report        table, crossings and figure from both records

`train` decodes the images once; so many processes then take runs from the plan, in its order, and leave out what would
not end in time. A run that the record given with `--after` has already is not done again, and a new record has both.
All runs have one recipe; what a name changes in it is in `CONFIGS`. Times beside others say nothing, therefore `time`:
a forward and backward pass, and a forward pass, of the same model as a CUDA graph in bfloat16, not compiled. Records go
to $OUT (or benchmarks/results), `more_tokens.json` and `more_tokens_time.json`; `--quick`: a toy on the CPU.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import time
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from side_by_side import SIDE, arguments, take_runs, train_all
from torch import Tensor

from cumulant import create_model
from cumulant.bench.provenance import provenance
from cumulant.data.augmentation import Augmentation
from cumulant.style import colour, mark, new_figure, save, styled
from cumulant.train import TrainRecipe

ROOT = Path(__file__).resolve().parents[1]
RESULTS = Path(os.environ.get("OUT") or ROOT / "benchmarks" / "results")
PATCHES = (8, 4, 2, 1)
EPOCHS, IMAGES = 8, 50_000
VIT = "vit_nano_patch4_32"
MODEL: dict[str, Any] = {"embed_dim": 128, "depth": 4, "num_heads": 2, "mlp_ratio": 2, "pool": "gap", "init_std": 0.05}
# 1,024 tokens at first, then 256 and 64: convolutions, and one head in every block.
PYRAMIDS = {
    "small pyramid": {"embed_dim": [32, 64, 128], "depth": [1, 2, 2], "partial_dim": [16, 16, 32]},
    "tiny pyramid": {"embed_dim": [16, 64, 128], "depth": [1, 2, 2], "partial_dim": [16, 16, 32]},
    "flat pyramid": {"embed_dim": [16, 64, 128], "depth": [1, 1, 1], "partial_dim": [16, 16, 32]},
}
PLAIN = ("softmax", "cumulant2", "cumulant3", "cluster16", "cluster64", "rala")


class Config(NamedTuple):
    """What a name changes in the recipe."""

    attention: str
    options: Mapping[str, Any] = MappingProxyType({})  # of the model
    model: str = VIT
    epochs: int = EPOCHS
    patches: tuple[int, ...] = PATCHES


def pyramid(attention: str, shape: str, types: str = "sss") -> Config:
    return Config(attention, {"stem_depth": 1, **PYRAMIDS[shape], "types": list(types)}, "shvit_s1", patches=(2,))


NARROW = {"embed_dim": 64, "depth": 2, "num_heads": 1}
V_CONV = {"attention_extras": {"v_conv": 3}}
CONFIGS = {
    **{name: Config(name) for name in PLAIN},
    "cluster64": Config("cluster64", patches=(4, 2, 1)),
    **{f"{name}+v_conv": Config(name, V_CONV) for name in ("softmax", "cumulant3")},
    "cumulant3, narrow": Config("cumulant3", NARROW, patches=(2,)),
    "cumulant3+v_conv, narrow": Config("cumulant3", {**NARROW, **V_CONV}, patches=(2,)),
    **{f"{name}, {shape}": pyramid(name, shape) for shape in PYRAMIDS for name in ("cumulant3", "softmax")},
    "no attention at 1,024, tiny pyramid": pyramid("cumulant3", "tiny pyramid", "iss"),
    "no attention, tiny pyramid": pyramid("softmax", "tiny pyramid", "iii"),
    **{f"{name}, 2 epochs": Config(name, epochs=2, patches=(1,)) for name in ("softmax", "cumulant2", "cumulant3")},
    **{f"{name}, 24 epochs": Config(name, epochs=24, patches=(4, 2)) for name in ("softmax", "cumulant3")},
}
CONTROL = (3, 4, 5)  # seeds of softmax again: what chance does


def plan() -> list[tuple[str, int, int]]:
    """Name, patch and seed, in the order of what is asked first; long runs begin early."""
    pair = ("softmax", "cumulant3")
    runs = [("softmax", 2, 1), ("cumulant3", 2, 1), ("softmax", 2, CONTROL[0])]  # at 1,024 tokens there was one seed
    runs += [("cumulant3, flat pyramid", 2, seed) for seed in (2, 3)] + [(name, 4, 1) for name in PLAIN[1:3]]
    runs += [("softmax", 2, CONTROL[1]), ("cumulant3", 2, 2), ("softmax, flat pyramid", 2, 0)]
    runs += [(f"cumulant3, {shape}", 2, seed) for seed in (0, 1) for shape in ("tiny pyramid", "flat pyramid")]
    runs += [("softmax", patch, seed) for seed in CONTROL[:2] for patch in (4, 8)]
    runs += [(f"{name}, tiny pyramid", 2, 0) for name in ("no attention", "softmax", "no attention at 1,024")]
    runs += [("cumulant3, small pyramid", 2, 0)]
    runs += [(name, 4, 1) for name in PLAIN[:4]] + [(name, 2, 1) for name in ("cumulant3", "softmax")]
    runs += [("softmax, tiny pyramid", 2, 1), ("cumulant3, tiny pyramid", 2, 2)]
    runs += [(name, patch, seed) for seed in (0, 1, 2) for patch in (4, 8) for name in PLAIN[:4]]
    runs += [("cumulant2", 2, 1)]
    runs += [("softmax", patch, CONTROL[2]) for patch in (4, 8)]
    runs += [(f"{name}+v_conv", patch, 0) for patch in (4, 8) for name in pair]
    runs += [("cumulant3+v_conv", 2, 0), ("cumulant3+v_conv, narrow", 2, 0)]
    runs += [(name, 2, 0) for name in PLAIN] + [("cluster64", 4, 0), ("rala", 8, 0), ("rala", 4, 0)]
    runs += [(f"{name}+v_conv", patch, seed) for seed in (1, 2) for patch in (8, 4) for name in pair]
    runs += [("softmax, 2 epochs", 1, 0), ("cumulant3, 2 epochs", 1, 0), ("cumulant3, narrow", 2, 0)]
    runs += [("softmax+v_conv", 2, 0), ("rala", 8, 1), ("rala", 4, 1), ("cluster16", 2, 1)]
    runs += [("softmax, 24 epochs", 4, 0), ("cumulant3, 24 epochs", 2, 0), ("cumulant3+v_conv", 2, 1)]
    runs += [("cumulant3", 2, 2), ("softmax", 2, 2), ("cumulant2", 2, 2), ("cumulant3", 1, 0), ("softmax", 1, 0)]
    return [run for run in dict.fromkeys(runs) if run[1] in CONFIGS[run[0]].patches]


BATCH = {8: 512, 4: 512, 2: 256, 1: 64}  # of a timed pass
TAKES = {8: 9.0, 4: 24.0, 2: 85.0, 1: 300.0}  # microseconds an image, about: whether a run still fits
SLOW = {"rala": 3.0, "v_conv": 1.15, "narrow": 0.35, "pyramid": 0.3}


def gpu_seconds(name: str, patch: int) -> float:
    """What a run would take alone, about."""
    factor = math.prod(times for word, times in SLOW.items() if word in name)
    factor *= 2.3 if patch == 1 and name.startswith("softmax") else 1
    return TAKES[patch] * factor * IMAGES * CONFIGS[name].epochs / 1e6


def model_options(name: str, patch: int, quick: bool) -> dict[str, Any]:
    config = CONFIGS[name]
    if config.model != VIT:
        return dict(config.options)
    return {**MODEL, **config.options, **({"embed_dim": 16, "depth": 1} if quick else {}), "patch_size": patch}


def recipe(name: str, patch: int, seed: int, quick: bool) -> TrainRecipe:
    return TrainRecipe(
        data="tiny-imagenet-100", image_size=SIDE, mean=(0.480, 0.448, 0.398), std=(0.277, 0.269, 0.282),
        model=CONFIGS[name].model, model_options=model_options(name, patch, quick), attention=CONFIGS[name].attention,
        epochs=1 if quick else CONFIGS[name].epochs,
        optimizer="muon" if CONFIGS[name].model == VIT else "adamw",  # muon moves matrices, and a pyramid has kernels
        batch_size=8 if quick else 512, accumulate=4 if patch == 1 else 1, lr=2e-3, min_lr=1e-5,
        warmup_epochs=0.5 if quick else 1.0, weight_decay=0.05, label_smoothing=0.1, clip=1.0,
        augmentation=Augmentation(flip=0.5, shift=4), precision="fp32" if quick else "bf16",
        compile=not quick and patch == 1,  # a shorter run takes less than to compile it
        in_memory="yes", eval_epochs=CONFIGS[name].epochs, checkpoint_epochs=0,
        seed=seed,
    )  # fmt: skip


def started(settings: argparse.Namespace) -> None:
    before = json.loads(Path(settings.after).read_text())["runs"] if settings.after else []
    done = [(run["attention"], run["patch"], run["seed"]) for run in before]
    todo = [[*run] for run in plan() if run not in done and (settings.only is None or run[0] in settings.only)]

    def write(runs: list[dict[str, Any]]) -> None:
        recorded("more_tokens", runs=before + runs, epochs=EPOCHS, model=MODEL)

    runs = before + train_all(__file__, settings, todo, write)
    for run in sorted(runs, key=lambda run: (-run["patch"], run["attention"], run["seed"])):
        print(f"{run['attention']:30} patch {run['patch']}  seed {run['seed']}  top-1 {run['top1']:.2%}  "
              f"{run['seconds']:.0f} s")  # fmt: skip


def told(name: str, patch: int, seed: int) -> dict[str, Any]:
    control = name == "softmax" and seed in CONTROL
    return {"attention": name, "patch": patch, "seed": seed, "control": control}


def worked(settings: argparse.Namespace) -> None:
    take_runs(settings, recipe, lambda name, patch, seed: gpu_seconds(name, patch), told)


def timed(settings: argparse.Namespace) -> None:
    """Microseconds an image of every mechanism and patch, training (forward and backward) and answering."""
    device, rows = "cpu" if settings.quick else "cuda", []
    for patch in (4, 2, 1, 8):  # the likeliest to cross first: a job may be stopped
        for name in [name for name, config in CONFIGS.items() if patch in config.patches and config.epochs == EPOCHS]:
            if settings.only is not None and name not in settings.only:
                continue
            torch.manual_seed(0)
            config = CONFIGS[name]
            model = create_model(config.model, attention=config.attention, num_classes=100, img_size=SIDE,
                                 device=device, **model_options(name, patch, settings.quick))  # fmt: skip
            count = 2 if settings.quick else BATCH[patch]
            images, labels = torch.randn(count, 3, SIDE, SIDE, device=device), torch.zeros(count, device=device).long()
            if config.model != VIT:  # convolutions
                model, images = (one.to(memory_format=torch.channels_last) for one in (model, images))
            try:
                row = {"attention": name, "patch": patch, "tokens": (SIDE // patch) ** 2, "batch": count,
                       **passes(model, images, labels)}  # fmt: skip
            except RuntimeError as error:
                row = {"attention": name, "patch": patch, "failure": str(error).splitlines()[0]}
            rows.append(row)
            print(row, flush=True)
            recorded("more_tokens_time", rows=rows, model=MODEL)


def passes(model: torch.nn.Module, images: Tensor, labels: Tensor) -> dict[str, Any]:
    """Microseconds an image, of both kinds of pass."""

    def both() -> None:
        for parameter in model.parameters():
            parameter.grad = None
        with torch.autocast(images.device.type, torch.bfloat16):
            loss = torch.nn.functional.cross_entropy(model(images).float(), labels)
        loss.backward()

    @torch.no_grad()
    def answer() -> None:
        with torch.autocast(images.device.type, torch.bfloat16):
            model(images)

    model.train()
    training, recorded_too = taken_by(both, images.device)
    model.eval()
    if hasattr(model, "fuse"):
        model.fuse()
    answering, _ = taken_by(answer, images.device)
    return {"train_us": training / len(images), "infer_us": answering / len(images), "graph": recorded_too}


def taken_by(call: Callable[[], None], device: torch.device) -> tuple[float, bool]:
    """Median microseconds of a call, replayed as a CUDA graph where it can be one."""
    if device.type != "cuda":
        start = time.perf_counter()
        call()
        return 1e6 * (time.perf_counter() - start), False
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(2):
            call()
    torch.cuda.synchronize()
    graph, run = torch.cuda.CUDAGraph(), call
    try:
        with torch.cuda.graph(graph, stream=stream):
            call()
        run = graph.replay
    except RuntimeError:
        torch.cuda.synchronize()
    samples = []
    for _ in range(7):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        run()
        end.record()
        end.synchronize()
        samples.append(1e3 * begin.elapsed_time(end))
    return statistics.median(samples[2:]), run is not call


def recorded(name: str, **content: Any) -> None:
    """Write a record; its name is that of the script, and of the step after an underscore."""
    script, step = name.removesuffix("_time"), "time" if name.endswith("_time") else "train"
    origin = provenance(f"python benchmarks/{script}.py {step}")
    if torch.cuda.is_available():
        origin["machine"]["gpu"] = torch.cuda.get_device_name()
    RESULTS.mkdir(parents=True, exist_ok=True)
    (RESULTS / f"{name}.json").write_text(json.dumps({**origin, **content}, indent=1))


# The report.

Point = tuple[float, float]


def crossing(first: list[Point], second: list[Point]) -> str:
    """Where two curves (time, accuracy) cross, straight lines between points over the logarithm of the time."""
    low, high = max(first[0][0], second[0][0]), min(first[-1][0], second[-1][0])
    if low >= high:
        return "have no time in common"
    grid = [low * (high / low) ** (i / 400) for i in range(401)]
    ahead = [at(second, x) - at(first, x) for x in grid]
    turns = [x for x, a, b in zip(grid[1:], ahead, ahead[1:], strict=False) if (a > 0) != (b > 0)]
    if turns:
        return "cross at " + ", ".join(f"{x:.3g}" for x in turns)
    return f"do not cross from {low:.3g} to {high:.3g}: the second is {'above' if ahead[0] > 0 else 'below'} throughout"


def at(curve: list[Point], x: float) -> float:
    for (x0, y0), (x1, y1) in pairwise(curve):
        if x <= x1 * (1 + 1e-9):
            return y0 + (y1 - y0) * math.log(x / x0) / math.log(x1 / x0)
    return curve[-1][1]


def joined(settings: argparse.Namespace) -> None:
    """One record of several of a kind; every run keeps the commit that it was measured on."""
    parts = [json.loads(Path(file).read_text()) for file in settings.files]
    kind = "runs" if "runs" in parts[0] else "rows"
    every = {}
    for part in parts:
        for one in [one for one in part[kind] if one["attention"] in CONFIGS]:
            every[one["attention"], one["patch"], one.get("seed")] = {"commit": part["commit"], **one}
    name = "more_tokens" if kind == "runs" else "more_tokens_time"
    known = {key: value for key, value in parts[-1].items() if key != kind}
    (RESULTS / f"{name}.json").write_text(json.dumps({**known, kind: list(every.values())}, indent=1))


def report(settings: argparse.Namespace) -> None:
    folder = ROOT / "benchmarks" / "results"
    runs = json.loads((folder / "more_tokens.json").read_text())["runs"]
    rows = json.loads((folder / "more_tokens_time.json").read_text())["rows"]
    cost = {(row["attention"], row["patch"]): row for row in rows if "failure" not in row}
    heads = ["attention", "patch", "tokens", "top-1, %", "seeds", "train, µs an image", "training, s"]
    print(f"| {' | '.join(heads)} | answer, µs an image |")
    print("|---|---|---|---|---|---|---|---|")
    curves: dict[str, list[tuple[int, float, float, float]]] = {}
    for name, config in CONFIGS.items():
        for patch in config.patches:
            own = [100 * run["top1"] for run in runs
                   if (run["attention"], run["patch"], run["control"]) == (name, patch, False)]  # fmt: skip
            one = cost.get((name if config.epochs == EPOCHS else config.attention, patch))
            if one is None or (not own and name not in PLAIN):
                continue
            spread = f" ± {statistics.stdev(own):.1f}" if len(own) > 1 else ""
            told = f"{statistics.mean(own):.1f}{spread}" if own else "not trained"
            total = one["train_us"] * IMAGES * config.epochs / 1e6
            cells = [name, patch, f"{one['tokens']:,}", told, len(own), f"{one['train_us']:.1f}", f"{total:.0f}"]
            print(f"| {' | '.join(map(str, cells))} | {one['infer_us']:.1f} |")
            if own and config.epochs == EPOCHS:
                curves.setdefault(name, []).append((patch, total, one["infer_us"], statistics.mean(own)))
    for patch in (8, 4, 2):
        first, again = ([100 * run["top1"] for run in runs if (run["attention"], run["patch"]) == ("softmax", patch)
                         and run["control"] is control] for control in (False, True))  # fmt: skip
        if again:
            apart = abs(statistics.mean(again) - statistics.mean(first))
            print(f"A/A: softmax at patch {patch}: {len(again)} others {statistics.mean(again):.1f} %, {apart:.1f} off")
    for column, what in ((1, "training time, s"), (2, "time of an answer, µs")):
        base = [(point[column], point[3]) for point in curves["softmax"]]
        for name in [name for name in curves if name != "softmax"]:
            curve = [(point[column], point[3]) for point in curves[name]]
            if len(curve) > 1:
                print(f"{what}: the curves of softmax and {name} {crossing(base, curve)}")
            else:
                (x, y), within = curve[0], base[0][0] <= curve[0][0] <= base[-1][0]
                beside = f"softmax {at(base, x):.1f} % for the same" if within else "softmax has no such time"
                print(f"{what}: {name} {y:.1f} % for {x:.3g}, {beside}")
    if not settings.quick:
        drawn(curves, ROOT / "docs" / "figures" / "more_tokens")


@styled
def drawn(curves: dict[str, list[tuple[int, float, float, float]]], path: Path) -> None:
    figure, axes = new_figure(1, 2, (10, 4.2), sharey=True)
    for axis, column, label in ((axes[0, 0], 1, "training, s on an H200"), (axes[0, 1], 2, "answer, µs an image")):
        alone = iter("*PXdv<>")  # other networks, a point each: their names stand in the legend of the right panel
        for name, points in curves.items():
            x, y = [point[column] for point in points], [point[3] for point in points]
            if len(points) == 1:
                shown = {"marker": next(alone), "markersize": 9, "markerfacecolor": "white", "linestyle": "none"}
                axis.plot(x, y, color=colour(name), label=f"{name}, {points[0][0]} px" * (column == 2), **shown)
                continue
            axis.plot(x, y, color=colour(name), marker=mark(name), label=name * (column == 1))
            if name in ("softmax", "rala"):  # the others lie beside softmax
                for (patch, *_), a, b in zip(points, x, y, strict=True):
                    axis.annotate(f"{patch} px", (a, b), xytext=(5, 5), textcoords="offset points", fontsize=8)
        axis.set(xlabel=label, xscale="log")
        axis.grid(alpha=0.25)
    axes[0, 0].set_ylabel("top-1, %")
    axes[0, 0].legend()
    axes[0, 1].legend(fontsize=7, loc="lower right")
    save(figure, path, ("svg",))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "one", "time", "join", "report"))
    parser.add_argument("files", nargs="*", help="records to join")
    arguments(parser)
    parser.add_argument("--only", nargs="+", choices=list(CONFIGS), help="these alone")
    settings = parser.parse_args()
    {"train": started, "one": worked, "time": timed, "join": joined, "report": report}[settings.what](settings)


if __name__ == "__main__":
    main()
