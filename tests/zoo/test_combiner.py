"""Combiner against a loop over direct keys and regions; coverage, causality and the stream."""

import math

import pytest
import torch
import torch.nn.functional as F
from random_tokens import draw

from cumulant import zoo
from cumulant.nn import MultiheadAttention
from cumulant.zoo import combiner
from cumulant.zoo.combiner import CombinerAttention, CombinerStream

COMBINER = combiner.COMBINER


def partition(i, length, *, variant, c=None, causal=True, prefix=0, own=False):
    """Direct keys of query i and its regions, by the words of the paper."""
    if i < prefix:
        return [j for j in range(length) if not causal or j <= i], []
    if variant == "logsparse":
        regions = []
        for level in range(length.bit_length()):
            b = i // 2**level
            if b % 2:
                regions.append(list(range((b - 1) * 2**level, b * 2**level)))
        return [i], regions
    segments = [list(range(s, min(s + c, length))) for s in range(prefix, length, c)]
    mine = (i - prefix) // c
    direct = list(range(prefix)) + [j for j in segments[mine] if not causal or j <= i]
    others = [s for r, s in enumerate(segments) if (r < mine if causal else own or r != mine)]
    return direct, others


def looped(query, key, *, variant="fixed", c=None, causal=False, prefix=0, own=False, pooling="max", mask=None,
           summary_key="wsum", keys=None):  # fmt: skip
    """The dense weights (B, H, L, L), query by query. `keys` (B, H, L, D) are given keys of axial summaries."""
    B, H, L, D = query.shape
    key = key.repeat_interleave(H // key.shape[1], 1)
    mask = torch.ones(B, L, dtype=torch.float64) if mask is None else mask.double()
    pools = {"max": lambda x: x.amax(0), "mean": lambda x: x.mean(0), "sum": lambda x: x.sum(0)}
    rows = []
    for b in range(B):
        for h in range(H):
            here = mask[b] > 0
            q, k = query[b, h] / math.sqrt(D) * here[:, None], key[b, h]
            log_w = mask[b].log()
            for i in range(L):
                direct, regions = partition(i, L, variant=variant, c=c, causal=causal, prefix=prefix, own=own)
                direct = [j for j in direct if here[j]]
                regions = [r for r in regions if any(here[j] for j in r)]
                logits, spread = [q[i] @ k[j] + log_w[j] for j in direct], []
                for r in regions:
                    tokens = [j for j in r if here[j]]
                    if variant == "axial":
                        same = r[0] + (i - prefix) % c  # the column of i in this row, absent if the row is short
                        Q = q[same] if same < L else torch.zeros_like(q[0])
                    else:
                        Q = pools[pooling](q[tokens])
                    p = (k[tokens] @ Q + log_w[tokens]).softmax(0)
                    if variant != "axial":
                        K = pools[pooling](k[tokens])
                    elif keys is not None:
                        K = keys[b, h, same] if same < L else torch.zeros_like(k[0])
                    elif summary_key == "wsum":
                        K = p @ k[tokens]
                    else:
                        K = k[same] * here[same] if same < L else torch.zeros_like(k[0])
                    logits.append(q[i] @ K)
                    spread.append((tokens, p))
                row = q.new_zeros(L)
                if logits:
                    weights = torch.stack(logits).softmax(0)
                    row = row.index_add(0, torch.tensor(direct, dtype=torch.long), weights[: len(direct)])
                    for weight, (tokens, p) in zip(weights[len(direct) :], spread, strict=True):
                        row = row.index_add(0, torch.tensor(tokens), weight * p)
                rows.append(row)
    return torch.stack(rows).reshape(B, H, L, L)


CASES = {
    "fixed causal": dict(variant="fixed", c=4, causal=True),
    "fixed": dict(variant="fixed", c=4),
    "fixed counting its own twice": dict(variant="fixed", c=4, own=True),
    "fixed with a class token": dict(variant="fixed", c=3, prefix=1),
    "fixed causal with prefix": dict(variant="fixed", c=3, prefix=2, causal=True),
    "fixed by means": dict(variant="fixed", c=5, pooling="mean"),
    "fixed by sums": dict(variant="fixed", c=5, pooling="sum", causal=True),
    "logsparse": dict(variant="logsparse", causal=True),
    "logsparse by means": dict(variant="logsparse", causal=True, pooling="mean"),
    "axial causal": dict(variant="axial", c=4, causal=True),
    "axial": dict(variant="axial", c=4),
    "axial counting its own twice": dict(variant="axial", c=4, own=True),
    "axial with a class token": dict(variant="axial", c=3, prefix=1),
    "axial with plain keys": dict(variant="axial", c=4, summary_key="none"),
}
MASK = torch.tensor([[1, 1, 0, 2, 1, 1, 0, 0, 0, 0, 1, 3, 1], [1] * 9 + [0] * 4])


def options_of(case):
    case = dict(case)
    renamed = {"segment": case.pop("c", None), "is_causal": case.pop("causal", False)}
    return renamed | {"exclude_own": not case.pop("own", False)} | case


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("key_heads", [2, 1])
def test_it_is_the_loop_over_direct_keys_and_regions(case, masked, key_heads):
    query, key, value = draw((2, 2, 13, 3), (2, key_heads, 13, 3), (2, key_heads, 13, 5))
    weights = looped(query, key, mask=MASK if masked else None, **CASES[case])
    wanted = weights @ value.repeat_interleave(2 // key_heads, 1)
    options = options_of(CASES[case]) | {"key_mask": MASK.double() if masked else None, "enable_gqa": key_heads != 2}
    out, dense = COMBINER(query, key, value, **options), COMBINER.scores(query, key, **options)
    torch.testing.assert_close(out, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(dense, weights, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("case", CASES)
def test_gradients_are_those_of_the_loop(case):
    query, key, value = (x.requires_grad_() for x in draw((1, 1, 11, 3), (1, 1, 11, 3), (1, 1, 11, 2)))
    (cotangent,) = draw((1, 1, 11, 2), seed=1)
    naive = looped(query, key, **CASES[case]) @ value
    ours = COMBINER(query, key, value, **options_of(CASES[case]))
    both = [torch.autograd.grad(out, (query, key, value), cotangent) for out in (ours, naive)]
    for got, wanted in zip(*both, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("length", [1, 2, 3, 8, 9, 16, 17, 33, 40])
@pytest.mark.parametrize(
    ("variant", "causal"), [("fixed", True), ("fixed", False), ("logsparse", True), ("axial", True), ("axial", False)]
)
def test_every_allowed_pair_has_weight_and_every_row_sums_to_one(length, variant, causal):
    for i in range(length):
        direct, regions = partition(i, length, variant=variant, c=5, causal=causal)
        assert sorted(direct + [j for region in regions for j in region]) == list(range(i + 1 if causal else length))
    query, key = draw((1, 1, length, 4), (1, 1, length, 4))
    weights = COMBINER.scores(query, key, variant=variant, is_causal=causal, segment=5)
    allowed = torch.ones(length, length).tril().bool() if causal else torch.ones(length, length).bool()
    assert torch.equal(weights[0, 0] > 0, allowed)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 1, length, dtype=torch.float64))


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("segment", [1, 9, 20])
def test_segments_of_one_token_or_of_all_are_softmax(segment, is_causal):
    query, key, value = draw((1, 2, 9, 4), (1, 2, 9, 4), (1, 2, 9, 5))
    wanted = F.scaled_dot_product_attention(query, key, value, is_causal=is_causal)
    torch.testing.assert_close(COMBINER(query, key, value, segment=segment, is_causal=is_causal), wanted)


@pytest.mark.parametrize("length", [1, 2])
def test_log_sparse_attention_over_two_tokens_is_softmax(length):
    query, key, value = draw((1, 2, length, 4), (1, 2, length, 4), (1, 2, length, 5))
    wanted = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    torch.testing.assert_close(COMBINER(query, key, value, variant="logsparse", is_causal=True), wanted)


@pytest.mark.parametrize("options", [{"segment": 4}, {"segment": 4, "variant": "axial"}])
def test_outputs_are_means_of_the_values(options):
    query, key, value = draw((1, 2, 14, 4), (1, 2, 14, 4), (1, 2, 14, 5))
    out = COMBINER(query, key, value, **options)
    assert (out <= value.amax(-2, keepdim=True)).all()
    assert (out >= value.amin(-2, keepdim=True)).all()
    constant = COMBINER(query, key, torch.full_like(value, 3.0), **options)
    torch.testing.assert_close(constant, torch.full_like(value, 3.0))


def test_a_region_counts_as_one_entry_whatever_its_size():
    zero = torch.zeros(1, 1, 16, 2, dtype=torch.float64)
    last = COMBINER.scores(zero, zero, segment=4, is_causal=True)[0, 0, -1]
    torch.testing.assert_close(last, torch.tensor([1 / 28] * 12 + [1 / 7] * 4, dtype=torch.float64))


def test_equal_tokens_within_segments_give_a_softmax_over_segments():
    q, k, v = draw((1, 1, 4, 3), (1, 1, 4, 3), (1, 1, 4, 2))
    query, key, value = (x.repeat_interleave(3, -2) for x in (q, k, v))
    out = COMBINER(query, key, value, segment=3)
    # The own segment is direct and counts three times, each other one once.
    counts = torch.ones(4, 4, dtype=torch.float64) + 2 * torch.eye(4, dtype=torch.float64)
    wanted = (q @ k.mT / math.sqrt(3) + counts.log()).softmax(-1) @ v
    torch.testing.assert_close(out, wanted.repeat_interleave(3, -2))


@pytest.mark.parametrize("pooling", ["max", "mean"])
def test_the_stream_is_the_causal_form_and_keeps_a_segment_and_the_summaries(pooling):
    query, key, value = draw((2, 4, 23, 3), (2, 2, 23, 3), (2, 2, 23, 5))
    options = {"segment": 5, "pooling": pooling}
    wanted = COMBINER(query, key, value, is_causal=True, enable_gqa=True, **options)
    stream = CombinerStream(**options)
    rows = [stream.step(*(x[..., t : t + 1, :] for x in (query, key, value))) for t in range(23)]
    torch.testing.assert_close(torch.cat(rows, -2), wanted)
    assert [x.shape[-2] for x in stream.state] == [3, 3, 3, 4, 4]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("variant", ["fixed", "logsparse", "axial"])
def test_half_precision_is_summed_in_float32(dtype, variant):
    inputs = draw((1, 2, 100, 16), (1, 2, 100, 16), (1, 2, 100, 8), dtype=dtype)
    exact = COMBINER(*(x.double() for x in inputs), variant=variant, is_causal=True)
    out = COMBINER(*inputs, variant=variant, is_causal=True)
    assert out.dtype == dtype
    assert (out.double() - exact).norm() <= torch.finfo(dtype).eps * exact.norm()


def test_segments_are_rows_of_the_grid_or_the_root_of_the_length():
    inputs = draw((1, 1, 13, 4), (1, 1, 13, 4), (1, 1, 13, 4))
    torch.testing.assert_close(COMBINER(*inputs), COMBINER(*inputs, segment=4))
    grid = {"grid": (2, 6), "prefix": 1}
    torch.testing.assert_close(COMBINER(*inputs, **grid), COMBINER(*inputs, prefix=1, segment=6))
    clip = {"grid": (2, 2, 3), "prefix": 1, "variant": "axial"}
    torch.testing.assert_close(COMBINER(*inputs, **clip), COMBINER(*inputs, prefix=1, segment=3, variant="axial"))


def projected_layer():
    layer = CombinerAttention(8, 2, grid_size=(4, 3), prefix=1, variant="axial", dtype=torch.float64)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(draw(p.shape, seed=p.numel())[0] * 0.5)
    return layer


@pytest.mark.parametrize("masked", [False, True])
def test_the_axial_layer_projects_its_summaries_to_keys(masked):
    layer = projected_layer()
    x, query, key, value = draw((2, 13, 8), (2, 2, 13, 4), (2, 2, 13, 4), (2, 2, 13, 4))
    mask = (MASK > 0) if masked else None
    shown = x if mask is None else x * mask[..., None]
    here = torch.ones(2, 13, dtype=torch.bool) if mask is None else mask
    # Each token's attention over its own row, then Dense, residual, LayerNorm, Dense.
    q = (query * here[:, None, :, None])[:, :, 1:].unflatten(2, (4, 3))
    k, v = (y[:, :, 1:].unflatten(2, (4, 3)) for y in (key, value))
    rows = here[:, 1:].unflatten(1, (4, 3))[:, None, :, None, :]
    P = torch.nan_to_num((q @ k.mT / 2).masked_fill(~rows, -math.inf).softmax(-1))
    V = (P @ v).flatten(2, 3).transpose(1, 2).flatten(-2)
    y = F.layer_norm(
        V @ layer.summary_value.weight.mT + layer.summary_value.bias + shown[:, 1:],
        (8,), layer.summary_norm.weight, layer.summary_norm.bias, 1e-6,
    )  # fmt: skip
    K = (y @ layer.summary_proj.weight.mT + layer.summary_proj.bias).unflatten(-1, (2, 4)).transpose(1, 2)
    K = F.pad(K, (0, 0, 1, 0))
    weights = looped(query, key, variant="axial", c=3, prefix=1, mask=mask, keys=K)
    out = layer(query, key, value, x=x, key_mask=mask)
    torch.testing.assert_close(out, weights @ value)
    torch.testing.assert_close(layer.scores(query, key, value=value, x=x, key_mask=mask), weights)
    with pytest.raises(ValueError, match="x=None, but summary_key='proj'"):
        layer(query, key, value)
    with pytest.raises(ValueError, match="value=None, but with summary_key='proj'"):
        layer.scores(query, key, x=x)


def test_the_causal_axial_layer_does_not_look_ahead():
    layer = projected_layer()
    x, query, key, value = draw((1, 13, 8), (1, 2, 13, 4), (1, 2, 13, 4), (1, 2, 13, 4))
    before = layer(query, key, value, x=x, is_causal=True)
    later = [torch.cat((y[..., :8, :], 5 - y[..., 8:, :]), -2) for y in (x, query, key, value)]
    after = layer(*later[1:], x=later[0], is_causal=True)
    torch.testing.assert_close(before[..., :8, :], after[..., :8, :])
    assert not torch.allclose(before[..., 8:, :], after[..., 8:, :])


@pytest.mark.parametrize("options", [{}, {"variant": "axial"}, {"variant": "axial", "summary_key": "wsum"}])
def test_a_layer_takes_it_by_name(options):
    layer = MultiheadAttention(8, 2, attention="combiner", attention_options=options, grid_size=(4, 3), prefix=1)
    (x,) = draw((2, 13, 8), dtype=torch.float32)
    layer(x).square().sum().backward()
    assert all(p.grad is not None for p in layer.parameters())
    assert len(list(layer.mix.parameters())) == (6 if options == {"variant": "axial"} else 0)
    mask = torch.arange(13).lt(9).expand(2, 13)
    loud = torch.where(mask[..., None], x, 1e3)
    torch.testing.assert_close(layer(loud, key_mask=mask)[:, :9], layer(x, key_mask=mask)[:, :9])


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", [{}, {"variant": "axial"}, {"variant": "axial", "summary_key": "wsum"}])
def test_scores_of_a_layer_mix_its_values(options, masked):
    layer = MultiheadAttention(
        8, 2, attention="combiner", attention_options=options, grid_size=(4, 3), prefix=1, dtype=torch.float64
    )
    (x,) = draw((2, 13, 8))
    mask = MASK > 0 if masked else None
    call = layer.call(x, key_mask=mask)
    out = layer.scores(x, key_mask=mask) @ call.value
    torch.testing.assert_close(out, layer.mix.run(call, x))


def test_no_summary_key_is_written_none_in_a_name_too():
    inputs = draw((1, 2, 13, 4), (1, 2, 13, 4), (1, 2, 13, 5))
    named = zoo.get("combiner+variant=axial+segment=4+summary_key=none")
    wanted = COMBINER(*inputs, variant="axial", segment=4, summary_key="none")
    torch.testing.assert_close(named(*inputs), wanted)
    assert not torch.allclose(wanted, COMBINER(*inputs, variant="axial", segment=4))
    layers = [CombinerAttention(8, 2, variant="axial", summary_key=key) for key in (None, "none")]
    assert not list(layers[0].parameters())
    torch.testing.assert_close(*(layer(*inputs, grid=(4, 3), prefix=1) for layer in layers))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"variant": "strided"}, "variant must be one of 'fixed', 'logsparse', 'axial', got 'strided'"),
        ({"variant": "logsparse"}, "variant='logsparse' is causal only"),
        ({"pooling": "median"}, "pooling must be one of 'max', 'mean', 'sum', got 'median'"),
        ({"segment": 0}, "segment must be at least 1 token, got 0"),
        ({"summary_key": "proj"}, "summary_key must be 'wsum', 'none' or a function, got 'proj'; 'proj' has param"),
        ({"grid": (2, 5)}, r"grid \(2, 5\) holds 10 patches, but there are 9 tokens"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        COMBINER(*draw((1, 1, 9, 4), (1, 1, 9, 4), (1, 1, 9, 4)), **options)


def test_what_it_cannot_do_is_refused():
    query, key, value = draw((1, 1, 9, 4), (1, 1, 5, 4), (1, 1, 5, 4))
    with pytest.raises(ValueError, match="'combiner' has no cross attention"):
        COMBINER(query, key, value)
    with pytest.raises(ValueError, match="segment=None is the root of a length that a stream does not know"):
        CombinerStream()
    with pytest.raises(ValueError, match="summary_key must be one of 'proj', 'wsum', 'none', None, got 'sum'"):
        CombinerAttention(8, 2, variant="axial", summary_key="sum")
    with pytest.raises(ValueError, match=r"unknown option 'segments'.*did you mean 'segment'"):
        COMBINER.build(8, 2, segments=3)
