"""Guards around every request: a bounded body in bounded time, known names of this machine, no foreign pages, and
headers that keep the page to itself."""

from __future__ import annotations

import asyncio
import ipaddress
from collections.abc import Sequence
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from starlette.datastructures import MutableHeaders
from starlette.responses import JSONResponse

if TYPE_CHECKING:
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

HEADERS = {
    # Scripts and pictures come from this server alone; a hostile file cannot run anything. Style rules may be written
    # into the page: plotly.js does that. Data addresses are fetched where a chart is saved as a picture.
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; connect-src 'self' data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-resource-policy": "same-origin",
    "cache-control": "no-store",
}


class BodyLimit:
    """Answers 413 as soon as a body is larger than `limit`, whether or not its length was announced, and 408 where it
    is not there after `seconds`."""

    def __init__(self, app: ASGIApp, limit: int, seconds: float) -> None:
        self.app, self.limit, self.seconds = app, limit, seconds

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self.app(scope, receive, send)
            return
        too_large = problem(413, "too_large", f"a request may have at most {self.limit:,} bytes")
        announced = dict(scope["headers"]).get(b"content-length", b"0")
        if announced.isdigit() and int(announced) > self.limit:
            await too_large(scope, receive, send)
            return
        try:
            content = await asyncio.wait_for(self._whole(receive), self.seconds)
        except TimeoutError:
            message = f"the body of a request must be here within {self.seconds:g} seconds"
            await problem(408, "too_slow", message, {"connection": "close"})(scope, receive, send)
            return
        if content is None:  # the sender went away
            return
        if len(content) > self.limit:
            await too_large(scope, receive, send)
            return
        body: Message | None = {"type": "http.request", "body": content, "more_body": False}

        async def replay() -> Message:
            nonlocal body
            if body is not None:
                message, body = body, None
                return message
            return await receive()

        await self.app(scope, replay, send)

    async def _whole(self, receive: Receive) -> bytes | None:
        """The body, or as much of it as shows that it is too large. Bodies are small: held whole, so that the limit is
        checked before anything is parsed."""
        parts, more = bytearray(), True
        while more and len(parts) <= self.limit:
            message = await receive()
            if message["type"] != "http.request":
                return None
            parts += message.get("body", b"")
            more = message.get("more_body", False)
        return bytes(parts)


class KnownHost:
    """Refuses requests to a name that this machine is not known by: a foreign page could give a name of its own the
    address of this machine. An address is no such name; `addresses` accepts all of them."""

    def __init__(self, app: ASGIApp, hosts: Sequence[str], addresses: bool) -> None:
        self.app, self.hosts, self.addresses = app, {host.lower() for host in hosts}, addresses

    def known(self, host: str) -> bool:
        name = urlsplit(f"//{host}").hostname or ""
        return name in self.hosts or f"[{name}]" in self.hosts or (self.addresses and _is_address(name))

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self.known(dict(scope["headers"]).get(b"host", b"").decode("latin-1")):
            text = "this machine is not known by that name; start the explorer with --allow-host NAME"
            await problem(400, "unknown_host", text)(scope, receive, send)
            return
        await self.app(scope, receive, send)


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True


class SameSite:
    """Refuses requests that a page of another origin makes: a foreign page must not use this machine's models."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and scope["method"] not in ("GET", "HEAD", "OPTIONS"):
            headers = dict(scope["headers"])
            origin = headers.get(b"origin")
            foreign = origin is not None and urlsplit(origin.decode("latin-1")).netloc.encode() != headers.get(b"host")
            if foreign or headers.get(b"sec-fetch-site", b"none") not in (b"none", b"same-origin"):
                refused = problem(403, "foreign_page", "requests from pages of another origin are refused")
                await refused(scope, receive, send)
                return
        await self.app(scope, receive, send)


class SafeHeaders:
    """Adds `HEADERS` to every answer."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                for key, value in HEADERS.items():
                    MutableHeaders(scope=message).setdefault(key, value)
            await send(message)

        await self.app(scope, receive, with_headers)


def problem(status: int, kind: str, message: str, headers: dict[str, str] | None = None) -> JSONResponse:
    """A `schemas.Problem` as an answer."""
    return JSONResponse({"error": kind, "message": message}, status_code=status, headers=headers)
