"""LightGlue's matches with other attention, nothing trained: how many of softmax's it keeps.

    PYTHONPATH=src:. python benchmarks/lightglue_matches.py FOLDER PICTURES [--keypoints 1024] [--only 3] [--names ...]

FOLDER is what `python -m tools.models lightglue` made. Each picture is matched with itself under a perspective: DISK's
keypoints (kornia), in the order of their places (`placed`), of which a block is a part of the picture; matches do not
depend on the order. PICTURES may be files of `--keep FOLDER` (a pair's keypoints each): no kornia then. Self and cross
attention of all nine layers are replaced, but for those that a name leaves softmax ("cluster64+near=8 except
8.self_attn"); layers are never skipped and no point is pruned on the way. Two names are controls of softmax itself:
"another order" (keypoints shuffled, matches compared by keypoint) and "bfloat16" (queries, keys, values and answers of
all attention rounded to it). "... in half" gives attention its inputs in half precision, as LightGlue's own flash=True
does on a GPU; "softmax in half" is that.

| on a | times |
|---|---|
| GPU | seconds of the whole matcher after a first pass, and of its attention layers alone, call after call |
| CPU | processor seconds of one pass, and of its attention within it: other work on the machine counts little |

JSON goes to $OUT/lightglue_matches_NUMBER.json if OUT is set; rows that are there already are not measured again.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from real_models import pictures, share_of_work
from torch import Tensor

from cumulant.bench.provenance import provenance
from cumulant.conversion.paying import seconds_of
from cumulant.explain.matches import Matcher, Pair, kept, lightglue, placed

NAMES = (
    "another order",
    "bfloat16",
    "cumulant2",
    "parts64",
    "cluster64+near=4",
    "cluster64+near=8",
    "cluster64+near=16",
    "cluster64+near=16 except 8.self_attn",
    "cluster64+find=tree+near=4+near_rows=1",
    "cluster64+find=tree+near=8+near_rows=1",
    "cluster64+find=tree+leaves=8+opened=16+near=16+width=16",
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
    names = matcher.layers(_few(pair))
    if matcher.device.type == "cpu":
        return _matched_once(matcher, pair, names)
    matcher.matches(pair)
    start = time.perf_counter()
    found, spent = matcher.matches(pair), time.perf_counter() - start
    return found, spent, sum(seconds_of(matcher.model, [(pair,)], names).values())


def _matched_once(matcher: Matcher, pair: Pair, names: tuple[str, ...]) -> tuple[Tensor, float, float]:
    """The same in processor seconds of one pass."""
    attending, started = 0.0, 0.0

    def before(*_: Any) -> None:
        nonlocal started
        started = time.process_time()

    def after(*_: Any) -> None:
        nonlocal attending
        attending += time.process_time() - started

    with ExitStack() as stack:
        for module in map(matcher.model.get_submodule, names):
            stack.callback(module.register_forward_pre_hook(before).remove)
            stack.callback(module.register_forward_hook(after).remove)
        start = time.process_time()
        found, spent = matcher.matches(pair), time.process_time() - start
    return found, spent, attending


def _few(pair: Pair) -> Pair:
    """A pair of a few keypoints, enough for `convert` to see which layers are called."""
    return {side: {**x, **{key: x[key][:, :FEW] for key in ("keypoints", "descriptors")}} for side, x in pair.items()}


def in_another_order(matcher: Matcher, pair: Pair) -> tuple[Tensor, float, float]:
    """As `matched`, of keypoints that are shuffled; the numbers are those of the order given."""
    draw = torch.Generator().manual_seed(0)
    orders = {side: torch.randperm(x["keypoints"].shape[1], generator=draw) for side, x in pair.items()}
    shuffled = {
        side: {**x, **{key: x[key][:, orders[side].to(x[key].device)] for key in ("keypoints", "descriptors")}}
        for side, x in pair.items()
    }
    found, *seconds = matched(matcher, shuffled)
    numbers = torch.stack([orders[side][found[:, column]] for column, side in enumerate(("image0", "image1"))], -1)
    return numbers, *seconds


@contextmanager
def hooked(
    matcher: Matcher, pair: Pair, given: Callable[[Tensor], Tensor], said: Callable[[Tensor], Tensor]
) -> Iterator[None]:
    """Attention that is given its tensors through one function, and whose answers go through another, for a while."""

    def before(_: Any, args: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(given(x) if isinstance(x, Tensor) else x for x in args)

    def after(_: Any, __: Any, out: Tensor) -> Tensor:
        return said(out)

    with ExitStack() as stack:
        for name in matcher.layers(_few(pair)):
            inner = matcher.model.get_submodule(name)
            stack.callback(inner.register_forward_pre_hook(before).remove)
            stack.callback(inner.register_forward_hook(after).remove)
        yield


def rounded(matcher: Matcher, pair: Pair) -> tuple[Tensor, float, float]:
    """As `matched`, with what goes into attention and comes out of it rounded to bfloat16."""

    def to_bfloat16(x: Tensor) -> Tensor:
        return x.bfloat16().to(x.dtype)

    with hooked(matcher, pair, to_bfloat16, to_bfloat16):
        return matched(matcher, pair)


def in_half(matcher: Matcher, pair: Pair) -> tuple[Tensor, float, float]:
    """As `matched`, with attention in half precision and all else as it is."""
    before = torch.backends.cuda.flash_sdp_enabled()
    torch.backends.cuda.enable_flash_sdp(True)  # LightGlue without flash=True switches it off for the whole process
    try:
        with hooked(matcher, pair, Tensor.half, Tensor.float):
            return matched(matcher, pair)
    finally:
        torch.backends.cuda.enable_flash_sdp(before)


def measured(matcher: Matcher, pair: Pair, name: str) -> tuple[Tensor, float, float, dict[str, Any]]:
    """Matches and seconds with what `name` says; layers replaced, and their multiply-adds beside softmax's."""
    if name in CONTROLS:
        return *CONTROLS[name](matcher, pair), {"layers": 0}
    timed = in_half if name.endswith(HALF) else matched
    mechanism, _, left = name.removesuffix(HALF).partition(" except ")
    each = mechanism.split(" / ")
    given = mechanism if len(each) == 1 else dict(zip(KINDS, each, strict=True))
    with matcher.replaced(given, _few(pair), left.split()) as layers:
        found = timed(matcher, pair)
    tokens = pair["image1"]["keypoints"].shape[1]
    of_softmax = 1 - layers / len(matcher.layers(_few(pair)))
    shares = [share_of_work(x, tokens, WIDTH) for x in each]  # as many layers of each kind
    work = of_softmax + (1 - of_softmax) * sum(shares) / len(shares)
    return *found, {"layers": layers, "multiply_adds": work}


