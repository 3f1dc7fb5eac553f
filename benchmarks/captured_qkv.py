"""Queries, keys and values of real models at about 8,192 tokens: time and error of attention beside softmax.

    PYTHONPATH=src:. python benchmarks/captured_qkv.py [--sam2 MODEL PICTURES] [--lightglue FOLDER PAIR...]
        [--smollm2 MODEL TEXT | --smollm2 FILE] [--pictures 1] [--pieces 1] [--tokens 8192] [--batch 8] [--keep FILE]

| of | captured | tokens |
|---|---|---|
| SAM 2 Hiera-Tiny | its three global layers, pictures of 1,408 pixels | 88 x 88, 4 heads of 96 |
| LightGlue | self and cross attention of layers 0, 4 and 8, keypoints in the order of their places | 4 heads of 64 |
| SmolLM2-135M | layers 3 and 15, causal, in a book | 9 query and 3 key heads of 64 |

bfloat16; softmax is the quicker of cuDNN and flash, in a CUDA graph, as `sam2_speed.py` measures it. On a CPU errors
and multiply-adds alone, in float32. JSON goes to $OUT/captured_qkv.json if OUT is set, row by row.

| examples | one | several |
|---|---|---|
| SAM 2 | the last picture of the folder | `--pictures N`: evenly spaced over the folder, the last one first |
| LightGlue | PAIR, a file of `lightglue_matches.py --keep` | several files, or a folder of them |
| SmolLM2 | the piece at a third of the book | `--pieces N`: at 1, 2, ... N parts of N + 2; of a FILE all that it has |

Times are of the first, the same call `--batch` times, so that the GPU is full; errors of each, their mean with its
standard error. `--keep` writes what was captured of SmolLM2, of each layer one key head and its query heads, rounded to
8 bits, and ends: what takes a GPU can then be without the model, and has these heads three times. Controls are windows
(`real_models.CONTROLS`) and the second order.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
from collections.abc import Callable, Iterator
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from real_models import WINDOW, load, pictures
from sam2_speed import captured, layers, line
from torch import Tensor, nn

from cumulant import convert
from cumulant.bench.provenance import provenance
from cumulant.call import Call
from cumulant.explain.matches import lightglue, placed
from cumulant.nn.swapped.choice import KEPT, observing
from cumulant.nn.swapped.plan import applied, attention_layers
from tools.packing import pack, unpack

NAMES = {
    "sam2": (
        *(f"cluster64+find=tree+near={t}" for t in (2, 4, 8)),
        *(f"cluster64+near={t}" for t in (2, 4, 8)),
        "cluster32+near=1",
        "window8",
        "cumulant2",
    ),
    "lightglue": (
        *(f"cluster64+near={t}" for t in (1, 2)),
        *(f"cluster{n}+near=1{far}" for n in (32, 16) for far in ("", "+response=0")),
        "cluster64+near=1+response=0",
        *(f"cluster64+find=tree+near={t}" for t in (2, 4, 8)),
        "parts64",
        "cumulant2",
    ),
    "smollm2": (
        *(f"cluster64+block=64+recent={n}+response=0+sinks=4" for n in (1, 4, 8)),
        "cluster64+block=128+recent=1+response=0+sinks=4",
        *(f"cluster64+block=64+recent={n}+response=0" for n in (1, 4, 8)),
        "recent512",
        "cumulant2",
    ),
}


PARTS = ("query", "key", "value")
GROUPS = 3  # key heads of SmolLM2
Example = tuple[str, dict[str, Call]]  # what it is called, and the calls of its layers


def a_group(call: Call) -> Iterator[tuple[str, Tensor]]:
    """Of the first key head and its query heads: names and tensors."""
    for part in PARTS:
        x = getattr(call, part)
        yield part, x[:, : x.shape[1] // GROUPS]


def seen(run: Callable[[], Any], model: nn.Module, names: list[str]) -> dict[str, Call]:
    """The calls of the layers `names` of a converted model; a layer that is called twice counts twice."""
    found: dict[str, Call] = {}
    modules = {model.get_submodule(name): name for name in names}

    def see(module: nn.Module, call: Call) -> None:
        if module in modules:
            name = modules[module]
            tensors = {key: getattr(call, key).clone() for key in PARTS}
            found[name if name not in found else f"{name}, again"] = call._replace(**tensors)

    with observing(see):
        run()
    return found


def of_sam2(model: Path, shown: Path, tokens: int, device: str, number: int = 1) -> Iterator[Example]:
    size = 16 * WINDOW * int(tokens**0.5 / WINDOW)
    made, every = load(model, size).to(device), pictures(shown, crops=False)
    if number > len(every):
        raise SystemExit(f"--pictures {number} of a folder that holds {len(every)}")
    for at in range(number):
        picture = every[len(every) * at // number - 1]
        yield picture.name, captured(made, picture.tensor(size).to(device))


def of_lightglue(folder: Path, pairs: list[Path], tokens: int, device: str) -> Iterator[Example]:
    files = [file for pair in pairs for file in (sorted(pair.glob("*.pt")) if pair.is_dir() else [pair])]
    if not files:
        raise SystemExit(f"{', '.join(map(str, pairs))} holds no pairs (.pt): lightglue_matches.py --keep writes them")
    made = lightglue(folder).to(device)
    names: list[str] = []
    for path in files:
        kept = torch.load(path, map_location=device, weights_only=True)
        data = placed({side: {key: x.float() for key, x in points.items()} for side, points in kept.items()}, tokens)
        if not names:  # all is near: softmax
            every = convert(made, "cluster4+near=4", force=True, example=(data,)).replaced
            names = [name for name in every if name.split(".")[1] in ("0", "4", "8")]
        run = partial(made, data)
        yield path.stem, {name: x for name, x in seen(run, made, names).items() if "again" not in name}  # sides: alike


def pieces_of_smollm2(model: Path, text: Path, tokens: int, device: str, number: int = 1) -> Iterator[Example]:
    """Called by the number of their first token."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made: Any = AutoModelForCausalLM.from_pretrained(model).eval().to(device)
    ids = torch.tensor(AutoTokenizer.from_pretrained(model)(text.read_text()).input_ids)
    step = len(ids) // (number + 2)
    if number > 1 and step < tokens:
        raise SystemExit(f"--pieces {number} of {tokens} tokens want a text of {(number + 2) * tokens}, not {len(ids)}")
    names = [f"model.layers.{layer}.self_attn" for layer in (3, 15)]
    made.model.layers = made.model.layers[:16]  # nobody looks at what comes after
    own: dict[str, Any] = {"key_mask": None, "enable_gqa": True}
    with applied(made, dict.fromkeys(attention_layers(made), KEPT)):
        for start in range(step, (number + 1) * step, step):
            run = partial(made.model, ids[None, start : start + tokens].to(device), use_cache=False)
            yield str(start), {name: x._replace(**own) for name, x in seen(run, made, names).items()}


