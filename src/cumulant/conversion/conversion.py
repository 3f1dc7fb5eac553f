"""`convert`: another attention in a model that exists, checked on the way, with a report of what was done."""

from __future__ import annotations

import fnmatch
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any, TextIO

import torch
from torch import Tensor, nn

from ..call import check_count
from ..cluster.dial import check_target
from ..inspect.batches import Batch, answers, check_model, check_numbers, evaluating, relative_error, some
from ..inspect.examples import example_for
from ..inspect.sites import Site, unwindowed
from ..inspect.watching import kept_plan
from ..kinds import kinds_checked
from ..nn.swapped import plan as plans
from ..nn.swapped.choice import KEPT, SOFTMAX, Choice, fitting
from .checks import check_runs, check_taken_over, compared_by, count_calls, find_sites, uncalled, unreached
from .dial import choose_layers
from .paying import WHOLE, SlowerError, Times, device_of, seconds_of, sizes

if TYPE_CHECKING:
    from .diagnosis import Diagnosis
    from .dial import ModelDial
    from .distill_steps import DistillResult

Layers = str | Sequence[int | str] | Mapping[int | str, Any] | None


@dataclass
class ConversionReport:
    """What `convert` did. Errors are ||converted - original|| / ||original|| of the model's output."""

    model: str
    attention: str
    replaced: dict[str, Choice]
    kept: dict[str, str]  # layer: why it stays softmax
    calls: dict[str, int]  # of each replaced layer in the dry run
    measured_error: float
    compared: str | None = field(default="output", kw_only=True)  # name of the output; None if the layers reach none
    predicted_error: float | None = None  # from the diagnosis, with layers="auto"
    key_dropout: dict[str, float] = field(default_factory=dict)  # attention dropout that acts on whole keys now
    measured_on: str = "noise"  # "data" if some was given
    seconds: tuple[float, float] | None = None  # forward pass before and after, on what the error was measured
    device: str = "cpu"  # where that was
    inputs: str = ""  # shapes that it was measured on
    peak_bytes: tuple[int, int] | None = None  # the same for memory, on CUDA
    dial: ModelDial | None = None  # clusters, heads, error and cost of each layer, with layers="dial"
    distillation: DistillResult | None = None  # what training after the swap reached, where there was some

    @property
    def dropout_off(self) -> dict[str, float]:
        """Layers whose attention dropout no longer acts: none, see `key_dropout`."""
        warnings.warn("dropout_off is now key_dropout: dropout acts on whole keys", DeprecationWarning, stacklevel=2)
        return {}

    def to_json(self) -> dict[str, Any]:
        values = {key: value for key, value in vars(self).items() if key not in ("replaced", "distillation", "dial")}
        trained = None if self.distillation is None else self.distillation.to_json()
        replaced = {name: choice.to_json() for name, choice in self.replaced.items()}
        chosen = {} if self.dial is None else {"dial": self.dial.to_json()}
        return {**values, "replaced": replaced, **chosen, "distillation": trained}

    def __str__(self) -> str:
        total = len(self.replaced) + len(self.kept)
        lines = [f"{self.model}: {len(self.replaced)} of {total} attention layers replaced"]
        lines += [f"  {name}: {choice}{self._price(name)}" for name, choice in self.replaced.items()]
        lines += [f"  {name}: softmax, {reason}" for name, reason in self.kept.items()]
        if not self.replaced:
            return "\n".join([*lines, "nothing was replaced: the model is as it was"])
        said = "" if self.predicted_error is None else f", predicted {self.predicted_error:.2%}"
        what = self.compared if self.compared not in ("output", "0") else "the output"
        if what is None:
            lines.append("what the replaced layers compute reaches no output of this batch: the change is not known")
        else:
            change = "less than 0.01%" if 0 < self.measured_error < 5e-5 else f"{self.measured_error:.2%}"
            lines.append(f"relative change of {what} on {self.measured_on}: {change}{said}")
        if self.seconds is not None:
            lines.append(f"forward pass on {self.device}, inputs of shape {self.inputs}: {Times(*self.seconds)}")
        if self.peak_bytes is not None:
            before, after = (x / 2**20 for x in self.peak_bytes)
            lines.append(f"peak memory: {before:.0f} MiB before, {after:.0f} MiB after")
        if self.key_dropout:
            lines.append(f"attention dropout of {len(self.key_dropout)} layers drops whole keys in training now")
        if self.distillation is not None:
            lines.append(str(self.distillation))
        return "\n".join(lines)

    def _price(self, name: str) -> str:
        """What the dial found for a layer."""
        if self.dial is None:
            return ""
        found = self.dial.layers[name]
        return f"; error {found.error:.3f}, {found.cost:.0%} of the multiply-adds at {found.tokens:,} tokens"


