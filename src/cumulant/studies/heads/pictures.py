"""Orderings of papers about pictures: routed regions, guessed keys, dropped tokens, densities over frozen features.

Shape legend: B pictures, T = 1 + N tokens, N patches, C width, H heads.
"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from cumulant.call import Call
from cumulant.data.decode import decode_image
from cumulant.data.digits import digits_source
from cumulant.data.rows import parquet_rows
from cumulant.data.tables import find_shards
from cumulant.models import create_model
from cumulant.models.ia_red2 import InterpretedViT
from cumulant.nn import MultiheadAttention, create_layer
from cumulant.nn.heads.base import auxiliary_loss
from cumulant.nn.heads.biformer import BiLevelRouting
from cumulant.nn.heads.sparsifiner import set_stage, sparse_loss
from cumulant.studies.heads.ordering import Links, Ordering, falls, folder
from cumulant.studies.loop import Schedule, drawn, fit, half

PLAIN = "vit_tiny_patch16_224"
TRAIN, TEST = 20000, 5000  # pictures of CIFAR-10 that are read


@dataclass(frozen=True)
class Size:
    """Of the pictures, the network and its training."""

    side: int = 8
    patch: int = 2
    width: int = 32
    depth: int = 3
    heads: int = 4
    batch: int = 64
    steps: int = 200
    lr: float = 2e-3
    few: int = 300  # pictures kept apart, from which heads on frozen features learn
    rewarded: int = 120  # steps in which an interpreter learns by reward

    @property
    def grid(self) -> int:
        return self.side // self.patch


SIZES = {"small": Size(), "files": Size(32, 4, 128, 6, 8, 128, 800, 1e-3, few=1000)}
ROUTED = {"small": Size(), "files": Size(32, 4, 128, 4, 4, 64, 500, 1e-3, few=1000)}  # where steps take longer


@functools.lru_cache(2)
def pictures(data: str, device: str) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """uint8 pictures (n, 3, side, side) and labels of the train and the test part."""
    found: list[Tensor] = []
    if data == "files":
        shards = find_shards(folder("cifar10"))
        for part, count in (("train", TRAIN), ("test", TEST)):
            rows = parquet_rows(shards[part])
            images, labels = (next(name for name in rows.schema.names if name in names)
                              for names in (("img", "image"), ("label", "labels")))  # fmt: skip
            chosen = range(min(count, len(rows)))
            cells = [rows.cell(at, images)["bytes"] for at in chosen]
            found.append(torch.stack([decode_image(cells[at], 32, rows.name(at)) for at in chosen]))
            found.append(torch.tensor([rows.cell(at, labels) for at in chosen]))
    else:
        source: Any = digits_source()
        for part in (source.train, source.test):
            found += [part.images, part.labels]
    x, y, tx, ty = (one.to(device) for one in found)
    return x, y.long(), tx, ty.long()


def seen(images: Tensor) -> Tensor:
    """Pictures as a network sees them."""
    return images.float() / 127.5 - 1


def moved(images: Tensor) -> Tensor:
    """Pictures of a training step: mirrored by chance, and shifted by up to a sixteenth of the side."""
    side, many = images.shape[-1], len(images)
    x = seen(images)
    mirrored = torch.rand(many, 1, 1, 1, device=x.device) < 0.5
    x = torch.where(mirrored & (side > 8), x.flip(-1), x)
    reach = side // 16
    at = torch.randint(0, 2 * reach + 1, (2, many, 1), device=x.device) + torch.arange(side, device=x.device)
    x = F.pad(x, (reach,) * 4)
    rows = x.gather(2, at[0][:, None, :, None].expand(-1, 3, -1, x.shape[-1]))
    return rows.gather(3, at[1][:, None, None, :].expand(-1, 3, side, -1))


def network(size: Size, name: str = PLAIN, **options: Any) -> nn.Module:
    base = {"img_size": size.side, "patch_size": size.patch, "embed_dim": size.width, "depth": size.depth,
            "num_heads": size.heads, "num_classes": 10, "init_std": size.width**-0.5 / 2}  # fmt: skip
    return create_model(name, **{**base, **options})


@torch.no_grad()
def accuracy(answer: Callable[[Tensor], Tensor], images: Tensor, labels: Tensor) -> float:
    """Share of right answers."""
    right = 0
    for x, y in zip(images.split(500), labels.split(500), strict=True):
        with half(x.device):
            right += int((answer(seen(x)).argmax(-1) == y).sum())
    return right / len(labels)


def learn(
    model: nn.Module, loss: Callable[[Tensor, Tensor], Tensor], data: str, seed: int, device: str, share: float = 1.0,
    lr: float = 1.0, few: bool = False, sizes: Mapping[str, Size] = SIZES,
) -> None:  # fmt: skip
    """Train by loss(pictures, labels) for a share of the steps, at so many times the rate; with the few pictures that
    are kept apart, or with all others."""
    size, (images, labels, _, _) = sizes[data], pictures(data, device)
    steps = max(4, round(share * size.steps))
    first, last = (0, size.few) if few else (size.few, len(images))
    places = first + drawn(last - first, steps, size.batch, seed, images.device)
    fit(model, lambda at: loss(moved(images[at]), labels[at]), places, Schedule(steps, lr * size.lr, weight_decay=0.05))


def answers(model: nn.Module) -> Callable[[Tensor, Tensor], Tensor]:
    """Cross entropy of a model, with what its layers add."""

    def loss(x: Tensor, y: Tensor) -> Tensor:
        found = F.cross_entropy(model(x).float(), y, label_smoothing=0.1)
        more = auxiliary_loss(model)
        return found if more is None else found + more

    return loss


def told(model: nn.Module, data: str, device: str, answer: Callable[[Tensor], Tensor] | None = None) -> dict[str, Any]:
    """Accuracy on the test part and the number of parameters."""
    _, _, images, labels = pictures(data, device)
    model.eval()
    found = accuracy(answer or model, images, labels)
    return {"accuracy": found, "parameters": sum(one.numel() for one in model.parameters())}


class OwnRegion(BiLevelRouting):
    """BiFormer's layer in which every region attends to itself: a fixed window."""

    def _chosen(self, call: Call, regions: Any) -> Tensor:
        return torch.arange(regions.many, device=call.query.device)[None, :, None].expand(len(call.query), -1, 1)


