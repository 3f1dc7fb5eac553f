"""Small transformers with attention in all four uses; which mechanism serves which is a mapping {"NS": "cumulant3"}.

Uses that the mapping does not name are softmax, as in CAB: one column compares one use. Whether a mechanism really
serves a use is found by running it. Places are learned tables that begin as waves, which favour no mechanism.

Shape legend: B items, L tokens (n targets), M tokens of the source, S sentences of W words, C width, V symbols.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cumulant import zoo
from cumulant.grammar import parse
from cumulant.models.lm import LanguageModel, causal
from cumulant.models.parts import Mlp
from cumulant.nn import create_layer
from cumulant.nn.attention import LAYER_NORM
from cumulant.nn.heads.base import crossed
from cumulant.tensors import threads

SHORT = {"noncausal self": "NS", "causal self": "CS", "noncausal cross": "NC", "causal cross": "CC"}
PATTERNS = tuple(SHORT.values())
WIDTH, HEADS, BATCH, TARGETS, SOURCES = 128, 8, 4, 50, 100  # as in CAB's own test, there 512 wide
TOLERANCE = 1e-4  # on the sum of absolute differences
STD = 0.02  # of tokens and places at first
MORE_PARAMETERS = 1.1  # at most so many times those of the softmax backbone, tables of tokens and places left out


@dataclass(frozen=True)
class Size:
    """Of a backbone."""

    width: int = 64
    heads: int = 4
    depth: int = 2
    hidden: int = 256


Uses = Mapping[str, str]


class Layer(nn.Module):
    """Pre-norm: self attention, cross attention where there is a source, MLP."""

    def __init__(self, size: Size, uses: Uses, length: int, *, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.causal = causal

        def attention(pattern: str) -> nn.Module:
            return layer_of(pattern, uses.get(pattern, "softmax"), size.width, size.heads, length)

        self.norm1, self.attn = LAYER_NORM(size.width), attention("CS" if causal else "NS")
        self.norm2 = LAYER_NORM(size.width) if cross else None
        self.cross = attention("CC" if causal else "NC") if cross else None
        self.norm3, self.mlp = LAYER_NORM(size.width), Mlp(size.width, size.hidden)

    def forward(
        self,
        x: Tensor,
        source: Tensor | None = None,
        mask: Tensor | None = None,
        source_mask: Tensor | None = None,
        grid: tuple[int, int] | None = None,
    ) -> Tensor:
        x = x + self.attn(self.norm1(x), key_mask=mask, is_causal=self.causal, grid=grid)
        if self.cross is not None and self.norm2 is not None:
            x = x + self.cross(self.norm2(x), context=source, key_mask=source_mask)
        return x + self.mlp(self.norm3(x))


class Stack(nn.Module):
    """Layers over at most `length` tokens with a learned table of places, and a last norm."""

    def __init__(self, size: Size, uses: Uses, length: int, *, causal: bool = False, cross: bool = False) -> None:
        super().__init__()
        self.pos_embed = nn.Parameter(STD * waves(length, size.width))
        self.layers = nn.ModuleList(Layer(size, uses, length, causal=causal, cross=cross) for _ in range(size.depth))
        self.norm = LAYER_NORM(size.width)

    def forward(self, x: Tensor, *args: Tensor | None, **kwargs: object) -> Tensor:
        x = x + self.pos_embed[: x.shape[-2]]
        for layer in self.layers:
            x = layer(x, *args, **kwargs)
        return self.norm(x)


class Embedding(nn.Embedding):
    """Of the size of places at first."""

    def reset_parameters(self) -> None:
        nn.init.normal_(self.weight, std=STD)


def waves(length: int, width: int) -> Tensor:
    """Sines and cosines of places (Vaswani et al.), (length, width)."""
    rates = torch.exp(-math.log(10000.0) * torch.arange(0, width, 2) / width)
    angles = torch.arange(length)[:, None] * rates
    return torch.stack((angles.sin(), angles.cos()), -1).flatten(1)[:, :width]


class Masked(nn.Module):
    """Bytes with gaps (B, L) to logits (B, L, 256): noncausal self attention."""

    def __init__(self, size: Size, uses: Uses, length: int) -> None:
        super().__init__()
        self.embed = Embedding(257, size.width)
        self.stack = Stack(size, uses, length)
        self.head = nn.Linear(size.width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.stack(self.embed(tokens)))


class Pixels(nn.Module):
    """An enlarged picture (B, 3, H, W) to a sharper one: every pixel is a token; noncausal self attention."""

    def __init__(self, size: Size, uses: Uses, side: int) -> None:
        super().__init__()
        self.side = side
        self.stem = nn.Conv2d(3, size.width, 3, padding=1)
        self.stack = Stack(size, uses, side * side)
        self.head = nn.Linear(size.width, 3)
        nn.init.zeros_(self.head.weight)

    def forward(self, image: Tensor) -> Tensor:
        x = self.stem(image).flatten(2).mT
        x = self.head(self.stack(x, grid=(self.side, self.side)))
        return image + x.mT.reshape(image.shape)


class Hierarchy(nn.Module):
    """Words (B, S, W) to sentences to a document: logits (B, classes), or (B, S, classes) of each sentence.

    Noncausal self attention over the words of each sentence and over the sentences; word 0 is padding.
    """

    def __init__(
        self, size: Size, uses: Uses, shape: tuple[int, int], words: int, classes: int, each: bool = False
    ) -> None:
        super().__init__()
        self.each = each
        self.embed = Embedding(words, size.width)
        self.sentence, self.document = (Stack(size, uses, length) for length in reversed(shape))
        self.head = nn.Linear(size.width, classes)

    def forward(self, words: Tensor) -> Tensor:
        there = words != 0
        written = there.any(-1)
        there[..., 0] = True  # an empty sentence is one word of padding, which the document passes over
        written[..., 0] = True
        flat, seen = words.flatten(0, 1), there.flatten(0, 1)
        sentences = mean(self.sentence(self.embed(flat), mask=seen), seen).unflatten(0, words.shape[:2])
        document = self.document(sentences, mask=written)
        return self.head(document if self.each else mean(document, written))


def mean(x: Tensor, there: Tensor) -> Tensor:
    """Of the tokens (B, L, C) that are there, (B, C)."""
    weight = there.unsqueeze(-1).to(x.dtype)
    return (x * weight).sum(-2) / weight.sum(-2)


class Forecast(nn.Module):
    """Informer-like: the past (B, M, V) to what follows (B, horizon, V), all at once.

    Noncausal self attention over the past and over what is to be filled in, noncausal cross attention between them. The
    mean of the past is taken off and put back.
    """

    def __init__(self, size: Size, uses: Uses, past: int, start: int, horizon: int, channels: int, stamps: int) -> None:
        super().__init__()
        self.start, self.horizon = start, horizon
        self.read, self.write = (nn.Linear(channels + stamps, size.width) for _ in range(2))
        self.encoder = Stack(size, uses, past)
        self.decoder = Stack(size, uses, start + horizon, cross=True)
        self.head = nn.Linear(size.width, channels)

    def forward(self, past: Tensor, stamps: Tensor) -> Tensor:
        """`stamps` (B, M + horizon, ...) is the time of every step."""
        level = past.mean(1, keepdim=True)
        past = past - level
        known = past.shape[1]
        source = self.encoder(self.read(torch.cat((past, stamps[:, :known]), -1)))
        asked = F.pad(past[:, known - self.start :], (0, 0, 0, self.horizon))
        x = self.write(torch.cat((asked, stamps[:, known - self.start :]), -1))
        return self.head(self.decoder(x, source)[:, self.start :]) + level


class Translator(nn.Module):
    """A text (B, M) to another, token by token: logits (B, L, 256) of the one after each of the target's (B, L).

    Noncausal self attention over the source, causal self attention over the target, causal cross attention.
    """

    def __init__(self, size: Size, uses: Uses, source: int, target: int) -> None:
        super().__init__()
        self.embed = Embedding(256, size.width)
        self.encoder = Stack(size, uses, source)
        self.decoder = Stack(size, uses, max(source, target), causal=True, cross=True)
        self.head = nn.Linear(size.width, 256)

    def forward(self, source: Tensor, target: Tensor) -> Tensor:
        there = source != 0
        there[:, 0] = True
        read = self.encoder(self.embed(source), mask=there)
        return self.head(self.decoder(self.embed(target), read, source_mask=there))


def language(size: Size, uses: Uses, length: int) -> LanguageModel:
    """The library's own language model: causal self attention."""
    return LanguageModel(
        num_classes=256, context=length, embed_dim=size.width, depth=size.depth, num_heads=size.heads,
        mlp_ratio=size.hidden / size.width, attention=uses.get("CS", "softmax"), positions="learned",
    )  # fmt: skip


