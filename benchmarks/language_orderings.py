"""Orderings of two papers about language, on tiny-shakespeare as characters: parts of RCMHA, mixings of Dual-Stream.

    python benchmarks/language_orderings.py --data path/to/tiny-shakespeare    # half a minute on an H200

lm_tiny and dual_stream_tiny, one epoch of the recipe `shakespeare`, three seeds, and the baseline once more with other
seeds as a control: what differs by less than that is not told apart. Also one full run of the recipe for softmax and
third-order cumulants, and one as bytes. Prints a line a run; results in benchmarks/results/language_orderings.json.
"""

from __future__ import annotations

import argparse
import json
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from cumulant.bench.provenance import provenance
from cumulant.train import TrainRecipe, read_recipe, train

LAYERS: dict[str, dict[str, Any]] = {
    "rcmha": {"layer": "rcmha+offsets=128"},
    "rmha": {"layer": "rcmha+offsets=128+convolve=false"},
    "mdha": {"layer": "rcmha+relative=false", "positions": "learned"},
    "mha": {"positions": "learned"},
    "mha again": {"positions": "learned"},
}
MIXINGS = ("dense", "kronecker", "independent", "dense again")


def runs() -> list[tuple[str, str, TrainRecipe, int]]:
    base = read_recipe("shakespeare")
    short = replace(base, epochs=1, warmup_epochs=0.1)
    planned = [("full", "softmax", base, 0), ("full", "cumulant3", replace(base, attention="cumulant3"), 0)]
    planned.append(("full", "bytes softmax", read_recipe("shakespeare-bytes"), 0))
    for seed in range(3):
        for name, options in LAYERS.items():
            recipe = replace(short, model_options={**short.model_options, **options})
            planned.append(("rcmha", name, recipe, seed + 10 * name.endswith("again")))
        for name in MIXINGS:
            options = {**short.model_options, "mixing": name.split()[0]}
            recipe = replace(short, model="dual_stream_tiny", model_options=options)
            planned.append(("dual_stream", name, recipe, seed + 10 * name.endswith("again")))
    return planned


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", required=True, help="folder or file with the text")
    data, rows = parser.parse_args().data, []
    for study, name, recipe, seed in runs():
        with tempfile.TemporaryDirectory() as folder:
            found = train(replace(recipe, data=data, seed=seed), folder)
        row = {"study": study, "name": name, "seed": seed, "nats": found.nats, "bits_per_byte": found.bits_per_byte}
        rows.append({**row, "top1": found.top1, "parameters": found.parameters, "epochs": recipe.epochs})
        print(json.dumps(rows[-1]), flush=True)
    results = Path(__file__).parent / "results" / "language_orderings.json"
    content = {"rows": rows, **provenance("python benchmarks/language_orderings.py --data path/to/tiny-shakespeare")}
    results.write_text(json.dumps(content, indent=1) + "\n")


if __name__ == "__main__":
    main()
