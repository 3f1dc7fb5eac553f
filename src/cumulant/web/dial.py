"""The dial on a whole model: its attention from linear to softmax, nothing trained, with cost, time and what changes.

A subject is a model that makes a picture of a picture: a painter of hidden patches here, a segmenter in `segmenter.py`.
One pass of each step and picture is kept; a click asks what is kept.
"""

from __future__ import annotations

import base64
import io
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from ..data.decode import fit, pillow_image
from ..explain.masks import share_of_work
from ..nn import MultiheadAttention
from ..nn.swapped.choice import KEPT, Choice
from ..nn.swapped.plan import applied, attention_layers
from . import schemas
from .memory import Memory
from .photographs import MEAN, PATCH, STD, Painter, half, images_of, normalised, patches_of, without

if TYPE_CHECKING:
    from PIL.Image import Image

STEPS = {  # name of the mechanism, by rising cost: what it is called on the page
    "cumulant2": "linear",
    "cluster4+response=pooled": "4 squares",
    "cluster16+response=pooled": "16 squares",
    "cluster16+find=tree+response=pooled": "16 clusters by content",
    "cluster64+find=tree+response=pooled": "64 clusters by content",
    "cluster64+find=tree+near=4": "64 clusters, 4 exact",
    "cluster64+find=tree+near=16": "64 clusters, 16 exact",
    "softmax": "softmax",
}
KEPT_BYTES = 2**28
SHORT = 2.0  # seconds


class Passed(NamedTuple):
    """What one pass left: seconds in the attention layers, and tensors to answer clicks from."""

    seconds: float
    kept: tuple[Tensor, ...]


class Subject(ABC):
    """A model whose attention layers `names` in `model` are dialled; a subclass says what it answers."""

    title: str
    score: str  # what `compared` is called on the page
    short: str  # the same in a word
    same: float  # its value where nothing changes
    pointed = False  # whether the place of a click matters
    steps = STEPS
    layers: tuple[str, ...]
    model: nn.Module

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._passes = Memory[Passed](KEPT_BYTES, lambda one: sum(x.nbytes for x in one.kept))

    @abstractmethod
    def run(self, picture: Image) -> tuple[Tensor, ...]:
        """One pass."""

    @abstractmethod
    def shown(self, picture: Image, passed: Passed, place: tuple[float, float]) -> Image:
        """What to show of it for a click at `place` (0 to 1 along both sides)."""

    @abstractmethod
    def before(self, picture: Image) -> Image:
        """What the model is given."""

    @abstractmethod
    def compared(self, passed: Passed, exact: Passed, place: tuple[float, float]) -> float:
        """How close it comes to softmax."""

    @abstractmethod
    def cost(self, name: str) -> float:
        """Multiply-adds of the dialled layers, of softmax's."""

    def passed(self, key: str, picture: Image, name: str) -> Passed:
        """The pass of a step, made by whoever asks first."""

        def make() -> Passed:
            others = dict.fromkeys(attention_layers(self.model), KEPT)  # of transformers: windows stay
            plan = {**others, **{layer: Choice.named(name) for layer in self.layers}}
            with torch.no_grad(), applied(self.model, plan), timed(self.model, self.layers) as spent:
                kept = self.run(picture)
                seconds = sum(spent)
                if seconds < SHORT:  # again, without what only the first pass pays for
                    spent.clear()
                    kept = self.run(picture)
                    seconds = min(seconds, sum(spent))
            return Passed(seconds, kept)

        return self._passes.made((key, name), self._lock, make)


def dial_facts(name: str, one: Subject) -> schemas.DialInfo:
    steps = [schemas.DialStep(title=title, cost=one.cost(step)) for step, title in one.steps.items()]
    return schemas.DialInfo(
        name=name, title=one.title, score=one.score, short=one.short, same=one.same, pointed=one.pointed, steps=steps
    )


@contextmanager
def timed(model: nn.Module, layers: tuple[str, ...]) -> Iterator[list[float]]:
    """Seconds that each call of these layers takes, while the block runs."""
    spent: list[float] = []
    began: list[float] = []

    def now() -> float:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        return time.perf_counter()

    hooks: list[Any] = []
    for name in layers:
        layer = model.get_submodule(name)
        hooks.append(layer.register_forward_pre_hook(lambda *_: began.append(now())))
        hooks.append(layer.register_forward_hook(lambda *_: spent.append(now() - began.pop())))
    try:
        yield spent
    finally:
        for hook in hooks:
            hook.remove()


class PaintingDial(Subject):
    """A painter with 4,096 patches in sight: what it paints into the hidden half of a picture."""

    score, short, same = "change of what is painted", "change", 0.0

    def __init__(self, painter: Painter, name: str, side: int = 512) -> None:
        super().__init__()
        self.model, self.painter, self.side = painter.vit, painter, side
        self.layers = tuple(x for x, module in painter.vit.named_modules() if isinstance(module, MultiheadAttention))
        self.tokens, self.width = (side // PATCH) ** 2, painter.vit.embed_dim // painter.vit.blocks[0].attn.num_heads
        self.hidden = half(1, self.tokens, torch.Generator().manual_seed(0))
        self.title = f"{name}: paints the hidden half of {self.tokens:,} patches"

    def _images(self, picture: Image) -> Tensor:
        return normalised(fit(picture, self.side).convert("RGB"))[None].to(self.painter.pixels.weight)

    def run(self, picture: Image) -> tuple[Tensor, ...]:
        images = self._images(picture)
        made = self.painter(without(images, self.hidden.to(images.device)))
        return (made.cpu(),)

    def shown(self, picture: Image, passed: Passed, place: tuple[float, float]) -> Image:
        images = self._images(picture).cpu()
        whole = torch.where(self.hidden[..., None], passed.kept[0], patches_of(images))
        return pictured(images_of(whole, self.side))

    def before(self, picture: Image) -> Image:
        return pictured(without(self._images(picture).cpu(), self.hidden))

    def compared(self, passed: Passed, exact: Passed, place: tuple[float, float]) -> float:
        """Relative change of the hidden patches, of their spread over the picture under softmax."""
        a, b = (one.kept[0][self.hidden] for one in (passed, exact))
        return float((a - b).norm() / (b - b.mean(0)).norm())

    def cost(self, name: str) -> float:
        return share_of_work(name, self.tokens, self.width)


def pictured(images: Tensor) -> Image:
    """The first of normalised images (B, 3, S, S) as a picture."""
    pixels = (images[0] * STD[0] + MEAN[0]).clamp(0, 1).mul(255).round().byte()
    return pillow_image().fromarray(pixels.permute(1, 2, 0).contiguous().numpy())


def address(picture: Image) -> str:
    """A picture as an address that holds it: small enough to send with its numbers."""
    content = io.BytesIO()
    picture.save(content, *(("PNG",) if picture.mode == "RGBA" else ("JPEG",)), quality=88)
    kind = "png" if picture.mode == "RGBA" else "jpeg"
    return f"data:image/{kind};base64,{base64.b64encode(content.getvalue()).decode()}"
