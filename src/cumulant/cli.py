"""`cumulant <command>`: the table of commands and how their words are read. Each command lies in a room.

No heavy import: `cumulant --help` reads this file alone, the help of a command its options too.
"""

from __future__ import annotations

import io
import os
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import make_dataclass, replace
from functools import reduce
from importlib import import_module
from operator import or_
from typing import Annotated, Any

import tyro

from cumulant import __version__
from cumulant.command import Command, failed, stopped

DESCRIPTION = """Linear-time attention from the cumulant expansion of softmax.

Example, training four mechanisms and writing a report: cumulant reproduce

Example, training one model from a recipe: cumulant train digits

Options of a command, with examples: cumulant reproduce --help

Version: cumulant --version"""

COMMANDS = {  # name -> where its options are, and what it does, as the first paragraph there has it
    "reproduce": (
        "studies.command:Reproduce",
        "Compare attention mechanisms as the cumulant-attention paper does: on handwritten digits, or on your data.",
    ),
    "train": (
        "train.command:Train",
        "Train a classifier of images or videos, or a language model, from a recipe: a built-in name or a TOML file.",
    ),
    "evaluate": (
        "train.command:Evaluate",
        "Print the top-1 and top-5 accuracy of a checkpoint that `cumulant train` wrote; for a text, bits per byte.",
    ),
    "study": (
        "studies.command:Study",
        "Try what papers say about attention, in minutes: each claim is confirmed, refuted or not told apart.",
    ),
    "bench": (
        "studies.command:Bench",
        "Measure on this machine: speed, error against softmax, cost by length, accuracy, four uses of attention.",
    ),
    "diagnose": (
        "conversion.command:Diagnose",
        "Measure where a trained model can do without softmax: logit spread and error of each order by layer and head.",
    ),
    "convert": (
        "conversion.command:Convert",
        "Put attention of linear cost into a trained model and save it; `cumulant.convert.load(FOLDER)` loads it.",
    ),
    "explore": (
        "web.command:Explore",
        "Open a local page that shows where attention looks: click a patch, see the signed map of every layer and "
        "head.",
    ),
    "list": (
        "listing:List",
        "Print the names that can be used: mechanisms, layers, models or studies, with what each is and can do.",
    ),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 done, 1 failed, 2 wrong arguments, 3 time was over, 130 stopped."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with plain_warnings(), written_out():
            if words in (["--version"], ["-V"]):
                print(f"cumulant {__version__}")
                return 0
            return parse(words or ["--help"]).run()
    except ValueError as error:
        return failed(error, 2)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        return 141
    except (OSError, ImportError, FloatingPointError) as error:
        return failed(error)
    except KeyboardInterrupt:
        return stopped()


@contextmanager
def written_out() -> Iterator[None]:
    """What is printed gets out before the command ends, in any encoding: letters that it lacks become `?`.

    Short texts would otherwise meet a reader that is gone, or a full disk, when nobody can tell it any more.
    """
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="replace")
    try:
        yield
    finally:
        try:
            if sys.stdout is not None:
                sys.stdout.flush()
        except OSError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # or the interpreter tries once more
            raise


@contextmanager
def plain_warnings() -> Iterator[None]:
    """Warnings for the user in one line each, without the place in the code that those for programmers have."""
    before = warnings.formatwarning

    def plain(message: Any, category: type[Warning], *place: Any, **more: Any) -> str:
        ours = category is UserWarning
        return f"cumulant: warning: {message}\n" if ours else before(message, category, *place, **more)

    warnings.formatwarning = plain
    try:
        yield
    finally:
        warnings.formatwarning = before


def read_none(words: list[str]) -> None:
    """None from the one word given; the next type that the option may have is tried where it says something else."""
    from cumulant.grammar import says_none

    if not says_none(words[0]):
        raise ValueError(f"not the word none: {words[0]!r}")


def none_rule(info: tyro.constructors.PrimitiveTypeInfo) -> tyro.constructors.PrimitiveConstructorSpec[None] | None:
    """How None is given to an option and shown in the help: `--clip none`, where tyro alone takes `None` only."""
    if info.type is not type(None):
        return None
    return tyro.constructors.PrimitiveConstructorSpec(
        nargs=1,
        metavar="none",
        instance_from_str=read_none,
        is_instance=lambda value: value is None,
        str_from_instance=lambda value: ["none"],
    )


RULES = tyro.constructors.ConstructorRegistry()
RULES.primitive_rule(none_rule)


def parse(words: list[str]) -> Command:
    """The command that the words stand for. Each has a parser of its own, whose errors speak of no other command."""
    config = [tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes]
    name, *options = words
    with RULES:
        if name not in COMMANDS:  # help, or no command: brief words on each will do
            each = (Annotated[make_dataclass(key, []), subcommand(key, text)] for key, (_, text) in COMMANDS.items())
            every: Any = reduce(or_, each)
            return tyro.cli(every, prog="cumulant", description=DESCRIPTION, args=words, config=config)
        kind = options_of(name)
        if name == "train" and {"-h", "--help"} & set(options):
            kind = kind.brief()
        options = ["--help" if word == "--help-all" and name == "train" else word for word in options]
        if name == "train" and (recipe := kind.with_recipe(options)) is not None:
            # The recipe may have a flag on or off, so both forms can be given.
            command = tyro.cli(
                kind, prog="cumulant train", description=recipe.description, args=options, default=recipe, config=config
            )
            return replace(command, settings=recipe.settings.merged(command.settings))
        return tyro.cli(kind, prog=f"cumulant {name}", args=options, config=[*config, tyro.conf.FlagCreatePairsOff])


def subcommand(name: str, description: str) -> Any:
    return tyro.conf.subcommand(name, description=description)


def options_of(name: str) -> Any:
    """The dataclass of a command's options."""
    module, kind = COMMANDS[name][0].split(":")
    return getattr(import_module(f"cumulant.{module}"), kind)


if __name__ == "__main__":  # for torchrun -m cumulant.cli
    sys.exit(main())
