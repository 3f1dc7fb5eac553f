"""Uploads: decoded in a bounded way, kept in memory only, under names that cannot be guessed."""

from __future__ import annotations

import io
import secrets
import threading
import warnings
from collections import OrderedDict
from typing import TYPE_CHECKING

from ..data.decode import fit, pillow_image
from .limits import Limits

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # raster formats decoded by Pillow itself; no SVG, PDF or EPS


class UploadError(ValueError):
    """A picture that is not taken: `status` is the HTTP status that says why."""

    def __init__(self, message: str, status: int = 415) -> None:
        super().__init__(message)
        self.status = status


def read_picture(content: bytes, limits: Limits, *, invert: bool = False) -> Image:
    """The centre square of an encoded picture as RGB, at most `stored_side` wide.

    The size in the header is checked before any pixel is decoded, so that a file of a few kilobytes cannot claim
    gigabytes. Of an animation the first frame counts. `invert` turns dark ink on white paper into light on dark.
    """
    pillow = pillow_image()
    from PIL import ImageOps

    if not content:
        raise UploadError("the request is empty; expected the bytes of a picture", 400)
    if len(content) > limits.upload_bytes:
        raise UploadError(f"the file must have at most {limits.upload_bytes:,} bytes, got {len(content):,}", 413)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of large pictures; the limit below refuses them
            image = pillow.open(io.BytesIO(content), formats=FORMATS)
    except pillow.DecompressionBombError as error:  # Pillow's own limit, far above ours
        raise UploadError(f"the picture must have at most {limits.pixels:,} pixels, got many more", 413) from error
    except Exception as error:  # Pillow raises many kinds; each means that this is none of the formats
        raise UploadError(f"not a picture that can be read; expected one of {', '.join(FORMATS)}") from error
    width, height = image.size
    if width * height > limits.pixels:
        raise UploadError(f"the picture must have at most {limits.pixels:,} pixels, got {width} x {height}", 413)
    try:
        if image.format == "JPEG":
            image.draft("RGB", (2 * limits.stored_side, 2 * limits.stored_side))
        image.load()
        if image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
            image = image.convert("RGBA")
            paper = pillow.new("RGBA", image.size, "white")
            image = pillow.alpha_composite(paper, image)
        image = ImageOps.exif_transpose(image).convert("RGB")
        side = min(*image.size, limits.stored_side)
        image = fit(image, side)
    except Exception as error:
        raise UploadError(f"the {image.format or 'picture'} file is damaged or incomplete", 422) from error
    return ImageOps.invert(image) if invert else image


class UploadStore:
    """The last few uploads, each under a random name that only its sender knows. Nothing is written to disk."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._pictures: OrderedDict[str, Image] = OrderedDict()
        self._lock = threading.Lock()

    def add(self, picture: Image) -> str:
        """Keep a picture and return its name; the picture not used for longest makes room."""
        name = f"upload-{secrets.token_urlsafe(16)}"
        with self._lock:
            self._pictures[name] = picture
            while len(self._pictures) > self.count:
                self._pictures.popitem(last=False)
        return name

    def get(self, name: str) -> Image | None:
        """The picture of that name, if it is still here."""
        with self._lock:
            picture = self._pictures.get(name)
            if picture is not None:
                self._pictures.move_to_end(name)
            return picture

    def __len__(self) -> int:
        return len(self._pictures)
