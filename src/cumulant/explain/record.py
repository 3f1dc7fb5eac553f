"""One forward pass kept as queries and keys, from which any row of any map follows later: for looking around.

Shape legend: B images or clips, H heads, L tokens, C width, n queries asked for.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ..inspect.sites import Site, find_sites, numbered
from ..inspect.tokens import TokenLayout
from ..inspect.watching import Seen, watching
from .capture import Captured, rows_of


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
