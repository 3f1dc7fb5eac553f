"""Which frames of a video make a clip: random starts for training, several views for evaluation.

T: frames of a clip, F: frames of a video, n: clips.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..call import check_count
from .identity import tensor_contents
from .part import DecodeError

Choice = Callable[[int], NDArray[np.int64]]
"""From the number of frames of a video to the numbers (T,) of those wanted."""


@dataclass(frozen=True)
class ClipSampling:
    """A clip is `frames` frames, every `stride`-th. A video that is too short is run through again from its start.

    Training starts anywhere the clip fits. Evaluation takes `views` starts spread evenly from the first to the last
    possible one (a single view: the middle) times `crops` squares along the long side of the picture.
    """

    frames: int = 16
    stride: int = 2
    views: int = 1
    crops: int = 1

    def __post_init__(self) -> None:
        for name in ("frames", "stride", "views", "crops"):
            check_count(name, getattr(self, name))

    def last_start(self, total: NDArray[np.int64]) -> NDArray[np.int64]:
        return np.maximum(total - (self.frames - 1) * self.stride - 1, 0)

    def training(self, total: NDArray[np.int64], seeds: NDArray[np.int64]) -> NDArray[np.int64]:
        """Frame numbers (n, T) for videos of `total` (n,) frames; the start is seed modulo the number of starts."""
        return self._from(seeds % (self.last_start(total) + 1), total)

    def evaluation(self, total: NDArray[np.int64], view: int = 0) -> NDArray[np.int64]:
        """Frame numbers (n, T) of the view-th of `views` clips."""
        share = 0.5 if self.views == 1 else view / (self.views - 1)
        return self._from(np.floor(self.last_start(total) * share + 0.5).astype(np.int64), total)

    def _from(self, start: NDArray[np.int64], total: NDArray[np.int64]) -> NDArray[np.int64]:
        return (start[..., None] + np.arange(self.frames) * self.stride) % total[..., None]


class Videos(Protocol):
    """Videos somewhere: what a `ClipPart` reads from."""

    labels: Tensor
    separate: bool
    """Whether a damaged frame leaves the others of its video readable."""

    def name(self, index: int) -> str: ...

    def contents(self) -> Iterable[bytes]:
        """What tells these videos from others, see `identity`."""
        ...

    def length(self, index: int) -> int:
        """Frames of the video, exact or as its header says: for estimates of memory."""
        ...

    def ratio(self, index: int) -> float:
        """Width / height of its frames."""
        ...

    def read(self, index: int, choose: Choice, size: int, crop: int, crops: int) -> Tensor:
        """The chosen frames, uint8 (T, 3, size, size); `crop` and `crops` as of `decode.fit`."""
        ...


class TensorVideos:
    """Videos in memory, each uint8 (F, 3, size, size): your own arrays, read at that size and uncropped."""

    separate = False

    def __init__(
        self, videos: Sequence[Tensor], labels: Tensor, title: str = "tensor", ratios: Tensor | None = None
    ) -> None:
        for i, video in enumerate(videos):
            if video.dtype != torch.uint8 or video.ndim != 4 or video.shape[1] != 3 or not len(video):
                raise ValueError(
                    "every video must be uint8 (frames, 3, height, width) with at least one frame, "
                    f"got {video.dtype} {tuple(video.shape)} for video {i}"
                )
        if labels.shape != (len(videos),) or labels.dtype != torch.int64:
            raise ValueError(f"labels must be int64 ({len(videos)},), got {labels.dtype} {tuple(labels.shape)}")
        self.videos, self.labels, self.title, self.ratios = videos, labels, title, ratios

    def name(self, index: int) -> str:
        return f"{self.title}[{index}]"

    def contents(self) -> Iterable[bytes]:
        return tensor_contents(self.videos)

    def length(self, index: int) -> int:
        return len(self.videos[index])

    def ratio(self, index: int) -> float:
        return 1.0 if self.ratios is None else float(self.ratios[index])

    def read(self, index: int, choose: Choice, size: int, crop: int, crops: int) -> Tensor:
        video = self.videos[index]
        if video.shape[-2:] != (size, size) or crops > 1 or (crops == 1 and self.ratio(index) != 1):
            asked = f"{crops} crops of size {size}"
            raise DecodeError(self.name(index), f"its frames are {tuple(video.shape[-2:])} and kept whole, not {asked}")
        return video[torch.from_numpy(choose(len(video)))]


class ClipPart:
    """One clip a video (training: `jitter`), or views x crops clips in a row of each video (evaluation)."""

    def __init__(self, videos: Videos, sampling: ClipSampling, *, jitter: bool) -> None:
        self.videos, self.jitter = videos, jitter
        self.sampling = replace(sampling, views=1, crops=1) if jitter else sampling
        self.views = self.sampling.views * self.sampling.crops
        self.labels = videos.labels.repeat_interleave(self.views)

    def __len__(self) -> int:
        return len(self.labels)

    def name(self, index: int) -> str:
        return self.videos.name(index // self.views)

    def contents(self) -> Iterable[bytes]:
        return self.videos.contents()

    def decode(self, index: int, size: int, seed: int | None = None) -> Tensor:
        """uint8 (3, T, size, size). View v, crop c of video i is item (i * views + v) * crops + c."""
        view, crop = divmod(index % self.views, self.sampling.crops)
        return self._read(index, size, seed, view, crop, self.sampling.crops)

    def decode_whole(self, index: int, size: int, seed: int | None = None) -> tuple[Tensor, float]:
        """As `decode`, with the frames stretched to the square, and width / height of them."""
        view = index % self.views // self.sampling.crops
        return self._read(index, size, seed, view, 0, 0), self.videos.ratio(index // self.views)

    def _read(self, index: int, size: int, seed: int | None, view: int, crop: int, crops: int) -> Tensor:
        def choose(total: int) -> NDArray[np.int64]:
            frames = np.asarray(total)
            if seed is None or not self.jitter:
                return self.sampling.evaluation(frames, view)
            return self.sampling.training(frames, np.asarray(seed))

        return self.videos.read(index // self.views, choose, size, crop, crops).transpose(0, 1).contiguous()

    def whole(self, index: int, size: int, crops: int = 1) -> Tensor:
        """uint8 (F, 3, size, size): what is kept in memory when clips start anywhere."""
        return self.videos.read(index, np.arange, size, 0, crops)

    def readable(self, index: int, size: int, crops: int = 1) -> tuple[Tensor, dict[int, str]]:
        """As `whole`, but damaged ones are black and told by number, with the reason: a clip beside them is
        good."""
        try:
            return self.whole(index, size, crops), {}
        except DecodeError:
            if not self.videos.separate:
                raise
        frames = torch.zeros(self.videos.length(index), 3, size, size, dtype=torch.uint8)
        damaged: dict[int, str] = {}
        for number in range(len(frames)):
            try:
                frames[number] = self.videos.read(index, lambda _, n=number: np.asarray([n]), size, 0, crops)[0]  # type: ignore[misc]
            except DecodeError as error:
                damaged[number] = error.why
        if len(damaged) == len(frames):
            raise DecodeError(self.videos.name(index), next(iter(damaged.values()), "a video without frames"))
        return frames, damaged
