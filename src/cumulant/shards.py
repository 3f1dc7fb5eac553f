"""The place where a call learns that its tokens are one part of a sequence that several workers hold.

`distributed.context_parallel` puts an answerer here; attention asks for it first. The slot belongs to the process and
not to a thread: layers are recomputed in the threads of autograd.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor

_answerer: Any = None


def answerer() -> Any:
    """Who computes attention over all parts, or None where a call holds its whole sequence."""
    return _answerer


def summed(*sums: Any) -> tuple[Any, ...]:
    """Sums over the tokens that a call holds, over all of them: in one message where workers hold the others."""
    return sums if _answerer is None else _answerer.add(*sums)


def after(*sums: Any) -> tuple[Any, ...] | None:
    """Of sums over the tokens that a call holds, those of all that came before; None where nothing can have."""
    return None if _answerer is None else _answerer.earlier(*sums)


def largest(x: Any) -> Any:
    """The largest of what workers have; x itself where there is one. No gradient."""
    return x.detach() if _answerer is None else _answerer.largest(x)


def place(tokens: int) -> tuple[int, int]:
    """Of the first of so many tokens in their sequence, and how many that has."""
    return (0, tokens) if _answerer is None else _answerer.place(tokens)


def needs_all(what: str, instead: str = "leave it off, or the context") -> None:
    """Raises where workers hold the other tokens, for what looks at single ones of them."""
    if _answerer is not None:
        raise ValueError(f"{what} needs tokens that other workers hold, and is not split: {instead}")


def count() -> int:
    """How many workers hold the sequence."""
    return 1 if _answerer is None else _answerer.parts.workers.size


def cut(x: Tensor, axis: int = 1) -> Tensor:
    """This worker's part of what all of them have whole; all of it where nothing is split."""
    return x if _answerer is None else _answerer.cut(x, axis)


@contextmanager
def answered_by(new: Any) -> Iterator[None]:
    """Within this, calls go to `new`; None: each holds its whole sequence."""
    global _answerer
    before, _answerer = _answerer, new
    try:
        yield
    finally:
        _answerer = before
