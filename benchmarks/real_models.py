"""What the tables of docs/real-models.md share: SAM 2, its pictures, prompts and masks, layers replaced for a while.

The model is what `python -m tools.models sam2` made, a folder, or the file of `--packed`; pictures are any folder of
them. Pictures are squared to the size of the model, as its own processor does.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant import zoo
from cumulant.call import Call
from cumulant.conversion.dial import _work
from cumulant.nn.swapped.choice import KEPT, Choice
from cumulant.nn.swapped.plan import applied, attention_layers
from cumulant.zoo.cluster import mechanism

MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
SUFFIXES = (".jpg", ".jpeg", ".png")
WINDOW = 8


def load(path: Path, size: int = 1024) -> Any:
    """Sam2Model from a folder or a packed file, for pictures of `size` pixels."""
    from transformers import Sam2Config, Sam2Model

    if not path.exists():
        raise SystemExit(f"there is no model at {path}: python -m tools.models sam2 makes one")
    config = Sam2Config()
    config.vision_config.backbone_feature_sizes = [[size // n, size // n] for n in (4, 8, 16)]
    config.prompt_encoder_config.image_size = size
    model = Sam2Model(config).eval()
    if path.is_dir():
        from safetensors.torch import load_file

        state = load_file(path / "model.safetensors")
    else:
        from tools.models import unpacked

        state = unpacked(path)
    model.load_state_dict(state)
    model.requires_grad_(False)
    return model


class Picture(NamedTuple):
    name: str
    pixels: np.ndarray  # (rows, cols, 3) of 8 bits

    def tensor(self, size: int) -> Tensor:
        """(1, 3, size, size), normalised."""
        from PIL import Image

        image = np.asarray(Image.fromarray(self.pixels).resize((size, size), Image.Resampling.BILINEAR))
        x = torch.from_numpy(image.copy()).permute(2, 0, 1).float() / 255
        return ((x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)).unsqueeze(0)


def pictures(folder: Path, crops: bool = True) -> list[Picture]:
    """Pictures of a folder, whole; then, with `crops`, a part of half the sides of each, at a place that is drawn."""
    from PIL import Image

    files = sorted(path for path in folder.glob("*") if path.suffix.lower() in SUFFIXES)
    if not files:
        raise SystemExit(f"{folder} holds no pictures ({', '.join(SUFFIXES)}): python -m tools.models pictures")
    whole = [Picture(path.stem, np.asarray(Image.open(path).convert("RGB"))) for path in files]
    if not crops:
        return whole
    draw = np.random.default_rng(0)
    parts = []
    for name, pixels in whole:
        rows, cols = (side // 2 for side in pixels.shape[:2])
        top, left = draw.integers(0, pixels.shape[0] - rows), draw.integers(0, pixels.shape[1] - cols)
        parts.append(Picture(f"{name} (crop)", pixels[top : top + rows, left : left + cols]))
    return whole + parts


def points(number: int, size: int, seed: int) -> Tensor:
    """(number, 2): places, one in each cell of a grid, not at the border."""
    draw = np.random.default_rng(seed)
    side = int(np.ceil(number**0.5))
    cells = np.stack(np.meshgrid(np.arange(side), np.arange(side)), -1).reshape(-1, 2)[:number]
    return torch.from_numpy(((cells + draw.uniform(0.1, 0.9, cells.shape)) / side * size).astype(np.float32))


class Answer(NamedTuple):
    """Masks (P, 3, R, C) of logits and predicted quality (P, 3), for P prompts."""

    masks: Tensor
    scores: Tensor

    @property
    def best(self) -> Tensor:
        """The mask that the model itself calls best, (P, R, C), bool."""
        return self.masks[torch.arange(len(self.masks)), self.scores.argmax(-1)] > 0


def ask(model: Any, embeddings: list[Tensor], points: Tensor | None = None, boxes: Tensor | None = None) -> Answer:
    """Masks for points (P, 2) or boxes (P, 4), in pixels of the squared picture."""
    given: dict[str, Any] = {}
    if points is not None:
        given["input_points"] = points[None, :, None].to(embeddings[-1])
    if boxes is not None:
        given["input_boxes"] = boxes[None].to(embeddings[-1])
    said = model(image_embeddings=embeddings, multimask_output=True, **given)
    return Answer(said.pred_masks[0].float(), said.iou_scores[0].float())


def boxes_of(masks: Tensor, size: int) -> Tensor:
    """Boxes (P, 4) around masks (P, R, C), in pixels of `size`; the whole picture around an empty one."""
    R, C = masks.shape[1:]
    found = []
    for mask in masks:
        at = mask.nonzero()
        low, high = (at.amin(0), at.amax(0) + 1) if len(at) else (at.new_zeros(2), at.new_tensor([R, C]))
        found.append(torch.stack((low[1] / C, low[0] / R, high[1] / C, high[0] / R)) * size)
    return torch.stack(found)


def overlap(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of masks (P, R, C), bool; 1 where both are empty."""
    both, either = (a & b).sum((1, 2)), (a | b).sum((1, 2))
    return torch.where(either > 0, both / either.clamp(min=1), torch.ones_like(both, dtype=torch.float32))


def global_layers(model: Any) -> list[str]:
    """Names of the vision encoder's attention layers that look at the whole picture."""
    blocks = model.vision_encoder.backbone.blocks
    return [f"backbone.blocks.{i}.attn" for i, block in enumerate(blocks) if not block.window_size]


@contextmanager
def replaced(model: Any, plan: dict[str, str] | str) -> Iterator[None]:
    """Mechanisms by name in the global layers (one for all, or by layer) for a while."""
    encoder = model.vision_encoder
    wanted = dict.fromkeys(global_layers(model), plan) if isinstance(plan, str) else plan
    kept = dict.fromkeys(attention_layers(encoder), KEPT)
    with applied(encoder, {**kept, **{name: Choice.named(x) for name, x in wanted.items()}}):
        yield


def share_of_work(name: str, tokens: int, D: int) -> float | None:
    """Multiply-adds of a mechanism in a layer of a picture, of softmax's; None where nobody counts them."""
    choice, side = Choice.named(name), int(tokens**0.5)
    if name == f"window{WINDOW}":
        return WINDOW * WINDOW / tokens
    if name == "cumulant2":
        return 2 * D * D / (tokens * 2 * D)
    if not name.startswith("cluster"):
        return 1.0
    empty = torch.empty(1, 1, tokens, D, device="meta")
    work = _work(choice, tokens, tokens, D, D, Call(empty, empty, empty, grid=(side, side)))
    return work / (tokens * tokens * 2 * D)


def _window(call: Call) -> Tensor:
    """The control: each query sees its own square of WINDOW x WINDOW tokens."""
    assert call.grid is not None
    rows, cols = call.grid

    def cut(x: Tensor) -> Tensor:
        x = x.unflatten(-2, (rows // WINDOW, WINDOW, cols // WINDOW, WINDOW))
        return x.transpose(-4, -3).flatten(-3, -2)

    out = F.scaled_dot_product_attention(*(cut(x) for x in call[:3]), scale=call.scale)
    return out.unflatten(-2, (WINDOW, WINDOW)).transpose(-4, -3).flatten(-5, -2)


zoo.register(
    zoo.Mechanism(
        name=f"window{WINDOW}",
        summary="attention within squares of a picture, a control",
        paper="-",
        year=2026,
        cost="L w^2 D",
        function=_window,
        **zoo.can("causal cross causal_cross key_mask wants_grid"),
    )
)

zoo.register(mechanism(256))  # 65,536 tokens want more clusters than the names of the library have
