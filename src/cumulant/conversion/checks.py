"""What is seen to before and after a conversion: that the batch fits, which layers there are, that each really runs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ..inspect.batches import Batch, answer, answers, call, evaluating, relative_error, same_draws, tensors
from ..inspect.examples import describe
from ..inspect.sites import Site, swappable_sites
from ..inspect.watching import own_softmax
from ..nn.swapped import plan as plans
from ..nn.swapped.choice import observing
from ..nn.swapped.layers import ORIGINAL

Output = Callable[[Any, Batch], Tensor]
NOT_RUN = "it does not run for this example; pass example=batch with inputs that reach it"
SEEN = 1e-6  # relative change of an output above rounding
SAME = {torch.float64: 1e-6, torch.float32: 1e-4, torch.bfloat16: 5e-2, torch.float16: 1e-2}


def find_sites(model: nn.Module, example: Batch) -> list[Site]:
    """Attention layers in the order in which they run. An error if there are none, or none that can be replaced."""
    found = swappable_sites(model, lambda: call(model, example))
    name = type(model).__name__
    if not found:
        silent = uncalled(model, found, example)
        if not silent:
            raise ValueError(f"{name} has no attention layer, so there is nothing to convert")
        if all(why == NOT_RUN for why in silent.values()):
            raise ValueError(f"no attention layer of {name} ran ({', '.join(silent)}); pass an example=batch for them")
        raise RuntimeError(
            f"{name} takes an attn_implementation but never calls it (attention layers: {', '.join(silent)}); it "
            "cannot be converted, and would silently keep computing softmax"
        )
    if all(site.obstacle for site in found):
        reasons = "; ".join(dict.fromkeys(str(site.obstacle) for site in found))
        raise ValueError(f"no attention layer of {name} can be replaced: {reasons}")
    return found


def count_calls(model: nn.Module, example: Batch, names: Iterable[str]) -> dict[str, int]:
    """How often each named layer computes a mechanism of ours in one forward pass; an error if one never does."""
    modules = {id(model.get_submodule(name)): name for name in names}
    calls = dict.fromkeys(modules.values(), 0)

    def count(module: nn.Module, *_: Any) -> None:
        if id(module) in modules:
            calls[modules[id(module)]] += 1

    whole = [m for m in map(model.get_submodule, calls) if ORIGINAL in m.__dict__]  # these compute by themselves
    hooks = [module.register_forward_hook(count) for module in whole]
    try:
        with observing(count), torch.no_grad(), evaluating(model):
            call(model, example)
    finally:
        for hook in hooks:
            hook.remove()
    never = [name for name, times in calls.items() if times == 0]
    if never:
        raise RuntimeError(
            f"{len(never)} of {len(calls)} replaced layers of {type(model).__name__} never ran: {', '.join(never)}"
        )
    return calls


def uncalled(model: nn.Module, found: Sequence[Site], example: Batch) -> dict[str, str]:
    """Attention layers of a transformers model that never ask its attention registry, and why."""
    names = [site.name for site in found]
    if plans.library_of(model) != plans.TRANSFORMERS:
        return {}
    silent: dict[str, str] = {}
    for name, module in model.named_modules():
        kind = type(module)
        linear = any(isinstance(child, nn.Linear) for child in module.children())
        own = kind.__module__.startswith("transformers.") and "Attention" in kind.__name__ and linear
        if not own and not isinstance(module, nn.MultiheadAttention):
            continue
        if not any(n == name or n.startswith(f"{name}.") or name.startswith(f"{n}.") for n in names):
            silent[name] = f"{kind.__name__} computes attention itself and never asks the attention registry"
    ran: set[str] = set()
    if silent:
        with ExitStack() as stack, torch.no_grad():
            for name in silent:
                hook = model.get_submodule(name).register_forward_pre_hook(lambda *_, name=name: ran.add(name))
                stack.callback(hook.remove)
            call(model, example)
    return {name: why if name in ran else NOT_RUN for name, why in silent.items()}


def check_runs(model: nn.Module, batch: Batch) -> None:
    """Refuse a batch that the model does not take, before anything else may stumble over it."""
    try:
        with torch.no_grad():
            call(model, batch)
    except Exception as error:  # of the model, which may be anything
        raise ValueError(
            f"{type(model).__name__} does not take the batch {describe(batch)}: {type(error).__name__}: {error}; "
            "example and data must be what the model is called with, a tensor, tuple or mapping"
        ) from error


def compared_by(
    model: nn.Module, found: Sequence[Site], batch: Batch, output: Output | None
) -> tuple[Output | None, str | None]:
    """By which output models are compared, with its name; no name where the layers reach none."""
    if output is not None:
        return output, "what output= gives"
    chosen = comparing(model, found, batch)
    return (None, None) if chosen is None else (chosen, chosen.keywords["name"])


def comparing(model: nn.Module, found: Sequence[Site], batch: Batch) -> partial[Tensor] | None:
    """Which output shows what replacing these layers does: the usual one if they reach it, else the first that they do
    (of MaskFormer the decoder's, not the backbone's); None if they reach none. Cost: two forward passes."""
    with torch.no_grad():
        with same_draws(model):
            before = tensors(call(model, batch))
        with ExitStack() as stack, same_draws(model):
            for site in found:
                if site.obstacle is None:
                    stack.callback(model.get_submodule(site.name).register_forward_hook(_louder).remove)
            after = tensors(call(model, batch))
    for name, x in before.items():
        other = after.get(name)
        if other is None or other.shape != x.shape or relative_error([other.double()], [x.double()]) > SEEN:
            return partial(answer, name=name)
    return None


def _louder(module: nn.Module, _: Any, output: Any) -> Any:
    if isinstance(output, tuple):
        return (_louder(module, _, output[0]), *output[1:])
    return output * 1.5 if isinstance(output, Tensor) else output


def unreached(model: nn.Module) -> str:
    return f"what the layers of {type(model).__name__} compute reaches none of its outputs for this batch"


def check_taken_over(
    model: nn.Module, found: Sequence[Site], batches: Sequence[Batch], wanted: Sequence[Tensor], output: Output | None
) -> None:
    """With our own softmax in every layer the model must say what it said before."""
    with own_softmax(model, found):
        error = relative_error(answers(model, batches, output), wanted)
    dtype = next((p.dtype for p in model.parameters() if p.is_floating_point()), torch.float32)
    if not error <= SAME.get(dtype, 1e-4):
        raise RuntimeError(
            f"the output of {type(model).__name__} changes by {error:.1e} (relative) when its attention layers compute "
            "plain softmax between their own projections: they do more than that, and cannot be converted"
        )