def of_smollm2(model: Path, text: Path, tokens: int, device: str) -> dict[str, Call]:
    """The calls of the piece at a third of the text."""
    return next(pieces_of_smollm2(model, text, tokens, device))[1]


def unpacked(file: Path, device: str) -> Iterator[Example]:
    """Pieces of a packed file, whose keys are "layer part" where it has one, else "layer part piece"."""
    kept: dict[str, dict[str, dict[str, Tensor]]] = {}
    for name, x in unpack(file).items():
        layer, part, *piece = name.split(" ")
        kept.setdefault(" ".join(piece) or "one", {}).setdefault(layer, {})[part] = x
    for example, found in kept.items():
        yield example, {layer: thrice(parts, device) for layer, parts in found.items()}


def thrice(parts: dict[str, Tensor], device: str) -> Call:
    """The causal call of what `a_group` took, in the place of every group."""
    query, key, value = (parts[part].to(device).repeat(1, GROUPS, 1, 1) for part in PARTS)
    return Call(query, key, value, is_causal=True, enable_gqa=True)


def measured(
    calls: dict[str, Call], names: list[str], rows: list[dict[str, Any]], batch: int, write: Callable[[], None]
) -> None:
    """Add the errors of an example to `rows`; the first makes them, with the times of `batch` of it at once."""
    timed = not rows

    def keep(new: list[dict[str, Any]]) -> None:
        add(rows, new[-1])
        write()

    for layer, call in calls.items():
        if call.query.is_cuda:
            shape = (batch if timed else 1, *[-1] * 3)
            parts = {key: getattr(call, key).bfloat16().expand(*shape) for key in PARTS}
            call = call._replace(**{key: x.contiguous() for key, x in parts.items()})
        layers({layer: call}, names, keep, timed)


