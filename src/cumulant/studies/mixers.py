"""Token mixers that studies compare: attention with its parts exchanged, a small transformer that takes them, and what
it learns: handwritten digits somewhere on an empty canvas, where no place tells the class alone.

Shape legend: B items, H heads, T tokens, D head width, C = H D.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cumulant import zoo
from cumulant.data import digits_source
from cumulant.models.vit import Block
from cumulant.train.optimise import descend

SIDE = 10  # of the canvas; digits have 8 x 8 pixels


def taylor(logits: Tensor) -> Tensor:
    """1 + x + x^2 / 2 in place of exp, normalised; at least 1/2, so that rows are distributions."""
    weights = 1 + logits + logits.square() / 2
    return weights / weights.sum(-1, keepdim=True)


def off_by_one(logits: Tensor, sink: Tensor | float = 0.0) -> Tensor:
    """exp(s) / (exp(sink) + sum exp(s)): one more key with that logit and value 0."""
    extra = torch.as_tensor(sink, dtype=logits.dtype, device=logits.device).expand(*logits.shape[:-1], 1)
    return torch.cat([logits, extra], -1).softmax(-1)[..., :-1]


def sigmoid(logits: Tensor) -> Tensor:
    """1 / (1 + T exp(-s)), without normalisation."""
    return (logits - torch.tensor(float(logits.shape[-1])).log()).sigmoid()


FORMULAS: Mapping[str, Callable[[Tensor], Tensor]] = {  # of logits (B, H, T, T): weights
    "approximate": taylor, "off-by-one": off_by_one, "learned sink": off_by_one, "sigmoid": sigmoid,
}  # fmt: skip


class Mixer(nn.Module):
    """Multi-head attention without biases whose weights are those of `kind`: a mechanism of the zoo, or one of

    approximate, off-by-one, learned sink, sigmoid: `FORMULAS` of the logits;
    alone: logits of a key from that token alone, sum(silu(q_j) k_j), the same for every query;
    mlp: no attention, a gated MLP with as many parameters.

    `source`: what queries and keys are made of: "own" tokens, the "embedded" input, or the "last" item of the batch.
    `gate`: heads times sigmoid(W x). `phantom`: so many keys and values of zeros join (n becomes n + phantom).
    """

    embedded: Tensor | None = None  # of the present batch, set by the model

    def __init__(
        self, kind: str, dim: int, heads: int, source: str = "own", gate: bool = False, phantom: int = 0
    ) -> None:
        super().__init__()
        self.kind, self.heads, self.source, self.phantom = kind, heads, source, phantom
        self.bypassed = False
        wide = 4 * dim // 3
        self.qkv = nn.Linear(dim, 2 * wide if kind == "mlp" else 3 * dim, bias=False)
        self.proj = nn.Linear(wide if kind == "mlp" else dim, dim, bias=False)
        self.gate = nn.Linear(dim, dim) if gate else None
        self.sink = nn.Parameter(torch.zeros(heads, 1, 1)) if kind == "learned sink" else None

    def split(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, each (B, H, T, D), with the phantoms among keys and values."""
        query, key, value = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        if self.source == "embedded":
            assert self.embedded is not None
            query, key = self.qkv(self.embedded).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)[:2]
        elif self.source == "last":
            query, key = (part[-1:].expand_as(value) for part in (query, key))
        key, value = (F.pad(part, (0, 0, 0, self.phantom)) for part in (key, value))
        return query, key, value

    def weights(self, x: Tensor) -> Tensor:
        """The map, (B, H, T, T), without phantoms; signed where the mechanism is. Not of "mlp", which has none."""
        query, key, _ = self.split(x)
        return self._weights(query, key)[..., : x.shape[1]]

    def _weights(self, query: Tensor, key: Tensor) -> Tensor:
        if self.kind == "alone":
            own = (F.silu(query) * key).sum(-1) * query.shape[-1] ** -0.5
            return own.softmax(-1)[..., None, :].expand(*query.shape[:-1], key.shape[-2])
        if self.kind in FORMULAS:
            logits = query @ key.mT * query.shape[-1] ** -0.5
            return off_by_one(logits, self.sink) if self.sink is not None else FORMULAS[self.kind](logits)
        scores = zoo.get(self.kind).scores
        if scores is None:
            raise ValueError(f"{self.kind!r} has no weights to show")
        return scores(query, key)

    def forward(self, x: Tensor, **layout: Any) -> Tensor:
        """x (B, T, C) -> (B, T, C)."""
        if self.bypassed:
            return torch.zeros_like(x)
        if self.kind == "mlp":
            gate, up = self.qkv(x).chunk(2, -1)
            return self.proj(F.silu(gate) * up)
        query, key, value = self.split(x)
        if self.kind == "alone" or self.kind in FORMULAS:
            out = self._weights(query, key) @ value
        else:
            out = zoo.get(self.kind)(query, key, value)
        out = out.transpose(1, 2).flatten(-2)
        return self.proj(out if self.gate is None else out * self.gate(x).sigmoid())


