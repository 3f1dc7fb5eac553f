"""Work of an operator, counted while it runs: multiply-adds of its products and steps of everything else.

Nothing is taken from a formula. A product of (M, K) and (K, N) is M K N multiply-adds, as torch's own counter has it
(which gives operations, twice that). Every other operation that computes counts one step for each number of its
largest tensor: an exponential, an addition and a comparison alike. What only moves or makes numbers counts nothing.
And what training a model costs: floating-point operations of an item, memory of a step.
"""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, flop_registry

from cumulant import zoo
from cumulant.bench.scaling import peak_bytes
from cumulant.bench.variants import Variant
from cumulant.call import Call
from cumulant.grammar import read_blocks
from cumulant.train.processes import chosen_device

if TYPE_CHECKING:
    from cumulant.data.part import Source
    from cumulant.train import TrainRecipe

MOVES = {
    "_linalg_check_errors", "_local_scalar_dense", "_to_copy", "_unsafe_view", "arange", "cat", "clone",
    "constant_pad_nd", "copy", "detach", "diag_embed", "empty", "empty_like", "empty_strided", "eye", "fill",
    "flip", "full", "full_like", "gather", "index", "index_put", "index_select", "lift_fresh", "masked_fill",
    "new_empty", "new_full", "new_ones", "new_zeros", "ones", "ones_like", "repeat", "resize", "roll",
    "scalar_tensor", "scatter", "select_scatter", "set", "slice_scatter", "stack", "tril", "triu", "zeros",
    "zeros_like",
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """Multiply-adds of matrix products and convolutions, and steps of all other arithmetic."""

    multiply_adds: int
    other: int

    @property
    def total(self) -> int:
        return self.multiply_adds + self.other


class WorkCounter(TorchDispatchMode):
    """While active, adds up the work of every operation; not under inference_mode, which hides them."""

    def __init__(self) -> None:
        super().__init__()
        self.multiply_adds = self.other = 0

    @property
    def work(self) -> Work:
        return Work(self.multiply_adds, self.other)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet in flop_registry:
            self.multiply_adds += flop_registry[packet](*args, **kwargs, out_val=out) // 2
        elif func.namespace not in ("aten", "prims", "prim"):
            raise RuntimeError(f"the work of the fused operation {func} cannot be counted; use a plain backend")
        elif not func.is_view and func._opname.rstrip("_") not in MOVES:
            self.other += max((x.numel() for x in tree_leaves((args, kwargs, out)) if isinstance(x, Tensor)), default=0)
            self.multiply_adds += _solve(func._opname, args)
        return out


def work_of(variant: Variant, call: Call) -> Work:
    """Work of one forward call in its plain form; fused kernels do the same arithmetic, or a little more."""
    with torch.no_grad(), sdpa_kernel(SDPBackend.MATH), WorkCounter() as counter:
        variant.plain().run(call)
    return counter.work


def _solve(name: str, args: Any) -> int:
    """Multiply-adds of solving A x = b, A (..., n, n), b (..., n, r): n^3 / 3 + n^2 r. Not in torch's counter."""
    if "linalg" not in name or "norm" in name:
        return 0
    if "linalg_solve" not in name:
        raise RuntimeError(f"the work of {name} is not known here; add it to cumulant.bench.work")
    matrix, right = args[0], args[1]
    n = matrix.shape[-1]
    return matrix.numel() * n // 3 + right.numel() * n


def costs(recipe: TrainRecipe, source: Source, device: str | None) -> dict[str, Any]:
    """FLOPs of one item (forward) by torch's counter, and the peak memory of one training step, not compiled."""
    where = chosen_device(device)
    return {"flops": flops(recipe, source), "step_bytes": step_bytes(recipe, source, where), "device": where.type}


@torch.no_grad()
def flops(recipe: TrainRecipe, source: Source) -> int:
    """Floating-point operations (2 a multiply-add) of matrix products and convolutions for one item."""
    from cumulant.train.build import build_model

    if any(
        "backend" in zoo.get(name).options for name in read_blocks(recipe.attention)
    ):  # a fused kernel hides its products from the counter
        recipe = replace(recipe, attention_options={**recipe.attention_options, "backend": "reference"})
    model = build_model(recipe, source).eval()
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as counter:
        model(_items(recipe, source, 1))
    return counter.get_total_flops()


def step_bytes(recipe: TrainRecipe, source: Source, device: torch.device) -> int | None:
    """Bytes of activations and gradients at the peak of one forward and backward pass; None if they do not fit."""
    from cumulant.train.build import build_model

    model = build_model(recipe, source).to(device).train()
    count = recipe.batch_size // recipe.accumulate
    items = _items(recipe, source, count).to(device)
    labels = torch.zeros(count, dtype=torch.long, device=device)
    half = torch.autocast(device.type, torch.bfloat16) if recipe.precision == "bf16" else nullcontext()

    def step() -> None:
        with half:
            loss = F.cross_entropy(model(items).float(), labels)
        loss.backward()

    try:
        step()
        model.zero_grad(set_to_none=True)
        return peak_bytes(step, device.type)
    except torch.OutOfMemoryError:
        return None


def _items(recipe: TrainRecipe, source: Source, count: int) -> torch.Tensor:
    frames = (recipe.frames,) if source.kind == "video" else ()
    generator = torch.Generator().manual_seed(0)
    return torch.randn(count, 3, *frames, recipe.image_size, recipe.image_size, generator=generator)
