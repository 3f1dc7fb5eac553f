"""`cumulant <command>`: every command is a thin call into a room. Heavy imports happen inside the commands."""

from __future__ import annotations

import inspect
import io
import json
import math
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from functools import reduce
from operator import or_
from typing import Annotated, Any

import tyro

from cumulant import __version__
from cumulant.commands import Bench, Efficiency, Error, ListMechanisms, Speed, TrainBench
from cumulant.conversion.settings import Convert, Diagnose
from cumulant.studies.settings import Reproduce
from cumulant.train_commands import Evaluate, Train, train_with_recipe
from cumulant.web.settings import Explore
from cumulant.zoo.grammar import says_none

DESCRIPTION = """Linear-time attention from the cumulant expansion of softmax.

Example, training four mechanisms and writing a report: cumulant reproduce

Example, training one model from a recipe: cumulant train digits

Options of a command, with examples: cumulant reproduce --help

Version: cumulant --version"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit status: 0 done, 1 failed, 2 wrong arguments, 3 time was over, 130 stopped."""
    words = list(sys.argv[1:] if arguments is None else arguments)
    try:
        with plain_warnings(), written_out():
            if words in (["--version"], ["-V"]):
                print(f"cumulant {__version__}")
                return 0
            return run(parse(words or ["--help"]))
    except ValueError as error:
        return failed(error, 2)
    except BrokenPipeError:  # the reader, `head` say, has seen enough
        return 141
    except (OSError, ImportError, FloatingPointError) as error:
        return failed(error)
    except KeyboardInterrupt:
        print("\nstopped", file=sys.stderr)
        return 130


def run(command: Any) -> int:
    """What a command does; errors and Ctrl-C that it has nothing to say about are told by `main`."""
    return next(work for kind, work in COMMANDS.values() if isinstance(command, kind))(command)


def failed(error: BaseException, status: int = 1) -> int:
    """Tell the error in one line, an OSError without its number; the exit status."""
    text = str(error)
    if isinstance(error, OSError) and error.strerror:
        text = error.strerror if error.filename is None else f"{error.filename}: {error.strerror}"
    print(f"cumulant: error: {text}", file=sys.stderr)
    return status


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


def parse(words: list[str]) -> Any:
    """The command that the words stand for. Each has a parser of its own, whose errors speak of no other command."""
    config = [tyro.conf.OmitSubcommandPrefixes, tyro.conf.OmitArgPrefixes]
    name, *options = words
    recipe = train_with_recipe(options) if name == "train" else None
    with RULES:
        if recipe is not None:  # it may have a flag on or off, so both forms can be given
            command = tyro.cli(
                Train,
                prog="cumulant train",
                description=recipe.description,
                args=options,
                default=recipe,
                config=config,
            )
            return replace(command, settings=recipe.settings.merged(command.settings))
        config.append(tyro.conf.FlagCreatePairsOff)
        if name in COMMANDS:
            return tyro.cli(COMMANDS[name][0], prog=f"cumulant {name}", args=options, config=config)
        brief = {key: inspect.cleandoc(kind.__doc__).split("\n\n")[0] for key, (kind, _) in COMMANDS.items()}
        each = (Annotated[kind, tyro.conf.subcommand(k, description=brief[k])] for k, (kind, _) in COMMANDS.items())
        every: Any = reduce(or_, each)
        return tyro.cli(every, prog="cumulant", description=DESCRIPTION, args=words, config=config)


