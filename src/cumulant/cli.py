"""`cumulant <command>`: every command is a thin call into a room. Heavy imports happen inside the commands."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Annotated, Any

import tyro

from cumulant.commands import Bench, Error, ListMechanisms, Speed
from cumulant.studies.settings import Reproduce
from cumulant.train_commands import Evaluate, Train, train_with_recipe

DESCRIPTION = """Linear-time attention from the cumulant expansion of softmax.

Example, training four mechanisms and writing a report: cumulant reproduce

Example, training one model from a recipe: cumulant train digits

Options of a command, with examples: cumulant reproduce --help"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 done, 1 failed, 2 wrong arguments, 130 stopped by Ctrl-C."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        command = parse(words or ["--help"])
        if isinstance(command, Train):
            return train(command)
        if isinstance(command, Evaluate):
            return evaluate(command)
        if isinstance(command, Bench):
            return bench(command.what)
        return list_mechanisms(command) if isinstance(command, ListMechanisms) else reproduce(command)
    except ValueError as error:
        print(f"cumulant: error: {error}", file=sys.stderr)
        return 2


def parse(words: list[str]) -> Any:
    """The command that the words stand for."""
    recipe = train_with_recipe(words[1:]) if words[0] == "train" else None
    options = {} if recipe is None else {"default": recipe}
    commands = (
        Annotated[Reproduce, tyro.conf.subcommand("reproduce")]
        | Annotated[Train, tyro.conf.subcommand("train", **options)]
        | Annotated[Evaluate, tyro.conf.subcommand("evaluate")]
        | Annotated[Bench, tyro.conf.subcommand("bench")]
        | Annotated[ListMechanisms, tyro.conf.subcommand("list")]
    )
    config = [tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes]
    if recipe is None:  # a recipe may have a flag on or off, so both forms can be given
        config.append(tyro.conf.FlagCreatePairsOff)
    command = tyro.cli(commands, prog="cumulant", description=DESCRIPTION, args=words, config=config)
    if recipe is not None and isinstance(command, Train):
        command = replace(command, settings=recipe.settings.merged(command.settings))
    return command


def train(command: Train) -> int:
    from cumulant import train as room

    folder = command.folder
    try:
        result = room.train(command.settings, folder, device=command.device, fresh=command.fresh, progress=sys.stderr)
    except (OSError, ImportError, FloatingPointError) as error:
        print(f"cumulant: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nstopped. The state is kept in {folder}; give the same command again to go on.", file=sys.stderr)
        return 130
    if os.environ.get("RANK", "0") != "0":  # one process of torchrun speaks for all
        return 0
    if command.json:
        print(json.dumps(asdict(result), indent=1, default=str))
    else:
        print(
            f"top-1 {result.top1:.2%}  top-5 {result.top5:.2%}  (best {result.best_top1:.2%} in epoch "
            f"{result.best_epoch})  {result.parameters:,} parameters  {result.seconds:.0f} s\n"
            f"weights, log and result are in {folder}"
        )
    return 0


def evaluate(command: Evaluate) -> int:
    from cumulant.train import evaluate_checkpoint

    try:
        found, classes = evaluate_checkpoint(
            command.checkpoint,
            command.data,
            views=command.views,
            crops=command.crops,
            batch_size=command.batch_size,
            workers=command.workers,
            device=command.device,
            progress=sys.stderr,
        )
        if os.environ.get("RANK", "0") != "0":
            return 0
        if command.predictions is not None:
            found.save(command.predictions)
    except (OSError, ImportError) as error:
        print(f"cumulant: error: {error}", file=sys.stderr)
        return 1
    each = dict(zip(classes, found.per_class().tolist(), strict=True))
    if command.json:
        values = {"top1": found.top(1), "top5": found.top(5), "items": len(found.labels)}
        shown = {name: None if math.isnan(value) else value for name, value in each.items()}
        print(json.dumps({**values, **({"per_class": shown} if command.per_class else {})}, indent=1))
        return 0
    if command.per_class:
        for name, value in sorted(each.items(), key=lambda pair: (math.isnan(pair[1]), -pair[1])):
            print(f"{'no items' if math.isnan(value) else format(value, '.2%'):>8}  {name}")
    print(f"top-1 {found.top(1):.2%}  top-5 {found.top(5):.2%}  ({len(found.labels):,} items)")
    return 0


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


if __name__ == "__main__":  # for torchrun -m cumulant.cli
    sys.exit(main())
