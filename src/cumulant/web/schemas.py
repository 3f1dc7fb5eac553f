"""What the explorer's interface takes and gives, as typed models: the OpenAPI schema is made from these."""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _whole(value: Any) -> Any:
    """JSON has one kind of number: 6.0 is the whole number 6."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


Name = Annotated[str, Field(min_length=1, max_length=200)]
Whole = Annotated[int, BeforeValidator(_whole)]
Grid = list[list[float]]
"""Numbers by layer and head."""


class Strict(BaseModel):
    """A request: unknown fields are an error, numbers are numbers."""

    model_config = ConfigDict(extra="forbid", strict=True)


class Answer(BaseModel):
    """An answer, which repeats what was asked about."""

    model: str

    @classmethod
    def to(cls, asked: OneImage, **values: Any) -> Self:
        return cls(**{name: getattr(asked, name) for name in cls.model_fields if hasattr(asked, name)}, **values)


class Problem(BaseModel):
    """Why a request was not served."""

    error: str = Field(description="Kind of the problem, one word for programs.", examples=["unknown_model"])
    message: str = Field(description="What was wrong, and what would be accepted.")


class ModelInfo(BaseModel):
    name: str
    title: str = Field(description="What the model is, in a few words.")
    attention: str = Field(description="Mechanism, by its name in the zoo.")
    layers: int = Field(ge=1)
    heads: int = Field(ge=1)
    prefix: int = Field(ge=0, description="Tokens before the patches, e.g. one class token.")
    times: int = Field(ge=1, description="Steps in time that the tokens of a clip have; 1 for a model of pictures.")
    grid: tuple[int, int] = Field(description="Rows and columns of patches.")
    axes: list[str] = Field(
        description='What each layer looks at: "all" tokens, "space" (a frame), "time" (a place), whole "frames".'
    )
    size: int = Field(ge=1, description="Side of the images that the model sees, in pixels.")
    classes: int = Field(ge=0, description="Number of classes; 0 for a model without a classifier.")
    accuracy: float | None = Field(description="Top-1 accuracy on the test part, from 0 to 1, where it is known.")
    lens: bool = Field(description="Whether `/api/lens` can show this model.")
    collection: str = Field(description="Of examples that it is made for; empty for all.")
    interpreter: bool = Field(description='Whether `/api/flow` has the kind "interpreter": IA-RED2.')

    @property
    def tokens(self) -> int:
        return self.prefix + self.times * self.grid[0] * self.grid[1]

    @property
    def weights(self) -> int:
        """Weights in all maps of one image."""
        return self.layers * self.heads * self.tokens**2


class ExampleInfo(BaseModel):
    image: str = Field(description="Name of the image in requests.")
    label: str
    frames: int = Field(ge=1, description="Frames of a clip; 1 for a picture.")
    collection: str = Field(description="Of models that it is made for; empty for all.")


class DialStep(BaseModel):
    title: str
    cost: float = Field(description="Multiply-adds of the dialled layers, of softmax's.")


class DialInfo(BaseModel):
    """A model whose attention can be dialled, see `/api/dial`."""

    name: str
    title: str
    score: str = Field(description="What the number beside each step is.")
    short: str = Field(description="The same in a word.")
    same: float = Field(description="Its value where nothing changes.")
    pointed: bool = Field(description="Whether the answer depends on the place of the click.")
    steps: list[DialStep] = Field(description="From linear to softmax.")


class LimitInfo(BaseModel):
    upload_bytes: int
    pixels: int


class Info(BaseModel):
    """Everything that the page needs to know before the first click."""

    version: str
    models: list[ModelInfo]
    examples: list[ExampleInfo]
    dials: list[DialInfo]
    limits: LimitInfo
    charts: bool = Field(description="Whether `/vendor/plotly.min.js` is there to draw charts with.")
    charts_need: str = Field(description="The command that installs it where it is not.")


class Uploaded(BaseModel):
    """A picture or clip that was taken. It is kept in memory for a while, and only who knows its name can use it."""

    image: str = Field(description="Name of the image in requests; cannot be guessed.")
    side: int = Field(description="Side of the square that was kept, in pixels.")
    frames: int = Field(ge=1, description="Frames that were kept; 1 of a picture.")


class Head(Strict):
    layer: Whole = Field(ge=0, lt=1000)
    head: Whole = Field(ge=0, lt=1000)


class OneImage(Strict):
    """A model, an image and the heads to switch off (their output is set to 0)."""

    model: Name = Field(description="A name from `/api/info`.")
    image: Name = Field(description="A name from `/api/info` or of an upload.")
    off: list[Head] = Field(default=[], max_length=1024)

    @property
    def heads(self) -> tuple[tuple[int, int], ...]:
        """(layer, head) of those that are off, each once and in order."""
        return tuple(sorted({(one.layer, one.head) for one in self.off}))


class OneQuery(OneImage):
    query: Whole = Field(ge=0, lt=10**6, description="Token that asks: prefix first, then patches frame by frame.")


class MapQuery(OneQuery):
    reverse: bool = Field(default=False, description="What every token takes from this one, in place of what it takes.")


class OneLayer(OneImage):
    layer: Whole = Field(ge=0, lt=1000)


class OneHead(OneLayer):
    head: Whole = Field(ge=0, lt=1000)


class ManyImages(Strict):
    model: Name = Field(description="A name from `/api/info`.")
    images: list[Name] = Field(min_length=1, max_length=100)


class DialQuery(Strict):
    dial: Name = Field(description="A name from `dials` of `/api/info`.")
    image: Name = Field(description="A name from `/api/info` or of an upload.")
    step: Whole = Field(ge=0, lt=100)
    x: float = Field(default=0.5, ge=0.0, le=1.0, description="Place of the click, from the left.")
    y: float = Field(default=0.5, ge=0.0, le=1.0, description="And from the top.")


class FlowQuery(OneQuery):
    kind: Literal["rollout", "relevance", "interpreter"] = "rollout"


class LensQuery(OneQuery):
    layer: Whole = Field(ge=0, lt=1000)
    logit_scale: float = Field(default=1.0, ge=0.0, le=16.0, description="Factor on the logits.")


class Maps(Answer):
    """What one token takes from every token, in every layer and head."""

    query: int
    reverse: bool
    weights: list[list[list[float]]] = Field(description="Signed weights by layer, head and token (prefix first).")
    negative_mass: Grid = Field(description="Sum of the sizes of the negative weights, by layer and head.")
    tokens_used: Grid = Field(description="(sum |w|)^2 / sum w^2: over how many tokens a map is spread.")


class Choice(BaseModel):
    index: int
    name: str
    before: float = Field(description="Probability with all heads on.")
    after: float = Field(description="Probability with the given heads off.")


class Prediction(Answer):
    choices: list[Choice] = Field(
        description="The most probable classes before or after, best first; none for a model without a classifier."
    )
    divergence: float = Field(description="Jensen-Shannon divergence of the two answers, between 0 and log 2.")


class Metric(BaseModel):
    name: str
    title: str
    meaning: str
    values: Grid = Field(description="By layer and head.")
    reference: float | None = Field(description="Value of a map that is the same everywhere, where that is known.")


class Summary(Answer):
    metrics: list[Metric]
    profile: list[Grid] = Field(
        description="Mean weight per neighbour times the number of tokens, by layer, head and hops; 1 is uniform."
    )


class Importance(Answer):
    """Effect of switching off each head of one layer alone."""

    layer: int
    divergence: list[float] | None = Field(description="Jensen-Shannon divergence of the answer, by head.")
    drop: list[float] | None = Field(description="Loss of probability of the predicted class, by head.")
    feature: list[float] | None = Field(description="1 - cosine of the features before the classifier, by head.")


class Part(BaseModel):
    name: str = Field(description="The part of the map that is set to 0.")
    lost: float | None = Field(description="Mean weight that went missing from the rows concerned.")
    change: float = Field(description="Of the answer (Jensen-Shannon), or of the features of a model without classes.")


class Parts(Answer):
    """Which part of a head's map carries what it does: each part left out alone."""

    layer: int
    head: int
    parts: list[Part]


