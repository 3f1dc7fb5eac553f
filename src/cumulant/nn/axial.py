"""Attention over two axes of a clip at once: half of the heads look along time, the other half within a frame.

Shape legend: B clips, H heads, h = H / 2, T frames, S = rows x cols places, L = T S tokens, C width, D = C / H.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from .. import shards
from ..call import Call, Grid, check_mask
from ..zoo.mixing import Mix
from .attention import MultiheadAttention


class AxialAttention(MultiheadAttention):
    """`MultiheadAttention` whose first h heads attend over time at a fixed place, the others over space in a frame.

    Parameters are those of `MultiheadAttention`, so weights move between the two; a mechanism with parameters has
    two sets of them, `mix` over time and `mix_space`, each for a layer of half the width. One that looks at the layer's
    input sees the half of its channels that belongs to its heads. Tokens are (B, T S, C), frame by frame; `grid_size`
    or the `grid` of a call is (frames, rows, cols). Cost: that of the mechanism for B S sequences of T tokens and for
    B T of S, with h heads each.
    """

    mixer_names = ("mix", "mix_space")

    def __init__(self, dim: int, num_heads: int = 8, **kw: Any) -> None:
        if not isinstance(num_heads, int) or num_heads % 2:
            raise ValueError(f"num_heads must be even, half for time and half for space, got {num_heads}")
        super().__init__(dim, num_heads, **kw)
        if self.num_kv_heads % 2:
            raise ValueError(f"num_kv_heads must be even, half for time and half for space, got {self.num_kv_heads}")
        if self.prefix:
            raise ValueError(f"AxialAttention has no place for tokens outside the grid, got prefix={self.prefix}")
        self.mix_space = self._half(1)

    def build_mix(self) -> Mix:
        return self._half(0)

    def mix_tokens(self, call: Call, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Query, key and value (B, H, L, D) -> (B, H, L, D), the heads over time first."""
        parts = []
        for axis, mix, heads, part in self._parts(call, context):
            out = mix.run(part, self._input_of(x, call.grid or (), axis))
            parts.append(_tokens(self.mix_in_mean(out, part, heads), call.grid or (), axis))
        return torch.cat(parts, 1)

    def scores_of(self, call: Call, x: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """The weights (B, H, L, L), zero where a head does not look. Cost: L^2 H."""
        maps = []
        for axis, mix, heads, part in self._parts(call, context):
            grid = call.grid or ()
            A = self.weights(mix, part, self._input_of(x, grid, axis), heads)
            count = grid[1] * grid[2] if axis == 0 else grid[0]  # sequences of a clip along this axis
            same = torch.eye(count, dtype=A.dtype, device=A.device)
            pattern = "bshtu,sr->bhtsur" if axis == 0 else "bthsr,tu->bhtsur"
            A = torch.einsum(pattern, A.unflatten(0, (-1, count)), same)
            maps.append(A.flatten(-4, -3).flatten(-2))
        return torch.cat(maps, 1)

    def _parts(self, call: Call, context: Tensor | None) -> Iterator[tuple[int, Mix, slice, Call]]:
        """For time and for space: the axis, its mechanism, its heads, and their call over sequences of that axis."""
        shards.needs_all("axial attention, which reads a whole grid,")
        grid = self._check(call, context)
        for axis, mix in enumerate(self.mixers()):
            heads, _, _ = halves = [_half_of(z.shape[1], axis) for z in call[:3]]
            q, k, v = (_rows(z[:, half], grid, axis) for z, half in zip(call[:3], halves, strict=True))
            mask = _row_mask(call.key_mask, call.key, grid, axis)
            along: dict[str, Any] = {"key_mask": mask, "query_mask": mask, "grid": _axis_grid(grid, axis)}
            yield axis, mix, heads, call._replace(query=q, key=k, value=v, **along)

    def _half(self, axis: int) -> Mix:
        size = None if self.grid_size is None else _axis_grid(self.grid_size, axis)
        layout: dict[str, Any] = {"grid_size": size, "prefix": 0, **self.place}
        return self.mechanism.build(self.dim // 2, self.num_heads // 2, **layout, **self.attention_options)

    def _input_of(self, x: Tensor | None, grid: Grid, axis: int) -> Tensor | None:
        """Half of the channels of x (B, L, C) as sequences along an axis, for a mechanism that looks at them."""
        if x is None or not self.mechanism.wants_input:
            return x
        return _rows(x.unflatten(-1, (2, -1))[..., axis, :].unsqueeze(1), grid, axis).squeeze(1)

    def _check(self, call: Call, context: Tensor | None) -> Grid:
        grid, query = call.grid, call.query
        if call.is_causal or call.prefix or context is not None:
            raise ValueError("AxialAttention takes the tokens of one grid: no context, no prefix, is_causal=False")
        sides = isinstance(grid, tuple | list) and all(isinstance(side, int) for side in grid)
        if (
            grid is None
            or not sides
            or len(grid) != 3
            or grid[0] * grid[1] * grid[2] != query.shape[-2]
            or query.ndim != 4
        ):
            raise ValueError(
                f"AxialAttention needs x (batch, tokens, {self.dim}) on a grid of (frames, rows, cols), "
                f"got {query.shape[-2]} tokens, {query.ndim - 2} dimensions before the width, and grid={grid}"
            )
        return grid


def _half_of(heads: int, axis: int) -> slice:
    """The heads, or key heads, that look along an axis."""
    return slice(axis * heads // 2, (axis + 1) * heads // 2)


def _axis_grid(grid: Grid, axis: int) -> Grid:
    """The grid of the sequences along time (0), a column of frames, or of those within a frame (1)."""
    return (grid[0], 1) if axis == 0 else grid[1:]


def _rows(x: Tensor, grid: Grid, axis: int) -> Tensor:
    """(B, h, T S, D) as sequences along an axis: (B S, h, T, D) for time, (B T, h, S, D) for space."""
    x = x.unflatten(-2, (grid[0], grid[1] * grid[2]))
    return (x.permute(0, 3, 1, 2, 4) if axis == 0 else x.permute(0, 2, 1, 3, 4)).flatten(0, 1)


def _row_mask(key_mask: Tensor | None, key: Tensor, grid: Grid, axis: int) -> Tensor | None:
    """The mask of key (B, H, T S, D), which broadcasts to (B, T S), as (B S, T) or (B T, S)."""
    if key_mask is None:
        return None
    check_mask(key_mask, key, key.shape[:1])
    whole = key_mask.expand(key.shape[0], key.shape[-2])
    return _rows(whole[:, None, :, None], grid, axis)[:, 0, :, 0]


def _tokens(x: Tensor, grid: Grid, axis: int) -> Tensor:
    """The inverse of `_rows`."""
    x = x.unflatten(0, (-1, grid[1] * grid[2] if axis == 0 else grid[0]))
    return (x.permute(0, 2, 3, 1, 4) if axis == 0 else x.permute(0, 2, 1, 3, 4)).flatten(-3, -2)
