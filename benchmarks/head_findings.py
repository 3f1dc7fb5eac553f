"""Which heads matter, how far they look and what they do, for softmax, linear and cumulant attention: one table each.

    python benchmarks/head_findings.py                                    # digits, 4 mechanisms x 3 seeds, CPU
    python benchmarks/head_findings.py --checkpoint FOLDER --data FOLDER  # trained checkpoints and their data

Reports the findings that section 6 of the study asks for (importance under five measures and how far they agree,
distance profiles, pattern clusters, pruning curves, signed maps) and says of each ordering of section 8 whether it was
confirmed. Importance is measured on one half of the test images and the pruning curves on the other. Models are trained
here with the recipe `digits`, or read: `--checkpoint` may be given several times and takes safetensors of
`cumulant.train`, folders of its runs, and folders that hold several of either; those of one mechanism count as its
seeds. With --out the numbers go to a JSON file (written anew after each model), with --figures the figures to a folder
(those show images of the data: do not commit them).
"""

from __future__ import annotations

import argparse
import json
import shlex
import statistics
import sys
from dataclasses import replace
from itertools import pairwise, product
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from torch import Tensor, nn

from cumulant import explain
from cumulant.bench.provenance import provenance
from cumulant.explain import figures
from cumulant.studies.visual_analytics import profiles
from cumulant.train import read_recipe, train

MECHANISMS = ("softmax", "cumulant3", "cumulant2", "linear")
MAPPED = 128  # images whose maps are kept
DISTANCES = ("distance", "distance_positive", "distance_signed")


