"""Local linear attention against least squares and the published formula; its solvers, gradient and invariances."""

import math

import pytest
import torch
import torch.nn.functional as F
from random_tokens import draw

from cumulant.nn import MultiheadAttention
from cumulant.zoo import lla
from cumulant.zoo.lla import LocalLinearAttention
from cumulant.zoo.lla_solver import conjugate_gradients
from cumulant.zoo.probes import LargestTensor

LLA = lla.LLA
SOLVERS = {"direct": {"solver": "direct"}, "cg": {"solver": "cg"}, "pcg": {"solver": "cg", "precondition": True}}


def published(query, key, value, *, ridge, is_causal=False, mask=None, delta=1e-12, shift=0.0):
    """Steps 1 to 5 of the released code, with explicit z and a direct solve, in plain differentiable operations."""
    heads, D = query.shape[-3], query.shape[-1]
    key, value = (x.repeat_interleave(heads // x.shape[-3], -3) for x in (key, value))
    logits = query @ key.mT / math.sqrt(D)
    if mask is not None:
        logits = logits + mask.double().log()[:, None, None, :]
    if is_causal:
        logits = logits.masked_fill(torch.ones(logits.shape[-2:], dtype=torch.bool).triu(1), -math.inf)
    top = logits.amax(-1, keepdim=True)
    w = (logits - torch.where(top == -math.inf, 0, top) - shift).exp()
    omega = w.sum(-1)
    z = key.unsqueeze(-3) - query.unsqueeze(-2)  # (..., L, S, D)
    mu = torch.einsum("...ls,...lsd->...ld", w, z)
    lam = torch.as_tensor(ridge, dtype=w.dtype).expand(omega.shape) * omega
    Sigma = torch.einsum("...ls,...lsd,...lse->...lde", w, z, z) + lam[..., None, None] * torch.eye(D, dtype=w.dtype)
    Sigma = torch.where((omega == 0)[..., None, None], torch.eye(D, dtype=w.dtype), Sigma)
    rho = torch.linalg.solve(Sigma, mu.unsqueeze(-1)).squeeze(-1)
    d = omega - (mu * rho).sum(-1)
    d = d + delta * d.sign()
    d = torch.where(omega == 0, 1, d)
    s = w * (1 - (z * rho.unsqueeze(-2)).sum(-1)) / d.unsqueeze(-1)
    return s @ value, s


MASKS = {
    "none": None,
    "bool": torch.tensor([[0, 0, 1, 1, 0, 1, 1, 1, 1, 0, 1], [1] * 11]).bool(),
    "weights": torch.arange(22.0, dtype=torch.float64).reshape(2, 11).remainder(4),
}


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("queries", "key_heads"), [(5, 4), (11, 2), (17, 4)])
def test_it_is_the_published_formula(solver, mask, is_causal, queries, key_heads):
    query, key, value = draw((2, 4, queries, 3), (2, key_heads, 11, 3), (2, key_heads, 11, 6))
    shared = {"is_causal": is_causal, "ridge": 0.1}
    output, weights = published(query, key, value, mask=MASKS[mask], **shared)
    shared |= {"key_mask": MASKS[mask], "enable_gqa": key_heads != 4, "tolerance": 1e-20, **SOLVERS[solver]}
    torch.testing.assert_close(LLA(query, key, value, block=4, **shared), output, rtol=1e-8, atol=1e-9)
    torch.testing.assert_close(LLA.scores(query, key, **shared), weights, rtol=1e-8, atol=1e-9)


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("is_causal", [False, True])
def test_the_implicit_gradient_is_that_of_autograd_through_a_direct_solve(solver, is_causal):
    query, key, value = draw((2, 4, 11, 3), (2, 2, 11, 3), (2, 2, 11, 5))
    ridge = torch.rand(4, 1, dtype=torch.float64) + 0.1
    mask = MASKS["weights"]
    (cotangent,) = draw((2, 4, 11, 5), seed=1)
    inputs = [x.requires_grad_() for x in (query, key, value, ridge)]
    exact, _ = published(*inputs[:3], ridge=ridge, is_causal=is_causal, mask=mask, delta=0.0)
    ours = LLA(
        *inputs[:3], ridge=ridge, is_causal=is_causal, key_mask=mask, enable_gqa=True, block=4, tolerance=1e-24,
        **SOLVERS[solver],
    )  # fmt: skip
    for got, wanted in zip(*(torch.autograd.grad(o, inputs, cotangent) for o in (ours, exact)), strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-7, atol=1e-9)


def test_it_is_the_intercept_of_a_ridge_regression_with_a_free_intercept():
    query, key, value = draw((1, 1, 4, 3), (1, 1, 9, 3), (1, 1, 9, 2))
    out = LLA(query, key, value, ridge=0.3)
    for i in range(4):
        w = (key[0, 0] @ query[0, 0, i] / math.sqrt(3)).softmax(0).sqrt()[:, None]
        design = torch.cat((torch.ones(9, 1, dtype=w.dtype), key[0, 0] - query[0, 0, i]), 1)
        penalty = math.sqrt(0.3) * torch.eye(4, dtype=w.dtype)[1:]  # on the slopes only
        A, b = torch.cat((w * design, penalty)), torch.cat((w * value[0, 0], torch.zeros(3, 2, dtype=w.dtype)))
        torch.testing.assert_close(out[0, 0, i], torch.linalg.lstsq(A, b).solution[0], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("solver", SOLVERS)
def test_gradcheck(solver):
    inputs = tuple(x.requires_grad_() for x in draw((1, 2, 5, 3), (1, 2, 5, 3), (1, 2, 5, 2)))
    ridge = torch.tensor([[0.5], [2.0]], dtype=torch.float64, requires_grad=True)
    options = SOLVERS[solver] | {"block": 2, "tolerance": 1e-28, "is_causal": True}
    assert torch.autograd.gradcheck(lambda *x: LLA(*x[:3], ridge=x[3], **options), (*inputs, ridge))


def test_weights_sum_to_one_and_some_are_negative():
    query, key = draw((1, 2, 40, 4), (1, 2, 40, 4))
    weights = LLA.scores(query, key, ridge=0.1)
    torch.testing.assert_close(weights.sum(-1), torch.ones(1, 2, 40, dtype=torch.float64))
    assert (weights < 0).any()


def test_a_very_large_ridge_gives_softmax():
    query, key, value = draw((1, 2, 9, 4), (1, 2, 9, 4), (1, 2, 9, 5))
    wanted = F.scaled_dot_product_attention(query, key, value)
    torch.testing.assert_close(LLA(query, key, value, ridge=1e9), wanted, rtol=1e-7, atol=1e-8)


def test_an_affine_map_of_the_keys_is_learned_exactly_where_softmax_fails():
    query, key, A, b = draw((1, 1, 20, 4), (1, 1, 20, 4), (4, 3), (3,))
    value = key @ A + b
    wanted = query @ A + b
    out = LLA(query, key, value, ridge=1e-9, is_causal=True)
    torch.testing.assert_close(out[..., 6:, :], wanted[..., 6:, :], rtol=1e-5, atol=1e-5)
    softmax = F.scaled_dot_product_attention(query, key, value, is_causal=True)
    assert (softmax - wanted)[..., 6:, :].abs().mean() > 0.1


def test_the_first_causal_row_is_the_first_value():
    query, key, value = draw((1, 2, 9, 4), (1, 2, 9, 4), (1, 2, 9, 5))
    for options in SOLVERS.values():
        assert torch.equal(LLA(query, key, value, is_causal=True, **options)[..., 0, :], value[..., 0, :])


def test_it_is_linear_in_the_values_and_moves_with_them():
    query, key, a, b = draw((1, 2, 9, 4), (1, 2, 9, 4), (1, 2, 9, 5), (1, 2, 9, 5))
    out = LLA(query, key, 2 * a + b + 7)
    torch.testing.assert_close(out, 2 * LLA(query, key, a) + LLA(query, key, b) + 7)


def test_the_published_form_does_not_depend_on_the_shift_of_the_softmax():
    """The reason for the ridge times omega: with the paper's plain lambda I this fails."""
    query, key, value = draw((1, 1, 5, 3), (1, 1, 8, 3), (1, 1, 8, 2))
    a, _ = published(query, key, value, ridge=0.5, delta=0.0)
    b, _ = published(query, key, value, ridge=0.5, delta=0.0, shift=2.0)
    torch.testing.assert_close(a, b)
    torch.testing.assert_close(LLA(query, key, value, ridge=0.5), b)


def test_keys_may_be_permuted_doubled_and_turned_together_with_the_queries():
    query, key, value, mixed = draw((1, 1, 7, 4), (1, 1, 9, 4), (1, 1, 9, 3), (4, 4))
    turn, order = torch.linalg.qr(mixed).Q, torch.randperm(9)
    out = LLA(query, key, value, ridge=0.2)
    torch.testing.assert_close(LLA(query, key[..., order, :], value[..., order, :], ridge=0.2), out)
    torch.testing.assert_close(LLA(query @ turn, key @ turn, value, ridge=0.2), out)
    doubled = LLA(query, key.repeat(1, 1, 2, 1), value.repeat(1, 1, 2, 1), ridge=0.2)
    torch.testing.assert_close(doubled, out)


@pytest.mark.parametrize("block", [1, 3, 7, 100])
def test_the_block_size_does_not_matter(block):
    query, key, value = draw((1, 1, 14, 3), (1, 1, 14, 3), (1, 1, 14, 2))
    for options in SOLVERS.values():
        whole = LLA(query, key, value, is_causal=True, **options)
        torch.testing.assert_close(LLA(query, key, value, is_causal=True, block=block, **options), whole)


def test_conjugate_gradients_end_after_as_many_steps_as_there_are_dimensions():
    query, key, value = draw((1, 1, 30, 8), (1, 1, 60, 8), (1, 1, 60, 4))
    exact = LLA(query, key, value, ridge=0.1, solver="direct")
    errors = {
        n: (LLA(query, key, value, ridge=0.1, solver="cg", iterations=n, tolerance=0.0) - exact).abs().max().item()
        for n in (4, 7, 8)
    }
    assert 1e-2 < errors[4] < 1e-1
    assert errors[8] < 1e-8 < errors[7]


def test_rows_stop_where_the_squared_residual_has_fallen_by_the_tolerance():
    query, key, value = draw((1, 1, 30, 24), (1, 1, 60, 24), (1, 1, 60, 4))
    exact = LLA(query, key, value, ridge=0.1, solver="direct")
    loose, tight = (
        (LLA(query, key, value, ridge=0.1, solver="cg", tolerance=t, iterations=60) - exact).abs().max()
        for t in (1e-6, 1e-12)
    )
    assert 1e-6 < loose < 1e-2
    assert 1e-12 < tight < 1e-5


def test_conjugate_gradients_leave_zero_targets_at_zero():
    matrix = torch.diag(torch.tensor([1.0, 2.0, 3.0], dtype=torch.float64))
    target = torch.tensor([[0.0, 0.0, 0.0], [1.0, 1.0, 1.0]], dtype=torch.float64)
    for diagonal in (None, matrix.diagonal()):
        x, short = conjugate_gradients(lambda p: p @ matrix, target, iterations=5, diagonal=diagonal)
        torch.testing.assert_close(x, target / matrix.diagonal())
        assert short is not None
        assert not short.any()


def wide(dtype=torch.float32):
    """Heads so wide and a ridge so small that 32 steps are far from enough."""
    return draw((1, 2, 20, 64), (1, 2, 96, 64), (1, 2, 96, 8), dtype=dtype)


def test_what_conjugate_gradients_leave_short_is_solved_directly():
    query, key, value = (x.requires_grad_() for x in wide(torch.float64))
    up = torch.randn(1, 2, 20, 8, dtype=torch.float64)
    direct, auto, cg = (
        torch.autograd.grad((LLA(query, key, value, solver=solver, ridge=1e-3, **more) * up).sum(), (query, key, value))
        for solver, more in (("direct", {}), ("auto", {}), ("cg", {"iterations": 32}))
    )
    off = [max((a - b).norm() / b.norm() for a, b in zip(found, direct, strict=True)) for found in (auto, cg)]
    assert off[0] < 1e-5 < 1e-3 < off[1]


def test_conjugate_gradients_that_were_asked_for_say_when_they_ran_out_of_steps(recwarn):
    query, key, value = wide()
    with pytest.warns(RuntimeWarning, match=r"40 of 40 rows ran out of iterations=3 .* solver=\"direct\""):
        LLA(query, key, value, ridge=1e-3, solver="cg", iterations=3)
    LLA(query, key, value, ridge=10.0, solver="cg")
    LLA(query, key, value, ridge=0.1, solver="cg")
    assert not [warning for warning in recwarn if warning.category is RuntimeWarning]


@pytest.mark.parametrize("solver", ["direct", "cg"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_key_weights_have_the_gradient_of_the_published_formula(solver, is_causal):
    query, key, value = draw((2, 2, 7, 4), (2, 2, 7, 4), (2, 2, 7, 3))
    weights = torch.rand(2, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) + 0.1
    ours, theirs = weights.clone().requires_grad_(), weights.clone().requires_grad_()
    up = torch.randn(2, 2, 7, 3, dtype=torch.float64)
    out = LLA(query, key, value, key_mask=ours, ridge=0.5, is_causal=is_causal, solver=solver, tolerance=1e-24, block=3)
    (out * up).sum().backward()
    (published(query, key, value, mask=theirs, ridge=0.5, is_causal=is_causal)[0] * up).sum().backward()
    torch.testing.assert_close(ours.grad, theirs.grad)


def test_it_predicts_a_piecewise_linear_stream_better_than_softmax_and_a_global_ridge():
    generator = torch.Generator().manual_seed(0)
    L, D = 192, 4
    key = F.normalize(torch.randn(8, 1, L + 1, D, generator=generator, dtype=torch.float64), dim=-1)
    maps = torch.randn(8, 1, 4, D, D, generator=generator, dtype=torch.float64)
    piece = (key[..., 0] > 0).long() * 2 + (key[..., 1] > 0).long()  # the map depends on where the key is
    chosen = maps.gather(2, piece[..., None, None].expand(*piece.shape, D, D))
    value = torch.einsum("bhld,bhlde->bhle", key, chosen)
    value = value + 0.05 * torch.randn(value.shape, generator=generator, dtype=torch.float64)
    past, now, wanted = key[..., :L, :], key[..., 1:, :], value[..., 1:, :]
    bandwidth = 8.0

    def error(out):
        return (out - wanted)[..., L // 2 :, :].square().mean().item()

    ours = error(LLA(now, past, value[..., :L, :], is_causal=True, scale=bandwidth, ridge=0.01))
    softmax = error(F.scaled_dot_product_attention(now, past, value[..., :L, :], is_causal=True, scale=bandwidth))
    ridge = error(LLA(now, past, value[..., :L, :], is_causal=True, scale=0.0, ridge=0.01))  # equal weights: global
    assert ours < 0.8 * softmax
    assert ours < 0.5 * ridge


def test_unit_queries_and_keys_make_a_gaussian_kernel():
    query, key, value = draw((1, 1, 5, 3), (1, 1, 7, 3), (1, 1, 7, 2))
    q, k = F.normalize(query, dim=-1), F.normalize(key, dim=-1)
    torch.testing.assert_close(LLA(query, key, value, qk_norm=True), LLA(q, k, value))
    softmax = LLA.scores(query, key, qk_norm=True, ridge=1e12, scale=2.0)
    gaussian = (-torch.cdist(q, k).square()).exp()
    torch.testing.assert_close(softmax, gaussian / gaussian.sum(-1, keepdim=True))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("solver", SOLVERS)
def test_half_precision_is_solved_in_float32(dtype, solver):
    query, key, value = draw((1, 2, 40, 16), (1, 2, 40, 16), (1, 2, 40, 8), dtype=dtype)
    exact = LLA(query.double(), key.double(), value.double(), solver="direct")
    out = LLA(query, key, value, **SOLVERS[solver])
    assert out.dtype == dtype
    assert (out.double() - exact).norm() <= torch.finfo(dtype).eps * exact.norm()


@pytest.mark.parametrize("solver", ["direct", "cg"])
def test_blocks_need_no_tensor_of_all_pairs_forward_or_backward(solver):
    query, key, value = (x.requires_grad_() for x in draw(*[(1, 1, 2048, 2)] * 3, dtype=torch.float32))
    with LargestTensor() as seen:
        LLA(query, key, value, is_causal=True, solver=solver, iterations=2, block=32).sum().backward()
    assert seen.elements <= 2 * 32 * 2048


def test_a_layer_can_learn_the_ridge_of_each_head():
    options = {"learn_ridge": True, "ridge": 3.0, "solver": "cg"}
    layer = MultiheadAttention(8, 2, attention="lla", attention_options=options)
    torch.testing.assert_close(layer.mix.ridge, torch.full((2, 1), 3.0))
    (x,) = draw((2, 7, 8), dtype=torch.float32)
    layer(x, is_causal=True).square().sum().backward()
    assert (layer.mix.raw_ridge.grad != 0).all()
    fixed = LocalLinearAttention(8, 2, ridge=3.0)
    assert not list(fixed.parameters())
    query, key, value = layer.project(x)
    torch.testing.assert_close(fixed(query, key, value), layer.mix(query, key, value), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"solver": "lu"}, "solver must be one of 'auto', 'direct', 'cg', got 'lu'"),
        ({"ridge": 0.0}, "ridge must be positive and finite, got 0.0"),
        ({"ridge": torch.ones(3)}, r"ridge must be a number or broadcast to \(1, 2, 4\), got a tensor \(3,\)"),
        ({"iterations": 0}, "iterations must be at least 1, got 0"),
        ({"block": 0}, "block must be at least 1, got 0"),
        ({"tolerance": -1.0}, "tolerance must not be negative, got -1.0"),
    ],
)
def test_bad_options_are_named(options, message):
    with pytest.raises(ValueError, match=message):
        LLA(*draw((1, 2, 4, 3), (1, 2, 4, 3), (1, 2, 4, 3)), **options)


@pytest.mark.parametrize("options", [{"solver": "lu"}, {"ridge": -1.0}, {"iterations": 0}, {"block": 0}])
def test_a_layer_refuses_bad_options_when_it_is_built(options):
    with pytest.raises(ValueError, match=f"{next(iter(options))} must be"):
        LocalLinearAttention(8, 2, **options)
