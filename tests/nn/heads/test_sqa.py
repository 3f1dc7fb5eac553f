"""SQA: what its page lets one check without trained weights."""

import pytest
import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.flop_counter import FlopCounterMode

from cumulant.nn import MultiheadAttention, create_layer
from cumulant.nn.heads.sqa import VARIANTS
from cumulant.nn.probes import draw

HEADS = {"sqa": (4, 2), "ssqa": (4, 4), "xsqa": (2, 2), "xsmqa": (2, 1), "lsqa": (6, 2), "rsqa": (2, 4)}


def made(**options):
    torch.manual_seed(0)
    return create_layer("sqa", 32, 8, dtype=torch.float64, **options)


@pytest.mark.parametrize("variant", VARIANTS)
def test_a_variant_has_its_heads_and_the_parameters_of_the_page(variant):
    layer, (queries, keys) = made(variant=variant), HEADS[variant]
    assert (layer.query_heads, layer.num_kv_heads) == (queries, keys)
    inner = max(queries, keys)  # rsqa repeats its queries: the last projection reads key heads
    assert sum(p.numel() for p in layer.parameters()) == 32 * 4 * (queries + 2 * keys + inner) + 32


@pytest.mark.parametrize("keys", [8, 2, 1])
def test_with_all_query_heads_it_is_multi_head_grouped_or_multi_query_attention(keys):
    layer = made(query_heads=8, key_heads=keys)
    plain = MultiheadAttention(32, 8, num_kv_heads=keys, qkv_bias=False, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict())
    torch.testing.assert_close(layer(draw(2, 9, 32)), plain(draw(2, 9, 32)))


def test_it_is_the_plain_layer_in_which_dropped_heads_reach_nothing():
    layer = made(variant="sqa")
    plain = MultiheadAttention(32, 8, qkv_bias=False, dtype=torch.float64)
    with torch.no_grad():
        query, key, value = layer.qkv.weight.split(layer.widths)
        key, value = (part.unflatten(0, (2, 4)).repeat_interleave(2, 0).flatten(0, 1) for part in (key, value))
        for at, part in enumerate((query, key, value)):
            plain.qkv.weight[32 * at : 32 * at + 16] = part
        plain.proj.weight.zero_()
        plain.proj.weight[:, :16] = layer.proj.weight
        plain.proj.bias.copy_(layer.proj.bias)
    torch.testing.assert_close(layer(draw(2, 9, 32)), plain(draw(2, 9, 32)))


def test_head_j_of_the_reverse_form_reads_query_j_modulo_the_query_heads():
    layer, x = made(variant="rsqa"), draw(2, 9, 32)
    query, _, _ = layer.project(x)
    assert query.shape[1] == 4
    torch.testing.assert_close(query[:, 2:], query[:, :2])


@pytest.mark.parametrize(("variant", "part"), [("sqa", 1 / 2), ("xsqa", 1 / 4), ("lsqa", 3 / 4)])
def test_the_products_of_attention_shrink_with_the_query_heads(variant, part):
    x = torch.randn(1, 64, 32)

    def core(layer, projections):
        with sdpa_kernel(SDPBackend.MATH), FlopCounterMode(display=False) as flops, torch.no_grad():
            layer.float()(x)
        return flops.get_total_flops() - 2 * 64 * projections

    queries, keys = HEADS[variant]
    sparse = core(made(variant=variant), 32 * 4 * (2 * queries + 2 * keys))
    assert sparse == part * core(MultiheadAttention(32, 8), 4 * 32 * 32)
