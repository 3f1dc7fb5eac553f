"""Weights of any size, tokens far from zero, 16 bits at the ends of their range: as exact as plain torch, or nearly."""

import pytest
import torch
from oracles import by_definition, relative

from cumulant import Moments, attention, cluster_attention, scores
from cumulant.closures import gain
from cumulant.cluster import Blocks
from cumulant.kernels import workers
from cumulant.kernels.dense import cpu
from cumulant.moments import in_units
from cumulant.streaming import SlidingWindow, Stream
from cumulant.tensors import threads

ROUNDING = {torch.float32: 6e-8, torch.bfloat16: 2.0**-9, torch.float16: 2.0**-12}


def tokens(*lengths, width=8, dtype=torch.float32, keys=0.0, values=0.0):
    q, k, v = (torch.randn(1, 2, L, width) for L in (*lengths, lengths[-1]))
    return [x.to(dtype) for x in (q, k + keys, v + values)]


def with_gradients(function, inputs, grad):
    leaves = [x.detach().requires_grad_() for x in inputs]
    out = function(*leaves)
    return out.detach(), *torch.autograd.grad(out, leaves, grad.to(out.dtype))


def errors(inputs, grad=None, **asked):
    """Of output, dq, dk and dv, against float64 reference code, itself held to the definition elsewhere."""
    grad = torch.randn(1, 2, inputs[0].shape[-2], inputs[2].shape[-1]) if grad is None else grad
    found = with_gradients(lambda *x: attention(*x, **asked), inputs, grad.to(inputs[0].dtype))
    mask = asked.pop("key_mask", None)
    asked |= {"backend": "reference", "key_mask": mask if mask is None else mask.double() / mask.double().max()}
    unit = 1.0 if mask is None or asked.get("normalization") != "sum" else mask.double().max()
    wide = [x.double() for x in inputs]
    exact = with_gradients(lambda *x: attention(*x, **asked) * unit, wide, grad.to(inputs[0].dtype))
    return [relative(a, b) for a, b in zip(found, exact, strict=True)]


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("unit", [1e-8, 1e5])
def test_float16_kernels_do_not_depend_on_the_unit_of_the_weights(unit, is_causal):
    weights = unit * (torch.rand(1, 20) + 0.1)
    found = errors(tokens(20, 20, dtype=torch.float16), key_mask=weights, is_causal=is_causal, backend="triton")
    assert max(found) < 4 * ROUNDING[torch.float16]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("unit", [1e-40, 3e38])
def test_weights_at_the_ends_of_float32_are_weights(unit, is_causal, backend):
    """Their sum, or one over it, has no number in float32."""
    weights = unit * (torch.rand(1, 9) * 0.8 + 0.2)
    assert max(errors(tokens(9, 9), key_mask=weights, is_causal=is_causal, backend=backend)) < 1e-6


def test_causal_kernels_in_float16_have_gradients_where_the_scale_is_large():
    q, k, v = tokens(66, 66, dtype=torch.float16)
    found = errors([3 * q, 0.003 * k, v], order=2, scale=1000.0, is_causal=True, backend="triton")
    assert max(found) < 4 * ROUNDING[torch.float16]


def test_causal_rows_of_weights_over_twelve_decades_are_exact():
    q, k, v = tokens(40, 40)
    weights = 10 ** (torch.rand(1, 40) * 12 - 6)
    out = attention(q, k, v, key_mask=weights, scale=30.0, is_causal=True).double()
    exact = by_definition(q, k, v, order=3, weights=weights, scale=30.0, is_causal=True)
    assert ((out - exact).norm(dim=-1) / exact.norm(dim=-1)).max() < 1e-6


@pytest.mark.parametrize("backend", ["reference", "triton"])
@pytest.mark.parametrize("asked", [{"order": 1}, {"order": 2}, {"order": 2, "closure": "tanh"}, {"order": 3}])
def test_causal_rows_do_not_know_how_heavy_later_tokens_are(asked, backend):
    """Fifty decades apart: weights of 1e-25 in the unit of one of 1e25 are no numbers of float32."""
    q, k, v = tokens(80, 80)
    weights = torch.rand(1, 80) * 1e-25 + 1e-26
    wanted = attention(*(x[:, :, :79] for x in (q, k, v)), key_mask=weights[:, :79], is_causal=True, **asked)
    weights[:, 79] = 1e25
    rows = attention(q, k, v, key_mask=weights, is_causal=True, backend=backend, **asked)[:, :, :79]
    assert relative(rows, wanted) < 2e-6
    if backend == "reference":
        maps = scores(q, k, key_mask=weights, is_causal=True, **asked)[:, :, :79]
        assert relative(maps @ v, wanted) < 2e-6


