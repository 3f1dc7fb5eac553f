"""Tasks side by side on the threads that torch would use: one parallel region for all of them.

An operation of torch that runs on several threads ends when the slowest has done its share. Where other processes want
the cores too, that is a wait for the scheduler each time, and a sequence of small operations does little else. Here
each thread runs whole tasks, every operation of which is its own, and takes the next one when it is done.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from queue import SimpleQueue
from time import monotonic, perf_counter, thread_time
from typing import Any, TypeVar

import torch

Item = TypeVar("Item")
Result = TypeVar("Result")
Jobs = SimpleQueue[Callable[[], None]]

SLOWER = 4.0  # times as long as a call should take: others want the cores
LATE = 2e-3  # seconds; a shorter call may be late for other reasons
PAUSE, LONGEST = 0.1, 5.0  # seconds until all cores are tried again
MOST = 1024  # kinds of calls whose pace is remembered

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


class Pace:
    """Whether the cores are ours, told by how long our own calls take.

    Operations on all threads of torch are quickest on cores that nobody else wants, and far slower than tasks on
    threads of their own where others do: each is then a wait for the scheduler. Calls that take `SLOWER` times as long
    as the best of their kind were such waits, and those in which this thread did not even run half of the time: after
    two of a kind in a row others go another way for a while, longer each time.
    """

    def __init__(self) -> None:
        self.best: dict[Any, float] = {}  # numbers a second
        self.until, self.pause = 0.0, PAUSE
        self.late: set[Any] = set()  # kinds whose last call was; forward passes say nothing of backward ones

    def ours(self) -> bool:
        return monotonic() >= self.until

    def took(self, kind: Any, numbers: int, seconds: float, running: float) -> None:
        """A call of that kind with all cores took so long, and its thread ran, or spun, for so much of it."""
        pace = numbers / max(seconds, 1e-9)
        if len(self.best) > MOST:
            self.best.clear()
            self.late.clear()
        best = self.best[kind] = max(pace, self.best.get(kind, 0.0))
        late = seconds > LATE and (pace * SLOWER < best or seconds > 2 * running)
        if not late:
            self.late.discard(kind)
            if not self.late:
                self.pause = PAUSE
        elif kind in self.late:
            self.until = monotonic() + self.pause
            self.pause = min(LONGEST, 2 * self.pause)
        else:
            self.late.add(kind)

    @contextmanager
    def timed(self, kind: Any, numbers: int, wanted: bool) -> Iterator[None]:
        """Around a call, `wanted` where it runs with all cores."""
        start, own = perf_counter(), thread_time()
        yield
        if wanted:
            self.took(kind, numbers, perf_counter() - start, thread_time() - own)
