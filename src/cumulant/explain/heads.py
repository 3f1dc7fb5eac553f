"""Switching heads off, or one block of their map, for as long as a `with` block lasts.

Shape legend: B images, H heads, L queries, M keys, D head width.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..inspect.sites import Site, find_sites, numbered, output_projection
from ..inspect.tokens import TokenLayout
from ..inspect.watching import Seen, watching
from ..kinds import kinds_checked
from ..nn.fold import unfolded

BLOCKS = ("class to patches", "patches to class", "patches to patches", "patches at distance")


@kinds_checked
@contextmanager
def head_off(
    model: nn.Module, heads: Iterable[tuple[int, int]], means: dict[tuple[int, int], Tensor] | None = None
) -> Iterator[nn.Module]:
    """Within this, the output of each (layer, head) is 0, or its mean (D,) where `means` has one.

    The slice of the concatenated heads is replaced just before the output projection, so a value convolution and a
    gate of that head go with it. Weights are not touched. Cost: a copy of that tensor for each layer concerned.
    """
    sites = find_sites(model)
    by_layer: dict[int, list[int]] = defaultdict(list)
    for layer, head in heads:
        (layer,) = numbered("layer of a head", [layer], len(sites))
        by_layer[layer] += numbered(f"head of layer {layer}", [head], sites[layer].heads)

    def cut(site: Site, joined: Tensor) -> Tensor:
        heads = joined.unflatten(-1, (site.heads, -1)).clone()
        for head in by_layer[site.number]:
            mean = (means or {}).get((site.number, head))
            heads[..., head, :] = 0 if mean is None else mean.to(heads)
        return heads.flatten(-2)

    with before_projection(model, [sites[layer] for layer in by_layer], cut):
        yield model


@contextmanager
def before_projection(
    model: nn.Module, sites: Iterable[Site], told: Callable[[Site, Tensor], Tensor | None]
) -> Iterator[None]:
    """Within this, told(site, x) hears what enters a layer's output projection: the heads' outputs x (..., L, H D) side
    by side. What it returns, if anything, enters in their place. Layers that fold form their heads."""
    with ExitStack() as stack:
        stack.enter_context(unfolded())
        for site in sites:

            def hook(_: Any, args: tuple[Any, ...], site: Site = site) -> tuple[Any, ...] | None:
                changed = told(site, args[0])
                return None if changed is None else (changed, *args[1:])

            stack.callback(output_projection(model, site).register_forward_pre_hook(hook).remove)
        yield


@kinds_checked
@contextmanager
def block_off(
    model: nn.Module, layer: int, head: int, block: str, distance: int | None = None, lost: list[Tensor] | None = None
) -> Iterator[nn.Module]:
    """Within this, one block of the map of a head is 0: what it carried is subtracted from the head's output.

    block: "class to patches", "patches to class" (queries to keys), "patches to patches", or "patches at distance",
    with the `distance` k in hops. Rows are not normalised again: the sum of the weights that went missing, (B, L), is
    appended to `lost`. Cost: that of the whole map of one head. Layers with a norm or a gate after mixing are refused.
    """
    sites = find_sites(model)
    (layer,) = numbered("layer", [layer], len(sites))
    site = sites[layer]
    (head,) = numbered(f"head of layer {layer}", [head], site.heads)
    if block not in BLOCKS or (distance is None) == (block == "patches at distance"):
        raise ValueError(
            f"block must be one of {', '.join(map(repr, BLOCKS))}, the last with distance=k; got {block!r} with "
            f"distance={distance}"
        )
    if site.axes != "all" or not plain_output(site):
        raise ValueError(f"layer {layer} ({site.name}) does not mix all tokens into its output projection directly")
    pending: list[Tensor] = []

    @torch.no_grad()
    def see(_: Site, call: Seen, layout: TokenLayout) -> None:
        A = call.weights(None, [head]) * block_mask(layout, block, distance).to(call.value().device)
        if lost is not None:
            lost.append(A.sum(-1)[..., 0, :])
        pending.append((A @ call.value()[..., [head], :, :].to(A.dtype))[..., 0, :, :])

    def subtract(site: Site, joined: Tensor) -> Tensor:
        heads = joined.unflatten(-1, (site.heads, -1)).clone()
        heads[..., head, :] -= pending.pop().to(heads.dtype)
        return heads.flatten(-2)

    with watching(model, [site], see), before_projection(model, [site], subtract):
        yield model


def block_mask(layout: TokenLayout, block: str, distance: int | None = None) -> Tensor:
    """Entries (L, L) of a map that belong to a block, as bool; the class token is token 0."""
    from .metrics import patch_distances

    mask = torch.zeros(layout.count, layout.count, dtype=torch.bool)
    p = layout.prefix
    if block != "patches to patches" and block != "patches at distance" and p == 0:
        raise ValueError(f"block={block!r}, but the model has no class token")
    if block == "class to patches":
        mask[0, p:] = True
    elif block == "patches to class":
        mask[p:, 0] = True
    elif block == "patches to patches":
        mask[p:, p:] = True
    else:
        mask[p:, p:] = patch_distances(layout.grid) == distance
    return mask


def plain_output(site: Site) -> bool:
    """Whether the heads' outputs enter the output projection as they are: no norm, no gate of layer or mechanism."""
    own = all(isinstance(getattr(site.module, name, None), nn.Identity | None) for name in ("norm", "gate"))
    return own and getattr(getattr(site.module, "mix", None), "gate", None) is None


@kinds_checked
def head_means(model: nn.Module, batches: Sequence[Tensor]) -> dict[tuple[int, int], Tensor]:
    """Mean output (D,) of every head over tokens and images, for pruning to the mean instead of to 0."""
    sites = find_sites(model)
    sums: dict[int, Tensor] = {}
    counts: dict[int, int] = defaultdict(int)

    def add(site: Site, joined: Tensor) -> None:
        heads = joined.unflatten(-1, (site.heads, -1)).flatten(0, -3)
        sums[site.number] = sums.get(site.number, 0) + heads.sum(0, dtype=torch.float64)
        counts[site.number] += heads.shape[0]

    with before_projection(model, sites, add), torch.no_grad():
        for batch in batches:
            model(batch)
    return {(n, h): sums[n][h] / counts[n] for n in sums for h in range(sums[n].shape[0])}
