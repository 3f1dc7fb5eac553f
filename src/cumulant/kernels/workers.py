"""Tasks side by side on the threads that torch would use: one parallel region for all of them.

An operation of torch that runs on several threads ends when the slowest has done its share. Where other processes want
the cores too, that is a wait for the scheduler each time, and a sequence of small operations does little else. Here
each thread runs whole tasks, every operation of which is its own, and takes the next one when it is done.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Sequence
from queue import SimpleQueue
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
Jobs = SimpleQueue[Callable[[], None]]

_LOCK = threading.Lock()
_POOLS: dict[int, Jobs] = {}
os.register_at_fork(after_in_child=_POOLS.clear)  # threads do not survive a fork


def side_by_side(task: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """[task(item) for item in items], without gradients, on at most torch.get_num_threads() threads."""
    threads = torch.get_num_threads()
    if threads < 2 or not items:
        return [task(item) for item in items]
    results: list[Any] = [None] * len(items)
    raised: list[BaseException] = []
    jobs, wanted = _pool(threads), min(len(items), threads)
    rest, last, done = iter(range(len(items))), iter(range(wanted - 1)), threading.Lock()  # next() of one is atomic
    inference = torch.is_inference_mode_enabled()

    def work() -> None:
        try:
            with torch.inference_mode(inference), torch.no_grad():  # both are a thread's own
                for i in rest:
                    results[i] = task(items[i])
        except BaseException as error:
            raised.append(error)
        if next(last, None) is None:
            done.release()

    done.acquire()
    for _ in range(wanted):
        jobs.put(work)
    done.acquire()
    if raised:
        raise raised[0]
    return results


def _pool(threads: int) -> Jobs:
    """Where so many threads wait for what to do. A queue and a lock each call: futures cost a small call a tenth."""
    with _LOCK:
        if threads not in _POOLS:
            own, ready, jobs = torch.get_num_threads(), threading.Barrier(threads + 1), Jobs()

            def serve() -> None:
                torch.get_num_threads()  # or its first operation gives the thread as many as others have
                torch.set_num_threads(1)
                ready.wait()
                while True:
                    jobs.get()()

            for i in range(threads):
                threading.Thread(target=serve, name=f"cumulant_{i}", daemon=True).start()
            ready.wait()
            torch.set_num_threads(own)  # which threads to come begin with
            _POOLS[threads] = jobs
        return _POOLS[threads]
