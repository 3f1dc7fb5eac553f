"""Many trainings side by side on one GPU within a limit of time: what more_tokens.py and vision_layers.py share.

    python benchmarks/side_by_side.py pack FOLDER/tiny-imagenet-100 TO     the pictures of each shard as one file
    python benchmarks/side_by_side.py decode FOLDER FILE                   for --pixels of several scripts at once

`train_all` decodes the images once; so many processes then take runs from a plan, in its order, and leave out what
would not end in time. Each leaves its record as it ends. A run that fails is tried once more by a fresh process, since
one whose GPU has failed can do nothing more; what it said is printed.

A packed file has what a parquet shard has, without parquet: for machines that have torch and Pillow alone, and for
transfers of a shard at a time. `TO` may hold some of the shards; a record says how many images it was.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from cumulant.bench.provenance import commit
from cumulant.data import Source, TensorImages, open_source
from cumulant.data.memory import hold
from cumulant.train import TrainRecipe, train

SIDE = 64
Key = list[Any]  # what a script calls a run by: names and numbers
PIECE = 500  # pictures that a process decodes at a time


def arguments(parser: argparse.ArgumentParser) -> None:
    """Those of `train_all` and `take_runs`."""
    parser.add_argument("--data", default="tiny-imagenet-100", help="folder of parquet shards, or of packed ones")
    parser.add_argument("--seconds", type=float, default=460)
    parser.add_argument("--processes", type=int, default=5)
    parser.add_argument("--after", help="a record whose runs are not done again")
    parser.add_argument("--crowd", type=float, default=6.0, help="how many times as long as alone a run may take")
    parser.add_argument("--pixels", help="file with the decoded images, made where it is not there")
    parser.add_argument("--folder", help=argparse.SUPPRESS)
    parser.add_argument("--quick", action="store_true", help="a toy on the CPU")


def train_all(
    script: str, settings: argparse.Namespace, todo: list[Key], write: Callable[[list[dict[str, Any]]], None]
) -> list[dict[str, Any]]:
    """Runs of `todo` in processes `python SCRIPT one`, which call `take_runs`; `write` gets their records so far."""
    began = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        held = Path(settings.pixels or Path(folder) / "pixels.pt")
        if not held.is_file():
            decode(settings.data, held, settings.quick)
        (Path(folder) / "todo.json").write_text(json.dumps(todo))
        left = settings.seconds - (time.monotonic() - began) - 5
        command = [sys.executable, script, "one", "--folder", folder, "--seconds", str(left), "--pixels", str(held),
                   "--crowd", str(settings.crowd)]  # fmt: skip
        command += ["--quick"] if settings.quick else []
        many = {**os.environ, "TORCHINDUCTOR_COMPILE_THREADS": "3"}
        children = [subprocess.Popen(command, env=many) for _ in range(settings.processes)]
        runs: list[dict[str, Any]] = []
        while any(child.poll() is None for child in children):
            time.sleep(2)
            runs = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("run_*.json"))]
            write(runs)
            left = settings.seconds - (time.monotonic() - began) - 5
            command[command.index("--seconds") + 1] = str(left)
            for number, child in enumerate(children):
                if child.poll() and left > 0:  # ended by an error
                    print(f"a process ended with {child.returncode}: another takes its place", flush=True)
                    children[number] = subprocess.Popen(command, env=many)
            if time.monotonic() - began > settings.seconds:
                for child in children:
                    child.kill()
        print([child.returncode for child in children])
    return runs


def take_runs(
    settings: argparse.Namespace,
    recipe: Callable[..., TrainRecipe],
    gpu_seconds: Callable[..., float],
    told: Callable[..., dict[str, Any]],
) -> None:
    """Runs of the plan that no other process has taken, as far as the time goes; each leaves a file.

    `recipe(*key, quick)` is what is trained, `gpu_seconds(*key)` what it would take alone, about, and `told(*key)` what
    its record says of it.
    """
    end, folder = time.monotonic() + settings.seconds, Path(settings.folder)
    held = torch.load(settings.pixels, mmap=True)  # one copy in memory for all processes
    parts = [TensorImages(*part, title) for part, title in zip(held["parts"], ("train", "test"), strict=True)]
    source = Source("tiny-imagenet-100", "image", parts[0], parts[1], held["classes"])
    crowd = settings.crowd
    for number, key in enumerate(json.loads((folder / "todo.json").read_text())):
        alone = 0.0 if settings.quick else gpu_seconds(*key)
        if time.monotonic() + crowd * alone > end:
            continue
        try:
            (folder / f"taken_{number}").touch(exist_ok=False)
        except FileExistsError:
            continue
        began = time.monotonic()
        try:
            with tempfile.TemporaryDirectory() as out:
                found = train(recipe(*key, settings.quick), out, source=source)
        except Exception as error:  # one that does not run must not stop the others
            print(f"{key}: {type(error).__name__}: {str(error)[:600]}", flush=True)
            again = folder / f"again_{number}"
            if not again.exists():
                again.touch()
                (folder / f"taken_{number}").unlink()
            raise SystemExit(1) from error
        seconds = time.monotonic() - began
        crowd = max(crowd / 2, seconds / alone) if alone else crowd
        run = {**told(*key), "top1": found.top1, "top5": found.top5, "loss": found.loss, "images": len(parts[0]),
               "parameters": found.parameters, "seconds": found.seconds, "epoch_seconds": found.epoch_seconds,
               "commit": commit()}  # fmt: skip
        part = folder / f"part_{number}"
        part.write_text(json.dumps(run))
        part.rename(folder / f"run_{number:03}.json")
        print(f"{key}: {found.top1:.2%}, {seconds:.0f} s", flush=True)
        torch._dynamo.reset()
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()


def decode(data: str, file: Path, quick: bool = False) -> None:
    """Write the decoded images; the file is there when it is whole."""
    part = file.with_suffix(".part")
    torch.save(decoded(data, quick), part)
    part.rename(file)


def decoded(data: str, quick: bool = False) -> dict[str, Any]:
    """Images and labels of both parts, decoded."""
    if quick:
        parts = [(torch.randint(0, 256, (16, 3, SIDE, SIDE), dtype=torch.uint8), torch.arange(16) % 2)] * 2
        return {"parts": parts, "classes": ("a", "b")}
    if [*Path(data).glob("*.packed")]:
        return unpacked(Path(data))
    source = open_source(data)
    held = hold(source, SIDE)
    assert held is not None
    assert isinstance(held.train, TensorImages)
    assert isinstance(held.test, TensorImages)
    return {"parts": [(part.images, part.labels) for part in (held.train, held.test)], "classes": source.classes}


def pack(data: Path, to: Path) -> None:
    """Each parquet shard of a folder as one file, with pictures as they are encoded."""
    import pyarrow.parquet as parquet

    to.mkdir(parents=True, exist_ok=True)
    classes = open_source(str(data)).classes
    for file in sorted(data.glob("*.parquet")):
        table = parquet.read_table(file)
        pictures = [row["bytes"] for row in table["image"].to_pylist()]
        ends = torch.tensor([len(picture) for picture in pictures]).cumsum(0)
        content = torch.frombuffer(bytearray(b"".join(pictures)), dtype=torch.uint8)
        packed = {"content": content, "ends": ends, "labels": torch.tensor(table["label"].to_pylist())}
        torch.save({**packed, "classes": classes}, to / f"{file.stem}.packed")


def unpacked(folder: Path) -> dict[str, Any]:
    parts: list[tuple[Tensor, Tensor]] = []
    classes: tuple[str, ...] = ()
    for kind in ("train", "validation"):
        shards = [torch.load(file) for file in sorted(folder.glob(f"{kind}*.packed"))]
        classes, encoded = shards[0]["classes"], []
        for shard in shards:
            content, starts = shard["content"].numpy().tobytes(), [0, *shard["ends"].tolist()]
            encoded += [content[a:b] for a, b in pairwise(starts)]
        pieces = [encoded[i : i + PIECE] for i in range(0, len(encoded), PIECE)]
        with ProcessPoolExecutor() as pool:
            images = torch.cat([torch.from_numpy(piece) for piece in pool.map(_pictures, pieces)])
        parts.append((images, torch.cat([shard["labels"] for shard in shards])))
    return {"parts": parts, "classes": classes}


def _pictures(encoded: list[bytes]) -> Any:
    """uint8 (n, 3, SIDE, SIDE) as an array, which travels between processes as it is."""
    import numpy as np
    from PIL import Image

    pixels = [np.asarray(Image.open(io.BytesIO(one)).convert("RGB")) for one in encoded]
    return np.stack(pixels).transpose(0, 3, 1, 2).copy()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("pack", "decode"))
    parser.add_argument("data", type=Path)
    parser.add_argument("to", type=Path)
    asked = parser.parse_args()
    if asked.what == "pack":
        pack(asked.data, asked.to)
    else:
        decode(str(asked.data), asked.to)