class Cluster(BaseModel):
    kind: str = Field(description="self, near, row, column, few keys, uniform or other.")
    share: float
    centre: Grid = Field(description="Mean map, queries by keys, of patches averaged to 4 x 4 places.")


class Patterns(BaseModel):
    """Kinds of maps over several images."""

    model: str
    maps: int
    clusters: list[Cluster]
    shares: list[Grid] = Field(description="Of a head's maps in each cluster, by layer and head.")


class Dialled(BaseModel):
    """A picture as a model answers it at one step of the dial."""

    dial: str
    step: int
    seconds: float = Field(description="In the dialled layers, on this machine.")
    score: float
    before: str = Field(description="What the model is given, as a data address.")
    picture: str = Field(description="What it makes of it, as a data address.")


class Flow(Answer):
    """Attention followed through all layers back to the image."""

    query: int
    kind: Literal["rollout", "relevance", "interpreter"]
    weights: list[float] = Field(description="By token, prefix first; a rollout is signed.")


class LensMap(BaseModel):
    name: str
    title: str
    weights: list[list[float]] = Field(description="By head and token.")
    distance: list[float] = Field(description="Sum of |w - softmax| / 2 by head: share of the mass that is elsewhere.")


class Lens(Answer):
    """One layer's own queries and keys, weighed by softmax and by each order of its expansion."""

    layer: int
    query: int
    logit_scale: float
    logit_size: list[float] = Field(description="Standard deviation of the logits of this query, by head.")
    maps: list[LensMap]