def test_causal_clusters_do_not_know_how_heavy_later_tokens_are():
    q, k, v = tokens(30, 30)
    weights = torch.rand(1, 30) * 1e-25 + 1e-26
    asked = {"clusters": Blocks(4, keep=1), "is_causal": True}
    wanted = cluster_attention(*(x[:, :, :29] for x in (q, k, v)), key_mask=weights[:, :29], **asked)
    weights[:, 29] = 1e25
    assert relative(cluster_attention(q, k, v, key_mask=weights, **asked)[:, :, :29], wanted) < 1e-6


@pytest.mark.parametrize("variance", ["diagonal", "full"])
@pytest.mark.parametrize("closure", ["gauss", "tanh"])
def test_a_cluster_that_weighs_next_to_nothing_is_next_to_nothing(closure, variance):
    """One over its weight has no number in float32."""
    inputs, weights = tokens(5, 32), torch.rand(1, 32) + 0.1
    weights[:, :8] *= 1e-40

    def asked(*x):
        return cluster_attention(*x, clusters=4, closure=closure, variance=variance, key_mask=weights, response=None)

    grad = torch.randn(1, 2, 5, 8)
    exact = with_gradients(asked, [x.double() for x in inputs], grad)
    for found, wanted in zip(with_gradients(asked, inputs, grad), exact, strict=True):
        assert relative(found, wanted) < 1e-6


def test_weights_keep_every_digit_in_their_unit():
    """A rounding of each would be what is left where large terms of a row cancel."""
    weights = 10 ** (torch.rand(5, 400) * 12 - 6) * torch.tensor([1e-38, 1e-20, 1.0, 1e20, 1e32])[:, None]
    narrow, unit = in_units(weights)
    assert torch.equal(narrow.double() * unit.double(), weights.double())
    assert bool(((narrow.amax(-1) >= 1) & (narrow.amax(-1) < 2)).all())
    zero, unit = in_units(torch.zeros(1, 4))
    assert torch.equal(zero, torch.zeros(1, 4))
    assert unit.item() == 1


def wandering(path, length):
    """Where keys are at each token, from 0 to about 1."""
    t = torch.linspace(0, 1, length)
    paths = {"line": t, "jump": (t > 0.6).float(), "rush": (8 * t - 8).exp(), "wave": (20 * t).sin()}
    return torch.randn(length).cumsum(0) / length**0.5 if path == "walk" else paths[path]


@pytest.mark.parametrize(("order", "full"), [(2, False), (3, False), (3, True)])
@pytest.mark.parametrize(
    ("length", "drift", "path"),
    [(64, 10.0, "line"), (64, 300.0, "line"), (150, 100.0, "line")]
    + [(150, far, path) for path in ("walk", "jump", "rush", "wave") for far in (30.0, 3000.0)],
)
def test_causal_rows_of_drifting_keys_are_at_most_twice_as_far_off_as_plain_torch(length, drift, path, order, full):
    """The first rows have no mean before them to be looked at from. Plain torch has deviations for each row."""
    q, k, v = tokens(length, length)
    k, grad = k + drift * wandering(path, length)[:, None], torch.randn(v.shape)

    def plain(q, k, v):
        q = q * q.shape[-1] ** -0.5
        share = torch.ones(length, length, dtype=q.dtype).tril()
        share = (share / share.sum(-1, keepdim=True)).unsqueeze(-1)
        dk, dv = (x.unsqueeze(-3) - (share * x.unsqueeze(-3)).sum(-2, keepdim=True) for x in (k, v))
        x = q.unsqueeze(-2)
        u = (x * dk).sum(-1, keepdim=True)
        square = u * u if full else (x * x * dk * dk).sum(-1, keepdim=True)
        response = u + 0.5 * square if order == 3 else u
        return (share * v.unsqueeze(-3)).sum(-2) + (share * response * dv).sum(-2)

    exact = with_gradients(plain, [x.double() for x in (q, k, v)], grad)
    ours = with_gradients(lambda *x: attention(*x, order=order, full=full, is_causal=True), (q, k, v), grad)
    its = with_gradients(plain, (q, k, v), grad)
    for found, simple, wanted in zip(ours, its, exact, strict=True):
        assert relative(found, wanted) <= 2 * relative(simple, wanted)


