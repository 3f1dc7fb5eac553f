"""Parts that look at the patch grid, shared by the mechanisms: token layout, depthwise convolution, rotary turns.

Shape legend: B images or clips, H heads, D head width, C = H D, p prefix tokens, N = [frames x] rows x cols patches,
L = p + N tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .. import shards
from ..call import Call, Grid
from ..tensors import repeat_heads, wide, without_absent
from .products import factor, written_down

if TYPE_CHECKING:
    from .registry import Mechanism


def resolve_grid(tokens: int, grid: Grid | None, prefix: int, grid_size: Grid | None = None) -> Grid:
    """The grid of the `tokens - prefix` patch tokens: as given, else as built for, else one row of all of them."""
    if not _is_size(prefix) or prefix < 0 or prefix > tokens:
        raise ValueError(f"prefix must lie between 0 and the {tokens} tokens, got {prefix!r}")
    patches = tokens - prefix
    chosen = grid if grid is not None else grid_size
    if chosen is None:
        return (1, patches)
    if not isinstance(chosen, tuple | list) or len(chosen) not in (2, 3) or not all(map(_is_side, chosen)):
        raise ValueError(f"grid must be (rows, cols) or (frames, rows, cols), got {chosen!r}")
    if math.prod(chosen) != patches:
        origin = "grid" if grid is not None else "grid_size, for which the layer was built,"
        raise ValueError(
            f"{origin} {tuple(chosen)} holds {math.prod(chosen)} patches, but there are {tokens} tokens, {prefix} of "
            f"them prefix: {patches} patches; pass grid= and prefix= that fit"
        )
    return tuple(chosen)


def _is_size(side: object) -> bool:
    """Whole numbers, and the symbols that stand for them in an exported graph."""
    return isinstance(side, int | torch.SymInt) and not isinstance(side, bool)


def _is_side(side: Any) -> bool:
    return _is_size(side) and side >= 0


def check_one_grid(call: Call, mechanism: Mechanism) -> None:
    """Raises for a call that a layer's convolution of the values cannot serve, naming the options that leave it out."""
    mechanism.check(call)
    name, queries, keys = mechanism.name, call.query.shape[-2], call.key.shape[-2]

    def without(pattern: str) -> str:
        return "build it with " + " and ".join(f"{k}={v}" for k, v in mechanism.pattern_options[pattern].items())

    if call.is_causal:
        raise ValueError(f"is_causal=True, but the convolution of {name!r} looks ahead; {without('causal')}")
    if queries != keys:
        raise ValueError(
            f"the layer of {name!r} needs queries and keys on one grid, got {queries} and {keys} tokens; "
            f"{without('cross')} for cross attention"
        )


