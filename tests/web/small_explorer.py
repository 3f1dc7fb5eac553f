"""A small explorer to ask: models with random weights, so that nothing is trained here."""

from __future__ import annotations

import io
import struct
import zlib

import torch
from fastapi import FastAPI
from fastapi.testclient import TestClient
from PIL import Image

from cumulant.models import create_model
from cumulant.web import Explorable

NAMES = ("softmax", "cumulant3")


def local_client(app: FastAPI, **options: bool) -> TestClient:
    """Asks an application as a browser on this machine does."""
    return TestClient(app, base_url="http://localhost", **options)


def ask(client: TestClient, what: str, **question: object) -> dict:
    answer = client.post(f"/api/{what}", json=question)
    assert answer.status_code == 200, answer.text
    return answer.json()


def small_model(attention: str, **options: object) -> Explorable:
    torch.manual_seed(0)
    model = create_model("vit_nano_patch2_8", attention=attention, num_classes=10, init_std=0.3, depth=2, **options)
    return Explorable(model, tuple("0123456789"), size=8, mean=(0.3,), std=(0.4,), title="small")


def small_video_model(attention: str = "cumulant3", **options: object) -> Explorable:
    """Clips of 4 frames, 8 x 8: tokens over 2 steps in time, 2 rows and 2 columns."""
    torch.manual_seed(0)
    options = {"img_size": 8, "frames": 4, "depth": 2, "init_std": 0.3, "zero_head": False, **options}
    model = create_model("vivit_nano_patch4x2_16", attention=attention, num_classes=5, **options)
    return Explorable(model, tuple("abcde"), size=8, mean=(0.3,), std=(0.4,), title="small video", frames=4)


def noise(seed: int, side: int = 8) -> Image.Image:
    pixels = torch.randint(0, 256, (side, side), dtype=torch.uint8, generator=torch.Generator().manual_seed(seed))
    return Image.fromarray(pixels.numpy()).convert("RGB")


def encoded(picture: Image.Image, kind: str = "PNG", **options: object) -> bytes:
    content = io.BytesIO()
    picture.save(content, kind, **options)
    return content.getvalue()


def animated(count: int, kind: str = "GIF", side: int = 20) -> bytes:
    """An animation whose frames are noise of seeds 0, 1, ..."""
    first, *others = [noise(seed, side) for seed in range(count)]
    return encoded(first, kind, save_all=True, append_images=others, duration=50)


def film(count: int, side: int = 48, codec: str = "mpeg4", container: str = "mp4") -> bytes:
    """A video whose frame i is grey 10 i."""
    import av

    content = io.BytesIO()
    with av.open(content, "w", format=container) as out:
        stream = out.add_stream(codec, rate=10)
        stream.width = stream.height = side
        stream.pix_fmt = "yuv420p"
        for i in range(count):
            grey = torch.full((side, side, 3), 10 * i % 256, dtype=torch.uint8).numpy()
            out.mux(stream.encode(av.VideoFrame.from_ndarray(grey, format="rgb24")))
        out.mux(stream.encode())
    return content.getvalue()


def png_claiming(width: int, height: int) -> bytes:
    """A PNG whose header claims that size and that holds next to nothing."""

    def chunk(kind: bytes, data: bytes) -> bytes:
        return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))

    header = struct.pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return (
        b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(b"0" * 64)) + chunk(b"IEND", b"")
    )
