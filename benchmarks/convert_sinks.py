"""Clusters in every layer of a language model, with and without sinks: perplexity of a book, nothing trained.

    PYTHONPATH=src:. python benchmarks/convert_sinks.py MODEL TEXT [--tokens 2048] [--pieces 3] [--out FILE]

MODEL is the folder of `python -m tools.models smollm2`, TEXT a book in plain text (`... moby-dick`). Pieces of it,
evenly spaced, are answered by the model as it is and converted by name, all layers and heads. Printed are perplexity
and how much it is above softmax's, as a factor: mean and standard error over pieces, of the logarithm. `convert` takes
4 sinks where a name says nothing; before it did, 0.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import torch
from language_cache import load, losses

from cumulant import convert
from cumulant.bench.provenance import provenance

NAMES = ("cluster16", "cluster16+recent=1")


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", type=Path)
    parser.add_argument("text", type=Path)
    parser.add_argument("--tokens", type=int, default=2048)
    parser.add_argument("--pieces", type=int, default=3)
    parser.add_argument("--sinks", type=int, nargs="+", default=[0, 1, 4, 16])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    model, tokenizer = load([options.model])
    ids = torch.tensor(tokenizer(options.text.read_text()).input_ids)
    starts = torch.linspace(0, len(ids) - options.tokens, options.pieces + 1).long()[1:].tolist()
    pieces = [ids[None, at : at + options.tokens] for at in starts]
    rows: dict[str, Any] = {}
    softmax: list[float] = []
    for name in (None, *(f"{x}+sinks={n}" for x in NAMES for n in options.sinks)):
        if name is not None:
            convert(model, name, example={"input_ids": pieces[0][:, :256]}, force=True)
        found = [float(losses(model, piece, 1).mean()) for piece in pieces]
        if name is not None:
            convert.restore(model)
        softmax = softmax or found
        above = torch.tensor(found).double() - torch.tensor(softmax).double()
        error = float(above.std() / math.sqrt(len(above))) if len(above) > 1 else 0.0
        mean = sum(found) / len(found)
        row = {"loss": mean, "perplexity": math.exp(mean), "above": float(above.mean()), "standard_error": error}
        rows[name or "softmax"] = {**row, "losses": found}
        factor = math.exp(row["above"])
        print(f"| {name or 'softmax'} | {row['perplexity']:.2f} | {factor:.3f} +- {factor * error:.3f} |", flush=True)
        if options.out:
            record = provenance(f"python benchmarks/convert_sinks.py {options.model.name} {options.text.name}")
            record |= {"tokens": options.tokens, "pieces": starts, "found": rows}
            options.out.write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
