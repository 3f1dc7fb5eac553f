"""`cumulant <command>`: every command is a thin call into a room. Heavy imports happen inside the commands."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from typing import Annotated

import tyro

from cumulant.commands import Bench, Error, ListMechanisms, Speed
from cumulant.studies.settings import Reproduce

Command = (
    Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
    | Annotated[Bench, tyro.conf.subcommand("bench")]
    | Annotated[ListMechanisms, tyro.conf.subcommand("list")]
)

DESCRIPTION = """Linear-time attention from the cumulant expansion of softmax.

Example, training four mechanisms and writing a report: cumulant reproduce

Options of a command, with examples: cumulant reproduce --help"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 done, 1 failed, 2 wrong arguments, 130 stopped by Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        command = tyro.cli(
            Command,
            prog="cumulant",
            description=DESCRIPTION,
            args=words or ["--help"],
            config=(tyro.conf.FlagCreatePairsOff, tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes),
        )
        if isinstance(command, Bench):
            return bench(command.what)
        return list_mechanisms(command) if isinstance(command, ListMechanisms) else reproduce(command)
    except ValueError as error:
        print(f"cumulant: error: {error}", file=sys.stderr)
        return 2


def reproduce(settings: Reproduce) -> int:
    from cumulant.studies import digits
    from cumulant.studies.runs import RunError

    try:
        if settings.report_only:
            results = digits.remake_report(settings.out)
        else:
            results = digits.reproduce(settings, progress=sys.stderr)
    except (OSError, RunError, ImportError) as error:
        print(f"cumulant: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        again = "the command without --fresh" if settings.fresh else "the same command"
        print(f"\nstopped. Finished runs are kept in {settings.out}; give {again} again to go on.", file=sys.stderr)
        return 130
    report = settings.out / "report.html"
    if settings.json:
        print(json.dumps(results, indent=1))
    else:
        print(digits.terminal_summary(results))
        print(f"\nopen {report} in a browser to see the report")
    return 0


def bench(settings: Speed | Error) -> int:
    if isinstance(settings, Error):
        from cumulant.bench import softmax_error

        errors = softmax_error(settings.sizes, length=settings.length, dim=settings.dim)
        if settings.json:
            print(json.dumps(errors, indent=1))
            return 0
        print("relative error against softmax\n" + f"{'logit size':20s}" + "".join(f"{x:>9g}" for x in settings.sizes))
        for name, curve in errors["relative_error"].items():
            print(f"{name:20s}" + "".join(f"{error:9.1e}" for error in curve))
        return 0
    from cumulant.bench import speed

    try:
        result = speed.run(
            settings, progress=lambda text: print(text, file=sys.stderr if settings.json else sys.stdout)
        )
    except (OSError, ImportError) as error:
        print(f"cumulant: error: {error}", file=sys.stderr)
        return 1
    print(json.dumps(result, indent=1) if settings.json else f"wrote {settings.out}/speed.json and speed.svg")
    return 0


def list_mechanisms(options: ListMechanisms) -> int:
    from cumulant import zoo

    able = ("causal", "cross", "key_mask", "grouped_queries", "subquadratic", "streaming", "ragged")
    rows = []
    for name in zoo.names():
        mechanism = zoo.get(name)
        rows.append(
            {
                **{key: getattr(mechanism, key) for key in ("name", "summary", "paper", "year", "cost")},
                **{key: getattr(mechanism, key) for key in able},
            }
        )
    if options.json:
        print(json.dumps(rows, indent=1))
        return 0
    width = max(len(row["name"]) for row in rows)
    cost = max(len(row["cost"]) for row in rows)
    print(f"{'name':{width}}  {'cost':{cost}}  what it is, and what it can do")
    for row in rows:
        can = ", ".join(key.replace("_", " ") for key in able if row[key]) or "none of the patterns below"
        print(f"{row['name']:{width}}  {row['cost']:{cost}}  {row['summary']} ({row['paper']}, {row['year']})")
        print(f"{'':{width}}  {'':{cost}}  {can}")
    print(
        "\ncost: multiply-adds of one head for L tokens, key width D, value width E\n"
        "causal: tokens see only the past · cross: queries and keys of different sequences · key mask: padding or\n"
        "weights · grouped queries: several query heads share a key head · subquadratic: no L x L work · streaming:\n"
        "constant memory while tokens arrive · ragged: sequences of different lengths packed without padding"
    )
    return 0
