"""Queries, keys and values of real models at about 8,192 tokens: time and error of attention beside softmax.

    PYTHONPATH=src:. python benchmarks/captured_qkv.py [--sam2 MODEL PICTURES] [--lightglue FOLDER PAIR]
        [--smollm2 MODEL TEXT | --smollm2 FILE] [--tokens 8192] [--batch 8] [--keep FILE]

| of | captured | tokens |
|---|---|---|
| SAM 2 Hiera-Tiny | its three global layers, one picture of 1,440 pixels | 90 x 90, 4 heads of 96 |
| LightGlue | self and cross attention of layers 0, 4 and 8, keypoints in the order of their places | 4 heads of 64 |
| SmolLM2-135M | layers 3 and 15, causal, in a book | 9 query and 3 key heads of 64 |

bfloat16, the same call `--batch` times, so that the GPU is full; softmax is the quicker of cuDNN and flash, in a CUDA
graph, as `sam2_speed.py` measures it. On a CPU errors and multiply-adds alone, in float32. `--keep` writes what was
captured of SmolLM2, of each layer one key head and its query heads, rounded to 8 bits, and ends: what takes a GPU can
then be without the model, and has these heads three times. JSON goes to $OUT/captured_qkv.json if OUT is set, row by
row. Controls are windows (`real_models.CONTROLS`; that of SAM 2 wants `--tokens 7744`, 88 x 88) and the second order.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from real_models import load, pictures
from sam2_speed import captured, layers
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
        "cumulant2",
    ),
    "lightglue": (
        *(f"cluster64+near={t}" for t in (1, 2)),
        *(f"cluster{n}+near=1{far}" for n in (32, 16) for far in ("", "+response=0")),
        "cluster64+near=1+response=0",
        *(f"cluster64+find=tree+near={t}" for t in (2, 4, 8)),
        "cumulant2",
    ),
    "smollm2": (
        *(f"cluster64+block=64+recent={n}+response=0+sinks=4" for n in (1, 4, 8)),
        "cluster64+block=128+recent=1+response=0+sinks=4",
        *(f"cluster64+block=64+recent={n}+response=0" for n in (1, 4, 8)),
        "cumulant2",
    ),
}


PARTS = ("query", "key", "value")
GROUPS = 3  # key heads of SmolLM2


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


def of_sam2(model: Path, shown: Path, tokens: int, device: str) -> dict[str, Call]:
    size = 16 * int(tokens**0.5)
    made = load(model, size).to(device)
    return captured(made, pictures(shown, crops=False)[-1].tensor(size).to(device))


def of_lightglue(folder: Path, pair: Path, tokens: int, device: str) -> dict[str, Call]:
    made = lightglue(folder).to(device)
    kept = torch.load(pair, map_location=device, weights_only=True)
    data = placed({side: {key: x.float() for key, x in points.items()} for side, points in kept.items()}, tokens)
    every = convert(made, "cluster4+near=4", force=True, example=(data,)).replaced  # all is near: softmax
    found = seen(lambda: made(data), made, [name for name in every if name.split(".")[1] in ("0", "4", "8")])
    return {name: call for name, call in found.items() if "again" not in name}  # both pictures are alike


def of_smollm2(model: Path, text: Path | None, tokens: int, device: str) -> dict[str, Call]:
    if text is None:
        kept = {name: x.to(device).repeat(1, GROUPS, 1, 1) for name, x in unpack(model).items()}
        names = dict.fromkeys(name.rpartition(" ")[0] for name in kept)
        return {
            name: Call(*(kept[f"{name} {part}"] for part in PARTS), is_causal=True, enable_gqa=True) for name in names
        }
    from transformers import AutoModelForCausalLM, AutoTokenizer

    made: Any = AutoModelForCausalLM.from_pretrained(model).eval().to(device)
    ids = torch.tensor(AutoTokenizer.from_pretrained(model)(text.read_text()).input_ids)
    start = len(ids) // 3
    names = [f"model.layers.{layer}.self_attn" for layer in (3, 15)]
    x = ids[None, start : start + tokens].to(device)
    with applied(made, dict.fromkeys(attention_layers(made), KEPT)):
        found = seen(lambda: made.model(x, use_cache=False), made, names)
    return {name: call._replace(key_mask=None, enable_gqa=True) for name, call in found.items()}


@torch.no_grad()
def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, places in (("sam2", 2), ("lightglue", 2), ("smollm2", "+")):
        parser.add_argument(f"--{name}", nargs=places, type=Path)
    parser.add_argument("--tokens", type=int, default=8192)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--names", nargs="+")
    parser.add_argument("--keep", type=Path)
    options = parser.parse_args()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    given = {name: getattr(options, name) for name in NAMES if getattr(options, name)}
    if not given:
        raise SystemExit(
            "nothing to capture: give --sam2, --lightglue or --smollm2 (python -m tools.models makes them)"
        )
    command = "python benchmarks/captured_qkv.py " + " ".join(f"--{name} ..." for name in given)
    record: dict[str, Any] = {"provenance": provenance(command), "batch": options.batch, "found": {}}
    makers: dict[str, Callable[..., dict[str, Call]]]
    makers = {"sam2": of_sam2, "lightglue": of_lightglue, "smollm2": of_smollm2}
    for name, places in given.items():
        calls = makers[name](*(*places, None)[:2], options.tokens, device)
        if options.keep:
            pack({f"{layer} {part}": x for layer, call in calls.items() for part, x in a_group(call)}, options.keep)
            continue
        for layer, call in calls.items():
            shape = (options.batch, *[-1] * 3)
            if device != "cpu":
                parts = {key: getattr(call, key).bfloat16().expand(*shape) for key in PARTS}
                call = call._replace(**{key: x.contiguous() for key, x in parts.items()})
            found = record["found"].setdefault(name, [])

            def keep(rows: list[dict[str, Any]], found: list[Any] = found, before: int = len(found)) -> None:
                found[before:] = rows
                if out := os.environ.get("OUT"):
                    Path(out, "captured_qkv.json").write_text(json.dumps(record))

            layers({f"{name} {layer}": call}, list(options.names or NAMES[name]), keep)


if __name__ == "__main__":
    main()
