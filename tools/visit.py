"""Many runs of studies and of CAB side by side on one machine, within a limit of time: what is missing, and no more.

`python -m tools.visit --seconds 500 --out DIR --tensors FILE --cab 10 --study position-bias:4 deconstructing:4:cuda`
begins with the records that the repository keeps, gives each command so many workers, and writes what is new to
DIR/studies.json every half minute, and how long each command took to DIR/times.json; `python -m tools.records take
DIR/studies.json` keeps what was made. With --mps, or where whoever started this did so already, processes share the GPU
kernel by kernel instead of in turns.

TENSORS (`python -m tools.visit --prepare DATA --tensors FILE`) is a tar.xz of the tensors of CAB's tasks, pictures as
they are encoded: 17 MiB that give the same digests as the data sets themselves.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import tempfile
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import tyro
from safetensors.torch import load, load_file, save

from cumulant.studies.cab import data
from cumulant.studies.cab.study import prepared_path
from cumulant.studies.cab.tasks import PictureTask, tasks_of
from cumulant.studies.crews import LOG
from cumulant.train.files import write_atomically
from tools import records

NOWHERE = Path("prepared")  # a folder without data: tensors are there already
PROGRAM = (sys.executable, "-m", "cumulant.cli")
PIPE = "CUDA_MPS_PIPE_DIRECTORY"  # where processes find the multi-process service
DONE = (None, 0, 3)  # how a command ends that is not to be given again; 3: no time was left for all of it
SHORT = 10.0  # seconds after which one that ends otherwise never worked
LAST = 15.0  # seconds that are left to the processes for ending


@dataclass(frozen=True)
class Visit:
    """What to run, and for how long."""

    seconds: float = 500
    """Until everything has ended."""
    out: Path = Path("runs/visit")
    """Folder for studies.json."""
    tensors: Path | None = None
    """tar.xz of the tensors of CAB."""
    prepare: Path | None = None
    """Write --tensors from the data sets in this folder, and end."""
    cab: int = 0
    """Workers of `bench cab`; 0: leave it out."""
    cab_options: str = ""
    """Further words for `bench cab`, as in "--cab-options=--tasks lm then --tasks restore": one command after the
    other, with " then " between them."""
    alone: str = ""
    """Words for a `bench cab` of two workers beside it that has no part in the multi-process service."""
    study: tuple[str, ...] = ()
    """NAME:WORKERS[:DEVICE[:OPTIONS]], such as "pavlovian:2:cpu:--setting paper"; those
    joined by " then " follow each other, the others run side by side."""
    anew: bool = False
    """Begin without the kept records: a command then takes as long as the whole study."""
    mps: bool = False
    """Start NVIDIA's multi-process service for these processes, unless one is there already."""


def pack_tensors(folder: Path, target: Path) -> dict[str, str]:
    """The tensors of all tasks in one compressed file; digests by task."""
    digests = {}
    target.parent.mkdir(parents=True, exist_ok=True)
    with tarfile.open(target, "w:xz", preset=6) as tar:
        for name, task in tasks_of("full").items():
            tensors = data.read(task, folder)
            digests[name] = data.digest(tensors)
            if isinstance(task, PictureTask):
                for part, encoded in data.encoded_pictures(folder / task.data).items():
                    sizes = torch.tensor([len(one) for one in encoded])
                    whole = data.as_bytes(b"".join(encoded))
                    add(tar, f"{name}.{part}.pictures", save({"sizes": sizes, "bytes": whole}))
            else:
                add(tar, f"{name}.safetensors", save({key: one.contiguous() for key, one in tensors.items()}))
        add(tar, "digests.json", json.dumps(digests).encode())
    return digests


def add(tar: tarfile.TarFile, name: str, content: bytes) -> None:
    info = tarfile.TarInfo(name)
    info.size = len(content)
    tar.addfile(info, io.BytesIO(content))


