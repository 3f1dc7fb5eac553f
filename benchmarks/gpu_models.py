"""Real models on a GPU, all that docs/real-models says of one, in one run alone on the device.

    python -m tools.models sam2 pictures55 lightglue smollm2 moby-dick
    PYTHONPATH=src:. python benchmarks/gpu_models.py FOLDER --make MODELS     where packages can be fetched: no GPU
    PYTHONPATH=src:. OUT=folder python benchmarks/gpu_models.py FOLDER        on the GPU: torch and transformers alone

FOLDER is what travels, 75 MiB: weights of SAM 2 in 7 and of LightGlue in 6 bits a number, pictures, keypoints of five
and of the same from another side (those of `--pairs`, or found, which takes minutes), queries, keys and values of five
pieces of SmolLM2's book (tools/packing.py). MODELS is the cache of tools.models.

| part | script | what it says |
|---|---|---|
| encoder | sam2_speed.py | SAM 2 at 4,096 pixels: its layers, and the whole compiled encoder, time and peak memory |
| masks | sam2_masks.py | IoU with softmax's masks at that size |
| calls | gpu_tree.py | LightGlue's attention at 16,384 keypoints, float32 and half, beside the quickest softmax |
| matches | lightglue_matches.py | matches kept there by trees that choose by the error or the mass |
| cache | language_cache.py | prefill and decoding of SmolLM2, whole and merged |
| captured | captured_qkv.py | attention on queries, keys and values of the three models at 8,192 tokens |

First all side by side, so that everything is compiled; then one after the other, each with a limit of its own. They
write JSON to $OUT row by row: a run that is cut off keeps what it has. `--stage` does one of the two: other work may
stand beside the first. Without a GPU the same at tiny sizes, a rehearsal: its figures say nothing.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from PIL import Image

from cumulant.explain.matches import PACKAGE, Matcher
from tools.packing import pack, unpack

HERE = Path(__file__).parent
PICTURE, WEIGHTS, BITS = "truck", "disk_lightglue.pth", 6
PAIRED = ("truck", "agency-header-bg", "business-casual-bg", "coral", "groceries")  # of which LightGlue gets keypoints
EXAMPLES = 5  # pictures and pieces whose queries, keys and values are captured
SHOWN = (  # the largest of the 55 pictures, photographs of many things
    "truck", "agency-header-bg", "business-casual-bg", "clean-blog-contact-bg", "clean-blog-post-bg",
    "grayscale-bg-masthead", "stylish-portfolio-bg-callout", "coral", "china", "groceries",
)  # fmt: skip
# Seconds of each part once all is compiled.
LIMITS = {"calls": 40, "matches": 70, "encoder": 110, "captured": 110, "masks": 120, "cache": 40}
COMPILING = 120  # seconds of all side by side
UNCOMPILED = ("masks", "cache")  # parts whose kernels another part compiles, or that have none
UNTIMED = ("masks",)  # run beside the others while they compile

TREE = "cluster256+find=tree+near="
BY_ERROR = tuple(f"{TREE}{near}+rank=error" for near in (16, 8, 4))
WHOLE = ("softmax", *BY_ERROR)
MASKS = ("another kernel", BY_ERROR[0])
LAYERS = (*BY_ERROR, f"{TREE}8+near_rows=64+rank=error", f"{TREE}8+patch=2+rank=error", "cluster256+near=4")
MATCHES = (*(f"{TREE}{near}" for near in (24, 20, 32, 16)), "softmax in half", f"{TREE}24 in half", "parts64")


def make(folder: Path, models: Path, pairs: Path | None) -> None:
    """Fill the folder that travels."""
    from real_models import pictures
    from safetensors.torch import load_file

    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    for name in SHOWN:
        picture = Image.open(models / "pictures55" / f"{name}.jpg").convert("RGB")
        picture.save(folder / "pictures" / f"{name}.jpg", quality=90)
    state = load_file(models / "sam2-hiera-tiny" / "model.safetensors")
    pack(state, folder / "sam2.packed", BITS + 1)
    code, weights = models / "lightglue" / PACKAGE, models / "lightglue" / PACKAGE / "pretrained_weights" / WEIGHTS
    (folder / "lightglue").mkdir(exist_ok=True)
    for name in ("__init__", "constants", "lightglue"):
        shutil.copy(code / f"{name}.py", folder / "lightglue")
    pack(torch.load(weights, map_location="cpu", weights_only=True), folder / "lightglue.packed", BITS)
    keep = ["--smollm2", models / "smollm2-135m-instruct", models / "moby-dick.txt", "--pieces", EXAMPLES]
    keep += ["--keep", folder / "smollm2.packed"]
    subprocess.run([sys.executable, HERE / "captured_qkv.py", *map(str, keep)], check=True)
    shown = {x.name: x for x in pictures(models / "pictures55", crops=False)}
    for name in PAIRED:
        if pairs is None:
            pair = Matcher.open(models / "lightglue").pair(shown[name].pixels, 16384)
        else:
            pair = torch.load(pairs / f"{name}.pt", weights_only=True)
        points = {f"{side} {key}": x for side, points in pair.items() for key, x in points.items()}
        whole = [key for key in points if "descriptors" not in key]
        pack(points, folder / "pairs" / f"{name}.packed", BITS, whole=whole)
    size = sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())
    print(f"{folder} has {size / 2**20:.1f} MiB")


def opened(folder: Path, to: Path) -> None:
    """LightGlue's folder and keypoints as `tools.models lightglue` and `lightglue_matches.py --keep` leave them."""
    weights = to / "lightglue" / PACKAGE / "pretrained_weights" / WEIGHTS
    shutil.copytree(folder / "lightglue", to / "lightglue" / PACKAGE)
    weights.parent.mkdir()
    torch.save(unpack(folder / "lightglue.packed"), weights)
    (to / "pairs").mkdir()
    for file in (folder / "pairs").glob("*.packed"):
        sides: dict[str, dict[str, torch.Tensor]] = {}
        for name, x in unpack(file).items():
            side, key = name.split(" ")
            sides.setdefault(side, {})[key] = x
        torch.save(sides, to / "pairs" / f"{file.stem}.pt")


