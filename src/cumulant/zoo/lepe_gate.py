"""What RALA and MALA have around their operator: rotary turns, a local convolution of the values, a gate.

Shape legend: ... leading dimensions, H heads, L tokens, D head width, C = H D.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .grid import Grid, GridConv, resolve_grid, rotary_angles, rotate
from .masking import without_absent
from .registry import get

KERNEL = 5
INIT_STD = 0.02


def rotated(
    query: Tensor, key: Tensor, grid: Grid | None, prefix: int, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, Tensor]:
    """Features of queries and keys turned by their place on the grid, which they must share; see `rotate`."""
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"use_rope=True needs queries and keys on one grid, got {query.shape[-2]} and {key.shape[-2]} tokens; "
            "pass use_rope=False for cross attention"
        )
    grid = resolve_grid(query.shape[-2], grid, prefix)
    angles = rotary_angles(grid, prefix, query.shape[-1], device=query.device, dtype=query.dtype)
    return rotate(query, angles, dtype), rotate(key, angles, dtype)


class LepeGate(nn.Module):
    """out = (operator(q, k, v) + LePE(v)) * (W_g x + b_g): the layer form that RALA and MALA share.

    LePE is a depthwise 5 x 5 convolution with bias over the C channels of the values, in grid form; prefix tokens get
    none. All weights start from a truncated normal of std 0.02, biases from 0. Cost: 25 L C + L C^2 for the gate.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        mechanism: str,
        grid_size: Grid | None,
        prefix: int,
        use_rope: bool,
        use_lepe: bool,
        use_gate: bool,
        device: Any,
        dtype: Any,
    ) -> None:
        super().__init__()
        if use_rope and (dim // num_heads) % 4:
            raise ValueError(
                f"use_rope=True needs a head width that is a multiple of 4, got {dim // num_heads}; pass use_rope=False"
            )
        place = {"device": device, "dtype": dtype}
        self.num_heads, self.mechanism, self.grid_size, self.prefix = num_heads, mechanism, grid_size, prefix
        self.use_rope = use_rope
        self.operator_options: dict[str, Any] = {}
        self.lepe = GridConv(dim, num_heads, KERNEL, std=INIT_STD, **place) if use_lepe else None
        self.gate = nn.Linear(dim, dim, **place) if use_gate else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.lepe is not None:
            self.lepe.reset_parameters()
        if self.gate is not None:
            nn.init.trunc_normal_(self.gate.weight, std=INIT_STD)
            nn.init.zeros_(self.gate.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        grid: Grid | None = None,
        prefix: int | None = None,
        x: Tensor | None = None,
        query_mask: Tensor | None = None,
    ) -> Tensor:
        """query, key, value (..., H, L, D), x (..., Lq, C) the layer's input -> (..., H, Lq, D)."""
        operator, prefix = get(self.mechanism), self.prefix if prefix is None else prefix
        operator.check(query, key, key_mask=key_mask, is_causal=is_causal, enable_gqa=enable_gqa)
        self._check(query, key, is_causal)
        if self.lepe is not None:
            grid = resolve_grid(key.shape[-2], grid, prefix, self.grid_size)
        shared: dict[str, Any] = {
            "key_mask": key_mask,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        extra = self._extra(key, grid, prefix, query_mask)
        out = operator(query, key, value, **shared, **extra, **self.operator_options)
        if self.lepe is not None:
            assert grid is not None
            value = without_absent(value, key_mask)
            value = value.repeat_interleave(query.shape[-3] // max(1, value.shape[-3]), -3)
            out = out + self.lepe(value, grid, prefix)
        if self.gate is not None:
            if x is None:
                raise ValueError(f"use_gate=True of {self.mechanism!r} needs x=, the tokens the queries come from")
            out = out * self.gate(x).unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)
        return out

    def scores(
        self,
        query: Tensor,
        key: Tensor,
        *,
        key_mask: Tensor | None = None,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
        grid: Grid | None = None,
        prefix: int | None = None,
        query_mask: Tensor | None = None,
    ) -> Tensor:
        """The weights with which the operator mixes the values, (..., H, Lq, Lk); convolution and gate come after."""
        operator, prefix = get(self.mechanism), self.prefix if prefix is None else prefix
        operator.check(query, key, key_mask=key_mask, is_causal=is_causal, enable_gqa=enable_gqa)
        assert operator.scores is not None
        shared: dict[str, Any] = {
            "key_mask": key_mask,
            "is_causal": is_causal,
            "scale": scale,
            "enable_gqa": enable_gqa,
        }
        options = operator.options_of_scores(self.operator_options)
        return operator.scores(query, key, **shared, **self._extra(key, grid, prefix, query_mask), **options)

    def _extra(self, key: Tensor, grid: Grid | None, prefix: int, query_mask: Tensor | None) -> dict[str, Any]:
        """What the operator wants to know beyond the shared arguments."""
        extra: dict[str, Any] = {"query_mask": query_mask} if get(self.mechanism).wants_query_mask else {}
        if self.use_rope:
            grid = resolve_grid(key.shape[-2], grid, prefix, self.grid_size)
            extra |= {"grid": grid, "prefix": prefix, "use_rope": True}
        return extra

    def _check(self, query: Tensor, key: Tensor, is_causal: bool) -> None:
        if self.lepe is None:
            return
        if is_causal:
            raise ValueError(
                f"is_causal=True, but the convolution of {self.mechanism!r} looks ahead; build it with use_lepe=False"
            )
        if query.shape[-2] != key.shape[-2]:
            raise ValueError(
                f"the convolution of {self.mechanism!r} needs queries and keys on one grid, got {query.shape[-2]} and "
                f"{key.shape[-2]} tokens; build it with use_lepe=False (and use_rope=False) for cross attention"
            )

    def extra_repr(self) -> str:
        return f"{self.mechanism!r}, use_rope={self.use_rope}, {self.operator_options}"
