"""The interface of the explorer, one function per question. Work happens in threads; the loop stays free."""

from __future__ import annotations

import io
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query, Request
from fastapi.responses import Response
from starlette.concurrency import run_in_threadpool

from .. import __version__
from ..explain import jensen_shannon, negative_mass, tokens_used
from ..optional import install
from . import schemas
from .engine import Engine
from .engine_values import plain
from .plotly import find_plotly
from .uploads import FORMATS

PROBLEMS: dict[int | str, dict[str, Any]] = {
    403: {"model": schemas.Problem, "description": "The request comes from a page of another origin."},
    404: {"model": schemas.Problem, "description": "No such model, image, layer, head or token."},
    413: {"model": schemas.Problem, "description": "The request or the picture is too large."},
    422: {"model": schemas.Problem, "description": "The request is not well formed."},
}
BODY_PROBLEMS: dict[int | str, dict[str, Any]] = {
    **PROBLEMS,
    400: {"model": schemas.Problem, "description": "The body could not be read."},
}
PNG: dict[int | str, dict[str, Any]] = {
    200: {"content": {"image/png": {"schema": {"type": "string", "format": "binary"}}}, "description": "A PNG."},
    **{status: PROBLEMS[status] for status in (404, 422)},
}
UPLOAD_BODY = {
    "requestBody": {
        "required": True,
        "description": f"The bytes of a picture or animation ({', '.join(FORMATS)}) or video (MP4, WebM).",
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}},
    }
}
SHOWN_CLASSES = 5

router = APIRouter(prefix="/api")


def get_engine(request: Request) -> Engine:
    engine: Engine = request.app.state.engine
    return engine


Explorer = Annotated[Engine, Depends(get_engine)]


def pairs(off: list[schemas.Head]) -> list[tuple[int, int]]:
    return [(head.layer, head.head) for head in off]


@router.get("/info")
def info(engine: Explorer) -> schemas.Info:
    """Models, examples and limits."""
    models = [
        schemas.ModelInfo(
            name=name,
            title=one.title,
            attention=facts.attention,
            layers=facts.layers,
            heads=facts.heads,
            prefix=facts.prefix,
            times=facts.times,
            grid=facts.grid,
            axes=list(facts.axes),
            size=one.size,
            classes=len(one.classes),
            accuracy=one.accuracy,
            lens=facts.lens,
        )
        for (name, one), facts in zip(engine.models.items(), engine.facts.values(), strict=True)
    ]
    examples = [
        schemas.ExampleInfo(image=name, label=one.label, frames=len(engine.frames(name)))
        for name, one in engine.examples.items()
    ]
    limits = schemas.LimitInfo(upload_bytes=engine.limits.upload_bytes, pixels=engine.limits.pixels)
    return schemas.Info(
        version=__version__,
        models=models,
        examples=examples,
        limits=limits,
        charts=find_plotly() is not None,
        charts_need=install("web"),
    )


@router.post(
    "/images",
    status_code=201,
    openapi_extra=UPLOAD_BODY,
    responses={
        **BODY_PROBLEMS,
        415: {"model": schemas.Problem, "description": "Not a picture or video of a known kind."},
    },
)
async def upload(
    request: Request,
    engine: Explorer,
    invert: Annotated[bool, Query(description="Exchange light and dark: for dark ink on white paper.")] = False,
) -> schemas.Uploaded:
    """Send a picture or a short video. Its centre square (of a video: of some frames spread evenly over its beginning)
    is kept in memory for a while under a name that cannot be guessed."""
    content = await request.body()
    name, frames = await run_in_threadpool(engine.receive, content, invert)
    return schemas.Uploaded(image=name, side=frames[0].width, frames=len(frames))


