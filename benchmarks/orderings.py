"""Orderings that the papers of the zoo report, on experiments small enough for one CPU core.

    python benchmarks/orderings.py --text TEXT --vit CHECKPOINT --images FOLDER --reviews FOLDER --out JSON

regression   no training: noisy linear maps that change from segment to segment; predict the next value from the prefix.
decoding     multiply-adds and numbers held for one more token after t of them, counted.
language     bits a character of a small causal transformer on one text, two seeds of each.
recall       share of key-value pairs that a small causal transformer, trained for it, gives back.
documents    accuracy of one layer of attention over the words of reviews, documents.py beside this.
late layers  accuracy of a softmax vision transformer with three of its layers replaced without training.

Orderings about image classification are judged by `cumulant bench train`; `python -m tools.pages` puts all together.
"""

from __future__ import annotations

import argparse
import copy
import itertools
import json
import statistics
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from documents import documents
from torch import Tensor, nn

from cumulant import zoo
from cumulant.bench.provenance import provenance, read_result
from cumulant.bench.work import WorkCounter
from cumulant.nn import MultiheadAttention
from cumulant.train.files import claim_room, write_atomically
from cumulant.train.optimise import descend

SCALES, RIDGES = (1.0, 3.0, 10.0, 30.0, 100.0), (1e-3, 1e-2, 1e-1, 1.0)