def test_a_token_that_outweighs_all_others_leaves_the_kernels_their_digits():
    """In bfloat16, values at 30: measured from anywhere but that token, its rounding is larger than what is left."""
    weights = torch.full((1, 40), 1e-4)
    weights[0, 25] = 1.0
    inputs = tokens(20, 40, dtype=torch.bfloat16, values=30.0)
    assert max(errors(inputs, key_mask=weights, order=3, backend="triton")) < 2.5 * ROUNDING[torch.bfloat16]


@pytest.mark.parametrize("asked", [{"order": 3}, {"order": 2, "closure": "tanh"}])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_causal_kernels_keep_their_digits_where_each_row_has_another_heaviest_token(dtype, asked):
    """Rows of a part are looked at from one point; of a token that is all of a row, 16 bits would keep the rounding."""
    weights = 10 ** (torch.rand(1, 80) * 12 - 6)
    q, k, v = tokens(80, 80, dtype=dtype)
    found = errors([q, 10 * k, v], key_mask=weights, is_causal=True, backend="triton", **asked)
    assert max(found) < 4 * ROUNDING[dtype]


@pytest.mark.parametrize("length", [2, 20])
def test_few_causal_keys_of_which_a_late_one_is_all_of_the_weight(length):
    """Rows lie where it does, far from the first key. Kernels of float32 would look at them from there."""
    q, k, v = tokens(20, length, values=30.0)
    weights = torch.full((1, length), 5e-6)
    weights[0, 1] = 1.9
    k = k + torch.linspace(0, 300, length)[:, None]
    found = errors([q, k, v], key_mask=weights, order=2, is_causal=True, scale=2.0, backend="triton")
    assert max(found) < 1e-6


@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize(("dtype", "full"), [(torch.bfloat16, False), (torch.float32, False), (torch.float32, True)])
def test_the_third_order_of_two_tokens_is_nothing(dtype, full, backend):
    """Large logits: whatever rounding leaves of it would be seen."""
    q, k, v = tokens(5, 2, width=16, dtype=dtype)
    asked = {"scale": 2.0, "backend": backend}
    second, third = (attention(q, 30 * k, v, order=order, full=full and order == 3, **asked) for order in (2, 3))
    assert torch.equal(second, third)


@pytest.mark.parametrize("backend", ["auto", "triton"])
def test_two_keys_of_nearly_equal_weights_have_nearly_no_third_order(backend):
    q, k, v = tokens(1, 2, width=5)
    k = k + torch.tensor([[0.0], [300.0]])
    found = errors([q, k, v], key_mask=torch.tensor([[9.4e4, 9.9e4]]), order=3, backend=backend)
    assert max(found) < 5e-7


def test_gradients_of_keys_sum_to_zero_where_one_is_all_of_the_weight():
    """Its value lies 1e-8 from their mean, at 1000: float64 holds five digits of that."""
    weights = torch.tensor([[5.0262, 2.656e-06, 1.4527e-05]])
    q, k, v = tokens(3, 3, width=1, keys=-30.0, values=1e3)
    assert max(errors([q, -30 + (k + 30) * 0.01, 1e3 + (v - 1e3) * 0.1], key_mask=weights, order=3)) < 1e-6


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("backend", ["auto", "triton"])
@pytest.mark.parametrize(("keys", "values"), [(1e3, 0.0), (0.0, 1e3)])
def test_gradients_of_tokens_far_from_zero_lose_no_digits(order, backend, keys, values):
    assert max(errors(tokens(30, 40, keys=keys, values=values), order=order, backend=backend)) < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("order", [2, 3])
