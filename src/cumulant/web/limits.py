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
    side: int = 16_384
    """Largest width and largest height: a decoder takes memory for every row, however short."""
    frame_pixels: int = 4_000_000
    """Largest width x height of a frame of a clip: a decoder holds several of them at once."""
    stored_side: int = 448
    """Side of the square that is kept of an upload; the rest is forgotten."""
    images: int = 64
    """Uploads kept in memory; the one not used for longest goes first. Clips count as several, by their pixels."""
    clip_frames: int = 32
    """Frames kept of a clip, spread evenly over it."""
    clip_side: int = 224
    """Side of the square that is kept of each of them."""
    decoded_frames: int = 900
    """Frames of a clip that are decoded; what follows is not looked at."""
    decoded_pixels: int = 300_000_000
    """Pixels of a clip that are decoded, all frames together."""
    decoding_seconds: int = 15
    """Time that decoding a clip may take."""
    waiting_uploads: int = 8
    """Uploads that wait while others are decoded; further ones are asked to come back."""
    header_seconds: int = 10
    """Time in which the head of a request must arrive."""
    body_seconds: int = 30
    """Time in which the body of a request must arrive."""
    closing_seconds: int = 3
    """Time that requests in progress have left when the explorer is ended."""
    recorded_bytes: int = 2**28
    """Queries and keys kept between clicks: 14 MB for each image of a ViT-B/16."""
    whole_maps_at_once: int = 2**28
    """Up to so many weights, all maps of an image are summed up or followed through the layers; beyond, that is
    refused."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if value < 1:
                raise ValueError(f"{field.name} must be 1 or more, got {value}")
