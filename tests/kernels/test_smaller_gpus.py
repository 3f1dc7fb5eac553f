"""GPUs with less shared memory than an H200, and those that no kernel is for."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import fresh
import pytest
import torch
from cluster_checks import compare
from kernel_checks import DEVICE, compare_with, poisoned_memory, tokens  # noqa: F401
from torch import Tensor
from triton.runtime.errors import OutOfResources

from cumulant import attention, cluster_attention
from cumulant.call import Call
from cumulant.cluster import Blocks, KMeans
from cumulant.cluster import backend as cluster_backend
from cumulant.kernels import launch
from cumulant.kernels.batch import batch_of
from cumulant.kernels.dense import plan as dense_plan
from cumulant.kernels.kmeans import host as kmeans
from cumulant.kernels.short import plan as short_plan
from cumulant.kernels.tokens import Kernel

ROOT = Path(__file__).parents[2]
SMALL = 101_376  # bytes of shared memory of an RTX 3090, RTX 4090 or L4


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    for module in (launch, dense_plan, short_plan, kmeans):
        monkeypatch.setattr(module, "shared_memory", lambda device: SMALL)
    cluster_backend._found.clear()
    yield
    cluster_backend._found.clear()


def test_kernels_fit_a_small_gpu() -> None:
    """What takes most of wide heads, as Triton compiles it for an RTX 4090: none would fit in the tiles of an H200."""
    wanted = ("dense.backward.backward_keys", "short.backward.key_gradients", "past.backward.query_gradients")
    said = fresh.python("-m", "tools.fits", "--widths", "128", "--only", *wanted, folder=ROOT)
    assert all(name in said for name in wanted)
    assert "; 0 do not fit" in said


def test_third_order_of_wide_heads(small: None) -> None:
    q, k, v = (tokens(1, 1, 70, 128, mean=i / 4, seed=i).to(torch.bfloat16) for i in range(3))
    plan = dense_plan.plan_for(batch_of(q, k, v, None, 3, 0.1))
    assert plan.config("backward_keys", 70).block == 32

    def kernels(q: Tensor, k: Tensor, v: Tensor, weights: None, order: int, scale: float, normalization: str) -> Tensor:
        return attention(q, k, v, order=order, scale=scale, normalization=normalization, backend="triton")

    def exact(q: Tensor, k: Tensor, v: Tensor, weights: None, order: int, scale: float, normalization: str) -> Tensor:
        return attention(q, k, v, order=order, scale=scale, normalization=normalization, backend="reference")

    compare_with(kernels, exact, q, k, v, None, 3, 2e-2)


def test_short_clusters_of_wide_heads(small: None) -> None:
    q, k, v = (tokens(1, 1, 150, 100, seed=i).to(torch.bfloat16) for i in range(3))
    call = short_plan.Call(q, k, v, tuple(range(150)), 8, 0.1)
    assert short_plan.plan_for(call).launch("key_gradients")["M"] == 64
    clusters = {"clusters": Blocks(5), "backend": "triton"}
    inputs = [x.requires_grad_() for x in (q, k, v)]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    found = cluster_attention(*inputs, **clusters)
    wanted = cluster_attention(*wide, clusters=Blocks(5))
    for out in (found, wanted):
        out.backward(torch.ones_like(out))
    for x, y in ((found, wanted), *((a.grad, b.grad) for a, b in zip(inputs, wide, strict=True))):
        assert (x.double() - y).norm() < 2e-2 * y.norm()


@pytest.mark.parametrize(("dtype", "D", "rows"), [(torch.float32, 64, 32), (torch.bfloat16, 100, 64)])
def test_rows_of_a_tile_of_causal_clusters(small: None, dtype: torch.dtype, D: int, rows: int) -> None:
    q, k, v = (tokens(1, 1, 140, D, seed=i).to(dtype) for i in range(3))
    assert cluster_backend.past_tile(Call(q, k, v)) == rows
    if dtype == torch.float32:
        compare(q, k, v, clusters=Blocks(16, keep=2, recent=1), is_causal=True)


def test_centres_that_a_program_cannot_hold_are_found_in_plain_torch(small: None) -> None:
    key = tokens(1, 1, 200, 128).to(torch.bfloat16)
    assert not kmeans.fits(16, key)
    assert kmeans.fits(16, key[..., :64])
    found = cluster_attention(key, key, key, clusters=KMeans(16), backend="triton")
    wanted = cluster_attention(key, key, key, clusters=KMeans(16), backend="reference")
    assert (found - wanted).norm() < 2e-2 * wanted.norm()


def test_what_does_not_fit_is_told(small: None) -> None:
    q = tokens(1, 1, 8, 256).to(torch.bfloat16)
    with pytest.raises(ValueError, match=r"heads of 256 take 160,768 bytes of shared memory.* 101,376 here"):
        attention(q, q, q, backend="triton")
    assert attention(q, q, q, backend="auto").shape == q.shape
    assert launch.no_room(q, q, 3, is_causal=True) is None  # of the causal kernels bfloat16 fits


class Short:
    """Stands for a kernel that takes 60 bytes a stage, on a GPU of 100."""

    __name__ = "short"
    arg_names = ("x", "NEAR_STAGES")

    def __init__(self, stages: int) -> None:
        self.tried: list[int] = []
        self.least = stages

    def __getitem__(self, grid: Any) -> Any:
        def run(*given: Any, NEAR_STAGES: int, num_warps: int) -> str:
            self.tried.append(NEAR_STAGES)
            if NEAR_STAGES > self.least:
                raise OutOfResources(60 * NEAR_STAGES, 100, "shared memory")
            return "compiled"

        return run


def test_loops_have_one_stage_where_more_do_not_fit() -> None:
    short = Short(1)
    found = Kernel(short, ["x"], []).first((1,), (0,), {"NEAR_STAGES": 3, "num_warps": 4})
    assert found == ("compiled", (1,))
    assert short.tried == [3, 1]
    with pytest.raises(RuntimeError, match=r'kernel short takes 60 of shared memory.*backend="reference"'):
        Kernel(Short(0), ["x"], []).first((1,), (0,), {"NEAR_STAGES": 3, "num_warps": 4})


@pytest.mark.parametrize(
    ("capability", "hip", "said"),
    [((7, 5), None, "8.0 and later, this one has 7.5"), ((9, 4), "6.4", "ROCm"), ((8, 9), None, None)],
)
def test_which_gpus_have_kernels(
    capability: tuple[int, int], hip: str | None, said: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.version, "hip", hip)
    device: Any = SimpleNamespace(type="cuda")
    found = launch.unsupported.__wrapped__(device)
    assert found is None if said is None else said in found
