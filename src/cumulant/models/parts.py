"""What vision networks are made of: patches, MLPs, blocks, stochastic depth, positional tables that are resized.

Shape legend: B images, N = (H/P)(W/P) patches, C width.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..call import check_choice, check_count
from ..nn.arguments import EXTRAS, check_extras
from ..nn.attention import LAYER_NORM


class Repeated(nn.Module):
    """A block of which a network has many alike: compiling takes as long as for one (`train/stepping.py`)."""


class PatchEmbed(nn.Module):
    """Images (B, channels, H, W) to patch tokens (B, N, C): a convolution with kernel = stride = P."""

    def __init__(self, patch_size: int, in_chans: int, dim: int, **place: Any) -> None:
        super().__init__()
        self.patch_size, self.in_chans = patch_size, in_chans
        self.proj = nn.Conv2d(in_chans, dim, kernel_size=patch_size, stride=patch_size, **place)

    def grid(self, height: int, width: int) -> tuple[int, int]:
        """Rows and columns of patches in an image; its sides must be multiples of the patch size."""
        check_multiple("the patch size", self.patch_size, height, width)
        return height // self.patch_size, width // self.patch_size

    def forward(self, images: Tensor) -> Tensor:
        self.grid(*images.shape[-2:])
        return as_product(self.proj, images)


def as_product(proj: nn.Conv2d | nn.Conv3d, x: Tensor) -> Tensor:
    """A convolution with kernel = stride as one matrix product: x (B, channels, ...) to tokens (B, N, C).

    The cells are laid out as rows; neither im2col nor a layout of a convolution library comes between.
    """
    cells = [(side // part, part) for side, part in zip(x.shape[2:], proj.kernel_size, strict=True)]
    cut = x.reshape(*x.shape[:2], *(size for cell in cells for size in cell))
    rows = cut.permute(0, *range(2, cut.ndim, 2), 1, *range(3, cut.ndim, 2))
    weight = proj.weight.flatten(1)
    tokens = rows.reshape(x.shape[0], math.prod([n for n, _ in cells]), weight.shape[1])  # an empty batch has no -1
    return F.linear(tokens, weight, proj.bias)


class Mlp(nn.Module):
    """Linear, GELU ("erf", the exact one, or its "tanh" approximation), Linear. Cost: 2 L C hidden."""

    def __init__(self, dim: int, hidden: int, drop: float = 0.0, gelu: str = "erf", **place: Any) -> None:
        super().__init__()
        if gelu not in ("erf", "tanh"):
            raise ValueError(f'gelu must be "erf" or "tanh", got {gelu!r}')
        self.fc1 = nn.Linear(dim, hidden, **place)
        self.act = nn.GELU("none" if gelu == "erf" else "tanh")
        self.fc2 = nn.Linear(hidden, dim, **place)
        self.drop = nn.Dropout(drop)

    def forward(self, x: Tensor) -> Tensor:
        return self.drop(self.fc2(self.drop(self.act(self.fc1(x)))))


class SqueezeExcite(nn.Module):
    """x sigmoid(W act(V mean(x))), a factor for every channel of maps (B, C, H, W)."""

    def __init__(self, channels: int, inner: int, act: Callable[[Tensor], Tensor] = F.silu, **place: Any) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Conv2d(channels, inner, 1, **place), nn.Conv2d(inner, channels, 1, **place)
        self.act = act

    def forward(self, x: Tensor) -> Tensor:
        return x * self.fc2(self.act(self.fc1(x.mean((2, 3), keepdim=True)))).sigmoid()


class DropPath(nn.Module):
    """Stochastic depth: in training, a sample's branch is 0 with probability `rate`, else over 1 - rate.

    `rescale=False` leaves what is kept as it is.
    """

    keep: Tensor

    def __init__(self, rate: float = 0.0, rescale: bool = True) -> None:
        super().__init__()
        # A tensor, so that blocks which differ in their rate alone share one compiled graph.
        self.register_buffer("keep", torch.ones(()), persistent=False)
        self.rescale = rescale
        self.rate = rate

    def reset_parameters(self) -> None:
        """Write the buffer again: a model that was made on the meta device has nothing in it."""
        self.keep.fill_(1.0 - self._rate)

    @property
    def rate(self) -> float:
        return self._rate

    @rate.setter
    def rate(self, rate: float) -> None:
        self._rate, self.active = rate, rate > 0
        self.reset_parameters()

    def forward(self, x: Tensor) -> Tensor:
        if not self.training or not self.active:
            return x
        kept = torch.rand((x.shape[0],) + (1,) * (x.ndim - 1), device=x.device) < self.keep
        return x * (kept / self.keep if self.rescale else kept).to(x.dtype)

    def extra_repr(self) -> str:
        return f"rate={self.rate:.3g}"


class Block(Repeated):
    """Pre-norm block: x + DropPath(attn(norm1(x))), then x + DropPath(mlp(norm2(x)))."""

    def __init__(
        self,
        attn: nn.Module,
        dim: int,
        hidden: int,
        drop: float = 0.0,
        gelu: str = "erf",
        is_causal: bool = False,
        **place: Any,
    ) -> None:
        super().__init__()
        self.causal = {"is_causal": True} if is_causal else {}
        self.norm1 = LAYER_NORM(dim, **place)
        self.attn = attn
        self.drop_path = DropPath()
        self.norm2 = LAYER_NORM(dim, **place)
        self.mlp = Mlp(dim, hidden, drop, gelu, **place)

    def forward(self, x: Tensor, grid: tuple[int, ...] | None = None, prefix: int = 0) -> Tensor:
        """x (B, prefix + patches, C), the patches laid out as `grid`."""
        x = x + self.drop_path(self.attn(self.norm1(x), grid=grid, prefix=prefix, **self.causal))
        return x + self.drop_path(self.mlp(self.norm2(x)))


def spread_drop_path(paths: Sequence[DropPath], rate: float, rescale: bool = True) -> None:
    """Stochastic depth of an encoder's blocks: linear from 0 in the first to `rate` in the last."""
    if not isinstance(rate, int | float) or not 0.0 <= rate < 1.0:
        raise ValueError(f"drop_path must be at least 0 and below 1, got {rate!r}")
    last = max(1, len(paths) - 1)
    for index, path in enumerate(paths):
        path.rate, path.rescale = rate * (index / last), rescale


