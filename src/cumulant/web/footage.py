"""Short videos of strangers, decoded with PyAV in a bounded way: few containers, few codecs, no other file opened."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from ..data.decode import fit
from .limits import Limits
from .problems import UploadError

if TYPE_CHECKING:
    from PIL.Image import Image

# FFmpeg would guess the format by its content, and playlists among them name other files and addresses: the container
# is named to it instead, by the bytes at its beginning. No AVI: a damaged one made FFmpeg take 2 GB for a moment.
CODECS = frozenset({"h264", "hevc", "vp8", "vp9", "av1", "libdav1d", "libvpx", "libvpx-vp9", "mpeg4"})
CLOSED = {"protocol_whitelist": "none", "enable_drefs": "0"}  # no file or address named inside is opened


def container_of(content: bytes) -> str | None:
    """FFmpeg's name of the video container that these bytes begin; None for anything else."""
    if content[4:8] == b"ftyp":
        return "mp4"
    if content.startswith(b"\x1a\x45\xdf\xa3"):
        return "matroska"
    return None


class Decimated:
    """Frames kept while they are decoded, spread evenly over those seen, in bounded memory.

    Every step-th is kept; whenever there are twice as many as wanted, every other goes and the step doubles.
    """

    def __init__(self, limits: Limits) -> None:
        self.limits, self.step, self.seen, self.pixels = limits, 1, 0, 0
        self._kept: list[Image] = []
        self._end = time.monotonic() + limits.decoding_seconds

    def wants(self, width: int, height: int) -> bool:
        """Whether a further frame of that size is within the limits; a frame that is too large is an error."""
        _check_frame(width, height, self.limits)
        self.pixels += width * height
        return self.seen == 0 or (
            self.seen < self.limits.decoded_frames
            and self.pixels <= self.limits.decoded_pixels
            and time.monotonic() < self._end
        )

    def add(self, picture: Callable[[], Image]) -> None:
        if self.seen % self.step == 0:
            self._kept.append(picture())
            if len(self._kept) == 2 * self.limits.clip_frames:
                self._kept, self.step = self._kept[::2], 2 * self.step
        self.seen += 1

    def frames(self) -> tuple[Image, ...]:
        """At most `clip_frames` of them, evenly spread."""
        return evenly(self._kept, min(len(self._kept), self.limits.clip_frames))


def evenly(frames: list[Image] | tuple[Image, ...], count: int) -> tuple[Image, ...]:
    """`count` of these frames spread evenly, each the middle of its share; all of them where that is their number."""
    return tuple(frames[(2 * i + 1) * len(frames) // (2 * count)] for i in range(count))


def read_video(content: bytes, container: str, limits: Limits) -> tuple[Image, ...]:
    """Frames of an encoded video spread evenly over its beginning, as far as the limits reach."""
    try:
        import av
    except ImportError as error:
        raise UploadError(
            "this explorer reads no video files: its machine lacks PyAV; send an animated GIF or WebP"
        ) from error
    kept = Decimated(limits)
    try:
        video: Any = av.open(io.BytesIO(content), format=container, options=CLOSED)
        with video as opened:
            stream = _stream(opened, limits)
            for frame in opened.decode(stream):
                if not kept.wants(frame.width, frame.height):
                    break
                kept.add(lambda frame=frame: _square(frame, limits.clip_side))  # type: ignore[misc]
    except UploadError:
        raise
    except Exception as error:  # FFmpeg has many kinds; frames before the damage still count
        if not kept.seen:
            raise UploadError("the video is damaged, incomplete or of a kind that cannot be read", 422) from error
    if not kept.seen:
        raise UploadError("the video has no frames", 422)
    return kept.frames()


def _stream(opened: Any, limits: Limits) -> Any:
    if not opened.streams.video:
        raise UploadError("the file has no video in it")
    stream = opened.streams.video[0]
    context = stream.codec_context
    if context.name not in CODECS:
        raise UploadError(f"videos of codec {context.name} are not read; expected H.264, HEVC, VP8, VP9, AV1 or MPEG-4")
    _check_frame(context.width, context.height, limits)
    context.thread_count = 1
    # Frames may grow on the way: FFmpeg refuses before it allocates.
    context.options = {"max_pixels": str(limits.frame_pixels)}
    return stream


def _check_frame(width: int, height: int, limits: Limits) -> None:
    if width * height > limits.frame_pixels:
        raise UploadError(f"a frame must have at most {limits.frame_pixels:,} pixels, got {width} x {height}", 413)


def _square(frame: Any, side: int) -> Image:
    """The centre square of a decoded frame, at most `side` wide; reduced while its colours are converted."""
    factor = max(1, min(frame.width, frame.height) // (2 * side))
    picture = frame.to_image(width=frame.width // factor, height=frame.height // factor)
    return fit(picture, min(*picture.size, side))