class GridConv(nn.Conv2d):
    """Depthwise k x k convolution of the values over the patch grid, one frame at a time; prefix tokens get 0.

    value (..., H, L, D) -> (..., H, L, D). With `per_head` all heads share D filters, else each of the C channels
    has its own. Without `std` the initialisation is PyTorch's, with it normal weights of that std and bias 0.
    Cost: k^2 L C.
    """

    def __init__(
        self, dim: int, num_heads: int, kernel: int, *, per_head: bool = False, std: float | None = None, **place: Any
    ) -> None:
        if kernel < 1 or kernel % 2 == 0:
            raise ValueError(f"the kernel of the depthwise convolution must be odd and positive, got {kernel}")
        self.per_head, self.std = per_head, std
        width = dim // num_heads if per_head else dim
        super().__init__(width, width, kernel, padding=kernel // 2, groups=width, **place)

    def reset_parameters(self) -> None:
        if self.std is None:
            return super().reset_parameters()
        nn.init.trunc_normal_(self.weight, std=self.std)
        assert self.bias is not None
        nn.init.zeros_(self.bias)

    def of(self, call: Call) -> Tensor:
        """The convolution of a call's values on its grid, of absent ones as 0; key heads serve several query heads."""
        shards.needs_all("the convolution of the values (use_conv or use_lepe)")
        value = repeat_heads(without_absent(call.value, call.key_mask), call.query.shape[-3])
        width = value.shape[-1] if self.per_head else value.shape[-1] * value.shape[-3]
        if width != self.in_channels:
            own = self.in_channels if self.per_head else self.in_channels // value.shape[-3]
            raise ValueError(
                f"value must be {own} wide, as the convolution of this layer was built for, got {value.shape[-1]}"
            )
        return self(value, resolve_grid(value.shape[-2], call.grid, call.prefix), call.prefix)

    def forward(self, value: Tensor, grid: Grid, prefix: int = 0) -> Tensor:  # type: ignore[override]
        if not value[..., prefix:, :].numel():
            return torch.zeros_like(value)
        tokens = value if self.per_head else value.transpose(-3, -2).flatten(-2)  # heads are channels
        out = convolved(super().forward, tokens, grid[-2:], prefix)
        return out if self.per_head else out.unflatten(-1, value.shape[-3::2]).transpose(-3, -2)


def convolved(convolution: Callable[[Tensor], Tensor], tokens: Tensor, grid: Grid, prefix: int) -> Tensor:
    """A convolution of images (n, C, *grid) for tokens (..., L, C), of which the first `prefix` get 0.

    Where `grid` is one frame of a clip, its frames are so many images. Channels stay last, as the tokens lie: GPUs have
    quick depthwise kernels for that layout only.
    """
    patches = tokens[..., prefix:, :]
    images = patches.reshape(-1, *grid, patches.shape[-1]).movedim(-1, 1)
    return F.pad(convolution(images).movedim(1, -1).reshape(patches.shape), (0, 0, prefix, 0))


def rotary_angles(grid: Grid, prefix: int, dim: int, *, device: Any = None, dtype: Any = None) -> Tensor:
    """Angles (L, D/2) of a 2-D rotary position: D/4 frequencies turn by the row, D/4 by the column, prefix by 0.

    theta = 10000^(-linspace(0, 1, D/4)), both ends included. Frames of a clip share the angles of their patches.
    """
    if dim % 4:
        raise ValueError(f"rotary positions on a grid need a head width that is a multiple of 4, got {dim}")
    theta = 10000.0 ** -torch.linspace(0, 1, dim // 4, device=device, dtype=dtype)
    row = torch.arange(grid[-2], device=device, dtype=dtype)[:, None, None] * theta
    col = torch.arange(grid[-1], device=device, dtype=dtype)[:, None] * theta
    shape = (grid[-2], grid[-1], dim // 4)
    angles = torch.cat((row.expand(shape), col.expand(shape)), -1).flatten(0, 1)
    return F.pad(angles.repeat(math.prod(grid[:-2]), 1), (0, 0, prefix, 0))


def rotate(x: Tensor, angles: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Turns the interleaved pairs (x_0, x_1), (x_2, x_3), ... of x (..., L, D) by angles (L, D/2).

    The result is a factor of `product` for inputs of `dtype`.
    """
    sin = angles.sin()
    cos, sin = (
        written_down(angles.cos().repeat_interleave(2, -1)),
        written_down(torch.stack((-sin, sin), -1).flatten(-2)),
    )
    swapped = x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)
    return factor(x * cos + swapped * sin, dtype)


def resize_table(table: Tensor, old: Grid, new: Grid, prefix: int) -> Tensor:
    """A table (1, prefix + old patches, C) for another grid: bilinear over rows and columns (and frames)."""
    if tuple(old) == tuple(new):
        return table
    if len(old) != len(new):
        raise ValueError(f"grid must have {len(old)} sides like the {tuple(old)} it was built for, got {tuple(new)}")
    first, patches = table.tensor_split([prefix], dim=1)
    image = wide(patches).mT.unflatten(-1, old)
    mode = "bilinear" if len(old) == 2 else "trilinear"
    image = F.interpolate(image, size=tuple(new), mode=mode, align_corners=False)
    return torch.cat((first, image.flatten(2).mT.to(table.dtype)), dim=1)


def square_grid(rows: int, prefix: int, name: str = "pos_embed") -> tuple[int, int]:
    """The square grid of a positional table with so many rows, of which `prefix` are of tokens outside the grid."""
    side = math.isqrt(max(0, rows - prefix))
    if side < 1 or side * side != rows - prefix:
        raise ValueError(
            f"{name} of the checkpoint has {rows} rows, which is not {prefix} "
            "prefix tokens and a square grid; only square grids are resized"
        )
    return side, side


def guess_grid(rows: int, grid: Grid) -> tuple[int, int, int]:
    """The grid a table of so many rows was made for, if it differs from `grid` only in time or only in space."""
    n_t, n_h, n_w = grid
    side = math.isqrt(rows // n_t)
    fits = []
    if rows and rows % (n_h * n_w) == 0:
        fits.append((rows // (n_h * n_w), n_h, n_w))
    if rows and n_t * side * side == rows:
        fits.append((n_t, side, side))
    if len(set(fits)) != 1:
        raise ValueError(
            f"positions for {rows} tokens do not tell for which clip they were made (this model's grid is {grid}); "
            "resize them with cumulant.models.tubelet.resize_clip_positions(table, old, new) before loading"
        )
    return fits[0]


def told_grid(rows: int, prefix: int, grid: Grid, name: str) -> Grid:
    """The grid that a table of so many rows was made for, where `grid` is this layer's: another size of its kind."""
    if len(grid) == 3:
        return guess_grid(rows - prefix, grid)
    if 1 in grid:  # a row of tokens, or a column of frames
        return (1, rows - prefix) if grid[0] == 1 else (rows - prefix, 1)
    return square_grid(rows, prefix, name)