def piecewise(seed: int, length: int = 1024, segments: int = 8, width: int = 8) -> tuple[Tensor, Tensor]:
    """Keys (1, 1, L, D) of length 1 around a centre of each segment, values A_s k + noise with A_s of the segment."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    of = torch.arange(length) * segments // length
    key = F.normalize(F.normalize(draw(segments, width), dim=-1)[of] + 0.3 * draw(length, width), dim=-1)
    value = (draw(segments, width, width)[of] @ key.unsqueeze(-1)).squeeze(-1) + 0.1 * draw(length, width)
    return key[None, None], value[None, None]


def ridge_of_prefix(query: Tensor, key: Tensor, value: Tensor, ridge: float) -> Tensor:
    """The global linear fit to all pairs so far, read at the query."""
    outer = (key.unsqueeze(-1) * key.unsqueeze(-2)).cumsum(-3) + ridge * torch.eye(key.shape[-1], dtype=key.dtype)
    cross = (key.unsqueeze(-1) * value.unsqueeze(-2)).cumsum(-3)
    return (query.unsqueeze(-2) @ torch.linalg.solve(outer, cross)).squeeze(-2)


def regression(draws: int = 4, length: int = 1024) -> dict[str, float]:
    """Mean squared error after the first segment; scale and ridge of each method are those best on another draw."""
    lla = partial(zoo.get("lla"), is_causal=True, solver="direct")
    methods: dict[str, list[Callable[[Tensor, Tensor, Tensor], Tensor]]] = {
        "lla": [partial(lla, scale=s, ridge=r) for s, r in itertools.product(SCALES, RIDGES)],
        "softmax": [partial(zoo.get("softmax"), is_causal=True, scale=s) for s in SCALES],
        "global ridge": [partial(ridge_of_prefix, ridge=r) for r in RIDGES],
    }

    def mse(method: Callable[[Tensor, Tensor, Tensor], Tensor], seed: int) -> float:
        key, value = piecewise(seed, length)
        out = method(key[..., 1:, :], key[..., :-1, :], value[..., :-1, :])
        return (out - value[..., 1:, :])[..., length // 8 :, :].square().mean().item()

    best = {name: min(tried, key=lambda one: mse(one, 0)) for name, tried in methods.items()}
    return {name: statistics.mean(mse(one, seed) for seed in range(1, draws + 1)) for name, one in best.items()}


@torch.no_grad()
def decoding(lengths: Sequence[int] = (64, 512, 4096), width: int = 64) -> dict[str, list[dict[str, int]]]:
    """Work of one more token, and numbers held, after t tokens: streams of the zoo, and softmax with its cache."""
    found: dict[str, list[dict[str, int]]] = {"softmax": []}
    for t in lengths:
        q, k, v = torch.randn(3, 1, 1, t + 1, width, generator=torch.Generator().manual_seed(0))
        with torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH), WorkCounter() as counter:
            F.scaled_dot_product_attention(q[..., -1:, :], k, v)
        found["softmax"].append({"tokens": t, "work": counter.work.total, "held": 2 * (t + 1) * width})
    for name in zoo.names():
        mechanism = zoo.get(name)
        if not mechanism.streaming or mechanism.stream is None:
            continue
        options = {"max_len": lengths[-1] + 1} if name == "cosformer" else {}
        stream, rows, seen = mechanism.stream(**options), [], 0
        tokens = torch.randn(3, 1, 1, lengths[-1] + 1, width, generator=torch.Generator().manual_seed(0))
        for t in lengths:
            for at in range(seen, t):
                stream.step(*(x[..., at : at + 1, :] for x in tokens))
            with WorkCounter() as counter:
                stream.step(*(x[..., t : t + 1, :] for x in tokens))
            seen = t + 1
            held = sum(x.numel() for x in stream.state if isinstance(x, Tensor))
            rows.append({"tokens": t, "work": counter.work.total, "held": held})
        found[name] = rows
    return found


@dataclass(frozen=True)
class Setting:
    """A causal attention: a mechanism with options, or softmax within segments of so many tokens and nothing else."""

    attention: str
    options: Mapping[str, Any] = field(default_factory=dict)
    alone: int = 0


class SmallModel(nn.Module):
    """Tokens (B, L) -> logits (B, L, V): embedding, positions, pre-norm blocks of causal attention and MLP."""

    def __init__(self, vocabulary: int, length: int, setting: Setting, *, width: int = 64, depth: int = 2) -> None:
        super().__init__()
        self.alone = setting.alone
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(length, width)
        self.norms = nn.ModuleList(nn.LayerNorm(width) for _ in range(2 * depth + 1))
        self.mixers = nn.ModuleList(
            MultiheadAttention(width, 4, attention=setting.attention, attention_options=dict(setting.options))
            for _ in range(depth)
        )
        self.inner = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(depth)
        )
        self.head = nn.Linear(width, vocabulary)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.tokens(ids) + self.positions.weight[: ids.shape[1]]
        for i, (mix, inner) in enumerate(zip(self.mixers, self.inner, strict=True)):
            x = x + self._mixed(mix, self.norms[2 * i](x))
            x = x + inner(self.norms[2 * i + 1](x))
        return self.head(self.norms[-1](x))

    def _mixed(self, mix: nn.Module, x: Tensor) -> Tensor:
        if not self.alone:
            return mix(x, is_causal=True)
        parts = x.unflatten(1, (-1, self.alone)).flatten(0, 1)
        return mix(parts, is_causal=True).unflatten(0, (len(x), -1)).flatten(1, 2)


def fitted(model: nn.Module, batch: Callable[[], tuple[Tensor, Tensor]], steps: int, lr: float = 3e-3) -> nn.Module:
    """AdamW with a linear warm-up and a cosine; targets below 0 do not count."""
    optimiser = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.01)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimiser, lr, total_steps=steps, pct_start=0.1)

    def loss() -> Tensor:
        ids, targets = batch()
        return F.cross_entropy(model(ids).flatten(0, 1), targets.flatten(), ignore_index=-1)

    descend(optimiser, (loss() for _ in range(steps)), 1.0, schedule)
    return model.eval()


LANGUAGE = {
    "softmax": Setting("softmax"),
    "linear": Setting("linear"),
    "cosformer": Setting("cosformer", {"max_len": 128}),
    "cosformer without the cosine": Setting("cosformer", {"max_len": 1_000_000}),
    "flow": Setting("flow"),
    "combiner, fixed": Setting("combiner", {"segment": 16}),
    "combiner, log-sparse": Setting("combiner", {"variant": "logsparse"}),
    "own segment alone": Setting("softmax", alone=16),
    "aaren": Setting("aaren"),
}


def language(text: str, seeds: int = 2, steps: int = 300, length: int = 128) -> dict[str, list[float]]:
    """Bits a character on the last tenth of the text, for each setting and seed."""
    if len(text) < 10 * (length + 2):
        raise ValueError(f"the text must have {10 * (length + 2):,} characters or more, got {len(text):,}")
    letters = sorted(set(text))
    ids = torch.tensor([letters.index(c) for c in text])
    train, test = ids[: len(ids) * 9 // 10], ids[len(ids) * 9 // 10 :]
    places = torch.linspace(0, len(test) - length - 1, 64).long()[:, None] + torch.arange(length)
    found: dict[str, list[float]] = {}
    for name, setting in LANGUAGE.items():
        found[name] = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = SmallModel(len(letters), length, setting)

            def batch() -> tuple[Tensor, Tensor]:
                at = torch.randint(len(train) - length - 1, (16, 1)) + torch.arange(length)
                return train[at], train[at + 1]

            fitted(model, batch, steps)
            with torch.no_grad():
                loss = F.cross_entropy(model(test[places]).flatten(0, 1), test[places + 1].flatten())
            found[name].append(loss.item() / 0.6931471805599453)
        print(f"language: {name:30} " + " ".join(f"{x:.3f}" for x in found[name]), flush=True)
    return found


RECALL = {name: Setting(name) for name in ("softmax", "linear", "aaren")}


def recall(seeds: int = 2, steps: int = 800, pairs: int = 8, kinds: int = 16) -> dict[str, list[float]]:
    """Share of right answers: `pairs` keys, each followed by its value, then the keys in another order."""

    def sample(count: int) -> tuple[Tensor, Tensor]:
        keys = torch.rand(count, kinds).argsort(-1)[:, :pairs]
        values = torch.randint(kinds, (count, pairs)) + kinds
        order = torch.rand(count, pairs).argsort(-1)
        shown = torch.stack((keys, values), -1).flatten(1)
        asked, answers = keys.gather(1, order), values.gather(1, order)
        again = torch.stack((asked, answers), -1).flatten(1)
        ids = torch.cat((shown, again), 1)
        targets = torch.full_like(ids, -1)
        targets[:, 2 * pairs :: 2] = answers
        return ids, targets

    found: dict[str, list[float]] = {}
    for name, setting in RECALL.items():
        found[name] = []
        for seed in range(seeds):
            torch.manual_seed(seed)
            model = fitted(SmallModel(2 * kinds, 4 * pairs, setting), lambda: sample(64), steps)
            with torch.no_grad():
                ids, targets = sample(512)
                right = model(ids).argmax(-1)[targets >= 0] == targets[targets >= 0]
            found[name].append(right.float().mean().item())
        print(f"recall: {name:30} " + " ".join(f"{x:.3f}" for x in found[name]), flush=True)
    return found


@torch.no_grad()
def late_layers(checkpoint: Path, folder: str, name: str = "hierarchical", images: int = 500) -> dict[str, float]:
    """Top-1 of a softmax model on test images, as it is and with three layers replaced: the first, middle and last."""
    from cumulant.inspect import labelled_items, open_model

    opened = open_model(checkpoint)
    model: Any = opened.model.float()
    pixels, labels, _ = labelled_items(opened, folder, images)
    depth, found = len(model.blocks), {}
    middle = depth // 2 - 1
    places = {"none": (0, 0), "first": (0, 3), "middle": (middle, middle + 3), "last": (depth - 3, depth)}
    for label, (start, stop) in places.items():
        changed = copy.deepcopy(model)
        for block in changed.blocks[start:stop]:
            layer = block.attn
            layer.mechanism, place = zoo.get(name), {"grid_size": layer.grid_size, "prefix": layer.prefix}
            layer.mix = layer.mechanism.build(layer.dim, layer.num_heads, **place)
        found[label] = (changed(pixels).argmax(-1) == labels).float().mean().item()
    return found


def main(words: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--text", type=Path, help="a text file for the language models")
    parser.add_argument("--vit", type=Path, help="checkpoint of a vision transformer trained with softmax")
    parser.add_argument("--images", help="folder of its data")
    parser.add_argument("--reviews", type=Path, help="folder of labelled texts, train*.parquet and test*.parquet")
    parser.add_argument("--out", type=Path, required=True, help="JSON file; parts that are in it already are kept")
    given = parser.parse_args(words)
    try:
        claim_room(given.out.parent, 0)
        results = read_result(given.out) if given.out.exists() else {}
    except (OSError, ValueError) as error:
        parser.error(str(error))
    parts: dict[str, Callable[[], Any]] = {"regression": regression, "decoding": decoding, "recall": recall}
    if given.text is not None:
        parts["language"] = lambda: language(given.text.read_text(encoding="utf-8"))
    if given.vit is not None:
        parts["late layers"] = lambda: late_layers(given.vit, given.images)
    if given.reviews is not None:
        parts["documents"] = lambda: documents(given.reviews)
    for name, part in parts.items():
        if name not in results:
            results |= provenance(
                "python benchmarks/orderings.py --text TEXT --vit CHECKPOINT --images FOLDER --reviews FOLDER"
            )
            results[name] = part()
            print(name, json.dumps(results[name]), flush=True)
            write_atomically(given.out, (json.dumps(results, indent=1) + "\n").encode())


if __name__ == "__main__":
    main()
