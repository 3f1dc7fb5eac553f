"""A sequence split over workers gives what one process gives: outputs and gradients, whatever the parts are."""

from __future__ import annotations

import pytest
import torch
from processes import side_by_side
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import cumulant
from cumulant import zoo
from cumulant.distributed import context_parallel
from cumulant.distributed.parts import first_piece

WORLD = 8
UNEVEN = [13, 0, 5, 3, 9, 1, 0, 4]  # tokens of each worker


def rows_of(lengths: list[int], rank: int, order: str) -> Tensor:
    """The places, in the whole sequence, of the tokens that a worker holds."""
    first = [first_piece(n) for n in lengths] if order == "zigzag" else lengths
    own = torch.arange(first[rank]) + sum(first[:rank])
    if order == "rank":
        return own
    second = [n - m for n, m in zip(lengths, first, strict=True)]
    return torch.cat((own, torch.arange(second[rank]) + sum(lengths) - sum(second[: rank + 1])))


def apart(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, in units of the largest number wanted (1 at least)."""
    return float((found - wanted).abs().max() / wanted.abs().max().clamp(min=1)) if found.numel() else 0.0


def compared(
    mesh, call, lengths, *, order="rank", softmax="ring", dtype=torch.float64, mask=None, heads=(4, 2), batch=2
) -> float:
    """How far `call(query, key, value, key_mask=...)` in parts is from the whole, outputs and gradients."""
    rank, L = mesh.get_local_rank("cp"), sum(lengths)
    torch.manual_seed(1)
    query, key, value = (
        torch.randn(batch, h, L, w, dtype=dtype) for h, w in zip((*heads, heads[1]), (5, 5, 6), strict=True)
    )
    key, value, grad = key + 3, value - 2, torch.randn(batch, heads[0], L, 6, dtype=dtype)
    there = None
    if mask is not None:
        there = torch.rand(batch, L) > 0.3
        there[0] = False  # a sequence without any key
        if mask == "one worker":
            there = torch.ones(batch, L, dtype=torch.bool)
            there[:, rows_of(lengths, 0, order)[1:]] = False
        there = there * (0.5 + torch.rand(batch, L, dtype=dtype)) if mask == "weights" else there
    whole = [x.clone().requires_grad_() for x in (query, key, value)]
    wanted = call(*whole, key_mask=there)
    wanted.backward(grad)
    rows = rows_of(lengths, rank, order)
    parts = [x[:, :, rows].clone().requires_grad_() for x in (query, key, value)]
    with context_parallel(mesh, order=order, softmax=softmax):
        # Whoever has no padding passes no mask.
        own = there[:, rows] if there is not None and (mask != "one worker" or rank == 0) else None
        found = call(*parts, key_mask=own)
        found.backward(grad[:, :, rows])
    errors = [apart(found, wanted[:, :, rows])]
    return max(errors + [apart(p.grad, w.grad[:, :, rows]) for p, w in zip(parts, whole, strict=True)])


def attention(**options):
    def call(query, key, value, key_mask):
        return cumulant.attention(query, key, value, key_mask=key_mask, enable_gqa=True, **options)

    return call


def mechanism(name, **options):
    def call(query, key, value, key_mask):
        return zoo.get(name)(query, key, value, key_mask=key_mask, enable_gqa=True, **options)

    return call


CASES = {
    "order 1": (attention(order=1), {}),
    "order 2": (attention(order=2), {}),
    "order 3": (attention(order=3), {}),
    "full third order": (attention(full=True), {}),
    "plain torch": (attention(backend="reference"), {}),
    "the printed form, sums": (attention(normalization="sum"), {"mask": "weights"}),
    "masked": (attention(), {"mask": "bool"}),
    "weighted": (attention(), {"mask": "weights"}),
    "padding on one worker": (attention(), {"mask": "one worker"}),
    "causal, order 1": (attention(order=1, is_causal=True), {}),
    "causal, order 2": (attention(order=2, is_causal=True), {}),
    "causal": (attention(is_causal=True), {}),
    "causal, full third order": (attention(full=True, is_causal=True), {}),
    "causal, masked": (attention(is_causal=True), {"mask": "bool"}),
    "causal, weighted sums": (attention(normalization="sum", is_causal=True), {"mask": "weights"}),
    "causal, padding on one worker": (attention(is_causal=True), {"mask": "one worker"}),
    "zigzag": (attention(is_causal=True), {"order": "zigzag"}),
    "zigzag, masked": (attention(order=2, is_causal=True), {"order": "zigzag", "mask": "bool"}),
    "softmax": (mechanism("softmax"), {}),
    "softmax, causal": (mechanism("softmax", is_causal=True), {}),
    "softmax, masked": (mechanism("softmax"), {"mask": "one worker"}),
    "softmax, causal and weighted": (mechanism("softmax", is_causal=True), {"mask": "weights"}),
    "softmax, zigzag": (mechanism("softmax", is_causal=True), {"order": "zigzag"}),
    "softmax, gathered": (mechanism("softmax"), {"softmax": "gather", "mask": "weights"}),
    "softmax, gathered, zigzag": (mechanism("softmax", is_causal=True), {"order": "zigzag", "softmax": "gather"}),
    "zigzag, not causal": (attention(), {"order": "zigzag"}),
}


def everything(rank: int, world: int) -> dict[tuple[str, int, str], float]:
    """The largest error of every case, for 1, 2, 4 and 8 workers."""
    found = {}
    for size in (1, 2, 4, 8):
        mesh = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("dp", "cp"))
        for name, (call, how) in CASES.items():
            found[name, size, "float64"] = compared(mesh, call, UNEVEN[:size], **how)
        if size == 4:
            for name, (call, how) in CASES.items():
                found[name, size, "float32"] = compared(mesh, call, [6] * size, dtype=torch.float32, **how)
    return found


@pytest.fixture(scope="module")
def errors():
    answers = side_by_side(WORLD, everything)
    told = [answer for answer in answers if isinstance(answer, str)]
    assert not told, told[0]
    return {key: max(answer[key] for answer in answers) for key in answers[0]}


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_uneven_parts_give_what_one_process_gives(errors, name, workers):
    assert errors[name, workers, "float64"] <= 1e-10


@pytest.mark.parametrize("name", CASES)
def test_so_do_parts_in_single_precision(errors, name):
    assert errors[name, 4, "float32"] <= 1e-4
