"""MaxViT (Tu et al. 2022): convolutions, attention in windows and on dilated grids in every block, with any attention.

Shape legend: B images, H x W places of a stage, C its width, P side of windows and grids.
State-dict names are timm's (maxvit_*_tf): stem, stages.N.blocks.M.{conv, attn_block, attn_grid}, head.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..call import Call, check_choice, check_count, check_flag
from ..nn.attention import MultiheadAttention
from ..zoo.fused import fused_softmax
from ..zoo.registry import options_of
from .backbone import Backbone, FeatureInfo
from .mechanisms import Attending
from .parts import DropPath, Mlp, Repeated, SqueezeExcite, check_multiple, check_stages, pair, reset_maps

PARTITIONS = ("window", "global")
EPS, GELU = 1e-5, nn.GELU("tanh")


def _batch_norm(channels: int, **place: Any) -> nn.BatchNorm2d:
    return nn.BatchNorm2d(channels, eps=1e-3, momentum=0.01, **place)


class SameConv2d(nn.Conv2d):
    """A convolution whose output has ceil(side / stride) places: zeros on both sides, one more at the end if odd."""

    def forward(self, x: Tensor) -> Tensor:
        kernel_rows, kernel_cols = self.kernel_size
        if self.stride == (1, 1) and kernel_rows % 2 and kernel_cols % 2:  # as many on both sides: nothing is copied
            around = (kernel_rows // 2, kernel_cols // 2)
            return F.conv2d(x, self.weight, self.bias, padding=around, groups=self.groups)
        pads: list[int] = []
        for side, kernel, stride in zip(x.shape[:-3:-1], self.kernel_size[::-1], self.stride[::-1], strict=True):
            total = max((-(-side // stride) - 1) * stride + kernel - side, 0)
            pads += [total // 2, total - total // 2]
        return super().forward(F.pad(x, pads))


class Stem(nn.Module):
    """3 x 3 with stride 2, norm, GELU, 3 x 3; both convolutions with bias."""

    def __init__(self, in_chans: int, width: int, **place: Any) -> None:
        super().__init__()
        self.conv1 = SameConv2d(in_chans, width, 3, stride=2, **place)
        self.norm1 = _batch_norm(width, **place)
        self.conv2 = SameConv2d(width, width, 3, **place)

    def forward(self, images: Tensor) -> Tensor:
        return self.conv2(GELU(self.norm1(self.conv1(images))))


class Shortcut(nn.Module):
    """Half as many rows and columns by means, and another width by a 1 x 1 convolution."""

    def __init__(self, width: int, out: int, **place: Any) -> None:
        super().__init__()
        self.expand = nn.Conv2d(width, out, 1, **place) if width != out else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.expand(F.avg_pool2d(x, 2, ceil_mode=True, count_include_pad=False))


class MBConv(nn.Module):
    """Pre-norm inverted bottleneck, four times the *output* width inside: the branch alone, `shortcut` is beside it."""

    def __init__(self, width: int, out: int, stride: int, **place: Any) -> None:
        super().__init__()
        inner = 4 * out
        self.shortcut = Shortcut(width, out, **place) if stride == 2 else nn.Identity()
        self.pre_norm = _batch_norm(width, **place)
        self.conv1_1x1 = nn.Conv2d(width, inner, 1, bias=False, **place)
        self.norm1 = _batch_norm(inner, **place)
        self.conv2_kxk = SameConv2d(inner, inner, 3, stride=stride, groups=inner, bias=False, **place)
        self.norm2 = _batch_norm(inner, **place)
        self.se = SqueezeExcite(inner, out // 4, **place)
        self.conv3_1x1 = nn.Conv2d(inner, out, 1, **place)

    def forward(self, x: Tensor) -> Tensor:
        x = GELU(self.norm1(self.conv1_1x1(self.pre_norm(x))))
        return self.conv3_1x1(self.se(GELU(self.norm2(self.conv2_kxk(x)))))


class RelativeBias(nn.Module):
    """What is added to the logit of places i and j of a window: table[h, row j - row i + P - 1, and so of columns]."""

    def __init__(self, heads: int, side: int, **place: Any) -> None:
        super().__init__()
        self.side = side
        self.relative_position_bias_table = nn.Parameter(torch.empty(heads, 2 * side - 1, 2 * side - 1, **place))
        self.register_load_state_dict_pre_hook(_resize_loaded_bias)

    def reset_parameters(self) -> None:
        nn.init.normal_(self.relative_position_bias_table, std=0.02)

    def forward(self) -> Tensor:
        """(heads, P^2, P^2)."""
        table, P = self.relative_position_bias_table, self.side
        places = torch.arange(P, device=table.device)
        apart = places - places[:, None] + P - 1
        return table[:, apart[:, None, :, None], apart[None, :, None, :]].flatten(3).flatten(1, 2)


def _resize_loaded_bias(module: RelativeBias, state: dict[str, Any], name: str, *_: Any) -> None:
    """Before loading: fit, bilinearly, a table made for windows of another size."""
    key, own = f"{name}relative_position_bias_table", module.relative_position_bias_table
    table = state.get(key)
    if table is not None and table.ndim == 3 and table.shape != own.shape and len(table) == len(own):
        state[key] = F.interpolate(table[None].float(), own.shape[1:], mode="bilinear")[0].to(table.dtype)


class RelativeAttention(MultiheadAttention):
    """Softmax attention in windows of P x P places, with a learned bias for every distance."""

    rows_alone = False
    stays = (
        "it adds a learned bias for every distance to its logits, which no sum over keys can; windows are short, and "
        'attention over the whole map, create_model(..., attention="cumulant3", partition="global"), has to be trained'
    )

    def __init__(self, dim: int, num_heads: int, side: int, **rest: Any) -> None:
        super().__init__(dim, num_heads, **rest)
        self.rel_pos = RelativeBias(num_heads, side, device=rest.get("device"), dtype=rest.get("dtype"))

    def reset_extras(self) -> None:
        super().reset_extras()
        self.rel_pos.reset_parameters()

    def _bias(self, call: Call) -> Tensor:
        bias = self.rel_pos().to(call.query.dtype)
        if call.key_mask is None:
            return bias
        # Not -inf: of a window that is padding alone nothing is read, but NaN would spread.
        return bias.masked_fill(~call.key_mask[..., None, None, :], torch.finfo(bias.dtype).min)

    def mix_tokens(self, call: Call, x: Tensor, context: Tensor | None = None) -> Tensor:
        call = call.checked()
        return fused_softmax(*call[:3], attn_mask=self._bias(call), dropout_p=call.dropout_p)

    def scores_of(self, call: Call, x: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        return (call.query @ call.key.mT * call.softmax_scale + self._bias(call)).softmax(-1)


class Partition(nn.Module):
    """Attention among the P^2 places of a window ("block") or of a dilated grid ("grid"), or of all, and an MLP.

    Windows hold neighbours, grids places H / P and W / P apart. A map that P does not divide is padded below and to the
    right where `pad` says so; what was added is masked. Maps (B, H, W, C), both parts as branches of `drop_path`.
    """

    def __init__(self, attn: nn.Module, dim: int, kind: str, side: int, pad: bool, **place: Any) -> None:
        super().__init__()
        self.kind, self.side, self.pad = kind, side, pad
        self.norm1 = nn.LayerNorm(dim, eps=EPS, **place)
        self.attn = attn
        self.norm2 = nn.LayerNorm(dim, eps=EPS, **place)
        self.mlp = Mlp(dim, 4 * dim, gelu="tanh", **place)

    def forward(self, x: Tensor, drop_path: nn.Module) -> Tensor:
        x = x + drop_path(self._mixed(self.norm1(x)))
        return x + drop_path(self.mlp(self.norm2(x)))

    def _mixed(self, x: Tensor) -> Tensor:
        B, H, W, _ = x.shape
        if self.kind == "global":
            return self.attn(x.flatten(1, 2), grid=(H, W)).reshape(x.shape)
        P = self.side
        below, right = -H % P, -W % P
        if not below and not right:
            return joined(self.attn(parted(x, P, self.kind), grid=(P, P)), P, self.kind, (H, W))
        if not self.pad:
            raise ValueError(f"a map of {H} x {W} places has no windows of {P} x {P}; pad=True fills it up")
        there = F.pad(torch.ones(1, H, W, 1, dtype=torch.bool, device=x.device), (0, 0, 0, right, 0, below))
        mask = parted(there, P, self.kind)[..., 0].repeat(B, 1)
        tokens = parted(F.pad(x, (0, 0, 0, right, 0, below)), P, self.kind)
        out = self.attn(tokens, attn_mask=mask, grid=(P, P))
        return joined(out, P, self.kind, (H + below, W + right))[:, :H, :W]


def parted(x: Tensor, side: int, kind: str) -> Tensor:
    """(B, H, W, C) as windows or grids (B n, P^2, C)."""
    B, H, W, C = x.shape
    if kind == "block":
        cut = x.reshape(B, H // side, side, W // side, side, C).permute(0, 1, 3, 2, 4, 5)
    else:
        cut = x.reshape(B, side, H // side, side, W // side, C).permute(0, 2, 4, 1, 3, 5)
    return cut.reshape(-1, side * side, C)


def joined(x: Tensor, side: int, kind: str, size: tuple[int, int]) -> Tensor:
    """The inverse of `parted` for a map of that size."""
    H, W = size
    cut = x.reshape(-1, H // side, W // side, side, side, x.shape[-1])
    order = (0, 1, 3, 2, 4, 5) if kind == "block" else (0, 3, 1, 4, 2, 5)
    return cut.permute(order).reshape(-1, H, W, x.shape[-1])


class MaxViTBlock(Repeated):
    """MBConv, attention in windows, attention on grids; five residual branches, which share one rate."""

    def __init__(self, conv: MBConv, block: Partition, grid: Partition) -> None:
        super().__init__()
        self.conv, self.attn_block, self.attn_grid = conv, block, grid
        self.drop_path = DropPath()

    def forward(self, x: Tensor) -> Tensor:
        x = self.conv.shortcut(x) + self.drop_path(self.conv(x))
        x = x.permute(0, 2, 3, 1)
        x = self.attn_grid(self.attn_block(x, self.drop_path), self.drop_path)
        return x.permute(0, 3, 1, 2)


class Stage(nn.Module):
    """Blocks of one width; the first halves rows and columns."""

    def __init__(self, blocks: Iterable[MaxViTBlock]) -> None:
        super().__init__()
        self.blocks = nn.Sequential(*blocks)


class PreLogits(nn.Module):
    """tanh(W x)."""

    def __init__(self, width: int, out: int, **place: Any) -> None:
        super().__init__()
        self.fc = nn.Linear(width, out, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc(x).tanh()


class Head(nn.Module):
    """LayerNorm, tanh(W x), classifier, of pooled features (B, C)."""

    def __init__(self, width: int, hidden: int, classifier: nn.Module, **place: Any) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width, eps=EPS, **place)
        self.pre_logits = PreLogits(width, hidden, **place)
        self.fc = classifier


@options_of(Attending)
class MaxViT(Backbone):
    """Images (B, in_chans, H, W) to logits (B, num_classes), or to features (B, hidden) with `num_classes=0`.

    Levels are the stem and the stages: strides 2, 4, 8, 16, 32. Cost is linear in the pixels.

    Args:
        img_size: side that `window` is chosen for; other sizes work where windows fill the last map, or with `pad`.
        window: side P of windows and grids; that of the last map unless given (7 at 224 pixels).
        pad: fill up maps that windows do not divide, and mask what was added; else such a size is an error.
        partition: "window" as published; "global" has one attention over the whole map in place of each, windows and
            grids alike: the place of a linear-time mechanism.
        attention: see `Attending`. A mechanism other than softmax has no relative bias, nor has "global" or a `layer`:
            positions are then those that the convolutions' borders tell.
    """

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 224,
        num_classes: int = 1000,
        stem_width: int = 64,
        widths: Sequence[int] = (64, 128, 256, 512),
        depths: Sequence[int] = (2, 2, 5, 2),
        head_dim: int = 32,
        window: int | None = None,
        pad: bool = False,
        partition: str = "window",
        **attending: Any,
    ) -> None:
        check_stages(widths, "widths", depths=depths)
        super().__init__(num_classes, widths[-1])
        check_choice("partition", partition, PARTITIONS)
        for name, count in {"stem_width": stem_width, "head_dim": head_dim}.items():
            check_count(name, count)
        if any(width % head_dim for width in widths):
            raise ValueError(f"head_dim must divide every width of {tuple(widths)}, got {head_dim}")
        check_flag("pad", pad)
        how = Attending(**attending)
        place = how.place
        self.pad, self.partition = pad, partition
        self.stride = 2 ** (len(widths) + 1)
        self.window = max(1, min(pair(img_size)) // self.stride) if window is None else window
        check_count("window", self.window)
        mechanisms = iter(how.each(2 * sum(depths), "attentions, two a block"))

        def part(width: int, kind: str) -> Partition:
            one, side, heads = next(mechanisms), self.window, width // head_dim
            if partition == "window" and one["attention"] == "softmax" and how.layer is None:
                attn: nn.Module = RelativeAttention(width, heads, side, **one, **place)
            else:
                grid = (side, side) if partition == "window" else tuple(s // self.stride for s in pair(img_size))
                attn = how.made(width, heads, one, grid_size=grid)
            return Partition(attn, width, kind if partition == "window" else "global", side, pad, **place)

        def stage(width: int, out: int, depth: int) -> Stage:
            convs = (MBConv(out if later else width, out, 1 if later else 2, **place) for later in range(depth))
            return Stage(MaxViTBlock(conv, part(out, "block"), part(out, "grid")) for conv in convs)

        self.stem = Stem(how.in_chans, stem_width, **place)
        steps = zip(pairwise((stem_width, *widths)), depths, strict=True)
        self.stages = nn.Sequential(*(stage(*width, depth) for width, depth in steps))
        self.head = Head(widths[-1], widths[-1], self._made_classifier(widths[-1], place), **place)
        names = ["stem", *(f"stages.{number}" for number in range(len(widths)))]
        self.feature_info = FeatureInfo.of(
            (width, 2 ** (number + 1), name)
            for number, (width, name) in enumerate(zip((stem_width, *widths), names, strict=True))
        )
        self._finish(how)

    def reset_parameters(self, std: float = 0.02) -> None:
        """As released: kernels, matrices and relative biases N(0, std), other biases 0, norms 1."""
        reset_maps(self, std, lambda weight: nn.init.normal_(weight, std=std))

    def classifiers(self) -> dict[str, int]:
        return {"head.fc": self.num_features}

    def _levels(self) -> Iterable[nn.Module]:
        return [self.stem, *self.stages]

    def _begin(self, images: Tensor) -> tuple[Tensor, None]:
        self.checked(images)
        if self.partition == "window" and not self.pad:
            what = f"{self.window} windows' places of {self.stride} pixels," if self.window > 1 else "the stride"
            check_multiple(what, self.window * self.stride, *images.shape[-2:])
        return images, None

    def _level(self, level: nn.Module, state: Tensor, at: None) -> Tensor:
        if level is self.stem:
            return level(state)
        for block in cast(Stage, level).blocks:
            state = self._run(block, state)
        return state

    def _pooled(self, features: Tensor) -> Tensor:
        return self.head.pre_logits(self.head.norm(features.mean((2, 3))))


_WIDE = {"depths": (2, 6, 14, 2)}
# The numbers are parameters at 224 pixels with 1000 classes; of nano with 10.
MAXVIT_CONFIGS: dict[str, dict[str, Any]] = {
    "maxvit_nano": {  # 182,910
        "img_size": 32, "stem_width": 16, "widths": (32, 64), "depths": (1, 1), "head_dim": 16,
    },
    "maxvit_t": {},  # 30,916,528
    "maxvit_s": {"widths": (96, 192, 384, 768)},  # 68,927,956
    "maxvit_b": {"widths": (96, 192, 384, 768), **_WIDE},  # 119,467,708
    "maxvit_l": {"stem_width": 128, "widths": (128, 256, 512, 1024), **_WIDE},  # 211,785,560
    "maxvit_xl": {"stem_width": 192, "widths": (192, 384, 768, 1536), **_WIDE},  # 474,951,952
}  # fmt: skip
