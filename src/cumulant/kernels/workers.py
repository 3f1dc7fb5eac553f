"""Tasks side by side on the threads that torch would use: one parallel region for all of them.

An operation of torch that runs on several threads ends when the slowest has done its share. Where other processes want
the cores too, that is a wait for the scheduler each time, and a sequence of small operations does little else. Here
each thread runs whole tasks, every operation of which is its own, and takes the next one when it is done.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")

_LOCK = threading.Lock()
_POOLS: dict[int, ThreadPoolExecutor] = {}
os.register_at_fork(after_in_child=_POOLS.clear)  # threads do not survive a fork


def side_by_side(task: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """[task(item) for item in items], without gradients, on torch.get_num_threads() threads."""
    threads = min(len(items), torch.get_num_threads())
    if threads < 2:
        return [task(item) for item in items]
    results: list[Any] = [None] * len(items)
    rest, inference = iter(range(len(items))), torch.is_inference_mode_enabled()  # next() of one is atomic

    def work() -> None:
        with torch.inference_mode(inference), torch.no_grad():  # both are a thread's own
            for i in rest:
                results[i] = task(items[i])

    done: list[Future[None]] = [_pool(threads).submit(work) for _ in range(threads)]
    for one in done:
        one.result()
    return results


def _pool(threads: int) -> ThreadPoolExecutor:
    with _LOCK:
        if threads not in _POOLS:
            own, ready = torch.get_num_threads(), threading.Barrier(threads + 1)

            def begin() -> None:
                torch.set_num_threads(1)
                ready.wait()

            pool = ThreadPoolExecutor(threads, "cumulant", begin)
            for _ in range(threads):
                pool.submit(lambda: None)
            ready.wait()
            torch.set_num_threads(own)  # which threads to come begin with
            _POOLS[threads] = pool
        return _POOLS[threads]
