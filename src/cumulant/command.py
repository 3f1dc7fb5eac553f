"""What the commands of all rooms share: checks of their options, and how they end. No heavy import.

A command is a dataclass of its options with a method `run`, which gives the exit status; it lies in `command.py` of its
room and imports the room inside `run`, so that help is shown at once.
"""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Container
from dataclasses import fields
from functools import cache
from numbers import Real
from pathlib import Path
from typing import Any, Literal, Protocol, get_args, get_origin, get_type_hints


class Command(Protocol):
    """The options of a command, and what it does."""

    def run(self) -> int:
        """Exit status: 0 done, 1 failed, 2 wrong arguments, 3 time was over, 130 stopped. `cli.main` tells errors."""
        ...


def check_least(settings: object, **least: float) -> None:
    """An error for the first number of the settings that is none, below its least value or NaN; None is no number."""
    for name, bound in least.items():
        value: Any = getattr(settings, name)
        if value is not None and not issubclass(type(value), Real):
            raise TypeError(f"{name} must be a number, {bound} or more, got {value!r}")
        if value is not None and not value >= bound:
            raise ValueError(f"{name} must be {bound} or more, got {value}")


def check_choices(settings: Any) -> None:
    """Refuse a word in a field of a dataclass that takes one of a few others: types bind the command line alone."""
    for name, choices in _choices(settings.__class__).items():
        if getattr(settings, name) not in choices:
            raise ValueError(f"{name} must be one of {', '.join(choices)}, got {getattr(settings, name)!r}")


@cache
def _choices(kind: type) -> dict[str, tuple[str, ...]]:
    """The fields of a dataclass that take one of a few words, with these words."""
    hints = get_type_hints(kind)
    return {name: get_args(hint) for name, hint in hints.items() if get_origin(hint) is Literal}


def command_line(name: str, settings: Any, left_out: Container[str]) -> str:
    """The words that give these settings to a command, without those at their defaults; of paths the last part."""
    words = ["cumulant", *name.split()]
    for one in fields(settings):
        value = getattr(settings, one.name)
        if value == one.default or one.name in left_out:
            continue
        words.append(f"--{one.name.replace('_', '-')}")
        if value is not True:
            parts = value if isinstance(value, tuple) else (value,)
            is_path = one.name in ("checkpoint", "data", "recipe")
            words += [Path(part).name if is_path else str(part) for part in parts]
    return shlex.join(words)


def show(values: Any, text: object, as_json: bool) -> None:
    """Print the values for a program or the text for a person."""
    print(json.dumps(values, indent=1, default=str) if as_json else text)


def failed(error: BaseException, status: int = 1) -> int:
    """Tell the error in one line, an OSError without its number; the exit status."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    print(f"cumulant: error: {text}", file=sys.stderr)
    return status


def time_over(error: BaseException) -> int:
    """Tell that the time given was over; the exit status of that."""
    print(f"cumulant: {error}", file=sys.stderr)
    return 3


def stopped(advice: str = "") -> int:
    """Tell that Ctrl-C ended the command, and how to go on; the exit status of that."""
    print(f"\nstopped{advice}", file=sys.stderr)
    return 130
