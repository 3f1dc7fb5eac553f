"""Who makes runs beside this process: worker processes on this machine, the machines of a Ray cluster, or others that
share a folder and claim runs there."""

from __future__ import annotations

import json
import multiprocessing
import os
import queue
import signal
import socket
import threading
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import torch

from cumulant.data.jobs import apart
from cumulant.optional import needed
from cumulant.train.files import write_atomically

if TYPE_CHECKING:
    from cumulant.studies.runs import Record, Workshop

    Heard = tuple[Any, Record | None, str | None]  # a run with its record, or with the reason why there is none

BEAT, LEASE = 10.0, 60.0
RETRIES = 3  # of a run whose machine was lost, before the run itself is held to be the reason
AGAIN = 1  # the same for a process on this machine
LOG = "workers.log"  # which process began and ended which run, and when
PASSED_ON = ("CUMULANT_DATA", "CUMULANT_CACHE", "ONEDNN_MAX_CPU_ISA")


class Crew(Protocol):
    """Makes runs, `size` at a time. In a `with`; at its end whatever is still being made is stopped, its state kept."""

    size: int

    def __enter__(self) -> Crew: ...

    def __exit__(self, *_: Any) -> None: ...

    def begin(self, run: Any) -> None:
        """Have a run made."""
        ...

    def heard(self, seconds: float) -> Heard | None:
        """A run that is finished or failed, waited for so long; RuntimeError where nothing can be heard any more."""
        ...


class Lost(str):
    """Why the process of a run ended without a record of it; after that the run itself is held to be the reason."""


class Workers:
    """Worker processes, each fed with the next run as soon as it is free; they are ended here whatever happens.

    One that is lost with its run, or whose GPU has failed, is replaced, and the run made once more.
    """

    def __init__(self, shop: Workshop, size: int) -> None:
        self.shop, self.context = shop, _context(shop)
        self.size, self.busy = size, 0
        self.events: Any = self.context.Queue()
        self.tasks: dict[Any, Any] = {}  # a queue for each process, so that it is known who has which run
        self.processes: list[Any] = [self._process() for _ in range(size)]
        self.making: dict[Any, Any] = {}  # runs by their process
        self.lost: Counter[Any] = Counter()

    def _process(self) -> Any:
        tasks = self.context.Queue()
        process = self.context.Process(target=_work, args=(tasks, self.events, self.shop), daemon=True)
        self.tasks[process] = tasks
        return process

    def __enter__(self) -> Workers:
        try:
            self._start(self.processes)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _start(self, processes: list[Any]) -> None:
        # Of Ctrl-C all hear by the one SIGTERM of this process, which has their trainers save their state.
        with heard_later():
            for process in processes:
                process.start()

    def __exit__(self, *_: Any) -> None:
        if not self.busy:
            for process in self.processes:
                self.tasks[process].put(None)
            for process in self.processes:
                process.join(5)
        for process in self.processes:
            process.terminate()
        for process in self.processes:
            process.join()

    def begin(self, run: Any) -> None:
        self.busy += 1
        self._give(next(process for process in self.processes if process not in self.making), run)

    def _give(self, process: Any, run: Any) -> None:
        self.making[process] = run
        self._note(process, run, "begins")
        self.tasks[process].put(run)

    def heard(self, seconds: float) -> Heard | None:
        try:
            run, record, failure = self.events.get(timeout=seconds)
        except queue.Empty:
            for process in self.processes:
                if process.exitcode is not None:
                    why = f"a training process ended by itself with exit status {process.exitcode}"
                    if process.exitcode == 0 or process not in self.making:  # it was told to end, by somebody else
                        raise RuntimeError(why) from None
                    return self._again(process, why)
            return None
        process = next(process for process, one in self.making.items() if one == run)
        if isinstance(failure, Lost):
            return self._again(process, failure)
        self._note(process, run, failure or "ended")
        del self.making[process]
        self.busy -= 1
        return run, record, failure

    def _again(self, process: Any, why: str) -> Heard | None:
        """Another process in the place of one that is gone, and its run once more; after that the run is given up."""
        run = self.making.pop(process)
        self._note(process, run, why)
        process.join()
        del self.tasks[process]
        other = self.processes[self.processes.index(process)] = self._process()
        self._start([other])
        self.lost[run] += 1
        if self.lost[run] <= AGAIN:
            self._give(other, run)
            return None
        self.busy -= 1
        return run, None, Lost(f"{why}, {self.lost[run]} times")

    def _note(self, process: Any, run: Any, what: str) -> None:
        self.shop.out.mkdir(parents=True, exist_ok=True)
        with (self.shop.out / LOG).open("a", encoding="utf-8") as file:
            file.write(f"{time.strftime('%H:%M:%S')} {process.pid} {run}: {what}\n")


