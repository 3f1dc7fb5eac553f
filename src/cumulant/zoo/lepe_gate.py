"""What RALA and MALA have around their operator: rotary turns, a local convolution of the values, a gate.

Shape legend: ... leading dimensions, H heads, L tokens, D head width, C = H D.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from .. import shards
from ..call import Call
from .grid import GridConv, check_one_grid, resolve_grid, rotary_angles, rotate
from .mixing import Mixer

KERNEL = 5
INIT_STD = 0.02


def rotated(query: Tensor, key: Tensor, call: Call, dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor]:
    """Features of a call's queries and keys turned by their place on its grid, which they must share; see `rotate`."""
    shards.needs_all("use_rope, a turn by the place on a grid,")
    if query.shape[-2] != key.shape[-2]:
        raise ValueError(
            f"use_rope=True needs queries and keys on one grid, got {query.shape[-2]} and {key.shape[-2]} tokens; "
            "pass use_rope=False for cross attention"
        )
    grid = resolve_grid(query.shape[-2], call.grid, call.prefix)
    angles = rotary_angles(grid, call.prefix, query.shape[-1], device=query.device, dtype=query.dtype)
    return rotate(query, angles, dtype), rotate(key, angles, dtype)


class LepeGate(Mixer):
    """out = (operator(q, k, v) + LePE(v)) * (W_g x + b_g): the layer form that RALA and MALA share.

    LePE is a depthwise 5 x 5 convolution with bias over the C channels of the values, in grid form; prefix tokens get
    none. All weights start from a truncated normal of std 0.02, biases from 0. Cost: 25 L C + L C^2 for the gate.
    The released code takes q, k, v and the gate from one projection C -> 4 C; here the gate is a Linear of its own.

    Args:
        use_rope: 2-D rotary positions; needs a head width that is a multiple of 4. Off for cross attention.
        use_lepe: the convolution. Off for causal and cross attention.
        use_gate: the gate, a Linear of the layer's input without activation.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int,
        *,
        use_rope: bool = True,
        use_lepe: bool = True,
        use_gate: bool = True,
        **rest: Any,
    ) -> None:
        super().__init__(dim, num_heads, use_rope=use_rope, **rest)
        if use_rope and (dim // num_heads) % 4:
            raise ValueError(
                f"use_rope=True needs a head width that is a multiple of 4, got {dim // num_heads}; pass use_rope=False"
            )
        self.lepe = GridConv(dim, num_heads, KERNEL, std=INIT_STD, **self.place) if use_lepe else None
        self.gate = nn.Linear(dim, dim, **self.place) if use_gate else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        if self.lepe is not None:
            self.lepe.reset_parameters()
        if self.gate is not None:
            nn.init.trunc_normal_(self.gate.weight, std=INIT_STD)
            nn.init.zeros_(self.gate.bias)

    def run(self, call: Call, x: Tensor | None = None) -> Tensor:
        """The layer's output before its projection, (..., H, Lq, D), for x (..., Lq, C), the layer's input."""
        if self.lepe is not None:
            check_one_grid(call, self.operator)
        out = super().run(call, x)
        if self.lepe is not None:
            out = out + self.lepe.of(self.on_grid(call))
        if self.gate is not None:
            if x is None:
                raise ValueError(f"use_gate=True of {self.mechanism!r} needs x=, the tokens the queries come from")
            if out.shape[-1] * self.num_heads != self.gate.out_features:
                own = self.gate.out_features // self.num_heads
                raise ValueError(f"value must be {own} wide, as the gate of this layer is, got {out.shape[-1]}")
            out = out * self.gate(x).unflatten(-1, (self.num_heads, -1)).transpose(-3, -2)
        return out

    def on_grid(self, call: Call) -> Call:
        if not self.options["use_rope"] and self.lepe is None:
            return call
        return call._replace(grid=resolve_grid(call.key.shape[-2], call.grid, call.prefix, self.grid_size))

    def extra_repr(self) -> str:
        return f"{self.mechanism!r}, {self.options}"
