"""Extras of a layer: the patch grid, a convolution on the values, a gate, temperatures per head and per order."""

import copy

import pytest
import torch
import torch.nn.functional as F

from cumulant import Moments, zoo
from cumulant.nn import CumulantAttention, MultiheadAttention
from cumulant.nn.extras import ValueConv, conv_kernel

NAMES = [name for name in zoo.names() if zoo.get(name).noncausal]
GRID, PREFIX = (3, 4), 2
EVERYTHING = {"v_conv": 3, "gate": True, "temperature": "head"}


def layer(kind=MultiheadAttention, **kw):
    torch.manual_seed(0)
    place = {"grid_size": GRID, "prefix": PREFIX, "dtype": torch.float64}
    return kind(**({"dim": 16, "num_heads": 2} | place | kw))


def tokens(*shape, seed=1, dtype=torch.float64):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def count(module):
    return sum(p.numel() for p in module.parameters())


def with_weights_of(plain, **kw):
    """A layer with extras whose other weights are those of `plain`."""
    module = layer(attention=plain.mechanism.name, **kw)
    missing, unexpected = module.load_state_dict(plain.state_dict(), strict=False)
    assert not unexpected
    assert missing
    return module


@pytest.fixture
def watched(monkeypatch):
    """What a mechanism that wants the grid, the input and the query mask is called with."""
    calls = []
    plain = zoo.get("linear")

    def function(call):
        calls.append({"grid": call.grid, "prefix": call.prefix, "query_mask": call.query_mask})
        return plain.function(call)

    mechanism = zoo.Mechanism(
        name="watched", summary="", paper="", year=2026, cost="", function=function, causal=True, cross=True,
        key_mask=True, wants_grid=True, wants_query_mask=True,
    )  # fmt: skip
    monkeypatch.setattr(zoo.registry, "_MECHANISMS", {**zoo.registry._MECHANISMS, "watched": mechanism})
    return calls


def test_a_mechanism_that_wants_the_grid_gets_it(watched):
    module, x = layer(attention="watched"), tokens(1, 14, 16)
    module(x, grid=(2, 6), prefix=2)
    module(x)
    assert [(call["grid"], call["prefix"]) for call in watched] == [((2, 6), 2), (GRID, PREFIX)]


def test_the_query_mask_is_the_key_mask_where_tokens_attend_to_themselves(watched):
    module, x = layer(attention="watched"), tokens(1, 14, 16)
    mask = torch.arange(14)[None] < 9
    module(x, key_mask=mask)
    module(x, tokens(1, 14, 16, seed=2), key_mask=mask)
    assert watched[0]["query_mask"] is mask
    assert watched[1]["query_mask"] is None


@pytest.mark.parametrize("attention", NAMES)
def test_temperatures_of_one_are_the_plain_layer_to_the_last_bit(attention):
    plain, x = layer(attention=attention), tokens(2, 14, 16)
    assert torch.equal(with_weights_of(plain, temperature="head")(x), plain(x))


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("options", [{}, {"full": True}, {"normalization": "sum"}])
def test_order_factors_of_one_are_the_plain_layer_to_the_last_bit(options, dtype):
    for attention in ("cumulant2", "cumulant3"):
        given = {} if attention == "cumulant2" and "full" in options else options
        plain = layer(attention=attention, attention_options=given, dtype=dtype)
        x = tokens(2, 14, 16, dtype=dtype)
        weighted = with_weights_of(plain, temperature="order", attention_options=given, dtype=dtype)
        assert torch.equal(weighted(x), plain(x))


def set_factors(module, second, third=None):
    with torch.no_grad():
        module.temperature.second.copy_(torch.tensor(second).log())
        if third is not None:
            module.temperature.third.copy_(torch.tensor(third).log())


def test_a_temperature_multiplies_the_query_of_its_head():
    plain, x = layer(), tokens(2, 14, 16)
    module = with_weights_of(plain, temperature="head")
    set_factors(module, [0.5, 3.0])
    query, key, value = plain.project(x)
    factor = torch.tensor([0.5, 3.0], dtype=torch.float64)[:, None, None]
    out = F.scaled_dot_product_attention(query * factor, key, value).transpose(1, 2).flatten(2)
    torch.testing.assert_close(module(x), plain.proj(out))


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_order_factors_weight_the_second_and_the_third_term(full, masked):
    a, b = (torch.tensor(f, dtype=torch.float64)[:, None, None] for f in ([0.3, 2.0], [1.7, 0.4]))
    module, x = layer(attention="cumulant3", temperature="order", attention_options={"full": full}), tokens(2, 14, 16)
    set_factors(module, a.flatten().tolist(), b.flatten().tolist())
    mask = torch.arange(14) < torch.tensor([[9], [14]]) if masked else None
    plain = copy.deepcopy(module)
    plain.temperature = None
    query, key, value = plain.project(x)
    first, second, third = (
        Moments.of(key, value, order=order, full=full and order == 3, key_mask=None if mask is None else mask[:, None])
        .apply(query)
        for order in (1, 2, 3)
    )  # fmt: skip
    expected = first + a * (second - first) + b * (third - second)
    torch.testing.assert_close(module(x, key_mask=mask), plain.proj(expected.transpose(1, 2).flatten(2)))