@contextmanager
def heard_later() -> Iterator[None]:
    """A stop that comes within is heard at the end. Processes that begin within leave Ctrl-C to this one."""
    numbers, heard = (signal.SIGINT, signal.SIGTERM), []
    before = {number: signal.signal(number, lambda number, _: heard.append(number)) for number in numbers}
    masks = hasattr(signal, "pthread_sigmask")
    if masks:
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        if masks:
            signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        for number, handler in before.items():
            signal.signal(number, handler)
    if heard:
        signal.raise_signal(heard[0])


def _context(shop: Workshop) -> Any:
    """How workers start. Forked threads of torch would hang, so that on CPUs they are copies of a process that has
    imported what they need and done nothing: all of them cost one import. Copies could not use a GPU."""
    if shop.device != "cpu" or "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["cumulant.studies.server", type(shop).__module__, "cumulant.train.trainer"])
    return context


def _work(tasks: Any, events: Any, shop: Workshop) -> None:
    """Take runs until there are none, or until the process that started this one is gone."""
    apart(0)
    if hasattr(signal, "pthread_sigmask"):
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})  # see `server`
    threading.Thread(target=_end_with_parent, daemon=True).start()
    while (run := tasks.get()) is not None:
        try:
            events.put((run, shop.kept(run), None))
        except KeyboardInterrupt:
            return
        except Exception as error:
            events.put((run, None, Lost(told(error)) if device_failed(error) else told(error)))
            return


def device_failed(error: BaseException) -> bool:
    """Whether a GPU has failed under this process, which can use it no more: each further call would fail as well."""
    kind = getattr(torch, "AcceleratorError", ())
    return isinstance(error, kind) or (isinstance(error, RuntimeError) and "[CUDA]" in str(error))


def told(error: BaseException) -> str:
    """An error of a run that was made elsewhere, with the line that it comes from."""
    last = traceback.extract_tb(error.__traceback__)[-1]
    return f"{type(error).__name__}: {error} ({Path(last.filename).name}:{last.lineno})"


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    while parent is not None and parent.is_alive():
        time.sleep(1)
    os.kill(os.getpid(), signal.SIGTERM)  # the trainer saves its state
    time.sleep(60)
    os._exit(1)


class RayCluster:
    """The machines of the Ray cluster that $RAY_ADDRESS names, or that runs here: one run a core, or one a GPU.

    The record of a run, and what lies beside it, come back with the answer, so that a folder which all machines see is
    not needed; where `shop.out` is one, a run whose machine was lost goes on from its state on another.
    """

    def __init__(self, shop: Workshop) -> None:
        with needed("--on ray needs the package ray", "ray"):
            import ray
        self.ray, self.shop = ray, replace(shop, out=shop.out.absolute())
        self.running: dict[Any, Any] = {}
        unit = "GPU" if shop.device.startswith("cuda") else "CPU"
        try:
            if not ray.is_initialized():
                ray.init(address="auto", log_to_driver=False, logging_level="ERROR")
        except ConnectionError as error:
            raise ConnectionError(
                "--on ray finds no Ray cluster: start one with `ray start --head`, join it from other machines with "
                "`ray start --address HOST:6379`, or name it in RAY_ADDRESS"
            ) from error
        self.size = int(ray.cluster_resources().get(unit, 0))
        if not self.size:
            raise ValueError(f"--on ray with device={shop.device!r}: no machine of the cluster has a {unit}")
        needs = {"num_cpus": 1, "num_gpus": int(unit == "GPU"), "max_retries": RETRIES}
        self.make = ray.remote(**needs)(_made)
        self.around = (os.getcwd(), {name: os.environ[name] for name in PASSED_ON if name in os.environ})

    def __enter__(self) -> RayCluster:
        return self

    def __exit__(self, *_: Any) -> None:
        for task in self.running:
            self.ray.cancel(task, force=False)  # a Ctrl-C for the trainer, which saves its state
        if self.running:
            self.ray.wait(list(self.running), num_returns=len(self.running), timeout=30)

    def begin(self, run: Any) -> None:
        self.running[self.make.remote(self.shop, run, *self.around)] = run

    def heard(self, seconds: float) -> Heard | None:
        if not self.running:
            time.sleep(seconds)
            return None
        done, _ = self.ray.wait(list(self.running), timeout=seconds)
        if not done:
            return None
        run = self.running.pop(done[0])
        try:
            record, files, failure = self.ray.get(done[0])
        except self.ray.exceptions.RayError as error:
            why = str(error).strip().splitlines()[0]
            return run, None, f"its worker was lost {RETRIES + 1} times, or the cluster is gone: {why}"
        for name, content in files.items():
            write_atomically(self.shop.record(run).parent / name, content)
        return run, record, failure


