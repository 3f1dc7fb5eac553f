"""Uploads: pictures and clips decoded in a bounded way, kept in memory only, under names that cannot be guessed."""

from __future__ import annotations

import io
import secrets
import warnings
from typing import TYPE_CHECKING, Any

import numpy as np

from ..data.decode import fit, make_upright, pillow_image
from .footage import Decimated, container_of, read_video
from .limits import Limits
from .memory import Memory
from .problems import UploadError

if TYPE_CHECKING:
    from PIL.Image import Image

FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP")  # raster formats decoded by Pillow itself; no SVG, PDF or EPS


def read_upload(content: bytes, limits: Limits, *, invert: bool = False) -> tuple[Image, ...]:
    """The frames of an encoded picture (one), animation or video: centre squares in RGB.

    `invert` turns dark ink on white paper into light on dark.
    """
    if not content:
        raise UploadError("the request is empty; expected the bytes of a picture or a short video", 400)
    if len(content) > limits.upload_bytes:
        raise UploadError(f"the file must have at most {limits.upload_bytes:,} bytes, got {len(content):,}", 413)
    kind = container_of(content)
    frames = _pictures(content, limits) if kind is None else read_video(content, kind, limits)
    if invert:
        from PIL import ImageOps

        frames = tuple(ImageOps.invert(frame) for frame in frames)
    return frames


def _pictures(content: bytes, limits: Limits) -> tuple[Image, ...]:
    """A picture, at most `stored_side` wide, or the frames of an animated GIF, WebP or PNG spread evenly over it.

    The size in the header is checked before any pixel is decoded, so that a file of a few kilobytes cannot claim
    gigabytes.
    """
    image = _opened(content, limits)
    try:
        if not getattr(image, "is_animated", False):
            if image.format == "JPEG":
                image.draft("RGB", (2 * limits.stored_side, 2 * limits.stored_side))
            image.load()
            return (_square(image, limits.stored_side),)
        kept = Decimated(limits)
        for number in range(image.n_frames):
            image.seek(number)
            if not kept.wants(*image.size):
                break
            kept.add(lambda: _square(image, limits.clip_side))
        return kept.frames()
    except UploadError:
        raise
    except Exception as error:
        raise UploadError(f"the {image.format or 'picture'} file is damaged or incomplete", 422) from error


def _opened(content: bytes, limits: Limits) -> Any:
    """A picture of which no pixel is decoded yet and whose size is within the limit."""
    pillow = pillow_image()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Pillow warns of large pictures; the limit below refuses them
            image = pillow.open(io.BytesIO(content), formats=FORMATS)
    except pillow.DecompressionBombError as error:  # Pillow's own limit, far above ours
        raise UploadError(f"the picture must have at most {limits.pixels:,} pixels, got many more", 413) from error
    except Exception as error:  # Pillow raises many kinds; each means that this is none of the formats
        raise UploadError(
            f"not a picture or video that can be read; expected one of {', '.join(FORMATS)}, MP4 or WebM"
        ) from error
    width, height = image.size
    if max(width, height) > limits.side:
        raise UploadError(f"the picture must have sides of at most {limits.side:,} pixels, got {width} x {height}", 413)
    if width * height > limits.pixels:
        raise UploadError(f"the picture must have at most {limits.pixels:,} pixels, got {width} x {height}", 413)
    return image


def _square(image: Any, side: int) -> Image:
    """The centre square as RGB, at most `side` wide, turned as the camera noted, transparent parts white."""
    pillow = pillow_image()
    image = image.copy()  # an animation goes on from its own frame
    make_upright(image)  # first: what is made of it below has no note of the camera any more
    if image.mode.startswith("I;16"):  # convert("RGB") would clip 16-bit grey instead of scaling it
        image = pillow.fromarray((np.asarray(image) >> 8).astype(np.uint8))
    elif image.mode in ("RGBA", "LA", "PA") or "transparency" in image.info:
        image = image.convert("RGBA")
        image = pillow.alpha_composite(pillow.new("RGBA", image.size, "white"), image)
    image = image.convert("RGB")
    return fit(image, min(*image.size, side))


class UploadStore(Memory["tuple[Image, ...]"]):
    """The last few uploads, each under a random name that only its sender knows. Nothing is written to disk."""

    def __init__(self, limits: Limits) -> None:
        # A picture counts as stored_side^2 pixels whatever its size, so that `images` is their number.
        least = limits.stored_side**2
        super().__init__(
            limits.images * least, lambda frames: max(least, sum(frame.width * frame.height for frame in frames))
        )

    def add(self, frames: tuple[Image, ...]) -> str:
        """Keep a picture or clip and return its name; what was not used for longest makes room."""
        name = f"upload-{secrets.token_urlsafe(16)}"
        self.put(name, frames)
        return name
