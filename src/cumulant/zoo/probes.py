"""What a mechanism can do, found out by running it: the marks that `cumulant list` shows.

Shape legend: B = 2 sequences, H heads, L tokens, D = E = 8 widths; all probes run in float64 on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ..tensors import threads
from .registry import CAPABILITIES, Mechanism, get, names

LENGTH = 12
# Twice the tokens mean twice the work of a linear mechanism and four times that of a quadratic one.
GROWTH_LENGTHS = (512, 1024)
GROWTH_LIMIT = 3.2


def capabilities(name: str | None = None) -> dict[str, dict[str, bool]]:
    """Marks of one mechanism, or of all: {"linear": {"causal": True, ...}, ...}, each found by a small run.

    A mark is False if the use raises or if its result is not what the use requires: e.g. "causal" needs rows
    that a later token leaves alone, "key_mask" a result that NaN in masked tokens does not touch. What each mark
    means is said at the fields of `Mechanism`.
    """
    chosen = names() if name is None else [get(name).name]
    with threads(1):
        return {one: {capability: probe(get(one), capability) for capability in CAPABILITIES} for one in chosen}


def probe(mechanism: Mechanism, capability: str) -> bool:
    """Whether `mechanism` really has one of `CAPABILITIES`."""
    try:
        with torch.no_grad():
            return _PROBES[capability](mechanism)
    except (ValueError, TypeError, NotImplementedError):
        return False


def draw(*shape: int, seed: int = 0) -> Tensor:
    """Normal numbers in float64 that depend on the seed alone."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def tokens(queries: int = LENGTH, keys: int = LENGTH, heads: int = 2, key_heads: int = 2) -> tuple[Tensor, ...]:
    return draw(2, heads, queries, 8), draw(2, key_heads, keys, 8, seed=1), draw(2, key_heads, keys, 8, seed=2)


def fixed_length(mechanism: Mechanism, length: int) -> dict[str, Any]:
    """The option that makes causal rows independent of how many tokens follow, where there is one."""
    return {} if mechanism.length_option is None else {mechanism.length_option: length}


def own_way(mechanism: Mechanism) -> dict[str, Any]:
    """is_causal for a call that does not care: the full form where there is one."""
    return {"is_causal": not mechanism.noncausal}


def same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and bool(a.isfinite().all()) and torch.allclose(a, b, rtol=1e-6, atol=1e-7)


def _noncausal(mechanism: Mechanism) -> bool:
    query, key, value = tokens()
    out = mechanism(query, key, value)
    value[..., -1, :] += 1
    # The first row must have seen the last token.
    return not same(out[..., 0, :], mechanism(query, key, value)[..., 0, :])


def _causal(mechanism: Mechanism) -> bool:
    inputs, options = tokens(), fixed_length(mechanism, LENGTH)
    out = mechanism(*inputs, is_causal=True, **options)
    return all(
        same(out[..., :t, :], mechanism(*(x[..., :t, :] for x in inputs), is_causal=True, **options))
        for t in range(1, LENGTH)
    )


def _cross(mechanism: Mechanism) -> bool:
    results = [mechanism(*tokens(queries), **own_way(mechanism)) for queries in (5, LENGTH + 3)]
    return all(out.shape[-2:] == (n, 8) and bool(out.isfinite().all()) for out, n in zip(results, (5, 15), strict=True))


def _causal_cross(mechanism: Mechanism) -> bool:
    options = fixed_length(mechanism, LENGTH)
    query, key, value = tokens(5)
    out = mechanism(query, key, value, is_causal=True, **options)
    seen = (query[..., :3, :], key[..., :3, :], value[..., :3, :])
    return same(out[..., :3, :], mechanism(*seen, is_causal=True, **options))


def _independent_rows(mechanism: Mechanism) -> bool:
    query, key, value = tokens()
    out = mechanism(query, key, value, **own_way(mechanism))
    query[..., -1, :] += 1
    query[..., 0, :] -= 1
    return same(out[..., 1:-1, :], mechanism(query, key, value, **own_way(mechanism))[..., 1:-1, :])