def parts(folder: Path, at: Path, out: Path, cuda: bool) -> dict[str, list[str]]:
    """The command of each part."""
    few = lambda names: [re.sub(r"cluster\d+", "cluster16", name) for name in names]  # noqa: E731
    fit = list if cuda else few
    encoder = ["sam2_speed.py", str(folder / "sam2.packed"), str(folder / "pictures"), "--picture", PICTURE]
    encoder += ["--size", "4096" if cuda else "256", "--profile", "--names", *fit(LAYERS), "--whole", *fit(WHOLE)]
    matches = ["lightglue_matches.py", str(at / "lightglue"), str(at / "pairs"), "--only", str(len(PAIRED))]
    matches += ["--keypoints", "16384" if cuda else "512", "--names", *fit(MATCHES)]
    captured = ["captured_qkv.py", "--tokens", "8192" if cuda else "256", "--pictures", str(EXAMPLES)]
    captured += ["--sam2", str(folder / "sam2.packed"), str(folder / "pictures")]
    captured += ["--lightglue", str(at / "lightglue"), str(at / "pairs")]
    captured += ["--smollm2", str(folder / "smollm2.packed")]
    cache = ["language_cache.py", str(folder / "smollm2"), "--time", "--dtype", "bfloat16"]
    cache += ["--out", str(out / "smollm2_cache_time.json")]
    masks = ["sam2_masks.py", str(folder / "sam2.packed"), str(folder / "pictures"), "--only", str(len(SHOWN))]
    masks += ["--size", "4096" if cuda else "256", "--dtype", "bfloat16", "--names", *fit(MASKS)]
    calls = ["gpu_tree.py", "--shapes", "sam2", "lightglue", "lightglue in half"]
    small = {"encoder": encoder, "matches": matches, "captured": captured, "masks": masks}
    every = small | {"calls": calls, "cache": cache} if cuda else small
    return {part: every[part] for part in LIMITS if part in every}