def routed(options: Mapping[str, Any], data: str, seed: int, device: str) -> dict[str, Any]:
    """A network whose layers are BiFormer's, with regions of a size and so many of them for each."""
    size = ROUTED[data]
    torch.manual_seed(seed)
    layer = f"biformer+regions={options['regions']}+top={options['top']}+lce=3"
    model = network(size, layer=layer, pool="gap").to(device)
    if options.get("own"):
        for module in model.modules():
            if isinstance(module, BiLevelRouting):
                module.__class__ = OwnRegion
    learn(model, answers(model), data, seed, device, sizes=ROUTED)
    return told(model, data, device)


class FewKeys(MultiheadAttention):
    """Softmax in which each query has b keys that never change; the first token has all."""

    mask: Tensor

    def mix_tokens(self, call: Call, x: Tensor, context: Tensor | None = None) -> Tensor:
        return F.scaled_dot_product_attention(*call[:3], attn_mask=self.mask)


def fixed_keys(kind: str, side: int, heads: int, keep: float, seed: int) -> Tensor:
    """Which keys each query meets, bool (H, T, T): the nearest on the grid, or drawn once."""
    tokens = 1 + side * side
    count = math.ceil(keep * tokens)
    if kind == "window":
        at = (
            torch.stack(torch.meshgrid(torch.arange(side), torch.arange(side), indexing="ij"), -1).flatten(0, 1).float()
        )
        near = torch.cdist(at, at)
        order = near + 1e-3 * torch.rand(near.shape, generator=torch.Generator().manual_seed(seed))
        order = F.pad(order, (1, 0), value=-1.0).expand(heads, -1, -1)  # the first token is always among them
    else:
        order = torch.rand(heads, side * side, tokens, generator=torch.Generator().manual_seed(seed))
    mask = torch.zeros(heads, tokens, tokens, dtype=torch.bool)
    mask[:, 0] = True
    mask[:, 1:].scatter_(-1, order.argsort(-1)[..., :count], True)
    return mask