def _key_mask(mechanism: Mechanism) -> bool:
    query, key, value = tokens()
    mask = torch.arange(LENGTH).lt(torch.tensor([[8], [LENGTH]]))
    out = mechanism(query, key, value, key_mask=mask, **own_way(mechanism))
    plain = mechanism(query, key, value, **own_way(mechanism))
    absent = ~mask[:, None, :, None]
    key, value = key.masked_fill(absent, float("nan")), value.masked_fill(absent, float("nan"))
    again = mechanism(query, key, value, key_mask=mask, **own_way(mechanism))
    return same(out, again) and same(out[1], plain[1]) and not same(out[0], plain[0])


def _grouped_queries(mechanism: Mechanism) -> bool:
    query, key, value = tokens(heads=4)
    grouped = mechanism(query, key, value, enable_gqa=True, **own_way(mechanism))
    repeated = (x.repeat_interleave(2, -3) for x in (key, value))
    return same(grouped, mechanism(query, *repeated, **own_way(mechanism)))


def _weights(mechanism: Mechanism) -> bool:
    if mechanism.scores is None:
        return False
    query, key, value = tokens()
    out = mechanism(query, key, value, **own_way(mechanism))
    return same(mechanism.scores(query, key, **own_way(mechanism)) @ value, out)


def _subquadratic(mechanism: Mechanism) -> bool:
    work = [_work(mechanism, length) for length in GROWTH_LENGTHS]
    return all(long <= GROWTH_LIMIT * short for short, long in zip(*work, strict=True))


def _streaming(mechanism: Mechanism) -> bool:
    if mechanism.stream is None:
        return False
    inputs, options = tokens(), fixed_length(mechanism, LENGTH)
    out = mechanism(*inputs, is_causal=True, **options)
    stream, sizes = mechanism.stream(**options), set()
    for t in range(LENGTH):
        row = stream.step(*(x[..., t : t + 1, :] for x in inputs))
        sizes.add(sum(x.numel() for x in tree_leaves(stream.state) if isinstance(x, Tensor)))
        if not same(row, out[..., t : t + 1, :]):
            return False
    return len(sizes) == 1


def _ragged(mechanism: Mechanism) -> bool:
    if mechanism.varlen is None:
        return False
    lengths = [5, 1, 6]
    at = torch.tensor([0, 5, 6, LENGTH])
    query, key, value = (x[0].transpose(0, 1) for x in tokens())  # (T, H, D)
    packed = mechanism.varlen(query, key, value, at, at, max(lengths), max(lengths), **own_way(mechanism))
    parts = (x.split(lengths) for x in (query, key, value))
    looped = [
        mechanism(*(x.transpose(0, 1)[None] for x in one), **own_way(mechanism))[0].transpose(0, 1)
        for one in zip(*parts, strict=True)
    ]
    return same(packed, torch.cat(looped))


class LargestTensor(TorchDispatchMode):
    """While active, keeps the element count and the operation of the largest tensor that any operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements, self.operation = 0, ""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for x in tree_leaves(out):
            # An expanded view has many elements but occupies only what lies behind it.
            if isinstance(x, Tensor) and (size := _occupied(x)) > self.elements:
                self.elements, self.operation = size, str(func)
        return out


def _occupied(x: Tensor) -> int:
    return min(x.numel(), x.untyped_storage().nbytes() // max(1, x.element_size()))


def _work(mechanism: Mechanism, length: int) -> tuple[int, int]:
    """Multiply-adds and largest tensor of one call with `length` tokens, one head of width 4.

    Fused kernels hide what they do, so it is the plain form that is counted.
    """
    from torch.utils.flop_counter import FlopCounterMode  # imports Triton

    query, key, value = (draw(1, 1, length, 4, seed=s).float() for s in range(3))
    plain: dict[str, Any] = {"backend": "reference"} if "backend" in mechanism.options else {}
    with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops, LargestTensor() as largest:
        mechanism(query, key, value, **own_way(mechanism), **plain)
    return flops.get_total_flops(), largest.elements


_PROBES: dict[str, Callable[[Mechanism], bool]] = {name: globals()[f"_{name}"] for name in CAPABILITIES}
