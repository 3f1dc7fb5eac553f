"""Attention maps of a forward pass: rows asked for beforehand (`capture`) or later (`record`), in any layer, also where
no matrix is ever formed.

Shape legend: B images or clips, H heads, n rows asked for, L tokens; of a clip T frames, S = rows x cols places, p
prefix tokens, L = p + T S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..inspect.sites import Site, find_sites, numbered
from ..inspect.tokens import TokenLayout
from ..inspect.watching import Seen, watching
from ..kinds import kinds_checked

MAX_BYTES = 2**31
NO_WEIGHTS = (
    "has shown no weights: call the model inside `with capture(model) as captured:`, and let a timm or transformers "
    'model use fused attention (transformers: attn_implementation="sdpa")'
)


class Captured:
    """Maps that a forward pass left behind, see `capture`.

    layers: numbers of the layers asked for. tokens: layout of their tokens. queries: token of each row of a map.
    """

    def __init__(self, layers: list[int], queries: list[int] | None) -> None:
        self.layers = layers
        self.names: dict[int, str] = {}
        self.attention: dict[int, str] = {}
        self._asked = queries
        self._maps: dict[int, list[Tensor]] = {}
        self._tokens: TokenLayout | None = None

    @property
    def tokens(self) -> TokenLayout:
        if self._tokens is None:
            raise RuntimeError("nothing was captured yet: call the model inside `with capture(model) as captured:`")
        return self._tokens

    @property
    def queries(self) -> list[int]:
        return list(range(self.tokens.count)) if self._asked is None else self._asked

    def maps(self, layer: int) -> Tensor:
        """Signed weights (B, heads, queries, keys). Several forward passes follow one another in the batch."""
        if layer not in self.layers:
            raise ValueError(f"layer must be one of {self.layers}, the layers asked for, got {layer}")
        if layer not in self._maps:
            raise RuntimeError(f"layer {layer} {NO_WEIGHTS}")
        parts = self._maps[layer]
        if len(parts) > 1:
            self._maps[layer] = parts = [torch.cat(parts)]
        return parts[0]

    def positive(self, layer: int) -> Tensor:
        """The positive part of the maps: what the query takes."""
        return self.maps(layer).clamp(min=0)

    def negative(self, layer: int) -> Tensor:
        """The size of the negative part of the maps: what the query subtracts."""
        return self.maps(layer).clamp(max=0).neg()

    def negative_mass(self, layer: int) -> Tensor:
        """Sum of the negative part, (B, heads, queries): 0 for softmax."""
        return self.negative(layer).sum(-1)

    def _store(self, site: Site, layout: TokenLayout, maps: Tensor) -> None:
        self._tokens = layout
        self.names[site.number], self.attention[site.number] = site.name, site.attention
        self._maps.setdefault(site.number, []).append(maps)


@kinds_checked
def capture(
    model: nn.Module,
    images: Any = None,
    *,
    layers: list[int] | None = None,
    heads: list[int] | None = None,
    queries: list[int] | str | None = None,
    max_bytes: int = MAX_BYTES,
) -> AbstractContextManager[Captured]:
    """Keep attention maps of the forward passes inside a `with` block; the model and its output stay as they are.

        with explain.capture(model, layers=[3], queries=[0]) as captured:
            model(images)
        captured.maps(3)                                   # (batch, heads, 1, tokens), signed

    Works for our models, converted ones, and timm or transformers models that use fused softmax attention; hooks are
    gone after the block, also after an exception. Only this thread's passes are seen.
    Cost: L D per row, head and layer, and one projection of the keys, where rows stand alone; mechanisms whose rows
    depend on one another form the matrix of one layer at a time. Kept: 4 L bytes per row, head, layer and image.

    Args:
        images: run `model(images)` at once, without gradients, on entering the block.
        layers: numbers from 0, or None for all.
        heads: likewise.
        queries: tokens whose rows are wanted, counted from 0 with the class token first; None or "all" for all. For
            clips the number is prefix + frame * rows * cols + place, in every layer, whatever part of the clip it sees.
        max_bytes: refuse to keep more than this; an error says what was asked.
    """
    if isinstance(queries, str) and queries != "all":
        raise ValueError(f'queries must be a list of tokens, None or "all", got {queries!r}')
    sites = find_sites(model)
    numbers = list(dict.fromkeys(numbered("layers", layers, len(sites))))
    for number in numbers:
        numbered(f"heads of layer {number}", heads, sites[number].heads)
    asked: list[Any] | None = None
    if queries is not None and not isinstance(queries, str):
        asked = [q if isinstance(q, float) else int(q) for q in queries]
    captured = Captured(numbers, asked)
    kept = 0

    @torch.no_grad()
    def keep(site: Site, call: Seen, layout: TokenLayout) -> None:
        nonlocal kept
        rows = None if captured._asked is None else numbered("queries", captured._asked, layout.count)
        captured._asked = rows  # counted from the start from here on
        chosen = None if heads is None else [h % site.heads for h in heads]
        parts = {"space": layout.grid[0], "time": layout.grid[-2] * layout.grid[-1]}.get(site.axes, 1)
        count = layout.count if rows is None else len(rows)
        kept += 4 * (call.batch // parts * (site.heads if chosen is None else len(chosen)) * count * layout.count)
        if kept > max_bytes:
            raise ValueError(
                f"the maps asked for take more than max_bytes={max_bytes}; ask for fewer rows, e.g. queries=[0], "
                "or for some layers or heads"
            )
        captured._store(site, layout, rows_of(site, call, layout, rows, chosen).detach())

    @contextmanager
    def capturing() -> Iterator[Captured]:
        with watching(model, [sites[number] for number in numbers], keep):
            if images is not None:
                with torch.no_grad():
                    model(images)
            yield captured

    return capturing()


def rows_of(site: Site, call: Seen, layout: TokenLayout, rows: list[int] | None, heads: list[int] | None) -> Tensor:
    """Maps (B, heads, n, L) of one call for these tokens (None: all), laid out over all tokens."""

    def of(local: list[int]) -> Tensor:
        return call.weights(None if rows is None and len(local) == call.queries else local, heads)

    every = list(range(layout.count)) if rows is None else rows
    return of(every) if site.axes == "all" else over_clip(site.axes, layout, every, of)


def over_clip(axes: str, layout: TokenLayout, queries: list[int], rows: Callable[[list[int]], Tensor]) -> Tensor:
    """Maps (B, h, n, L) of a layer along `axes`; zero where it does not look.

    rows(local) gives (B', h, len(local), keys) with B' = B T within frames ("space"), B S at places ("time").
    - the class tokens of single frames are shown as one: the mean of their rows;
    - a layer over one token for each frame ("frames"): the weight of a frame is spread evenly over its patches.
    Either keeps the sum of a row.
    """
    frames, places, p = layout.grid[0], layout.grid[-2] * layout.grid[-1], layout.prefix

    def own(query: int) -> int:
        """The row of the layer's own sequences that a query of the clip stands for."""
        t, s = divmod(query - p, places)
        return query if query < p else {"space": p + s, "time": t, "frames": p + t}[axes]

    local = sorted({own(g) for g in queries})
    order = {row: i for i, row in enumerate(local)}
    at = {g: order[own(g)] for g in queries}
    A = rows(local)
    if axes == "frames":
        picked = A[:, :, [at[g] for g in queries]]
        first, later = picked[..., :p], picked[..., p:]
        return torch.cat([first, (later / places).repeat_interleave(places, -1)], -1)
    A = A.unflatten(0, (-1, frames if axes == "space" else places))  # (B, T or S, h, len(local), keys)
    out = A.new_zeros(A.shape[0], A.shape[2], len(queries), layout.count)
    for n, g in enumerate(queries):
        t, s = divmod(g - p, places)
        if g < p:
            every = A[:, :, :, at[g]]
            out[:, :, n, :p] = every[..., :p].mean(1)
            out[:, :, n, p:] = (every[..., p:] / frames).transpose(1, 2).flatten(2)
        elif axes == "space":
            row = A[:, t, :, at[g]]
            out[:, :, n, :p] = row[..., :p]
            out[:, :, n, p + t * places : p + (t + 1) * places] = row[..., p:]
        else:
            out[:, :, n, p + s :: places] = A[:, s, :, at[g]]
    return out


class Recording:
    """Queries and keys of every layer, see `record`."""

    def __init__(self) -> None:
        self._seen: dict[int, tuple[Site, Seen, TokenLayout]] = {}
        self.output: Any = None  # what the model returned

    @property
    def layers(self) -> list[int]:
        return sorted(self._seen)

    @property
    def tokens(self) -> TokenLayout:
        return next(iter(self._seen.values()))[2]

    def layout(self, layer: int) -> TokenLayout:
        """How the tokens of that layer's maps lie."""
        return self._of(layer)[2]

    @property
    def nbytes(self) -> int:
        """Memory of the queries and keys that are kept."""
        return sum(z.nbytes for _, call, _ in self._seen.values() for z in call.kept)

    @torch.no_grad()
    def maps(self, layer: int, queries: list[int] | None = None, heads: list[int] | None = None) -> Tensor:
        """Signed weights (B, heads, n, L), as `Captured.maps`. Cost: L D for each row and head that stands alone."""
        site, call, layout = self._of(layer)
        rows = None if queries is None else numbered("queries", queries, layout.count)
        return rows_of(site, call, layout, rows, None if heads is None else numbered("heads", heads, site.heads))

    def captured(self) -> Captured:
        """All rows of all layers, for `summary`, `rollout` and figures. Cost: L^2 D for each head."""
        found = Captured(self.layers, None)
        for layer in self.layers:
            site, _, layout = self._seen[layer]
            found._store(site, layout, self.maps(layer))
        return found

    @torch.no_grad()
    def query_key(self, layer: int) -> tuple[Tensor, Tensor, float]:
        """Query and key (B, H, L, D) of a layer and the scale of their products: what another mechanism, order or
        temperature would make its weights of. A layer that sees parts of a clip has (B T, ...) or (B S, ...)."""
        return self._of(layer)[1].query_key()

    def _of(self, layer: int) -> tuple[Site, Seen, TokenLayout]:
        if layer not in self._seen:
            raise ValueError(f"layer must be one of {self.layers}, got {layer}")
        return self._seen[layer]


@kinds_checked
@torch.no_grad()
def record(model: nn.Module, images: Any, layers: list[int] | None = None) -> Recording:
    """Run `model(images)` once and keep what any row of its maps can be computed from, without another pass.

        recording = explain.record(model, images)
        recording.maps(3, queries=[17])            # (batch, heads, 1, tokens)

    The model is left as it is. Kept: query and key of each layer, 8 L C bytes for each image (float32).
    """
    sites, recording = find_sites(model), Recording()
    chosen = [sites[number] for number in numbered("layers", layers, len(sites))]

    def see(site: Site, call: Seen, layout: TokenLayout) -> None:
        call.keep()
        recording._seen[site.number] = (site, call, layout)

    with watching(model, chosen, see):
        recording.output = model(images)
    return recording
