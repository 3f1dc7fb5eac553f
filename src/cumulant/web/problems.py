"""What can be wrong with a request, for those who find it and for those who tell it."""

from __future__ import annotations


class UploadError(ValueError):
    """A file that is not taken: `status` is the HTTP status that says why."""

    def __init__(self, message: str, status: int = 415) -> None:
        super().__init__(message)
        self.status = status


class NotFoundError(LookupError):
    """A model, image, layer, head or token that is not there; `kind` is one word for programs."""

    def __init__(self, kind: str, message: str) -> None:
        super().__init__(message)
        self.kind, self.message = kind, message
