"""Cumulant attention around the mean query: its formula, where it is exact, masks, groups, gradients and refusals."""

import pytest
import torch
import torch.nn.functional as F
from random_tokens import draw

from cumulant import SlidingWindow, Stream, attention, attention_varlen, call, scores, zoo
from cumulant.around import around_weights
from cumulant.call import Call
from cumulant.expansion import Form
from cumulant.kernels import launch
from cumulant.nn import MultiheadAttention

ORDERS = (1, 2, 3)


def of_order(order):
    return zoo.get(f"cumulant{order}")


def test_order_2_is_its_formula():
    q, k, v = draw((2, 3, 5, 4), (2, 3, 9, 4), (2, 3, 9, 6))
    out = of_order(2)(q, k, v, around="mean")
    mean = q.mean(-2, keepdim=True)
    w = (mean @ k.mT / 2).softmax(-1)
    v_mean, k_mean = w @ v, w @ k
    covariance = torch.einsum("bhos,bhsd,bhse->bhde", w, k - k_mean, v - v_mean)
    torch.testing.assert_close(out, v_mean + (q - mean) / 2 @ covariance)


@pytest.mark.parametrize("order", ORDERS)
def test_one_query_gets_softmax_itself(order):
    q, k, v = draw((2, 3, 1, 4), (2, 3, 9, 4), (2, 3, 9, 6))
    torch.testing.assert_close(of_order(order)(q, k, v, around="mean"), F.scaled_dot_product_attention(q, k, v))


@pytest.mark.parametrize("apart", [0, 1])
def test_keys_and_values_far_from_0_cost_gradients_no_digits(apart):
    """Softmax does not see where they lie. Of one query, and of many."""
    torch.manual_seed(0)
    for L in (1, 5):
        q, k, v, grad = (torch.randn(1, 2, n, 8) + m for n, m in ((L, 0), (9, 1e3), (9, 1e3), (L, 0)))
        found, exact = (
            torch.autograd.grad(attention(*x, around="mean", apart=apart), x, grad.to(dtype))
            for dtype in (torch.float32, torch.float64)
            for x in [[y.to(dtype).requires_grad_() for y in (q, k, v)]]
        )
        for x, y in zip(found, exact, strict=True):
            assert (x - y).norm() < 2e-5 * y.norm()


def test_queries_far_from_0_but_close_together_are_nearly_exact_and_not_so_around_0():
    q, k, v = draw((1, 2, 8, 4), (1, 2, 20, 4), (1, 2, 20, 4))
    q = 4 + 0.05 * q
    exact = F.scaled_dot_product_attention(q, k, v)
    errors = [(of_order(2)(q, k, v, around=a) - exact).norm() / exact.norm() for a in ("zero", "mean")]
    assert errors[1] < 1e-3 < 0.5 < errors[0]


@pytest.mark.parametrize("order", [2, 3])
def test_shifting_all_keys_changes_nothing(order):
    q, k, v, shift = draw((1, 2, 5, 4), (1, 2, 9, 4), (1, 2, 9, 3), (1, 2, 1, 4))
    call = of_order(order)
    torch.testing.assert_close(call(q, k + shift, v, around="mean"), call(q, k, v, around="mean"))


def test_class_tokens_apart_have_a_mean_of_their_own():
    q, k, v = draw((1, 2, 7, 4), (1, 2, 7, 4), (1, 2, 7, 4))
    out = of_order(2)(q, k, v, around="mean", apart=1)
    torch.testing.assert_close(out[..., :1, :], F.scaled_dot_product_attention(q[..., :1, :], k, v))
    torch.testing.assert_close(out[..., 1:, :], of_order(2)(q[..., 1:, :], k, v, around="mean"))


def test_masked_keys_are_as_if_taken_out_and_a_row_without_keys_is_0():
    q, k, v = draw((2, 4, 5, 4), (2, 2, 6, 4), (2, 2, 6, 3))
    mask = torch.tensor([[1, 0, 1, 1, 0, 1], [0] * 6]).bool()
    spoiled = k.masked_fill(~mask[:, None, :, None], torch.nan)
    out = of_order(3)(q, spoiled, v, around="mean", key_mask=mask, enable_gqa=True)
    kept = mask[0].nonzero().squeeze(-1)
    alone = of_order(3)(q[:1], k[:1, :, kept], v[:1, :, kept], around="mean", enable_gqa=True)
    torch.testing.assert_close(out[:1], alone)
    assert not out[1].any()


