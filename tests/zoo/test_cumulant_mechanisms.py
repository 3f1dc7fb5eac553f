"""The registered cumulant mechanisms are `cumulant.attention` of their order, nothing else."""

import pytest
import torch

from cumulant import zoo
from cumulant.attention import attention, scores


def draw():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(2, 4, 6, 3, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, 2, 2, 6, 3, generator=generator, dtype=torch.float64)
    return query, key, value


@pytest.mark.parametrize("order", [1, 2, 3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_name_means_order(order, is_causal):
    query, key, value = draw()
    shared = {"key_mask": torch.arange(6).lt(torch.tensor([[4], [6]])), "is_causal": is_causal,
              "scale": 0.3, "enable_gqa": True}  # fmt: skip
    mechanism = zoo.get(f"cumulant{order}")
    assert torch.equal(mechanism(query, key, value, **shared), attention(query, key, value, order=order, **shared))
    assert torch.equal(mechanism.scores(query, key, **shared), scores(query, key, order=order, **shared))


def test_options_reach_the_function():
    query, key, value = draw()
    full = zoo.get("cumulant3")(query, key, value, enable_gqa=True, full=True, normalization="sum")
    assert torch.equal(full, attention(query, key, value, enable_gqa=True, full=True, normalization="sum"))


def test_the_first_order_of_all_keys_is_their_mean_with_gradients_for_everything():
    inputs = [x.requires_grad_() for x in draw()]
    own, plain = zoo.get("cumulant1")(*inputs, enable_gqa=True), attention(*inputs, order=1, enable_gqa=True)
    torch.testing.assert_close(own, plain)
    upstream = torch.randn(own.shape, dtype=own.dtype, generator=torch.Generator().manual_seed(1))
    found, wanted = (torch.autograd.grad(x, inputs, upstream) for x in (own, plain))
    torch.testing.assert_close(found, wanted)
    assert not any(x.any() for x in found[:2])