def lay_tensors(source: Path, out: Path) -> None:
    """Tensors of a packed file where `bench cab --data prepared --out OUT` looks for them; ValueError where one has
    other content than what was packed."""
    with tarfile.open(source, "r:xz") as tar:
        files = {one.name: tar.extractfile(one).read() for one in tar.getmembers()}  # type: ignore[union-attr]
    wanted = json.loads(files["digests.json"])
    for name, task in tasks_of("full").items():
        path = prepared_path(task, NOWHERE, out)
        path.parent.mkdir(parents=True, exist_ok=True)
        if isinstance(task, PictureTask):
            parts = {part: load(files[f"{name}.{part}.pictures"]) for part in ("train", "test")}
            tensors = {part: data.decoded(_cut(one["bytes"], one["sizes"]), task.side) for part, one in parts.items()}
            path.write_bytes(save(tensors))
        else:
            path.write_bytes(files[f"{name}.safetensors"])
        if (got := data.digest(load_file(path))) != wanted[name]:
            raise ValueError(f"{name} has digest {got} here, {wanted[name]} where it was packed")


def _cut(whole: torch.Tensor, sizes: torch.Tensor) -> list[bytes]:
    return [one.numpy().tobytes() for one in whole.split(sizes.tolist())]


def lanes(visit: Visit, work: Path, minutes: float) -> list[list[list[str]]]:
    """Command lines of studies: those of a lane follow each other, lanes run side by side."""
    every = []
    for lane in visit.study:
        found = []
        for word in lane.split(" then "):
            name, workers, *more = word.split(":", 3)
            device, options = (*more, *("cpu", "")[len(more) :])[:2]
            line = ["study", name, "--workers", workers, "--device", device, *options.split()]
            found.append([*PROGRAM, *line, *limit(work, minutes)])
        every.append(found)
    return every


def benchmark(visit: Visit, work: Path, minutes: float) -> list[list[str]]:
    """The command lines of CAB."""
    line = cab_line(visit.cab, work, minutes)
    return [[*line, *words.split()] for words in visit.cab_options.split(" then ")]


def cab_line(workers: int, work: Path, minutes: float) -> list[str]:
    line = ["bench", "cab", "--data", str(NOWHERE), "--size", "full", "--workers", str(workers)]
    return [*PROGRAM, *line, *limit(work, minutes)]


def limit(work: Path, minutes: float) -> list[str]:
    return ["--out", str(work), "--minutes", f"{minutes:.2f}"]


def write_new(work: Path, before: dict[str, Any], target: Path) -> int:
    """Keep what was made since, in one file."""
    now = records.found(work)
    new = {
        study: {name: one for name, one in own.items() if before.get(study, {}).get(name) != one}
        for study, own in now.items()
    }
    packed = {study: records.packed(own) for study, own in new.items() if own}
    write_atomically(target, json.dumps(packed, allow_nan=False).encode())
    for log in work.glob(f"*/{LOG}"):  # who made what, and when
        write_atomically(target.with_name(f"{log.parent.name}-{log.name}"), log.read_bytes())
    return sum(map(len, new.values()))


def service() -> dict[str, str]:
    """Variables under which processes share the GPU by NVIDIA's multi-process service; none where it is missing, or
    runs already."""
    if PIPE in os.environ:
        print(f"the multi-process service of {PIPE} is used", flush=True)
        return {}
    if shutil.which("nvidia-cuda-mps-control") is None:
        print("no multi-process service on this machine: processes take turns", flush=True)
        return {}
    place = tempfile.mkdtemp()
    own = {PIPE: place, "CUDA_MPS_LOG_DIRECTORY": place}
    ended = subprocess.run(["nvidia-cuda-mps-control", "-d"], env=os.environ | own, check=False)
    probe = "import torch; print(torch.ones(1, device='cuda').item())"
    works = subprocess.run([sys.executable, "-c", probe], env=os.environ | own, check=False, timeout=60)
    if ended.returncode or works.returncode:
        print("the multi-process service does not start: processes take turns", flush=True)
        return {}
    print("processes share the GPU by the multi-process service", flush=True)
    return own