def test_padded_queries_are_in_no_mean_and_what_they_hold_goes_nowhere():
    q, k, v = draw((2, 2, 7, 4), (2, 2, 7, 4), (2, 2, 7, 3))
    mask = torch.arange(7).lt(5).expand(2, 7)
    q[..., 5:, :] = torch.nan
    shared = {"around": "mean", "apart": 1, "key_mask": mask, "query_mask": mask}
    expected = of_order(3)(*(x[..., :5, :] for x in (q, k, v)), around="mean", apart=1)
    torch.testing.assert_close(of_order(3)(q, k, v, **shared)[..., :5, :], expected)
    weights = of_order(3).scores(q, k, **shared)[..., :5, :]
    torch.testing.assert_close(weights @ v, expected)


def test_a_layer_leaves_masked_tokens_out_of_the_mean():
    layer = MultiheadAttention(16, 2, attention="cumulant3", attention_options={"around": "mean"}, dtype=torch.float64)
    (x,) = draw((2, 9, 16))
    mask = torch.arange(9).lt(6).expand(2, 9)
    torch.testing.assert_close(layer(3 * x, key_mask=mask)[:, :6], layer(3 * x[:, :6]))


@pytest.mark.parametrize("order", ORDERS)
def test_its_weights_times_the_values_are_its_output(order):
    q, k, v = draw((2, 2, 5, 4), (2, 2, 7, 4), (2, 2, 7, 3))
    weights = of_order(order).scores(q, k, around="mean", apart=1)
    torch.testing.assert_close(weights.sum(-1), torch.ones(2, 2, 5, dtype=torch.float64))
    torch.testing.assert_close(weights @ v, of_order(order)(q, k, v, around="mean", apart=1))


@pytest.mark.parametrize("order", ORDERS)
def test_gradients(order):
    q, k, v = (x.requires_grad_() for x in draw((1, 2, 4, 3), (1, 1, 5, 3), (1, 1, 5, 2)))
    weights = torch.rand(1, 5, dtype=torch.float64) + 0.1

    def call(q, k, v):
        return of_order(order)(q, k, v, around="mean", apart=1, key_mask=weights, enable_gqa=True)

    assert torch.autograd.gradcheck(call, (q, k, v))


@pytest.mark.parametrize("order", [2, 3])
def test_gradients_of_the_weights_follow_from_those_of_the_values(order):
    """As autograd finds them, by a call that takes the weights for constants."""
    d, k, v, logits, grad = draw((3, 1, 6, 4), (3, 1, 9, 4), (3, 1, 9, 5), (3, 9), (3, 1, 6, 5))
    inputs = [x.requires_grad_() for x in (d, k, v, logits)]
    shared = {"order": order, "scale": 0.7, "backend": "reference"}
    plain = attention(d, k, v, key_mask=logits.softmax(-1), **shared)
    form = Form(order, backend="reference")
    ours = around_weights(Call(d, k, v, scale=0.7), form, logits, logits.softmax(-1).detach())
    for found, wanted in zip(*(torch.autograd.grad(out, inputs, grad) for out in (ours, plain)), strict=True):
        torch.testing.assert_close(found, wanted)


def outputs_and_gradients(order, backend, dtype, device="cpu"):
    drawn = draw((2, 2, 20, 16), (2, 2, 20, 16), (2, 2, 20, 16), (2, 2, 20, 16), dtype=torch.float32)
    q, k, v, grad = (x.bfloat16().to(device, dtype) for x in (drawn[0] + 1, *drawn[1:]))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    mask = torch.arange(20).lt(torch.tensor([[20], [13]])).to(device)
    out = of_order(order)(*inputs, around="mean", apart=1, key_mask=mask, query_mask=mask, backend=backend)
    return [x.double() for x in (out, *torch.autograd.grad(out, inputs, grad))]