def test_causal_kernels_give_equal_values_back_whatever_the_logits(order, dtype):
    q, k, v = tokens(40, 40, dtype=dtype)
    ones = torch.ones_like(v)
    assert torch.equal(attention(q, k, ones, order=order, is_causal=True, scale=17.0, backend="triton"), ones)


@pytest.mark.parametrize("order", [2, 3])
def test_causal_gradients_in_bfloat16_are_at_most_twice_as_far_off_as_plain_torch(order):
    """Those of queries and keys."""
    inputs, grad = tokens(256, 256, width=32, dtype=torch.bfloat16), torch.randn(1, 2, 256, 32)
    found, plain = (
        errors(inputs, grad, order=order, is_causal=True, backend=backend) for backend in ("triton", "reference")
    )
    assert all(ours <= 2 * its for ours, its in zip(found[1:3], plain[1:3], strict=True)), (found, plain)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("is_causal", [False, True])
def test_closed_responses_of_values_far_from_zero(dtype, is_causal):
    found = errors(tokens(30, 30, dtype=dtype, values=100.0), order=2, closure="tanh", is_causal=is_causal)
    assert max(found) < 12 * ROUNDING[dtype]


def test_closed_responses_do_not_overflow_where_the_answer_does_not():
    q, k, v = tokens(10, 30)
    inputs = [x.half() for x in (30 * q, 30 * k, 2000 * v + 3000 * k)]
    assert attention(*inputs, order=2).isinf().any()
    assert max(errors(inputs, 0.01 * torch.ones(1, 2, 10, 8), order=2, closure="tanh")) < 4 * ROUNDING[torch.float16]


@pytest.mark.parametrize("unit", [1e37, 1e-40])
def test_the_unit_of_weights_does_not_change_a_closed_response(unit):
    inputs, weights = tokens(5, 70), torch.rand(1, 70) * 0.9 + 0.1
    assert max(errors(inputs, order=2, closure="langevin", key_mask=weights * unit)) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_gradients_that_cancel_where_a_response_saturates_are_rounded_once(dtype):
    q, k, v = tokens(20, 7, width=1, dtype=dtype)
    assert errors([2 * q.sign(), 2 * k, v], order=2, closure="tanh", scale=1.0)[1] < 8 * ROUNDING[dtype]


def test_causal_gradients_of_queries_keep_their_digits_where_a_response_saturates():
    """They go through the gain and past it, and what is left of both is small: keys drift, so that rows saturate."""
    q, k, v = tokens(20, 20, width=1)
    inputs = [q, k + torch.linspace(0, 300, 20)[:, None], v]
    assert errors(inputs, order=2, closure="tanh", scale=2.0, is_causal=True)[1] < 1e-6


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_row_that_sees_one_key_adds_no_rounding_to_closed_causal_gradients(dtype):
    """Its gain is 1 beside those of rows that saturate, and the gradient of its query is 0."""
    q, k, v = tokens(20, 20)
    k = k + torch.linspace(0, 300, 20)[:, None]
    inputs = [x.to(dtype) for x in (q, k, 0.1 * v)]
    found = errors(inputs, order=2, closure="tanh", is_causal=True, backend="triton")
    assert found[1] < 8 * ROUNDING[dtype]


def test_equal_keys_of_a_closed_causal_row_have_gradients():
    """The row sees no spread, but a key that moved would give it one."""
    q, k, v = tokens(5, 5)
    inputs = [q, k[:, :, :1].expand_as(k), v]
    assert max(errors(inputs, order=2, closure="tanh", is_causal=True)) < 1e-6


def test_closed_responses_of_few_keys_in_float32_keep_their_digits():
    """Two keys far apart, values at 1000: what the response gives the keys and what its gain gives cancel."""
    q, k, v = tokens(20, 2, width=1, values=1e3)
    k = k + torch.tensor([0.0, 300.0])[:, None]
    assert errors([q, k, v], order=2, closure="tanh", scale=0.3)[2] < 1e-6


def test_the_third_order_of_two_tokens_is_nothing_in_causal_rows_too():
    """Both lie equally far from their mean; looked at from one of them, large terms cancel."""
    q, k, v = tokens(2, 2, width=5)
    inputs = [3 * q, 150 * k, v]
    assert max(errors(inputs, order=3, scale=2.0, is_causal=True)) < 1e-6


