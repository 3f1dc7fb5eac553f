"""The same call gives the same bits on a GPU, at sizes that fill it: what differs from run to run is a race."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch
from torch import Tensor

from cumulant import attention, cluster_attention
from cumulant.cluster import Blocks
from cumulant.kernels import replay
from cumulant.nn import CumulantAttention

CALLS: dict[str, tuple[tuple[int, ...], Callable[..., Tensor]]] = {  # (B, H, L, D), and the call
    "order 2": ((2, 12, 16_384, 64), partial(attention, order=2)),
    "order 3": ((2, 12, 16_384, 64), attention),
    "order 2, short": ((64, 12, 197, 64), partial(attention, order=2)),
    "order 3, short": ((64, 12, 197, 64), attention),
    "order 3, wide": ((4, 8, 2_000, 128), attention),
    "causal 2": ((2, 12, 8_192, 64), partial(attention, order=2, is_causal=True)),
    "causal 3": ((2, 12, 8_192, 64), partial(attention, is_causal=True)),
    "near clusters": ((2, 12, 8_192, 64), partial(cluster_attention, clusters=64, near=2)),
    "near clusters, heads of 96": ((1, 4, 4_096, 96), partial(cluster_attention, clusters=64, near=4)),
    "far clusters": ((2, 12, 4_096, 64), partial(cluster_attention, clusters=16)),
    "short clusters": ((32, 12, 256, 64), partial(cluster_attention, clusters=16)),
    "causal clusters": ((1, 12, 4_096, 64), partial(cluster_attention, clusters=Blocks(64, keep=16), is_causal=True)),
}


def step(call: Callable[..., Tensor], leaves: list[Tensor], grad: Tensor) -> list[Tensor]:
    out = call(*leaves)
    return [out.detach(), *torch.autograd.grad(out, leaves, grad)]


def differing(run: Callable[[], list[Tensor]], times: int = 6) -> list[int]:
    """Which results are not the same in all runs."""
    first = run()
    others = [run() for _ in range(times - 1)]
    return [i for i, x in enumerate(first) if any(x.ne(other[i]).any() for other in others)]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CALLS)
def test_a_call_has_the_same_bits_every_time(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(replay, "ASKED", False)
    shape, call = CALLS[name]
    generator = torch.Generator("cuda").manual_seed(0)
    made = [torch.randn(shape, generator=generator, device="cuda").add_(0.3).bfloat16() for _ in range(4)]
    leaves = [x.requires_grad_() for x in made[:3]]
    assert differing(partial(step, call, leaves, made[3])) == []


@pytest.mark.gpu
@pytest.mark.parametrize(("width", "length"), [(768, 16_384), (384, 1_568)])
def test_a_folded_layer_has_the_same_bits_every_time(width: int, length: int) -> None:
    torch.manual_seed(0)
    layer = CumulantAttention(width, width // 64, order=2, fold=True).cuda().bfloat16()
    x = torch.randn(65_536 // length, length, width, device="cuda").bfloat16().requires_grad_()
    grad = torch.randn_like(x)
    leaves = [x, *layer.parameters()]
    assert differing(lambda: step(lambda *_: layer(x), leaves, grad)) == []


def test_what_differs_is_named() -> None:
    runs = iter([[torch.zeros(2), torch.ones(1)]] * 3 + [[torch.zeros(2), torch.zeros(1)]])
    assert differing(lambda: next(runs), times=4) == [1]
