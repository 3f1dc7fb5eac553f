"""TiC (Zhang et al. 2023): self-attention inside the sliding window of a convolution, for images of any size.

The layer is as released; the network around it is ours, since the paper's is not to be had (see docs/models.md).
Shape legend: B images, C channels, h heads of d = C / h, H x W places, K = k_h k_w offsets of a window.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import zoo
from ..call import Call, check_choice, check_count, check_flag, check_share
from ..grammar import parse
from ..zoo.registry import options_of
from .backbone import FeatureInfo, Pyramid
from .mechanisms import Attending
from .parts import DropPath, Repeated, check_stages, reset_maps

PADS, MIXINGS = ("zero", "mask"), ("auto", "window", "global")
VARIANTS, POOLINGS = ("code", "block"), ("none", "attention", "pool")
Kernel = tuple[int, int]


def window_attention(
    query: Tensor, key: Tensor, value: Tensor, kernel: Kernel, *, dilation: int = 1, pad: str = "zero",
    drop: float = 0.0, pooled: bool = False,
) -> Tensor:  # fmt: skip
    """out_i = sum_o a_io v_(i+o), a_io = softmax over the K offsets o of q_i.k_(i+o) d^-1/2. All (B, h, d, H, W).

    Outside the map keys and values are 0: with pad="zero" they take part, with logit 0, as in the released code, and
    with "mask" they do not. `pooled`: key and value are of half as many rows and columns, windows around floor(i / 2).
    Cost: 2 K C H W; no window is laid out in memory.
    """
    H, W = query.shape[-2:]

    def near(x: Tensor) -> list[Tensor]:
        for_all = _moved(x, kernel, dilation)
        return [_twice(one)[..., :H, :W] for one in for_all] if pooled else for_all

    logits = torch.stack([(query * one).sum(2) for one in near(key)], -1) * query.shape[2] ** -0.5
    if pad == "mask":
        there = torch.stack(near(torch.ones_like(key[:1, :1, 0])), -1) > 0
        logits = logits.masked_fill(~there, -torch.inf)
    weights = F.dropout(logits.softmax(-1), drop) if drop else logits.softmax(-1)
    return torch.stack([weights[..., o].unsqueeze(2) * one for o, one in enumerate(near(value))]).sum(0)


def _moved(x: Tensor, kernel: Kernel, dilation: int) -> list[Tensor]:
    """x (..., H, W) as seen from each place at each offset of the window, 0 outside."""
    H, W = x.shape[-2:]
    down, across = (dilation * (side - 1) // 2 for side in kernel)
    around = F.pad(x, (across, across, down, down))
    corners = [(dilation * i, dilation * j) for i in range(kernel[0]) for j in range(kernel[1])]
    return [around[..., i : i + H, j : j + W] for i, j in corners]


def _twice(x: Tensor) -> Tensor:
    return x.repeat_interleave(2, -2).repeat_interleave(2, -1)


def rolled(x: Tensor, down: int, across: int) -> Tensor:
    """x (B, C, H, W) in five groups of channels: as it is, and rolled up, down, left and right."""
    moves = [(0, 0), (-down, 0), (down, 0), (0, -across), (0, across)]
    return torch.cat([torch.roll(part, by, (-2, -1)) for part, by in zip(x.chunk(5, 1), moves, strict=False)], 1)


class MSA(nn.Module):
    """Maps (B, C, H, W) to maps: query, key and value by one 1 x 1 convolution, attention; no output projection.

    Args:
        mixing: "window", or "global": the mechanism over all H W tokens; "auto" is a window for softmax only.
        shift: roll groups of channels of key and value by so many places, "half" by half the map, so that a window
            reaches farther; windows only, like `pooling`: attention to means of 2 x 2 places beside, with a gate of
            each channel that begins at 0.
    """

    def __init__(
        self, dim: int, heads: int, kernel: Kernel, grid: Kernel | None = None, *, dilation: int = 1,
        pad: str = "zero", mixing: str = "auto",
        attention: str = "softmax", attention_options: dict[str, Any] | None = None, drop: float = 0.0,
        shift: int | str = 0, pooling: bool = False, **place: Any,
    ) -> None:  # fmt: skip
        super().__init__()
        check_choice("pad", pad, PADS)
        check_choice("mixing", mixing, MIXINGS)
        check_share("attn_drop", drop)
        if heads < 1 or dim % heads:
            raise ValueError(f"heads must divide the width {dim}, got {heads}")
        if any(side % 2 == 0 or side < 1 for side in kernel):
            raise ValueError(f"kernel must be of odd sides, so that a window has a middle, got {kernel}")
        name, own = parse(attention)
        self.mechanism = zoo.get(name)
        self.plain = name == "softmax"  # by sums over offsets, without laying out windows
        self.is_global = mixing == "global" or (mixing == "auto" and not self.plain)
        self.heads, self.kernel, self.dilation, self.pad = heads, kernel, dilation, pad
        self.drop, self.shift = drop, shift
        if not self.is_global and not self.plain:
            self.mechanism.require("cross", "a window has one query and many keys")
        self.qkv = nn.Conv2d(dim, 3 * dim, 1, **place)
        given = {"grid_size": grid, "prefix": 0, **place, **own, **(attention_options or {})}
        self.mix = self.mechanism.build(dim, heads, **given)
        gated = pooling and not self.is_global
        self.gate = nn.Parameter(torch.zeros(dim, 1, 1, **place)) if gated else None

    def reset_extras(self) -> None:
        reset = getattr(self.mix, "reset_parameters", None) if isinstance(self.mix, nn.Module) else None
        if callable(reset):
            reset()
        if self.gate is not None:
            nn.init.zeros_(self.gate)

    def forward(self, x: Tensor) -> Tensor:
        query, key, value = self.qkv(x).chunk(3, 1)
        if self.is_global:
            q, k, v = (part.unflatten(1, (self.heads, -1)).flatten(-2).mT for part in (query, key, value))
            call = Call(q, k, v, grid=tuple(x.shape[-2:]))
            return self.mix.run(call, x.flatten(2).mT).mT.unflatten(-1, x.shape[-2:]).flatten(1, 2)
        if self.shift:
            by = [side // 2 for side in x.shape[-2:]] if self.shift == "half" else [cast(int, self.shift)] * 2
            key, value = (rolled(part, *by) for part in (key, value))
        out = self._windows(query, key, value)
        if self.gate is None:
            return out
        key, value = (F.avg_pool2d(part, 2, ceil_mode=True, count_include_pad=False) for part in (key, value))
        return out + self.gate * self._windows(query, key, value, pooled=True)

    def _windows(self, query: Tensor, key: Tensor, value: Tensor, pooled: bool = False) -> Tensor:
        q, k, v = (part.unflatten(1, (self.heads, -1)) for part in (query, key, value))
        how: dict[str, Any] = {"dilation": self.dilation, "pad": self.pad, "pooled": pooled}
        if self.plain:
            return window_attention(q, k, v, self.kernel, drop=self.drop if self.training else 0.0, **how).flatten(1, 2)
        return self._by_mechanism(q, k, v, pooled).flatten(1, 2)

    def _by_mechanism(self, q: Tensor, k: Tensor, v: Tensor, pooled: bool) -> Tensor:
        """Windows laid out, one query each: (B H W, h, 1, d) and (B H W, h, K, d)."""
        B, h, d, H, W = q.shape

        def near(x: Tensor) -> Tensor:
            seen = _moved(x, self.kernel, self.dilation)
            seen = [_twice(one)[..., :H, :W] for one in seen] if pooled else seen
            return torch.stack(seen, 1).permute(0, 4, 5, 2, 1, 3).flatten(0, 2)

        there = near(torch.ones_like(k[:, :1, :1]))[:, 0, :, 0] > 0 if self.pad == "mask" else None
        asked = q.permute(0, 3, 4, 1, 2).reshape(-1, h, 1, d)
        out = self.mix.run(Call(asked, near(k), near(v), key_mask=there), None)
        return out.reshape(B, H, W, h, d).permute(0, 3, 4, 1, 2)


class MSAConv(Repeated):
    """The released layer: ReLU(conv(x + MSA(x))), the convolution without bias and of stride s. No norm.

    Parameters: 3 C^2 + 3 C + C C_out k^2.
    """

    def __init__(self, msa: nn.Module, dim: int, out: int, kernel: Kernel, stride: int, **place: Any) -> None:
        super().__init__()
        self.msa = msa
        self.mlp = nn.Conv2d(dim, out, kernel, stride, (kernel[0] // 2, kernel[1] // 2), bias=False, **place)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.mlp(x + self.msa(x)))


class ChannelNorm(nn.LayerNorm):
    """LayerNorm over the channels of maps (B, C, H, W)."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.permute(0, 2, 3, 1)).permute(0, 3, 1, 2)