class SmallTransformer(nn.Module):
    """Patches of an image through blocks with the given mixers to logits, read from a class token.

    `fixed`, tokens (T, C) or an image (1, S, S), passes through the blocks as a last item of every batch: the mixers of
    source "last" use its queries and keys. `registers` learned tokens stand behind the patches.
    """

    def __init__(
        self,
        mixers: Sequence[Mixer],
        side: int,
        patch: int,
        dim: int,
        classes: int = 10,
        registers: int = 0,
        fixed: Tensor | None = None,
    ) -> None:
        super().__init__()
        self.patch, self.registers = patch, registers
        tokens = 1 + (side // patch) ** 2
        self.embed = nn.Linear(patch * patch, dim)
        self.first = nn.Parameter(0.02 * torch.randn(1, 1, dim))
        self.positions = nn.Parameter(0.5 * torch.randn(1, tokens, dim))
        self.more = nn.Parameter(0.5 * torch.randn(1, registers, dim))
        self.blocks = nn.ModuleList(Block(mixer, dim, 2 * dim) for mixer in mixers)
        self.norm = nn.LayerNorm(dim)
        self.head = nn.Linear(dim, classes)
        self.register_buffer("fixed", fixed)

    @property
    def mixers(self) -> list[Mixer]:
        return [block.attn for block in self.blocks]  # type: ignore[misc]

    def tokens(self, images: Tensor) -> Tensor:
        """(B, 1, S, S) -> (B, T, C): class token, patches, registers."""
        patches = F.unfold(images, self.patch, stride=self.patch).mT
        x = torch.cat([self.first.expand(len(images), -1, -1), self.embed(patches)], 1) + self.positions
        return torch.cat([x, self.more.expand(len(images), -1, -1)], 1)

    def layers(self, images: Tensor) -> list[Tensor]:
        """The tokens before each block, normalised as its mixer gets them, and after the last; `fixed` among them."""
        found, x = [], self._start(images)
        for block in self.blocks:
            found.append(block.norm1(x))  # type: ignore[operator]
            x = block(x)
        return [*found, x]

    def _start(self, images: Tensor) -> Tensor:
        fixed = self.fixed
        if isinstance(fixed, Tensor) and fixed.ndim == 3:
            images = torch.cat([images, fixed[None]])
        x = self.tokens(images)
        if isinstance(fixed, Tensor) and fixed.ndim == 2:
            x = torch.cat([x, fixed[None]])
        for mixer in self.mixers:
            mixer.embedded = F.layer_norm(x, x.shape[-1:])
        return x

    def forward(self, images: Tensor) -> Tensor:
        x = self._start(images)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x[: len(images), 0]))


@dataclass(frozen=True)
class Settings:
    """Of a small transformer that learns them, and of the mechanisms and seeds of a study that compares some."""

    width: int = 32
    heads: int = 4
    depth: int = 4
    patch: int = 2
    steps: int = 600
    batch: int = 32
    lr: float = 0.003
    attention: tuple[str, ...] = ("linear", "cumulant2", "cumulant3", "cluster4")
    seeds: int = 3


@lru_cache(1)
def digits() -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Training images (B, 1, 8, 8) from 0 to 1 with their labels, and those for tests."""
    source: Any = digits_source()
    train, test = ((part.images[:, :1] / 255.0, part.labels) for part in (source.train, source.test))
    return *train, *test


def placed(images: Tensor, generator: torch.Generator, side: int = SIDE) -> tuple[Tensor, Tensor]:
    """Each image at a random place on its canvas, (B, 1, side, side), and where: rows and columns (B, 2)."""
    room = side - images.shape[-1] + 1
    places = torch.randint(room, (len(images), 2), generator=generator)
    canvas = F.pad(images, (0, side - images.shape[-1]) * 2)
    rows, columns = ((torch.arange(side)[None] - places[:, i, None]) % side for i in (0, 1))
    moved = canvas[torch.arange(len(images))[:, None, None], 0, rows[:, :, None], columns[:, None]]
    return moved[:, None], places


def fit(model: nn.Module, steps: int, batch: int, lr: float, seed: int, device: str) -> nn.Module:
    """Train on fresh places of random digits: AdamW, warm-up over a tenth of the steps, then a cosine to 0."""
    generator = torch.Generator().manual_seed(seed)
    images, labels = digits()[:2]
    model.to(device).train()
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.05, fused=True)
    warm = max(1, steps // 10)
    schedule = torch.optim.lr_scheduler.SequentialLR(
        optimiser,
        [torch.optim.lr_scheduler.LinearLR(optimiser, 0.05, total_iters=warm),
         torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, max(1, steps - warm))],
        [warm],
    )  # fmt: skip

    def loss() -> Tensor:
        chosen = torch.randint(len(images), (batch,), generator=generator)
        shown, _ = placed(images[chosen], generator)
        return F.cross_entropy(model(shown.to(device)), labels[chosen].to(device))

    descend(optimiser, (loss() for _ in range(steps)), 1.0, schedule)
    return model.eval()


def examination() -> tuple[Tensor, Tensor, Tensor]:
    """All test digits at four places each, the same for everyone: canvases, labels, places."""
    images, labels = digits()[2:]
    shown, places = placed(images.repeat(4, 1, 1, 1), torch.Generator().manual_seed(4321))
    return shown, labels.repeat(4), places


@torch.no_grad()
def accuracy(model: nn.Module, device: str) -> float:
    """Share of the examination that is recognised."""
    shown, labels, _ = examination()
    right = sum(
        int((model(part.to(device)).argmax(-1).cpu() == truth).sum())
        for part, truth in zip(shown.split(360), labels.split(360), strict=True)
    )
    return right / len(labels)
