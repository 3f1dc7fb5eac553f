"""GDA, grouped differential attention: signal heads less a share of a noise head; with ratio 1, differential attention.

Shape legend: ... leading dimensions, L tokens, M keys, C width, D head width, n noise heads, r signal heads for each,
N = r n signal heads, H = (r + 1) n query heads, p pairs of key heads.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from ... import zoo
from ...call import Call, check_count, is_finite
from ...grammar import parse
from ...tensors import repeat_heads, wide
from ...zoo.registry import can
from ..arguments import check_sizes
from ..registry import registered
from .base import HeadsLayer, need, refuse

RATIOS = (3, 2, 1, 4, 5)  # to try where none is given; around 3 and 4 the paper found best
PARTS = "its parts are made for values as wide as keys; here a value is a pair, twice as wide"


@registered(
    "gda",
    "signal heads less a share of a noise head; ratio=1 is differential attention",
    paper="Grouped Differential Attention (Lim et al.)",
    year=2025,
    arxiv="2510.06949",
    cost="3/2 of the mechanism",
    not_over={
        "flow": "it has no grouped queries; `ratio=1` with as many pairs as noise heads works",
        **{name: PARTS for name in zoo.names() if zoo.get(name).module is not None},
    },
    **can("causal cross key_mask ragged streaming equivariant weights"),
)
class GroupedDifferentialAttention(HeadsLayer):
    """A signal head less lambda times the noise head of its group, both over one pair of values; then a norm.

        O_s = A(q_s, k1) V - lambda A(q_g, k2) V,  V = [v1, v2],  s in group g
        y = W_o concat_s((1 - lambda_0) RMSNorm(O_s)),  lambda = exp(a1.b1) - exp(a2.b2) + lambda_0

    Query heads are laid out in n groups [signal x r, noise], key and value heads in pairs. lambda_0 = 0.8 - 0.6
    exp(-0.3 (l - 1)) in layer l, which models number from 1. Cost: 3 H L M D with softmax, the plain layer 2.

    Args:
        ratio: r; 3 where num_heads is a multiple of 4, else the first of 2, 1, 4, 5 that divides. 1 is differential
            attention.
        pairs: of key heads, a divisor of the noise heads; as many as these unless given.
        start: lambda_0; that of the layer's number unless given.
    """

    splits = True
    mixer_names = ("mix", "mix_noise")
    rows_alone = False
    lambda_start: Tensor

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        ratio: int | None = None,
        pairs: int | None = None,
        start: float | None = None,
        attention: str = "softmax",
        qkv_bias: bool = False,
        proj_bias: bool = False,
        **layer: Any,
    ) -> None:
        check_sizes(dim, num_heads)
        ratio = _ratio(num_heads) if ratio is None else ratio
        check_count("ratio", ratio)
        if num_heads % (ratio + 1):
            near = max(ratio + 1, round(num_heads / (ratio + 1)) * (ratio + 1))
            raise ValueError(
                f"ratio={ratio} of layer 'gda' needs num_heads to be a multiple of ratio + 1, got num_heads={num_heads}"
                f"; nearest that works: num_heads={near}"
            )
        noise = num_heads // (ratio + 1)
        pairs = noise if pairs is None else pairs
        if pairs < 1 or noise % pairs:
            fitting = [n for n in range(1, noise + 1) if noise % n == 0]
            raise ValueError(f"pairs must divide the {noise} noise heads, one of {fitting}, got pairs={pairs}")
        mechanism = zoo.get(parse(attention)[0])
        if mechanism.module is not None:
            refuse("gda", mechanism, PARTS)
        if ratio * noise > pairs:
            words = f"has {ratio * noise} signal heads over {pairs} pairs of key heads"
            need("gda", mechanism, "grouped_queries", words, f"ratio=1 with pairs={num_heads // 2}")
        for extra in ("v_conv", "temperature"):
            if layer.get(extra):
                raise ValueError(f"layer 'gda' has heads in groups and no {extra}, got {extra}={layer[extra]!r}")
        if start is not None and not is_finite(start):
            raise ValueError(f"start must be a finite number or None, got {start!r}")
        self.noise, self.ratio, self.pairs, self.start = noise, ratio, pairs, start
        # What is seen from outside are the signal heads; the projections make those of the noise too.
        super().__init__(
            dim, ratio * noise, head_dim=dim // num_heads, attention=attention, qkv_bias=qkv_bias, proj_bias=proj_bias,
            **layer,
        )  # fmt: skip
        self.mix_noise = self.mix_of(noise)
        self.lambdas = nn.Parameter(torch.empty(4, self.head_dim, **self.place))  # a1, b1, a2, b2
        self.subln = nn.RMSNorm(2 * self.head_dim, eps=1e-5, **self.place)
        self.register_buffer("lambda_start", torch.empty((), device=self.place["device"]), persistent=False)
        self.set_number(1)
        nn.init.normal_(self.lambdas, std=0.1)

    def set_number(self, number: int) -> None:
        """Tell the layer which one of its model it is, from 1: lambda_0 grows with depth."""
        self.number = number
        start = 0.8 - 0.6 * math.exp(-0.3 * (number - 1)) if self.start is None else self.start
        self.lambda_start.fill_(start)

    def reset_extras(self) -> None:
        super().reset_extras()
        self.set_number(self.number)  # the buffer of a model made on the meta device is empty
        nn.init.normal_(self.lambdas, std=0.1)
        self.subln.reset_parameters()

    @property
    def head_counts(self) -> tuple[int, int, int]:
        return self.num_heads + self.noise, 2 * self.pairs, 2 * self.pairs

    @property
    def inner_dim(self) -> int:
        return 2 * self.num_heads * self.head_dim

    def factor(self) -> Tensor:
        """lambda, in at least float32."""
        a1, b1, a2, b2 = wide(self.lambdas).unbind()
        return (a1 @ b1).exp() - (a2 @ b2).exp() + self.lambda_start

    def mix_tokens(self, call: Call, x: Tensor, context: Tensor | None = None) -> Tensor:
        """Output (..., N, L, 2 D) of the call of H query heads."""
        signal, noise = self._calls(call)
        first, second = wide(self.mix.run(signal, x)), wide(self.mix_noise.run(noise, x))
        out = first - self.factor() * repeat_heads(second, self.num_heads)
        return (self.subln(out.to(self.subln.weight.dtype)) * (1 - self.lambda_start)).to(call.query.dtype)

    def scores_of(self, call: Call, x: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        """The signed weights before the norm, (..., N, L, M); rows sum to 1 - lambda."""
        step = call.key.shape[-3] // (2 * self.pairs)  # who looks in may have given every query head its key
        call = call._replace(key=call.key[..., ::step, :, :], value=call.value[..., ::step, :, :])
        signal, noise = (
            part._replace(key=repeat_heads(part.key, part.query.shape[-3]), enable_gqa=False)
            for part in self._calls(call)
        )
        first, second = (wide(mix.weigh(part._replace(value=part.key), x)) for mix, part in
                         ((self.mix, signal), (self.mix_noise, noise)))  # fmt: skip
        return first - self.factor() * repeat_heads(second, self.num_heads)

    def _calls(self, call: Call) -> tuple[Call, Call]:
        """Those of signal and noise."""
        groups = call.query.unflatten(-3, (self.noise, self.ratio + 1))
        value = torch.cat((call.value[..., 0::2, :, :], call.value[..., 1::2, :, :]), -1)
        queries = groups[..., : self.ratio, :, :].flatten(-4, -3), groups[..., self.ratio, :, :]
        one, two = (
            call._replace(query=q, key=call.key[..., i::2, :, :], value=value, enable_gqa=q.shape[-3] != self.pairs)
            for i, q in enumerate(queries)
        )
        return one, two


def _ratio(num_heads: int) -> int:
    """The ratio that is taken where none is given."""
    fitting = [ratio for ratio in RATIOS if num_heads % (ratio + 1) == 0]
    if not fitting:
        raise ValueError(
            f"layer 'gda' needs groups of a noise head and its signal heads: num_heads={num_heads} is not a "
            f"multiple of {', '.join(str(ratio + 1) for ratio in sorted(RATIOS))}; nearest that works: "
            f"num_heads={num_heads + 1}"
        )
    return fitting[0]