@router.get("/images/{image}", response_class=Response, responses=PNG)
def picture(
    engine: Explorer,
    image: Annotated[str, Path(min_length=1, max_length=200)],
    model: Annotated[str | None, Query(max_length=200, description="Show the image as this model sees it.")] = None,
    time: Annotated[
        int, Query(ge=0, lt=1000, description="Step in time of a clip, of the model's tokens if given.")
    ] = 0,
) -> Response:
    """A frame of an example or an upload, whole or as a model sees it."""
    content = io.BytesIO()
    engine.seen(image, model, time).save(content, "PNG")
    return Response(content.getvalue(), media_type="image/png")


@router.post("/attention", responses=BODY_PROBLEMS)
def attention(engine: Explorer, asked: schemas.OneQuery) -> schemas.Maps:
    """Signed weights of one token in every layer and head."""
    weights = engine.row(asked.model, asked.image, asked.query, pairs(asked.off))
    return schemas.Maps(
        model=asked.model,
        query=asked.query,
        weights=plain(weights),
        negative_mass=plain(negative_mass(weights)),
        tokens_used=plain(tokens_used(weights), 3),
    )


@router.post("/prediction", responses=BODY_PROBLEMS)
def prediction(engine: Explorer, asked: schemas.OneImage) -> schemas.Prediction:
    """What the model says with all heads on, and with some switched off."""
    answers = engine.predict(asked.model, asked.image, pairs(asked.off))
    if answers is None:
        return schemas.Prediction(model=asked.model, choices=[], divergence=0.0)
    before, after = answers
    classes = engine.model(asked.model).classes
    count = min(SHOWN_CLASSES, len(before))
    shown = {*before.topk(count).indices.tolist(), *after.topk(count).indices.tolist()}
    first, second = plain(before), plain(after)
    choices = [
        schemas.Choice(index=i, name=classes[i] if i < len(classes) else str(i), before=first[i], after=second[i])
        for i in sorted(shown, key=lambda i: -max(first[i], second[i]))
    ]
    return schemas.Prediction(model=asked.model, choices=choices, divergence=float(jensen_shannon(before, after)))


@router.post("/summary", responses=BODY_PROBLEMS)
def summary(engine: Explorer, asked: schemas.OneImage) -> schemas.Summary:
    """What kind of map each head makes of this image: distance, spread, negative mass and more."""
    found, profile = engine.summary(asked.model, asked.image, pairs(asked.off))
    metrics = [schemas.Metric(**metric) for metric in found]
    return schemas.Summary(model=asked.model, metrics=metrics, profile=plain(profile, 4))


@router.post("/importance", responses=BODY_PROBLEMS)
def importance(engine: Explorer, asked: schemas.OneLayer) -> schemas.Importance:
    """How much the answer changes when each head of one layer is switched off alone."""
    found = engine.importance(asked.model, asked.image, asked.layer, pairs(asked.off))
    told = {name: found.get(name) for name in ("divergence", "drop", "feature")}
    return schemas.Importance(model=asked.model, layer=asked.layer, **told)


@router.post("/flow", responses=BODY_PROBLEMS)
def flow(engine: Explorer, asked: schemas.FlowQuery) -> schemas.Flow:
    """Attention followed through all layers: rollout (signed), or relevance for the predicted class."""
    weights = engine.flow(asked.model, asked.image, asked.query, asked.kind, pairs(asked.off))
    return schemas.Flow(model=asked.model, query=asked.query, kind=asked.kind, weights=plain(weights))


@router.post("/lens", responses=BODY_PROBLEMS)
def lens(engine: Explorer, asked: schemas.LensQuery) -> schemas.Lens:
    """One layer's queries and keys, weighed by every order of the expansion and by softmax, at any temperature."""
    where = (asked.model, asked.image, asked.query, asked.layer, asked.temperature)
    logits, maps = engine.lens(*where, pairs(asked.off))
    softmax = maps[-1][2]
    return schemas.Lens(
        model=asked.model,
        layer=asked.layer,
        query=asked.query,
        temperature=asked.temperature,
        logit_size=plain(logits.std(-1, correction=0), 4),
        maps=[
            schemas.LensMap(
                name=name, title=title, weights=plain(weights), distance=plain((weights - softmax).abs().sum(-1) / 2)
            )
            for name, title, weights in maps
        ],
    )
