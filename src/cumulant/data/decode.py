"""From encoded bytes to square uint8 pixels with Pillow: one image, one way, for files, parquet and video frames."""

from __future__ import annotations

import io
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from ..optional import needed
from .part import DecodeError

if TYPE_CHECKING:
    from PIL.Image import Image

IMAGE_SUFFIXES = frozenset({".jpg", ".jpeg", ".png", ".webp", ".bmp", ".gif", ".tif", ".tiff", ".ppm", ".pgm"})

# Without a hint Pillow asks every plugin in turn, which costs as much as decoding a 64 x 64 picture.
SIGNATURES = ((b"\xff\xd8", "JPEG"), (b"\x89PNG", "PNG"), (b"RIFF", "WEBP"))


def decode_image(data: bytes | Path, size: int, name: str) -> Tensor:
    """Encoded image or its file -> uint8 (3, size, size): RGB, short side resized to `size`, centre square."""
    return to_tensor(fit(open_image(data, size, name), size))


def decode_whole(data: bytes | Path, size: int, name: str) -> tuple[Tensor, float]:
    """The whole picture, stretched to uint8 (3, size, size), and its width / height."""
    image = open_image(data, size, name)
    return to_tensor(fit(image, size, crops=0)), image.width / image.height


def open_image(data: bytes | Path, size: int, name: str) -> Image:
    """The decoded RGB picture, at its own size or, for a JPEG, at the smallest that is still twice `size`."""
    pillow = pillow_image()
    if isinstance(data, Path):
        check_plain(data, name)
    try:
        if isinstance(data, Path):
            data = data.read_bytes()
        formats = [kind for magic, kind in SIGNATURES if data.startswith(magic)] or None
        image = pillow.open(io.BytesIO(data), formats=formats)
        if image.format == "JPEG":
            image.draft("RGB", (2 * size, 2 * size))  # the codec drops what resizing would average away
        image.load()  # Pillow decodes here, not at open()
        make_upright(image)
        # convert("RGB") would clip 16-bit grey instead of scaling it; mode I holds 16 bits too, but for TIFF's 32.
        if image.mode.startswith("I;16") or (image.mode == "I" and image.format != "TIFF"):
            image = pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))
        elif image.mode in ("I", "F"):
            check_levels(image)
        return image if image.mode == "RGB" else image.convert("RGB")
    except pillow.UnidentifiedImageError as error:  # it would show the place of the bytes in memory
        raise DecodeError(name, "UnidentifiedImageError: no kind of image that Pillow knows") from error
    except Exception as error:  # Pillow raises many kinds; each means that this one item cannot be used
        raise DecodeError.of(name, error) from error


def check_plain(file: Path, name: str) -> None:
    """Refuse what is neither a file nor missing: a pipe or a device would keep its reader waiting for ever."""
    if file.exists() and not file.is_file():
        raise DecodeError(name, "a folder, not a file" if file.is_dir() else "a pipe, socket or device, not a file")


def check_levels(image: Image) -> None:
    """Refuse pixels of 32 bits that are no levels from 0 to 255: nothing says what is white, and converting clips."""
    levels = np.asarray(image)
    low, high = float(levels.min()), float(levels.max())
    if not (0 <= low and high <= 255 and (image.mode == "I" or high > 1 or high == 0)):
        raise ValueError(f"pixels of 32 bits from {low:g} to {high:g}; expected 0 to 255, or a file of 8 or 16 bits")


def make_upright(image: Image) -> None:
    """Turns a picture that a camera has marked as turned, as the package `datasets` does too."""
    if "exif" in image.info:
        from PIL import ImageOps

        with suppress(Exception):  # a damaged note about the picture is no damage to the picture
            ImageOps.exif_transpose(image, in_place=True)


def fit(image: Image, size: int, crop: int = 0, crops: int = 1) -> Image:
    """Short side resized to `size` (bicubic, antialiased), then a square: the centre, or the crop-th of `crops`
    squares spread evenly over the long side. No crops: all of it, stretched to a square."""
    width, height = image.size
    if (width, height) == (size, size):
        return image
    if crops == 0:
        return image.resize((size, size), pillow_image().Resampling.BICUBIC)
    short, long = min(width, height), max(width, height)
    place = (long - short) * (0.5 if crops == 1 else crop / (crops - 1))
    left, top = (place, 0.0) if width > height else (0.0, place)
    box = (left, top, left + short, top + short)
    return image.resize((size, size), pillow_image().Resampling.BICUBIC, box=box)


def to_tensor(image: Image) -> Tensor:
    """uint8 (3, height, width), of a grey picture (1, height, width)."""
    return torch.from_numpy(np.atleast_3d(np.asarray(image)).transpose(2, 0, 1).copy())


def pillow_image():  # type: ignore[no-untyped-def]
    """The module PIL.Image."""
    with needed("decoding images needs Pillow", "data"):
        from PIL import Image
    return Image
