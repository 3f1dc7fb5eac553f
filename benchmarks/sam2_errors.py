"""Squared error of SAM 2's global layers under other attention, layer by layer: no GPU, no masks, minutes.

    python -m tools.models sam2 tuning-pictures
    PYTHONPATH=src:. python benchmarks/sam2_errors.py MODEL PICTURES [--names ...] [--rows 1024] [--time]

||out - softmax||^2 / ||softmax - <v>||^2 over all heads of a layer, mean over pictures, on `--rows` queries of each
head, evenly spread; queries, keys and values are those of softmax's own pass. Clusters are found for these queries:
where alike queries share near clusters, all have to ask (--rows 4096).

With --time also how many times as fast as softmax the layers are, on one thread by its processor time: the least of
three calls, all layers of a picture together. JSON goes to $OUT/sam2_errors.json if OUT is set.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from real_models import global_layers, load, pictures, share_of_work
from sam2_speed import captured

from cumulant import zoo
from cumulant.bench.provenance import provenance
from cumulant.call import Call
from cumulant.kernels.notice import SlowPathWarning
from cumulant.nn.swapped.choice import Choice

NAMES = (
    "cluster64+find=tree+leaves=4+opened=10+near=12",
    "cluster64+find=tree+leaves=4+opened=12+near=17+response=0",
    *(f"cluster64+find=tree+leaves=8+opened=16+near=28+width={w}" for w in (16, 24, 32, 40)),
    "cluster64+find=tree+leaves=4+opened=16+near=16+width=32",
    "cluster64+find=tree+leaves=16+opened=12+near=50+width=24",
    "cluster32+find=tree+leaves=16+opened=10+near=28+width=32",
    "cluster128+find=tree+leaves=4+opened=24+near=26+width=32",
    "cluster64+find=tree+leaves=8+opened=12+near=16+width=24",
    "cluster64+find=tree+leaves=8+opened=24+near=34+width=32",
    "cluster64+find=tree+leaves=8+opened=16+near=56+width=32+exact=160",
    "cluster64+find=tree+leaves=8+opened=20+near=64+width=24+exact=168",
    "cluster64+find=tree+leaves=4+opened=24+near=40+width=24+exact=208",
    "cluster64+find=tree+leaves=4+opened=24+near=44+width=28+exact=176",
    "cluster64+find=tree+leaves=4+opened=16+near=24+width=24+exact=96",
)


def seconds(run: Callable[[], Any]) -> float:
    """Processor time, the least of three."""
    spent = []
    for _ in range(3):
        start = time.process_time()
        run()
        spent.append(time.process_time() - start)
    return min(spent)


def faster(name: str, calls: list[Call]) -> float:
    """How many times as fast as softmax, all layers together."""
    choice, fused = Choice.named(name), F.scaled_dot_product_attention
    ours = sum(seconds(lambda c=call: zoo.get(choice.attention).run(c, **choice.options)) for call in calls)
    return sum(seconds(lambda c=call: fused(*c[:3], scale=c.scale)) for call in calls) / ours


def error(name: str, call: Call, rows: int) -> float:
    step = call.query.shape[-2] // rows
    asking = call if step == 1 else call._replace(query=call.query[..., ::step, :], grid=None)
    exact = F.scaled_dot_product_attention(*asking[:3], scale=call.scale)
    choice = Choice.named(name)
    out = zoo.get(choice.attention).run(asking, **choice.options)
    return float((out - exact).square().sum() / (exact - call.value.mean(-2, keepdim=True)).square().sum())


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--rows", type=int, default=1024)
    parser.add_argument("--time", action="store_true")
    options = parser.parse_args()
    if options.time:
        torch.set_num_threads(1)
    warnings.simplefilter("ignore", SlowPathWarning)
    model, shown = load(options.model), pictures(options.pictures, crops=False)
    layers, found = global_layers(model), {name: [] for name in options.names}
    times: dict[str, list[float]] = {name: [] for name in options.names}
    record: dict[str, Any] = {
        "provenance": provenance(" ".join(["python benchmarks/sam2_errors.py MODEL PICTURES", *sys.argv[3:]])),
        "pictures": [picture.name for picture in shown],
        "layers": layers,
    }
    for picture in shown:
        calls = captured(model, picture.tensor(1024))
        L, D = calls[layers[0]].query.shape[-2:]
        for name in options.names:
            found[name].append([error(name, calls[layer], options.rows) for layer in layers])
            if options.time:
                times[name].append(faster(name, [calls[layer] for layer in layers]))
            said = " ".join(f"{x:.4f}" for x in found[name][-1]) + "".join(f" {x:.2f} x" for x in times[name][-1:])
            print(f"{picture.name}: {name} {said}", flush=True)
    heads = ["attention", "multiply-adds", *layers, *(["times softmax"] if options.time else [])]
    print(f"| {' | '.join(heads)} |\n" + "|---" * len(heads) + "|")
    for name, each in found.items():
        means = torch.tensor(each).mean(0).tolist()
        cells = [f"{x:.4f}" for x in means] + [f"{min(x):.2f} to {max(x):.2f}" for x in [times[name]] if x]
        print(f"| `{name}` | {share_of_work(name, L, D):.1%} | " + " | ".join(cells) + " |")
    record["found"] = {
        name: {"work": share_of_work(name, L, D), "errors": each, "times": times[name]} for name, each in found.items()
    }
    if out := os.environ.get("OUT"):
        Path(out, "sam2_errors.json").write_text(json.dumps(record))


if __name__ == "__main__":
    main()
