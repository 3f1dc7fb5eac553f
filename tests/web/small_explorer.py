"""A small explorer to ask: models with random weights, so that nothing is trained here."""

from __future__ import annotations

import io
import struct
import zlib

import torch
from PIL import Image

from cumulant.models import create_model
from cumulant.web import Explorable

NAMES = ("softmax", "cumulant3")


def small_model(attention: str, **options: object) -> Explorable:
    torch.manual_seed(0)
    model = create_model("vit_nano_patch2_8", attention=attention, num_classes=10, init_std=0.3, depth=2, **options)
    return Explorable(model, tuple("0123456789"), size=8, mean=(0.3,), std=(0.4,), title="small")


def noise(seed: int, side: int = 8) -> Image.Image:
    pixels = torch.randint(0, 256, (side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.numpy()).convert("RGB")


def encoded(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    content = io.BytesIO()
    picture.save(content, kind, **options)
    return content.getvalue()


def png_claiming(width: int, height: int) -> bytes:
    """A PNG whose header claims that size and that holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0" * 64)) + chunk(b"IEND", b"")
    )
