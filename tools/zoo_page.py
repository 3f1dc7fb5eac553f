"""The pages of the documentation that list all mechanisms and all layers; their marks come from running them.

To write them again: python -m tools.zoo_page. A layer's page holds what is known of it between
`<!-- results: layer -->` and `<!-- end -->`; one that is missing is begun, its sections to be written by hand.
"""

from __future__ import annotations

import inspect
import json
import math
import re
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cumulant.grammar import written
from cumulant.nn import get_layer, layers, marks
from cumulant.nn.probes import refusing
from cumulant.nn.registry import CLAIMS
from cumulant.zoo import capabilities, get, names
from tools.tables import fill

ROOT = Path(__file__).parents[1]

HEAD = """# The zoo: published attentions behind one interface

Every mechanism below has a name. You call it like `F.scaled_dot_product_attention`, or use its name in a layer or a
model:

```python
import torch, cumulant

q, k, v = (torch.randn(1, 4, 256, 32) for _ in range(3))
out = cumulant.zoo.get("mala")(q, k, v, is_causal=True)
layer = cumulant.nn.MultiheadAttention(128, 4, attention="agent")
model = cumulant.create_model("vit_nano_patch4_32", attention="cumulant3+around=mean", num_classes=10)
```

| you want | take |
| --- | --- |
| exact attention | `softmax` |
| to come close to softmax at linear cost | `cumulant3`; in trained models `cluster16` or `cluster64` |
| to read tokens one by one with a state of fixed size | one marked "streaming" |
| a sequence split over machines | a mechanism that [merges](../distributed.md#what-sees-the-whole-sequence) |
| to compare papers | [which orderings hold](orderings.md), [error at equal cost](../unified.md) |

All pass one conformance suite (`tests/conformance`). The marks below were found by running each mechanism, and a test
keeps this page up to date.

"""

PATTERNS = {"noncausal self": "NS", "causal self": "CS", "noncausal cross": "NC", "causal cross": "CC"}

MARKS = {
    "key_mask": "key mask",
    "grouped_queries": "grouped queries",
    "weights": "weights",
    "subquadratic": "sub-quadratic",
    "streaming": "streaming",
    "ragged": "ragged",
}

LEGEND = """
| mark | |
| --- | --- |
| NS, CS | attention of a sequence to itself; the same, where a token sees only the past |
| NC, CC | attention to another sequence; the same, where a query sees only earlier queries |
| cost | multiply-adds of one head for L tokens, key width D, value width E, without a causal mask |
| key mask, grouped queries | padding; several query heads share a key head |
| weights | the L x L map can be shown |
| sub-quadratic, streaming | no L x L work; a state of constant size |
| ragged | packed sequences of different lengths |
| parts | in a layer, the mechanism has parameters of its own |
"""


def page() -> str:
    """docs/zoo/index.md in Markdown."""
    rows = [["mechanism", "year", "cost", "patterns", *MARKS.values(), "parts"]]
    rows.append(["---"] * len(rows[0]))
    for name in names():
        mechanism, marks = get(name), capabilities(name)[name]
        row = [f"[`{name}`]({name.rstrip('0123456789')}.md)", str(mechanism.year), mechanism.cost]
        # Rows that do not look at other queries have causal cross attention for free.
        has = {
            "NS": marks["noncausal"],
            "CS": marks["causal"],
            "NC": marks["cross"] and marks["noncausal"],
            "CC": marks["cross"] and marks["noncausal"] and marks["independent_rows"],
        }
        row.append(" ".join(pattern for pattern in PATTERNS.values() if has[pattern]))
        row += ["yes" if marks[mark] else "" for mark in MARKS]
        rows.append([*row, "yes" if mechanism.module is not None else ""])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{HEAD}{table}\n{LEGEND}"


LAYERS_HEAD = """# Layers: ways to use attention heads

A mechanism computes attention from queries, keys and values. A layer decides what happens around it: which heads there
are, which of them work for which token, how they are projected and joined. Every layer below works over a mechanism
that you name, and has a name of its own for models:

```python
import torch, cumulant

layer = cumulant.nn.create_layer("moh+top=2", 64, 4, attention="cumulant3")
print(layer(torch.randn(2, 50, 64), is_causal=True).shape)
model = cumulant.create_model("vit_tiny_patch16_224", layer="moh", attention="cumulant3")
```

All are called as `layer(x, attn_mask=None, is_causal=False, context=None)`. Options stand behind the name, as for
mechanisms. Some layers add a loss, for instance to balance a router: it is `cumulant.nn.auxiliary_loss(model)`, and
`cumulant train` adds it for you. The marks below were found by running each layer over `cumulant2` (over `softmax`
where a layer does not take that), and a test keeps this page up to date.

"""

