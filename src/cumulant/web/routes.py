"""The interface of the explorer, one function per question. Work happens in threads; the loop stays free."""

from __future__ import annotations

import io
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Request
from fastapi.responses import Response

from .. import __version__
from ..data.decode import fit
from ..optional import install
from . import schemas
from .engine import Engine
from .plotly import find_plotly
from .uploads import FORMATS

PROBLEMS: dict[int | str, dict[str, Any]] = {
    status: {"model": schemas.Problem, "description": text}
    for status, text in {
        400: "The body could not be read.",
        403: "The request comes from a page of another origin.",
        404: "No such model, image, layer, head or token.",
        408: "The body did not arrive in time.",
        413: "The request or the picture is too large.",
        422: "The request is not well formed.",
    }.items()
}
UPLOAD_PROBLEMS = {
    **PROBLEMS,
    415: {"model": schemas.Problem, "description": "Not a picture or video of a known kind."},
    503: {"model": schemas.Problem, "description": "Too many uploads at once; send it again in a few seconds."},
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


def interface(engine: Engine) -> APIRouter:
    """The routes to an engine."""
    router = APIRouter(prefix="/api")
    questions = (
        engine.attention, engine.prediction, engine.summary, engine.importance, engine.flow, engine.lens, engine.parts,
        engine.patterns, engine.dial,
    )  # fmt: skip

    @router.get("/info")
    def info() -> schemas.Info:
        """Models, examples and limits."""
        examples = [
            schemas.ExampleInfo(image=name, label=one.label, frames=len(engine.frames(name)), collection=one.collection)
            for name, one in engine.examples.items()
        ]
        return schemas.Info(
            version=__version__,
            models=list(engine.facts.values()),
            examples=examples,
            dials=engine.dial_facts,
            limits=schemas.LimitInfo(upload_bytes=engine.limits.upload_bytes, pixels=engine.limits.pixels),
            charts=find_plotly() is not None,
            charts_need=install("web"),
        )

    @router.post("/images", status_code=201, openapi_extra=UPLOAD_BODY, responses=UPLOAD_PROBLEMS)
    async def upload(
        request: Request,
        invert: Annotated[bool, Query(description="Exchange light and dark: for dark ink on white paper.")] = False,
    ) -> schemas.Uploaded:
        """Send a picture or a short video. Its centre square (of a video: of some frames spread evenly over its
        beginning) is kept in memory for a while under a name that cannot be guessed."""
        name, frames = await engine.receive(await request.body(), invert)
        return schemas.Uploaded(image=name, side=frames[0].width, frames=len(frames))

    @router.get("/images/{image}", response_class=Response, responses=PNG)
    def picture(
        image: Annotated[str, Path(min_length=1, max_length=200)],
        model: Annotated[str | None, Query(max_length=200, description="Show the image as this model sees it.")] = None,
        time: Annotated[
            int, Query(ge=0, lt=1000, description="Step in time of a clip, of the model's tokens if given.")
        ] = 0,
        side: Annotated[int | None, Query(ge=8, le=1024, description="Its centre square, at most so large.")] = None,
    ) -> Response:
        """A frame of an example or an upload, whole or as a model sees it, or small."""
        content, shown = io.BytesIO(), engine.seen(image, model, time)
        if side is not None:
            shown = fit(shown, min(side, *shown.size))
        shown.save(content, "PNG")
        return Response(content.getvalue(), media_type="image/png")

    for question in questions:
        router.add_api_route(f"/{question.__name__}", question, methods=["POST"], responses=PROBLEMS)
    return router
