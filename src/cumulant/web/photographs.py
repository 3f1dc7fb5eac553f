"""Photographs that packages on this machine ship, and small models that learned to paint what is hidden in them.

Nothing is fetched. A model sees a picture with half of its patches grey and paints them: masked patches, no labels.
Shape legend: B pictures, S side in pixels, N = (S/P)^2 patches, C width.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..data.decode import pillow_image, to_tensor
from ..models import create_model
from ..train.optimise import descend
from ..train.progress import bar_of
from .explorable import Example, Explorable

if TYPE_CHECKING:
    from PIL.Image import Image

# package: folder in it, file and what it shows
SHIPPED: dict[str, tuple[str, dict[str, str]]] = {
    "sklearn": ("datasets/images", {"china.jpg": "temple", "flower.jpg": "dahlia"}),
    "matplotlib": ("mpl-data/sample_data", {"grace_hopper.jpg": "Grace Hopper"}),
    "skimage": (
        "data",
        {"astronaut.png": "astronaut", "chelsea.png": "cat", "coffee.png": "coffee", "rocket.jpg": "rocket"},
    ),
}
COLLECTION = "photographs"
MECHANISMS = ("softmax", "cumulant3")
PATCH, SIDE, LEARNED_SIDE = 8, 128, 96
MEAN, STD = (0.5,) * 3, (0.25,) * 3
# 300 steps: 33 s of one core. What is painted is off by 0.57 (softmax) and 0.67 (cumulant3) of the truth's variance.
RECIPE = {
    "steps": 300,
    "batch": 16,
    "lr": 3e-3,
    "width": 96,
    "depth": 3,
    "heads": 4,
    "side": LEARNED_SIDE,
    "version": 1,
}


def photographs() -> list[Example]:
    """Those that installed packages hold; at least the two of scikit-learn, which the explorer needs anyway."""
    found = []
    for package, (folder, files) in SHIPPED.items():
        spec = find_spec(package)  # without importing it
        for place in spec.submodule_search_locations or () if spec else ():
            there = ((Path(place) / folder / name, label) for name, label in files.items())
            found += [
                Example(pillow_image().open(path).convert("RGB"), label) for path, label in there if path.is_file()
            ]
    return found


class Painter(nn.Module):
    """A ViT and the linear layer that makes pixels of its tokens."""

    def __init__(self, attention: str, width: int, depth: int, heads: int) -> None:
        super().__init__()
        self.vit: Any = create_model(
            "vit_nano_patch4_32", attention=attention, num_classes=0, img_size=SIDE, patch_size=PATCH, pool="gap",
            embed_dim=width, depth=depth, num_heads=heads, mlp_ratio=2.0, init_std=width**-0.5,
        )  # fmt: skip
        self.pixels = nn.Linear(width, 3 * PATCH * PATCH)
        with torch.no_grad():  # near places start alike: otherwise most of the training goes into finding that out
            self.vit.pos_embed.copy_(waves(self.vit.grid_size[0], width))

    def forward(self, images: Tensor) -> Tensor:
        """Patches (B, N, 3 P P) of images (B, 3, S, S), S any multiple of the patch."""
        return self.pixels(self.vit.forward_features(images))

    @torch.no_grad()
    def painted(self, images: Tensor, hidden: Tensor) -> Tensor:
        """Images (B, 3, S, S) whose `hidden` (B, N) patches the model painted, knowing the others."""
        made = self(without(images, hidden))
        return images_of(torch.where(hidden[..., None], made, patches_of(images)), images.shape[-1])


def waves(side: int, width: int) -> Tensor:
    """Positions (1, side^2, C): sines and cosines of row and column, 1.5 to 1/27 radians a patch."""
    angle = torch.arange(side)[:, None] * 1.5 * 40.0 ** -torch.linspace(0, 1 - 4 / width, width // 4)
    one = torch.cat([angle.sin(), angle.cos()], -1)
    both = torch.cat([one[:, None].expand(-1, side, -1), one[None].expand(side, -1, -1)], -1)
    return both.reshape(1, side * side, width)


def patches_of(images: Tensor) -> Tensor:
    """(B, 3, S, S) as (B, N, 3 P P)."""
    return F.unfold(images, PATCH, stride=PATCH).mT


def images_of(patches: Tensor, side: int) -> Tensor:
    return F.fold(patches.mT, side, PATCH, stride=PATCH)


def half(count: int, tokens: int, generator: torch.Generator) -> Tensor:
    """Which patches are hidden, (count, N): each with probability 1/2."""
    return torch.rand(count, tokens, generator=generator) < 0.5


def without(images: Tensor, hidden: Tensor) -> Tensor:
    """Images with grey in place of hidden patches."""
    rows = images.shape[-1] // PATCH
    seen = (~hidden).to(images).reshape(-1, 1, rows, rows)
    return images * F.interpolate(seen, scale_factor=PATCH, mode="nearest")


def normalised(picture: Image) -> Tensor:
    return (to_tensor(picture).float() / 255 - MEAN[0]) / STD[0]


def crops(pictures: Sequence[Image], side: int, batch: int, generator: torch.Generator) -> Iterator[Tensor]:
    """Batches (B, 3, side, side) without end: squares of the pictures at sizes from their own down to one square."""
    sizes = []
    for picture in pictures:
        while min(picture.size) >= side:
            sizes.append(normalised(picture))
            picture = picture.resize(
                (picture.width * 2 // 3, picture.height * 2 // 3), pillow_image().Resampling.LANCZOS
            )

    def drawn(count: int) -> int:
        return int(torch.randint(count, (), generator=generator))

    def one() -> Tensor:
        whole = sizes[drawn(len(sizes))]
        top, left = (drawn(n - side + 1) for n in whole.shape[-2:])
        square = whole[:, top : top + side, left : left + side]
        return square.flip(-1) if drawn(2) else square

    while True:
        yield torch.stack([one() for _ in range(batch)])


def learn(
    attention: str, pictures: Sequence[Image], recipe: dict[str, Any], progress: IO[str] | None = None
) -> Painter:
    """A painter trained on crops of the pictures; the same for the same pictures."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        painter = Painter(attention, recipe["width"], recipe["depth"], recipe["heads"])
    generator, steps = torch.Generator().manual_seed(0), recipe["steps"]
    optimiser = torch.optim.AdamW(painter.parameters(), betas=(0.9, 0.95), weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimiser, recipe["lr"], total_steps=steps, pct_start=0.05, cycle_momentum=False
    )
    batches = crops(pictures, recipe["side"], recipe["batch"], generator)

    def loss(images: Tensor) -> Tensor:
        hidden = half(len(images), (images.shape[-1] // PATCH) ** 2, generator)
        return (painter(without(images, hidden)) - patches_of(images))[hidden].square().mean()

    bar = bar_of(f"photographs, {attention}", steps, "step", progress, iterable=range(steps))
    descend(optimiser, (loss(next(batches)) for _ in bar), 1.0, schedule)
    return painter.eval()


def photograph_models(
    pictures: Sequence[Example],
    cache: Path,
    *,
    mechanisms: Sequence[str] = MECHANISMS,
    fresh: bool = False,
    device: str = "cpu",
    recipe: dict[str, Any] = RECIPE,
    progress: IO[str] | None = None,
) -> dict[str, Explorable]:
    """Painters of these mechanisms by name: read from the folder `cache`, or trained on the pictures and kept there."""
    from safetensors import safe_open
    from safetensors.torch import load_file, save_file

    from ..tensors import threads

    models, known = {}, {**recipe, "pictures": [one.label for one in pictures]}
    for number, name in enumerate(mechanisms, start=1):
        path, note = cache / f"photographs-{name}.safetensors", json.dumps(known)
        kept = None
        if path.is_file() and not fresh:
            with safe_open(path, "pt") as file:
                kept = (file.metadata() or {}).get("recipe")
        if kept == note:
            painter = Painter(name, recipe["width"], recipe["depth"], recipe["heads"]).eval()
            painter.load_state_dict(load_file(path))
        else:
            if progress is not None:
                print(
                    f"training a small model of photographs with {name} ({number} of {len(mechanisms)})", file=progress
                )
            with threads(1):  # as for the digits
                painter = learn(name, [one.picture for one in pictures], recipe, progress)  # type: ignore[misc]
            cache.mkdir(parents=True, exist_ok=True)
            part = path.with_suffix(".part")
            save_file(painter.state_dict(), part, {"recipe": note})
            part.replace(path)  # whole or not at all
        painter = painter.to(device).requires_grad_(False)
        models[f"{name} (photos)"] = Explorable(
            painter.vit, (), SIDE, MEAN, STD, title="paints hidden patches", collection=COLLECTION, painter=painter
        )
    return models