@pytest.mark.skipif(not launch.INTERPRET, reason="on the CPU kernels run in the interpreter only")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize("order", [2, 3])
def test_training_with_the_kernels_is_at_most_twice_as_far_off_as_plain_torch(order, dtype):
    exact = outputs_and_gradients(order, "reference", torch.float64)
    plain, ours = (outputs_and_gradients(order, backend, dtype) for backend in ("reference", "triton"))
    for x, p, o in zip(exact, plain, ours, strict=True):
        assert (o - x).norm() <= 2 * (p - x).norm()


@pytest.mark.gpu
@pytest.mark.parametrize("order", [2, 3])
def test_training_on_a_gpu_is_at_most_twice_as_far_off_as_plain_torch(order):
    exact = outputs_and_gradients(order, "reference", torch.float64, "cuda")
    plain, ours = (outputs_and_gradients(order, b, torch.bfloat16, "cuda") for b in ("reference", "auto"))
    for x, p, o in zip(exact, plain, ours, strict=True):
        assert (o - x).norm() <= 2 * (p - x).norm()


@pytest.mark.skipif(not launch.INTERPRET, reason="on the CPU kernels run in the interpreter only")
def test_second_derivatives_of_the_kernels_are_refused_and_those_of_plain_torch_are_right():
    q, k, v = (x.requires_grad_() for x in draw((1, 1, 4, 3), (1, 1, 5, 3), (1, 1, 5, 2)))
    assert torch.autograd.gradgradcheck(lambda *x: of_order(2)(*x, around="mean"), (q, k, v))
    q, k, v = (torch.randn(1, 1, 4, 16, requires_grad=True) for _ in range(3))
    out = of_order(2)(q, k, v, around="mean", backend="triton")
    with pytest.raises(RuntimeError, match='for second ones pass backend="reference"'):
        torch.autograd.grad(out.sum(), k, create_graph=True)


@pytest.mark.parametrize(("order", "backend"), [(2, "auto"), (3, "triton")])
def test_a_layer_compiles_without_a_break_with_the_same_gradients(order, backend):
    if backend == "triton" and not launch.INTERPRET:
        pytest.skip("on the CPU kernels run in the interpreter only")
    options = {"around": "mean", "apart": 1, "backend": backend}
    layer, x = MultiheadAttention(32, 2, attention=f"cumulant{order}", attention_options=options), torch.randn(2, 9, 32)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    found, wanted = (torch.autograd.grad(call(x).square().sum(), layer.qkv.weight)[0] for call in (compiled, layer))
    torch.testing.assert_close(found, wanted)


@pytest.mark.parametrize(("dtype", "seed"), [(torch.bfloat16, 6), (torch.float16, 0)])
def test_distances_from_the_mean_query_keep_their_digits_in_16_bits(dtype, seed):
    """Those of all queries sum to 0, and most of dk with them."""
    shapes = (1, 1, 40, 1), (1, 1, 5, 1), (1, 1, 5, 1), (1, 1, 40, 1)
    q, k, v, grad = (x.to(dtype) for x in draw(*shapes, seed=seed))
    k = 0.01 * k
    found, exact = (
        torch.autograd.grad(attention(*x, order=3, around="mean"), x, grad.to(of))
        for of in (dtype, torch.float64)
        for x in [[y.to(of).requires_grad_() for y in (q, k, v)]]
    )
    for x, y in zip(found, exact, strict=True):
        assert (x - y).norm() < 0.6 * torch.finfo(dtype).eps * y.norm()


def test_bfloat16_is_as_close_as_its_rounding():
    q, k, v = draw((1, 2, 64, 16), (1, 2, 64, 16), (1, 2, 64, 16), dtype=torch.float32)
    q, k, v = (x.bfloat16() for x in (q, k, v))
    out, exact = (of_order(2)(*x, around="mean") for x in ((q, k, v), (q.double(), k.double(), v.double())))
    assert (out.double() - exact).norm() < 0.02 * exact.norm()


def test_a_layer_takes_it_by_name_and_empty_sequences_are_fine():
    layer = MultiheadAttention(16, 2, attention="cumulant2", attention_options={"around": "mean", "apart": 1})
    assert layer(torch.randn(2, 5, 16)).shape == (2, 5, 16)
    q, k = torch.randn(1, 2, 3, 4), torch.randn(1, 2, 0, 4)
    assert not of_order(2)(q, k, k, around="mean").any()


