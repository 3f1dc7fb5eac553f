"""Eight gloo processes for the tests of this folder: started once for a file, each doing many checks.

They are forked from a server that has imported torch and used none of its threads.
"""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from typing import Any

PATIENCE = 120.0  # seconds, far above what any of them takes
PRELOADED = ["torch", "torch.distributed.tensor.debug", "cumulant.distributed.context", "cumulant.nn", "cumulant.zoo"]


def _run(
    function: Callable[..., Any], rank: int, world: int, path: str, answers: Any, arguments: tuple[Any, ...]
) -> None:
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    try:
        store = dist.FileStore(path, world)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
        answers.put((rank, function(rank, world, *arguments)))
        answers.close()
        answers.join_thread()
        dist.destroy_process_group()
    except BaseException:
        answers.put((rank, Failed(traceback.format_exc())))


class Failed(str):
    """The traceback of a worker."""

    __slots__ = ()


def side_by_side(world: int, function: Callable[..., Any], *arguments: Any, patience: float = PATIENCE) -> list[Any]:
    """function(rank, world, *arguments) in so many processes with a default group, and what each answered.

    The first one that fails ends all of them, with its traceback: the others would wait for its messages.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    answers = context.Queue()
    found: dict[int, Any] = {}
    with tempfile.TemporaryDirectory() as folder:
        several = [
            context.Process(
                target=_run, args=(function, rank, world, f"{folder}/store", answers, arguments), daemon=True
            )
            for rank in range(world)
        ]
        for one in several:
            one.start()
        try:
            while len(found) < world:
                rank, answer = answers.get(timeout=patience)
                if isinstance(answer, Failed):
                    raise RuntimeError(f"worker {rank} of {world} failed:\n{answer}")
                found[rank] = answer
            for one in several:
                one.join(patience)
        finally:
            for one in several:
                if one.is_alive():
                    one.kill()
    return [found[rank] for rank in range(world)]
