"""Whether arguments are of the kind that their annotations say: Python does not look, and "no" is true.

Checked where a user gives options, once. Annotations that name anything but these kinds and classes are passed over; so
are models and maps, whose own checks say how to get one.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Mapping
from functools import cache, wraps
from numbers import Real
from pathlib import Path
from typing import Any, TypeVar, cast

Function = TypeVar("Function", bound=Callable[..., Any])


def _is_a(name: str) -> Callable[[Any], bool]:
    """Whether something is of a class of torch, which need not be imported for that."""
    return lambda x: any(f"{kind.__module__}.{kind.__name__}" == name for kind in type(x).__mro__)


Kind = tuple[str, Callable[[Any], bool]]  # what it is in words, and who is of it
KINDS: dict[str, Kind] = {  # by how an annotation writes it
    "bool": ("True or False", lambda x: x is True or x is False),
    "int": ("a whole number", lambda x: isinstance(x, int) and not isinstance(x, bool)),
    "float": ("a number", lambda x: isinstance(x, Real) and not isinstance(x, bool) and x == x),
    "str": ("a word", lambda x: isinstance(x, str)),
    "None": ("None", lambda x: x is None),
    "Tensor": ("a torch.Tensor", _is_a("torch.Tensor")),
}


def check_kinds(form: Callable[..., Any], given: Mapping[str, Any]) -> None:
    """Raises for the first argument that is not of the kind that the signature of `form` says."""
    known = _kinds(form)
    for name, x in given.items():
        kinds = known.get(name, ())
        if kinds and not any(fits(x) for _, fits in kinds):
            raise TypeError(f"{name} must be {' or '.join(said for said, _ in kinds)}, got {_shown(x)}")


def kinds_checked(function: Function) -> Function:
    """Decorator: the arguments of each call are checked."""
    signature = inspect.signature(function)

    @wraps(function)
    def checked(*args: Any, **named: Any) -> Any:
        try:
            given = signature.bind(*args, **named).arguments
        except TypeError:  # Python's own words name the function
            return function(*args, **named)
        check_kinds(function, given)
        return function(*args, **named)

    return cast(Function, checked)


@cache
def _kinds(form: Callable[..., Any]) -> dict[str, tuple[Kind, ...]]:
    """The kinds of each parameter, where all that its annotation names are known."""
    names = vars(sys.modules[form.__module__]) if hasattr(form, "__module__") else {}
    found = {}
    for name, parameter in inspect.signature(form).parameters.items():
        kinds = tuple(KINDS.get(word) or _class(word, names) for word in str(parameter.annotation).split(" | "))
        if parameter.kind not in (parameter.VAR_KEYWORD, parameter.VAR_POSITIONAL) and None not in kinds:
            found[name] = cast(tuple[Kind, ...], kinds)
    return found


def _class(word: str, names: Mapping[str, Any]) -> Kind | None:
    """The class of that name, if it is one of ours or a path: members of others cannot always be told."""
    found = names.get(word)
    ours = isinstance(found, type) and (found is Path or found.__module__.startswith("cumulant."))
    if not isinstance(found, type) or not ours or getattr(found, "_is_protocol", False) or word == "Captured":
        return None
    return f"{'an' if word[0] in 'AEIO' else 'a'} {word}", lambda x: isinstance(x, found)


def _shown(x: Any) -> str:
    shape = getattr(x, "shape", None)
    return repr(x) if shape is None else f"{type(x).__name__} of shape {tuple(shape)}"
