"""LightGlue on the dial: matches between a picture and its view from another side, nothing trained.

Needs the folder of `python -m tools.models lightglue`, and kornia for the keypoints.
"""

from __future__ import annotations

from colorsys import hsv_to_rgb
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..data.decode import pillow_image
from ..explain.masks import share_of_work
from ..explain.matches import Matcher, from_two_sides, kept
from .dial import Passed, Subject

if TYPE_CHECKING:
    from PIL.Image import Image

CACHE = Path("~/.cache/cumulant/models/lightglue")  # where tools/models.py puts it
SHOWN = 384  # pixels of a row on the page
DOT = 2  # pixels around a keypoint that has a partner
LINES = 16  # every so many matches get a line: all of them would hide the picture
WIDTH = 64  # of a head
STEPS = {  # by rising cost; a block of keypoints is a part of the picture
    "cumulant2": "linear",
    "cluster16+response=pooled": "16 parts of the picture",
    "cluster64+response=pooled": "64 parts",
    "cluster64+near=2+near_rows=1+rank=mass": "64 parts, 2 exact",
    "cluster64+find=tree+near=4+near_rows=1": "64 by content, 4 exact",
    "cluster64+find=tree+near=8+near_rows=1": "64 by content, 8 exact",
    "softmax": "softmax",
}


class MatchingDial(Subject):
    """LightGlue whose self and cross attention are dialled."""

    score, short, same, steps = "share of softmax's matches", "kept", 1.0, STEPS

    def __init__(self, matcher: Matcher, number: int = 1024) -> None:
        super().__init__()
        self.matcher, self.number, self.model = matcher, number, matcher.model
        self.layers: tuple[str, ...] = ()
        self.title = f"LightGlue: {number:,} keypoints, and which belong together from another side"

    def run(self, picture: Image) -> tuple[Tensor, ...]:
        pair = self.matcher.pair(np.asarray(picture.convert("RGB")), self.number)
        places = (pair[side]["keypoints"][0].cpu() / pair[side]["image_size"].cpu() for side in ("image0", "image1"))
        return (self.matcher.matches(pair), *places)

    def passed(self, key: str, picture: Image, name: str) -> Passed:
        """Layers are those that the first picture passes: LightGlue's are found by a look at a call."""
        if not self.layers:
            pair = self.matcher.pair(np.asarray(picture.convert("RGB")), self.number)
            self.layers = self.matcher.layers(pair)
        return super().passed(key, picture, name)

    def shown(self, picture: Image, passed: Passed, place: tuple[float, float]) -> Image:
        """Both views, partners in one colour."""
        from PIL import ImageDraw

        canvas = self.before(picture)
        wide, high = canvas.width, canvas.height // 2
        pen = ImageDraw.Draw(canvas)
        found, left, right = passed.kept
        for number, (a, b) in enumerate(found.tolist()):
            (x0, y0), (x1, y1) = left[a].tolist(), right[b].tolist()
            colour = tuple(round(255 * c) for c in hsv_to_rgb(0.85 * x0, 0.9, 1.0 - 0.4 * y0))  # by its place above
            here, there = (x0 * wide, y0 * high), (x1 * wide, high + y1 * high)
            if number % LINES == 0:
                pen.line((*here, *there), fill=colour)
            for x, y in (here, there):
                pen.ellipse((x - DOT, y - DOT, x + DOT, y + DOT), fill=colour)
        return canvas

    def before(self, picture: Image) -> Image:
        """The picture, and below it the same from another side."""
        pixels = torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1)
        views = from_two_sides(pixels.float()[None] / 255, self.number)
        image = pillow_image().fromarray(np.concatenate([_pixels(y) for y in views.values()]))
        return image.resize((SHOWN, 2 * round(SHOWN * image.height / 2 / image.width)))

    def compared(self, passed: Passed, exact: Passed, place: tuple[float, float]) -> float:
        return kept(passed.kept[0], exact.kept[0])

    def cost(self, name: str) -> float:
        return share_of_work(name, self.number, WIDTH)


def _pixels(x: Tensor) -> np.ndarray:
    return (x[0].clamp(0, 1) * 255).byte().permute(1, 2, 0).numpy()
