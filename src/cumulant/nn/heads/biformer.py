"""BiFormer's bi-level routing: each region of the grid attends to the tokens of its k most related regions.

Shape legend: B batch (all leading dimensions), L = p + N tokens, p prefix tokens, N patches, R regions of w places, k
regions chosen, H heads, D head width, C = H D.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ...call import Call, Grid, check_choice, check_count
from ...cluster import cluster_attention
from ...kernels import launch
from ...kernels.heads.limits import MOST_REGIONS
from ...tensors import ABSENT, wide
from ...zoo.grid import resolve_grid
from ...zoo.registry import can
from ..registry import registered
from .base import HeadsLayer, crossed, flattened, need

SCALES = ("channels", "head")
TOP = 4
WIDEST = 512  # channels of a convolution by our kernel
NOT_OVER = {
    **dict.fromkeys(("combiner", "hierarchical"), "a region attends to keys of others: it has no cross attention"),
    **dict.fromkeys(("rala", "mala"), "its gate reads the tokens of the layer, which are cut into regions; "
                    "with the option use_gate=False it runs"),
    "agent": "its agents are pooled on the whole grid",
}  # fmt: skip


@registered(
    "biformer",
    "each region of the grid attends to the tokens of its most related regions",
    paper="BiFormer: Vision Transformer with Bi-Level Routing Attention (Zhu et al.)",
    year=2023,
    arxiv="2303.08810",
    cost="2 L k w D and (L / w)^2 D for regions of w tokens",
    not_over=NOT_OVER,
    **can("key_mask weights needs_grid"),
)
class BiLevelRouting(HeadsLayer):
    """Attention of each region to its k regions of largest mean query times mean key, plus a convolution of the values.

        A = mean_region(q) mean_region(k)^T,  chosen = top k of each row of A        (no gradient through the choice)
        y = proj(mechanism(q, k of the chosen, v of the chosen) + conv5x5(v))

    Cells that pad the grid to whole regions and masked tokens take no part, in the means neither. Prefix tokens see
    every token and are seen by all. Cost: 2 N k w C and R^2 C for the choice.

    Args:
        regions: along each side of the grid (as many as it has rows, if fewer); all frames of a clip are in one region.
        top: regions k that each one attends to; 4 unless given, or all where there are fewer.
        lce: side of the depth-wise convolution of the values ("local context enhancement"); 0 leaves it out.
        logit_scale: "channels", C^-0.5 as in the released code, or "head", D^-0.5; other mechanisms than softmax have
            their query multiplied by the same ratio of the two.
        far: over softmax: regions that are not chosen are expanded by cumulants, a cluster each, instead of dropped;
            the chosen ones are then those of largest mass for each query.
    """

    def __init__(
        self,
        dim: int,
        num_heads: int = 8,
        *,
        regions: int = 7,
        top: int | None = None,
        lce: int = 5,
        logit_scale: str = "channels",
        far: bool = False,
        **layer: Any,
    ) -> None:
        super().__init__(dim, num_heads, **crossed({"v_conv": lce or False, **layer}))
        check_count("regions", regions)
        if top is not None and not 1 <= top <= regions**2:
            raise ValueError(
                f"top={top} regions of {regions} x {regions}: the router of layer 'biformer' cannot choose more "
                f"regions than there are; take top={regions**2} or fewer"
            )
        check_choice("logit_scale", logit_scale, SCALES)
        need(self.layer_name, self.mechanism, "cross", "lets a region attend to others", 'take layer="multihead"')
        self.check_ungrouped()
        if far and self.mechanism.name != "softmax":
            raise ValueError(
                f"far=True expands softmax in the regions that are not chosen, got attention={self.mechanism.name!r}; "
                "take attention='softmax' or far=False"
            )
        self.regions, self.top, self.logit_scale, self.far = regions, top, logit_scale, far

    def attend(self, call: Call, x: Tensor, context: Tensor | None = None) -> Tensor:
        if not self._direct(call):
            return super().attend(call, x, context)
        return self.proj_drop(self.proj(self.norm(self._by_kernel(call).reshape(x.shape))))

    def _direct(self, call: Call) -> bool:
        """Whether kernels compute the layer: softmax of whole pictures on a GPU, where no gradient is asked for."""
        plain = self.mechanism.name == "softmax" and not self.far and self.gate is None and self.temperature is None
        conv = self.v_conv is None or (self.v_conv.weight.ndim == 4 and self.dim <= WIDEST)
        if torch.is_grad_enabled() or not (plain and conv and launch.direct(call.query)):
            return False
        free = call.key_mask is None and not call.prefix and not call.is_causal and not call.dropout_p
        if not free or call.query.shape[-2] != call.key.shape[-2]:
            return False
        grid = resolve_grid(call.key.shape[-2], call.grid, 0)
        return math.prod(grid[:-2]) == 1 and not any(Regions.of(grid, self.regions).padded)

    def _by_kernel(self, call: Call) -> Tensor:
        """What the projection reads, (B, L, C): keys and values are read where they lie, and nothing is copied."""
        from ...kernels.heads.regions import add_convolved, attend_regions
        from ...kernels.heads.routes import related_regions

        flat, regions = self._laid_out(call, scaled=False)
        factor = self.num_heads**-0.5 if self.logit_scale == "channels" else 1.0
        if regions.many <= MOST_REGIONS:
            chosen = related_regions(*flat[:2], regions.sides[1:], min(self.top or TOP, regions.many))
        else:
            chosen = self._chosen(flat, regions)
        out = attend_regions(*flat[:3], chosen, regions.sides[1:], factor * flat.softmax_scale)
        tokens, value = out.transpose(1, 2).flatten(2), flat.value.transpose(1, 2)
        if self.v_conv is not None:
            _, a, down, b, across = regions.sides
            add_convolved(tokens, value.flatten(2), self.v_conv.weight, (a * down, b * across))
        return tokens

    def mix_tokens(self, call: Call, x: Tensor, context: Tensor | None = None) -> Tensor:
        flat, regions = self._laid_out(call)
        if self.far:
            out = self._with_far(flat, regions)
        else:
            out = self.mix.run(self._asked(flat, regions), None).transpose(-3, -2)
            out = regions.join(out.unflatten(0, (len(flat.query), -1))).transpose(-3, -2)
            if call.prefix:
                out = torch.cat((self.mix.run(_prefix_of(flat)), out), -2)
        return out.reshape(call.query.shape)

    def choose(self, x: Tensor, **arguments: Any) -> Tensor:
        """Regions that each region attends to, (..., R, k); arguments are those of `forward`."""
        found = self._chosen(*self._laid_out(self.asked(x, **arguments)))
        return found.reshape(*x.shape[:-2], *found.shape[1:])

    def scores_of(self, call: Call, x: Tensor | None = None, context: Tensor | None = None) -> Tensor:
        flat, regions = self._laid_out(call)
        if self.far:
            raise ValueError("far=True has no weights to show here; take far=False")
        p, L = call.prefix, call.key.shape[-2]
        A = self.mix.weigh(self._asked(flat, regions))  # (B R, H, w, p + k w)
        at = regions.places(A.device)[self._chosen(flat, regions)].flatten(-2) + p
        A = A.unflatten(0, at.shape[:2])
        at = torch.cat((torch.arange(p, device=A.device).expand(*at.shape[:-1], p), at), -1)[:, :, None, None]
        full = A.new_zeros(*A.shape[:-1], L).scatter_add(-1, at.expand(A.shape), A)
        rows = regions.join(full.transpose(2, 3)).transpose(1, 2)
        if p:
            rows = torch.cat((self.mix.weigh(_prefix_of(flat)), rows), -2)
        return rows.reshape(*call.query.shape[:-1], L)

    def _laid_out(self, call: Call, scaled: bool = True) -> tuple[Call, Regions]:
        """The call with all leading dimensions as one, its mask for each batch, and the regions of its grid; the query
        multiplied by the ratio of `logit_scale`, unless not `scaled`."""
        if call.is_causal:
            raise ValueError("is_causal=True, but layer 'biformer' routes by means of regions, which know later tokens")
        tokens = call.key.shape[-2]
        if call.query.shape[-2] != tokens:
            raise ValueError(
                f"layer 'biformer' routes one grid to itself, got {call.query.shape[-2]} queries and {tokens} keys"
            )
        call = flattened(call)
        grid = resolve_grid(tokens, call.grid, call.prefix)
        regions = Regions.of(grid, self.regions)
        if self.top is not None and self.top > regions.many:
            raise ValueError(
                f"top={self.top} regions, but the grid {grid} has {regions.many}: the router of layer "
                f"'biformer' cannot choose more than there are; take top={regions.many} or fewer"
            )
        by = self.num_heads**-0.5 if scaled and self.logit_scale == "channels" else 1.0
        return call._replace(query=call.query * by if by != 1.0 else call.query, grid=grid), regions

    def _present(self, call: Call, regions: Regions) -> Tensor | None:
        """The mask of the places of the regions, (B, R, w); None: all take part."""
        if call.key_mask is not None:
            return regions.cut(call.key_mask[:, call.prefix :])
        there = regions.there(call.query.device)
        return None if there is None else there.expand(len(call.query), -1, -1)

    def _chosen(self, call: Call, regions: Regions) -> Tensor:
        """(B, R, k) regions: those of largest mean query times mean key over all heads. No gradients."""
        present, means = self._present(call, regions), []
        for part in call[:2]:
            tokens = part.detach().transpose(1, 2)[:, call.prefix :]
            if present is None:  # one pass over what lies there, whatever its order
                dtype = torch.float64 if part.dtype == torch.float64 else torch.float32
                means.append(regions.split(tokens).mean((1, 3, 5), dtype=dtype).flatten(1, 2).flatten(-2))
            else:
                there = (present != 0).unsqueeze(-1)
                cut = wide(regions.cut(tokens).flatten(-2))
                means.append(cut.masked_fill(~there, 0).sum(-2) / there.sum(-2).clamp(min=1))
        related = means[0] @ means[1].mT
        if present is not None:  # a region without tokens has nothing to say
            related = related.masked_fill(~(present != 0).any(-1)[:, None], ABSENT)
        return related.topk(min(self.top or TOP, related.shape[-1]), dim=-1).indices

    def _asked(self, call: Call, regions: Regions) -> Call:
        """What the mechanism is asked: each region's queries (B R, H, w, D), one leading dimension as fused kernels
        want it, and the keys of its choice."""
        p, chosen = call.prefix, self._chosen(call, regions)
        rows = (chosen + regions.many * torch.arange(len(chosen), device=chosen.device)[:, None, None]).flatten()
        query, key, value = (regions.cut(part.transpose(1, 2)[:, p:]) for part in call[:3])

        def taken(part: Tensor) -> Tensor:
            """(B, R, w, ...) of the chosen regions, (B, R, k w, ...): whole rows are copied."""
            return part.flatten(0, 1).index_select(0, rows).view(*chosen.shape, *part.shape[2:]).flatten(2, 3)

        key, value = taken(key), taken(value)
        present = self._present(call, regions)
        mask = None if present is None else taken(present)
        if p:
            many = key.shape[1]
            first = (part.transpose(1, 2)[:, None, :p].expand(-1, many, -1, -1, -1) for part in call[1:3])
            key, value = (torch.cat(pair, 2) for pair in zip(first, (key, value), strict=True))
            if mask is not None:
                seen = mask.new_ones(len(mask), p) if call.key_mask is None else call.key_mask[:, :p]
                mask = torch.cat((seen[:, None].expand(-1, many, -1), mask), -1)
        query, key, value = (part.transpose(-3, -2).flatten(0, 1) for part in (query, key, value))
        mask, present = (None if one is None else one.flatten(0, 1) for one in (mask, present))
        return Call(query, key, value, mask, query_mask=present, dropout_p=call.dropout_p)

    def _with_far(self, call: Call, regions: Regions) -> Tensor:
        """Softmax with the regions as clusters: the chosen ones exactly, the others by their cumulants."""
        each = torch.arange(regions.many, device=call.query.device)[None, :, None]
        owner = regions.join(each.expand(-1, -1, math.prod(regions.sides[::2])))[0]
        near = min(self.top or TOP, regions.many)
        return cluster_attention(
            *call[:3], clusters=owner.expand(1, 1, -1), near=near, prefix=call.prefix, key_mask=call.key_mask
        )


def _prefix_of(call: Call) -> Call:
    """The prefix tokens over all keys."""
    return call._replace(query=call.query[..., : call.prefix, :], grid=None, prefix=0)


class Regions(NamedTuple):
    """How the patches of a grid lie in regions of equal size: F frames, a x b regions of down x across places each."""

    sides: tuple[int, int, int, int, int]  # F, a, down, b, across
    padded: tuple[int, int]  # rows and columns that fill the last regions

    @classmethod
    def of(cls, grid: Grid, regions: int) -> Regions:
        rows, cols = grid[-2:]
        down, across = (-(-side // min(regions, side)) if side else 1 for side in (rows, cols))
        more = -rows % down, -cols % across
        return cls((math.prod(grid[:-2]), (rows + more[0]) // down, down, (cols + more[1]) // across, across), more)

    @property
    def many(self) -> int:
        return self.sides[1] * self.sides[3]

    def split(self, tokens: Tensor) -> Tensor:
        """(B, N, ...) as (B, F, a, down, b, across, ...): a view where nothing is padded, else with zeros."""
        F_, a, down, b, across = self.sides
        grid = tokens.unflatten(1, (F_, a * down - self.padded[0], b * across - self.padded[1]))
        if any(self.padded):
            behind = (0, 0) * (grid.ndim - 4)
            grid = F.pad(grid, (*behind, 0, self.padded[1], 0, self.padded[0]))
        return grid.unflatten(3, (b, across)).unflatten(2, (a, down))

    def cut(self, tokens: Tensor) -> Tensor:
        """(B, N, ...) as (B, R, w, ...), 0 where a region is padded."""
        return self.split(tokens).movedim((2, 4), (1, 2)).flatten(3, 5).flatten(1, 2)

    def join(self, cut: Tensor) -> Tensor:
        """(B, R, w, ...) as (B, N, ...)."""
        F_, a, down, b, across = self.sides
        grid = (
            cut.unflatten(2, (F_, down, across))
            .unflatten(1, (a, b))
            .movedim((3, 4), (1, 3))
            .flatten(4, 5)
            .flatten(2, 3)
        )
        if any(self.padded):
            grid = grid[:, :, : a * down - self.padded[0], : b * across - self.padded[1]]
        return grid.flatten(1, 3)

    def there(self, device: torch.device) -> Tensor | None:
        """False where a region is padded, (1, R, w); None: nowhere."""
        if not any(self.padded):
            return None
        F_, a, down, b, across = self.sides
        patches = F_ * (a * down - self.padded[0]) * (b * across - self.padded[1])
        return self.cut(torch.ones(1, patches, dtype=torch.uint8, device=device)) > 0

    def places(self, device: torch.device) -> Tensor:
        """The number of each patch, (R, w); 0 where a region is padded."""
        F_, a, down, b, across = self.sides
        patches = F_ * (a * down - self.padded[0]) * (b * across - self.padded[1])
        return self.cut(torch.arange(patches, device=device)[None])[0]