def counted(model: nn.Module) -> int:
    """Parameters, without tables of tokens and places."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    return sum(
        one.numel()
        for name, one in model.named_parameters()
        if id(one) not in tables and not name.endswith("pos_embed")
    )


def fitted(build: Callable[[Size, Uses], nn.Module], size: Size, uses: Uses) -> tuple[Size, float]:
    """The size for these mechanisms, and its parameters as a multiple of softmax's: MLPs are cut where a mechanism's
    own parameters would bring more than a tenth."""
    count = counted(build(size, {}))
    model = build(size, uses)
    over = counted(model) - MORE_PARAMETERS * count
    if over > 0:
        mlps = sum(isinstance(module, Mlp) for module in model.modules())
        hidden = size.hidden - 8 * math.ceil(over / (mlps * (2 * size.width + 1)) / 8)
        if hidden < size.width:
            more = ", ".join(uses.values())
            raise ValueError(f"{more} brings {over + 0.1 * count:,.0f} parameters more to a backbone of {count:,}")
        size = replace(size, hidden=hidden)
        model = build(size, uses)
    return size, counted(model) / count


def layer_of(pattern: str, attention: str, width: int, heads: int, length: int, **options: Any) -> nn.Module:
    """The attention layer of a backbone in that pattern, for at most `length` tokens; no grid is told, since tables as
    large as a grid would break the rule of 10 % more parameters."""
    given: dict[str, Any] = {"attention": attention, "attention_options": None}
    if pattern == "CS":
        given = causal(given, length)
    elif pattern in ("NC", "CC"):
        given = crossed(given)
        name, own = parse(attention)
        last = zoo.get(name).length_option
        if pattern == "CC" and last is not None and last not in own:  # a prefix must give the same rows
            given["attention_options"] = {last: length, **(given["attention_options"] or {})}
    return create_layer("multihead", width, heads, **given, **options)


@functools.cache
def support(attention: str, width: int = WIDTH, heads: int = HEADS) -> dict[str, str]:
    """For each pattern "" where the layer serves it, else why not: CAB's test of prefixes, in float64."""
    found = {}
    for pattern in PATTERNS:
        torch.manual_seed(0)
        try:
            with torch.no_grad(), threads(1):
                longest = max(TARGETS, SOURCES)
                layer = layer_of(pattern, attention, width, heads, longest, dtype=torch.float64).eval()
                found[pattern] = _fault(pattern, layer, width)
        except (ValueError, TypeError, NotImplementedError) as error:
            found[pattern] = str(error)
    return found


