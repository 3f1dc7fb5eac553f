"""`cumulant bench efficiency`: time and peak memory against length, and from which length on a mechanism pays.

Opponents are softmax twice: the textbook formula, whose L x L matrix is written down, and the fused kernel, which never
forms it. A linear method must beat the second one. Nothing is timed before its result was compared with float64.
On a GPU the device is synchronised around every call and the peak is reset before it; on a CPU all contenders take
turns, so that a busy moment of the machine hits them alike.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cumulant.bench import cab, speed
from cumulant.bench.cab import FUSED_SOFTMAX, PHASES, checks, crossings
from cumulant.bench.command import Efficiency
from cumulant.bench.error import relative_error
from cumulant.bench.scaling import MATRIX_SOFTMAX, in_turns, matrix_softmax, peak_bytes
from cumulant.bench.variants import Variant, select

FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.CUDNN_ATTENTION]
BOUNDS = {torch.float32: 1e-3, torch.float16: 3e-2, torch.bfloat16: 3e-2}  # relative, against float64
CPU_LENGTHS = (256, 512, 1024, 2048)

Operator = Callable[[Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Contender:
    """A function of q, k, v and a plain one that must give the same; `definition` are its weights, if it has any."""

    name: str
    function: Operator
    plain: Operator
    linear: bool  # whether a straight line may be fitted to its cost
    definition: Callable[[Tensor, Tensor], Tensor] | None = None


@dataclass
class Row:
    """One contender at one length. Milliseconds are (median, lower quartile, upper quartile) of single calls; bytes are
    what a call holds at its peak beyond its inputs."""

    name: str
    length: int
    milliseconds: dict[str, tuple[float, float, float]] = field(default_factory=dict)  # forward, both
    peak_bytes: dict[str, int] = field(default_factory=dict)
    calls: int = 0
    error: float | None = None  # relative, against float64
    note: str = ""


def run(
    settings: Efficiency, progress: Callable[[str], None] = print, *, minutes: float | None = None
) -> dict[str, Any]:
    """Measure everything the settings ask for; the lines that `progress` gets are the table.

    After so many `minutes` no further length is begun, and those left are named in the result.
    """
    start = time.monotonic()
    device, chosen = speed.placed(settings)
    lengths = sorted(set(settings.lengths or (cab.LENGTHS if device == "cuda" else CPU_LENGTHS)))
    if lengths[0] < 2:
        raise ValueError(f"lengths must be 2 or more, got {lengths[0]}")
    variants, left_out = select(settings.attention, settings.pattern)
    batch = settings.batch or (4 if device == "cuda" else 1)
    table = contenders(variants, settings.pattern)
    wrong = {name: problem for name, one in table.items() if (problem := off_definition(one, settings.dim))}
    rows = [Row(name, lengths[0], note=problem) for name, problem in wrong.items()]
    for row in rows:
        progress(line(row))
    given_up: dict[str, str] = {}
    for length in lengths:
        if minutes is not None and length > lengths[0] and time.monotonic() - start > 60 * minutes:
            given_up["all"] = (
                f"no time for L = {', '.join(f'{n:,}' for n in lengths if n >= length)} in {minutes:g} min"
            )
            break
        active = {name: one for name, one in table.items() if name not in wrong and name not in given_up}
        try:
            tokens = draw(settings, batch, length, device, getattr(torch, chosen))
        except RuntimeError as error:  # what was measured at shorter lengths is kept
            if length == lengths[0]:
                raise
            given_up["all"] = f"no tokens of L = {length:,}: {speed.did_not_run(error)}"
            break
        _refuse_the_matrix(active, given_up, tokens, settings.memory_limit)
        for row in measure(active, tokens, settings):
            progress(line(row))
            rows.append(row)
            slow = max((times[0] for times in row.milliseconds.values()), default=0.0)
            if slow > 1e3 * settings.time_limit and length < lengths[-1]:
                given_up[row.name] = f"more than {settings.time_limit:g} s a call at L = {length:,}"
    found = crossings(rows, {name for name, one in table.items() if one.linear})
    return {
        "bench": "efficiency",
        "rows": [asdict(row) for row in rows],
        "crossings": found,
        "checks": checks(rows, found),
        "left_out": left_out,
        "given_up": given_up,
        "setting": {
            "lengths": lengths, "batch": batch, "heads": settings.heads, "dim": settings.dim, "device": device,
            "dtype": chosen, "pattern": settings.pattern, "threads": torch.get_num_threads(),
        },
    }  # fmt: skip


def contenders(variants: Sequence[Variant], pattern: str) -> dict[str, Contender]:
    """Both forms of softmax, then the variants."""
    causal = pattern == "causal"

    def naive(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if not causal:
            return matrix_softmax(query, key, value)
        logits = query @ key.mT * query.shape[-1] ** -0.5
        later = torch.ones(logits.shape[-2:], dtype=torch.bool, device=logits.device).triu(1)
        return logits.masked_fill(later, float("-inf")).softmax(-1) @ value

    def fused(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        with sdpa_kernel(FUSED):
            return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    def plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(query, key, value, is_causal=causal)

    table = {
        FUSED_SOFTMAX: Contender(FUSED_SOFTMAX, fused, plain, linear=False),
        MATRIX_SOFTMAX: Contender(MATRIX_SOFTMAX, naive, plain, linear=False),
    }
    for variant in variants:
        if variant.label not in table:
            table[variant.label] = _contender(variant, causal)
    return table


def _contender(variant: Variant, causal: bool) -> Contender:
    mechanism = variant.mechanism

    def weights(query: Tensor, key: Tensor) -> Tensor:
        assert mechanism.scores is not None
        return mechanism.scores(query, key, is_causal=causal, **variant.options)

    return Contender(
        variant.label,
        lambda query, key, value: variant(query, key, value, is_causal=causal),
        lambda query, key, value: variant.plain()(query, key, value, is_causal=causal),
        linear=mechanism.subquadratic,
        definition=weights if mechanism.scores is not None else None,
    )


def draw(settings: Efficiency, batch: int, length: int, device: str, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Query, key, value and a gradient of the output; in cross attention there are half as many keys as queries."""
    make = torch.Generator(device).manual_seed(length)
    keys = max(1, length // 2) if settings.pattern == "cross" else length
    shapes = (length, keys, keys, length)
    return tuple(
        torch.randn(batch, settings.heads, n, settings.dim, device=device, generator=make).to(dtype) for n in shapes
    )


def off_definition(one: Contender, dim: int) -> str | None:
    """What is wrong with a contender's formula: its weights times the values must be its result, in float64."""
    if one.definition is None:
        return None
    make = torch.Generator().manual_seed(0)
    query, key, value = torch.randn(3, 1, 2, 48, dim, generator=make, dtype=torch.float64)
    try:
        with torch.no_grad():
            error = relative_error(one.plain(query, key, value), one.definition(query, key) @ value)
    except (RuntimeError, TypeError, ValueError) as problem:  # options that do not go together in this pattern
        return speed.did_not_run(problem)
    return None if error < 1e-6 else f"off its own weights by {error:.1e} (relative): not timed"


def measure(active: dict[str, Contender], tokens: Sequence[Tensor], settings: Efficiency) -> list[Row]:
    """All contenders on the same tokens: correctness, warm-up, memory, then time."""
    query, key, value, gradient = tokens
    rows, calls = [], {}
    for name, one in active.items():
        row = Row(name, query.shape[-2])
        rows.append(row)
        try:
            row.error = _off_float64(one, query, key, value)
            bound = BOUNDS[query.dtype]
            if not row.error < bound:
                row.note = f"off by {row.error:.1e} (relative, accepted: {bound:g}): not timed"
                continue
            calls[name] = _calls(one.function, query, key, value, gradient)
            for phase, call in calls[name].items():
                call()
                row.peak_bytes[phase] = peak_bytes(call, query.device.type)
        except (RuntimeError, TypeError, ValueError, torch.OutOfMemoryError) as error:
            calls.pop(name, None)
            row.peak_bytes = {}
            row.note = speed.did_not_run(error)
    _time(rows, calls, query.device.type, settings)
    return rows


def _calls(
    function: Operator, query: Tensor, key: Tensor, value: Tensor, gradient: Tensor
) -> dict[str, Callable[[], Any]]:
    leaves = [x.detach().requires_grad_() for x in (query, key, value)]

    def forward() -> Tensor:
        with torch.no_grad():
            return function(query, key, value)

    # cumulant1 and others may not depend on the query at all.
    return {
        "forward": forward,
        "both": lambda: torch.autograd.grad(function(*leaves), leaves, gradient, allow_unused=True),
    }


def _time(
    rows: Sequence[Row], calls: dict[str, dict[str, Callable[[], Any]]], device: str, settings: Efficiency
) -> None:
    """Fill in the times of the rows that have calls."""
    timed = [row for row in rows if row.name in calls]
    if device == "cuda":
        from triton.testing import do_bench

        for row in timed:
            for phase, call in calls[row.name].items():
                taken = do_bench(call, warmup=10, rep=40, return_mode="all")
                row.milliseconds[phase], row.calls = quartiles(taken), len(taken)
        return
    every = {(row.name, phase): calls[row.name][phase] for row in timed for phase in PHASES}
    samples = in_turns(every, settings.calls, settings.time_limit)
    for row in timed:
        for phase in PHASES:
            row.milliseconds[phase] = quartiles([1e3 * taken for taken in samples[row.name, phase]])
            row.calls = len(samples[row.name, phase])


def quartiles(samples: Sequence[float]) -> tuple[float, float, float]:
    """Median, lower and upper quartile."""
    if len(samples) < 2:
        return (samples[0],) * 3
    low, median, high = statistics.quantiles(samples, n=4, method="inclusive")
    return median, low, high


def _refuse_the_matrix(
    active: dict[str, Contender], given_up: dict[str, str], tokens: Sequence[Tensor], limit: float
) -> None:
    """Leave the textbook softmax out where its matrices (logits, weights and their gradients) would not fit."""
    query, key = tokens[:2]
    needed = 4 * query[..., 0].numel() * key.shape[-2] * query.element_size()
    if needed > limit * 2**30 and active.pop(MATRIX_SOFTMAX, None) is not None:
        given_up[MATRIX_SOFTMAX] = f"more than {limit:g} GiB from L = {query.shape[-2]:,} on"


def _off_float64(one: Contender, query: Tensor, key: Tensor, value: Tensor) -> float:
    """Relative error of one sequence and head against the plain form in float64 on the same numbers."""
    part = [x[:1, :1] for x in (query, key, value)]
    with torch.no_grad():
        return relative_error(one.function(*part), one.plain(*(x.double() for x in part)))


def line(row: Row) -> str:
    start = f"{row.name:28s} L {row.length:7,}"
    if row.note:
        return f"{start}  {row.note}"
    for phase, label in zip(PHASES, ("forward", "+backward"), strict=True):
        median, low, high = row.milliseconds[phase]
        start += f"  {label} {median:9.3f} ms ({low:.3f}-{high:.3f}) {row.peak_bytes[phase] / 2**20:9.1f} MiB"
    return start