@kinds_checked
def convert(
    model: nn.Module,
    attention: str | None = None,
    *,
    layer: str | None = None,
    layers: Layers = None,
    budget: float | None = None,
    target: float | None = None,
    data: Iterable[Batch] | Batch | None = None,
    example: Batch | None = None,
    options: dict[str, Any] | None = None,
    heads: bool = False,
    diagnosis: Diagnosis | None = None,
    batches: int = 4,
    output: Callable[[Any, Batch], Tensor] | None = None,
    force: bool = False,
    progress: TextIO | None = None,
) -> ConversionReport:
    """Put a mechanism of linear cost into a model of transformers, timm or this library, in place; weights stay.

        report = cumulant.convert(model, "cumulant3")                             # every layer
        report = cumulant.convert(model, layers=[4, 5])                           # by index or name pattern
        report = cumulant.convert(model, layers={4: "cumulant2", 5: {"attention": "cumulant3", "heads": [0, 2]}})
        report = cumulant.convert(model, layers="auto", budget=0.05, data=batches)  # where it is safe
        report = cumulant.convert(model, layers="dial", target=0.15, data=batches)  # clusters, where they are cheaper
        report = cumulant.convert(model, layer="moh+top=4", layers=[4, 5])        # whole layers, to be trained further

    A dry run counts that every replaced layer really runs; a layer that takes the name and ignores it, a bias or mask
    that cannot be honoured, and projections that were not taken over exactly are errors, and the model is left as it
    was. So is a plan that is slower than softmax on the `data` and this device (`SlowerError`), unless `force=True`;
    without data there is a warning. See `restore`, `save`, `load`.

    Args:
        attention: a name of `fitting()`: cumulant1, cumulant2, cumulant3 (the default) or linear; options may stand
            behind it, "cumulant3+around=mean". With `layer` any mechanism that it runs over, softmax unless given. In
            causal layers clusters keep the first 4 tokens of a text exact; "cluster16+sinks=0" does not.
        layer: a name of `cumulant.nn.layers()`, with options behind it, that takes the place of whole layers in models
            of this library and of timm. Projections are carried over; what else it has (a router, say) is fresh.
        layers: None for all that can be replaced; indices in running order or name patterns; a mapping from those to a
            mechanism, or to {"attention", "heads", "options"}; "auto" to choose by diagnosis; "dial" to choose clusters
            and heads of each layer by `choose_layers`. Where nothing is cheaper than softmax, over few
            tokens say, the dial replaces nothing and the report says so.
        budget: with layers="auto", the largest relative change of the output to accept, e.g. 0.05.
        target: with layers="dial", the largest error of a layer's own output to accept, ||out - softmax|| / ||softmax -
            mean of v||; 0.15 unless given.
        data: batches (tensors, tuples of arguments or mappings of keyword arguments); the error is measured on them.
        example: one batch for the dry run; made from the model's config unless given.
        options: of the mechanism, e.g. {"full": True}. With {"around": "mean"}, layers that are causal or attend to
            another sequence stay softmax, and tokens that the model puts before its patches have a mean of their own.
        heads: with layers="auto", also replace single heads in layers that do not fit the budget as a whole.
        diagnosis: what `diagnose` found for this model, so that layers="auto" need not find it again.
        batches: how many batches of `data` to use.
        output: function(output, batch) -> tensor to compare models by; logits or hidden states unless given.
        force: convert also where the forward pass was measured to become slower: to save memory, to serve inputs longer
            than the data, or another device.
        progress: where a bar is shown while layers="auto" or "dial" measures, e.g. sys.stderr.
    """
    check_model(model)
    if layers == "dial":
        given = {"attention": attention, "options": options, "budget": budget, "heads": heads, "diagnosis": diagnosis}
        target = 0.15 if target is None else target
        _check_dial(target, data, {name: value for name, value in given.items() if value})
    elif target is not None:
        raise ValueError(f'target={target} goes with layers="dial", got layers={layers!r}')
    if layer is not None and (layers in ("auto", "dial") or heads):
        raise ValueError(f"layer={layer!r} takes the place of whole layers, named by layers=...; got layers={layers!r}")
    check_count("batches", batches)
    if diagnosis is not None and not isinstance(diagnosis, import_module(".diagnosis", __package__).Diagnosis):
        raise TypeError(f"diagnosis must be what diagnose(model, data) found, got {diagnosis!r:.60}")
    if options is not None and not isinstance(options, Mapping):
        raise TypeError(f"options must be a mapping of names to values, got {options!r:.60}")
    if output is not None and not callable(output):
        raise TypeError(f"output must be a function(output, batch) -> tensor, got {output!r:.60}")
    attention = ("cumulant3" if layer is None else SOFTMAX) if attention is None else attention
    asked = Choice.named(attention, options, layer)
    if asked.attention == SOFTMAX and layer is None:
        raise ValueError(
            f'attention="softmax" is what the layers compute now, so nothing would be replaced; name one of '
            f"{', '.join(fitting())}"
        )
    if plans.is_converted(model):
        raise ValueError("the model is converted already; cumulant.convert.restore(model) undoes that")
    parts = plans.converted_parts(model)
    if parts:
        raise ValueError(
            f"{parts[0]} of the model is converted already; cumulant.convert.restore(model) undoes that, of the model "
            "that was converted"
        )
    if budget is not None and layers != "auto":
        raise ValueError(f'budget={budget} goes with layers="auto", got layers={layers!r}')
    if budget is not None and not budget >= 0:
        raise ValueError(f"budget must be a relative change of 0 or more, got {budget}")
    used = None if data is None else some(data, batches, model)
    first = some(example, 1, model)[0] if example is not None else used[0] if used else example_for(model)
    measured = used or [first]
    with evaluating(model):
        check_runs(model, first)
        found = find_sites(model, first)
        output, compared = compared_by(model, found, first, output)
        if compared is None and layers in ("auto", "dial"):
            raise ValueError(f"{unreached(model)}, so layers={layers!r} has nothing to go by; pass output=function")
        predicted, dial = None, None
        if target is not None and used is not None:  # layers="dial"
            dial = choose_layers(model, used, target=target, batches=len(used), force=force, progress=progress)
            if not dial.plan:
                return _nothing(model, dial, uncalled(model, found, first))
            plan = _planned(found, dial.plan, asked)
        elif layers == "auto":
            from .budget import select

            if used is None:
                raise ValueError('layers="auto" needs data: batches like those that the model will see')
            budget = 0.05 if budget is None else budget
            plan, predicted = select(model, used, asked, budget, heads, output, diagnosis, force, progress)
        else:
            plan = _planned(found, layers, asked)
        if not plan:
            why = f"fits the budget of {budget}" if layers == "auto" else f"is to be replaced by layers={layers!r}"
            raise ValueError(f"no layer of {type(model).__name__} {why}; nothing was replaced")
        wanted = answers(model, measured, output)
        check_numbers(model, wanted)
        check_taken_over(model, found, measured[:1], wanted[:1], output)
        seconds, memory = _measured(model, measured)
        applied = {**kept_plan(model, found), **plan}
        undo = plans.apply(model, applied)
        try:
            calls = count_calls(model, first, plan)
            got = answers(model, measured, output)
            seconds_after, memory_after = _measured(model, measured)
            times, place = Times(seconds, seconds_after), f"{device_of(model)} with inputs of shape {sizes(measured)}"
            if times.slower and not force and layer is None:  # a busy moment must not decide: both again
                undo()
                before = min(times.before, _measured(model, measured)[0])
                undo = plans.apply(model, applied)
                times = Times(before, min(times.after, _measured(model, measured)[0]))
            if dial is not None and times.slower and not force:  # what was left of the dial's choice, all together
                undo()
                slower = dial.without(f"the whole model is slower with it: {times}")
                return _nothing(model, slower, uncalled(model, found, first))
            _check_pays(times, plan, place, used is not None, force)
        except BaseException:
            undo()
            raise
    plans.remember(model, plan, undo, whole=len(plan) == len(found))
    reasons = {
        site.name: site.refusal(asked) or site.windows or "not chosen" for site in found if site.name not in plan
    }
    if dial is not None:
        reasons |= dial.reasons
    return ConversionReport(
        model=type(model).__name__,
        attention=attention if dial is None else "dial",
        replaced=plan,
        kept=reasons | uncalled(model, found, first),
        calls=calls,
        measured_error=relative_error(got, wanted),
        compared=compared,
        predicted_error=predicted,
        key_dropout={s.name: s.dropout for s in found if s.name in plan and s.dropout and not plan[s.name].drops},
        measured_on="noise" if used is None and example is None else "data",
        seconds=(times.before, times.after),
        device=str(device_of(model)),
        inputs=sizes(measured),
        peak_bytes=None if memory is None or memory_after is None else (memory, memory_after),
        dial=dial,
    )


