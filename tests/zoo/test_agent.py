"""Agent attention against two plain softmax attentions, its biases and convolution by hand, and its properties."""

import itertools
import math

import pytest
import torch
import torch.nn.functional as F
from random_tokens import draw

from cumulant.nn import MultiheadAttention
from cumulant.zoo import agent
from cumulant.zoo.agent import AgentAttention, _pooled, _pooled_by_product, agent_grid, pool_agents

AGENT = agent.AGENT


def bins(size, count):
    """Token indices of each bin of adaptive pooling, by its definition: floor(i s / n) to ceil((i + 1) s / n)."""
    return [range(i * size // count, -(-(i + 1) * size // count)) for i in range(count)]


def two_softmaxes(query, key, value, *, grid, prefix, target, key_mask=None, query_mask=None, b1=0.0, b2=0.0):
    """Agents by loops over bins, then two softmaxes over explicit logits. Shares no code with the mechanism."""
    key, value = (x.repeat_interleave(query.shape[-3] // x.shape[-3], -3) for x in (key, value))
    query_mask = torch.ones(query.shape[0], query.shape[-2]) if query_mask is None else query_mask
    cells = list(itertools.product(*(bins(s, n) for s, n in zip(grid, target, strict=True))))
    A, present = query.new_zeros(*query.shape[:-2], len(cells), query.shape[-1]), []
    for a, cell in enumerate(cells):
        tokens = [
            prefix + sum(i * math.prod(grid[d + 1 :]) for d, i in enumerate(at)) for at in itertools.product(*cell)
        ]
        w = query_mask[:, tokens].double()
        present.append(w.sum(-1) > 0)
        mean = torch.einsum("bt,bhtd->bhd", w, query[..., tokens, :])
        A[..., a, :] = mean / w.sum(-1).clamp_min(1e-300)[:, None, None]
    scale = query.shape[-1] ** -0.5
    G = scale * A @ key.mT + b1
    if key_mask is not None:
        G = G + key_mask.double().log()[:, None, None, :]
    R = scale * query @ A.mT + b2
    R = R.masked_fill(~torch.stack(present, -1)[:, None, None, :], -math.inf)
    weights = R.softmax(-1) @ G.softmax(-1)
    return weights @ value, weights


LAYOUTS = {
    "sequence": ((1, 11), 0, 4, (1, 4)),
    "few tokens": ((1, 11), 0, 16, (1, 16)),
    "grid": ((3, 5), 1, 4, (2, 2)),
    "given shape": ((5, 4), 2, (2, 3), (2, 3)),
    "clip": ((2, 3, 5), 1, 4, (1, 2, 2)),
    "clip with agents in time": ((3, 3, 4), 0, (2, 2, 2), (2, 2, 2)),
}


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_it_is_two_softmax_attentions(layout, masked, key_heads):
    grid, prefix, agents, target = LAYOUTS[layout]
    length = prefix + math.prod(grid)
    query, key, value = draw((2, 4, length, 3), (2, key_heads, length, 3), (2, key_heads, length, 6))
    key_mask = torch.arange(length * 2).reshape(2, length).remainder(3).double() if masked else None
    query_mask = torch.arange(length).lt(torch.tensor([[length // 2], [length]])) if masked else None
    masks = {"key_mask": key_mask, "query_mask": query_mask}
    wanted, weights = two_softmaxes(query, key, value, grid=grid, prefix=prefix, target=target, **masks)
    given = {"grid": None if grid[0] == 1 else grid, "prefix": prefix, "agents": agents, "enable_gqa": key_heads != 4}
    out = AGENT(query, key, value, **given, **masks)
    here = torch.ones(2, length, dtype=torch.bool) if query_mask is None else query_mask  # absent queries have no row
    at = here[:, None, :, None].expand_as(out)
    torch.testing.assert_close(out[at], wanted[at], rtol=1e-11, atol=1e-12)
    got = AGENT.scores(query, key, **given, **masks)
    at = here[:, None, :, None].expand_as(got)
    torch.testing.assert_close(got[at], weights[at], rtol=1e-11, atol=1e-12)


def test_gradients_are_those_of_the_two_softmaxes():
    query, key, value = draw((1, 2, 16, 3), (1, 2, 16, 3), (1, 2, 16, 5))
    b1, b2 = draw((2, 4, 16), (2, 16, 4), seed=1)
    (cotangent,) = draw((1, 2, 16, 5), seed=2)
    inputs = [x.requires_grad_() for x in (query, key, value, b1, b2)]
    layout = {"grid": (3, 5), "prefix": 1}
    ours = AGENT(*inputs[:3], agents=4, key_bias=b1, query_bias=b2, **layout)
    naive, _ = two_softmaxes(*inputs[:3], target=(2, 2), b1=b1, b2=b2, **layout)
    pairs = zip(*(torch.autograd.grad(out, inputs, cotangent) for out in (ours, naive)), strict=True)
    for got, wanted in pairs:
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


def test_weights_are_positive_rows_of_sum_one_and_rank_at_most_the_number_of_agents():
    query, key, value = draw((1, 2, 20, 8), (1, 2, 20, 8), (1, 2, 20, 4))
    weights = AGENT.scores(query, key, grid=(4, 5), agents=4)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 20, dtype=torch.float64))
    assert (weights > 0).all()
    assert (torch.linalg.matrix_rank(weights, rtol=1e-10) <= 4).all()
    out = AGENT(query, key, value, grid=(4, 5), agents=4)
    assert (out <= value.amax(-2, keepdim=True)).all()
    assert (out >= value.amin(-2, keepdim=True)).all()
    constant = AGENT(query, key, torch.full_like(value, 3.0), grid=(4, 5), agents=4)
    torch.testing.assert_close(constant, torch.full_like(constant, 3.0))


def test_a_single_agent_gives_every_query_the_same_output():
    query, key, value = draw((1, 2, 9, 4), (1, 2, 9, 4), (1, 2, 9, 4))
    wanted = F.scaled_dot_product_attention(query.mean(-2, keepdim=True), key, value).expand(1, 2, 9, 4)
    torch.testing.assert_close(AGENT(query, key, value, agents=1), wanted)


def test_queries_may_change_places_within_a_bin_only():
    query, key, value = draw((1, 1, 196, 4), (1, 1, 196, 4), (1, 1, 196, 4))
    out = AGENT(query, key, value, grid=(14, 14), agents=49)
    for other, harmless in ((15, True), (2, False)):  # patch 0 with (1, 1), in its 2 x 2 bin, and with (0, 2), outside
        order = list(range(196))
        order[0], order[other] = other, 0
        moved = AGENT(query[..., order, :], key, value, grid=(14, 14), agents=49)
        assert torch.allclose(moved, out[..., order, :], atol=1e-12) is harmless


def test_zero_queries_give_the_mean_of_the_values():
    key, value = draw((1, 2, 9, 4), (1, 2, 9, 4))
    out = AGENT(torch.zeros_like(key), key, value, grid=(3, 3), agents=4)
    torch.testing.assert_close(out, value.mean(-2, keepdim=True).expand_as(out))


def test_uneven_bins_overlap_as_the_library_pools():
    (query,) = draw((1, 2, 14 * 14, 3))
    A, _ = pool_agents(query, 81, (14, 14), 0)
    wanted = F.adaptive_avg_pool2d(query.mT.reshape(2, 3, 14, 14), 9).reshape(1, 2, 3, 81).mT
    torch.testing.assert_close(A, wanted)


SOFT = {"read_exponent": 0.3, "residual": 0.075}


def test_a_softer_reading_and_a_residual_follow_the_formula_and_need_no_parameters():
    query, key, value = draw((1, 2, 9, 4), (1, 2, 9, 4), (1, 2, 9, 4))
    A = F.adaptive_avg_pool1d(query[0].mT, 4).mT[None]
    gathered = F.scaled_dot_product_attention(A, key, value)
    wanted = F.scaled_dot_product_attention(query, A, gathered, scale=0.5**0.3) + 0.075 * value
    torch.testing.assert_close(AGENT(query, key, value, agents=4, **SOFT), wanted)
    weights = AGENT.scores(query, key, agents=4, **SOFT)
    torch.testing.assert_close(weights @ value, wanted)
    layer = AgentAttention(8, 2, grid_size=(3, 3), agents=4, position_bias=False, conv=False, **SOFT)
    assert not list(layer.parameters())
    torch.testing.assert_close(layer(query, key, value), AGENT(query, key, value, grid=(3, 3), agents=4, **SOFT))


def test_the_old_name_of_both_works_and_says_that_it_is_not_agentsd():
    query, key, value = draw((1, 2, 9, 4), (1, 2, 9, 4), (1, 2, 9, 4))
    with pytest.warns(DeprecationWarning, match=r"read_exponent=0.3, residual=0.075.*not all of AgentSD"):
        old = AGENT(query, key, value, agents=4, training_free=True)
    torch.testing.assert_close(old, AGENT(query, key, value, agents=4, **SOFT))
    with pytest.warns(DeprecationWarning, match="training_free=True is written"):
        layer = AgentAttention(8, 2, grid_size=(3, 3), training_free=True, agents=4)
    assert not list(layer.parameters())


def test_masked_keys_have_no_weight_with_a_residual_either():
    query, key, value = draw((2, 2, 9, 4), (2, 2, 9, 4), (2, 2, 9, 4))
    options = {"agents": 4, **SOFT, "key_mask": torch.arange(9).lt(6).expand(2, 9)}
    weights = AGENT.scores(query, key, **options)
    assert not weights[..., 6:].any()
    torch.testing.assert_close(weights @ value, AGENT(query, key, value, **options))


def test_queries_and_keys_may_differ_in_number():
    query, key, value = draw((1, 2, 6, 4), (1, 2, 9, 4), (1, 2, 9, 4))
    wanted, _ = two_softmaxes(query, key, value, grid=(2, 3), prefix=0, target=(2, 2))
    torch.testing.assert_close(AGENT(query, key, value, grid=(2, 3), agents=4), wanted)


def test_masked_tokens_do_not_matter_whatever_they_hold():
    query, key, value = draw((2, 2, 9, 4), (2, 2, 9, 4), (2, 2, 9, 4))
    mask = torch.arange(9).lt(6).expand(2, 9)
    masks = {"key_mask": mask, "query_mask": mask, "agents": 3}
    clean = AGENT(query, key, value, **masks)
    for x in (query, key, value):
        x[..., 6:, :] = float("nan")
    inputs = [x.requires_grad_() for x in (query, key, value)]
    out = AGENT(*inputs, **masks)
    assert torch.equal(out[..., :6, :], clean[..., :6, :])
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)
    # 9 tokens in 3 bins of 3: without the last one, the two others are those of 6 tokens in 2 bins.
    removed = AGENT(*(x[..., :6, :] for x in (query, key, value)), agents=2)
    torch.testing.assert_close(out[..., :6, :], removed)


def test_without_any_key_or_query_there_is_zero_and_no_nan():
    query, key, value = (x.requires_grad_() for x in draw((2, 1, 4, 3), (2, 1, 4, 3), (2, 1, 4, 3)))
    some = torch.tensor([[False] * 4, [True] * 4])
    for masks in ({"key_mask": some}, {"key_mask": some, "query_mask": some}):
        out = AGENT(query, key, value, agents=2, **masks)
        assert torch.equal(out[0], torch.zeros_like(out[0]))
        assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), (query, key, value)))


def tables(layer, seed=3):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in layer.parameters():
            p.copy_(torch.randn(p.shape, generator=generator, dtype=p.dtype))
    return layer.double()


def test_the_extra_parameters_of_deit_tiny_are_24852_a_layer():
    layer = AgentAttention(192, 3, grid_size=(14, 14), prefix=1)
    assert sum(p.numel() for p in layer.parameters()) == 24_852
    assert abs(layer.an.std().item() - 0.02) < 1e-3


def test_biases_are_the_sum_of_their_tables_by_hand():
    layer = tables(AgentAttention(8, 2, grid_size=(7, 7), prefix=1, agents=4))
    biases = layer._biases(torch.zeros(1, 2, 50, 4, dtype=torch.float64), (7, 7), 1)
    b1, b2 = biases["key_bias"], biases["query_bias"]
    assert b1.shape == (2, 4, 50)
    assert b2.shape == (2, 50, 4)
    h, a, row, col = 1, 2, 3, 5
    token = 1 + row * 7 + col
    # On a grid of 7 x 7 the resized table is the table itself.
    assert b1[h, a, token] == layer.an[h, a, row, col] + layer.ah[0, h, a, row, 0] + layer.aw[0, h, a, 0, col]
    assert b2[h, token, a] == layer.na[h, a, row, col] + layer.ha[0, h, row, 0, a] + layer.wa[0, h, 0, col, a]
    assert torch.equal(b1[..., 0], layer.ac[0, ..., 0])
    assert torch.equal(b2[:, 0], layer.ca[0, :, 0])


def test_the_layer_adds_biases_and_a_convolution_of_the_patches():
    layer = tables(AgentAttention(8, 2, grid_size=(3, 4), prefix=1, agents=4))
    query, key, value = draw((2, 2, 13, 4), (2, 2, 13, 4), (2, 2, 13, 4))
    biases = layer._biases(query, (3, 4), 1)
    b1, b2 = biases["key_bias"], biases["query_bias"]
    mixed, weights = two_softmaxes(query, key, value, grid=(3, 4), prefix=1, target=(2, 2), b1=b1, b2=b2)
    channels = value.transpose(1, 2).flatten(-2)[:, 1:]  # (B, patches, C): heads one after the other
    image = F.conv2d(channels.mT.reshape(2, 8, 3, 4), layer.dwc.weight, layer.dwc.bias, padding=1, groups=8)
    local = image.flatten(2).mT.reshape(2, 12, 2, 4).transpose(1, 2)
    out = layer(query, key, value, grid=(3, 4), prefix=1)
    torch.testing.assert_close(out[..., 1:, :], mixed[..., 1:, :] + local)
    torch.testing.assert_close(out[..., :1, :], mixed[..., :1, :])
    torch.testing.assert_close(layer.scores(query, key), weights)


def test_the_layer_serves_other_grids_and_refuses_what_does_not_fit():
    layer = AgentAttention(8, 2, grid_size=(4, 4), prefix=1, agents=4)
    query, key, value = draw((1, 2, 31, 4), (1, 2, 31, 4), (1, 2, 31, 4), dtype=torch.float32)
    assert layer(query, key, value, grid=(5, 6), prefix=1).shape == (1, 2, 31, 4)
    with pytest.raises(ValueError, match=r"grid \(5, 5\) holds 25 patches, but there are 31 tokens"):
        layer(query, key, value, grid=(5, 5), prefix=1)
    with pytest.raises(ValueError, match="built for prefix=1 tokens, got prefix=0"):
        layer(query, key, value, grid=(1, 31), prefix=0)
    with pytest.raises(ValueError, match="position_bias=False and conv=False"):
        layer(query, key[..., :9, :], value[..., :9, :], grid=(5, 6), prefix=1)
    with pytest.raises(ValueError, match="position_bias=True needs to know the grid"):
        AgentAttention(8, 2, position_bias=True)
    written = pytest.warns(DeprecationWarning, match="training_free=True is written")
    with written, pytest.raises(ValueError, match="training_free=True has neither"):
        AgentAttention(8, 2, grid_size=(4, 4), training_free=True, conv=True)


def test_a_clip_shares_its_biases_between_frames_and_is_convolved_frame_by_frame():
    layer = tables(AgentAttention(8, 2, grid_size=(2, 3, 4), prefix=1, agents=4))
    query, key, value = draw((1, 2, 25, 4), (1, 2, 25, 4), (1, 2, 25, 4))
    biases = layer._biases(query, (2, 3, 4), 1)
    b1, b2 = biases["key_bias"], biases["query_bias"]
    assert torch.equal(b1[..., 1:13], b1[..., 13:])
    mixed, _ = two_softmaxes(query, key, value, grid=(2, 3, 4), prefix=1, target=(1, 2, 2), b1=b1, b2=b2)
    frames = value[..., 1:, :].transpose(1, 2).flatten(-2).reshape(2, 3, 4, 8).permute(0, 3, 1, 2)
    local = F.conv2d(frames, layer.dwc.weight, layer.dwc.bias, padding=1, groups=8)
    local = local.permute(0, 2, 3, 1).reshape(1, 24, 2, 4).transpose(1, 2)
    out = layer(query, key, value, grid=(2, 3, 4), prefix=1)
    torch.testing.assert_close(out, mixed + F.pad(local, (0, 0, 1, 0)))


def test_autocast_narrows_the_biases_with_the_tokens():
    layer = AgentAttention(8, 2, grid_size=(3, 3), agents=4)
    query, key, value = draw(*[(1, 2, 9, 4)] * 3, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = layer(query, key, value)
    torch.testing.assert_close(out.float(), layer(query, key, value), rtol=2e-2, atol=2e-2)


def test_a_layer_passes_the_grid_and_leaves_padding_out_of_the_agents():
    layer = MultiheadAttention(8, 2, attention="agent", attention_options={"agents": 4}, grid_size=(3, 3), prefix=1)
    (x,) = draw((2, 10, 8), dtype=torch.float32)
    mask = torch.arange(10).lt(7).expand(2, 10)
    out = layer(x, key_mask=mask)
    loud = torch.where(mask[..., None], x, 1e3)
    torch.testing.assert_close(layer(loud, key_mask=mask)[:, :7], out[:, :7])
    out.sum().backward()
    assert all(p.grad is not None for p in layer.parameters())


def test_with_nothing_to_mix_the_class_token_gets_the_bias_of_the_projection():
    layer = MultiheadAttention(8, 2, attention="agent", attention_options={"agents": 4}, grid_size=(3, 3), prefix=1)
    torch.nn.init.normal_(layer.proj.bias)
    torch.nn.init.zeros_(layer.qkv.weight)
    torch.nn.init.zeros_(layer.qkv.bias)
    (x,) = draw((1, 10, 8), dtype=torch.float32)
    out = layer(x)
    torch.testing.assert_close(out[0, 0], layer.proj.bias)
    assert not torch.allclose(out[0, 1], layer.proj.bias)  # patches get the bias of the convolution


def test_dropout_acts_while_training_only():
    layer = MultiheadAttention(8, 2, attention="agent", attention_options={"agents": 4}, attn_drop=0.5)
    (x,) = draw((1, 10, 8), dtype=torch.float32)
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))


@pytest.mark.parametrize(
    ("agents", "grid"), [(5, (4, 4)), (0, (1, 9)), ((2, 2, 2), (4, 4)), (True, (4, 4)), ((0, 2), (4, 4))]
)
def test_numbers_of_agents_that_do_not_fit_are_refused(agents, grid):
    with pytest.raises(ValueError, match="agents must be a square number"):
        agent_grid(agents, grid)


def test_what_it_cannot_do_is_refused():
    query, key, value = draw((1, 2, 9, 4), (1, 2, 9, 4), (1, 2, 9, 4))
    with pytest.raises(ValueError, match="'agent' has no causal form"):
        AGENT(query, key, value, is_causal=True)
    with pytest.raises(ValueError, match="all 9 tokens are prefix"):
        AGENT(query, key, value, prefix=9)
    with pytest.raises(ValueError, match="as many queries as keys, got 5"):
        AGENT(query[..., :5, :], key, value, residual=0.1)
    with pytest.raises(ValueError, match=r"read_exponent=0.3 is a power of the scale"):
        AGENT(query, key, value, read_exponent=0.3, scale=-1.0)
    with pytest.raises(ValueError, match="unknown option 'agent' of mechanism 'agent'; accepted: agents"):
        AGENT.build(8, 2, agent=3)


@pytest.mark.parametrize(
    ("grid", "agents"),
    [((8, 8), (7, 7)), ((6, 9), (3, 3)), ((1, 10), (1, 4)), ((3, 4, 5), (2, 3, 2)), ((2, 2), (3, 3))],
    ids=["overlapping", "dividing", "row", "clip", "more-agents-than-tokens"],
)
def test_pooling_by_a_product_is_adaptive_pooling(grid, agents):
    x = torch.randn(2, 3, math.prod(grid), 4, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(_pooled_by_product(x, grid, agents), _pooled(x, grid, agents))


@pytest.mark.parametrize("weight", [1e-9, 1e9])
def test_weights_beyond_the_range_of_float16_are_weights(weight):
    """They cancel: only their ratios count."""
    inputs = [x.half() for x in draw((1, 2, 9, 8), (1, 2, 9, 8), (1, 2, 9, 8))]
    mask = torch.tensor([[1.0, 2, 0, 1, 1, 3, 1, 1, 0]])
    scaled, plain = (AGENT(*inputs, key_mask=factor * mask) for factor in (weight, 1))
    torch.testing.assert_close(scaled, plain, rtol=0.02, atol=0.02)
