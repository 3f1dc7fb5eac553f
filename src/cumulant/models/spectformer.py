"""SpectFormer (Patro et al. 2023): learned filters of frequencies first, attention after, with any attention.

Shape legend: B images, H x W places, N = H W tokens, C width.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

from ..call import check_choice, check_count, check_flag
from ..nn.attention import LAYER_NORM, MultiheadAttention
from ..tensors import wide
from ..zoo.registry import options_of
from .backbone import FeatureInfo, Pyramid
from .mechanisms import Attending
from .parts import (
    Block,
    DropPath,
    Mlp,
    PatchEmbed,
    Repeated,
    check_stages,
    checked_extras,
    hidden_width,
    pair,
    resize_positions,
)
from .vit import TokenBackbone

SPECTRAL = ("filter", "attention")


class SpectralGate(nn.Module):
    """Tokens x (B, N, C) on a grid, filtered: irfft2(W rfft2(x)), one complex weight a frequency and channel.

    That is a circular convolution over the whole map with the kernel irfft2(W), one a channel. On another grid the
    kernel stays, cut or filled up with zeros around its middle. Cost: N log N C, and no product of matrices.
    """

    def __init__(self, dim: int, grid: tuple[int, int], **place: Any) -> None:
        super().__init__()
        self.grid = grid
        self.complex_weight = nn.Parameter(torch.empty(grid[0], grid[1] // 2 + 1, dim, 2, **place))
        self.register_load_state_dict_pre_hook(_resize_loaded_filter)

    def reset_extras(self) -> None:
        nn.init.normal_(self.complex_weight, std=0.02)

    def forward(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        W = resize_filter(self.complex_weight, self.grid, grid)
        # Widened: there is no FFT of half precision on a CPU, nor of every length on a GPU.
        spectrum = torch.fft.rfft2(wide(x).unflatten(1, grid), dim=(1, 2), norm="ortho")
        spectrum = spectrum * torch.view_as_complex(wide(W).contiguous())
        return torch.fft.irfft2(spectrum, s=grid, dim=(1, 2), norm="ortho").flatten(1, 2).to(x.dtype)


def resize_filter(weight: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """The filter (H, W/2 + 1, C, 2) of a grid `old` for another one: the same kernel, in its middle, on the new map."""
    if all(isinstance(side, int) for side in new) and tuple(old) == tuple(new):
        return weight
    kernel = torch.fft.irfft2(torch.view_as_complex(wide(weight).contiguous()), s=old, dim=(0, 1))
    kernel = torch.roll(kernel, [side // 2 for side in old], (0, 1))
    pads = [0, 0]
    for before, after in zip(old[::-1], new[::-1], strict=True):
        first = after // 2 - before // 2  # so that the middle stays the middle
        pads += [first, after - before - first]
    kernel = torch.roll(nn.functional.pad(kernel, pads), [-(side // 2) for side in new], (0, 1))
    return torch.view_as_real(torch.fft.rfft2(kernel, dim=(0, 1))).to(weight.dtype)


def _resize_loaded_filter(gate: SpectralGate, state: dict[str, Any], name: str, *_: Any) -> None:
    """Before loading: fit the filter of a checkpoint made for another (square) grid."""
    weight, own = state.get(f"{name}complex_weight"), gate.complex_weight
    if weight is None or weight.ndim != 4 or weight.shape == own.shape or weight.shape[2:] != own.shape[2:]:
        return
    side = weight.shape[0]
    if weight.shape[1] == side // 2 + 1:
        state[f"{name}complex_weight"] = resize_filter(weight, (side, side), gate.grid)


class SpectralBlock(Repeated):
    """x + DropPath(mlp(norm2(mixer(norm1(x))))): one residual; the filter has none of its own."""

    def __init__(self, mixer: nn.Module, dim: int, hidden: int, **place: Any) -> None:
        super().__init__()
        self.norm1 = LAYER_NORM(dim, **place)
        self.filter = mixer
        self.drop_path = DropPath()
        self.norm2 = LAYER_NORM(dim, **place)
        self.mlp = Mlp(dim, hidden, **place)

    def forward(self, x: Tensor, grid: tuple[int, int], prefix: int = 0) -> Tensor:
        return x + self.drop_path(self.mlp(self.norm2(self.filter(self.norm1(x), grid=grid))))


@options_of(Attending)
class SpectFormer(TokenBackbone):
    """Images (B, in_chans, H, W) to logits (B, num_classes): a ViT without class token whose first blocks are spectral.

    Args:
        spectral_layers: blocks with filters, before those with attention.
        spectral: "filter"; "attention" puts the attention into the same block of one residual, to compare the two.
        img_size: side that positions and filters are made for; at others both are resized.
        attention: of the blocks that have one, see `Attending`.
    """

    poolings = ("gap",)

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        num_classes: int = 1000,
        embed_dim: int = 384,
        depth: int = 12,
        spectral_layers: int = 4,
        spectral: str = "filter",
        num_heads: int = 6,
        mlp_ratio: float = 4.0,
        attention_extras: dict[str, Any] | None = None,
        **attending: Any,
    ) -> None:
        super().__init__(num_classes, embed_dim, "gap", 0, patch_size=patch_size, depth=depth)
        check_choice("spectral", spectral, SPECTRAL)
        check_count("spectral_layers", spectral_layers, 0)
        if spectral_layers > depth:
            raise ValueError(f"spectral_layers must be at most depth={depth}, got {spectral_layers}")
        how = Attending(**attending)
        place = how.place
        self.patch_embed = PatchEmbed(patch_size, how.in_chans, embed_dim, **place)
        self.grid_size = self.patch_embed.grid(*pair(img_size))
        self.pos_embed = self._table(self.grid_size[0] * self.grid_size[1], place)
        self.pos_drop = nn.Identity()
        hidden, filters = hidden_width(embed_dim, mlp_ratio), spectral_layers if spectral == "filter" else 0
        extras = {"grid_size": self.grid_size, **checked_extras(attention_extras, how.layer)}
        mixers: list[nn.Module] = [SpectralGate(embed_dim, self.grid_size, **place) for _ in range(filters)]
        mechanisms = how.each(depth - filters) if filters < depth else []
        mixers += [how.made(embed_dim, num_heads, one, **extras) for one in mechanisms]
        kinds = [SpectralBlock if number < spectral_layers else Block for number in range(depth)]
        self.blocks = nn.Sequential(
            *(kind(mixer, embed_dim, hidden, **place) for kind, mixer in zip(kinds, mixers, strict=True))
        )
        self.norm = LAYER_NORM(embed_dim, **place)
        self.head = self._made_classifier(embed_dim, place)
        self.feature_info = FeatureInfo.of((embed_dim, patch_size, f"blocks.{number}") for number in range(depth))
        self._finish(how)

    def _begin(self, images: Tensor) -> tuple[Tensor, tuple[int, int]]:
        patches, grid = self.patch_embed(self.checked(images)), self.patch_embed.grid(*images.shape[-2:])
        return patches + resize_positions(self.pos_embed, self.grid_size, grid), grid

    def _end(self, state: Tensor, at: tuple[int, ...]) -> Tensor:
        """All tokens after the last block and norm, (B, N, C)."""
        return self.norm(state)


class ConvMlp(Mlp):
    """Linear, depthwise 3 x 3 convolution on the grid, GELU, Linear."""

    def __init__(self, dim: int, hidden: int, **place: Any) -> None:
        super().__init__(dim, hidden, **place)
        self.dwconv = nn.Conv2d(hidden, hidden, 3, padding=1, groups=hidden, **place)

    def forward(self, x: Tensor, grid: tuple[int, int] | None = None) -> Tensor:
        assert grid is not None
        inner = self.dwconv(self.fc1(x).mT.unflatten(-1, grid)).flatten(2).mT
        return self.fc2(self.act(inner))


class StageBlock(Block):
    """x + DropPath(mixer(norm1(x))), then x + DropPath(mlp(norm2(x))): filters and attention alike."""

    def __init__(self, mixer: nn.Module, dim: int, hidden: int, **place: Any) -> None:
        super().__init__(mixer, dim, hidden, **place)
        self.mlp = ConvMlp(dim, hidden, **place)

    def forward(self, x: Tensor, grid: tuple[int, int]) -> Tensor:  # type: ignore[override]
        x = x + self.drop_path(self.attn(self.norm1(x), grid=grid))
        return x + self.drop_path(self.mlp(self.norm2(x), grid))


class Stem(nn.Module):
    """Three convolutions with norm and ReLU, the first of stride 2, and one of stride 2 with bias."""

    def __init__(self, in_chans: int, inner: int, out: int, **place: Any) -> None:
        super().__init__()
        steps: list[nn.Module] = []
        for channels, kernel, stride in ((in_chans, 7, 2), (inner, 3, 1), (inner, 3, 1)):
            steps.append(nn.Conv2d(channels, inner, kernel, stride, kernel // 2, bias=False, **place))
            steps += [nn.BatchNorm2d(inner, **place), nn.ReLU()]
        self.conv = nn.Sequential(*steps)
        self.proj = nn.Conv2d(inner, out, 3, 2, 1, **place)

    def forward(self, x: Tensor) -> Tensor:
        return self.proj(self.conv(x))


class Stage(nn.Module):
    """Half as many rows and columns, a norm, blocks, a norm (that of the last stage is behind the class block)."""

    def __init__(self, embed: nn.Module, blocks: Iterable[nn.Module], dim: int, last: bool, **place: Any) -> None:
        super().__init__()
        self.embed = embed
        self.embed_norm = nn.LayerNorm(dim, **place)
        self.blocks = nn.Sequential(*blocks)
        self.norm = nn.Identity() if last else LAYER_NORM(dim, **place)


class ClassBlock(nn.Module):
    """The mean of the tokens asks all of them and itself: attention of one query and an MLP, each with a residual."""

    def __init__(self, dim: int, heads: int, hidden: int, **place: Any) -> None:
        super().__init__()
        self.norm1 = LAYER_NORM(dim, **place)
        self.attn = MultiheadAttention(dim, heads, **place)
        self.norm2 = LAYER_NORM(dim, **place)
        self.mlp = Mlp(dim, hidden, **place)

    def forward(self, tokens: Tensor) -> Tensor:
        """(B, N, C) to (B, 1 + N, C), the asking token first."""
        asking = tokens.mean(1, keepdim=True)
        every = self.norm1(torch.cat([asking, tokens], 1))
        asking = asking + self.attn(every[:, :1], context=every)
        return torch.cat([asking + self.mlp(self.norm2(asking)), tokens], 1)


@options_of(Attending)
class HierarchicalSpectFormer(Pyramid):
    """Images (B, in_chans, H, W) to logits (B, num_classes) by four stages of strides 4, 8, 16 and 32: filters in the
    first two, attention in the others, and attention of one class token at the end, which is softmax always.

    Args:
        img_size: side that the filters are made for; at others their kernels stay and are cut or filled up.
        heads: of the stages with attention.
        spectral: "filter" in the first two stages, or "attention" there too: with a mechanism of linear cost.
        token_head: a second classifier of every token, as trained with token labels; logits are then
            class + max over tokens / 2.
    """

    def __init__(
        self,
        *,
        img_size: int | tuple[int, int] = 224,
        num_classes: int = 1000,
        stem_width: int = 32,
        widths: Sequence[int] = (64, 128, 320, 448),
        heads: Sequence[int] = (2, 4, 10, 14),
        mlp_ratios: Sequence[float] = (8, 8, 4, 4),
        depths: Sequence[int] = (3, 4, 6, 3),
        spectral: str = "filter",
        token_head: bool = False,
        **attending: Any,
    ) -> None:
        check_stages(widths, "widths", heads=heads, depths=depths)
        super().__init__(num_classes, widths[-1])
        check_choice("spectral", spectral, SPECTRAL)
        check_flag("token_head", token_head)
        how = Attending(**attending)
        place = how.place
        self.token_head = token_head
        filtered = 2 if spectral == "filter" else 0
        mechanisms = iter(how.each(sum(depths[filtered:]), "blocks with attention"))

        def mixer(stage: int) -> nn.Module:
            grid = cast(tuple[int, int], tuple(-(-side // 2 ** (stage + 2)) for side in pair(img_size)))
            if stage < filtered:
                return SpectralGate(widths[stage], grid, **place)
            return how.made(widths[stage], heads[stage], next(mechanisms), grid_size=grid)

        embeds: list[nn.Module] = [Stem(how.in_chans, stem_width, widths[0], **place)]
        embeds += [nn.Conv2d(width, out, 3, 2, 1, **place) for width, out in pairwise(widths)]
        stages = []
        for number, (embed, dim, depth) in enumerate(zip(embeds, widths, depths, strict=True)):
            hidden = hidden_width(dim, mlp_ratios[number])
            blocks = (StageBlock(mixer(number), dim, hidden, **place) for _ in range(depth))
            stages.append(Stage(embed, blocks, dim, number == len(widths) - 1, **place))
        self.stages = nn.Sequential(*stages)
        last = widths[-1]
        self.class_block = ClassBlock(last, heads[-1], hidden_width(last, mlp_ratios[-1]), **place)
        self.norm = LAYER_NORM(last, **place)
        for name in self.classifiers():
            setattr(self, name, self._made_classifier(last, place))
        self.feature_info = FeatureInfo.of((dim, 2 ** (n + 2), f"stages.{n}") for n, dim in enumerate(widths))
        self._finish(how)

    def reset_parameters(self, std: float = 0.02) -> None:
        """As released: convolutions N(0, 2 / fan out), matrices truncated normal, biases 0, norms 1."""
        TokenBackbone.reset_parameters(cast(Any, self), std)
        for module in self.modules():
            if isinstance(module, nn.Conv2d):
                nn.init.kaiming_normal_(module.weight, mode="fan_out")
                if module.bias is not None:
                    nn.init.zeros_(module.bias)
            elif isinstance(module, nn.BatchNorm2d):
                module.reset_parameters()

    def classifiers(self) -> dict[str, int]:
        return dict.fromkeys(["head"] + ["aux_head"] * self.token_head, self.num_features)

    def _level(self, level: nn.Module, state: Tensor, at: None) -> Tensor:
        stage = cast(Stage, level)
        x = stage.embed(state)
        grid = x.shape[-2:]
        x = stage.embed_norm(x.flatten(2).mT)
        for block in stage.blocks:
            x = self._run(block, x, grid=grid)
        return stage.norm(x).mT.unflatten(-1, grid)

    def _end(self, state: Tensor, at: None) -> Tensor:
        """Class token and tokens of the last stage, (B, 1 + N, C)."""
        return self.norm(self.class_block(state.flatten(2).mT))

    def _pooled(self, tokens: Tensor) -> Tensor:
        return tokens[:, 0]

    def forward_head(self, tokens: Tensor, pre_logits: bool = False) -> Tensor:
        """Logits of the class token, and half the largest of the tokens' where they have a classifier."""
        answer = super().forward_head(tokens, pre_logits)
        if not self.token_head or pre_logits:
            return answer
        return answer + 0.5 * cast(nn.Module, self.aux_head)(tokens[:, 1:]).amax(1)