def _fault(pattern: str, layer: nn.Module, width: int) -> str:
    """What is wrong with a layer in a pattern; "" for nothing."""
    x, source = (torch.randn(BATCH, count, width, dtype=torch.float64) for count in (TARGETS, SOURCES))
    other = source.clone()
    if pattern in ("NC", "CC"):
        other[:, -1] += 1
        if not _differ(layer(x, context=source)[:, 0], layer(x, context=other)[:, 0]):
            return "the first row does not see the last token of the other sequence"
    elif pattern == "NS":
        later = x.clone()
        later[:, -1] += 1
        if not _differ(layer(x)[:, 0], layer(later)[:, 0]):
            return "the first row does not see the last token"
    rows: dict[str, Callable[[Tensor], Tensor]] = {
        "CS": lambda part: layer(part, is_causal=True),
        "CC": lambda part: layer(part, context=source),
    }
    if pattern in rows:
        gap = prefix_gap(rows[pattern], x)
        if not gap < TOLERANCE:
            return f"a row changes by {gap:.1e} with the targets after it"
    return ""


def prefix_gap(rows: Callable[[Tensor], Tensor], x: Tensor) -> float:
    """The largest sum of absolute differences between row i of the first i targets alone and of all, x (B, n, C)."""
    whole = rows(x)
    return max((rows(x[:, :i])[:, -1] - whole[:, i - 1]).abs().sum().item() for i in (1, 2, 17, 32, x.shape[1] - 1))


def _differ(a: Tensor, b: Tensor) -> bool:
    return bool(((a - b).abs() > 1e-9).any())
