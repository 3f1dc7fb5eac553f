"""GAAM (later DAAM), Gaussian adaptive attention: features weighted by a Gaussian of their own standardised value.

Shape legend: ... leading dimensions, L tokens, C channels, H heads, n elements of a head's chunk, G Gaussians;
for stacked features B batch, N layers of an encoder, T times, F features.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ...call import Call, check_choice, check_count
from ...tensors import wide
from ...zoo.registry import can
from ..arguments import as_key_mask
from ..registry import registered
from .base import HeadsLayer

FORMS = ("package", "experiment")
AXES = ("channels", "tokens")
NARROWEST = 1e-6  # of c squared: a width that crosses 0 in training would divide by it


class GaussianDensity(nn.Module):
    """The package's form: a product of G Gaussians of each element's place among its chunk, normalised over the chunk.

        y_i = (x - mean - o_i) / sqrt(var + eps),   w = softmax(-sum_i y_i^2 / (2 c_i^2)),   out = x w

    Mean and unbiased variance are those of a head's chunk along the last axis; o (H, G) and c (H, G) are learned. The
    softmax is the product of Gaussians over its sum, without its underflow. Cost: G for each element.
    """

    def __init__(self, num_heads: int, gaussians: int = 5, eps: float = 1e-8, **place: Any) -> None:
        super().__init__()
        self.num_heads, self.eps = num_heads, eps
        self.offset = nn.Parameter(torch.empty(num_heads, gaussians, **place))
        self.width = nn.Parameter(torch.empty(num_heads, gaussians, **place))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.offset)
        with torch.no_grad():
            self.width.normal_().exp_()

    def weights(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """w of x (..., n_all), whose last axis the heads split into chunks, the last taking the rest; mask alike."""
        sizes = chunk_sizes(x.shape[-1], self.num_heads)
        if len(set(sizes)) == 1 and mask is None:
            return self._weigh(wide(x).unflatten(-1, (self.num_heads, -1)), None, slice(None)).flatten(-2)
        masks = [None] * len(sizes) if mask is None else list(mask.split(sizes, -1))
        parts = zip(wide(x).split(sizes, -1), masks, strict=True)
        return torch.cat([self._weigh(part, there, h) for h, (part, there) in enumerate(parts)], -1)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x w in the dtype of x; absent elements are left as they are."""
        out = (wide(x) * self.weights(x, mask)).to(x.dtype)
        return out if mask is None else torch.where(mask, out, x)

    def _weigh(self, x: Tensor, mask: Tensor | None, heads: int | slice) -> Tensor:
        """Of a chunk (..., n), or of all heads' chunks (..., H, n) at once."""
        offset, width = wide(self.offset[heads]).unsqueeze(-2), wide(self.width[heads]).unsqueeze(-2)
        mean, var = moments(x, mask)
        y = ((x - mean).unsqueeze(-1) - offset) / (var + self.eps).sqrt().unsqueeze(-1)
        logits = -(y.square() / (2 * width.square().clamp(min=NARROWEST))).sum(-1)
        if mask is None:
            return logits.softmax(-1)
        return logits.masked_fill(~mask, torch.finfo(logits.dtype).min).softmax(-1).masked_fill(~mask, 0)


