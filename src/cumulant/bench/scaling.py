"""Time and peak memory of one forward pass against the number of tokens, on the machine at hand.

Every length is measured for all mechanisms in turn, repetition by repetition, so that a busy moment of the machine
hits all of them alike and ratios stay meaningful. A mechanism whose last call was too slow, or would be too large,
is left out of the longer lengths: a gap in the curve says so, no number is made up.
"""

from __future__ import annotations

import gc
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import zoo
from ..tensors import threads
from .error import relative_error
from .provenance import cores

MATRIX_SOFTMAX = "softmax, matrix formed"  # the textbook formula: what the quadratic memory of papers refers to
LENGTHS = (64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)

Operator = Callable[[Tensor, Tensor, Tensor], Tensor]
K = TypeVar("K")


@dataclass(frozen=True)
class Measurement:
    """One mechanism at one length: seconds are of single calls, memory is what a call adds, its output included."""

    name: str
    length: int
    seconds: float  # the median
    seconds_low: float  # the quickest and the slowest of `calls`
    seconds_high: float
    calls: int
    peak_bytes: int


def matrix_softmax(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """softmax(q k^T / sqrt(D)) v with the (L, L) matrix written out. Cost: L^2 D time, L^2 memory."""
    return torch.softmax(query @ key.transpose(-1, -2) * query.shape[-1] ** -0.5, dim=-1) @ value


def peak_memory(call: Callable[[], Any]) -> int:
    """Largest number of bytes that live tensors of `call` held at once, beyond those that existed before it.

    Counted from the allocations and releases that torch's CPU allocator reports to the profiler: exact, and free of
    the noise of the resident set size. Not seen: scratch space that a maths library takes from the system itself.
    """
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # or the profiler writes its start and stop to the terminal
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as trace:
        result = call()
    assert trace.profiler is not None
    assert trace.profiler.kineto_results is not None
    events = [event for event in trace.profiler.kineto_results.events() if event.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    del result  # alive until here: the output is part of the peak
    return peak


def peak_bytes(call: Callable[[], Any], device: str) -> int:
    """The same for either device: on a GPU as its allocator has it."""
    if device != "cuda":
        return peak_memory(call)
    return max(_peak_on_gpu(call) for _ in range(2))


def _peak_on_gpu(call: Callable[[], Any]) -> int:
    """Too small where memory of earlier calls becomes free meanwhile, by autograd's thread or the collector."""
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    result = call()
    torch.cuda.synchronize()
    peak = torch.cuda.max_memory_allocated() - before
    del result  # alive until here
    return peak


def scaling(
    mechanisms: Sequence[str] = ("softmax", "linear", "cumulant2", "cumulant3"),
    lengths: Iterable[int] = LENGTHS,
    *,
    num_heads: int = 4,
    dim: int = 64,
    calls: int = 25,
    time_limit: float = 0.5,
    memory_limit: int = 600 * 2**20,
    num_threads: int | None = None,
    seed: int = 0,
    on_length: Callable[[int], None] | None = None,
) -> dict[str, Any]:
    """Median time and peak memory of a float32 forward pass, q, k, v of shape (1, num_heads, L, dim).

    At most `calls` calls each, and at least 3. A mechanism is no longer measured at longer L once a call took more
    than `time_limit` seconds. The textbook softmax is measured beside the fused one, up to `memory_limit` bytes: the
    fused kernel never forms its matrix. `num_threads` defaults to the cores this process may use. Where other work
    disturbed the medians, `time_shown` says to look at the quickest calls instead.
    """
    if isinstance(mechanisms, str):
        raise TypeError(f"mechanisms must be a list of names, got {mechanisms!r}; pass [{mechanisms!r}]")
    operators: dict[str, Operator] = {name: zoo.get(name) for name in mechanisms}
    if "softmax" in operators:
        operators[MATRIX_SOFTMAX] = matrix_softmax
    generator = torch.Generator().manual_seed(seed)
    check = _agree_with_scores(mechanisms, torch.randn(3, 1, num_heads, 64, dim, generator=generator).unbind())
    measured: list[Measurement] = []
    given_up: dict[str, str] = {}
    num_threads = num_threads or cores()
    lengths = sorted(lengths)
    with threads(num_threads):
        for length in lengths:
            tokens = torch.randn(3, 1, num_heads, length, dim, generator=generator).unbind()
            if MATRIX_SOFTMAX in operators and 8 * num_heads * length**2 > memory_limit:
                given_up.setdefault(MATRIX_SOFTMAX, f"more than {memory_limit // 2**20} MiB from L = {length:,} on")
            active = {name: operator for name, operator in operators.items() if name not in given_up}
            results = _measure(active, tokens, calls, budget=time_limit)
            measured.extend(results)
            slow = [result.name for result in results if result.seconds > time_limit and length < lengths[-1]]
            given_up.update(dict.fromkeys(slow, f"more than {time_limit:g} s a call at L = {length:,}"))
            if on_length is not None:
                on_length(length)
    disturbed = _disturbed(measured)
    return {
        "measurements": [asdict(one) for one in measured],
        "given_up": given_up,
        "disturbed": disturbed,
        "time_shown": "seconds_low" if disturbed else "seconds",
        "num_heads": num_heads,
        "dim": dim,
        "batch": 1,
        "dtype": "float32",
        "threads": num_threads,
        "check": check,
        "memory_method": "live bytes of torch's CPU allocator, from the profiler's allocation events",
    }


@torch.inference_mode()
def _agree_with_scores(mechanisms: Sequence[str], tokens: Sequence[Tensor], tolerance: float = 1e-4) -> str:
    """Refuse to time a mechanism whose result is not its own weights times the values; say what was checked."""
    query, key, value = tokens
    for name in mechanisms:
        mechanism = zoo.get(name)
        if mechanism.scores is None:
            continue
        expected = mechanism.scores(query.double(), key.double()) @ value.double()
        error = relative_error(mechanism(query, key, value), expected)
        if not error < tolerance:
            raise RuntimeError(
                f"{name} is not timed: its result differs from its weights times the values by {error:.1e} "
                f"(relative; accepted: below {tolerance:g})"
            )
    return f"Before timing, every result was checked against explicit weights in float64 (within {tolerance:g})."


@torch.inference_mode()
def _measure(operators: dict[str, Operator], tokens: Sequence[Tensor], calls: int, budget: float) -> list[Measurement]:
    """All operators on the same tokens: one call to warm up, one for memory, then rounds for time."""
    every = {name: partial(operator, *tokens) for name, operator in operators.items()}
    for call in every.values():
        call()
    peaks = {name: peak_memory(call) for name, call in every.items()}
    return [
        Measurement(name, tokens[0].shape[-2], statistics.median(s), min(s), max(s), len(s), peaks[name])
        for name, s in in_turns(every, calls, budget).items()
    ]


def in_turns(calls: Mapping[K, Callable[[], Any]], rounds: int, budget: float, least: int = 3) -> dict[K, list[float]]:
    """Seconds of every call in rounds of all of them: a busy moment of the machine hits all alike.

    A call takes part in so many rounds, or in as many as fit into `budget` seconds of its own, but in `least` of them:
    a median needs 3.
    """
    seconds: dict[K, list[float]] = {name: [] for name in calls}
    for done in range(rounds):
        for name, call in calls.items():
            if done >= least and sum(seconds[name]) > budget:
                continue
            start = time.perf_counter()
            call()
            seconds[name].append(time.perf_counter() - start)
    return seconds


def _disturbed(measured: Sequence[Measurement]) -> bool:
    """Whether other work on the machine spoiled the medians: on a quiet one they lie close to the quickest call."""
    spoiled = [one for one in measured if one.seconds > 1.5 * one.seconds_low]
    return len(spoiled) > 0.15 * len(measured)
