"""Recipes as TOML files: the built-in ones by name, yours by path; a wrong key or value is named with what is right."""

from __future__ import annotations

import dataclasses
import json
import tomllib
import types
from collections.abc import Mapping
from dataclasses import asdict, fields
from importlib import resources
from itertools import takewhile
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from ..data.augmentation import PRESETS
from ..grammar import read_blocks, says_none, suggest, write_blocks
from .train_recipe import TrainRecipe

Settings = TypeVar("Settings")

# What may change between two parts of a run: the steps stay the same, but for rounding and what is told of them.
FREE = ("workers", "in_memory", "max_bad", "parallel", "context_parallel", "accumulate", "cuda_graph", "eval_epochs",
        "checkpoint_epochs", "checkpoint_steps", "log_steps", "tensorboard", "wandb")  # fmt: skip


def recipe_names() -> list[str]:
    """Names of the built-in recipes."""
    folder = resources.files(__package__) / "recipes"
    return sorted(entry.name.removesuffix(".toml") for entry in folder.iterdir() if entry.name.endswith(".toml"))


def read_recipe(name: str | Path) -> TrainRecipe:
    """The built-in recipe of that name, or the one in the TOML file at that path."""
    return parse_recipe(recipe_text(name), where=str(name))


def recipe_text(name: str | Path) -> str:
    """The TOML of a recipe; its head says what the recipe is for and what to expect of it."""
    path = Path(name)
    if path.suffix == ".toml":
        if not path.is_file():
            known = f"; the built-in one is called {path.stem}" if path.stem in recipe_names() else ""
            raise ValueError(f"there is no recipe file {path}{known}")
        try:
            return path.read_text(encoding="utf-8")
        except UnicodeDecodeError as error:
            raise ValueError(f"{path} is not a text in UTF-8, as recipes are: {error}") from error
    if str(name) not in recipe_names():
        raise ValueError(
            f"unknown recipe {str(name)!r}; {suggest(str(name), recipe_names())}, or a path to a .toml file"
        )
    return (resources.files(__package__) / "recipes" / f"{name}.toml").read_text(encoding="utf-8")


def recipe_head(name: str | Path) -> str:
    """The comment at the head of a recipe, without its marks: what it is for, its command, machine, time and figure."""
    lines = takewhile(lambda line: line.startswith("#"), recipe_text(name).splitlines())
    return "\n".join(line.removeprefix("#").removeprefix(" ") for line in lines)


def parse_recipe(text: str, *, where: str = "recipe") -> TrainRecipe:
    """The recipe that a TOML text stands for; what it does not name is as in `TrainRecipe()`.

    `preset` in the table of the augmentation names the values to start from, see `cumulant.data.augmentation.PRESETS`.
    """
    try:
        content = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ValueError(f"{where} is not valid TOML: {error}") from error
    if isinstance(content.get("attention"), list):
        content["attention"] = write_blocks(read_blocks(content["attention"]))
    augmentation = content.get("augmentation")
    if isinstance(augmentation, dict) and "preset" in augmentation:
        preset = augmentation.pop("preset")
        if preset not in PRESETS:
            raise ValueError(f"{where}: unknown augmentation preset {preset!r}; {suggest(str(preset), list(PRESETS))}")
        content["augmentation"] = asdict(PRESETS[preset]) | augmentation
    return _build(TrainRecipe, content, where)


def to_json(recipe: TrainRecipe) -> str:
    """The whole recipe as one line of JSON, for headers and logs."""
    return json.dumps(asdict(recipe), sort_keys=True)


def from_json(text: str) -> TrainRecipe:
    """The recipe that `to_json` wrote."""
    content = json.loads(text)
    if not isinstance(content, dict):
        raise ValueError(f"a recipe is a table of names and values, got {text[:40]!r}")
    return _build(TrainRecipe, content, "the recipe of the checkpoint", lenient=True)


def check_value(key: str, value: Any, where: str) -> None:
    """Refuse a value that is not of the kind of that field of a recipe."""
    _fit(value, get_type_hints(TrainRecipe)[key], f"{key} in {where!r}", lenient=False)


def differences(old: TrainRecipe, new: TrainRecipe) -> list[str]:
    """'field: old -> new' for whatever would make the rest of a run another one."""
    before, after = (_flat(json.loads(to_json(recipe))) for recipe in (old, new))  # a tuple is a list there
    return [
        f"{key}: {before.get(key)!r} -> {after.get(key)!r}"
        for key in sorted(before.keys() | after.keys())
        if key not in FREE and before.get(key) != after.get(key)
    ]


def _flat(value: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    flat: dict[str, Any] = {}
    for key, one in value.items():
        flat.update(_flat(one, f"{prefix}{key}.") if isinstance(one, Mapping) else {prefix + key: one})
    return flat


def _build(kind: type[Settings], content: Mapping[str, Any], where: str, lenient: bool = False) -> Settings:
    """An instance of a dataclass from a table; `lenient` passes over keys that another version wrote."""
    hints = get_type_hints(kind, include_extras=False)
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    values = {}
    for key, value in content.items():
        if key not in known:
            if lenient:
                continue
            raise ValueError(f"{where} has an unknown key {key!r}; {suggest(key, known)}")
        values[key] = _fit(value, hints[key], f"{where}: {key}", lenient)
    return kind(**values)


def _fit(value: Any, hint: Any, where: str, lenient: bool) -> Any:
    """The TOML or JSON value as the type of its field: lists become tuples, integers floats, "none" None."""
    origin, args = get_origin(hint), get_args(hint)
    if origin is Annotated:
        return _fit(value, args[0], where, lenient)
    if hint is Any or hint is None or (origin is None and hint is dict):
        return value
    if origin in (Union, types.UnionType):
        if type(None) in args and (value is None or says_none(value)):
            return None
        for choice in args:
            if choice is not type(None):
                try:
                    return _fit(value, choice, where, lenient)
                except ValueError:
                    continue
    elif origin is Literal and value in args:
        return value
    elif dataclasses.is_dataclass(hint) and isinstance(hint, type) and isinstance(value, Mapping):
        return _build(hint, value, where, lenient)
    elif origin is tuple and isinstance(value, list | tuple):
        kinds = args[:1] * len(value) if args[-1:] == (Ellipsis,) else args
        if len(kinds) == len(value):
            return tuple(_fit(one, kind, where, lenient) for one, kind in zip(value, kinds, strict=True))
    elif origin is dict and isinstance(value, Mapping):
        return dict(value)
    elif hint is float and isinstance(value, int | float) and not isinstance(value, bool):
        return float(value)
    elif isinstance(hint, type) and type(value) is hint:
        return value
    wanted = " | ".join(map(repr, args)) if origin is Literal else getattr(hint, "__name__", str(hint))
    raise ValueError(f"{where} must be {str(hint) if args and origin is not Literal else wanted}, got {value!r}")
