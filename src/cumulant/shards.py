"""The place where a call learns that its tokens are one part of a sequence that several workers hold.

`distributed.context_parallel` puts an answerer here; attention asks for it first. The slot belongs to the process and
not to a thread: layers are recomputed in the threads of autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

_answerer: Any = None


def answerer() -> Any:
    """Who computes attention over all parts, or None where a call holds its whole sequence."""
    return _answerer


@contextmanager
def answered_by(new: Any) -> Iterator[None]:
    """Within this, calls go to `new`; None: each holds its whole sequence."""
    global _answerer
    before, _answerer = _answerer, new
    try:
        yield
    finally:
        _answerer = before
