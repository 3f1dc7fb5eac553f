"""What the explorer answers with: it finds model and image, computes, and remembers for the next click.

The first question about an image runs the model once and keeps its queries and keys; every click after that computes
the rows that it asks for and no more. Shape legend: N layers, H heads, L tokens, K classes.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import explain, zoo
from ..attention import scores
from ..explain.importance import feature_change
from . import looking
from .explorable import Example, Explorable, frames_of
from .limits import Limits
from .memory import Memory
from .metrics import METRICS, describe
from .problems import NotFoundError
from .uploads import UploadStore, read_upload

if TYPE_CHECKING:
    from PIL.Image import Image

Pair = tuple[int, int]
LENS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("cumulant1", "order 1: mean", {"order": 1}),
    ("cumulant2", "order 2", {"order": 2}),
    ("cumulant3", "order 3", {"order": 3}),
    ("cumulant3_full", "order 3, full", {"order": 3, "full": True}),
)
ANSWERS_BYTES = 2**25


class Engine:
    """Models, example images, uploads and a bounded memory of passes.

    One pass at a time per model: switching heads off changes the model while it runs. Rows need no lock.
    """

    def __init__(self, models: Mapping[str, Explorable], examples: Sequence[Example], limits: Limits) -> None:
        if not models:
            raise ValueError("models must hold at least one model, got none")
        self.models, self.limits = dict(models), limits
        self.examples = {f"example-{number}": example for number, example in enumerate(examples)}
        self.uploads = UploadStore(limits)
        # A decoded picture may take 100 MB for a moment, and the thread that did it keeps them: two do it for all.
        self._decoders = ThreadPoolExecutor(2, thread_name_prefix="decoder")
        self.facts = {name: looking.facts(one.model, one.blank()) for name, one in self.models.items()}
        self._locks = {name: threading.Lock() for name in self.models}
        self._recordings: Memory[explain.Recording] = Memory(limits.recorded_bytes)
        self._answers: Memory[dict[str, Tensor]] = Memory(ANSWERS_BYTES)

    def model(self, name: str) -> Explorable:
        if name not in self.models:
            raise NotFoundError("unknown_model", f"no model {name!r}; there are {', '.join(self.models)}")
        return self.models[name]

    def frames(self, image: str) -> tuple[Image, ...]:
        """The frames of an example or upload; a picture has one."""
        if image in self.examples:
            return frames_of(self.examples[image].picture)
        frames = self.uploads.get(image)
        if frames is None:
            raise NotFoundError(
                "unknown_image", f"no image {image!r}; uploads are kept for a while only: send it again"
            )
        return frames

    def seen(self, image: str, name: str | None, time: int) -> Image:
        """One frame as a model sees it at a step in time of its tokens (the middle one, where a step covers several);
        or as it is kept."""
        frames = self.frames(image)
        count = len(frames) if name is None else self.facts[self.checked(name)].times
        if time >= count:
            raise NotFoundError("unknown_time", f"time must be below {count}, got {time}")
        if name is not None:
            frames = self.model(name).seen(frames)
        return frames[(2 * time + 1) * len(frames) // (2 * count)]

    def receive(self, content: bytes, invert: bool) -> tuple[str, tuple[Image, ...]]:
        """Decode an upload and keep it: its name and frames."""
        frames = self._decoders.submit(read_upload, content, self.limits, invert=invert).result()
        return self.uploads.add(frames), frames

    def check_whole(self, name: str) -> None:
        """Raises NotFoundError where all maps of an image at once would take too much memory."""
        weights, most = self.facts[name].weights, self.limits.whole_maps_at_once
        if weights > most:
            raise NotFoundError("too_many_tokens", f"{name} has {weights:,} weights; at most {most:,} are summed up")

    def checked(self, name: str, off: Sequence[Pair] = (), query: int = 0, layer: int = 0) -> str:
        """The name; raises NotFoundError for a model, head, layer or token that is not there."""
        self.model(name)
        facts = self.facts[name]
        for which, value, count in (("query", query, facts.tokens), ("layer", layer, facts.layers)):
            if value >= count:
                raise NotFoundError(f"unknown_{which}", f"{which} must be below {count} for {name}, got {value}")
        for pair in off:
            if pair[0] >= facts.layers or pair[1] >= facts.heads:
                raise NotFoundError(
                    "unknown_head",
                    f"{name} has {facts.layers} layers of {facts.heads} heads, got layer {pair[0]} head {pair[1]}",
                )
        return name

    def recording(self, name: str, image: str, off: Sequence[Pair] = ()) -> explain.Recording:
        """The pass of a model over an image with these heads off: made by whoever asks first, and kept."""
        self.checked(name, off)
        key = (name, image, tuple(sorted(set(off))))
        found = self._recordings.get(key)
        if found is None:
            one, frames = self.model(name), self.frames(image)
            with self._locks[name]:
                found = self._recordings.get(key)  # another question may have made it while this one waited
                if found is None:
                    found = looking.record(one.model, one.images(frames), sorted(set(off)))
                    self._recordings.put(key, found, found.nbytes)
        return found

    def row(self, name: str, image: str, query: int, off: Sequence[Pair] = ()) -> Tensor:
        """Signed weights (N, H, L) of one query. Cost: N H L D, without a pass once the image is known."""
        self.checked(name, off, query)
        return looking.row(self.recording(name, image, off), query)

    def predict(self, name: str, image: str, off: Sequence[Pair]) -> tuple[Tensor, Tensor] | None:
        """Class probabilities (K,) with all heads on, and with these off; None for a model without a classifier."""
        self.checked(name, off)
        if not self.model(name).classes:
            return None
        before, after = (self.recording(name, image, heads).output for heads in ((), off))
        return looking.probabilities(before), looking.probabilities(after)

    def answer(self, name: str, image: str, off: Sequence[Pair]) -> dict[str, Tensor]:
        """Probabilities and features with these heads off, for those who will not ask for maps."""
        key = (name, image, tuple(sorted(set(off))))
        found = self._answers.get(key)
        if found is None:
            one, frames = self.model(name), self.frames(image)
            with self._locks[name]:
                found = looking.answer(one.model, one.images(frames), sorted(set(off)), bool(one.classes))
            self._answers.put(key, found, sum(value.nbytes for value in found.values()))
        return found

    def importance(self, name: str, image: str, layer: int, off: Sequence[Pair]) -> dict[str, list[float]]:
        """For each head of a layer, switched off alone: "divergence" of the answer and "drop" of the predicted class
        for a classifier, and "feature", 1 - cosine of the features."""
        self.checked(name, off, layer=layer)
        before = self.answer(name, image, off)
        after = [self.answer(name, image, [*off, (layer, head)]) for head in range(self.facts[name].heads)]
        found: dict[str, list[float]] = {}
        if "probabilities" in before:
            p = before["probabilities"]
            top = int(p.argmax())
            found["divergence"] = [float(explain.jensen_shannon(p, a["probabilities"])) for a in after]
            found["drop"] = [float(p[top] - a["probabilities"][top]) for a in after]
        if "features" in before:
            found["feature"] = [float(feature_change(before["features"], a["features"])) for a in after]
        return found

    def summary(self, name: str, image: str, off: Sequence[Pair]) -> tuple[list[dict[str, Any]], Tensor]:
        """Every metric of `explain.summary` by layer and head with its name for people, and ring profiles."""
        self.checked(name, off)
        self.check_whole(name)
        values, profile = looking.summary(self.recording(name, image, off))
        facts = self.facts[name]
        grid = facts.grid if facts.times == 1 else (facts.times, *facts.grid)
        order = [*METRICS, *(metric for metric in values if metric not in METRICS)]
        told = [metric for metric in order if metric in values and not bool(values[metric].isnan().all())]
        return [describe(metric, values[metric], facts.tokens, grid) for metric in told], profile

    def flow(self, name: str, image: str, query: int, kind: str, off: Sequence[Pair]) -> Tensor:
        """What reaches one token through all layers, (L,): "rollout", or "relevance" for the predicted class."""
        self.checked(name, off, query)
        self.check_whole(name)
        if kind == "rollout":
            return explain.rollout(self.recording(name, image, off).captured(), sign="signed")[0, query].cpu()
        one = self.model(name)
        if not one.classes:
            raise NotFoundError("no_relevance", f"{name} has no relevance: it has no classifier")
        images = one.images(self.frames(image))
        with self._locks[name]:
            try:
                with explain.head_off(one.model, off):
                    return explain.relevance(one.model, images)[0, query].cpu()
            except ValueError as error:  # layers with a gate or a norm after mixing, or that see parts of a clip
                raise NotFoundError("no_relevance", f"{name} has no relevance: {error}") from error

    def lens(
        self, name: str, image: str, query: int, layer: int, temperature: float, off: Sequence[Pair]
    ) -> tuple[Tensor, list[tuple[str, str, Tensor]]]:
        """Logits (H, L) of one query in one layer, and the weights (H, L) that each order and softmax make of them."""
        self.checked(name, off, query, layer)
        if not self.facts[name].lens:
            raise NotFoundError(
                "no_lens", f"{name} has layers that see parts of a clip; other orders are not tried there"
            )
        query_key = self.recording(name, image, off).query_key(layer)
        q, k = (z[0].float().cpu() for z in query_key[:2])
        scale = temperature * query_key[2]
        asked = q[:, query : query + 1]
        maps = [(key, title, scores(asked, k, scale=scale, **options)[:, 0]) for key, title, options in LENS]
        softmax = zoo.get("softmax").scores
        assert softmax is not None
        maps.append(("softmax", "softmax", softmax(asked, k, scale=scale)[:, 0]))
        return (asked @ k.mT)[:, 0] * scale, maps