@functools.lru_cache(2)
def dense(data: str, seed: int, device: str, name: str = "") -> nn.Module:
    """A softmax network trained as usual: what others start from. With a name, that of a model which drops tokens or
    keys later, of the smaller size."""
    torch.manual_seed(seed)
    sizes = ROUTED if name else SIZES
    options = {"threshold": -1.0} if name.startswith("ia_red2") else {}
    model = network(sizes[data], name or PLAIN, **options).to(device)
    learn(model, answers(model), data, seed, device, sizes=sizes)
    return model.eval()


def pruned(options: Mapping[str, Any], data: str, seed: int, device: str) -> dict[str, Any]:
    """A trained network that goes on with few keys for each query, taught by what it was."""
    size, teacher = ROUTED[data], dense(data, seed, device, PLAIN)
    keep, kind = options.get("keep", 1.0), options["keys"]
    torch.manual_seed(seed)
    model = network(size, layer=f"sparsifiner+keep={keep}" if kind == "learned" else None).to(device)
    model.load_state_dict(teacher.state_dict(), strict=False)
    if kind == "learned":
        set_stage(model, "reconstruct")
        learn(
            model,
            lambda x, y: cast(Tensor, (model(x), auxiliary_loss(model))[1]),
            data,
            seed,
            device,
            0.25,
            sizes=ROUTED,
        )
        set_stage(model, "sparse")
    elif kind != "all":
        for number, block in enumerate(cast(Any, model).blocks):
            block.attn.__class__ = FewKeys
            block.attn.mask = fixed_keys(kind, size.grid, size.heads, keep, 100 * seed + number).to(device)

    def loss(x: Tensor, y: Tensor) -> Tensor:
        with torch.no_grad():
            taught = teacher(x).float()
        return sparse_loss(model(x).float(), y, taught)

    model.train()
    learn(model, loss, data, seed + 1, device, 0.5, 0.3, sizes=ROUTED)
    return told(model, data, device)


@functools.lru_cache(2)
def interpreted(data: str, seed: int, device: str) -> InterpretedViT:
    """A network that drops tokens: group by group its interpreter learns by reward, then its blocks by the labels."""
    model = copy.deepcopy(cast(InterpretedViT, dense(data, seed, device, "ia_red2_tiny_patch16_224")))
    for interpreter in model.interpreters:  # all tokens are kept at first, by a little
        nn.init.constant_(cast(Any, interpreter).qk.bias, 0.5)
    model.threshold = 0.5
    for group in range(len(model.groups)):
        for weight in model.parameters():
            weight.requires_grad_(False)
        for weight in model.interpreters[group].parameters():
            weight.requires_grad_(True)
        by_reward = functools.partial(model.reward_loss, group=group, tau=3.0)
        share = ROUTED[data].rewarded / ROUTED[data].steps
        learn(model, by_reward, data, seed + group, device, share, sizes=ROUTED)
        for weight in model.parameters():
            weight.requires_grad_(True)
        for weight in model.interpreters.parameters():
            weight.requires_grad_(False)

        def loss(x: Tensor, y: Tensor, group: int = group) -> Tensor:
            tokens, _ = model.passed(x, last=group, dense=True)
            return F.cross_entropy(cast(Tensor, model.forward_head(tokens)).float(), y)

        model.train()
        learn(model, loss, data, seed + 10 + group, device, 0.15, 0.1, sizes=ROUTED)
        model.eval()
    return model


def dropped(options: Mapping[str, Any], data: str, seed: int, device: str) -> dict[str, Any]:
    """One network that drops tokens by what its interpreters say, by what its class token attends to, or by chance, as
    many as its interpreters do."""
    model = interpreted(data, seed, device)
    images = pictures(data, device)[2]
    with torch.no_grad(), half(images.device):
        shares = torch.stack([model.kept_share(seen(part)) for part in images.split(500)]).mean(0)
    dice = torch.Generator(images.device).manual_seed(seed)

    def answer(x: Tensor) -> Tensor:
        if options["by"] == "interpreter":
            return model(x)
        choices: list[Tensor] = []
        for group, share in enumerate(shares.tolist()):
            tokens = model.reaching(x, choices)
            kept = choices[-1] if choices else torch.ones(tokens.shape[:2], dtype=torch.bool, device=x.device)
            if options["by"] == "class token":
                block: Any = model.blocks[sum(model.groups[:group])]
                rank = block.attn.scores(block.norm1(tokens), key_mask=kept).mean(1)[:, 0].float()
            else:
                rank = torch.rand(kept.shape, generator=dice, device=x.device)
            rank = rank.masked_fill(~kept, -1.0)
            rank[:, 0] = 2.0
            count = 1 + round(share * (kept.shape[1] - 1))
            choices.append(torch.zeros_like(kept).scatter(1, rank.topk(count, -1).indices, True) & kept)
        return cast(Tensor, model.forward_head(model.passed(x, fixed=choices)[0]))

    found = told(model, data, device, answer)
    return {**found, **{f"kept by group {number + 1}": share.item() for number, share in enumerate(shares)}}