def drop_paths(module: nn.Module) -> list[DropPath]:
    """Those of all blocks inside, in order; the branches of a block share one."""
    return [one for one in module.modules() if isinstance(one, DropPath)]


def resize_positions(table: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """A positional table (1, prefix + old rows x cols, C) for a grid of `new` rows and columns.

    The grid part is interpolated bicubically (with antialiasing, as timm does); the rows of class and
    distillation token stay.
    """
    # Sizes that an export leaves open are symbols: to compare them would fix them.
    if all(isinstance(side, int) for side in new) and old == new:
        return table
    prefix, grid = table.tensor_split([table.shape[1] - math.prod(old)], dim=1)
    image = grid.mT.unflatten(-1, old).to(torch.promote_types(table.dtype, torch.float32))
    image = F.interpolate(image, size=new, mode="bicubic", antialias=True, align_corners=False)
    return torch.cat([prefix, image.flatten(2).mT.to(table.dtype)], dim=1)


def reset_linear(linear: nn.Linear, std: float | None, parts: tuple[int, ...] = ()) -> None:
    """Truncated normal, or Xavier-uniform for each of the matrices of so many rows stacked in this one; biases 0."""
    if std is not None:
        nn.init.trunc_normal_(linear.weight, std=std)
    else:
        for part in linear.weight.split(parts or (linear.out_features,)):
            nn.init.xavier_uniform_(part)
    if linear.bias is not None:
        nn.init.zeros_(linear.bias)


def reset_extras(model: nn.Module) -> None:
    """Initialise what layers have beside their linear parts, which come first."""
    for module in model.modules():
        reset = getattr(module, "reset_extras", None)
        if callable(reset):
            reset()


def reset_maps(model: nn.Module, std: float, kernel: Callable[[Tensor], Any]) -> None:
    """Initialise a network of maps: matrices truncated normal, convolutions by `kernel`, biases 0, norms 1."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            reset_linear(module, std)
        elif isinstance(module, nn.Conv2d):
            kernel(module.weight)
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif isinstance(module, nn.LayerNorm | nn.BatchNorm2d | DropPath):
            module.reset_parameters()
    reset_extras(model)


def pair(size: int | tuple[int, int], name: str = "img_size") -> tuple[int, int]:
    sides = (size, size) if isinstance(size, int) else size
    whole = isinstance(sides, tuple | list) and all(type(side) is int and side > 0 for side in sides)
    if not whole or len(sides) != 2:
        raise ValueError(f"{name} must be a positive number of pixels, or height and width, got {size!r}")
    return sides[0], sides[1]


def check_multiple(what: str, step: int, height: int, width: int) -> None:
    """Refuse an image whose sides are no multiples of `step`, and name the nearest size."""
    if height % step or width % step or height < 1 or width < 1:
        near = " x ".join(str(max(1, round(side / step)) * step) for side in (height, width))
        raise ValueError(
            f"image size must be a multiple of {what} {step}, got {height} x {width}; the nearest is {near}"
        )


def check_stages(
    first: Sequence[int], named: str, choices: Sequence[str] | None = None, /, **others: Sequence[Any]
) -> None:
    """Lists with one entry for each stage of a pyramid, as many as `first` has: whole numbers, or some of `choices`."""
    for name, stages in {named: first, **others}.items():
        if not isinstance(stages, tuple | list) or len(stages) != len(first) or not stages:
            raise ValueError(f"{name} must have one entry for each stage, as {named}={first!r}, got {stages!r}")
        for entry in stages:
            if choices is None or name == named:
                check_count(name, entry)
            else:
                check_choice(name, entry, choices)


def hidden_width(dim: int, mlp_ratio: float) -> int:
    """Channels inside an MLP."""
    number = isinstance(mlp_ratio, int | float) and not isinstance(mlp_ratio, bool) and 0 < mlp_ratio < math.inf
    if not number or int(dim * mlp_ratio) < 1:
        raise ValueError(f"mlp_ratio must be a positive number, got {mlp_ratio!r}")
    return int(dim * mlp_ratio)


def checked_extras(extras: dict[str, Any] | None, layer: str | None) -> dict[str, Any]:
    """The extras, which are those of "multihead" unless another layer is named: that one checks its own."""
    if layer is None:
        check_extras(extras or {}, EXTRAS)
    return dict(extras or {})
