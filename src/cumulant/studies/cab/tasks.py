"""What is learned: for each task its backbone, the loss of some items, and the figures of the test part.

Data are tensors by name (see `data`): train..., test... A task asks no more of them than that.

Shape legend: b items of a batch, L tokens, M tokens of the source, S sentences of W words.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cumulant.studies.cab import backbones
from cumulant.studies.cab.backbones import Size, Uses

Data = Mapping[str, Tensor]
HIDDEN = 256  # the symbol in the place of a masked byte
ABSENT = -100  # the label of what is not there


@dataclass(frozen=True)
class Task(ABC):
    """`uses` are the patterns of its backbone that columns of the table compare; `metrics` say which way is better."""

    name: ClassVar[str]
    title: ClassVar[str]
    data: ClassVar[str]  # the folder it is made of
    uses: ClassVar[tuple[str, ...]]
    metrics: ClassVar[Mapping[str, int]]
    longer: ClassVar[int] = 1  # times the steps of the others
    size: Size
    batch: int

    @abstractmethod
    def build(self, size: Size, uses: Uses) -> nn.Module: ...

    def items(self, data: Data) -> int:
        """How many there are to learn from."""
        return len(data["train"])

    @abstractmethod
    def loss(self, model: nn.Module, data: Data, places: Tensor) -> Tensor:
        """Of the items at these places (b,)."""

    @abstractmethod
    def score(self, model: nn.Module, data: Data) -> dict[str, float]:
        """The metrics on the test part."""

    def told(self) -> dict[str, Any]:
        """What decides a run, in values."""
        return {"task": self.name, **asdict(self)}


def windows(tokens: Tensor, places: Tensor, length: int) -> Tensor:
    """Tokens (N,) from these places (b,) on, (b, length)."""
    return tokens[places[:, None] + torch.arange(length, device=places.device)]


def cross_entropy(logits: Tensor, labels: Tensor, reduction: str = "mean") -> Tensor:
    return F.cross_entropy(logits.float().flatten(0, -2), labels.flatten(), reduction=reduction, ignore_index=ABSENT)


def foretold(batches: Iterable[tuple[Tensor, Tensor]]) -> dict[str, float]:
    """Perplexity and share of right answers over batches of logits and labels."""
    nats = right = count = 0.0
    for logits, labels in batches:
        nats += cross_entropy(logits, labels, "sum").item()
        right += (logits.argmax(-1) == labels).sum().item()
        count += (labels != ABSENT).sum().item()
    return {"perplexity": math.exp(nats / count), "accuracy": right / count}


@dataclass(frozen=True)
class ByteTask(Task):
    """Bytes of a text in windows of `length`, and so many `more` as the task asks for beyond what the model sees."""

    metrics: ClassVar[Mapping[str, int]] = {"perplexity": -1}
    more: ClassVar[int] = 0
    length: int

    def items(self, data: Data) -> int:
        return len(data["train"]) - self.length

    @abstractmethod
    def asked(self, tokens: Tensor, dice: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        """What the model sees of a window and what it is asked for; what the test part draws comes from `dice`."""

    def loss(self, model: nn.Module, data: Data, places: Tensor) -> Tensor:
        seen, labels = self.asked(windows(data["train"], places, self.length + self.more).long())
        return cross_entropy(model(seen), labels)

    def score(self, model: nn.Module, data: Data) -> dict[str, float]:
        dice, test, whole = torch.Generator().manual_seed(0), data["test"], self.length + self.more
        starts = torch.arange(0, len(test) - whole + 1, whole, device=test.device).split(self.batch)
        asked = (self.asked(windows(test, places, whole).long(), dice) for places in starts)
        return {"perplexity": foretold((model(seen), labels) for seen, labels in asked)["perplexity"]}


@dataclass(frozen=True)
class LanguageTask(ByteTask):
    """The next byte."""

    name = "lm"
    title = "language model"
    data = "tiny-shakespeare"
    uses = ("CS",)
    more = 1

    def build(self, size: Size, uses: Uses) -> nn.Module:
        return backbones.language(size, uses, self.length)

    def asked(self, tokens: Tensor, dice: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        return tokens[:, :-1], tokens[:, 1:]


@dataclass(frozen=True)
class MaskedTask(ByteTask):
    """Bytes that were masked, 15 % of them."""

    name = "mlm"
    title = "masked language model"
    data = "imdb"
    uses = ("NS",)

    def build(self, size: Size, uses: Uses) -> nn.Module:
        return backbones.Masked(size, uses, self.length)

    def asked(self, tokens: Tensor, dice: torch.Generator | None = None) -> tuple[Tensor, Tensor]:
        drawn = torch.rand(tokens.shape, generator=dice, device=None if dice else tokens.device)
        masked = drawn.to(tokens.device) < 0.15
        return tokens.masked_fill(masked, HIDDEN), tokens.masked_fill(~masked, ABSENT)


@dataclass(frozen=True)
class PictureTask(Task):
    """Pictures of four times the side: a cell of 4 x 4 pixels is given by its mean."""

    name = "sr"
    title = "super-resolution"
    data = "tiny-imagenet-100"
    uses = ("NS",)
    metrics: ClassVar[Mapping[str, int]] = {"PSNR": 1, "SSIM": 1}
    side: int

    def build(self, size: Size, uses: Uses) -> nn.Module:
        return backbones.Pixels(size, uses, self.side)

    def pair(self, pictures: Tensor) -> tuple[Tensor, Tensor]:
        """What the model sees and what it should give, of uint8 (b, 3, side, side); from -1 to 1."""
        sharp = pictures.float() / 127.5 - 1
        coarse = F.interpolate(F.avg_pool2d(sharp, 4), scale_factor=4, mode="bicubic", align_corners=False)
        return coarse, sharp

    def loss(self, model: nn.Module, data: Data, places: Tensor) -> Tensor:
        coarse, sharp = self.pair(data["train"][places])
        return F.mse_loss(model(coarse).float(), sharp)

    def score(self, model: nn.Module, data: Data) -> dict[str, float]:
        found: list[Tensor] = []
        for pictures in data["test"].split(self.batch):
            coarse, sharp = self.pair(pictures)
            given = ((model(coarse).float() + 1) / 2).clamp(0, 1)
            sharp = (sharp + 1) / 2
            error = (given - sharp).square().mean((1, 2, 3)).clamp(min=1e-10)
            found.append(torch.stack((-10 * error.log10(), ssim(given, sharp))))
        psnr, structure = torch.cat(found, 1).double().mean(1).tolist()
        return {"PSNR": psnr, "SSIM": structure}


def ssim(a: Tensor, b: Tensor) -> Tensor:
    """Structural similarity (Wang et al. 2004) of pictures (b, c, H, W) from 0 to 1: Gaussian window of 11, (b,)."""
    line = torch.exp(-((torch.arange(11.0, device=a.device) - 5) ** 2) / (2 * 1.5**2))
    line = line / line.sum()
    window = torch.outer(line, line).expand(a.shape[1], 1, 11, 11)

    def blur(x: Tensor) -> Tensor:
        return F.conv2d(x, window, groups=x.shape[1])

    mean_a, mean_b = blur(a), blur(b)
    var_a, var_b = blur(a * a) - mean_a**2, blur(b * b) - mean_b**2
    both = blur(a * b) - mean_a * mean_b
    first, second = 0.01**2, 0.03**2
    top = (2 * mean_a * mean_b + first) * (2 * both + second)
    return (top / ((mean_a**2 + mean_b**2 + first) * (var_a + var_b + second))).mean((1, 2, 3))


@dataclass(frozen=True)
class ReviewTask(Task):
    """Whether a review is kind, from its words by sentences."""

    name = "reviews"
    title = "documents, one label"
    data = "imdb"
    uses = ("NS",)
    metrics: ClassVar[Mapping[str, int]] = {"accuracy": 1}
    shape: tuple[int, int]
    words: int

    classes: ClassVar[int] = 2
    each: ClassVar[bool] = False

    def build(self, size: Size, uses: Uses) -> nn.Module:
        return backbones.Hierarchy(size, uses, self.shape, self.words, self.classes, self.each)

    def loss(self, model: nn.Module, data: Data, places: Tensor) -> Tensor:
        answer = model(data["train"][places].long())
        return cross_entropy(answer, data["train_labels"][places].long())

    def answers(self, model: nn.Module, data: Data) -> tuple[Tensor, Tensor]:
        """What the model says of the test part and what is right, of those that are there."""
        said = torch.cat([model(part.long()).argmax(-1) for part in data["test"].split(self.batch)])
        right = data["test_labels"].long()
        return said[right != ABSENT], right[right != ABSENT]

    def score(self, model: nn.Module, data: Data) -> dict[str, float]:
        said, right = self.answers(model, data)
        return {"accuracy": (said == right).double().mean().item()}


@dataclass(frozen=True)
class RoleTask(ReviewTask):
    """The rhetorical role of each sentence of a judgment."""

    name = "roles"
    title = "documents, a label a sentence"
    data = "legal-rhetorical-roles"
    metrics: ClassVar[Mapping[str, int]] = {"macro F1": 1, "accuracy": 1}

    classes = 7
    each = True

    def score(self, model: nn.Module, data: Data) -> dict[str, float]:
        said, right = self.answers(model, data)
        f1 = []
        for role in range(self.classes):
            hits = ((said == role) & (right == role)).sum().item()
            f1.append(2 * hits / max(1, (said == role).sum().item() + (right == role).sum().item()))
        return {"macro F1": sum(f1) / len(f1), "accuracy": (said == right).double().mean().item()}


@dataclass(frozen=True)
class SeriesTask(Task):
    """The next hours of seven loads and temperatures, of two stations by one model."""

    name = "lstf"
    title = "long time series"
    data = "ett-small"
    uses = ("NS", "NC")
    metrics: ClassVar[Mapping[str, int]] = {"MSE 1": -1, "MAE 1": -1, "MSE 2": -1, "MAE 2": -1}
    past: int
    start: int
    horizon: int

    @property
    def length(self) -> int:
        return self.past + self.horizon

    def build(self, size: Size, uses: Uses) -> nn.Module:
        return backbones.Forecast(size, uses, self.past, self.start, self.horizon, channels=7, stamps=4)

    def items(self, data: Data) -> int:
        return 2 * (data["train"].shape[1] - self.length + 1)

    def forecast(
        self, model: nn.Module, data: Data, part: str, station: Tensor, places: Tensor
    ) -> tuple[Tensor, Tensor]:
        at = places[:, None] + torch.arange(self.length, device=places.device)
        values = data[part][station[:, None], at]
        given = model(values[:, : self.past], data[f"{part}_stamps"][at])
        return given.float(), values[:, self.past :]

    def loss(self, model: nn.Module, data: Data, places: Tensor) -> Tensor:
        return F.mse_loss(*self.forecast(model, data, "train", places % 2, places // 2))

    def score(self, model: nn.Module, data: Data) -> dict[str, float]:
        found: dict[str, float] = {}
        starts = torch.arange(0, data["test"].shape[1] - self.length + 1, 24, device=data["test"].device)
        for station in (0, 1):
            errors = []
            for places in starts.split(self.batch):
                given, right = self.forecast(model, data, "test", torch.full_like(places, station), places)
                errors.append(torch.stack(((given - right).square().mean((1, 2)), (given - right).abs().mean((1, 2)))))
            mse, mae = torch.cat(errors, 1).double().mean(1).tolist()
            found |= {f"MSE {station + 1}": mse, f"MAE {station + 1}": mae}
        return found


@dataclass(frozen=True)
class RestoreTask(Task):
    """Punctuation and case of a text that has neither."""

    name = "restore"
    title = "text to text"
    data = "tiny-shakespeare"
    uses = ("CS", "CC")
    longer = 2  # to find where in the source it is takes longest
    metrics: ClassVar[Mapping[str, int]] = {"perplexity": -1, "accuracy": 1}
    source: int
    target: int

    def build(self, size: Size, uses: Uses) -> nn.Module:
        return backbones.Translator(size, uses, self.source, self.target)

    def asked(self, model: nn.Module, source: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Logits of every byte of the target after those before it, and the bytes; 0 is padding, and stands first."""
        target = target.long()
        logits = model(source.long(), F.pad(target[:, :-1], (1, 0)))
        return logits, target.masked_fill(target == 0, ABSENT)

    def loss(self, model: nn.Module, data: Data, places: Tensor) -> Tensor:
        return cross_entropy(*self.asked(model, data["train_source"][places], data["train"][places]))

    def score(self, model: nn.Module, data: Data) -> dict[str, float]:
        pairs = zip(data["test_source"].split(self.batch), data["test"].split(self.batch), strict=True)
        return foretold(self.asked(model, source, target) for source, target in pairs)