def _made(shop: Workshop, run: Any, folder: str, variables: dict[str, str]) -> tuple[Any, dict[str, bytes], str | None]:
    """On another machine: the record of a run and the files that belong to it, or why there is none."""
    os.environ.update(variables)
    if os.path.isdir(folder):  # data may be named from there
        os.chdir(folder)
    try:
        record = shop.kept(run)
    except Exception as error:
        return None, {}, told(error)
    kept = shop.record(run)
    files = {path.name: path.read_bytes() for path in kept.parent.glob(f"{kept.stem}.*") if path.suffix == ".json"}
    return record, files, None


class Claims:
    """Claims in `folder`, which is made if need be; those that are held are given back at the end of a `with`.

    A claim is made by creating its file, which only one can do. Its owner touches it every `BEAT` seconds. One that
    nobody has touched for `LEASE` seconds, by the clock of whoever looks, is of a lost machine: the next one makes a
    file of the following number, which again only one can do. Clocks of different machines are never compared.
    """

    def __init__(
        self, folder: Path, beat: float = BEAT, lease: float = LEASE, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self.folder, self.beat, self.lease, self.clock = folder, beat, lease, clock
        self.held: dict[str, Path] = {}
        self.seen: dict[Path, tuple[int, float]] = {}  # when it was touched last, and since when we know
        self.over = threading.Event()
        folder.mkdir(parents=True, exist_ok=True)

    def __enter__(self) -> Claims:
        threading.Thread(target=self._pulse, daemon=True).start()
        return self

    def __exit__(self, *_: Any) -> None:
        self.over.set()
        for name in list(self.held):
            self.give_back(name)

    def take(self, name: str) -> bool:
        """Claim what has that name; False where another holds it."""
        numbers = {path: path.name[len(name) + 1 : -len(".claim")] for path in self.folder.glob(f"{name}.*.claim")}
        there = sorted((int(number), path) for path, number in numbers.items() if number.isdigit())
        if there and not self._lost(there[-1][1]):
            return False
        path = self.folder / f"{name}.{there[-1][0] + 1 if there else 1}.claim"
        try:
            handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        with os.fdopen(handle, "w", encoding="utf-8") as file:
            json.dump({"place": place(), "process": os.getpid()}, file)
        for _, older in there:
            older.unlink(missing_ok=True)
        self.held[name] = path
        return True

    def give_back(self, name: str) -> None:
        """It is done, or left to others."""
        self.held.pop(name).unlink(missing_ok=True)

    def _pulse(self) -> None:
        while not self.over.wait(self.beat):
            for path in list(self.held.values()):
                with suppress(OSError):  # it is asked for again at the next beat
                    os.utime(path)

    def _lost(self, path: Path) -> bool:
        """Whether the owner of a claim is gone: its process, where that can be known here, or else its pulse."""
        try:
            with path.open(encoding="utf-8") as file:  # opening it makes a network file system look anew
                touched, content = os.fstat(file.fileno()).st_mtime_ns, file.read()
        except OSError:  # given back at this moment
            return False
        with suppress(ValueError):  # one that is being written is not lost
            owner = json.loads(content)
            if owner["place"] == place() and not alive(owner["process"]):
                return True
        before, since = self.seen.setdefault(path, (touched, self.clock()))
        if before != touched:
            self.seen[path] = touched, self.clock()
            return False
        return self.clock() - since > self.lease


def place() -> str:
    """Where numbers of processes mean the same: the machine and, in containers, their own numbering."""
    numbering = ""
    with suppress(OSError):
        numbering = os.readlink("/proc/self/ns/pid")
    return f"{socket.gethostname()} {numbering}"


def alive(process: int) -> bool:
    """Whether a process of that number runs here."""
    try:
        os.kill(process, 0)
    except ProcessLookupError:
        return False
    except OSError:  # of another user
        return True
    return True
