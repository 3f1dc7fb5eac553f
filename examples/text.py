"""What the examples share: sentences, a small language model, and the loss of one worker's part of a context."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import cumulant
from cumulant.data.text import sentences_source
from cumulant.distributed import shard

CONTEXT, STEPS = 96, 5


def started() -> DeviceMesh:
    """All processes share the context; without torchrun there is one."""
    if not dist.is_initialized():
        alone = {} if "RANK" in os.environ else {"store": dist.HashStore(), "rank": 0, "world_size": 1}
        dist.init_process_group("nccl" if torch.cuda.is_available() else "gloo", **alone)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return init_device_mesh(device, (dist.get_world_size(),), mesh_dim_names=("cp",))


def windows() -> list[Tensor]:
    """CONTEXT + 1 tokens each: inputs, and what comes next. The same on every process."""
    part = sentences_source(context=CONTEXT).train
    return [part.decode(i, 0) for i in range(8)]


def model() -> nn.Module:
    torch.manual_seed(0)
    classes = len(sentences_source(context=CONTEXT).classes)
    return cumulant.create_model("lm_nano", attention="cumulant2", num_classes=classes, context=CONTEXT)


def loss_of(model: nn.Module, tokens: Tensor, mesh: DeviceMesh) -> Tensor:
    """This worker's share of the mean loss of tokens (B, CONTEXT + 1). Over all workers these add up to the mean."""
    own, wanted = (shard(x, mesh, axis=1) for x in (tokens[:, :-1], tokens[:, 1:]))
    logits = model(own)
    return F.cross_entropy(logits.flatten(0, 1), wanted.flatten(), reduction="sum") / wanted.new_tensor(
        tokens[:, 1:].numel()
    )