def apart(commands: dict[str, list[str]]) -> Iterator[tuple[str, list[str]]]:
    """The same for compiling side by side: each kind of encoder and each model by itself."""
    for part, command in commands.items():
        if part in UNCOMPILED:
            continue
        if part == "encoder":
            at = command.index("--whole")
            yield "encoder layers", command[:at]
            for name in command[at + 1 :]:
                yield f"encoder {name}", [*command[: command.index("--names")], "--names", "--whole", name]
        elif part == "captured":
            places = [number for number, word in enumerate(command) if word in ("--sam2", "--lightglue", "--smollm2")]
            for begin, end in zip(places, [*places[1:], None], strict=True):
                yield f"captured {command[begin]}", [*command[: places[0]], *command[begin:end]]
        else:
            yield part, command


def started(command: list[str], out: Path, log: Path) -> subprocess.Popen[bytes]:
    out.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OUT": str(out), "PYTHONUNBUFFERED": "1"}
    environment["TORCHINDUCTOR_AUTOGRAD_CACHE"] = "0"  # its key does not know which softmax is asked for
    with log.open("wb") as file:
        return subprocess.Popen(
            [sys.executable, str(HERE / command[0]), *command[1:]], stdout=file, stderr=subprocess.STDOUT,
            env=environment, start_new_session=True,
        )  # fmt: skip


def ended(process: subprocess.Popen[bytes], until: float) -> str:
    """Wait for it; at that time it is stopped, with the processes that it began."""
    try:
        return f"ended with {process.wait(max(0.1, until - time.monotonic()))}"
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return "was stopped at its limit"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--make", type=Path, metavar="MODELS")
    parser.add_argument("--pairs", type=Path, help="a folder of lightglue_matches.py --keep, for --make")
    parser.add_argument("--only", nargs="+", choices=LIMITS)
    parser.add_argument("--stage", choices=("compile", "measure"), help="one of the two")
    parser.add_argument("--compiling", type=float, default=COMPILING, help="seconds of the first stage")
    parser.add_argument("--seconds", type=float, default=380, help="end all after so long")
    options = parser.parse_args()
    if options.make:
        make(options.folder, options.make, options.pairs)
        return
    if "OUT" not in os.environ:
        raise SystemExit("say where records go: OUT=folder")
    cuda, began, out = torch.cuda.is_available(), time.monotonic(), Path(os.environ["OUT"])

    def say(words: str) -> None:
        print(words, flush=True)
        with (out / "gpu_models.log").open("a") as file:
            file.write(f"{words}\n")

    with tempfile.TemporaryDirectory() as temporary:
        at = Path(temporary)
        opened(options.folder, at)
        commands = parts(options.folder, at, out, cuda)
        commands = {part: x for part, x in commands.items() if part in (options.only or commands)}
        if cuda and options.stage != "measure":
            beside = {part: started(commands[part], out, at / f"{part}.log") for part in UNTIMED if part in commands}
            compiling = {part: started(x, at / part, at / f"{part}.log") for part, x in apart(commands)}
            for part, process in (compiling | beside).items():
                how = ended(process, began + options.compiling)
                shown = part in beside or how != "ended with 0"
                words = (at / f"{part}.log").read_text(errors="replace")[-1500:] if shown else ""
                say(f"{time.monotonic() - began:4.0f} s: first {part} {how} {words}")
        for part, command in commands.items():
            if options.stage == "compile" or (cuda and part in UNTIMED):
                continue
            left = began + options.seconds - time.monotonic()
            if left < 5:
                say(f"{part}: no time is left")
                continue
            log = at / f"{part}.log"
            how = ended(started(command, out, log), time.monotonic() + min(left, LIMITS[part] if cuda else left))
            say(f"{time.monotonic() - began:4.0f} s: {part} {how}\n{log.read_text(errors='replace')}")


if __name__ == "__main__":
    main()
