"""What the explorer answers with: it finds model and image, computes under a lock, and remembers for the next click.

Shape legend: N layers, H heads, L tokens, K classes.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from torch import Tensor

from .. import zoo
from ..attention import scores
from . import looking
from .explorable import Example, Explorable
from .limits import Limits
from .metrics import METRICS, describe
from .uploads import UploadStore, read_picture

if TYPE_CHECKING:
    from PIL.Image import Image

Pair = tuple[int, int]
LENS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("cumulant1", "order 1: mean", {"order": 1}),
    ("cumulant2", "order 2", {"order": 2}),
    ("cumulant3", "order 3", {"order": 3}),
    ("cumulant3_full", "order 3, full", {"order": 3, "full": True}),
)


class NotFoundError(LookupError):
    """A model, image, layer, head or token that is not there; `kind` is one word for programs."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message


class Engine:
    """Models, example images, uploads and a bounded memory of maps.

    One computation at a time per model: switching heads off changes the model while it runs.
    """

    def __init__(self, models: Mapping[str, Explorable], examples: Sequence[Example], limits: Limits) -> None:
        if not models:
            raise ValueError("models must hold at least one model, got none")
        self.models, self.limits = dict(models), limits
        self.examples = {f"example-{number}": example for number, example in enumerate(examples)}
        self.uploads = UploadStore(limits.images)
        self._decoders = threading.BoundedSemaphore(2)  # a decoded picture may take 100 MB for a moment
        self.facts = {name: looking.facts(one.model) for name, one in self.models.items()}
        self.lens_able = {name: looking.can_lens(one.model) for name, one in self.models.items()}
        self._locks = {name: threading.Lock() for name in self.models}
        self._maps: OrderedDict[tuple[Any, ...], Tensor] = OrderedDict()
        self._maps_lock = threading.Lock()

    def model(self, name: str) -> Explorable:
        if name not in self.models:
            raise NotFoundError("unknown_model", f"no model {name!r}; there are {', '.join(self.models)}")
        return self.models[name]

    def picture(self, image: str) -> Image:
        if image in self.examples:
            return self.examples[image].picture
        picture = self.uploads.get(image)
        if picture is None:
            raise NotFoundError(
                "unknown_image", f"no image {image!r}; uploads are kept for a while only: send it again"
            )
        return picture

    def receive(self, content: bytes, invert: bool) -> tuple[str, Image]:
        """Decode an upload and keep it: its name and picture."""
        with self._decoders:
            picture = read_picture(content, self.limits, invert=invert)
        return self.uploads.add(picture), picture

    def tokens(self, name: str) -> int:
        """L, the prefix included."""
        facts = self.facts[name]
        return facts["prefix"] + facts["grid"][0] * facts["grid"][1]

    def weights(self, name: str) -> int:
        """Weights in all maps of one image."""
        return self.facts[name]["layers"] * self.facts[name]["heads"] * self.tokens(name) ** 2

    def check_whole(self, name: str) -> None:
        """Raises NotFoundError where all maps of an image at once would take too much memory."""
        most = self.limits.whole_maps_at_once
        if self.weights(name) > most:
            raise NotFoundError(
                "too_many_tokens", f"{name} has {self.weights(name):,} weights; at most {most:,} are summed up"
            )

    def check(self, name: str, off: Sequence[Pair] = (), query: int = 0, layer: int = 0) -> None:
        """Raises NotFoundError for a head, layer or token that the model does not have."""
        self.model(name)
        facts = self.facts[name]
        layers, heads, tokens = facts["layers"], facts["heads"], self.tokens(name)
        for which, value, count in (("query", query, tokens), ("layer", layer, layers)):
            if value >= count:
                raise NotFoundError(f"unknown_{which}", f"{which} must be below {count} for {name}, got {value}")
        for pair in off:
            if pair[0] >= layers or pair[1] >= heads:
                raise NotFoundError(
                    "unknown_head", f"{name} has {layers} layers of {heads} heads, got layer {pair[0]} head {pair[1]}"
                )

    def row(self, name: str, image: str, query: int, off: Sequence[Pair] = ()) -> Tensor:
        """Signed weights (N, H, L) of one query. A second query of the same image costs nothing for small models."""
        self.check(name, off, query)
        whole = self.weights(name) <= self.limits.whole_maps
        key = (name, image, tuple(sorted(set(off))), None if whole else query)
        found = self._remembered(key)
        if found is None:
            one, picture = self.model(name), self.picture(image)
            with self._locks[name]:
                found = looking.rows(one.model, one.images(picture), off, None if whole else query)
            self._remember(key, found)
        return found[:, :, query if whole else 0]

    def predict(self, name: str, image: str, off: Sequence[Pair]) -> tuple[Tensor, Tensor]:
        """Class probabilities (K,) with all heads on, and with these off."""
        return self.probabilities(name, image, ()), self.probabilities(name, image, off)

    def probabilities(self, name: str, image: str, off: Sequence[Pair]) -> Tensor:
        """Class probabilities (K,) with these heads off."""
        self.check(name, off)
        key = ("probabilities", name, image, tuple(sorted(set(off))))
        found = self._remembered(key)
        if found is None:
            one, picture = self.model(name), self.picture(image)
            with self._locks[name]:
                found = looking.probabilities(one.model, one.images(picture), sorted(set(off)))
            self._remember(key, found)
        return found

    def importance(self, name: str, image: str, layer: int, off: Sequence[Pair]) -> tuple[list[float], list[float]]:
        """For each head of a layer, switched off alone: divergence of the answer, loss of the predicted class."""
        self.check(name, off, layer=layer)
        before = self.probabilities(name, image, off)
        top = int(before.argmax())
        heads = range(self.facts[name]["heads"])
        after = [self.probabilities(name, image, [*off, (layer, head)]) for head in heads]
        return [looking.divergence(before, p) for p in after], [float(before[top] - p[top]) for p in after]

    def summary(self, name: str, image: str, off: Sequence[Pair]) -> list[dict[str, Any]]:
        """Every metric of `explain.summary` by layer and head, with its name for people."""
        self.check(name, off)
        self.check_whole(name)
        one = self.model(name)
        images = one.images(self.picture(image))
        with self._locks[name]:
            values = looking.summary(one.model, images, off)
        tokens, grid = self.tokens(name), self.facts[name]["grid"]
        order = [*METRICS, *(metric for metric in values if metric not in METRICS)]
        told = [metric for metric in order if metric in values and not bool(values[metric].isnan().all())]
        return [describe(metric, values[metric], tokens, grid) for metric in told]

    def flow(self, name: str, image: str, query: int, kind: str, off: Sequence[Pair]) -> Tensor:
        """What reaches one token through all layers, (L,): "rollout", or "relevance" for the predicted class."""
        self.check(name, off, query)
        self.check_whole(name)
        one = self.model(name)
        images = one.images(self.picture(image))
        with self._locks[name]:
            if kind == "rollout":
                return looking.rollout(one.model, images, off)[query]
            try:
                return looking.relevance(one.model, images, off)[query]
            except ValueError as error:  # layers with a gate or a norm after mixing
                raise NotFoundError("no_relevance", f"{name} has no relevance: {error}") from error

    def lens(
        self, name: str, image: str, query: int, layer: int, temperature: float, off: Sequence[Pair]
    ) -> tuple[Tensor, list[tuple[str, str, Tensor]]]:
        """Logits (H, L) of one query in one layer, and the weights (H, L) that each order and softmax make of them."""
        self.check(name, off, query, layer)
        if not self.lens_able[name]:
            raise NotFoundError("no_lens", f"{name} does not show its queries and keys")
        one = self.model(name)
        images = one.images(self.picture(image))
        with self._locks[name]:
            q, k = looking.projected(one.model, images, off, layer)
        scale = temperature * q.shape[-1] ** -0.5
        asked = q[:, query : query + 1]
        maps = [(key, title, scores(asked, k, scale=scale, **options)[:, 0]) for key, title, options in LENS]
        softmax = zoo.get("softmax").scores
        assert softmax is not None
        maps.append(("softmax", "softmax", softmax(asked, k, scale=scale)[:, 0]))
        return (asked @ k.mT)[:, 0] * scale, maps

    def _remembered(self, key: tuple[Any, ...]) -> Tensor | None:
        with self._maps_lock:
            found = self._maps.get(key)
            if found is not None:
                self._maps.move_to_end(key)
            return found

    def _remember(self, key: tuple[Any, ...], maps: Tensor) -> None:
        with self._maps_lock:
            self._maps[key] = maps
            while len(self._maps) > 1 and sum(m.numel() for m in self._maps.values()) > self.limits.cached_weights:
                self._maps.popitem(last=False)
