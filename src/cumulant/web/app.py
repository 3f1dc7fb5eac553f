"""`create_app`: the page, its interface, and the guards around both."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from ..optional import needed

with needed("the explorer needs FastAPI", "web"):
    from fastapi import FastAPI, Request
    from fastapi.exceptions import RequestValidationError
    from fastapi.responses import FileResponse, Response
    from fastapi.staticfiles import StaticFiles
    from starlette.exceptions import HTTPException

from .. import __version__
from .dial import Subject
from .engine import Engine
from .explorable import Example, Explorable
from .guards import BodyLimit, KnownHost, SafeHeaders, SameSite, problem
from .limits import Limits
from .plotly import router as plotly_router
from .problems import Refusal
from .routes import interface

STATIC = Path(__file__).with_name("static")
LOCAL_HOSTS = ("127.0.0.1", "localhost", "::1")


def create_app(
    models: Mapping[str, Explorable],
    examples: Sequence[Example] = (),
    limits: Limits | None = None,
    *,
    hosts: Sequence[str] = LOCAL_HOSTS,
    addresses: bool = False,
    dials: Mapping[str, Subject] | None = None,
) -> FastAPI:
    """The explorer as an ASGI application: `uvicorn.run(create_app({"softmax": Explorable(...)}))`.

    `hosts` are the names under which the page may be asked for, with `addresses` every address too: a foreign page
    cannot reach a local server through a name of its own. `dials` are models to be shown from linear attention to
    softmax; those that paint hidden patches are shown so without being named. Nothing is written to disk, nothing
    fetched from the network.
    """
    limits = limits or Limits()
    app = FastAPI(
        title="cumulant explorer",
        version=__version__,
        summary="Signed attention maps of every layer and head.",
        docs_url=None,  # these pages load scripts from the network
        redoc_url=None,
    )
    app.state.engine = Engine(models, examples, limits, dials)
    app.include_router(interface(app.state.engine))
    app.include_router(plotly_router)
    app.add_middleware(BodyLimit, limit=limits.upload_bytes, seconds=limits.body_seconds)
    app.add_middleware(SameSite)
    app.add_middleware(KnownHost, hosts=hosts, addresses=addresses)
    app.add_middleware(SafeHeaders)
    app.add_exception_handler(Refusal, lambda _, error: problem(error.status, error.kind, str(error)))
    app.add_exception_handler(RequestValidationError, _bad_request)  # type: ignore[arg-type]
    app.add_exception_handler(HTTPException, _http_error)  # type: ignore[arg-type]

    @app.get("/", include_in_schema=False)
    def page() -> FileResponse:
        return FileResponse(STATIC / "index.html")

    app.mount("/static", StaticFiles(directory=STATIC), name="static")
    return app


def _bad_request(_: Request, error: RequestValidationError) -> Response:
    """The first thing that is wrong with a request, in words; the value itself may be long or odd and is left out."""
    first = error.errors()[0]
    place = ".".join(str(part) for part in first["loc"] if part != "body") or "body"
    return problem(422, "bad_request", f"{place[:200].encode('ascii', 'backslashreplace').decode()}: {first['msg']}")


def _http_error(request: Request, error: HTTPException) -> Response:
    """Wrong addresses and methods: JSON for programs, a friendly page for people."""
    headers = dict(error.headers or {})
    if error.status_code == 404 and "text/html" in request.headers.get("accept", ""):
        return FileResponse(STATIC / "missing.html", status_code=404, headers=headers)
    kinds = {404: "not_found", 405: "wrong_method"}
    answer = problem(error.status_code, kinds.get(error.status_code, "http_error"), str(error.detail))
    answer.headers.update(headers)
    return answer
