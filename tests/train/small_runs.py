"""Small training runs for the tests: a few digits, a short recipe, child processes that may be killed."""

import json
import os
import signal
import traceback
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
from safetensors.torch import load_file

from cumulant.data.augmentation import Augmentation
from cumulant.data.images import TensorImages
from cumulant.data.part import Source
from cumulant.data.source import digits_source
from cumulant.train import TrainRecipe, optimise, read_log, train
from cumulant.train.checkpoint import read_header

# Everything that draws random numbers or has a state of its own is on: 6 steps an epoch, 18 in all. Of 112 digits 12
# are held out.
FULL = TrainRecipe(
    data="few digits",
    image_size=8,
    model="vit_nano_patch2_8",
    model_options={"in_chans": 3, "depth": 2, "embed_dim": 32, "init_std": 0.1, "drop_rate": 0.1},
    attention="cumulant2",
    drop_path=0.2,
    epochs=3,
    batch_size=16,
    lr=2e-3,
    warmup_epochs=1.0,
    label_smoothing=0.1,
    clip=1.0,
    ema=0.9,
    accumulate=2,
    repeats=2,
    augmentation=Augmentation(shift=1, flip=0.5, erase=0.3, mixup=0.8, cutmix=1.0, randaugment_ops=1),
    workers=0,
    log_steps=4,
    checkpoint_steps=5,
    holdout=0.1,
)
# Without dropout and stochastic depth, which several processes draw each for itself.
PLAIN = replace(
    FULL, drop_path=0.0, model_options={key: value for key, value in FULL.model_options.items() if key != "drop_rate"}
)


@cache
def few_digits(train: int = 112, test: int = 50) -> Source:
    """The first digits of the data set, as a data set of their own."""
    whole = digits_source()
    parts = [
        TensorImages(part.images[:count], part.labels[:count], f"few digits {title}")
        for part, count, title in ((whole.train, train, "train"), (whole.test, test, "test"))
    ]
    return Source("few digits", "image", *parts, whole.classes)


def in_child(work) -> int:
    """Do the work in a forked process and say how it ended: 0, 1 after an error, -9 if it was killed."""
    process = os.fork()
    if process == 0:
        try:
            torch.set_num_threads(1)  # threads do not survive a fork: waiting for a second one would never end
            work()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])


def kill_self(*_arguments) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def train_until(out: Path, step: int, recipe: TrainRecipe, source: Source | None = None) -> None:
    """A run killed in that step."""

    def work() -> None:
        apply, calls = optimise.apply, iter(range(1, 1 << 30))
        optimise.apply = lambda *arguments: kill_self() if next(calls) == step else apply(*arguments)
        train(recipe, out, source=source)

    assert in_child(work) == -signal.SIGKILL


def outcome(folder: Path) -> dict[str, object]:
    """All that a run left behind except how long it took: every tensor as bytes, the log and the result as values."""
    left: dict = {"names": sorted(os.listdir(folder)), "recipe": (folder / "recipe.json").read_text()}
    for name in (name for name in left["names"] if name.endswith(".safetensors")):
        tensors = {key: tensor.numpy().tobytes() for key, tensor in load_file(folder / name).items()}
        left[name] = (tensors, read_header(folder / name))  # the file itself has its header in any order
    left["log"] = [{key: value for key, value in line.items() if key != "seconds"} for line in read_log(folder)]
    result = json.loads((folder / "result.json").read_text())["result"]
    left["result"] = {key: value for key, value in result.items() if "seconds" not in key}
    return left
