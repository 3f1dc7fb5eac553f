"""RCMHA: plain attention in its limit, offsets by gather as by shift, segments like the whole."""

import pytest
import torch

from cumulant import create_model, nn


def layer(random=True, **options):
    torch.manual_seed(0)
    made = nn.create_layer("rcmha", 16, 2, dtype=torch.float64, **{"offsets": 40, **options}).eval()
    if random and made.far_key is not None:
        for table in (made.far_key, made.far_bias, made.query_bias):
            torch.nn.init.normal_(table, std=0.5)
    return made


def tokens(length=10, seed=0):
    return torch.randn(2, length, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def without_convolution(made):
    """Kernels that take the token itself."""
    with torch.no_grad():
        for conv in made.convs:
            conv.weight.zero_()[..., -1] = 1
            conv.bias.zero_()
    return made


@pytest.mark.parametrize("causal", [False, True])
def test_without_tables_and_convolutions_it_is_plain_attention(causal):
    made, x = without_convolution(layer(random=False)), tokens()
    plain = nn.create_layer("multihead", 16, 2, dtype=torch.float64).eval()
    plain.load_state_dict({k: v for k, v in made.state_dict().items() if k.startswith(("qkv", "proj"))})
    torch.testing.assert_close(made(x, is_causal=causal), plain(x, is_causal=causal))


def test_the_gather_of_offsets_is_the_shift_of_the_released_code():
    made, L, M = layer(), 5, 3
    q = torch.randn(2, 2, L, 8, dtype=torch.float64)
    S, P = M + L, 40
    E, c = made.far_key[P - S : P + L], made.far_bias[P - S : P + L]
    rows = torch.einsum("bhid,jhd->ijbh", q, E) + c[None, :, None, :]
    padded = torch.cat((rows, rows.new_zeros(L, 1, 2, 2)), 1).view(L + S + 1, L, 2, 2)  # pad, read on one row later
    expected = padded[:-1].view(L, L + S, 2, 2)[:, -S:]
    k = torch.zeros(2, 2, S, 8, dtype=torch.float64)
    call = (
        nn.create_layer("rcmha", 16, 2, offsets=40, dtype=torch.float64)
        .call(tokens(L))
        ._replace(query=q, key=k, value=k, offset=M, is_causal=True)
    )
    found = made.scores_of(call)
    seen = torch.ones(L, S, dtype=torch.bool).tril(M)
    logits = expected.permute(2, 3, 0, 1) * 8**-0.5
    torch.testing.assert_close(found, logits.masked_fill(~seen, -torch.inf).softmax(-1))


def test_an_infinite_bias_of_later_offsets_is_the_causal_mask():
    made, x = layer(), tokens()
    causal = made(x, is_causal=True)
    with torch.no_grad():
        made.far_bias[41:] = -torch.inf
    torch.testing.assert_close(made(x), causal)


def test_positions_are_offsets_whatever_the_memory():
    made = without_convolution(layer())
    with torch.no_grad():
        made.qkv.weight[16:].zero_()  # keys and values say nothing
        made.qkv.bias.zero_()
        made.query_bias.zero_()
    q = torch.randn(1, 2, 1, 8, dtype=torch.float64)
    rows = []
    for M in (2, 6):
        k = torch.zeros(1, 2, M + 1, 8, dtype=torch.float64)
        call = made.call(tokens(1)[:1])._replace(query=q, key=k, value=k, offset=M, is_causal=True)
        rows.append(made.scores_of(call)[..., -3:])
    ratios = [row / row[..., :1] for row in rows]
    torch.testing.assert_close(*ratios)


def test_segments_with_carried_queries_are_the_whole_sequence():
    x = tokens(12)
    made = layer(carry_query=True)
    whole, out, tail = made(x, is_causal=True), [], None
    for start, end in ((0, 5), (5, 9), (9, 12)):
        rows, tail = made.attend_after(x[:, start:end], x[:, :start], tail)
        out.append(rows)
    torch.testing.assert_close(torch.cat(out, 1), whole)
    as_released = layer().attend_after(x[:, 5:], x[:, :5])[0]
    assert not torch.allclose(as_released[:, :2], whole[:, 5:7])  # its first queries see zeros
    torch.testing.assert_close(as_released[:, 2:], whole[:, 7:])


def test_memory_gets_no_gradient_and_tables_only_at_offsets_that_occur():
    made, x, memory = layer(), tokens(4), tokens(3, seed=1).requires_grad_()
    made.attend_after(x, memory)[0].square().sum().backward()
    assert memory.grad is None
    touched = made.far_key.grad.abs().sum((1, 2)).nonzero().flatten() - 40
    assert touched.min() >= -6
    assert touched.max() <= 3


def test_one_kernel_serves_all_heads():
    for heads in (2, 4):
        made = nn.create_layer("rcmha", 16, heads)
        assert sum(p.numel() for p in made.convs.parameters()) == 3 * (3 + 1) * 16 // heads


def test_convolutions_alone_run_over_any_mechanism_and_stream():
    made, x = layer(relative=False, attention="cumulant3"), tokens()
    out, stream = made(x, is_causal=True), made.stream()
    torch.testing.assert_close(torch.cat([stream.step(x[:, t : t + 1]) for t in range(10)], 1), out)


def test_a_language_model_takes_it_with_positions_of_its_own_and_generates_as_without_a_cache():
    model = create_model("lm_nano", layer="rcmha", num_classes=7)
    assert model.positions == "none"
    prompt = torch.arange(5)[None]
    assert model.generate(prompt, 8).equal(model.generate(prompt, 8, cache=False))


def test_more_tokens_than_offsets_are_refused():
    with pytest.raises(ValueError, match=r"made for offsets below 40, got 41 queries.*offsets=41 or more"):
        layer()(tokens(41))
