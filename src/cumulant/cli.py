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

from cumulant.commands import Bench, Efficiency, Error, ListMechanisms, Speed, TrainBench
from cumulant.convert.settings import Convert, Diagnose
from cumulant.studies.settings import Reproduce
from cumulant.train_commands import Evaluate, Train, train_with_recipe
from cumulant.web.settings import Explore

DESCRIPTION = """Linear-time attention from the cumulant expansion of softmax.

Example, training four mechanisms and writing a report: cumulant reproduce

Example, training one model from a recipe: cumulant train digits

Options of a command, with examples: cumulant reproduce --help"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 done, 1 failed, 2 wrong arguments, 3 time was over, 130 stopped."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        command = parse(words or ["--help"])
        if isinstance(command, Train):
            return train(command)
        if isinstance(command, Evaluate):
            return evaluate(command)
        if isinstance(command, Bench):
            return bench(command.what)
        if isinstance(command, Explore):
            return explore(command)
        if isinstance(command, Diagnose):
            return diagnose(command)
        if isinstance(command, Convert):
            return convert(command)
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
        | Annotated[Diagnose, tyro.conf.subcommand("diagnose")]
        | Annotated[Convert, tyro.conf.subcommand("convert")]
        | Annotated[Explore, tyro.conf.subcommand("explore")]
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
    from cumulant.studies import study
    from cumulant.studies.terminal import terminal_summary

    try:
        if settings.report_only:
            results = study.remake_report(settings)
        else:
            results = study.reproduce(settings, progress=sys.stderr)
    except study.TimeOverError as error:
        print(f"cumulant: {error}", file=sys.stderr)
        return 3
    except (OSError, study.RunError, ImportError) as error:
        print(f"cumulant: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        again = "the command without --fresh" if settings.fresh else "the same command"
        print(f"\nstopped. Finished runs are kept in {settings.folder}; give {again} again to go on.", file=sys.stderr)
        return 130
    if settings.json:
        print(json.dumps(results, indent=1))
    else:
        print(terminal_summary(results))
        print(f"\nopen {settings.folder / 'report.html'} in a browser to see the report")
    return 3 if settings.minutes is not None and results["missing"] else 0


def bench(settings: Speed | Error | Efficiency | TrainBench) -> int:
    try:
        if isinstance(settings, Error) and settings.quick:
            return quick_error(settings)
        if isinstance(settings, Speed):
            return bench_speed(settings)
        return bench_report(settings)
    except (OSError, ImportError) as error:
        print(f"cumulant: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        kept = "; finished runs are kept: give the same command again to go on" * isinstance(settings, TrainBench)
        print(f"\nstopped{kept}", file=sys.stderr)
        return 130


def quick_error(settings: Error) -> int:
    from cumulant.bench import softmax_error

    errors = softmax_error(settings.sizes, length=settings.length, dim=settings.dim)
    if settings.json:
        print(json.dumps(errors, indent=1))
        return 0
    print("relative error against softmax\n" + f"{'logit size':20s}" + "".join(f"{x:>9g}" for x in settings.sizes))
    for name, curve in errors["relative_error"].items():
        print(f"{name:20s}" + "".join(f"{error:9.1e}" for error in curve))
    return 0


def bench_speed(settings: Speed) -> int:
    from cumulant.bench import speed

    result = speed.run(settings, progress=lambda text: print(text, file=sys.stderr if settings.json else sys.stdout))
    print(json.dumps(result, indent=1) if settings.json else f"wrote {settings.out}/speed.json and speed.svg")
    return 0


def bench_report(settings: Error | Efficiency | TrainBench) -> int:
    """Error against cost, cost against length, accuracy: measured, written into --out, shown as a table."""
    from cumulant.bench import crossings, efficiency, pareto, report, training

    report.prepare(settings.out)
    if isinstance(settings, Error):
        result, table = pareto.run(settings, sys.stderr), pareto.table
    elif isinstance(settings, Efficiency):
        screen = sys.stderr if settings.json else sys.stdout
        result = efficiency.run(settings, lambda text: print(text, file=screen, flush=True), minutes=settings.minutes)
        table = crossings.table
    else:
        result, table = training.run(settings, sys.stderr, minutes=settings.minutes), training.table
    result = report.publish(result, settings)
    print(json.dumps(result, indent=1) if settings.json else table(result))
    if not settings.json:
        print(f"\nwrote {settings.out}/{result['bench']}.json, .svg and .png; open {settings.out}/report.html")
    return 1 if result.get("failed") else 0


def diagnose(settings: Diagnose) -> int:
    from cumulant.convert.command import run_diagnose

    try:
        found = run_diagnose(settings, progress=sys.stderr)
    except (OSError, ImportError, RuntimeError) as error:
        print(f"cumulant: error: {error}", file=sys.stderr)
        return 1
    if settings.json:
        print(json.dumps(found.to_json(), indent=1))
        return 0
    print(f"{found.table()}\n\n{found.proposal(settings.budget)}\n")
    print(f"wrote {settings.out}/diagnosis.json and diagnosis.svg")
    return 0


def convert(settings: Convert) -> int:
    from cumulant.convert.command import run_convert

    try:
        report = run_convert(settings, progress=sys.stderr)
    except (OSError, ImportError, RuntimeError, FloatingPointError) as error:
        print(f"cumulant: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print(f"\nstopped. What was saved is in {settings.out}; give the same command again to go on.", file=sys.stderr)
        return 130
    print(json.dumps(report.to_json(), indent=1) if settings.json else report)
    if not settings.json:
        print(f"the model is in {settings.out}; load it with load() of cumulant.convert")
    return 0


def explore(settings: Explore) -> int:
    from cumulant.web import serve

    try:
        serve.explore(settings, progress=sys.stderr)
    except (OSError, ImportError) as error:
        print(f"cumulant: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("\nthe explorer has ended", file=sys.stderr)
    return 0


def list_mechanisms(options: ListMechanisms) -> int:
    """The registry; what each can do is found by running it, not read from what it declares."""
    from tqdm import tqdm

    from cumulant import zoo

    able = ("causal", "cross", "key_mask", "grouped_queries", "weights", "subquadratic", "streaming", "ragged")
    rows = []
    for name in tqdm(zoo.names(), desc="running each mechanism", leave=False, disable=None):
        mechanism, marks = zoo.get(name), zoo.capabilities(name)[name]
        told = {key: getattr(mechanism, key) for key in ("name", "summary", "paper", "year", "cost")}
        rows.append({**told, "patterns": list(mechanism.patterns), **marks, "options": list(mechanism.options)})
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
        "\ncost: order of the multiply-adds of one head for L tokens, key width D, value width E. Found by running:\n"
        "causal: tokens see only the past · cross: queries and keys of different sequences · key mask: padding or\n"
        "weights · grouped queries: several query heads share a key head · weights: the L x L map can be shown\n"
        "subquadratic: no L x L work · streaming: constant memory while tokens arrive · ragged: sequences of\n"
        "different lengths packed without padding"
    )
    return 0


if __name__ == "__main__":  # for torchrun -m cumulant.cli
    sys.exit(main())