def test_what_it_cannot_do_is_named():
    q, k, v = draw((1, 2, 4, 4), (1, 2, 4, 4), (1, 2, 4, 4))
    with pytest.raises(ValueError, match='around="mean" has no causal form'):
        of_order(2)(q, k, v, around="mean", is_causal=True)
    with pytest.raises(ValueError, match="around must be one of 'zero', 'mean', got 'median'"):
        of_order(2)(q, k, v, around="median")
    with pytest.raises(ValueError, match="apart must lie between 0 and the 4 queries, got 5"):
        of_order(2)(q, k, v, around="mean", apart=5)


@pytest.mark.parametrize("order", ORDERS)
def test_around_zero_queries_that_stand_apart_get_softmax(order):
    q, k, v = draw((1, 4, 7, 4), (1, 2, 9, 4), (1, 2, 9, 3))
    mask = torch.tensor([[True] * 6 + [False] * 3])
    k[..., 7, :] = torch.nan
    options = {"key_mask": mask, "enable_gqa": True}
    out = of_order(order)(q, k, v, apart=2, **options)
    exact = F.scaled_dot_product_attention(q[..., :2, :], k[..., :6, :], v[..., :6, :], enable_gqa=True)
    torch.testing.assert_close(out[..., :2, :], exact)
    torch.testing.assert_close(out[..., 2:, :], of_order(order)(q[..., 2:, :], k, v, **options))


def test_weights_and_closures_know_queries_that_stand_apart():
    q, k, v = draw((1, 2, 7, 4), (1, 2, 7, 4), (1, 2, 7, 3))
    closed = {"order": 2, "closure": "tanh", "apart": 1}
    torch.testing.assert_close(scores(q, k, **closed) @ v, attention(q, k, v, **closed))
    torch.testing.assert_close(scores(q, k, **closed)[..., 0, :], (q[..., :1, :] @ k.mT / 2).softmax(-1)[..., 0, :])
    with pytest.raises(ValueError, match="apart=1 has no causal form"):
        attention(q, k, v, apart=1, is_causal=True)


@pytest.mark.parametrize(
    "how", [{"around": "mean", "apart": 1}, {"apart": 1}, {"closure": "tanh"}], ids=["around", "apart", "closure"]
)
def test_packed_sequences_are_a_loop_over_them(how):
    q, k, v = draw((7, 2, 4), (9, 2, 4), (9, 2, 3))
    at_q, at_k = torch.tensor([0, 3, 7]), torch.tensor([0, 5, 9])
    loop = [
        attention(*(x[a:b].transpose(0, 1) for x, a, b in ((q, a, b), (k, c, d), (v, c, d))), order=2, **how)
        for (a, b), (c, d) in (((0, 3), (0, 5)), ((3, 7), (5, 9)))
    ]
    packed = attention_varlen(q, k, v, at_q, at_k, order=2, **how)
    torch.testing.assert_close(packed, torch.cat(loop, -2).transpose(0, 1))
    torch.testing.assert_close(of_order(2).varlen(q, k, v, at_q, at_k, **how), packed)


def test_a_stream_does_not_take_what_it_cannot_do():
    for make in (Stream, of_order(3).stream, lambda **how: SlidingWindow(4, **how)):
        with pytest.raises(TypeError, match="around"):
            make(around="mean")


def test_a_temperature_of_each_order_is_refused():
    options = {"around": "mean"}
    with pytest.raises(ValueError, match=r'temperature="order" mixes the mean .* got around="mean"'):
        MultiheadAttention(16, 2, attention="cumulant3", attention_options=options, temperature="order")
    MultiheadAttention(16, 2, attention="cumulant3", attention_options=options, temperature="head")


def test_the_numbers_of_a_query_mask_are_looked_at_once(monkeypatch):
    looked, check = [], call.check_mask

    def tell(mask, x, lead, name="key_mask"):
        looked.append(name)
        check(mask, x, lead, name)

    monkeypatch.setattr(call, "check_mask", tell)
    q, k, v = draw((2, 3, 5, 4), (2, 3, 9, 4), (2, 3, 9, 6))
    attention(q, k, v, around="mean", query_mask=torch.rand(2, 5))
    assert looked == ["query_mask"]
