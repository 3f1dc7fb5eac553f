"""Orderings of papers about language models: mixture of heads, fewer queries, differences, phases, convolutions,
streams. What is measured is the next character of a text, in nats.

Shape legend: B texts, L characters.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cumulant.data.text import story
from cumulant.models import create_model
from cumulant.nn.heads.base import auxiliary_loss
from cumulant.nn.heads.dual_stream import DualStreamAttention
from cumulant.studies.heads.ordering import Links, Ordering, folder, worse
from cumulant.studies.loop import Schedule, drawn, fit, half

LARGEST = 16.0  # factor on the logits at which Dual-Stream is tried
STORIES = 400


@dataclass(frozen=True)
class Size:
    """Of the model and its training."""

    model: str = "lm_nano"
    context: int = 32
    batch: int = 16
    steps: int = 80
    lr: float = 3e-3


SIZES = {"small": Size(), "files": Size("lm_tiny", 128, 32, 1000, 2e-3)}


@functools.lru_cache(2)
def characters(data: str, device: str) -> tuple[Tensor, Tensor, int]:
    """Train and test part of a text as numbers of its characters, the last tenth for the test; how many there are."""
    if data == "files":
        text = (folder("tiny-shakespeare") / "input.txt").read_text(encoding="utf-8")
    else:
        text = "".join(story(one) for one in range(STORIES))
    letters = {letter: place for place, letter in enumerate(sorted(set(text)))}
    ids = torch.tensor([letters[letter] for letter in text], device=device)
    cut = len(ids) * 9 // 10
    return ids[:cut], ids[cut:], len(letters)


def trained(options: Mapping[str, Any], data: str, seed: int, device: str) -> tuple[nn.Module, dict[str, Any]]:
    """A language model with these options, and what it reaches on the test part."""
    size, where = SIZES[data], torch.device(device)
    train, test, letters = characters(data, device)
    torch.manual_seed(seed)
    given: dict[str, Any] = {"num_heads": 8, **options}
    name = given.pop("model", size.model)
    model = create_model(name, num_classes=letters, context=size.context, **given).to(where)
    span = torch.arange(size.context + 1, device=where)

    def loss(at: Tensor) -> Tensor:
        tokens = train[at[:, None] + span]
        found = F.cross_entropy(model(tokens[:, :-1]).float().flatten(0, 1), tokens[:, 1:].flatten())
        more = auxiliary_loss(model)
        return found if more is None else found + more

    if where.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        held = torch.cuda.memory_allocated()
    places = drawn(len(train) - size.context, size.steps, size.batch, seed, where)
    _, graph = fit(model, loss, places, Schedule(size.steps, size.lr, weight_decay=0.1))
    told: dict[str, Any] = {"parameters": sum(one.numel() for one in model.parameters()), "graph": graph}
    if where.type == "cuda":
        told["peak memory"] = (torch.cuda.max_memory_allocated() - held) / 2**20  # MiB of training
    return model.eval(), {**told, **scored(model, test, size.context, size.batch)}


@torch.no_grad()
def scored(model: nn.Module, test: Tensor, context: int, batch: int) -> dict[str, float]:
    """Nats a character and share of right ones, in windows that follow each other; only with a whole window each."""
    nats = right = count = 0.0
    starts = torch.arange(0, len(test) - context, context, device=test.device)
    for at in starts.split(4 * batch):
        tokens = test[at[:, None] + torch.arange(context + 1, device=test.device)]
        with half(test.device):
            logits = model(tokens[:, :-1]).float()
        nats += F.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten(), reduction="sum").item()
        right += (logits.argmax(-1) == tokens[:, 1:]).sum().item()
        count += tokens[:, 1:].numel()
    return {"nats": nats / count, "accuracy": right / count}


def plainly(options: Mapping[str, Any], data: str, seed: int, device: str) -> dict[str, Any]:
    """What a model reaches, nothing more."""
    return trained(options, data, seed, device)[1]


def beyond(options: Mapping[str, Any], data: str, seed: int, device: str) -> dict[str, Any]:
    """Also in windows of twice the length it was trained on."""
    model, told = trained(options, data, seed, device)
    size, test = SIZES[data], characters(data, device)[1]
    return {**told, "nats at twice the length": scored(model, test, 2 * size.context, size.batch)["nats"]}


def amplified(options: Mapping[str, Any], data: str, seed: int, device: str) -> dict[str, Any]:
    """Also with all logits of attention multiplied."""
    model, told = trained(options, data, seed, device)
    for module in model.modules():
        if isinstance(module, DualStreamAttention):
            module.alpha = LARGEST
    size, test = SIZES[data], characters(data, device)[1]
    return {**told, "nats at alpha 16": scored(model, test, size.context, size.batch)["nats"]}


_SQA = {kind: {"layer": f"sqa+variant={kind}"} for kind in ("ssqa", "sqa", "xsqa", "xsmqa")}
MIXINGS = ("dense", "kronecker", "independent")
_WIDE = {"embed_dim": 192, "num_heads": 12}
DATA = {"small": "generated stories as characters", "files": "tiny-shakespeare as characters"}
NATS = Links("nats", better=-1, level=0.01)

ORDERINGS = {
    "moh": Ordering(
        {"plain": {}, "three quarters": {"layer": "moh+shared=2+top=4"}, "half": {"layer": "moh+shared=2+top=2"},
         "half, none shared": {"layer": "moh+shared=0+top=4"}},
        plainly, DATA, "in place of ImageNet and of 100 billion tokens",
        (NATS.not_worse("three quarters", "plain"), NATS.not_worse("plain", "half"),
         NATS.not_worse("half", "half, none shared")),
        ("nats", "accuracy", "parameters"),
    ),
    "sqa": Ordering(
        {"plain": {}, **_SQA}, plainly, DATA, "in place of Wikipedia",
        (NATS.better_than("plain", "ssqa"), NATS.better_than("ssqa", "sqa"), NATS.better_than("sqa", "xsqa"),
         NATS.better_than("xsqa", "xsmqa")),
        ("nats", "accuracy", "parameters"),
    ),
    "gda": Ordering(
        {"plain": _WIDE, **{f"ratio {r}": {**_WIDE, "layer": f"gda+ratio={r}"} for r in (1, 3, 5)}},
        plainly, DATA, "12 heads of one width, so that parameters differ",
        (NATS.not_worse("ratio 3", "ratio 1"), NATS.not_worse("ratio 1", "plain"),
         NATS.not_worse("ratio 3", "ratio 5")),
        ("nats", "accuracy", "parameters"),
    ),
    "complexformer": Ordering(
        {"rotary": {"positions": "rotary"}, "complexformer": {"layer": "complexformer+scale=none"},
         "no places": {"positions": "none"}},
        beyond, DATA, "scores over sqrt(D)",
        (NATS.not_worse("complexformer", "rotary"), NATS.not_worse("rotary", "no places"),
         Links("nats at twice the length", -1, 0.01).not_worse("complexformer", "rotary")),
        ("nats", "nats at twice the length", "parameters"),
    ),
    "rcmha": Ordering(
        {"mha": {"positions": "learned"}, "rcmha": {"layer": "rcmha+offsets=256"},
         "rmha": {"layer": "rcmha+offsets=256+convolve=false"},
         "mdha": {"layer": "rcmha+relative=false", "positions": "learned"}},
        plainly, DATA, "no memory of earlier segments",
        (NATS.better_than("rcmha", "rmha"), NATS.better_than("rcmha", "mdha"), NATS.better_than("rmha", "mha"),
         NATS.better_than("mdha", "mha"), Links("peak memory", -1).fewer("rcmha", "rmha")),
        ("nats", "accuracy", "peak memory", "parameters"),
    ),
    "dual_stream": Ordering(
        {one: {"model": "dual_stream_tiny", "num_heads": 4, "mixing": one} for one in MIXINGS},
        amplified, DATA, "0.7 million parameters in place of 29",
        (NATS.better_than("dense", "kronecker"), NATS.better_than("kronecker", "independent"),
         *(worse(one, "nats at alpha 16", "nats", 1.05, 2.0) for one in MIXINGS)),
        ("nats", "nats at alpha 16", "parameters"),
    ),
}  # fmt: skip