LAYERS_LEGEND = """
| mark | |
| --- | --- |
| causal, cross, key mask | `is_causal=True`; `context=`, another sequence; `attn_mask=`, padding |
| ragged, streaming | `forward_packed(x, cu_seq)`, sequences end to end; `stream().step(x)`, token by token |
| equivariant | permuted tokens give permuted rows |
| losses, weights | it adds a loss in training; `scores(x)` gives its attention map |
| any mechanism | it runs over every name of `cumulant list`; if not, its page says why |
"""
LAYERS_MORE = """
## In a model that is trained already

`convert` replaces trained layers, in models of this library and of timm. The projections are carried over; what the new
layer has besides (a router, an interpreter) is untrained, so train further. On the command line it is
`cumulant convert MODEL --layer moh+top=1`.

```python
model = cumulant.create_model("vit_nano_patch2_8", num_classes=10)
report = cumulant.convert(model, layer="moh+top=1", layers=[2, 3], force=True)
print(report.measured_error)                               # how much the output changed
cumulant.convert.restore(model)
```

| | |
|---|---|
| takes over the weights | `moh` `complexformer` `gaam` `rcmha` `sparsifiner` `biformer` `ia_red2` `marro` |
| takes them over with this option | `gda+ratio=1` |
| cannot take them over, and raises an error | `sqa`, other ratios of `gda`, `lama`, `dual_stream` |

Layers of transformers models cannot be replaced this way, because their classes compute the projections themselves.

## Do the papers' rankings hold?

[One study per layer](../studies/heads.md) tries its paper's ranking on small models, with seeds and a control.
"""
VISION = """
## The vision layers in one model

A ViT for Tiny-ImageNet-100: images of 64 pixels in patches of 8 (65 tokens), width 128, 4 blocks, 4 heads.

| column | |
|---|---|
| one core | throughput of forward passes in batches of 8, over plain softmax in the same rounds; a shared server core |
| GPU | microseconds per image in batches of 512 on an H200, CUDA graphs in bfloat16, not compiled |
| top-1 | after 8 epochs with Muon, one recipe for all; mean ± standard deviation (seeds) where there are several |

TABLE

| question | found |
|---|---|
| how much is chance? | CHANCE |
| which lose? | `lama`, `ia_red2` and `gda`: 4 to 8 points below the plain layer, with both seeds |
| which lose a little? | `sparsifiner`, and over cumulant3 `moh` and `biformer`: 1 to 2 points, below all plain runs |
| which gain? | none by more than chance; `complexformer` is highest over both mechanisms, by half a point to a point |
| does the mechanism matter? | not at 65 tokens: each layer over cumulant3 is within 1.2 points of itself over softmax |
| do they save time? | hardly: `sqa` over softmax trains in 0.93 of the plain layer's time, the others take longer |

Why some lose: `lama` gives all tokens the same answer, and the interpreters of `ia_red2` learn by reward, which this
recipe does not have; untrained, they drop half of the tokens at random. At 65 tokens attention is a small part of the
work; what the layers save shows in longer sequences ([MoH](moh.md), [BiFormer](biformer.md),
[Sparsifiner](sparsifiner.md), [IA-RED2](ia_red2.md)).

```
OMP_NUM_THREADS=1 python benchmarks/vision_layers.py count
python benchmarks/vision_layers.py time                                                  # a GPU, alone (cb78549)
python benchmarks/vision_layers.py train --data FOLDER/tiny-imagenet-100 --seconds 460   # a GPU (5c5f47a to d1bc029)
```
"""
OVER = "softmax", "cumulant3"
AGAIN = (2, 3)  # seeds of the plain layer that are its control
LAYER_PAGE = """# NAME

One sentence on what it changes.

## Formula

```text
```

## When to use it

## Cost

<!-- results: layer -->
<!-- end -->

## Example

```python
```

## What was found
"""


def _vision(name: str) -> list[dict[str, Any]]:
    """Rows or runs of a record of benchmarks/vision_layers.py; none where it was not made yet."""
    file = ROOT / "benchmarks" / "results" / f"{name}.json"
    record = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    found: list[dict[str, Any]] = record.get("runs" if name.endswith("train") else "rows", [])
    return found


def vision_table() -> str:
    """The vision layers in one model, from the records of benchmarks/vision_layers.py that are there."""
    times = {(one["layer"], one["attention"]): one for one in _vision("vision_layers_time")}
    runs = _vision("vision_layers_train")
    heads = ["layer", "over", "parameters", "million multiply-adds", "one core"]
    heads += ["GPU: train, µs per image", "GPU: answer, µs per image"] * bool(times) + ["top-1, %"] * bool(runs)
    rows = ["| " + " | ".join(heads) + " |", "|" + "---|" * len(heads)]
    for one in _vision("vision_layers"):
        key = one["layer"], one["attention"]
        cells = [f"`{key[0]}`", key[1], f"{one['parameters']:,}", f"{one['work'] / 1e6:.1f}", f"{one['relative']:.2f}"]
        if times:
            cells += [f"{times.get(key, {}).get(what, math.nan):.1f}" for what in ("train_us", "infer_us")]
        if runs:
            own = [run for run in runs if (run["layer"], run["attention"]) == key]
            again = [run for run in own if key[0] == "multihead" and run["seed"] in AGAIN]
            cells.append(top1([run for run in own if run not in again]))
        rows.append("| " + " | ".join(cells) + " |")
        if runs and again:
            rows.append(f"| *the same again, A/A* | {key[1]} |" + " |" * (len(heads) - 3) + f" {top1(again)} |")
    return "\n".join(rows)


