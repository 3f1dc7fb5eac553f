"""What the explorer answers with: it finds model and image, computes, and remembers for the next click.

The first question about an image runs the model once and keeps its queries and keys; every click after that computes
the rows that it asks for and no more. Shape legend: N layers, H heads, L tokens, K classes.
"""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from torch import Tensor

from .. import explain, zoo
from ..attention import scores
from ..explain.importance import answers, feature_change
from ..explain.patterns import describe
from . import looking, schemas
from .dial import PaintingDial, Subject, address, dial_facts
from .explorable import Example, Explorable, frames_of
from .limits import Limits
from .memory import Memory
from .metrics import described, plain
from .problems import BusyError, NotFoundError
from .uploads import UploadStore, read_upload

if TYPE_CHECKING:
    from PIL.Image import Image

Made = TypeVar("Made")
LENS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ("cumulant1", "order 1: mean", {"order": 1}),
    ("cumulant2", "order 2", {"order": 2}),
    ("cumulant3", "order 3", {"order": 3}),
    ("cumulant3_full", "order 3, full", {"order": 3, "full": True}),
)
ANSWERS_BYTES = 2**25
SHOWN_CLASSES = 5


class Engine:
    """Models, example images, uploads and a bounded memory of passes; each question of the interface is a method.

    One pass at a time per model: switching heads off changes the model while it runs. Rows need no lock.
    """

    def __init__(
        self,
        models: Mapping[str, Explorable],
        examples: Sequence[Example],
        limits: Limits,
        dials: Mapping[str, Subject] | None = None,
    ) -> None:
        if not models:
            raise ValueError("models must hold at least one model, got none")
        self.models, self.limits = dict(models), limits
        self.examples = {f"example-{number}": example for number, example in enumerate(examples)}
        self.uploads = UploadStore(limits)
        # A decoded picture may take 100 MB for a moment, and the thread that did it keeps them: two do it for all.
        self._decoders = ThreadPoolExecutor(2, thread_name_prefix="decoder")
        self._decoding = 0
        self.facts = {name: looking.facts(name, one) for name, one in self.models.items()}
        painters = {
            name: one.painter
            for name, one in self.models.items()
            if one.painter and self.facts[name].attention == "softmax"
        }
        self.dials: dict[str, Subject] = {**(dials or {}), **{n: PaintingDial(p, n) for n, p in painters.items()}}
        self.dial_facts = [dial_facts(name, one) for name, one in self.dials.items()]
        self._locks = {name: threading.Lock() for name in self.models}
        self._recordings = Memory[explain.Recording](limits.recorded_bytes, lambda one: one.nbytes)
        self._answers = Memory[dict[str, Tensor]](ANSWERS_BYTES, lambda one: sum(x.nbytes for x in one.values()))

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
        one = None if name is None else self.model(name)
        count = len(frames) if name is None else self.facts[name].times
        if time >= count:
            raise NotFoundError("unknown_time", f"time must be below {count}, got {time}")
        if one is not None:
            frames = one.seen(frames)
        return frames[(2 * time + 1) * len(frames) // (2 * count)]

    async def receive(self, content: bytes, invert: bool) -> tuple[str, tuple[Image, ...]]:
        """Decode an upload and keep it: its name and frames. Those that wait hold no thread that a page needs."""
        if self._decoding >= 2 + self.limits.waiting_uploads:
            raise BusyError("busy", "many uploads are being read just now; send it again in a few seconds")
        self._decoding += 1
        try:
            decoded = self._decoders.submit(read_upload, content, self.limits, invert=invert)
            frames = await asyncio.wrap_future(decoded)
        finally:
            self._decoding -= 1
        return self.uploads.add(frames), frames

    def checked(self, asked: schemas.OneImage, *, whole: bool = False) -> schemas.ModelInfo:
        """The model asked about; raises NotFoundError where it, a head, layer or token is not there, or where the
        `whole` of its maps at once would take too much memory."""
        self.model(asked.model)
        facts = self.facts[asked.model]
        for which, count in (("query", facts.tokens), ("layer", facts.layers)):
            value = getattr(asked, which, 0)
            if value >= count:
                raise NotFoundError(f"unknown_{which}", f"{which} must be below {count} for {facts.name}, got {value}")
        for off in asked.off:
            if off.layer >= facts.layers or off.head >= facts.heads:
                raise NotFoundError(
                    "unknown_head",
                    f"{facts.name} has {facts.layers} layers of {facts.heads} heads, "
                    f"got layer {off.layer} head {off.head}",
                )
        most = self.limits.whole_maps_at_once
        if whole and facts.weights > most:
            raise NotFoundError(
                "too_many_tokens", f"{facts.name} has {facts.weights:,} weights; at most {most:,} are summed up"
            )
        return facts

    def _kept(
        self,
        memory: Memory[Made],
        make: Callable[[Explorable, Tensor, looking.Heads], Made],
        asked: schemas.OneImage,
        off: looking.Heads,
    ) -> Made:
        """What a pass with these heads off gives: made by whoever asks first, and kept."""
        one, frames = self.model(asked.model), self.frames(asked.image)  # what was computed from an upload goes with it
        key = (asked.model, asked.image, off)
        return memory.made(key, self._locks[asked.model], lambda: make(one, one.images(frames), off))

    def recording(self, asked: schemas.OneImage, off: looking.Heads | None = None) -> explain.Recording:
        """The pass with the heads off that were asked for, or these."""
        return self._kept(self._recordings, looking.record, asked, asked.heads if off is None else off)

    def attention(self, asked: schemas.MapQuery) -> schemas.Maps:
        """Signed weights of one token in every layer and head: what it takes, or what is taken from it."""
        self.checked(asked, whole=asked.reverse)
        recording = self.recording(asked)
        if asked.reverse:  # Cost: N H L^2 D
            rows = [recording.maps(layer)[0, :, :, asked.query].float() for layer in recording.layers]
        else:
            rows = [recording.maps(layer, queries=[asked.query])[0, :, 0].float() for layer in recording.layers]
        weights = torch.stack(rows).cpu()  # (N, H, L). Cost: N H L D, without a pass once the image is known
        return schemas.Maps.to(
            asked,
            weights=plain(weights),
            negative_mass=plain(explain.negative_mass(weights)),
            tokens_used=plain(explain.tokens_used(weights), 3),
        )

    def prediction(self, asked: schemas.OneImage) -> schemas.Prediction:
        """What the model says with all heads on, and with some switched off."""
        self.checked(asked)
        classes = self.model(asked.model).classes
        if not classes:
            return schemas.Prediction.to(asked, choices=[], divergence=0.0)
        before, after = (looking.probabilities(self.recording(asked, off).output) for off in ((), asked.heads))
        count = min(SHOWN_CLASSES, len(before))
        shown = {*before.topk(count).indices.tolist(), *after.topk(count).indices.tolist()}
        first, second = plain(before), plain(after)
        choices = [
            schemas.Choice(index=i, name=classes[i] if i < len(classes) else str(i), before=first[i], after=second[i])
            for i in sorted(shown, key=lambda i: -max(first[i], second[i]))
        ]
        return schemas.Prediction.to(asked, choices=choices, divergence=float(explain.jensen_shannon(before, after)))

    def summary(self, asked: schemas.OneImage) -> schemas.Summary:
        """What kind of map each head makes of this image: distance, spread, negative mass and more."""
        self.checked(asked, whole=True)
        captured = self.recording(asked).captured()
        tokens = captured.tokens
        with torch.no_grad():
            rings = [explain.ring_profile(captured.maps(layer), tokens).per_neighbour[0] for layer in captured.layers]
            profile = torch.stack(rings).cpu() * tokens.count  # (N, H, hops); 1 is uniform
            metrics = described(explain.summary(captured), tokens)
        return schemas.Summary.to(asked, metrics=metrics, profile=plain(profile, 4))

    def importance(self, asked: schemas.OneLayer) -> schemas.Importance:
        """How much the answer changes when each head of one layer is switched off alone."""
        facts = self.checked(asked)

        def answer(*also: tuple[int, int]) -> dict[str, Tensor]:
            off = tuple(sorted({*asked.heads, *also}))
            return self._kept(self._answers, looking.answer, asked, off)

        before, after = answer(), [answer((asked.layer, head)) for head in range(facts.heads)]
        found: dict[str, list[float] | None] = dict.fromkeys(("divergence", "drop", "feature"))
        if "probabilities" in before:
            p = before["probabilities"]
            top = int(p.argmax())
            found["divergence"] = [float(explain.jensen_shannon(p, a["probabilities"])) for a in after]
            found["drop"] = [float(p[top] - a["probabilities"][top]) for a in after]
        if "features" in before:
            found["feature"] = [float(feature_change(before["features"], a["features"])) for a in after]
        return schemas.Importance.to(asked, **found)

    def parts(self, asked: schemas.OneHead) -> schemas.Parts:
        """Which part of one head's map carries what it does: to and from the class token, at each distance."""
        facts = self.checked(asked)
        one = self.model(asked.model)
        if asked.head >= facts.heads:
            raise NotFoundError("unknown_head", f"head must be below {facts.heads} for {facts.name}, got {asked.head}")
        images = one.images(self.frames(asked.image))
        with self._locks[asked.model]:
            try:
                top = answers(one.model, images).logits.argmax(-1)
                found = explain.partial_importance(one.model, (asked.layer, asked.head), images, top)
            except ValueError as error:  # a layer that sees parts of a clip, or adds to its weights
                raise NotFoundError("no_parts", f"{asked.model} cannot be looked at in parts: {error}") from error
        measure = "js" if one.classes else "feature"
        rows = [
            schemas.Part(name=name, lost=part.get("lost"), change=max(part[measure], 0.0))
            for name, part in found.items()
        ]
        return schemas.Parts.to(asked, parts=rows)

    def patterns(self, asked: schemas.ManyImages) -> schemas.Patterns:
        """Kinds of maps that the heads make of these images."""
        facts = self.checked(schemas.OneImage(model=asked.model, image=asked.images[0]), whole=True)
        if facts.times > 1:
            raise NotFoundError(
                "no_patterns", f"{asked.model} is a model of videos; patterns are found for models of pictures only"
            )
        maps, owners = [], []
        for number, image in enumerate(asked.images):
            recording = self.recording(schemas.OneImage(model=asked.model, image=image))
            one, owner = explain.flat_maps(recording.captured())
            maps.append(one.cpu())
            owners.append(owner + torch.tensor([number, 0, 0]))
        every = torch.cat(maps)
        found = explain.find_patterns(every, torch.cat(owners), clusters=min(6, len(every)), code=8, method="pca")
        order = torch.bincount(found.labels).argsort(descending=True)
        clusters = [
            schemas.Cluster(
                kind=describe(found.centres[k]),
                share=float((found.labels == k).double().mean()),
                centre=plain(found.centres[k], 3),
            )
            for k in order.tolist()
        ]
        shares = plain(found.histograms()[..., order], 4)
        return schemas.Patterns(model=asked.model, maps=len(every), clusters=clusters, shares=shares)

    def dial(self, asked: schemas.DialQuery) -> schemas.Dialled:
        """A picture as a model answers it with its attention at one step between linear and softmax."""
        if asked.dial not in self.dials:
            raise NotFoundError("unknown_dial", f"no dial {asked.dial!r}; there are {', '.join(self.dials) or 'none'}")
        one, names = self.dials[asked.dial], list(self.dials[asked.dial].steps)
        if asked.step >= len(names):
            raise NotFoundError("unknown_step", f"step must be below {len(names)}, got {asked.step}")
        picture, place = self.frames(asked.image)[0], (asked.x, asked.y)
        now, exact = (one.passed(asked.image, picture, name) for name in (names[asked.step], names[-1]))
        return schemas.Dialled(
            dial=asked.dial,
            step=asked.step,
            seconds=now.seconds,
            score=one.same if asked.step == len(names) - 1 else one.compared(now, exact, place),
            before=address(one.before(picture)),
            picture=address(one.shown(picture, now, place)),
        )

    def flow(self, asked: schemas.FlowQuery) -> schemas.Flow:
        """Attention followed through all layers: rollout (signed), or relevance for the predicted class. Or how much
        each token says to the last interpreter of a model that has some, 0 for one that was dropped before."""
        facts = self.checked(asked, whole=True)
        if asked.kind == "interpreter":
            return schemas.Flow.to(asked, weights=plain(self._told(asked, facts)))
        if asked.kind == "rollout":
            found = explain.rollout(self.recording(asked).captured(), sign="signed")
        else:
            found = self._relevance(asked)
        return schemas.Flow.to(asked, weights=plain(found[0, asked.query].cpu()))

    def _told(self, asked: schemas.FlowQuery, facts: schemas.ModelInfo) -> Tensor:
        """(L,), from 0 to 1."""
        if not facts.interpreter:
            raise NotFoundError("no_interpreter", f"{asked.model} has no interpreter: it drops no tokens")
        one: Any = self.model(asked.model)
        images = one.images(self.frames(asked.image))
        with self._locks[asked.model], explain.head_off(one.model, asked.heads):
            return one.model.told(images)[0, -1].cpu()

    def _relevance(self, asked: schemas.FlowQuery) -> Tensor:
        one, refused = self.model(asked.model), f"{asked.model} has no relevance"
        if not one.classes:
            raise NotFoundError("no_relevance", f"{refused}: it has no classifier")
        images = one.images(self.frames(asked.image))
        with self._locks[asked.model]:
            try:
                with explain.head_off(one.model, asked.heads):
                    return explain.relevance(one.model, images)
            except ValueError as error:  # layers with a gate or a norm after mixing, or that see parts of a clip
                raise NotFoundError("no_relevance", f"{refused}: {error}") from error

    def lens(self, asked: schemas.LensQuery) -> schemas.Lens:
        """One layer's queries and keys, weighed by every order of the expansion and by softmax, at any logit scale."""
        facts = self.checked(asked)
        if not facts.lens:
            raise NotFoundError(
                "no_lens", f"{facts.name} has layers that see parts of a clip; other orders are not tried there"
            )
        query_key = self.recording(asked).query_key(asked.layer)
        q, k = (z[0].float().cpu() for z in query_key[:2])
        scale = asked.logit_scale * query_key[2]
        q = q[:, asked.query : asked.query + 1]
        exact = zoo.get("softmax").scores
        assert exact is not None
        softmax = exact(q, k, scale=scale)[:, 0]  # (H, L)
        maps = [(key, title, scores(q, k, scale=scale, **options)[:, 0]) for key, title, options in LENS]
        return schemas.Lens.to(
            asked,
            logit_size=plain(((q @ k.mT)[:, 0] * scale).std(-1, correction=0), 4),
            maps=[
                schemas.LensMap(
                    name=key, title=title, weights=plain(weights), distance=plain((weights - softmax).abs().sum(-1) / 2)
                )
                for key, title, weights in [*maps, ("softmax", "softmax", softmax)]
            ],
        )