class StackedDensity(nn.Module):
    """The form of the experiments: stacked features (..., N, T, F), heads that split N, a weight for each feature.

        y = mean over T of x,   z = (y - mean_N - o) / sqrt(var_N + 1e-5),   out = x exp(-z^2 / (2 c))

    The variance is biased, c is not squared and weights are not normalised: they lie in (0, 1]. o and c are (H, F).
    `raw_view=True` pools as the released code does, which takes (N, T, F) for (N F, T) and so mixes times and features.
    Cost: N T F.
    """

    def __init__(self, num_heads: int, features: int, *, raw_view: bool = False, **place: Any) -> None:
        super().__init__()
        self.num_heads, self.raw_view = num_heads, raw_view
        self.offset = nn.Parameter(torch.empty(num_heads, features, **place))
        self.width = nn.Parameter(torch.empty(num_heads, features, **place))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.zeros_(self.offset)
        nn.init.constant_(self.width, 2.0)

    def weights(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """w (..., N, F) of x (..., N, T, F); mask (..., N) leaves layers out of mean and variance."""
        N, T, F = x.shape[-3:]
        y = wide(x)
        y = y.reshape(*x.shape[:-3], N * F, T).mean(-1).unflatten(-1, (N, F)) if self.raw_view else y.mean(-2)
        sizes = chunk_sizes(N, self.num_heads)
        masks = [None] * len(sizes) if mask is None else [part.unsqueeze(-2) for part in mask.split(sizes, -1)]
        found = []
        for h, (part, there) in enumerate(zip(y.split(sizes, -2), masks, strict=True)):
            mean, var = moments(part.mT, there, unbiased=False)
            z = (part.mT - mean - wide(self.offset[h]).unsqueeze(-1)) / (var + 1e-8 + 1e-5).sqrt()
            width = wide(self.width[h]).unsqueeze(-1)
            width = torch.where(width.abs() < NARROWEST, torch.full_like(width, NARROWEST), width)
            found.append((-z.square() / (2 * width)).exp().mT)
        return torch.cat(found, -2)

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        """x w in the dtype of x, (..., N, T, F)."""
        return (wide(x) * self.weights(x, mask).unsqueeze(-2)).to(x.dtype)


@registered(
    "gaam",
    "channels, or tokens, weighted by a Gaussian of their own standardised value",
    paper="Gaussian Adaptive Attention is All You Need (Ioannides et al.)",
    year=2024,
    arxiv="2401.11143",
    cost="that of the mechanism, and G L C",
    **can("causal cross key_mask ragged streaming equivariant weights"),
)
class GaussianAdaptiveAttention(HeadsLayer):
    """Attention followed by a density over the channels of each token; or a density over tokens in its place.

        axis="channels":  y = z + GaussianDensity(z),  z = attention(x)
        axis="tokens":    y = density(x^T)^T, channel by channel, without projections and mechanism

    Only the first mixes tokens by a mechanism; the second knows mean and variance of them alone, and neither a context
    nor a causal form. Cost beside attention: G L C.

    Args:
        form: "package", a normalised product of Gaussians, or "experiment" (for axis="tokens"), one unnormalised
            Gaussian with a width for each feature.
        axis: what the heads split.
        gaussians: of the package's form.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        form: str = "package",
        axis: str = "channels",
        gaussians: int = 5,
        attention: str = "softmax",
        **layer: Any,
    ) -> None:
        check_choice("form", form, FORMS)
        check_choice("axis", axis, AXES)
        check_count("gaussians", gaussians)
        if form == "experiment" and axis == "channels":
            raise ValueError(
                'form="experiment" has a width for every feature, which needs axis="tokens", got axis="channels"; the '
                'nearest over channels is form="package"'
            )
        if axis == "tokens" and attention != "softmax":
            raise ValueError(
                f'axis="tokens" stands in place of attention and takes no mechanism, got attention={attention!r}; '
                'axis="channels" goes with any'
            )
        super().__init__(dim, num_heads, attention=attention, **layer)
        if axis == "channels" and self.head_dim < 2:
            raise ValueError(
                f"layer 'gaam' takes the variance of a head's channels: dim / num_heads must be at least 2, got "
                f"{dim} / {num_heads}; nearest that works: num_heads={max(1, dim // 2)}"
            )
        self.form, self.axis = form, axis
        package = form == "package"
        self.density = (
            GaussianDensity(num_heads, gaussians, **self.place)
            if package
            else StackedDensity(num_heads, dim, **self.place)
        )
        if axis == "tokens":
            self.qkv, self.proj = nn.Identity(), nn.Identity()  # type: ignore[assignment]

    def reset_extras(self) -> None:
        super().reset_extras()
        self.density.reset_parameters()

    def forward(  # type: ignore[override]
        self, x: Tensor, attn_mask: Tensor | None = None, is_causal: bool = False, context: Tensor | None = None,
        **layout: Any,
    ) -> Tensor:  # fmt: skip
        if self.axis == "channels":
            return super().forward(x, attn_mask, is_causal, context, **layout)
        self.check_whole()
        self._check_width("x", x)
        if is_causal or context is not None:
            what = "is_causal=True" if is_causal else "a context"
            raise ValueError(
                f'axis="tokens" of layer \'gaam\' takes the mean of all tokens, got {what}; use axis="channels"'
            )
        mask = as_key_mask(attn_mask, x)
        there = None if mask is None else mask != 0
        if self.form == "package":
            weighted = self.density(x.mT, None if there is None else there.unsqueeze(-2).expand(x.mT.shape)).mT
        else:
            weighted = self.density(x.unsqueeze(-2), there).squeeze(-2)
        return self.proj_drop(weighted)

    def attend(self, call: Call, x: Tensor, context: Tensor | None = None) -> Tensor:
        out = super().attend(call, x, context)
        return out + self.density(out)


def moments(x: Tensor, mask: Tensor | None, unbiased: bool = True) -> tuple[Tensor, Tensor]:
    """Mean and variance (..., 1) along the last axis, over what the mask leaves; the variance of one element is 0."""
    if mask is None:
        mean = x.mean(-1, keepdim=True)
        count = torch.full_like(mean, x.shape[-1])
        squares = (x - mean).square().sum(-1, keepdim=True)
    else:
        count = mask.to(x.dtype).sum(-1, keepdim=True).clamp(min=1).expand(*x.shape[:-1], 1)
        mean = x.masked_fill(~mask, 0).sum(-1, keepdim=True) / count
        squares = (x - mean).masked_fill(~mask, 0).square().sum(-1, keepdim=True)
    return mean, squares / ((count - 1).clamp(min=1) if unbiased else count)


def chunk_sizes(elements: int, num_heads: int) -> list[int]:
    """Lengths of the heads' chunks, the last with the rest; each must have a variance."""
    size = elements // num_heads
    if size < 2:
        raise ValueError(
            f"a variance needs two elements: {num_heads} heads of layer 'gaam' split at least {2 * num_heads}, got "
            f"{elements}; nearest that works: num_heads={max(1, elements // 2)}"
        )
    return [size] * (num_heads - 1) + [elements - size * (num_heads - 1)]


def importance_factor(weights: Tensor) -> Tensor:
    """(W - min) / (max - min) of weights averaged over data: 0 for what matters least, 1 for what matters most."""
    low, high = weights.amin(), weights.amax()
    return (weights - low) / (high - low).clamp(min=torch.finfo(weights.dtype).tiny)
