"""Triton kernels of k-means against plain torch: the same clusters, in Triton's interpreter or on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from kernel_checks import DEVICE, error, poisoned_memory, tokens  # noqa: F401
from torch import Tensor

from cumulant.cluster import KMeans, cluster_attention, kmeans_assignment
from cumulant.cluster.kmeans import first_centres
from cumulant.kernels.kmeans import host


def in_groups(*shape: int, groups: int, seed: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Tokens around `groups` points far from each other, so that no key is near to two centres."""
    points = 6 * tokens(groups, shape[-1], seed=seed)
    which = torch.arange(shape[-2], device=DEVICE) * 7 % groups
    return (points[which] + 0.3 * tokens(*shape, seed=seed + 1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("options", "masked"),
    [(KMeans(5), False), (KMeans(5, iterations=2, sample=2, metric="none", start="random"), True)],
)
def test_kernels_find_the_clusters_of_plain_torch(options: KMeans, masked: bool, dtype: torch.dtype) -> None:
    q, k = tokens(2, 4, 50, 24, dtype=dtype), in_groups(2, 2, 90, 24, groups=9, seed=3, dtype=dtype)
    present = torch.arange(90, device=DEVICE).expand(2, 90) % 11 != 4 if masked else None
    step = options.step(90)
    some = None if present is None else present[:, None, ::step]
    centres = first_centres(k[:, :, ::step], some, options)
    query = None if options.metric == "none" else q
    found = host.nearest(query, k, present, centres, 5, options.iterations, step)
    if not masked:  # evenly spaced keys are found by the kernels too
        assert torch.equal(host.nearest(query, k, None, None, 5, options.iterations, step), found)
    exact = kmeans_assignment(q.double(), k.double(), options, key_mask=present, enable_gqa=True)
    there = slice(None) if present is None else present[0]
    assert torch.equal(found[..., there].long(), exact[..., there])


def test_keys_that_take_no_part_may_hold_anything() -> None:
    q, k = tokens(1, 1, 40, 16), in_groups(1, 1, 80, 16, groups=6, seed=3)
    mask = torch.arange(80, device=DEVICE)[None] % 9 != 4
    options: dict[str, Any] = {"clusters": KMeans(6), "key_mask": mask, "backend": "triton"}
    out = cluster_attention(q, k, k, **options)
    k[:, :, ~mask[0]] = float("nan")
    assert error(cluster_attention(q, k, k, **options), out) == 0


@pytest.mark.gpu
def test_at_full_size_the_clusters_are_as_tight_as_those_of_plain_torch() -> None:
    q, k = (tokens(2, 4, 8192, 64, dtype=torch.bfloat16, seed=i) for i in range(2))
    options = KMeans(64)
    found = host.nearest(q, k, None, None, 64, options.iterations, 1).long()
    exact = kmeans_assignment(q.double(), k.double(), options)
    assert (found == exact).float().mean() > 0.95  # near ties after five steps

    def spread(ids: Tensor) -> float:
        index, x = ids.unsqueeze(-1).expand(*ids.shape, 64), k.double()
        sums, number = (x.new_zeros(2, 4, 64, 64).scatter_add(2, index, y) for y in (x, torch.ones_like(x)))
        centres = sums / number.clamp(min=1)
        return float((x - centres.gather(2, index)).square().sum())

    assert spread(found) < 1.001 * spread(exact)