FEW, WIDTH = 128, 64
KINDS = ("self_attn", "cross_attn")  # of layers
HALF = " in half"
CONTROLS = {"another order": in_another_order, "bfloat16": rounded, f"softmax{HALF}": in_half}


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
    path = Path(os.environ["OUT"], f"lightglue_matches_{options.keypoints}.json") if "OUT" in os.environ else None
    rows: dict[str, list[dict[str, Any]]] = json.loads(path.read_text())["found"] if path and path.exists() else {}
    for picture, matcher, pair in pairs(options, device):
        names = [name for name in options.names if all(row["picture"] != picture for row in rows.get(name, []))]
        if not names:
            continue
        exact, of_softmax, of_attention = matched(matcher, pair)
        print(
            f"{picture}: softmax finds {len(exact)} matches, {of_softmax:.4f} s, {of_attention:.4f} of it", flush=True
        )
        for name in names:
            found, spent, attending, about = measured(matcher, pair, name)
            row = {"picture": picture, "matches": len(exact), "found": len(found), **about}
            row |= {"kept": kept(found, exact), "seconds": spent, "softmax": of_softmax}
            row |= {"attention": attending, "softmax_attention": of_attention}
            rows.setdefault(name, []).append(row)
            print(name, row, flush=True)
            if path:
                said = " ".join(["python benchmarks/lightglue_matches.py FOLDER PICTURES", *sys.argv[3:]])
                record = {"provenance": provenance(said), "keypoints": options.keypoints, "found": rows}
                path.write_text(json.dumps(record | {"device": device, "threads": torch.get_num_threads()}, indent=1))


if __name__ == "__main__":
    main()
