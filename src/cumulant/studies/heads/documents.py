"""Orderings of papers about documents: LAMA over the words of reviews, MARRO over the sentences of judgments.

Shape legend: B documents, L words, T sentences of W words, C width.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cumulant.nn import create_layer
from cumulant.nn.heads.marro import Marro
from cumulant.studies.cab import data as files
from cumulant.studies.cab import synthetic
from cumulant.studies.cab.backbones import Size as Width
from cumulant.studies.cab.tasks import ReviewTask, RoleTask
from cumulant.studies.heads.ordering import Links, Ordering, folder
from cumulant.studies.loop import Schedule, drawn, fit, half

HEADS = 8
ANY = Width(64, 4, 2, 256)  # of a backbone that is not used here


@dataclass(frozen=True)
class Size:
    """Of the documents, the model and its training."""

    reviews: ReviewTask
    roles: RoleTask
    width: int
    steps: int
    lr: float = 2e-3


SIZES = {
    "small": Size(ReviewTask(ANY, 16, shape=(8, 8), words=512), RoleTask(ANY, 8, shape=(8, 8), words=512), 32, 30),
    "files": Size(
        ReviewTask(ANY, 64, shape=(8, 32), words=8192), RoleTask(ANY, 16, shape=(48, 32), words=8192), 128, 300
    ),
}  # fmt: skip


@functools.lru_cache(2)
def tensors(kind: str, data: str, device: str) -> dict[str, Tensor]:
    """Documents as numbers of words, and their labels."""
    task = getattr(SIZES[data], kind)
    found = files.READERS[kind](task, folder(task.data)) if data == "files" else synthetic.made(task)
    return {name: one.to(device) for name, one in found.items()}


class Additive(nn.Module):
    """Additive attention: softmax over words of w . tanh(W h); or structured self-attention of several heads (Lin et
    al. 2017), W2 tanh(W1 h) without biases, all of which are read."""

    def __init__(self, width: int, heads: int = 1) -> None:
        super().__init__()
        self.inner = nn.Linear(width, width, bias=heads == 1)
        self.score = nn.Linear(width, heads, bias=False)
        self.proj = nn.Linear(heads * width, width) if heads > 1 else nn.Identity()

    def forward(self, x: Tensor, attn_mask: Tensor) -> Tensor:
        scores = self.score(self.inner(x).tanh()).float().masked_fill(~attn_mask[..., None], -1e4)
        return self.proj((scores.softmax(1).to(x.dtype).mT @ x).flatten(1))[:, None]


class Mean(nn.Module):
    """The mean of the words."""

    def __init__(self, width: int) -> None:
        super().__init__()

    def forward(self, x: Tensor, attn_mask: Tensor) -> Tensor:
        there = attn_mask[..., None].to(x.dtype)
        return (x * there).sum(1, keepdim=True) / there.sum(1, keepdim=True).clamp(min=1)


class Reader(nn.Module):
    """Words (B, L) to two classes: embeddings, a GRU in both directions, one vector of all words, one linear map."""

    def __init__(self, words: int, width: int, pool: str) -> None:
        super().__init__()
        self.embed = nn.Embedding(words, width)
        self.gru = nn.GRU(width, width // 2, batch_first=True, bidirectional=True)
        if pool in ("mean", "additive", "structured"):
            kinds: dict[str, Any] = {
                "mean": Mean,
                "additive": Additive,
                "structured": functools.partial(Additive, heads=HEADS),
            }
            self.pool: nn.Module = kinds[pool](width)
        else:
            self.pool = create_layer(pool, width, HEADS)
        self.drop = nn.Dropout(0.2)
        self.out = nn.Linear(width, 2)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.gru(self.drop(self.embed(ids)))[0]
        return self.out(self.drop(self.pool(x, attn_mask=ids > 0)[:, 0]))


def front(ids: Tensor) -> Tensor:
    """Words of all sentences in a row, (B, S, W) -> (B, S W), those that are there first; one at least."""
    flat = ids.flatten(1).long()
    order = (flat == 0).to(torch.uint8).argsort(dim=1, stable=True)
    flat = flat.gather(1, order)
    return torch.cat((flat[:, :1].clamp(min=1), flat[:, 1:]), 1)


def reviewed(options: Mapping[str, Any], data: str, seed: int, device: str) -> dict[str, Any]:
    """Whether a review is kind: share of right answers."""
    size, found, where = SIZES[data], tensors("reviews", data, device), torch.device(device)
    torch.manual_seed(seed)
    task = size.reviews
    model = Reader(task.words, size.width, options["pool"]).to(where)
    train, test, labels = front(found["train"]), front(found["test"]), found["train_labels"].long()

    def loss(at: Tensor) -> Tensor:
        return F.cross_entropy(model(train[at]).float(), labels[at])

    fit(model, loss, drawn(len(train), size.steps, task.batch, seed, where), Schedule(size.steps, size.lr))
    model.eval()
    with torch.no_grad(), half(where):
        said = torch.cat([model(part).argmax(-1) for part in test.split(500)])
    return {
        "accuracy": (said == found["test_labels"]).double().mean().item(),
        "attention parameters": sum(one.numel() for name, one in model.pool.named_parameters() if "proj" not in name),
    }


class Roles(nn.Module):
    """Words of sentences (B, T, W) as MARRO reads them: a sentence is the mean of its words, a pair of sentences what
    both are and how they differ."""

    def __init__(self, words: int, width: int, depth: int, shift: bool) -> None:
        super().__init__()
        self.embed, self.drop = nn.Embedding(words, width), nn.Dropout(0.3)
        self.shift = shift
        changes = 3 * width if shift else 0
        self.marro = Marro(RoleTask.classes, width, 4, depth=depth, hidden=width // 2, shift_dim=changes, mu=0.5)

    def parts(self, ids: Tensor) -> tuple[Tensor, Tensor, Tensor | None]:
        there = ids > 0
        x = (self.embed(ids) * there[..., None]).sum(2) / there.sum(2, keepdim=True).clamp(min=1)
        x = self.drop(x)
        after = torch.cat((x[:, 1:], torch.zeros_like(x[:, :1])), 1)
        return x, (ids > 0).any(2).sum(1).clamp(min=1), torch.cat((x, after, x - after), -1) if self.shift else None


def labelled(options: Mapping[str, Any], data: str, seed: int, device: str) -> dict[str, Any]:
    """The role of each sentence of a judgment: macro F1 and share of right answers."""
    size, found, where = SIZES[data], tensors("roles", data, device), torch.device(device)
    torch.manual_seed(seed)
    task = size.roles
    model = Roles(task.words, size.width, options["depth"], options["shift"]).to(where)

    def loss(at: Tensor) -> Tensor:
        ids, roles = found["train"][at].long(), found["train_labels"][at].long()
        x, lengths, xs = model.parts(ids)
        with torch.autocast(where.type, enabled=False):
            return model.marro.loss(x.float(), lengths, roles.clamp(min=0), None if xs is None else xs.float()) / len(
                at
            )

    fit(model, loss, drawn(len(found["train"]), size.steps, task.batch, seed, where), Schedule(size.steps, size.lr))
    model.eval()

    def answer(ids: Tensor) -> Tensor:
        x, lengths, xs = model.parts(ids)
        return F.one_hot(model.marro(x, lengths, xs).clamp(min=0), task.classes)

    with torch.no_grad():
        scored = task.score(answer, found)  # type: ignore[arg-type]
    return {**scored, "parameters": sum(one.numel() for one in model.parameters())}


REVIEWS = {"small": "generated reviews", "files": "IMDB reviews of up to 256 words"}
JUDGMENTS = {"small": "generated judgments", "files": "judgments of two courts in windows of 48 sentences"}
RIGHT, ROLES = Links("accuracy", 1, 0.005), Links("macro F1", 1, 0.01)
ORDERINGS = {
    "lama": Ordering(
        {"mean": {"pool": "mean"}, "additive": {"pool": "additive"}, "lama, learned": {"pool": "lama+context=learned"},
         "lama": {"pool": "lama"}, "structured": {"pool": "structured"}},
        reviewed, REVIEWS, "hashed words in place of GloVe",
        (RIGHT.not_worse("lama", "lama, learned"), RIGHT.not_worse("lama, learned", "additive"),
         RIGHT.not_worse("additive", "mean"), Links("attention parameters", -1).fewer("lama", "structured")),
        ("accuracy", "attention parameters"),
    ),
    "marro": Ordering(
        {"BiLSTM-CRF": {"depth": 0, "shift": False}, "with attention": {"depth": 2, "shift": False},
         "and the shift task": {"depth": 2, "shift": True}},
        labelled, JUDGMENTS, "a sentence is the mean of learned words",
        (ROLES.better_than("with attention", "BiLSTM-CRF"), ROLES.better_than("and the shift task", "with attention")),
        ("macro F1", "accuracy", "parameters"),
    ),
}  # fmt: skip
