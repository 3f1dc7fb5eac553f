"""SAM 2 on the dial: click a picture, see the mask of softmax and that of clusters, nothing trained.

Its layers that see the whole picture are dialled; its windows are short and stay. Needs transformers and weights:
a folder that save_pretrained wrote (`python -m tools.models sam2` makes one), or a name of the Hub.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from ..conversion.dial import share_of_softmax
from ..data.decode import fit, pillow_image, to_tensor
from ..optional import needed
from .dial import Passed, Subject

if TYPE_CHECKING:
    from PIL.Image import Image

CACHE = Path("~/.cache/cumulant/models/sam2-hiera-tiny")  # where tools/models.py puts it
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
COLOUR = (30, 120, 255)


def is_segmenter(word: str) -> bool:
    """Whether a word of the command line is the folder of a SAM 2, or its name on the Hub."""
    config = Path(word).expanduser() / "config.json"
    if config.is_file():
        return json.loads(config.read_text()).get("model_type") == "sam2"
    return word.startswith("transformers:") and "sam2" in word.lower()


class SegmentingDial(Subject):
    """Sam2Model whose global layers are dialled."""

    score, same, pointed = "IoU with softmax's mask", 1.0, True

    def __init__(self, word: str, device: str = "cpu") -> None:
        super().__init__()
        with needed("SAM 2 needs transformers", "transformers"):
            from transformers import Sam2Model
        place = word.removeprefix("transformers:")
        folder = Path(place).expanduser()
        loaded: Any = Sam2Model.from_pretrained(folder if folder.is_dir() else place)
        self.sam = loaded
        self.sam.eval().requires_grad_(False).to(device)
        self.model = self.sam.vision_encoder
        blocks = list(self.sam.vision_encoder.backbone.blocks)
        seeing_all = [i for i, block in enumerate(blocks) if not block.window_size]
        self.layers = tuple(f"backbone.blocks.{i}.attn" for i in seeing_all)
        self.side = int(self.sam.config.prompt_encoder_config.image_size)
        attention = blocks[seeing_all[0]].attn
        self.width = attention.qkv.out_features // 3 // attention.num_attention_heads
        self.grid = (self.side // 16, self.side // 16)
        self.title = f"SAM 2: the mask under your click; {len(self.layers)} layers of {self.grid[0] ** 2:,} tokens"

    def run(self, picture: Image) -> tuple[Tensor, ...]:
        pixels = to_tensor(fit(picture, self.side).convert("RGB")).float() / 255
        mean, std = (torch.tensor(x).view(3, 1, 1) for x in (MEAN, STD))
        images = ((pixels - mean) / std)[None].to(self.sam.device, self.sam.dtype)
        return tuple(self.sam.get_image_embeddings(images))

    @torch.no_grad()
    def mask(self, passed: Passed, place: tuple[float, float]) -> Tensor:
        """The mask (R, C) that the model itself calls best for a point."""
        point = torch.tensor(place).mul(self.side).view(1, 1, 1, 2).to(passed.kept[-1])
        said = self.sam(image_embeddings=list(passed.kept), input_points=point, multimask_output=True)
        return said.pred_masks[0, 0, said.iou_scores[0, 0].argmax()] > 0

    def shown(self, picture: Image, passed: Passed, place: tuple[float, float]) -> Image:
        square = fit(picture, 512).convert("RGB")
        mask = pillow_image().fromarray(self.mask(passed, place).cpu().numpy()).convert("L").resize(square.size)
        tinted = pillow_image().blend(square, pillow_image().new("RGB", square.size, COLOUR), 0.6)
        grey = pillow_image().blend(square, pillow_image().new("RGB", square.size, (255, 255, 255)), 0.45)
        return pillow_image().composite(tinted, grey, mask)

    def before(self, picture: Image) -> Image:
        return fit(picture, 512).convert("RGB")

    def compared(self, passed: Passed, exact: Passed, place: tuple[float, float]) -> float:
        a, b = (self.mask(one, place) for one in (passed, exact))
        either = int((a | b).sum())
        return int((a & b).sum()) / either if either else 1.0

    def cost(self, name: str) -> float:
        return share_of_softmax(name, self.grid, self.width)
