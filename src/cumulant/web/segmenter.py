"""SAM 2 on the dial: click a picture, see the mask of softmax and that of clusters, nothing trained.

Its layers that see the whole picture are dialled; its windows are short and stay. Needs transformers and weights:
a folder that save_pretrained wrote (`python -m tools.models sam2` makes one), or a name of the Hub.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..data.decode import fit, pillow_image
from ..explain.masks import DIAL, Segmenter, ask, iou, pixels
from ..train.files import read_json
from .dial import Passed, Subject

if TYPE_CHECKING:
    from PIL.Image import Image

CACHE = Path("~/.cache/cumulant/models/sam2-hiera-tiny")  # where tools/models.py puts it
COLOUR = (30, 120, 255)
SHOWN = 512  # pixels of the pictures on the page


def is_segmenter(word: str) -> bool:
    """Whether a word of the command line is the folder of a SAM 2, or its name on the Hub."""
    config = Path(word).expanduser() / "config.json"
    if config.is_file():
        return read_json(config).get("model_type") in ("sam2", "sam2_video")
    return word.startswith("transformers:") and "sam2" in word.lower()


class SegmentingDial(Subject):
    """SAM 2 whose global layers are dialled."""

    score, short, same, pointed, steps = "IoU with softmax's mask", "IoU", 1.0, True, DIAL

    def __init__(self, word: str, device: str = "cpu", size: int = 1024) -> None:
        super().__init__()
        place = word.removeprefix("transformers:")
        folder = Path(place).expanduser()
        self.segmenter = Segmenter.open(folder if folder.is_dir() else place, size, device)
        self.model, self.layers = self.segmenter.model.vision_encoder, tuple(self.segmenter.layers)
        self.title = f"SAM 2: the mask under your click; {len(self.layers)} layers of {(size // 16) ** 2:,} tokens"

    def run(self, picture: Image) -> tuple[Tensor, ...]:
        sam, square = self.segmenter.model, np.asarray(fit(picture, self.segmenter.size).convert("RGB"))
        return tuple(sam.get_image_embeddings(pixels(square, self.segmenter.size).to(sam.device, sam.dtype)))

    def mask(self, passed: Passed, place: tuple[float, float]) -> Tensor:
        """The mask (R, C) that the model itself calls best for a point."""
        point = torch.tensor([place]) * self.segmenter.size
        return ask(self.segmenter.model, list(passed.kept), points=point).best[0]

    def shown(self, picture: Image, passed: Passed, place: tuple[float, float]) -> Image:
        square, image = fit(picture, SHOWN).convert("RGB"), pillow_image()
        mask = image.fromarray(self.mask(passed, place).cpu().numpy()).convert("L").resize(square.size)
        tinted = image.blend(square, image.new("RGB", square.size, COLOUR), 0.6)
        faint = image.blend(square, image.new("RGB", square.size, (255, 255, 255)), 0.45)
        return image.composite(tinted, faint, mask)

    def before(self, picture: Image) -> Image:
        return fit(picture, SHOWN).convert("RGB")

    def compared(self, passed: Passed, exact: Passed, place: tuple[float, float]) -> float:
        return float(iou(self.mask(passed, place), self.mask(exact, place)))

    def cost(self, name: str) -> float:
        return self.segmenter.cost(name)