def top1(runs: Sequence[Mapping[str, Any]]) -> str:
    """Mean accuracy in %, and how far seeds are apart."""
    own = [100 * run["top1"] for run in runs]
    spread = f" ± {statistics.stdev(own):.1f} ({len(own)})" if len(own) > 1 else ""
    return f"{statistics.mean(own):.1f}{spread}" if own else "not run"


def vision_chance() -> str:
    """How far runs of the plain layer with other seeds are apart."""
    plain = [run for run in _vision("vision_layers_train") if run["layer"] == "multihead"]
    own = {name: sorted(100 * run["top1"] for run in plain if run["attention"] == name) for name in OVER}
    said = [f"{name} {', '.join(f'{one:.1f}' for one in runs)}" for name, runs in own.items()]
    return f"the plain layer with other seeds: {'; '.join(said)}"


def layers_page() -> str:
    """docs/layers/index.md in Markdown."""
    rows = [["layer", "year", *(claim.replace("_", " ") for claim in CLAIMS), "any mechanism"]]
    rows.append(["---"] * len(rows[0]))
    for name in layers():
        found = marks(name)
        link = f"[`{name}`]({name}.md)" if _is_head(name) else f"`{name}`"
        rows.append([link, str(get_layer(name).year), *("yes" if mark else "" for mark in found.values())])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    vision = VISION.replace("TABLE", vision_table()).replace("CHANCE", vision_chance())
    return f"{LAYERS_HEAD}{table}\n{LAYERS_LEGEND}{LAYERS_MORE}{vision}"


def layer_block(name: str) -> str:
    """What the registry knows of a layer and running it shows: source, abilities, mechanisms, options."""
    layer, found = get_layer(name), marks(name)
    source = f"{layer.paper}, {layer.year}" + (f", arXiv {layer.arxiv}." if layer.arxiv else ".")
    able = ", ".join(mark.replace("_", " ") for mark in CLAIMS if found[mark]) or "none"
    unable = ", ".join(mark.replace("_", " ") for mark in CLAIMS if not found[mark]) or "none"
    parts = [
        "## Source",
        source,
        "## What it can do",
        f"| found by running | |\n|---|---|\n| yes | {able} |\n| no | {unable} |",
    ]
    parts.append("## Over which mechanisms")
    refused = refusing(name)
    if not refused:
        parts.append("All of them: `attention=` is any name of `cumulant list`.")
    else:
        reasons: dict[str, list[str]] = {}
        for one, words in refused.items():
            reasons.setdefault(layer.not_over.get(one, words), []).append(f"`{one}`")
        rows = [f"| {', '.join(those)} | {why} |" for why, those in reasons.items()]
        parts.append("\n".join(["| not over | why |", "|---|---|", *rows]))
    if layer.options:
        said, given = _arguments(layer.build), inspect.signature(layer.build).parameters
        rows = [f"| `{one}` | {_default(given[one].default)} | {said.get(one, '')} |" for one in layer.options]
        parts += ["## Options", "\n".join(["| name | default | meaning |", "|---|---|---|", *rows])]
    return "\n\n".join(parts) + "\n"


def _default(value: object) -> str:
    return "" if value is None else written(value)


def _arguments(build: object) -> dict[str, str]:
    """What the docstring of a class says of each argument."""
    _, _, text = inspect.cleandoc(inspect.getdoc(build) or "").partition("Args:\n")
    found = re.findall(r"^    (\w+): (.*?)(?=^    \w+:|\Z)", text, re.DOTALL | re.MULTILINE)
    return {name: " ".join(words.split()) for name, words in found}


def _is_head(name: str) -> bool:
    return ".heads." in get_layer(name).build.__module__


def written_pages() -> dict[str, str]:
    """All pages as they should be, by path."""
    pages = {"docs/zoo/index.md": page(), "docs/layers/index.md": layers_page()}
    for name in filter(_is_head, layers()):
        path = f"docs/layers/{name}.md"
        text = (ROOT / path).read_text(encoding="utf-8") if (ROOT / path).exists() else LAYER_PAGE.replace("NAME", name)
        pages[path] = fill(text, {"layer": layer_block(name)})
    return pages


def main() -> None:
    for path, text in written_pages().items():
        (ROOT / path).parent.mkdir(exist_ok=True)
        (ROOT / path).write_text(text, encoding="utf-8")
        print(path)


if __name__ == "__main__":
    main()
