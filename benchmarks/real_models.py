"""What the tables of docs/real-models share: SAM 2, its pictures, prompts and masks, layers replaced for a while.

The model is what `python -m tools.models sam2` made, a folder, or the file of `--packed`; pictures are any folder of
them. Pictures are squared to the size of the model, as its own processor does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant import zoo
from cumulant.call import Call
from cumulant.explain import masks
from cumulant.explain.masks import Masks as Masks
from cumulant.explain.masks import ask as ask
from cumulant.explain.masks import global_layers as global_layers
from cumulant.explain.masks import iou as iou
from cumulant.explain.masks import pixels as prepared
from cumulant.explain.masks import replaced as replaced

SUFFIXES = (".jpg", ".jpeg", ".png")
WINDOW, PARTS, RECENT, SINKS = 8, 64, 512, 4
ROUNDED = "bfloat16"  # softmax with the encoder's products in it
ANOTHER = "another kernel"  # softmax by one that torch does not take by itself


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
        from tools.packing import unpack

        state = unpack(path)
    missing, unknown = model.load_state_dict(state, strict=False)
    if unknown or any(name.startswith("vision_encoder") for name in missing):
        raise SystemExit(f"{path} has weights of another model: missing {missing[:3]}, unknown {unknown[:3]}")
    if missing:
        del model.mask_decoder  # a file of the encoder alone: there are no masks to be asked for
    model.requires_grad_(False)
    return model


class Picture(NamedTuple):
    name: str
    pixels: np.ndarray  # (rows, cols, 3) of 8 bits

    def tensor(self, size: int) -> Tensor:
        """(1, 3, size, size), normalised."""
        return prepared(self.pixels, size)


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


def boxes_of(masks: Tensor, size: int) -> Tensor:
    """Boxes (P, 4) around masks (P, R, C), in pixels of `size`; the whole picture around an empty one."""
    R, C = masks.shape[1:]
    found = []
    for mask in masks:
        at = mask.nonzero()
        low, high = (at.amin(0), at.amax(0) + 1) if len(at) else (at.new_zeros(2), at.new_tensor([R, C]))
        found.append(torch.stack((low[1] / C, low[0] / R, high[1] / C, high[0] / R)) * size)
    return torch.stack(found)


@contextmanager
def shared_start(model: Any, held: dict[int, Tensor]) -> Iterator[None]:
    """Encoder blocks before the first global layer answer from `held`, or fill it where it is empty.

    They give the same for a picture whatever stands in the global layers; only what later parts read is held.
    """
    backbone = model.vision_encoder.backbone
    first = int(global_layers(model)[0].split(".")[2])
    read, filled = {*backbone.stage_ends, first - 1}, bool(held)

    def answering(number: int, block: Any) -> Any:
        def forward(x: Tensor, **options: Any) -> Tensor:
            if filled:
                return held.get(number, x)
            out = type(block).forward(block, x, **options)
            if number in read:
                held[number] = out
            return out

        return forward

    for number, block in enumerate(backbone.blocks[:first]):
        block.forward = answering(number, block)
    try:
        yield
    finally:
        for block in backbone.blocks[:first]:
            del block.forward


def plan(name: str, layers: list[str]) -> dict[str, str]:
    """What the layers get under that name."""
    each = ["softmax"] if name in (ROUNDED, ANOTHER) else name.split(" / ")
    if len(each) not in (1, len(layers)):
        raise SystemExit(f"{name!r} names {len(each)} mechanisms, and there are {len(layers)} global layers")
    return dict(zip(layers, each * len(layers) if len(each) == 1 else each, strict=True))


def _served(call: Call, is_causal: bool) -> None:
    if call.key_mask is not None or call.is_causal != is_causal:
        raise ValueError(f"this control serves calls without a mask, is_causal={is_causal}, alone")


def _window(call: Call) -> Tensor:
    """Each query sees its own square of WINDOW x WINDOW tokens of a picture."""
    _served(call, is_causal=False)
    assert call.grid is not None
    rows, cols = call.grid

    def cut(x: Tensor) -> Tensor:
        x = x.unflatten(-2, (rows // WINDOW, WINDOW, cols // WINDOW, WINDOW))
        return x.transpose(-4, -3).flatten(-3, -2)

    out = F.scaled_dot_product_attention(*(cut(x) for x in call[:3]), scale=call.scale)
    return out.unflatten(-2, (WINDOW, WINDOW)).transpose(-4, -3).flatten(-5, -2)


def _own_part(call: Call) -> Tensor:
    """Each query sees the keys of its own of PARTS runs; in cross attention those of the run with its number."""
    _served(call, is_causal=False)
    runs = zip(*(x.tensor_split(PARTS, -2) for x in call[:3]), strict=True)
    return torch.cat([F.scaled_dot_product_attention(*run, scale=call.scale) for run in runs], -2)


def _recent(call: Call) -> Tensor:
    """Each query sees the last RECENT keys up to its own, and the first SINKS."""
    _served(call, is_causal=True)
    row, column = (torch.arange(x.shape[-2], device=x.device) for x in call[:2])
    age = row[:, None] - column
    seen = (age >= 0) & ((age < RECENT) | (column < SINKS))
    how: dict[str, Any] = {"scale": call.scale, "enable_gqa": call.enable_gqa}
    return F.scaled_dot_product_attention(*call[:3], attn_mask=seen, **how)


# Windows, as controls by name: what a query sees, and its share of L keys. `convert` takes what can answer every call,
# so they say that they can, and each refuses what it does not serve.
CONTROLS: dict[str, tuple[Callable[[Call], Tensor], Callable[[int], float]]] = {
    f"window{WINDOW}": (_window, lambda L: WINDOW * WINDOW / L),
    f"parts{PARTS}": (_own_part, lambda L: 1 / PARTS),
    f"recent{RECENT}": (_recent, lambda L: (RECENT + SINKS) / L),
}
for _name, (_function, _) in CONTROLS.items():
    zoo.register(
        name=_name, summary="attention within a window, a control", paper="-", year=2026, cost="L w D",
        function=_function, **zoo.can("causal cross causal_cross grouped_queries key_mask wants_grid"),
    )  # fmt: skip


def share_of_work(name: str, tokens: int, D: int) -> float:
    """Multiply-adds of a mechanism in a layer of a picture, of softmax's; the controls' own too."""
    return CONTROLS[name][1](tokens) if name in CONTROLS else masks.share_of_work(name, tokens, D)