def _check_dial(target: float, data: Any, given: Mapping[str, Any]) -> None:
    """Refuse, with layers="dial", what belongs to another way of choosing."""
    check_target(target)
    if given:
        said = ", ".join(f"{name}={value!r}" for name, value in given.items() if name != "diagnosis") or "a diagnosis"
        raise ValueError(f'layers="dial" chooses mechanisms and heads by target=... alone, got {said} too')
    if data is None:
        raise ValueError('layers="dial" needs data: batches like those that the model will see, and as long')


def restore(model: nn.Module) -> None:
    """Take a conversion of this session back: the model computes what it did before."""
    plans.forget(model)


def _planned(found: Sequence[Site], layers: Layers, asked: Choice) -> dict[str, Choice]:
    """The choice for each layer that the user named; an error for one that is not there or cannot be replaced."""
    if layers is None:
        able = unwindowed(site for site in found if site.refusal(asked) is None)
        if not able:
            reasons = "; ".join(dict.fromkeys(str(site.refusal(asked)) for site in found))
            raise ValueError(f"no attention layer can take {asked}: {reasons}")
        return {site.name: site.fitted(asked) for site in able}
    if isinstance(layers, str):
        raise ValueError(f'layers must be None, "auto", "dial", a list or a mapping, got {layers!r}')
    if not isinstance(layers, Iterable):
        raise TypeError(f'layers must be None, "auto", "dial", a list or a mapping, got {layers!r}')
    wanted = layers if isinstance(layers, Mapping) else dict.fromkeys(layers, asked)
    plan: dict[str, Choice] = {}
    for key, value in wanted.items():
        for site in _named(found, key):
            choice = _choice(value, asked)
            if choice is None:
                continue
            reason = site.refusal(choice)
            if reason is not None:
                raise ValueError(f"layer {key!r} ({site.name}) cannot be replaced by {choice}: {reason}")
            if choice.heads is not None and not (choice.heads and all(h in range(site.heads) for h in choice.heads)):
                raise ValueError(f"layer {key!r} ({site.name}) has heads 0 to {site.heads - 1}, got {[*choice.heads]}")
            plan[site.name] = site.fitted(choice)
    return plan