def train(command: Train) -> int:
    from torch import OutOfMemoryError

    from cumulant import train as room

    folder = command.folder
    finished = (folder / "result.json").is_file() and not command.fresh
    try:
        result = room.train(command.settings, folder, device=command.device, fresh=command.fresh, progress=sys.stderr)
    except OutOfMemoryError as error:
        said, advice = str(error).splitlines()[0], "cut every batch into parts with --accumulate, or lower --batch-size"
        return failed(RuntimeError(f"{said} To take less: {advice}"))
    except KeyboardInterrupt:
        print(f"\nstopped. The state is kept in {folder}; give the same command again to go on.", file=sys.stderr)
        return 130
    if os.environ.get("RANK", "0") != "0":  # one process of torchrun speaks for all
        return 0
    if finished:
        print("this run is finished already (--fresh trains it anew)", file=sys.stderr)
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
    from cumulant.train.files import claim_room

    if command.predictions is not None:
        if command.predictions.is_dir():
            raise ValueError(f"--predictions must be a file to write, got the folder {command.predictions}")
        claim_room(command.predictions.parent, 0)
    found, classes = evaluate_checkpoint(
        command.checkpoint,
        command.data,
        data_options=command.data_options,
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
        return time_over(error)
    except study.RunError as error:
        return failed(error)
    except KeyboardInterrupt as stop:
        again = "the command without --fresh" if settings.fresh else "the same command"
        print(f"\nstopped. {stop}".rstrip(), file=sys.stderr)
        print(f"Finished runs are kept in {settings.folder}; give {again} again to go on.", file=sys.stderr)
        return 130
    if settings.json:
        print(json.dumps(results, indent=1))
    else:
        print(terminal_summary(results))
        print(f"\nopen {settings.folder / 'report.html'} in a browser to see the report")
    return 3 if settings.minutes is not None and results["missing"] else 0


def bench(command: Bench) -> int:
    settings = command.what
    try:
        if isinstance(settings, Error) and settings.quick:
            return quick_error(settings)
        if isinstance(settings, Speed):
            return bench_speed(settings)
        return bench_report(settings)
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        return failed(RuntimeError(f"{str(error).splitlines()[0]} To take less: fewer tokens"))
    except KeyboardInterrupt:
        kept = "; finished runs are kept: give the same command again to go on" * isinstance(settings, TrainBench)
        print(f"\nstopped{kept}", file=sys.stderr)
        return 130


def time_over(error: BaseException) -> int:
    """Tell that the time given was over; the exit status of that."""
    print(f"cumulant: {error}", file=sys.stderr)
    return 3


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
    from cumulant.studies.study import TimeOverError

    report.prepare(settings.out)
    if isinstance(settings, Error):
        result, table = pareto.run(settings, sys.stderr), pareto.table
    elif isinstance(settings, Efficiency):
        screen = sys.stderr if settings.json else sys.stdout
        result = efficiency.run(settings, lambda text: print(text, file=screen, flush=True), minutes=settings.minutes)
        table = crossings.table
    else:
        try:
            result, table = training.run(settings, sys.stderr, minutes=settings.minutes), training.table
        except TimeOverError as error:
            return time_over(error)
    result = report.publish(result, settings)
    print(json.dumps(result, indent=1) if settings.json else table(result))
    if not settings.json:
        print(f"\nwrote {settings.out}/{result['bench']}.json, .svg and .png; open {settings.out}/report.html")
    return 1 if result.get("failed") else 3 if result.get("missing") else 0


def diagnose(settings: Diagnose) -> int:
    from cumulant.conversion.command import run_diagnose

    try:
        found = run_diagnose(settings, progress=sys.stderr)
    except RuntimeError as error:
        return failed(error)
    if settings.json:
        print(json.dumps(found.to_json(), indent=1))
        return 0
    print(f"{found.table()}\n\n{found.proposal(settings.budget)}\n")
    print(f"wrote {settings.out}/diagnosis.json and diagnosis.svg")
    return 0


def convert(settings: Convert) -> int:
    from cumulant.conversion.command import run_convert

    try:
        report = run_convert(settings, progress=sys.stderr)
    except RuntimeError as error:
        return failed(error)
    except KeyboardInterrupt:
        print(f"\nstopped. What was saved is in {settings.out}; give the same command again to go on.", file=sys.stderr)
        return 130
    print(json.dumps(report.to_json(), indent=1) if settings.json else report)
    if not report.replaced:
        return failed(ValueError(f"nothing was replaced, so no model was written into {settings.out}"))
    if not settings.json:
        print(f"the model is in {settings.out}; load it with load() of cumulant.convert")
    return 0


def explore(settings: Explore) -> int:
    from cumulant.web import serve

    try:
        serve.explore(settings, progress=sys.stderr)
    except RuntimeError as error:  # a model or a package that does not work here
        return failed(error)
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


COMMANDS: dict[str, tuple[Any, Callable[[Any], int]]] = {  # name -> its arguments, and what does it
    "reproduce": (Reproduce, reproduce),
    "train": (Train, train),
    "evaluate": (Evaluate, evaluate),
    "bench": (Bench, bench),
    "diagnose": (Diagnose, diagnose),
    "convert": (Convert, convert),
    "explore": (Explore, explore),
    "list": (ListMechanisms, list_mechanisms),
}


if __name__ == "__main__":  # for torchrun -m cumulant.cli
    sys.exit(main())
