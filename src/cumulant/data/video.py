"""Videos as sequences of frames: encoded images in a table, or clips that PyAV decodes."""

from __future__ import annotations

import io
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..optional import needed
from .clips import Choice
from .decode import check_plain, fit, open_image, to_tensor
from .part import DecodeError
from .rows import Encoded, Rows, encoded

# By container, with FFmpeg's names of those that the explorer opens too.
CONTAINERS = {
    "mp4": (".mp4", ".m4v", ".mov"),
    "matroska": (".mkv", ".webm"),
    "others": (".avi", ".mpg", ".mpeg", ".wmv"),
}
VIDEO_SUFFIXES = frozenset(suffix for suffixes in CONTAINERS.values() for suffix in suffixes)


class FrameVideos:
    """Videos whose frames are encoded images in a table: `picks[i]` are the rows of video i, one a frame in the order
    of time, or with `listed` the one row that holds the list of them."""

    separate = True

    def __init__(
        self,
        rows: Rows,
        picks: Sequence[NDArray[np.int64]],
        column: str,
        labels: Tensor,
        names: Sequence[str] | None,
        *,
        listed: bool,
    ) -> None:
        self.rows, self.picks, self.column, self.labels, self.names = rows, picks, column, labels, names
        self.listed = listed

    def name(self, index: int) -> str:
        return self._named(index, int(self.picks[index][0]))

    def contents(self) -> Iterable[bytes]:
        return (np.concatenate(self.picks).tobytes(), *self.rows.contents(self.column))

    def length(self, index: int) -> int:
        return len(self._frames(index))

    def ratio(self, index: int) -> float:
        row, cell = self._frames(index)[0]
        cell = cell if self.listed else self.rows.cell(row, self.column)
        image = open_image(encoded(cell, self.rows.folder(row), self.name(index)), 1 << 20, self.name(index))
        return image.width / image.height

    def read(self, index: int, choose: Choice, size: int, crop: int, crops: int) -> Tensor:
        frames = self._frames(index)
        if not frames:
            raise DecodeError(self.name(index), "a video without frames")
        pictures: dict[int, Tensor] = {}
        chosen = choose(len(frames)).tolist()
        for number in sorted(set(chosen)):
            row, cell = frames[number]
            name = f"{self.name(index)} frame {number}" if self.listed else self._named(index, row)
            cell = cell if self.listed else self.rows.cell(row, self.column)
            content = encoded(cell, self.rows.folder(row), name)
            pictures[number] = to_tensor(fit(open_image(content, size, name), size, crop, crops))
        return torch.stack([pictures[number] for number in chosen])

    def _frames(self, index: int) -> list[tuple[int, Any]]:
        """The row of each frame and, of a list, its cell."""
        rows = self.picks[index].tolist()
        if self.listed:
            return [(rows[0], cell) for cell in self.rows.cell(rows[0], self.column) or []]
        return [(row, None) for row in rows]

    def _named(self, index: int, row: int) -> str:
        place = self.rows.name(row)
        return f"{self.names[index]} ({place})" if self.names is not None else place


class EncodedVideos(Encoded):
    """Video files, or cells of a table that hold one each."""

    separate = False

    def length(self, index: int) -> int:
        return counted_frames(self.items.encoded(index), self.name(index))

    def ratio(self, index: int) -> float:
        with open_video(self.items.encoded(index), self.name(index)) as container:
            stream = container.streams.video[0]
            return stream.width / stream.height if stream.width and stream.height else 1.0

    def read(self, index: int, choose: Choice, size: int, crop: int, crops: int) -> Tensor:
        return read_clip(self.items.encoded(index), choose, size, crop, crops, self.name(index))


def read_clip(video: bytes | Path, choose: Choice, size: int, crop: int, crops: int, name: str) -> Tensor:
    """The chosen frames of an encoded video, uint8 (T, 3, size, size).

    The video is decoded to its end, since headers lie about the number of frames; only chosen frames are converted
    and resized. One pass when the header is right, two otherwise.
    """
    declared = declared_frames(video, name)
    wanted = set(choose(declared).tolist()) if declared else set()
    pictures, total = decode_frames(video, wanted, size, crop, crops, name)
    if total == 0:
        raise DecodeError(name, "a video without frames")
    if 2 * total < declared:
        raise DecodeError(name, f"only {total} of {declared} frames can be decoded")
    chosen = choose(total).tolist()
    if not pictures.keys() >= set(chosen):
        pictures, _ = decode_frames(video, set(chosen), size, crop, crops, name)
    return torch.stack([pictures[number] for number in chosen])


def decode_frames(
    video: bytes | Path, wanted: set[int], size: int, crop: int, crops: int, name: str
) -> tuple[dict[int, Tensor], int]:
    """The wanted frames by number, and how many frames there are up to the end or the first damage."""
    pictures: dict[int, Tensor] = {}
    total = 0
    with open_video(video, name) as container:
        stream = container.streams.video[0]
        stream.codec_context.thread_count = 1  # many clips are decoded side by side already
        try:
            for frame in container.decode(stream):
                if total in wanted:
                    pictures[total] = to_tensor(fit(frame.to_image(), size, crop, crops))
                total += 1
        except pyav().FFmpegError as error:
            if total == 0:
                raise DecodeError.of(name, error) from error
    return pictures, total


def declared_frames(video: bytes | Path, name: str) -> int:
    """Frames according to the header; 0 where it does not say."""
    with open_video(video, name) as container:
        return int(container.streams.video[0].frames)


def counted_frames(video: bytes | Path, name: str) -> int:
    """As `declared_frames`; where the header does not say (mkv, webm, mpg), the packets are counted, not decoded."""
    declared = declared_frames(video, name)
    if declared:
        return declared
    with open_video(video, name) as container:
        try:
            return sum(1 for packet in container.demux(container.streams.video[0]) if packet.size)
        except pyav().FFmpegError as error:
            raise DecodeError.of(name, error) from error


def open_video(video: bytes | Path, name: str) -> Any:
    av = pyav()
    if isinstance(video, Path):
        check_plain(video, name)
    try:
        container = av.open(io.BytesIO(video) if isinstance(video, bytes) else str(video))
    except (av.FFmpegError, OSError) as error:
        raise DecodeError.of(name, error) from error
    if not container.streams.video:
        container.close()
        raise DecodeError(name, "no video stream in this file")
    return container


def pyav() -> Any:
    with needed("decoding video needs PyAV", "video"):
        import av
    return av