def train_digits(attention: str, seed: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A trained model and the test images and labels."""
    recipe = replace(read_recipe("digits"), attention=attention, seed=seed)
    with TemporaryDirectory() as folder:
        train(recipe, folder, device="cpu")
        return from_checkpoint(Path(folder) / "last.safetensors", "digits", 450)


def checkpoint_files(words: list[str]) -> list[Path]:
    """Files of weights that these words name: a file, the folder of a run (its last weights), or a folder of either."""

    def of_run(folder: Path) -> list[Path]:
        return [file for file in [folder / "last.safetensors"] if file.is_file()]

    found: list[Path] = []
    for word in words:
        place = Path(word)
        files = [place] if place.is_file() else of_run(place)
        if not files and place.is_dir():
            files = [f for f in sorted(place.glob("*.safetensors")) if f.stem != "predictions"]
            files += [f for folder in sorted(place.iterdir()) if folder.is_dir() for f in of_run(folder)]
        if not files:
            raise FileNotFoundError(
                f"no checkpoint at {word}; expected safetensors of `cumulant train` or folders of it"
            )
        found += files
    return found


def from_checkpoint(path: Path, data: str, count: int) -> tuple[nn.Module, Tensor, Tensor]:
    """A checkpoint of the trainer, with test images prepared as its recipe says."""
    from cumulant.inspect import labelled_items, open_model

    opened = open_model(path)
    images, labels, _ = labelled_items(opened, data, count)
    return opened.model.float(), images, labels


def findings(model: nn.Module, images: Tensor, labels: Tensor, *, seeds: int = 3, steps: int | None = None) -> dict:
    """All numbers of section 6 for one model."""
    logits = torch.cat([explain.importance.answers(model, part).logits for part in images.split(256)])
    with explain.capture(model, images[:MAPPED]) as captured:
        pass
    half = len(images) // 2
    measures = explain.head_importance(model, images[:half], labels[:half])
    names, correlation = explain.rank_correlations(measures)
    others = images[half:], labels[half:]
    curves = explain.pruning_curves(model, *others, measures["loss"], seeds=range(seeds), steps=steps)
    maps, owner = explain.flat_maps(captured)
    some = owner[:, 0] < MAPPED // 2
    maps, owner = maps[some], owner[some]
    patterns = explain.find_patterns(maps, owner, clusters=6, code=8, steps=400)
    numbers = {name: value.tolist() for name, value in explain.summary(captured).items()}
    mean_importance = [
        float(measures["loss"][owner[patterns.labels == k, 1], owner[patterns.labels == k, 2]].mean())
        for k in range(len(patterns.centres))
    ]
    return {
        "accuracy": float((logits.argmax(-1) == labels).double().mean()),
        "summary": numbers,
        "profile": profiles(captured),
        "uniform_distance": explain.uniform_distance(captured.tokens.grid),
        "sink_rate": explain.sink_rate(captured),
        "importance": {name: value.tolist() for name, value in measures.items()},
        "correlation": {"names": names, "matrix": correlation.tolist()},
        "areas": {name: [curve.area for curve in several] for name, several in curves.items()},
        "patterns": {
            "names": [explain.patterns.describe(centre) for centre in patterns.centres],
            "share": [float((patterns.labels == k).float().mean()) for k in range(len(patterns.centres))],
            "importance": mean_importance,
            "error": patterns.error,
            "pca_error": patterns.pca_error,
            "content_agnostic": float((patterns.entropies() < 0.5).float().mean()),
        },
        "_objects": {"captured": captured, "curves": curves, "patterns": patterns, "measures": measures},
    }


def draw(folder: Path, name: str, found: dict, images: Tensor) -> None:
    kept = found["_objects"]
    captured, tokens = kept["captured"], kept["captured"].tokens
    query = tokens.prefix + tokens.grid[0] // 2 * tokens.grid[1] + tokens.grid[1] // 2
    figures.save(figures.layer_grid(captured, query=query, image=images[0]), folder / f"{name}-grid")
    figures.save(figures.distance_profiles(captured, title=name), folder / f"{name}-profiles")
    figures.save(figures.importance_map(kept["measures"]), folder / f"{name}-importance")
    figures.save(figures.pruning_figure(kept["curves"], title=name), folder / f"{name}-pruning")
    figures.save(figures.pattern_figure(kept["patterns"], kept["measures"]["loss"]), folder / f"{name}-patterns")
    figures.save(figures.correlation_figure(*explain.rank_correlations(kept["measures"])), folder / f"{name}-ranks")


def scene(side: int = 12, patch: int = 8) -> tuple[Tensor, Tensor]:
    """A drawn picture (3, H, W) of two balls and a box on a slope of grey, and features (patches, 5) of its patches."""
    size = side * patch
    y, x = torch.meshgrid(torch.linspace(0, 1, size), torch.linspace(0, 1, size), indexing="ij")
    pixels = torch.stack([0.35 + 0.4 * y] * 3)
    for (cy, cx, radius), colour in (((0.3, 0.3, 0.19), (0.9, 0.25, 0.15)), ((0.68, 0.72, 0.15), (0.9, 0.3, 0.2))):
        inside = (y - cy) ** 2 + (x - cx) ** 2 < radius**2
        pixels[:, inside] = torch.tensor(colour)[:, None] * (1.1 - 0.5 * y[inside])
    box = (y > 0.58) & (y < 0.86) & (x > 0.1) & (x < 0.38)
    pixels[:, box] = torch.tensor([0.15, 0.3, 0.75])[:, None]
    colours = torch.nn.functional.avg_pool2d(pixels[None], patch)[0].flatten(1).mT
    places = torch.cartesian_prod(torch.linspace(-1, 1, side), torch.linspace(-1, 1, side))
    return pixels, torch.cat([(colours - colours.mean(0)) / colours.std(), 0.6 * places], -1)


def draw_docs(folder: Path, results: dict[str, list[dict]]) -> None:
    """The figures of docs/explain.md; none of them shows an image of a data set."""
    from cumulant import zoo

    image, features = scene()
    tokens = explain.TokenLayout(0, (12, 12))
    query = 3 * 12 + 3
    key = features[None, None]
    rows = {n: zoo.get(n).scores(key[..., [query], :], key, scale=0.55)[0, 0, 0] for n in MECHANISMS if n != "linear"}
    rows["linear"] = zoo.get("linear").scores(key[..., [query], :], key)[0, 0, 0]
    compared = figures.compare_mechanisms(rows, tokens, image=image, query=query)
    figures.save(compared, folder / "explain-mechanisms", ("svg", "png"))
    parts = figures.signed_parts(rows["cumulant2"], tokens, image=image, query=query, name="cumulant2")
    figures.save(parts, folder / "explain-signed", ("svg", "png"))
    captured = {name: runs[0]["_objects"]["captured"] for name, runs in results.items()}
    figures.save(figures.distance_by_layer(captured), folder / "explain-distance", ("svg",))
    curves = results["cumulant3"][0]["_objects"]["curves"]
    figures.save(
        figures.pruning_figure(curves, chance=0.1, title="cumulant3, digits"), folder / "explain-pruning", ("svg",)
    )


def over_seeds(values: list[float], digits_after: int = 2) -> str:
    spread = statistics.stdev(values) if len(values) > 1 else 0.0
    text = f"{statistics.fmean(values):.{digits_after}f}"
    return f"{text} ± {spread:.{digits_after}f}" if len(values) > 1 else text


def mean_of(found: dict, name: str) -> float:
    return torch.tensor(found["summary"][name]).nanmean().item()


def spread_by_layer(found: dict) -> list[float]:
    return torch.tensor(found["summary"]["distance"]).std(1).tolist()


def tables(results: dict[str, list[dict]]) -> str:
    """Markdown tables, a row for each model: means over seeds with their standard deviation."""
    lines = [
        "| model | accuracy % | distance | positive | signed | class share | self share | tokens used | negative mass "
        "| largest × n | sinks: patch, class |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, runs in results.items():
        cells = [over_seeds([100 * r["accuracy"] for r in runs], 1)]
        cells += [over_seeds([mean_of(r, key) for r in runs], 3) for key in DISTANCES]
        for key, places in (("class_share", 3), ("self_share", 3), ("tokens_used", 1)):
            cells.append(over_seeds([mean_of(r, key) for r in runs], places))
        cells += [over_seeds([mean_of(r, "negative_mass") for r in runs], 3)]
        cells += [over_seeds([mean_of(r, "largest") for r in runs], 1)]
        rates = [statistics.fmean(r["sink_rate"].get(k, 0.0) for r in runs) for k in ("patches", "class token")]
        cells.append(", ".join(f"{rate:.2f}" for rate in rates))
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    lines += [
        "", "| model | uniform distance | spread of distance over heads, by layer |", "|---|---|---|",
    ]  # fmt: skip
    for name, runs in results.items():
        layers = [over_seeds(list(column)) for column in zip(*(spread_by_layer(r) for r in runs), strict=True)]
        lines.append(f"| {name} | {runs[0]['uniform_distance']:.2f} | {', '.join(layers)} |")
    lines += ["", "| model | area: important first | random | least important first |", "|---|---|---|---|"]
    for name, runs in results.items():
        cells = [
            over_seeds([statistics.fmean(r["areas"][k]) for r in runs], 3)
            for k in ("important first", "random", "least important first")
        ]
        lines.append(f"| {name} | " + " | ".join(cells) + " |")
    names = next(iter(results.values()))[0]["correlation"]["names"]
    pairs = [(i, j) for i in range(len(names)) for j in range(i)]
    lines += ["", "| Spearman | " + " | ".join(results) + " |", "|---|" + "---|" * len(results)]
    for i, j in pairs:
        cells = [over_seeds([r["correlation"]["matrix"][i][j] for r in runs]) for runs in results.values()]
        lines.append(f"| {names[j]}, {names[i]} | " + " | ".join(cells) + " |")
    lines += [
        "", "| model | lost variance: autoencoder | PCA | heads in one cluster | clusters of the first seed: name, "
        "share, importance |", "|---|---|---|---|---|",
    ]  # fmt: skip
    for name, runs in results.items():
        p = runs[0]["patterns"]
        order = sorted(range(len(p["share"])), key=lambda k: -p["share"][k])
        kinds = "; ".join(f"{p['names'][k]} {100 * p['share'][k]:.0f} % {p['importance'][k]:.2f}" for k in order)
        cells = [over_seeds([r["patterns"][k] for r in runs]) for k in ("error", "pca_error", "content_agnostic")]
        lines.append(f"| {name} | " + " | ".join(cells) + f" | {kinds} |")
    return "\n".join(lines)


def verdicts(results: dict[str, list[dict]]) -> list[str]:
    """The orderings of section 8, for each seed and for the mean."""

    def verdict(claim: str, holds: list[bool]) -> str:
        said = "confirmed" if all(holds) else "refuted" if not any(holds) else "mixed"
        return f"{said}: {claim} ({sum(holds)} of {len(holds)} runs)"

    said = []
    for name, runs in results.items():
        areas = [{key: statistics.fmean(value) for key, value in r["areas"].items()} for r in runs]
        holds = [a["important first"] < a["random"] < a["least important first"] for a in areas]
        said.append(verdict(f"{name}: pruning hurts most by importance, least in reverse", holds))
        spreads = [spread_by_layer(r) for r in runs]
        half = len(spreads[0]) // 2
        holds = [statistics.fmean(s[:half]) > statistics.fmean(s[half:]) for s in spreads]
        said.append(verdict(f"{name}: distances spread more over heads in the first half of the layers", holds))
    for key in DISTANCES:
        for near, far in pairwise(MECHANISMS):
            if near in results and far in results:
                # one run of each by seed, or every pair where their numbers differ
                equal = len(results[near]) == len(results[far])
                pairs = zip(results[near], results[far], strict=True) if equal else product(results[near], results[far])
                holds = [mean_of(a, key) <= mean_of(b, key) for a, b in pairs]
                said.append(verdict(f"{key}: {near} looks nearer than {far}", holds))
    return said


def keep(path: Path, results: dict[str, list[dict]]) -> None:
    """All numbers and verdicts as one JSON file; names of files of this machine stay out of it."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in sys.argv]
    kept = {name: [{k: v for k, v in r.items() if k != "_objects"} for r in runs] for name, runs in results.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    record = {**provenance(shlex.join(["python", *words])), "verdicts": verdicts(results), "results": kept}
    path.write_text(json.dumps(record, indent=1) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--checkpoint", action="append", default=[], help="file, run folder or folder of those")
    parser.add_argument("--data", help="folder or name of the checkpoints' data")
    parser.add_argument("--images", type=int, default=256, help="test images taken from --data")
    parser.add_argument("--out", type=Path)
    parser.add_argument("--figures", type=Path)
    parser.add_argument("--docs", type=Path, help="folder for the figures of docs/explain.md (digits only)")
    options = parser.parse_args()
    results: dict[str, list[dict]] = {}
    if options.checkpoint:
        if not options.data:
            parser.error("--checkpoint needs --data")
        for path in checkpoint_files(options.checkpoint):
            model, images, labels = from_checkpoint(path, options.data, options.images)
            found = findings(model, images, labels, steps=12)
            attention = explain.model_info(model)["attention"]
            results.setdefault(attention, []).append(found)
            print(f"{attention}, {path.name}: {found['accuracy']:.4f}", file=sys.stderr, flush=True)
            if options.figures:
                draw(options.figures, f"{attention}-{len(results[attention])}", found, images)
            if options.out:
                keep(options.out, results)
        results = {name: results[name] for name in (*MECHANISMS, *results) if name in results}
    else:
        for attention in MECHANISMS:
            for seed in range(options.seeds):
                model, images, labels = train_digits(attention, seed)
                found = findings(model, images, labels)
                results.setdefault(attention, []).append(found)
                print(f"{attention}, seed {seed}: {found['accuracy']:.4f}", file=sys.stderr, flush=True)
                if options.figures and seed == 0:
                    draw(options.figures, attention, found, images)
                if options.out:
                    keep(options.out, results)
    if options.docs and not options.checkpoint:
        draw_docs(options.docs, results)
    print(tables(results))
    print()
    print("\n".join(verdicts(results)))
    if options.out:
        keep(options.out, results)


if __name__ == "__main__":
    main()
