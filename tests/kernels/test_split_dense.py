"""The dense kernels over a sequence in parts: what they send each other gives what one sequence gives."""

from __future__ import annotations

import pytest
import torch
from kernel_checks import NAMES, error, poisoned_memory, tokens  # noqa: F401
from test_triton_dense import TOLERANCE, reference
from torch import Tensor

from cumulant.kernels.batch import batch_of
from cumulant.kernels.dense import plan as dense_plan
from cumulant.kernels.dense.split import attention
from cumulant.moments import Moments, added


class Pretended:
    """The workers of a sequence, computed one after the other: a first round takes down what each says to all."""

    def __init__(self, many: bool) -> None:
        self.many, self.taken = many, True
        self.said: list[list[Tensor]] = []

    def begin(self, taken: bool) -> None:
        self.taken = taken
        self.said = [] if not taken else self.said

    def _all(self, tensors: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        if not self.taken:
            self.said.append([x.clone() for x in tensors])
            return tuple(x.unsqueeze(0) for x in tensors)
        return tuple(torch.stack(x) for x in zip(*self.said, strict=True))

    def gathered(self, *tensors: Tensor) -> tuple[Tensor, ...] | None:
        return None if self.many else self._all(tensors)

    def merge(self, moments: Moments) -> Moments:
        return moments.filled(self._all(moments.kept())).union(added)

    def add(self, *tensors: Tensor) -> tuple[Tensor, ...]:
        return added(*self._all(tensors))


@pytest.mark.parametrize(
    ("order", "many", "dtype", "normalization"),
    [(2, False, torch.float32, "mean"), (3, True, torch.float32, "sum"), (3, False, torch.bfloat16, "mean"),
     (2, True, torch.float32, "mean")],
)  # fmt: skip
def test_parts_of_any_length_give_what_the_whole_gives(monkeypatch, order, many, dtype, normalization):
    monkeypatch.setattr(dense_plan, "LEAST", 48)  # several spans in a part
    B, H, G, D, E, lengths = 2, 1, 2, 24, 16, [70, 0, 9]
    L, scale = sum(lengths), D**-0.5
    q, k, v = (tokens(B, h, L, w, mean=m, dtype=dtype, seed=m) for h, w, m in ((H * G, D, 0), (H, D, 30), (H, E, -20)))
    weights = tokens(B, L, seed=5).abs() if normalization == "sum" else None
    grad = tokens(B, H * G, L, E, dtype=dtype, seed=7)
    exact = [x.double().requires_grad_() for x in (q, k, v)]
    expected = reference(*exact, weights, order, scale, normalization)
    expected.backward(grad.double())
    cut = zip(*(x.split(lengths, 2) for x in (q, k, v)), strict=True)
    parts = [[x.detach().requires_grad_() for x in one] for one in cut]
    masks = [None] * 3 if weights is None else weights.split(lengths, 1)
    across = Pretended(many)
    for taken in (False, True):
        across.begin(taken)
        outs = [attention(batch_of(*one, w, order, scale, normalization), across)
                for one, w in zip(parts, masks, strict=True)]  # fmt: skip
    for taken in (False, True):
        across.begin(taken)
        grads = [torch.autograd.grad(out, one, g, retain_graph=True)
                 for out, one, g in zip(outs, parts, grad.split(lengths, 2), strict=True)]  # fmt: skip
    found = [torch.cat(x, 2) for x in (outs, *zip(*grads, strict=True))]
    wanted = [expected, *(x.grad for x in exact)]
    errors = {name: error(x, y) for name, x, y in zip(NAMES, found, wanted, strict=True)}
    assert all(value < TOLERANCE[dtype] for value in errors.values()), errors