def add(rows: list[dict[str, Any]], new: dict[str, Any]) -> None:
    """Put an error with those of the same layer and name; "squared_error" is their mean, None where one is."""
    row = next((row for row in rows if (row["layer"], row["name"]) == (new["layer"], new["name"])), None)
    if row is None:
        rows.append(row := {**new, "squared_errors": []})
    each = row["squared_errors"] = [*row["squared_errors"], new["squared_error"]]
    whole = None not in each
    row["squared_error"] = statistics.fmean(each) if whole else None
    row["standard_error"] = statistics.stdev(each) / len(each) ** 0.5 if whole and len(each) > 1 else None


def table(rows: list[dict[str, Any]]) -> None:
    """Print mean errors with their standard errors and the number of examples."""
    for layer, of_layer in groupby(rows, lambda row: row["layer"]):
        print(layer)
        for row in of_layer:
            spread = "" if row["standard_error"] is None else f" ± {row['standard_error']:.4f}"
            print(line(row, f"{spread} ({len(row['squared_errors'])})"), flush=True)


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sam2", nargs=2, type=Path, metavar=("MODEL", "PICTURES"))
    parser.add_argument("--lightglue", nargs="+", type=Path, metavar=("FOLDER", "PAIR"))
    parser.add_argument("--smollm2", nargs="+", type=Path, metavar=("MODEL", "TEXT"))
    for name in ("pictures", "pieces"):
        parser.add_argument(f"--{name}", type=int, default=1)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--names", nargs="+")
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    if min(options.pictures, options.pieces) < 1:
        parser.error(f"--pictures and --pieces are at least 1, not {options.pictures} and {options.pieces}")
    if options.lightglue and len(options.lightglue) < 2:
        parser.error("--lightglue wants a folder and pairs: FOLDER PAIR...")
    if len(options.smollm2 or "") > 2 or (options.keep and len(options.smollm2 or "") < 2):
        parser.error("--smollm2 wants MODEL TEXT or FILE, and --keep the former")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = {name: getattr(options, name) for name in NAMES if getattr(options, name)}
    if not given:
        raise SystemExit(
            "nothing to capture: give --sam2, --lightglue or --smollm2 (python -m tools.models makes them)"
        )
    how = (options.tokens, device)
    makers: dict[str, Callable[..., Iterator[Example]]] = {
        "sam2": lambda model, shown: of_sam2(model, shown, *how, options.pictures),
        "lightglue": lambda folder, *pairs: of_lightglue(folder, list(pairs), *how),
        "smollm2": lambda model, text=None: (
            pieces_of_smollm2(model, text, *how, options.pieces) if text else unpacked(model, device)
        ),
    }
    if options.keep:
        kept = {
            f"{layer} {part} {piece}": x.cpu()
            for piece, calls in makers["smollm2"](*options.smollm2)
            for layer, call in calls.items()
            for part, x in a_group(call)
        }
        pack(kept, options.keep)
        return
    command = "python benchmarks/captured_qkv.py " + " ".join(f"--{name} ..." for name in given)
    command += "".join(f" --{key} {getattr(options, key)}" for key in ("pictures", "pieces", "tokens"))
    record: dict[str, Any] = {"provenance": provenance(command), "batch": options.batch, "examples": {}, "found": {}}

    def write() -> None:
        if out := os.environ.get("OUT"):
            Path(out, "captured_qkv.json").write_text(json.dumps(record))

    for name, places in given.items():
        names = list(dict.fromkeys(options.names or NAMES[name]))
        examples, rows = (record[key].setdefault(name, []) for key in ("examples", "found"))
        for example, calls in makers[name](*places):
            if examples:
                print(f"{name}: errors of {example}", flush=True)
            examples.append(example)
            measured({f"{name} {layer}": call for layer, call in calls.items()}, names, rows, options.batch, write)
            del calls  # before the next are captured
        if len(examples) > 1:
            table(rows)


if __name__ == "__main__":
    main()
