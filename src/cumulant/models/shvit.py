"""SHViT (Yun and Ro 2024): convolutions, and one attention head over a fifth of the channels.

Shape legend: B images, C channels of a stage, p of them in attention, H x W its map, L = H W.
"ConvBN" is a convolution without bias and a batch norm; the last of each residual branch starts with weight 0, so that
a block starts as the identity. State-dict names are timm's.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import zoo
from ..call import Call, check_count
from ..grammar import parse
from ..nn import create_layer
from ..zoo.registry import options_of
from .backbone import FeatureInfo, Pyramid
from .mechanisms import Attending
from .parts import DropPath, Repeated, SqueezeExcite, check_stages, pair, reset_extras, reset_linear


class ConvNorm(nn.Module):
    """A convolution without bias, then a batch norm whose weight is `start` at first."""

    def __init__(
        self, dim: int, out: int, kernel: int = 1, stride: int = 1, groups: int = 1, start: float = 1.0, **place: Any
    ) -> None:
        super().__init__()
        self.start = start
        self.c = nn.Conv2d(dim, out, kernel, stride, kernel // 2, groups=groups, bias=False, **place)
        self.bn = nn.BatchNorm2d(out, **place)

    def reset_parameters(self) -> None:
        self.c.reset_parameters()
        self.bn.reset_parameters()
        nn.init.constant_(self.bn.weight, self.start)

    def forward(self, x: Tensor) -> Tensor:
        return self.bn(self.c(x))

    def fused(self) -> nn.Conv2d:
        """The two as one convolution, as they act in `eval`."""
        c, bn = self.c, self.bn
        factor = bn.weight / (cast(Tensor, bn.running_var) + bn.eps).sqrt()
        place: dict[str, Any] = {"device": c.weight.device, "dtype": c.weight.dtype}
        sizes: dict[str, Any] = {name: getattr(c, name) for name in ("kernel_size", "stride", "padding", "groups")}
        one = nn.Conv2d(c.in_channels, c.out_channels, **sizes, **place)
        one.weight.copy_(c.weight * factor[:, None, None, None])
        cast(Tensor, one.bias).copy_(bn.bias - cast(Tensor, bn.running_mean) * factor)
        return one


class Residual(nn.Module):
    """x + DropPath(m(x))."""

    def __init__(self, m: nn.Module, drop_path: DropPath | None = None) -> None:
        super().__init__()
        self.m = m
        self.drop_path = drop_path or nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.drop_path(self.m(x))


class FeedForward(nn.Module):
    """1 x 1 ConvBN to 2 C, ReLU, 1 x 1 ConvBN back."""

    def __init__(self, dim: int, **place: Any) -> None:
        super().__init__()
        self.pw1 = ConvNorm(dim, 2 * dim, **place)
        self.pw2 = ConvNorm(2 * dim, dim, start=0.0, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.pw2(F.relu(self.pw1(x)))


class PatchMerging(nn.Module):
    """(B, C, H, W) to (B, out, ceil(H / 2), ceil(W / 2)) through 4 C channels."""

    def __init__(self, dim: int, out: int, **place: Any) -> None:
        super().__init__()
        self.conv1 = ConvNorm(dim, 4 * dim, **place)
        self.conv2 = ConvNorm(4 * dim, 4 * dim, 3, 2, 4 * dim, **place)
        self.se = SqueezeExcite(4 * dim, whole_eighths(dim), F.relu, **place)
        self.conv3 = ConvNorm(4 * dim, out, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.conv3(self.se(F.relu(self.conv2(F.relu(self.conv1(x))))))


class SingleHead(nn.Module):
    """Attention over the first p channels; the others pass by, and a projection sees all.

        y = proj([attention(qkv(pre_norm(x_1))), x_2]),  x = [x_1, x_2],  query and key `qk_dim` wide, value p

    With a `layer`, that takes the place of `qkv` and attention. Cost: L p (p + 2 qk_dim) + L C^2, and the mechanism.
    """

    def __init__(
        self,
        dim: int,
        qk_dim: int | None,
        part: int,
        heads: int,
        mechanism: dict[str, Any],
        layer: str | None,
        grid: tuple[int, int],
        **place: Any,
    ) -> None:
        super().__init__()
        self.part, self.heads, self.qk_dim = part, heads, part if qk_dim is None else qk_dim
        self.pre_norm = nn.GroupNorm(1, part, **place)
        self.layer = None if layer is None else create_layer(layer, part, heads, grid_size=grid, **mechanism, **place)
        if layer is None:
            name, own = parse(mechanism["attention"])
            self.mechanism = zoo.get(name)
            given = {"grid_size": grid, **own, **(mechanism["attention_options"] or {})}
            if part % heads or self.qk_dim % heads:
                raise ValueError(f"num_heads must divide qk_dim={self.qk_dim} and partial_dim={part}, got {heads}")
            self.check_mechanism(given)
            self.mix = self.mechanism.build(self.qk_dim, heads, **place, **given)
            self.qkv = ConvNorm(part, 2 * self.qk_dim + part, **place)
        self.proj = nn.Sequential(nn.ReLU(), ConvNorm(dim, dim, start=0.0, **place))

    def forward(self, x: Tensor) -> Tensor:
        asking, passing = x.split([self.part, x.shape[1] - self.part], 1)
        mixed = self.attend(self.pre_norm(asking))
        return self.proj(torch.cat([mixed, passing], 1))

    def check_mechanism(self, given: dict[str, Any]) -> None:
        """Refuse a mechanism that cannot have values of another width than queries: tried, without numbers."""
        L, heads = math.prod(given["grid_size"]), self.heads
        query = torch.empty(1, heads, L, self.qk_dim // heads, device="meta")
        value, x = query.new_empty(1, heads, L, self.part // heads), query.new_empty(1, L, self.part)
        mix = self.mechanism.build(self.qk_dim, heads, device="meta", **given)
        try:
            with torch.no_grad():
                mix.run(Call(query, query, value, grid=given["grid_size"]), x)
        except (ValueError, RuntimeError) as error:
            if self.qk_dim == self.part:
                raise
            raise ValueError(
                f"{self.mechanism.name!r} does not take queries of {self.qk_dim} and values of {self.part} channels "
                f"({str(error).splitlines()[0]}); qk_dim=None makes them equally wide"
            ) from None

    def attend(self, x: Tensor) -> Tensor:
        """(B, p, H, W) -> (B, p, H, W)."""
        grid = x.shape[-2:]
        if self.layer is not None:
            out = self.layer(x.flatten(2).mT, grid=tuple(grid))
        else:
            # Tokens are a view where maps lie channels-last, and where they do not.
            tokens = self.qkv(x).flatten(2).mT.split([self.qk_dim, self.qk_dim, self.part], -1)
            query, key, value = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in tokens)
            call = Call(query, key, value, grid=tuple(grid))
            out = self.mix.run(call, x.flatten(2).mT).transpose(1, 2).flatten(2)
        return out.mT.unflatten(-1, grid)


class NormLinear(nn.Module):
    """A batch norm of features (B, C), then a linear layer."""

    def __init__(self, dim: int, classes: int, std: float | None, **place: Any) -> None:
        super().__init__()
        self.bn = nn.BatchNorm1d(dim, **place)
        self.l = nn.Linear(dim, classes, **place)
        reset_linear(self.l, std)

    def forward(self, x: Tensor) -> Tensor:
        return self.l(self.bn(x))

    def fused(self) -> nn.Linear:
        """The two as one linear layer, as they act in `eval`."""
        bn, old = self.bn, self.l
        factor = bn.weight / (cast(Tensor, bn.running_var) + bn.eps).sqrt()
        one = nn.Linear(old.in_features, old.out_features, device=old.weight.device, dtype=old.weight.dtype)
        one.weight.copy_(old.weight * factor)
        one.bias.copy_(old.bias + old.weight @ (bn.bias - cast(Tensor, bn.running_mean) * factor))
        return one


class SHViTBlock(Repeated):
    """A depthwise 3 x 3 ConvBN, attention where the stage has it, and a feed-forward part, each residual."""

    def __init__(self, dim: int, attention: nn.Module | None, **place: Any) -> None:
        super().__init__()
        path = DropPath()
        self.conv = Residual(ConvNorm(dim, dim, 3, groups=dim, start=0.0, **place), path)
        self.mixer = nn.Identity() if attention is None else Residual(attention, path)
        self.ffn = Residual(FeedForward(dim, **place), path)

    def forward(self, x: Tensor) -> Tensor:
        return self.ffn(self.mixer(self.conv(x)))


class Stage(nn.Module):
    """Halving of the map, except in the first stage, then blocks."""

    def __init__(self, before: int | None, dim: int, blocks: Sequence[nn.Module], **place: Any) -> None:
        super().__init__()

        def around(width: int) -> list[nn.Module]:
            return [Residual(ConvNorm(width, width, 3, groups=width, **place)), Residual(FeedForward(width, **place))]

        halving = [] if before is None else [*around(before), PatchMerging(before, dim, **place), *around(dim)]
        self.downsample = nn.Sequential(*halving)
        self.blocks = nn.Sequential(*blocks)


@options_of(Attending)
class SHViT(Pyramid):
    """Images (B, in_chans, H, W) of any size to logits (B, num_classes), or to features with `num_classes=0`.

    Args:
        embed_dim: channels of each stage, like the next three.
        depth: blocks.
        partial_dim: channels p in attention.
        img_size: side of the images that tables of a mechanism are made for; any other works too.
        types: "s" for blocks with attention, "i" for those without.
        qk_dim: width of query and key; None is that of the values, for mechanisms which need it.
        stem_depth: convolutions of stride 2 before the first stage, 4 in the paper.
        num_heads: one in the paper; more split query, key and values.
        attention: as in `Attending`, of the blocks with attention; a `layer` there has width p, and takes the place of
            projection and mechanism.
    """

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 224,
        num_classes: int = 1000,
        embed_dim: Sequence[int] = (128, 224, 320),
        depth: Sequence[int] = (2, 4, 5),
        partial_dim: Sequence[int] = (32, 48, 68),
        types: Sequence[str] = ("i", "s", "s"),
        qk_dim: int | None = 16,
        stem_depth: int = 4,
        num_heads: int = 1,
        **attending: Any,
    ) -> None:
        check_stages(embed_dim, "embed_dim", depth=depth, partial_dim=partial_dim)
        check_stages(embed_dim, "embed_dim", ("i", "s"), types=types)
        for part, whole in zip(partial_dim, embed_dim, strict=True):
            if part > whole:
                raise ValueError(f"partial_dim must be at most embed_dim, got {part} of {whole} channels")
        super().__init__(num_classes, embed_dim[-1])
        for name, count in {"stem_depth": stem_depth, "num_heads": num_heads}.items():
            check_count(name, count)
        how = Attending(**attending)
        place = how.place
        self.patch_embed = stem(how.in_chans, embed_dim[0], stem_depth, **place)
        count = sum(many for many, kind in zip(depth, types, strict=True) if kind == "s")
        mechanisms = iter(how.each(count, "blocks with attention") if count else ())

        def block(number: int) -> SHViTBlock:
            dim, part, stride = embed_dim[number], partial_dim[number], 2 ** (stem_depth + number)
            if types[number] == "i":
                return SHViTBlock(dim, None, **place)
            grid = cast(tuple[int, int], tuple(math.ceil(side / stride) for side in pair(img_size)))
            head = SingleHead(dim, qk_dim, part, num_heads, next(mechanisms), how.layer, grid, **place)
            return SHViTBlock(dim, head, **place)

        self.stages = nn.Sequential(
            *(
                Stage(embed_dim[i - 1] if i else None, dim, [block(i) for _ in range(depth[i])], **place)
                for i, dim in enumerate(embed_dim)
            )
        )
        self.head = self._made_classifier(embed_dim[-1], place)
        self.feature_info = FeatureInfo.of(
            (dim, 2 ** (stem_depth + number), f"stages.{number}") for number, dim in enumerate(embed_dim)
        )
        self._finish(how)

    def reset_parameters(self, std: float = 0.02) -> None:
        """Convolutions as PyTorch has them, norms 1, the last of each residual branch 0, the classifier of that std."""
        for module in self.modules():
            if isinstance(module, ConvNorm | nn.Conv2d | nn.GroupNorm | nn.BatchNorm1d | DropPath):
                module.reset_parameters()
            elif isinstance(module, nn.Linear):
                reset_linear(module, std)
        reset_extras(self)

    def fuse(self) -> SHViT:
        """Fold every batch norm into its convolution, and residual depthwise ones into one kernel: for inference.

        In place; what it computes in `eval` stays the same.
        """
        with torch.no_grad():
            _fuse(self)
        return self

    def _made_classifier(self, width: int, place: dict[str, Any]) -> nn.Module:
        return NormLinear(width, self.num_classes, self.init_std, **place) if self.num_classes else nn.Identity()

    def _begin(self, images: Tensor) -> tuple[Tensor, None]:
        return self.patch_embed(self.checked(images)), None

    def _level(self, level: nn.Module, state: Tensor, at: None) -> Tensor:
        stage = cast(Stage, level)
        for block in (*stage.downsample, *stage.blocks):
            state = self._run(block, state)
        return state


def stem(in_chans: int, dim: int, depth: int, **place: Any) -> nn.Sequential:
    """So many 3 x 3 ConvBN of stride 2 with ReLU between; channels double to `dim`."""
    if dim % 2 ** (depth - 1):
        raise ValueError(f"embed_dim[0] must be a multiple of {2 ** (depth - 1)} for stem_depth={depth}, got {dim}")
    widths = [in_chans, *(dim // 2**left for left in range(depth - 1, -1, -1))]
    convs = [ConvNorm(widths[i], widths[i + 1], 3, 2, **place) for i in range(depth)]
    return nn.Sequential(convs[0], *(part for conv in convs[1:] for part in (nn.ReLU(), conv)))


def whole_eighths(count: float) -> int:
    """A number of channels rounded to a multiple of 8, not below 0.9 of it."""
    near = max(8, int(count + 4) // 8 * 8)
    return near + 8 if near < 0.9 * count else near


def _fuse(module: nn.Module) -> None:
    for name, child in module.named_children():
        if isinstance(child, ConvNorm | NormLinear):
            setattr(module, name, child.fused())
        elif isinstance(child, Residual) and isinstance(child.m, ConvNorm):
            one = child.m.fused()
            one.weight[:, :, 1, 1] += 1  # depthwise: the identity is the centre of each kernel
            setattr(module, name, one)
        else:
            _fuse(child)