class ConvFFN(nn.Module):
    """1 x 1 to four times the width, depthwise 3 x 3, GELU, 1 x 1 back."""

    def __init__(self, dim: int, **place: Any) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(dim, 4 * dim, 1, **place), nn.Conv2d(4 * dim, dim, 1, **place)
        self.dwconv = nn.Conv2d(4 * dim, 4 * dim, 3, padding=1, groups=4 * dim, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(F.gelu(self.dwconv(self.fc1(x))))


class TiCBlock(Repeated):
    """x + DropPath(MSA(norm1(x))), then x + DropPath(ffn(norm2(x))); ours."""

    def __init__(self, msa: nn.Module, dim: int, batch: bool, **place: Any) -> None:
        super().__init__()
        norm: Any = nn.BatchNorm2d if batch else ChannelNorm
        self.norm1, self.norm2 = norm(dim, **place), norm(dim, **place)
        self.msa, self.ffn = msa, ConvFFN(dim, **place)
        self.drop_path = DropPath()

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.drop_path(self.msa(self.norm1(x)))
        return x + self.drop_path(self.ffn(self.norm2(x)))


class OnMap(nn.Module):
    """A layer of tokens on maps (B, C, H, W)."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.flatten(2).mT, grid=tuple(x.shape[-2:])).mT.unflatten(-1, x.shape[-2:])


@options_of(Attending)
class TiC(Pyramid):
    """Images (B, in_chans, H, W) of any size to logits (B, num_classes): stages of window attention, no positions.

    Args:
        variant: "code": a released layer a stage, strides 1, 2, 2, ...; "block": stages of pre-norm blocks (ours), a
            released layer of stride 2 between them.
        kernel: side of the windows and of the convolutions behind them; or height and width.
        dilation: of the windows.
        heads: of each stage; as many as channels make the layer depthwise.
        pad: "zero" as released: what lies outside has logit 0 and takes part; "mask": it does not.
        norm: "none" as released, "batch" or "layer"; of "code" behind each layer, of "block" inside.
        shift: roll key and value in blocks (the cyclic shift): by kernel // 2 in every second, by half the map in every
            fourth; only "block", like `pooling`: "attention" to a pooled copy beside (the inter-pooling), or "pool"
            for plain means in place of the stride, the other reading of the paper.
        mixing: see `MSA`. Attention other than softmax is over the whole map unless this is "window".
        layer: an attention layer over the whole map, with projections of its own, in place of all this.
        attn_drop: dropout of the weights; released with 0.1.
    """

    def __init__(
        self,
        *,
        img_size: int = 32,
        num_classes: int = 1000,
        variant: str = "code",
        stem_stride: int = 1,
        widths: Sequence[int] = (16, 32, 64),
        depths: Sequence[int] = (1, 1, 1),
        heads: Sequence[int] = (1, 1, 1),
        kernel: int | Kernel = 3,
        dilation: int = 1,
        pad: str = "zero",
        norm: str = "none",
        shift: bool = False,
        pooling: str = "none",
        mixing: str = "auto",
        attn_drop: float = 0.0,
        **attending: Any,
    ) -> None:
        check_stages(widths, "widths", heads=heads)
        super().__init__(num_classes, widths[-1])
        for name, given, known in (("variant", variant, VARIANTS), ("pooling", pooling, POOLINGS)):
            check_choice(name, given, known)
        check_choice("norm", norm, ("none", "batch", "layer"))
        check_flag("shift", shift)
        check_count("stem_stride", stem_stride)
        blocks = variant == "block"
        if (shift or pooling != "none" or attending.get("drop_path")) and not blocks:
            raise ValueError('shift, pooling and drop_path belong to blocks, which variant="code" has none of')
        how = Attending(**attending)
        place = how.place
        sides = (kernel, kernel) if isinstance(kernel, int) else tuple(kernel)
        steps = list(zip(((widths[0], widths[0]), *pairwise(widths)), heads, strict=True))
        count = sum(depths) + len(depths) - 1 if blocks else len(widths)
        mechanisms = iter(how.each(count, "attentions, in order"))

        def msa(dim: int, many: int, level: int, **more: Any) -> nn.Module:
            given, side = next(mechanisms), -(-img_size // (stem_stride * 2**level))
            if how.layer is not None:
                return OnMap(how.made(dim, many, given, grid_size=(side, side)))
            shared: dict[str, Any] = {"dilation": dilation, "pad": pad, "mixing": mixing, "drop": attn_drop}
            return MSA(dim, many, cast(Kernel, sides), (side, side), **shared, **given, **more, **place)

        def norm_of(dim: int) -> nn.Module:
            kinds: dict[str, Any] = {"batch": nn.BatchNorm2d, "layer": ChannelNorm}
            return kinds[norm](dim, **place) if norm in kinds else nn.Identity()

        def change(dim: int, out: int, many: int, stride: int) -> nn.Module:
            if blocks and dim == out:
                return nn.Identity()
            inner = 1 if pooling == "pool" else stride
            made = MSAConv(msa(dim, many, max(0, len(stages) - 1)), dim, out, cast(Kernel, sides), inner, **place)
            return nn.Sequential(made, nn.AvgPool2d(stride, ceil_mode=True)) if inner != stride else made

        wide = 3 if stem_stride == 1 else stem_stride
        stem = nn.Conv2d(how.in_chans, widths[0], wide, stem_stride, 1 if stem_stride == 1 else 0, bias=blocks, **place)
        self.stem = nn.Sequential(stem, norm_of(widths[0]))
        stages: list[nn.Module] = []
        number = 0
        for ((dim, out), many), depth in zip(steps, depths, strict=True):
            stage: list[nn.Module] = [change(dim, out, heads[len(stages) - 1] if stages else many, 2 if stages else 1)]
            if not blocks:
                stage.append(norm_of(out))
            for _ in range(depth if blocks else 0):
                reach = 0 if not shift or number % 2 else "half" if number % 4 == 2 else max(sides) // 2
                inside = msa(out, many, len(stages), shift=reach, pooling=pooling == "attention")
                stage.append(TiCBlock(inside, out, norm == "batch", **place))
                number += 1
            stages.append(nn.Sequential(*stage))
        self.stages = nn.Sequential(*stages)
        self.norm = ChannelNorm(widths[-1], **place) if blocks else nn.Identity()
        self.head = self._made_classifier(widths[-1], place)
        self.feature_info = FeatureInfo.of((dim, stem_stride * 2**n, f"stages.{n}") for n, dim in enumerate(widths))
        self._finish(how)

    def reset_parameters(self, std: float = 0.02) -> None:
        """Ours: truncated normal for 1 x 1 convolutions and the classifier, Kaiming for others, biases 0, gates 0."""

        def kernel(weight: Tensor) -> None:
            if weight.shape[2:] == (1, 1):
                nn.init.trunc_normal_(weight, std=std)
            else:
                nn.init.kaiming_normal_(weight, nonlinearity="relu")

        reset_maps(self, std, kernel)

    def _begin(self, images: Tensor) -> tuple[Tensor, None]:
        return self.stem(self.checked(images)), None

    def _level(self, level: nn.Module, state: Tensor, at: None) -> Tensor:
        for block in cast(nn.Sequential, level):
            state = self._run(block, state)
        return state

    def _end(self, state: Tensor, at: None) -> Tensor:
        """The last map."""
        return self.norm(state)


_NANO = {"heads": (2, 4, 8), "variant": "block", "norm": "batch"}
# The numbers are parameters with 10 classes, of tiny with 1000.
TIC_CONFIGS: dict[str, dict[str, Any]] = {
    "tic_nano": {},  # 31,226; norm="batch" adds 256
    "tic_nano_block": _NANO,  # 93,242
    "tic_tiny": {  # 19,902,440
        "img_size": 224, "variant": "block", "stem_stride": 4, "widths": (64, 128, 256, 512), "depths": (2, 2, 6, 2),
        "heads": (2, 4, 8, 16), "kernel": 7, "norm": "layer",
    },
}  # fmt: skip
