"""Names with options, written one way everywhere: `cumulant3+full`, `agent+agents=16`, `cumulant3+around=mean+apart=1`.

Python, command line, recipes, records and saved models all read and write this. A bare option is True; values are JSON
where they are JSON, and words otherwise. Blocks of a model that have mechanisms of their own are written in
their order, `4xagent,8xsoftmax`.
"""

from __future__ import annotations

import difflib
import json
import re
import warnings
from collections.abc import Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any, TypeVar

Entry = TypeVar("Entry")


def parse(text: str) -> tuple[str, dict[str, Any]]:
    """The name before the first `+`, and the options behind it."""
    if not isinstance(text, str):
        raise TypeError(f"a mechanism is named by a word, such as 'cumulant3+full', got {text!r}")
    if ":" in text and "+" not in text:
        new = text.replace(":", "+")
        warnings.warn(f"options are written {new!r}, no longer {text!r}", DeprecationWarning, stacklevel=2)
        text = new
    name, *words = text.split("+")
    options = dict(read_option(word, text) for word in words)
    if len(options) < len(words):
        raise ValueError(f"each option can be given once, got {text!r}")
    return name, options


def write(name: str, options: Mapping[str, Any]) -> str:
    """Name and options as `parse` reads them, options in alphabetical order."""
    return name + "".join(
        f"+{key}" if value is True else f"+{key}={written(value)}" for key, value in sorted(options.items())
    )


def read_blocks(attention: str | Sequence[str]) -> list[str]:
    """The names in `4xagent,8xsoftmax`, twelve of them, or in a list; one name is a list of one."""
    if not isinstance(attention, str):
        if not isinstance(attention, Sequence) or not all(isinstance(name, str) for name in attention):
            raise TypeError(
                "attention must be a name such as 'cumulant3', a list of names, or several in one text such as "
                f"'4xagent,8xsoftmax', got {attention!r}"
            )
        if not attention:
            raise ValueError("attention names no mechanism: got an empty list")
        return list(attention)
    names: list[str] = []
    for part in re.split(r",(?![^\[]*\])", attention):  # not at the commas of a list among the options
        count, name = re.fullmatch(r"(?:(\d+)x)?(.*)", part.strip(), re.DOTALL).groups()  # type: ignore[union-attr]
        if not name or count == "0":
            raise ValueError(f"mechanisms of blocks are written 4xagent,8xsoftmax, got {attention!r}")
        names += [name] * int(count or 1)
    return names


def write_blocks(names: Iterable[str]) -> str:
    """Names as `read_blocks` reads them: one alone as it is, several with their counts."""
    runs = [(name, len(list(run))) for name, run in groupby(names)]
    return ",".join(name if count == 1 else f"{count}x{name}" for name, count in runs)


def read_option(word: str, where: str, what: str = "options") -> tuple[str, Any]:
    """`full` of "cumulant3+full" as ("full", True), `apart=1` as ("apart", 1), `clip=none` as ("clip", None)."""
    key, sign, text = word.partition("=")
    if not key or (sign and not text):
        raise ValueError(f"{what} are written +name or +name=value, got {word!r} in {where!r}")
    if not sign:
        return key, True
    return key, None if says_none(text) else json_or_word(text)


def json_or_word(text: str) -> Any:
    """The value that a text stands for where it is JSON (3, true, [2, 8, 8]), else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def says_none(value: object) -> bool:
    """Whether a value is the word none or null, in small letters or capitals: how a user writes None."""
    return isinstance(value, str) and value.lower() in ("none", "null")


def written(value: Any) -> str:
    """The value of an option as `read_option` reads it."""
    return value if isinstance(value, str) else json.dumps(value)


def suggest(name: object, known: Iterable[str]) -> str:
    """The part of an error message that names what would have been accepted, the nearest first."""
    known = list(known)
    near = difflib.get_close_matches(str(name), known, n=1)
    return (f"did you mean {near[0]!r}? " if near else "") + f"known: {', '.join(known)}"


class Registry(dict[str, Entry]):
    """Mechanisms, layers, models or studies by name, in the order in which they came."""

    def __init__(self, what: str, known: Mapping[str, Entry] | None = None) -> None:
        super().__init__(known or {})
        self.what = what  # in words, for errors

    def add(self, name: str, entry: Entry) -> Entry:
        """A new one; a name that is taken is refused."""
        if name in self:
            raise ValueError(f"the {self.what} {name!r} is registered already; choose another name")
        self[name] = entry
        return entry

    def named(self, name: object) -> Entry:
        """The one of that name; an error says what would have been accepted."""
        if not isinstance(name, str) or name not in self:
            several = "give several as words, without commas; " if isinstance(name, str) and "," in name else ""
            raise ValueError(f"unknown {self.what} {name!r}; {several}{suggest(name, self)}")
        return self[name]