def test_closed_rows_are_as_defined():
    q, k, v = (x.double() for x in tokens(5, 12))
    x, dk = 0.7 * q, k - k.mean(-2, keepdim=True)
    f = gain((x * x * (dk * dk).mean(-2, keepdim=True)).sum(-1, keepdim=True), "langevin")
    expected = v.mean(-2, keepdim=True) + f * (x @ dk.mT) @ (v - v.mean(-2, keepdim=True)) / 12
    torch.testing.assert_close(attention(q, k, v, order=2, closure="langevin", scale=0.7), expected)


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("weighted", [False, True])
def test_sums_in_float16_have_gradients_where_exact_ones_are_small(backend, weighted):
    inputs = [x.half() for x in (0.3 * x for x in tokens(20, 400))]
    grad, mask = 200 * torch.ones(1, 2, 20, 8), torch.rand(1, 400) if weighted else None
    found = errors([*inputs[:2], inputs[2] * 0.01], grad, normalization="sum", key_mask=mask, backend=backend)
    assert max(found) < 4 * ROUNDING[torch.float16]


def test_scores_of_drifting_keys_give_what_attention_gives():
    q, k, v = tokens(60, 60)
    k = k + torch.linspace(0, 300, 60)[:, None]
    weights = scores(q, k, is_causal=True, scale=1.0)
    exact = attention(q.double(), k.double(), v.double(), is_causal=True, scale=1.0)
    assert relative(weights @ v, exact) < 2e-6


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("values", [0.0, 1e3])
def test_streams_windows_and_merges_of_keys_far_from_zero(order, values):
    q, k, v = tokens(1, 300, keys=1e3, values=values)
    exact = attention(q.double(), k.double(), v.double(), order=order)
    stream, window, own = Stream(order=order), SlidingWindow(100, order=order), {"order": order}
    for i in range(300):
        stream.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
        window.append(k[:, :, i : i + 1], v[:, :, i : i + 1])
    halves = (Moments.of(k[:, :, n], v[:, :, n], **own) for n in (slice(120), slice(120, None)))
    first, second = halves
    assert relative(stream.state.apply(q), exact) < 1e-6
    assert relative(first.merge(second).apply(q), exact) < 1e-6
    assert relative(first.merge(second).remove(first).apply(q), second.apply(q)) < 1e-6
    last = attention(q.double(), k[:, :, 200:].double(), v[:, :, 200:].double(), order=order)
    assert relative(window.apply(q), last) < 1e-6


@pytest.mark.parametrize(("heads", "length", "width"), [(2, 5000, 16), (12, 1000, 24)])
@pytest.mark.parametrize("joined", [False, True], ids=["heads apart", "heads of a projection"])
def test_threads_change_no_bit(monkeypatch, heads, length, width, joined):
    """What lies beside a head in its tile does not matter, nor does the order in which tiles are done."""
    inputs = [torch.randn(1, heads, length, n) + 0.5 for n in (64, 64, width)]
    grad = torch.randn(1, heads, length, width)
    if joined:
        *inputs, grad = (x.transpose(1, 2).contiguous().transpose(1, 2) for x in (*inputs, grad))
    alone = with_gradients(attention, inputs, grad)
    monkeypatch.setattr(workers, "_POOLS", {})
    with threads(3):
        for until in (0.0, float("inf")):  # all cores in every operation, tasks side by side
            monkeypatch.setattr(cpu.PACE, "until", until)
            for x, y in zip(with_gradients(attention, inputs, grad), alone, strict=True):
                assert torch.equal(x, y)
    assert list(workers._POOLS) == [3]
    with torch.inference_mode():
        assert torch.equal(attention(*inputs), alone[0])


def test_weights_of_first_order_are_rounded_once():
    weights = torch.rand(1, 1000, generator=torch.Generator().manual_seed(0))
    token = torch.zeros(1, 1, 1000, 4)
    found = scores(token[..., :1, :], token, order=1, key_mask=weights).flatten().double()
    exact = weights[0].double() / weights.double().sum()
    assert ((found - exact).abs() <= 2.0**-24 * exact).all()