def test_order_factors_of_a_context_without_tokens_give_the_bias():
    module, x = layer(attention="cumulant3", temperature="order"), tokens(2, 14, 16)
    set_factors(module, [0.3, 2.0], [1.7, 0.4])
    torch.testing.assert_close(module(x, context=x[:, :0]), module.proj.bias.expand(x.shape))


def test_order_factors_keep_causal_rows_causal():
    module, x = layer(attention="cumulant3", temperature="order"), tokens(1, 14, 16)
    set_factors(module, [0.3, 2.0], [1.7, 0.4])
    out = module(x, is_causal=True)
    torch.testing.assert_close(out[:, :6], module(x[:, :6], is_causal=True))


@pytest.mark.parametrize("temperature", ["head", "order"])
def test_scores_show_the_temperatures(temperature):
    module, x = layer(attention="cumulant3", temperature=temperature), tokens(2, 14, 16)
    set_factors(module, [0.3, 2.0], [1.7, 0.4] if temperature == "order" else None)
    mixed = (module.scores(x) @ module.project(x)[2]).transpose(1, 2).flatten(2)
    torch.testing.assert_close(module.proj(mixed), module(x))


@pytest.mark.parametrize("attention", NAMES)
def test_every_mechanism_takes_every_extra_and_all_of_them_learn(attention):
    module, x = layer(attention=attention, **EVERYTHING), tokens(2, 14, 16)
    out = module(x)
    assert out.shape == x.shape
    out.square().sum().backward()
    learned = {"v_conv.weight", "gate.weight", "gate.bias", "temperature.second"}
    grads = {name: p.grad for name, p in module.named_parameters() if name in learned}
    assert set(grads) == learned
    without = {name for name, grad in grads.items() if grad is None or not grad.any()}
    reads_no_query = attention in ("cumulant1", "aaren")
    assert without == ({"temperature.second"} if reads_no_query else set())


def test_both_order_factors_learn():
    module = layer(attention="cumulant3", temperature="order")
    module(tokens(2, 14, 16)).square().sum().backward()
    assert module.temperature.second.grad.all()
    assert module.temperature.third.grad.all()


@pytest.mark.parametrize(
    ("extras", "more"),
    [
        ({"v_conv": True}, 16 * 9),
        ({"v_conv": 5}, 16 * 25),
        ({"v_conv": (3, 3, 3), "grid_size": (1, 3, 4)}, 16 * 27),
        ({"gate": True}, 16 * 17),
        ({"temperature": "head"}, 2),
        ({"temperature": "order"}, 4),
        ({"temperature": "order", "attention": "cumulant2"}, 2),
    ],
)
def test_extras_cost_so_many_parameters(extras, more):
    given = {"attention": "cumulant3"} | extras
    assert count(layer(**given)) - count(layer(attention=given["attention"])) == more


def test_extras_that_are_off_leave_the_state_dict_alone():
    assert list(layer(v_conv=False, gate=False, temperature=None).state_dict()) == list(layer().state_dict())


def test_prefix_tokens_get_nothing_from_the_convolution_and_give_nothing_to_it():
    plain, x = layer(), tokens(2, 14, 16)
    module = with_weights_of(plain, v_conv=3)
    assert torch.equal(module(x)[:, :PREFIX], plain(x)[:, :PREFIX])
    assert not torch.allclose(module(x)[:, PREFIX:], plain(x)[:, PREFIX:])
    conv, other = module.v_conv, x.clone()
    other[:, :PREFIX] += 1
    assert torch.equal(conv(x, GRID, PREFIX), conv(other, GRID, PREFIX))


def test_the_convolution_starts_at_nothing_when_asked():
    plain, x = layer(), tokens(2, 14, 16)
    assert torch.equal(with_weights_of(plain, v_conv=3, v_conv_init="zero")(x), plain(x))


def test_the_convolution_is_one_filter_a_channel_on_the_grid():
    conv, x = ValueConv(16, (3, 3), dtype=torch.float64), tokens(2, 12, 16)
    image = x.mT.unflatten(-1, GRID)
    expected = torch.stack([F.conv2d(image[:, c : c + 1], conv.weight[c : c + 1], padding=1)[:, 0] for c in range(16)])
    torch.testing.assert_close(conv(x, GRID), expected.flatten(2).permute(1, 2, 0))


def test_a_square_kernel_stays_within_frames_and_a_cubic_one_does_not():
    x = tokens(1, 24, 16)
    other = x.clone()
    other[:, 12:] += 1  # the second frame
    flat, cubic = ValueConv(16, (3, 3), dtype=torch.float64), ValueConv(16, (3, 3, 3), dtype=torch.float64)
    assert torch.equal(flat(x, (2, 3, 4))[:, :12], flat(other, (2, 3, 4))[:, :12])
    torch.testing.assert_close(flat(x, (2, 3, 4))[:, :12], flat(x[:, :12], GRID))
    assert not torch.allclose(cubic(x, (2, 3, 4))[:, :12], cubic(other, (2, 3, 4))[:, :12])


