"""What the processes of test_context.py do: `python context_worker.py FOLDER NUMBER PORT` forks so many of them.

They are forked before torch has used a thread, and share one import of it.
"""

import json
import os
import signal
import sys
import traceback
from contextlib import suppress
from dataclasses import replace
from functools import cache
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from small_runs import PLAIN, few_digits

from cumulant.data import ClipPart, ClipSampling, Source, TensorVideos
from cumulant.data.augmentation import Augmentation
from cumulant.data.text import TextPart, sentences_source
from cumulant.train import evaluate_checkpoint, optimise, train
from cumulant.train.processes import cut

STILL = {"augmentation": Augmentation(), "repeats": 1, "holdout": 0.0, "ema": 0.0, "accumulate": 1, "epochs": 1}
SMALL = replace(PLAIN, warmup_epochs=0, clip=None, label_smoothing=0.0, **STILL)
SIDES = {"depth": 2, "embed_dim": 16, "num_heads": 2, "init_std": 0.1}
IMAGE = {**SIDES, "in_chans": 3}
CLIP = {**SIDES, "in_chans": 3, "tubelet": [1, 4, 4], "zero_head": False}
VIDEO = replace(SMALL, model="vivit_nano_patch4x1_16", model_options=CLIP, frames=5, batch_size=4, data="clips")
TEXT = replace(SMALL, model="lm_nano", data="letters", batch_size=8)
# Each as one process trains it, and what is different where two share a sequence, of 17, 5 frames or 31 tokens.
CASES = {
    "vit": (SMALL, {"context_parallel": 2}),
    "vit, blocks of patches": (replace(SMALL, attention="cluster4+near=1"), {"context_parallel": 2}),
    "vit, shards": (replace(SMALL, attention="cumulant3", accumulate=2, model_options={**IMAGE, "pool": "gap"}),
                    {"context_parallel": 2, "parallel": "fsdp"}),
    "video 1": (replace(VIDEO, model_options={**CLIP, "variant": 1}), {"context_parallel": 2, "parallel": "fsdp"}),
    "video 2": (replace(VIDEO, model_options={**CLIP, "variant": 2, "temporal_depth": 1}), {"context_parallel": 2}),
    "video 3": (replace(VIDEO, model_options={**CLIP, "variant": 3}), {"context_parallel": 2}),
    "text": (replace(TEXT, model_options=SIDES), {"context_parallel": 2}),
}  # fmt: skip
WRONG = {
    "does not divide the processes": replace(SMALL, context_parallel=3),
    "another layer": replace(SMALL, context_parallel=2, model_options={**IMAGE, "layer": "moh"}),
    "another network": replace(SMALL, context_parallel=2, model="ia_red2_nano_patch2_8", model_options={}),
    "does not merge": replace(SMALL, context_parallel=2, attention="agent"),
}


@cache
def clips():
    pixels = torch.randint(0, 256, (12, 5, 3, 8, 8), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    parts = []
    for piece in (slice(0, 8), slice(8, 12)):
        videos = TensorVideos(list(pixels[piece]), torch.arange(12)[piece] % 2)
        parts.append(ClipPart(videos, ClipSampling(5, 1), jitter=False))
    return Source("clips", "video", *parts, ("a", "b"))


@cache
def letters():
    whole = sentences_source(context=31)
    parts = [TextPart(part.tokens[:900], 31, 900, "few letters") for part in (whole.train, whole.test)]
    return Source("few letters", "text", *parts, whole.classes)


def source_of(recipe):
    return {"few digits": few_digits, "clips": clips, "letters": letters}[recipe.data]()


def trained(recipe, folder, stop_at=None):
    """Train, and keep the gradients of the first step as they are applied."""
    apply, calls = optimise.apply, iter(range(1, 1 << 30))

    def seen(optimizer, parameters, clip):
        parameters, call = list(parameters), next(calls)
        if call == 1:
            whole = [p.grad.full_tensor() if cut(p.grad) else p.grad for p in parameters]
            if int(os.environ.get("RANK", 0)) == 0:
                save_file({str(i): g.clone() for i, g in enumerate(whole)}, f"{folder}.gradients")
        if call == stop_at:
            os.kill(os.getpid(), signal.SIGTERM)
        apply(optimizer, parameters, clip)

    optimise.apply = seen
    try:
        return train(recipe, folder, source=source_of(recipe), device="cpu")
    finally:
        optimise.apply = apply


def main(folder):
    dist.init_process_group("gloo")
    torch.set_num_threads(1)
    for name, (recipe, common) in CASES.items():
        trained(replace(recipe, **common), folder / name)
    with suppress(KeyboardInterrupt):
        trained(replace(SMALL, context_parallel=2, parallel="fsdp"), folder / "stopped", stop_at=2)
    with suppress(KeyboardInterrupt):  # a batch for each process, and then one goes on alone
        trained(SMALL, folder / "stopped", stop_at=2)
    refused = {}
    for name, recipe in WRONG.items():
        try:
            train(recipe, folder / "wrong", source=source_of(recipe), device="cpu")
        except ValueError as error:
            refused[name] = str(error)
    found, _ = evaluate_checkpoint(folder / "vit", source=few_digits(112, 49), batch_size=6, device="cpu")
    if dist.get_rank() == 0:
        found.save(folder / "evaluated.safetensors")
        (folder / "refused.json").write_text(json.dumps(refused))
    dist.barrier()
    dist.destroy_process_group()


def started(rank, world, port, folder):
    """The process of a rank, which torchrun's variables tell who it is."""
    pid = os.fork()
    if pid:
        return pid
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()})
    try:
        main(Path(folder))
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


if __name__ == "__main__":
    folder, world, port = sys.argv[1:]
    everyone = [started(rank, int(world), port, folder) for rank in range(int(world))]
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in everyone]
    sys.exit(max(map(abs, codes)))