def _named(found: Sequence[Site], key: int | str) -> list[Site]:
    if isinstance(key, bool) or not isinstance(key, int | str):
        raise ValueError(f"layers are named by number or by pattern, got {key!r}")
    if isinstance(key, int):
        if not -len(found) <= key < len(found):
            raise ValueError(f"layer {key} does not exist: the model has {len(found)} attention layers")
        return [found[key]]
    matching = [site for site in found if fnmatch.fnmatchcase(site.name, key)]
    if not matching:
        raise ValueError(f"no attention layer matches {key!r}; there are: {', '.join(s.name for s in found)}")
    return matching


def _choice(value: Any, asked: Choice) -> Choice | None:
    if value is None or value in ("softmax", KEPT):
        return None
    if isinstance(value, Choice):
        return value
    if isinstance(value, str):
        return Choice.named(value, asked.options if value == asked.attention else None)
    if isinstance(value, Mapping):
        unknown = sorted(set(value) - {"attention", "heads", "options"})
        if unknown:
            raise ValueError(f"a layer's choice has attention, heads and options, got {', '.join(map(repr, unknown))}")
        return Choice.from_json({"attention": asked.attention, **value})
    raise ValueError(f"a layer's choice must be a name, a mapping or a Choice, got {value!r}")


def _measured(model: nn.Module, batches: Sequence[Batch]) -> tuple[float, int | None]:
    """Seconds of a forward pass over all batches, and its peak bytes on CUDA."""
    cuda = device_of(model).type == "cuda"
    if cuda:
        torch.cuda.reset_peak_memory_stats()
    seconds = seconds_of(model, batches)[WHOLE]
    return seconds, torch.cuda.max_memory_allocated() if cuda else None


def _check_pays(times: Times, plan: Mapping[str, Choice], place: str, on_data: bool, force: bool) -> None:
    """Refuse a plan that is slower on the user's own data; say so of one that was measured on an example of ours."""
    if force or not times.slower:
        return
    what = f"replacing {len(plan)} layers is slower on {place}: forward pass {times}"
    if on_data:
        raise SlowerError(
            f"{what}. The model is left as it was; force=True (--force) converts anyway, to save memory, say, or to "
            "serve longer inputs or another device"
        )
    warnings.warn(f"{what}. Pass data= like what the model will see, and it is decided on that", stacklevel=3)


def _nothing(model: nn.Module, dial: ModelDial, silent: Mapping[str, str]) -> ConversionReport:
    """The report of a dial that found nothing to replace."""
    kept = {**dial.reasons, **silent}
    return ConversionReport(type(model).__name__, "dial", {}, kept, {}, 0.0, measured_on="data", dial=dial)


__all__ = ["ConversionReport", "convert", "count_calls", "find_sites", "restore", "uncalled"]


def _beside(name: str) -> Callable[..., Any]:
    """A function of this room as an attribute of `convert`, imported when it is first called."""

    def function(*arguments: Any, **options: Any) -> Any:
        return getattr(import_module("cumulant.conversion"), name)(*arguments, **options)

    function.__name__, function.__doc__ = name, f"`cumulant.conversion.{name}`."
    return function


for _name in ("load", "save", "distill", "diagnose", "restore"):
    setattr(convert, _name, _beside(_name))