# The numbers are parameters at 224 pixels with 1000 classes; of nano with 10.
SPECTFORMER_CONFIGS: dict[str, dict[str, Any]] = {
    "spectformer_nano": {  # 185,802
        "img_size": 32, "patch_size": 4, "embed_dim": 64, "depth": 6, "spectral_layers": 2, "num_heads": 4,
        "mlp_ratio": 2,
    },
    "spectformer_t": {"embed_dim": 256, "num_heads": 4},  # 9,158,376
    "spectformer_xs": {},  # 20,028,520
    "spectformer_s": {"depth": 19},  # 32,449,768
    "spectformer_b": {"embed_dim": 512, "depth": 19, "num_heads": 8},  # 57,159,656
}  # fmt: skip
_B = {"stem_width": 64, "widths": (64, 128, 320, 512), "heads": (2, 4, 10, 16), "depths": (3, 4, 12, 3)}
_L = {"stem_width": 64, "widths": (96, 192, 384, 512), "heads": (3, 6, 12, 16), "depths": (3, 6, 18, 3)}
HIERARCHICAL_CONFIGS: dict[str, dict[str, Any]] = {
    "spectformer_h_s": {},  # 21,777,928, with the token head 22,226,928
    "spectformer_h_b": _B,  # 32,539,880, 33,052,880
    "spectformer_h_l": _L,  # 54,162,792, 54,675,792
}
