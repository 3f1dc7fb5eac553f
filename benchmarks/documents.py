"""Reviews as sentences of words, classified with attention along that tree and with flat softmax.

Shape legend: B reviews, S sentences of W words, V words of the vocabulary, F width of an embedding.

The ordering of hierarchical attention: with sentence structure, simple frozen embeddings and equal size, above flat
softmax in text classification. Words are those of the vocabulary; embeddings are the leading directions of the words'
log counts in the training reviews and are not trained. Both models get the same words, and learned vectors for the
place of a word in its sentence and of a sentence in its review.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cumulant.nn import MultiheadAttention
from cumulant.optional import needed

SENTENCES, WORDS = 16, 16
ABSENT = -1
SETTINGS = {
    "softmax": ("softmax", {}),
    "hierarchical": ("hierarchical", {"branching": WORDS, "levels": 1}),  # words, sentences, the review
}


class Reviews(NamedTuple):
    ids: Tensor  # (B, S W) int64, ABSENT where a sentence or the review has ended
    labels: Tensor  # (B,)


def sentences(text: str) -> list[list[str]]:
    """Lower-case words of each sentence; marks of a line break end one too."""
    parts = re.split(r"[.!?]+|<br />", text.lower())
    return [words for part in parts if (words := re.findall(r"[a-z']+", part))]


def vocabulary(texts: Sequence[str], size: int) -> dict[str, int]:
    """The `size` words that occur most, ties in the order of the alphabet."""
    counts = Counter(word for text in texts for words in sentences(text) for word in words)
    return {word: i for i, (word, _) in enumerate(sorted(counts.items(), key=lambda one: (-one[1], one[0]))[:size])}


def laid_out(texts: Sequence[str], known: dict[str, int]) -> Tensor:
    """Ids (B, S W): known words of the first S sentences, W of each."""
    ids = torch.full((len(texts), SENTENCES, WORDS), ABSENT)
    for review, text in zip(ids, texts, strict=True):
        kept = [found for words in sentences(text) if (found := [known[w] for w in words if w in known])]
        for row, words in zip(review, kept, strict=False):
            row[: len(words[:WORDS])] = torch.tensor(words[:WORDS])
    return ids.flatten(1)


def embeddings(ids: Tensor, size: int, width: int) -> Tensor:
    """(V, F): what words share, from log(1 + count) of each in each review."""
    counts = torch.zeros(len(ids), size + 1).scatter_add_(1, ids % (size + 1), torch.ones(ids.shape))[:, :size]
    torch.manual_seed(0)  # the decomposition starts from random directions
    _, scale, directions = torch.svd_lowrank(counts.log1p(), q=width, niter=4)
    found = directions * scale
    return found / found.square().mean().sqrt()


def read(path: Path, count: int) -> tuple[list[str], Tensor]:
    """`count` texts and labels, evenly spread over a parquet file with the columns text and label."""
    with needed("reading reviews needs pyarrow", "data"):
        import pyarrow.parquet as pq
    rows = pq.read_table(path, columns=["text", "label"])
    at = torch.linspace(0, rows.num_rows - 1, min(count, rows.num_rows)).long().tolist()
    taken = rows.take(at)
    return taken.column("text").to_pylist(), torch.tensor(taken.column("label").to_pylist())


class Classifier(nn.Module):
    """Frozen words and learned places, one block of attention and MLP, the mean of the words that are there."""

    words: Tensor

    def __init__(self, words: Tensor, attention: str, options: dict[str, int], classes: int) -> None:
        super().__init__()
        width = words.shape[1]
        self.register_buffer("words", F.pad(words, (0, 0, 0, 1)))  # the last one stands for no word
        self.sentence = nn.Parameter(0.02 * torch.randn(SENTENCES, 1, width))
        self.word = nn.Parameter(0.02 * torch.randn(WORDS, width))
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(3))
        self.mix = MultiheadAttention(width, 4, attention=attention, attention_options=dict(options))
        self.inner = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))
        self.head = nn.Linear(width, classes)

    def forward(self, ids: Tensor) -> Tensor:
        there = ids != ABSENT
        x = self.words[ids] + (self.sentence + self.word).flatten(0, 1)
        x = x + self.mix(self.norms[0](x), key_mask=there)
        x = x + self.inner(self.norms[1](x))
        share = there / there.sum(-1, keepdim=True).clamp(min=1)
        return self.head(self.norms[2]((share.unsqueeze(-1) * x).sum(-2)))


def accuracy(train: Reviews, test: Reviews, words: Tensor, setting: str, seed: int, epochs: int) -> float:
    """Share of right answers on `test` after `epochs` of AdamW on `train`."""
    torch.manual_seed(seed)
    model = Classifier(words, *SETTINGS[setting], classes=int(train.labels.max()) + 1)
    steps = epochs * (len(train.ids) // 32)
    optimiser = torch.optim.AdamW(model.parameters(), lr=2e-3, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, 2e-3, total_steps=steps, pct_start=0.1)
    for _ in range(epochs):
        for at in torch.randperm(len(train.ids))[: steps // epochs * 32].split(32):
            loss = F.cross_entropy(model(train.ids[at]), train.labels[at])
            optimiser.zero_grad()
            loss.backward()
            optimiser.step()
            schedule.step()
    with torch.no_grad():
        answers = torch.cat([model(ids).argmax(-1) for ids in test.ids.split(250)])
    return (answers == test.labels).float().mean().item()


def documents(
    folder: Path,
    seeds: int = 3,
    *,
    epochs: int = 4,
    train_reviews: int = 6000,
    test_reviews: int = 5000,
    size: int = 5000,
    width: int = 64,
) -> dict[str, list[float]]:
    """Accuracy of each setting and seed on the reviews of a folder with train-* and test-*.parquet."""
    paths = [min(folder.glob(f"{part}*.parquet"), default=None) for part in ("train", "test")]  # the first of several
    if None in paths:
        raise FileNotFoundError(f"no train*.parquet and test*.parquet in {folder}")
    (texts, labels), (test_texts, test_labels) = (
        read(path, n) for path, n in zip(paths, (train_reviews, test_reviews), strict=True) if path is not None
    )
    known = vocabulary(texts, size)
    train, test = Reviews(laid_out(texts, known), labels), Reviews(laid_out(test_texts, known), test_labels)
    words = embeddings(train.ids, len(known), width)
    found: dict[str, list[float]] = {}
    for name in SETTINGS:
        found[name] = [accuracy(train, test, words, name, seed, epochs) for seed in range(seeds)]
        print(f"documents: {name:30} " + " ".join(f"{x:.3f}" for x in found[name]), flush=True)
    return found
