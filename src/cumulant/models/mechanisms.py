"""One mechanism for all blocks of a model, or one for each: `attention=["agent"] * 4 + ["softmax"] * 8`."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .. import zoo
from ..grammar import parse, read_blocks, suggest


def by_block(
    attention: str | Sequence[str], options: dict[str, Any] | None, count: int, what: str = "blocks"
) -> list[dict[str, Any]]:
    """For each of `count` blocks the arguments `attention` and `attention_options` of its layer.

    `attention` is one name, or as many as there are blocks: a list, or one text, "4xagent,8xsoftmax". With several,
    each takes those of the options that it has; one that none has is an error.
    """
    names = read_blocks(attention)
    if len(names) == 1:
        names = names * count
    if len(names) != count:
        raise ValueError(
            f"attention must be one name, or one for each of the {count} {what}, got {len(names)} names in "
            f"{','.join(map(str, names))!r}; give several as words, without commas, where they are to be compared"
        )
    if len(set(names)) == 1:
        return [{"attention": name, "attention_options": options} for name in names]
    known = {name: zoo.get(parse(name)[0]).options for name in names}
    for option in options or {}:
        if not any(option in own for own in known.values()):
            every = list(dict.fromkeys(one for own in known.values() for one in own))
            raise ValueError(f"unknown option {option!r} of the mechanisms in {attention!r}; {suggest(option, every)}")
    return [
        {"attention": name, "attention_options": {key: x for key, x in (options or {}).items() if key in known[name]}}
        for name in names
    ]
