"""How much one visitor may ask of the explorer."""

from __future__ import annotations

from dataclasses import dataclass, fields


@dataclass(frozen=True)
class Limits:
    """Bounds that keep an upload or a request from taking the machine's memory or time."""

    upload_bytes: int = 8 * 2**20
    """Largest body of any request."""
    pixels: int = 24_000_000
    """Largest width x height of an uploaded picture, read from its header before any pixel is decoded."""
    stored_side: int = 448
    """Side of the square that is kept of an upload; the rest is forgotten."""
    images: int = 64
    """Uploads kept in memory; the one not used for longest goes first."""
    cached_weights: int = 2**25
    """Attention weights kept between clicks (4 bytes each)."""
    whole_maps: int = 2**24
    """Up to so many weights, all rows of an image are computed at once, so that the next click costs nothing; beyond,
    each click computes its own rows."""
    whole_maps_at_once: int = 2**28
    """Up to so many weights, all maps of an image are summed up or followed through the layers; beyond, that is
    refused."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise ValueError(f"{field.name} must be 1 or more, got {value}")
