"""What options of mechanisms may be, by their names: checked where a user gives them, not in every call of a layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor

from ..call import check_count, check_flag, is_finite, is_whole

Check = Callable[[str, Any], None]


def at_least(least: int) -> Check:
    """A whole number from `least` on."""
    return lambda name, given: check_count(name, given, least)


def number(name: str, given: Any) -> None:
    """A finite number, 0 or more."""
    if not _real(given) or not is_finite(given) or given < 0:
        raise ValueError(f"{name} must be a finite number that is not negative, got {given!r}")


def positive(name: str, given: Any) -> None:
    if not _real(given) or not is_finite(given) or given <= 0:
        raise ValueError(f"{name} must be positive, got {given!r}; it is a finite number")


def number_or_none(name: str, given: Any) -> None:
    if given is not None and (not _real(given) or not 0 <= given):
        raise ValueError(f"{name} must not be negative (None takes it off), got {given!r}")


def flag_or_none(name: str, given: Any) -> None:
    if given is not None:
        check_flag(name, given)


def length(name: str, given: Any) -> None:
    """A number of tokens, one for each leading index (a tensor), or None."""
    if isinstance(given, Tensor) and not is_whole(given):
        raise TypeError(f"{name} must be a number of tokens, or a tensor of whole numbers, got {given.dtype}")
    if given is not None and not isinstance(given, Tensor):
        check_count(name, given)


def ridge(name: str, given: Any) -> None:
    if not isinstance(given, Tensor) and (not _real(given) or not is_finite(given) or given <= 0):
        raise ValueError(f"{name} must be positive and finite, got {given!r}: without it a few keys leave the fit open")


def _real(given: Any) -> bool:
    return isinstance(given, int | float) and not isinstance(given, bool)


CHECKS: Mapping[str, Check] = {
    "chunk": at_least(1), "block": at_least(1), "recent": at_least(0), "sinks": at_least(0),
    "leaves": at_least(1), "opened": at_least(0), "max_len": length,
    "position": at_least(0), "kernel": at_least(1), "eps": number,
    "clamp": number_or_none, "power": positive, "query_std": number, "ridge": ridge, "position_bias": flag_or_none,
    "conv": flag_or_none,
    **dict.fromkeys(
        ("use_rope", "use_lepe", "use_gate", "use_conv", "use_position", "use_alpha", "scaled", "exclude_own",
         "qk_norm", "precondition", "learn_ridge", "training_free", "full"), check_flag,
    ),
}  # fmt: skip