class Head(nn.Module):
    """Frozen tokens (B, N, C) to classes: one layer over them, their mean, one linear map."""

    def __init__(self, layer: str, dim: int, heads: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(dim)
        self.mix = create_layer(layer, dim, heads)
        self.out = nn.Linear(dim, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.mix(self.norm(x)).mean(1))


def frozen(options: Mapping[str, Any], data: str, seed: int, device: str) -> dict[str, Any]:
    """A head that learns from few pictures what a network, which is not trained further, sees in them."""
    encoder = dense(data, seed, device)
    torch.manual_seed(seed)
    head = Head(options["layer"], SIZES[data].width, options["heads"]).to(device)

    def features(x: Tensor) -> Tensor:
        with torch.no_grad():
            return cast(Any, encoder).forward_features(x)[:, 1:]

    learn(head, lambda x, y: F.cross_entropy(head(features(x)).float(), y), data, seed, device, 0.5, few=True)
    return told(head, data, device, lambda x: head(features(x)))


DATA = {"small": "digits of 8 x 8 pixels, 16 tokens", "files": "CIFAR-10, 64 tokens"}
RIGHT = Links("accuracy", better=1, level=0.01)
_LEARNED = {"keys": "learned"}
ORDERINGS = {
    "biformer": Ordering(
        {"all regions": {"regions": 4, "top": 16}, "routed": {"regions": 4, "top": 4},
         "window": {"regions": 2, "top": 1, "own": True}},
        routed, DATA, "in place of ImageNet; 4 of 16 regions against a window of as many keys",
        (RIGHT.better_than("routed", "window"), RIGHT.not_worse("routed", "all regions")),
        ("accuracy", "parameters"),
    ),
    "sparsifiner": Ordering(
        {"all keys": {"keys": "all"}, "learned": {**_LEARNED, "keep": 0.25}, "window": {"keys": "window", "keep": 0.25},
         "drawn": {"keys": "drawn", "keep": 0.25}, "learned, half": {**_LEARNED, "keep": 0.5},
         "learned, a tenth": {**_LEARNED, "keep": 0.1}},
        pruned, DATA, "in place of ImageNet; a teacher of the same size trained here",
        (RIGHT.not_worse("all keys", "learned"), RIGHT.better_than("learned", "window"),
         RIGHT.better_than("window", "drawn"), RIGHT.better_than("learned, half", "learned"),
         RIGHT.better_than("learned", "learned, a tenth")),
        ("accuracy", "parameters"),
    ),
    "ia_red2": Ordering(
        {"interpreter": {"by": "interpreter"}, "class token": {"by": "class token"}, "drawn": {"by": "chance"}},
        dropped, DATA, "in place of ImageNet; one network, trained with its interpreters' choices",
        (RIGHT.better_than("interpreter", "class token"), RIGHT.better_than("class token", "drawn"),
         falls("interpreter", "kept by group 1", "kept by group 3")),
        ("accuracy", "kept by group 1", "kept by group 2", "kept by group 3"),
    ),
    "gaam": Ordering(
        {"attention": {"layer": "multihead", "heads": 8}, "eight densities": {"layer": "gaam+axis=tokens", "heads": 8},
         "one density": {"layer": "gaam+axis=tokens", "heads": 1},
         "attention and density": {"layer": "gaam", "heads": 8}},
        frozen, DATA, "tokens of a frozen network trained here; a head taught with few other pictures",
        (RIGHT.not_worse("eight densities", "one density"), RIGHT.better_than("one density", "attention"),
         RIGHT.better_than("attention and density", "attention")),
        ("accuracy", "parameters"),
    ),
}  # fmt: skip
