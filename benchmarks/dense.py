"""Dense prediction at growing resolution: mIoU and time of a segmenter from 256 to 4,096 pixels.

    PYTHONPATH=src python benchmarks/dense.py train      scenes of 256 pixels, then tested on scenes of all sizes
    PYTHONPATH=src python benchmarks/dense.py time       alone on its GPU: milliseconds an image and peak memory
    PYTHONPATH=src python benchmarks/dense.py report     table and figure from both records

The scenes are those of `cumulant.data.digits`: scikit-learn's digits scattered over coloured grounds; a larger scene
has more digits, not larger ones. One ViT with patches of 8 pixels: 1,024 tokens at 256 pixels, 262,144 at 4,096. Times
are of one image in bfloat16 as a CUDA graph, not compiled. Records go to $OUT (or benchmarks/results), `dense.json` and
`dense_time.json`; `--quick` is a toy on the CPU.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from typing import Any

import torch
from more_tokens import ROOT, recorded, taken_by

from cumulant import create_model
from cumulant.data.digits import CLASSES, scenes_source
from cumulant.style import colour, mark, new_figure, save, styled
from cumulant.train import TrainRecipe, evaluate_checkpoint, train

MECHANISMS = ("softmax", "cumulant3", "cluster16")
SIZES = (256, 512, 1024, 2048, 4096)
TESTED = {256: 64, 512: 16, 1024: 8, 2048: 4, 4096: 2}  # scenes of each size
BACKBONE: dict[str, Any] = {"patch_size": 8, "embed_dim": 128, "depth": 4, "num_heads": 2, "mlp_ratio": 2}
BACKBONE |= {"pool": "gap", "init_std": 0.05, "attention_extras": {"v_conv": 3}}
MODEL: dict[str, Any] = {
    "backbone": "vit_nano_patch4_32",
    "backbone_options": BACKBONE,
    "head": "pyramid",
    "width": 128,
}


def trained(settings: argparse.Namespace) -> None:
    size, sizes = (64, (64, 96)) if settings.quick else (SIZES[0], SIZES)
    counts = (8, 2) if settings.quick else (1024, 64)
    source, runs = scenes_source(size, counts=counts), []
    tests = {side: scenes_source(side, seed=1, counts=(1, 1 if settings.quick else TESTED[side])) for side in sizes}
    for seed in range(settings.seeds):
        for name in settings.attention:
            recipe = TrainRecipe(
                data="scenes", image_size=size, mean=(0.5,) * 3, std=(0.3,) * 3, model="segmenter",
                model_options=MODEL, attention=name, epochs=1 if settings.quick else settings.epochs,
                batch_size=4 if settings.quick else 32, optimizer="muon", lr=2e-3, min_lr=1e-5,
                warmup_epochs=1.0, weight_decay=0.05, clip=1.0, precision="fp32" if settings.quick else "bf16",
                in_memory="yes", eval_epochs=10, checkpoint_epochs=0, seed=seed,
            )  # fmt: skip
            with tempfile.TemporaryDirectory() as out:
                found = train(recipe, out, source=source)
                row = {"attention": name, "seed": seed, "seconds": found.seconds, "miou": {}, "pixels": {}}
                for side, test in tests.items():
                    try:
                        scores, _ = evaluate_checkpoint(out, source=test, batch_size=1)
                        row["miou"][side], row["pixels"][side] = scores.miou, scores.top(1)
                    except RuntimeError as error:
                        row["miou"][side] = str(error).splitlines()[0]
            runs.append(row)
            print(row, flush=True)
            recorded("dense", runs=runs, model=MODEL, epochs=settings.epochs, scenes=TESTED)


@torch.no_grad()
def timed(settings: argparse.Namespace) -> None:
    device, rows = "cpu" if settings.quick else "cuda", []
    for side in (64, 128) if settings.quick else SIZES:
        for name in settings.attention:
            torch.manual_seed(0)
            model = create_model("segmenter", attention=name, num_classes=len(CLASSES), img_size=256, device=device,
                                 **MODEL).eval()  # fmt: skip
            image = torch.randn(1, 3, side, side, device=device)

            def call(model: torch.nn.Module = model, image: torch.Tensor = image) -> None:
                with torch.autocast(image.device.type, torch.bfloat16):
                    model(image)

            row: dict[str, Any] = {"attention": name, "side": side, "tokens": (side // 8) ** 2}
            try:
                if device == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                call()
                row["peak_mib"] = 0 if device == "cpu" else torch.cuda.max_memory_allocated() / 2**20
                microseconds, row["graph"] = taken_by(call, image.device)
                row["ms"] = microseconds / 1e3
            except RuntimeError as error:
                row["failure"] = str(error).splitlines()[0]
            rows.append(row)
            print(row, flush=True)
            recorded("dense_time", rows=rows, model=MODEL)


def report(settings: argparse.Namespace) -> None:
    folder = ROOT / "benchmarks" / "results"
    runs = json.loads((folder / "dense.json").read_text())["runs"]
    rows = json.loads((folder / "dense_time.json").read_text())["rows"]
    cost = {(row["attention"], row["side"]): row for row in rows if "failure" not in row}
    print(f"| pixels | tokens | {' | '.join(f'{name}, mIoU % | ms | MiB' for name in MECHANISMS)} |")
    print("|---|---|" + "---|---|---|" * len(MECHANISMS))
    points: dict[str, list[tuple[int, float, float]]] = {name: [] for name in MECHANISMS}
    for side in SIZES:
        cells = [f"{side:,}", f"{(side // 8) ** 2:,}"]
        for name in MECHANISMS:
            own = [run["miou"][str(side)] for run in runs if run["attention"] == name]
            miou = [one for one in own if isinstance(one, float)]
            mean = 100 * sum(miou) / len(miou) if miou else float("nan")
            one = cost.get((name, side), {"ms": float("nan"), "peak_mib": float("nan")})
            cells += [f"{mean:.1f}", f"{one['ms']:.2f}", f"{one['peak_mib']:,.0f}"]
            points[name].append((side, mean, one["ms"]))
        print(f"| {' | '.join(cells)} |")
    drawn(points)


@styled
def drawn(points: dict[str, list[tuple[int, float, float]]]) -> None:
    figure, axes = new_figure(1, 2, (10, 4))
    for axis, column, label in ((axes[0, 0], 1, "mIoU, %"), (axes[0, 1], 2, "ms an image, H200")):
        for name, own in points.items():
            axis.plot([one[0] for one in own], [one[column] for one in own], color=colour(name), marker=mark(name),
                      label=name)  # fmt: skip
        axis.set(xlabel="pixels a side", ylabel=label, xscale="log")
        axis.set_xticks(SIZES, [f"{side:,}" for side in SIZES])
        axis.minorticks_off()
        axis.grid(alpha=0.25)
    axes[0, 0].set_ylim(0, 100)
    axes[0, 1].set_yscale("log")
    axes[0, 0].legend()
    save(figure, ROOT / "docs" / "figures" / "dense", ("svg",))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("train", "time", "report"))
    parser.add_argument("--attention", nargs="+", default=list(MECHANISMS))
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--quick", action="store_true")
    settings = parser.parse_args()
    {"train": trained, "time": timed, "report": report}[settings.what](settings)


if __name__ == "__main__":
    main()