def run(visit: Visit) -> int:
    """Everything within the seconds; how many runs were made."""
    end = time.monotonic() + visit.seconds
    work = Path(tempfile.mkdtemp())
    target = visit.out / "studies.json"
    if not visit.anew:
        records.put(work)
    before = records.found(work)
    environment = os.environ | (service() if visit.mps else {}) | {"OMP_NUM_THREADS": "1"}
    threads: list[threading.Thread] = []
    times: list[dict[str, Any]] = []

    def begin(lane: Sequence[Sequence[str]], served: bool = True) -> None:
        around = {name: value for name, value in environment.items() if served or name != PIPE}
        place = (len(threads), lane, work, around, end - LAST, times)
        threads.append(threading.Thread(target=follow, args=place, daemon=True))
        threads[-1].start()

    def left() -> float:
        return (end - LAST - time.monotonic()) / 60

    for lane in lanes(visit, work, left()):
        begin(lane)
    if visit.cab:
        if visit.tensors is not None:
            lay_tensors(visit.tensors, work)
        if visit.alone:
            begin([[*cab_line(2, work, left()), *visit.alone.split()]], served=False)
        begin(benchmark(visit, work, left()))
    print(f"begun after {visit.seconds - (end - time.monotonic()):.0f} s", flush=True)
    told = time.monotonic()
    while any(thread.is_alive() for thread in threads) and time.monotonic() < end:
        time.sleep(0.5)
        if time.monotonic() > told + 30:
            told = time.monotonic()
            print(f"{write_new(work, before, target)} runs made", flush=True)
    count = write_new(work, before, target)
    write_atomically(visit.out / "times.json", json.dumps(times, indent=1).encode())
    print(f"{count} runs made, {target.stat().st_size / 1e6:.2f} MB", flush=True)
    return count


def follow(
    number: int, lane: Sequence[Sequence[str]], work: Path, environment: dict[str, str], end: float,
    times: list[dict[str, Any]],
) -> None:  # fmt: skip
    """The commands of a lane one after the other until its end; how long each took, and the last lines of it.

    One that breaks off is given again, and goes on from its records: under a multi-process service one process that
    fails takes all others along, so that it is left out from then on."""
    waiting = list(lane)
    while waiting and time.monotonic() < end:
        log = work / f"log-{number}-{len(waiting)}"
        code, took = one(waiting[0], log, environment, end)
        said = "still running, ended" if code is None else f"exit {code}"
        times.append({"command": " ".join(waiting[0][3:]), "ended": said, "seconds": round(took, 1)})
        print(f"--- {' '.join(waiting[0][3:])}\n{said} after {took:.1f} s\n{tail(log)}", flush=True)
        if code in DONE or took < SHORT:
            waiting.pop(0)
        else:
            environment = {name: value for name, value in environment.items() if name != PIPE}


def one(line: Sequence[str], log: Path, environment: dict[str, str], end: float) -> tuple[int | None, float]:
    """Run a command until it ends or its time is over (None), and its seconds."""
    began = time.monotonic()
    with log.open("wb") as file:
        process = subprocess.Popen(line, env=environment, stdout=file, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            process.wait(max(1.0, end + LAST / 2 - time.monotonic()))
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return None, time.monotonic() - began
    return process.returncode, time.monotonic() - began


def tail(log: Path) -> str:
    """The last lines of a log, each as its bar was drawn last."""
    lines = log.read_text(errors="replace").splitlines()
    return "\n".join(line.rsplit("\r", 1)[-1][-200:] for line in lines[-6:])


def main(argv: Sequence[str] | None = None) -> None:
    visit = tyro.cli(Visit, args=argv)
    if visit.prepare is not None:
        assert visit.tensors is not None, "--prepare needs --tensors"
        print(json.dumps(pack_tensors(visit.prepare, visit.tensors)))
        return
    run(visit)


if __name__ == "__main__":
    main()
