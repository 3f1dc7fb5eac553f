"""LightGlue's matches with other attention, nothing trained: how many of softmax's it keeps.

    PYTHONPATH=src:. python benchmarks/lightglue_matches.py FOLDER PICTURES [--keypoints 1024] [--only 3] [--names ...]

FOLDER is what `python -m tools.models lightglue` made. Each picture is matched with itself under a perspective: DISK's
keypoints (kornia), in the order of their places (`placed`), of which a block is a part of the picture; matches do not
depend on the order. PICTURES may be files of `--keep FOLDER` (a pair's keypoints each): no kornia then. Self and cross
attention of all nine layers are replaced, but for those that a name leaves softmax ("cluster64+near=8 except
8.self_attn"); layers are never skipped and no point is pruned on the way. Times are those of the machine it runs on: of
the whole matcher, and of its attention layers alone, call after call. JSON goes to
$OUT/lightglue_matches_NUMBER.json if OUT is set.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from real_models import pictures
from torch import Tensor

from cumulant.bench.provenance import provenance
from cumulant.conversion.paying import seconds_of
from cumulant.explain.matches import Matcher, Pair, kept, lightglue, placed

NAMES = (
    "cumulant2",
    "cluster64+near=4",
    "cluster64+near=8",
    "cluster64+near=16",
    "cluster64+near=16 except 8.self_attn",
    "cluster64+find=tree+near=4+near_rows=1",
    "cluster64+find=tree+near=8+near_rows=1",
    "cluster64+find=tree+leaves=4+opened=16+near=16",
)


def pairs(options: argparse.Namespace, device: str) -> Iterator[tuple[str, Matcher, Pair]]:
    """Names and keypoints of pictures and of the same from another side, with the matcher for them."""
    files = sorted(options.pictures.glob("*.pt"))
    if files:
        matcher = Matcher(lightglue(options.folder).to(device), None, device)
        for path in files[: options.only]:
            stored = torch.load(path, map_location=device, weights_only=True)
            pair = {side: {key: x.float() for key, x in points.items()} for side, points in stored.items()}
            yield path.stem, matcher, placed(pair, options.keypoints)
        return
    matcher, shown = Matcher.open(options.folder, device), pictures(options.pictures, crops=False)
    for picture in shown[:: max(1, len(shown) // options.only)][: options.only]:
        pair = matcher.pair(picture.pixels, options.keypoints)
        if options.keep:
            halves = {side: {key: y.half() for key, y in points.items()} for side, points in pair.items()}
            torch.save(halves, options.keep / f"{picture.name}.pt")
        yield picture.name, matcher, pair


def matched(matcher: Matcher, pair: Pair) -> tuple[Tensor, float, float]:
    """Matches; the seconds of a pass, and of its attention layers."""
    names = matcher.layers(pair)
    matcher.matches(pair)
    start = time.perf_counter()
    found, spent = matcher.matches(pair), time.perf_counter() - start
    return found, spent, sum(seconds_of(matcher.model, [(pair,)], names).values())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("pictures", type=Path)
    parser.add_argument("--keypoints", type=int, default=1024)
    parser.add_argument("--only", type=int, default=3)
    parser.add_argument("--names", nargs="+", default=NAMES)
    parser.add_argument("--keep", type=Path, help="a folder for the keypoints found")
    options = parser.parse_args()
    warnings.simplefilter("ignore")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    rows: dict[str, list[dict[str, Any]]] = {}
    for picture, matcher, pair in pairs(options, device):
        matcher.layers(pair)
        exact, of_softmax, of_attention = matched(matcher, pair)
        print(
            f"{picture}: softmax finds {len(exact)} matches, {of_softmax:.4f} s, {of_attention:.4f} of it", flush=True
        )
        for name in options.names:
            mechanism, _, left = name.partition(" except ")
            with matcher.replaced(mechanism, pair, left.split()) as layers:
                found, spent, attending = matched(matcher, pair)
            row = {"picture": picture, "matches": len(exact), "found": len(found), "layers": layers}
            row |= {"kept": kept(found, exact), "seconds": spent, "softmax": of_softmax}
            row |= {"attention": attending, "softmax_attention": of_attention}
            rows.setdefault(name, []).append(row)
            print(name, row, flush=True)
            if out := os.environ.get("OUT"):
                said = " ".join(["python benchmarks/lightglue_matches.py FOLDER PICTURES", *sys.argv[3:]])
                record = {"provenance": provenance(said), "keypoints": options.keypoints, "found": rows}
                Path(out, f"lightglue_matches_{options.keypoints}.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
