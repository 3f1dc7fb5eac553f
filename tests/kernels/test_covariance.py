"""The covariance kernel of the folded layer against float64, over tiles, splits of the tokens and batches."""

import pytest
import torch
from kernel_checks import error, poisoned_memory, tokens  # noqa: F401

from cumulant.kernels.fold import host as triton_covariance


@pytest.mark.parametrize(("B", "L", "C"), [(1, 1, 5), (3, 40, 130), (2, 2100, 20)])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_covariance_and_mean_of_every_batch(B, L, C, dtype):
    x = tokens(B, L, C, mean=1.0, dtype=dtype)
    G, mean = triton_covariance.covariance(x)
    exact = x.double() - x.double().mean(1, keepdim=True)
    assert error(mean, x.double().mean(1)) < 1e-5
    assert (G.double() - exact.mT @ exact / L).abs().max() < (1e-2 if dtype == torch.bfloat16 else 2e-3)
    # Tiles beside the diagonal are one result written twice. In those on it the products of the interpreter, NumPy's,
    # may add up x y and y x in another order: on some CPUs they do.
    tile = triton_covariance.BLOCK
    assert torch.equal(G[:, tile:, :tile], G[:, :tile, tile:].mT)
    torch.testing.assert_close(G, G.mT, rtol=torch.finfo(dtype).eps, atol=1e-5)


def test_grids_have_one_dimension(monkeypatch):
    """Others would end at a batch of 65,535."""
    grids = []

    class Recorded:
        def __init__(self, kernel):
            self.kernel = kernel

        def __getitem__(self, grid):
            grids.append(grid)
            return self.kernel[grid]

    for name in ("sums_kernel", "finish_kernel"):
        monkeypatch.setattr(triton_covariance, name, Recorded(getattr(triton_covariance, name)))
    triton_covariance.covariance(tokens(3, 40, 130, dtype=torch.bfloat16))
    assert grids == [(3 * 1 * 3,), (3 * 3,)]
