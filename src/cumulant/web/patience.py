"""The HTTP protocol of the server, which waits for the head of a request for so long and no longer."""

from __future__ import annotations

import asyncio

from uvicorn.protocols.http.h11_impl import H11Protocol


def patient(seconds: float) -> type[asyncio.Protocol]:
    """uvicorn's own protocol; a connection whose request has not begun after `seconds` is closed.

    uvicorn times idle connections only between requests, so that a few hundred that each send one letter of a header
    now and then would hold all of its files open.
    """

    class Patient(H11Protocol):
        deadline: asyncio.TimerHandle | None = None

        def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
            super().connection_made(transport)
            self.deadline = self.loop.call_later(seconds, self.give_up)

        def data_received(self, data: bytes) -> None:
            super().data_received(data)
            busy = self.cycle is not None and not self.cycle.response_complete
            if busy and self.deadline is not None:
                self.deadline.cancel()
                self.deadline = None
            elif not busy and self.deadline is None:  # the beginning of a further request on the same connection
                self.deadline = self.loop.call_later(seconds, self.give_up)

        def connection_lost(self, exc: Exception | None) -> None:
            if self.deadline is not None:
                self.deadline.cancel()
            super().connection_lost(exc)

        def give_up(self) -> None:
            self.deadline = None
            if (self.cycle is None or self.cycle.response_complete) and not self.transport.is_closing():
                self.transport.close()

    return Patient
