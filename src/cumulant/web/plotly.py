"""plotly.js for the charts of the page, served from the installed package: no network, no copy in this repository."""

from __future__ import annotations

import functools
from pathlib import Path

from fastapi import APIRouter
from fastapi.responses import FileResponse, Response
from starlette.exceptions import HTTPException

from ..optional import install

router = APIRouter(include_in_schema=False)


@functools.cache
def find_plotly() -> Path | None:
    """plotly.min.js of the installed package, or None. The package itself is not imported: that takes a second."""
    from importlib.util import find_spec

    found = find_spec("plotly")
    place = Path(found.origin).parent / "package_data" / "plotly.min.js" if found and found.origin else None
    return place if place is not None and place.is_file() else None


@router.get("/vendor/plotly.min.js")
def script() -> Response:
    """4.8 MB that change only with the installed version: the one answer that a browser may keep."""
    place = find_plotly()
    if place is None:
        raise HTTPException(404, f"charts need plotly: {install('web')}")
    return FileResponse(place, media_type="text/javascript", headers={"cache-control": "private, max-age=86400"})
