"""What can be wrong with a request, for those who find it and for those who tell it."""

from __future__ import annotations


class Refusal(Exception):  # noqa: N818  # what a request meets with; each kind below is an error
    """A request that is not served: a word for programs, a message for people and the HTTP status."""

    status = 500

    def __init__(self, kind: str, message: str, status: int | None = None) -> None:
        super().__init__(message)
        self.kind, self.status = kind, status or self.status


class UploadError(Refusal):
    """A file that is not taken: `status` is the HTTP status that says why."""

    def __init__(self, message: str, status: int = 415) -> None:
        super().__init__("bad_upload", message, status)


class NotFoundError(Refusal):
    """A model, image, layer, head or token that is not there."""

    status = 404


class NotFiniteError(Refusal):
    """A model that answers with NaN or infinity, for which JSON has no word."""

    def __init__(self) -> None:
        why = "the model gives values that are not finite for this image; it may have diverged"
        super().__init__("not_finite", why)


class BusyError(Refusal):
    """More at once than this machine takes; worth trying again."""

    status = 503