WIDE, NARROW, TINY = Size(128, 4, 2, 512), Size(64, 4, 2, 256), Size(32, 2, 1, 64)
# Size, batch and lengths: "full" as in the table of the documentation, and "small" for two cores.
KINDS: dict[type[Task], dict[str, tuple[Size, int, dict[str, Any]]]] = {
    LanguageTask: {"full": (WIDE, 16, {"length": 512}), "small": (TINY, 8, {"length": 64})},
    MaskedTask: {"full": (WIDE, 16, {"length": 512}), "small": (TINY, 8, {"length": 64})},
    PictureTask: {"full": (NARROW, 4, {"side": 64}), "small": (TINY, 4, {"side": 16})},
    ReviewTask: {"full": (NARROW, 32, {"shape": (16, 32), "words": 4096}),
                 "small": (TINY, 8, {"shape": (8, 8), "words": 512})},
    RoleTask: {"full": (NARROW, 8, {"shape": (64, 32), "words": 4096}),
               "small": (TINY, 8, {"shape": (8, 8), "words": 512})},
    SeriesTask: {"full": (NARROW, 16, {"past": 336, "start": 48, "horizon": 720}),
                 "small": (TINY, 8, {"past": 48, "start": 8, "horizon": 24})},
    RestoreTask: {"full": (WIDE, 64, {"source": 64, "target": 64}), "small": (TINY, 8, {"source": 48, "target": 48})},
}  # fmt: skip


def tasks_of(size: str) -> dict[str, Task]:
    """All tasks at one size, by name."""
    made = {kind: of["full" if size == "full" else "small"] for kind, of in KINDS.items()}
    return {kind.name: kind(own, batch, **lengths) for kind, (own, batch, lengths) in made.items()}
