"""ComplexFormer: heads that learn how much the phase of their content counts beside the rotation of their place.

Shape legend: ... leading dimensions, H heads, L tokens, D head width, h = D / 2 complex channels; c a channel.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...call import check_scale
from ...kernels import launch
from ...tensors import wide
from ...tracing import without_autocast
from ...zoo.options import positive
from ...zoo.registry import can
from ..extras import turns
from ..registry import registered
from .base import HeadsLayer


@registered(
    "complexformer",
    "queries and keys in polar form, with a learned part of their phase in each head",
    paper="ComplexFormer (Shao et al., withdrawn by its author)",
    year=2025,
    arxiv="2505.10222",
    cost="that of the mechanism, and L C sines",
    **can("causal cross key_mask ragged streaming weights"),
)
class ComplexAttention(HeadsLayer):
    """Query and key in polar form, channel c with channel c + h; delta and b are learned per head and channel.

        score_mn = sum_c |q_mc| |k_nc| cos(delta_c (phase q_mc - phase k_nc) + b_c + (m - n) g_c),  g_c = 10000^(-2c/D)

    It is the real part of a product, so it is formed as an ordinary product of

        q' = |q| exp(i (delta phase q + b + m g)),   k' = |k| exp(i (delta phase k + n g))

    of width D: the mechanism is one ordinary attention. Cost beside it: L C sines, cosines and arc tangents.

    Args:
        scale: factor on the scores. The released code has none, 1; None is D**-0.5, which is recommended, most of all
            over cumulants, where scores must be small.
        places: whether tokens are rotated by their place.
        base: of the frequencies g.
    """

    own_positions = True

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        scale: float | None = 1.0,
        places: bool = True,
        base: float = 10000.0,
        qkv_bias: bool = False,
        proj_bias: bool = False,
        **layer: Any,
    ) -> None:
        if layer.get("rotary") and places:
            raise ValueError(
                "layer 'complexformer' turns by places itself, got rotary too; pass places=False or no rotary"
            )
        super().__init__(dim, num_heads, qkv_bias=qkv_bias, proj_bias=proj_bias, **layer)
        if self.head_dim % 2:
            raise ValueError(
                f"layer 'complexformer' pairs channels: dim / num_heads must be even, got {dim} / {num_heads} = "
                f"{self.head_dim}; nearest that works: num_heads={_even(dim, num_heads)}"
            )
        positive("base", base)
        check_scale(scale)
        self.scale, self.places, self.base = scale, places, base
        self.delta = nn.Parameter(torch.empty(self.num_heads, self.head_dim // 2, **self.place))
        self.b = nn.Parameter(torch.empty(self.num_heads, self.head_dim // 2, **self.place))
        for part in self.qkv.weight.split(self.widths):
            nn.init.xavier_uniform_(part)
        nn.init.xavier_uniform_(self.proj.weight)
        self.reset_extras()

    def reset_extras(self) -> None:
        super().reset_extras()
        nn.init.normal_(self.delta, std=(self.head_dim // 2) ** -0.5)
        nn.init.zeros_(self.b)

    def project(self, x: Tensor, context: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        query, key, value = super().project(x, context)
        if context is None and not torch.is_grad_enabled() and launch.direct(query):
            found = self._at_once(query, key)
            if found is not None:
                return *found, value
        delta, b = wide(self.delta), wide(self.b)
        keys = delta[:: self.num_heads // key.shape[-3]]  # a key head may serve several
        gain = self._gain
        with without_autocast(query.device.type):
            first = self.first_place if context is None else 0  # of the keys
            if launch.direct(query):
                return (
                    self._by_kernel(query, self.first_place, delta, b, gain),
                    self._by_kernel(key, first, keys),
                    value,
                )
            if context is None and query.shape == key.shape:  # side by side, in half the passes
                both = torch.cat((delta, keys)), torch.cat((b, torch.zeros_like(b)))
                factor = torch.ones_like(both[0][:, :1, None])
                factor[: self.num_heads] = gain
                turned = self._turned(torch.cat((query, key), -3), self.first_place, *both, factor)
                query, key = turned.to(value.dtype).chunk(2, -3)
            else:
                query = self._turned(query, self.first_place, delta, b, gain).to(value.dtype)
                key = self._turned(key, first, keys, torch.zeros_like(keys)).to(value.dtype)
        return query, key, value

    @property
    def _gain(self) -> float:
        """Of the query: mechanisms divide by the root of its width."""
        return 1.0 if self.scale is None else self.scale * self.head_dim**0.5

    def _at_once(self, query: Tensor, key: Tensor) -> tuple[Tensor, Tensor] | None:
        """Query and key turned by one kernel, where they lie beside each other."""
        from ...kernels.heads.turned import turned_both

        asked, kept = (z.reshape(-1, *z.shape[-3:]) for z in (query, key))
        places = self._places(query, self.first_place)
        found = turned_both(asked, kept, self.delta, self.b, places, self._gain)
        return None if found is None else (found[0].reshape(query.shape), found[1].reshape(key.shape))

    def _places(self, z: Tensor, start: int) -> tuple[Tensor, Tensor] | None:
        """Cosine and sine of the angle of each place of z (..., L, D), in float32."""
        if not self.places:
            return None
        half = self.head_dim // 2
        tokens = torch.empty((), dtype=torch.float32, device=z.device).expand(z.shape[-2], half)
        return turns(tokens, half, self.base, start)[1:]

    def _by_kernel(self, z: Tensor, start: int, delta: Tensor, b: Tensor | None = None, gain: float = 1.0) -> Tensor:
        """`_turned` in one pass over z."""
        from ...kernels.heads.turned import turned

        flat, places = z.reshape(-1, *z.shape[-3:]), self._places(z, start)
        return turned(flat, delta, torch.zeros_like(delta) if b is None else b, places, gain).reshape(z.shape)

    def _turned(self, z: Tensor, start: int, delta: Tensor, b: Tensor, gain: Tensor | float = 1.0) -> Tensor:
        """|z| exp(i (delta phase z + b + place g)) times a gain, of z (..., H, L, D), as D real channels.

        Real and imaginary parts come side by side, in query and key alike, so that their products are the same.
        """
        real, imaginary = (wide(z) * gain).chunk(2, -1)
        numbers = torch.complex(real, imaginary)
        shift = b.unsqueeze(-2)
        if self.places:
            shift = shift + turns(real, self.head_dim // 2, self.base, start)[0]
        angle = torch.addcmul(shift, delta.unsqueeze(-2), numbers.angle())
        return torch.view_as_real(torch.polar(numbers.abs(), angle)).flatten(-2)


def _even(dim: int, num_heads: int) -> int:
    """The number of heads nearest to `num_heads` that gives them an even width."""
    fitting = [n for n in range(1, dim + 1) if dim % n == 0 and dim // n % 2 == 0]
    return min(fitting, key=lambda n: abs(n - num_heads), default=1)