def test_masked_tokens_do_not_reach_their_neighbours():
    module, x = layer(v_conv=3), tokens(2, 14, 16)
    mask = torch.arange(14) < torch.tensor([[9], [14]])
    poisoned = x.clone()
    poisoned[0, 9:] = float("nan")
    torch.testing.assert_close(module(poisoned, key_mask=mask)[0, :9], module(x, key_mask=mask)[0, :9])


def test_the_gate_multiplies_what_enters_the_last_projection():
    for name, activation in (("sigmoid", torch.sigmoid), ("silu", F.silu)):
        plain, x = layer(), tokens(2, 14, 16)
        module = with_weights_of(plain, gate=name)
        query, key, value = plain.project(x)
        out = F.scaled_dot_product_attention(query, key, value).transpose(1, 2).flatten(2)
        torch.testing.assert_close(module(x), plain.proj(out * activation(module.gate(x))))


def test_a_layer_with_extras_does_not_fold():
    for extra in ({"v_conv": 3}, {"gate": True}, {"temperature": "head"}):
        auto, never = (layer(CumulantAttention, order=2, fold=fold, **extra) for fold in ("auto", False))
        assert auto.fold is False
        assert torch.equal(auto(tokens(2, 14, 16)), never(tokens(2, 14, 16)))
        with pytest.raises(ValueError, match=r"fold=True needs .* none of v_conv, gate, temperature"):
            layer(CumulantAttention, order=2, fold=True, **extra)
    assert layer(CumulantAttention, order=2, gate=False, v_conv=0, temperature=None).fold == "auto"


@pytest.mark.parametrize("temperature", ["head", "order"])
def test_autocast_to_bfloat16_stays_close_and_keeps_factors_in_float32(temperature):
    module = layer(attention="cumulant3", v_conv=3, gate=True, temperature=temperature, dtype=torch.float32)
    set_factors(module, [0.7, 1.4], [1.3, 0.8] if temperature == "order" else None)
    x = tokens(2, 14, 16, dtype=torch.float32)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = module(x)
    assert out.dtype == torch.bfloat16
    torch.testing.assert_close(out.float(), module(x), rtol=0.05, atol=0.02)
    out.float().square().sum().backward()
    assert all(p.grad.isfinite().all() and p.grad.dtype == torch.float32 for p in module.parameters())


@pytest.mark.parametrize("attention", ["softmax", "cumulant3"])
def test_compiled_as_one_graph_it_computes_the_same(attention):
    torch.compiler.reset()
    temperature = "order" if attention == "cumulant3" else "head"
    module = layer(attention=attention, v_conv=3, gate=True, temperature=temperature)
    x = tokens(2, 14, 16).requires_grad_()
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    out, again = module(x), compiled(x)
    torch.testing.assert_close(again, out)
    parameters = [x, *module.parameters()]
    torch.testing.assert_close(
        torch.autograd.grad(again.square().sum(), parameters), torch.autograd.grad(out.square().sum(), parameters)
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"v_conv": 4}, "v_conv must be a bool, an odd number, .* got 4"),
        ({"v_conv": (3, 3, 3, 3)}, r"got \(3, 3, 3, 3\)"),
        ({"v_conv": 3, "v_conv_init": "ones"}, "v_conv_init must be one of .* got 'ones'"),
        ({"gate": "relu"}, "gate must be a bool or one of 'sigmoid', 'silu', got 'relu'"),
        ({"temperature": "layer"}, 'temperature must be None, "head" or "order", got \'layer\''),
        ({"temperature": "order"}, "weights the terms of 'cumulant2', 'cumulant3', got attention='softmax'"),
    ],
)
def test_bad_extras_name_the_value(arguments, message):
    with pytest.raises(ValueError, match=message):
        layer(**arguments)


@pytest.mark.parametrize(
    ("kw", "call", "message"),
    [
        ({"grid_size": None, "prefix": 0}, {}, "v_conv needs to know the grid"),
        ({}, {"grid": (3, 5), "prefix": 2}, r"grid=\(3, 5\) with prefix=2 does not make 14 tokens"),
        ({}, {"is_causal": True}, "needs context=None and is_causal=False"),
        ({}, {"context": tokens(2, 14, 16)}, "needs context=None and is_causal=False"),
        ({"v_conv": (3, 3, 3)}, {}, r"v_conv=\(3, 3, 3\) moves over frames, rows and columns, got grid=\(3, 4\)"),
    ],
)
def test_a_convolution_without_its_grid_is_refused(kw, call, message):
    module = layer(**({"v_conv": 3} | kw))
    with pytest.raises(ValueError, match=message):
        module(tokens(2, 14, 16), **call)


def test_ways_to_ask_for_a_kernel():
    assert [conv_kernel(v) for v in (False, 0, True, 1, 5, [3, 1], (3, 5, 7))] == [
        None, None, (3, 3), (1, 1), (5, 5), (3, 1), (3, 5, 7),
    ]  # fmt: skip
