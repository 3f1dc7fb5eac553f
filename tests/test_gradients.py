"""First and second derivatives, by finite differences and against the reference."""

import pytest
import torch
from oracles import relative
from torch.autograd import gradcheck, gradgradcheck

from cumulant import Moments, attention, scores

ORDERS = [(1, False), (2, False), (3, False), (3, True)]


def inputs(Lq=4, Lk=5, Hq=2, H=2, D=3, E=2, dtype=torch.float64):
    shapes = (1, Hq, Lq, D), (1, H, Lk, D), (1, H, Lk, E)
    return [torch.randn(s, dtype=dtype).requires_grad_() for s in shapes]


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("order", "full"), ORDERS)
def test_gradients_are_right_to_second_order(order, full, masked, is_causal, backend):
    mask = torch.tensor([[0.5, 0.0, 2.0, 1.0, 0.3]], dtype=torch.float64) if masked else None

    def f(q, k, v):
        return attention(q, k, v, order=order, full=full, key_mask=mask, is_causal=is_causal, backend=backend)

    assert gradcheck(f, inputs())
    assert gradgradcheck(f, inputs(), fast_mode=True)


@pytest.mark.parametrize("backend", ["auto", "reference"])
def test_gradients_of_grouped_heads_and_of_the_sum_form(backend):
    def f(q, k, v):
        return attention(q, k, v, enable_gqa=True, normalization="sum", backend=backend)

    assert gradcheck(f, inputs(Hq=4))
    assert gradgradcheck(f, inputs(Hq=4), fast_mode=True)


def test_weights_have_gradients_too():
    q, k, v = inputs()
    w = torch.rand(1, 5, dtype=torch.float64).requires_grad_()
    for is_causal in (False, True):
        assert gradcheck(lambda w, c=is_causal: attention(q, k, v, key_mask=w, is_causal=c), w)


@pytest.mark.parametrize(("order", "full"), ORDERS)
def test_scores_have_gradients(order, full):
    q, k, _ = inputs()
    assert gradcheck(lambda q, k: scores(q, k, order=order, full=full), (q, k), check_undefined_grad=False)


@pytest.mark.parametrize("full", [False, True])
def test_merge_and_remove_have_gradients(full):
    def f(a, b, v, w, q):
        A, B = Moments.of(a, v, full=full), Moments.of(b, w, full=full)
        return A.merge(B).remove(A).apply(q)

    _, k, v = inputs()
    _, other, w = inputs()
    assert gradcheck(f, (k, other, v, w, torch.randn(1, 2, 3, 3, dtype=torch.float64).requires_grad_()), atol=1e-4)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("layout", ["heads first", "qkv view", "innermost strided"])
@pytest.mark.parametrize(("B", "L", "D", "E"), [(1, 1, 1, 1), (3, 37, 7, 5), (2, 2500, 16, 24), (70, 33, 16, 16)])
@pytest.mark.parametrize("masked", [False, True])
def test_cpu_gradients_equal_the_references_at_odd_sizes_and_strides(order, layout, B, L, D, E, masked):
    """Lengths beyond one tile (2048 tokens) and batches of several tiles included."""
    if layout == "qkv view":
        q, k, v = torch.randn(B, L, 3, 4, D).permute(2, 0, 3, 1, 4).unbind(0)
    elif layout == "innermost strided":
        q, k, v = (torch.randn(B, 4, width, L).mT for width in (D, D, E))
    else:
        q, k, v = (torch.randn(B, 4, L, width) for width in (D, D, E))
    mask = torch.rand(B, L) * (torch.rand(B, L) > 0.3) if masked else None
    results = []
    for backend, dtype in (("cpu", torch.float32), ("reference", torch.float64)):
        leaves = [x.detach().to(dtype).requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, order=order, key_mask=mask, backend=backend)
        weight = torch.linspace(-1, 1, out.numel(), dtype=dtype).view_as(out)
        results.append((out, *torch.autograd.grad((out * weight).sum(), leaves)))
    for fast, exact in zip(*results, strict=True):
        assert (fast - exact).abs().max() <= 2e-5 * exact.abs().max() + 1e-7


def test_cpu_gradients_equal_the_references_for_cross_and_grouped_attention():
    q, k, v = (x.float().detach() for x in inputs(Lq=77, Lk=33, Hq=6, H=2, D=8, E=4))
    results = []
    for backend, dtype in (("cpu", torch.float32), ("reference", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in (q, k, v)]
        out = attention(*leaves, enable_gqa=True, backend=backend)
        results.append((out, *torch.autograd.grad(out.square().sum(), leaves)))
    for fast, exact in zip(*results, strict=True):
        assert relative(fast, exact) < 1e-5


def test_only_the_gradients_that_are_wanted_are_computed():
    q, k, v = inputs()
    k = k.detach()
    (dq,) = torch.autograd.grad(attention(q, k, v).sum(), q, create_graph=True)
    assert dq.requires_grad
    attention(q, k, v).sum().backward()
    assert k.grad is None


def test_function_transforms_work():
    q, k, v = (x.detach() for x in inputs())
    batched = torch.func.vmap(lambda q: attention(q, k, v))(torch.stack((q, 2 * q)))
    assert relative(batched[1], attention(2 * q, k, v)) < 1e-12
    _, tangent = torch.func.jvp(
        lambda t: attention(t * q, k, v), (torch.ones((), dtype=q.dtype),), (torch.ones((), dtype=q.dtype),)
    )
    step = 1e-6
    assert relative(tangent, (attention((1 + step) * q, k, v) - attention((1 - step) * q, k, v)) / (2 * step)) < 1e-7


@pytest.mark.parametrize("masked", [False, True])
def test_many_gradients_at_once(masked):
    """As jacobians ask for them, through either of torch's ways of batching."""
    leaves = inputs()
    mask = torch.tensor([[0.5, 0.0, 2.0, 1.0, 0.3]], dtype=torch.float64) if masked else None
    out = attention(*leaves, key_mask=mask)
    grads = torch.randn(3, *out.shape, dtype=torch.float64)
    each = zip(*(torch.autograd.grad(out, leaves, g, retain_graph=True) for g in grads), strict=True)
    together = torch.autograd.grad(out, leaves, grads, retain_graph=True, is_grads_batched=True)
    mapped = torch.func.vmap(lambda g: torch.autograd.grad(out, leaves, g, retain_graph=True))(grads)
    for one, a, b in zip(each, together, mapped, strict=True):
        assert relative(a, torch.stack(one)) < 1e-12
        assert relative(b, torch.stack(one)) < 1e-12


@pytest.mark.parametrize("twice", [False, True])
def test_a_backward_pass_under_autocast_keeps_its_precision_on_the_cpu(twice):
    leaves = [x.float().detach().requires_grad_() for x in inputs(Lq=40, Lk=50, D=8)]
    out = attention(*leaves, backend="cpu")
    plain = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        under = torch.autograd.grad(out.sum(), leaves, create_graph=twice)
    for x, y in zip(under, plain, strict=True):
        assert relative(x, y) < 1e-5


@pytest.mark.parametrize("made", [lambda x: (x, x, x), lambda x: (x, x.tanh(), x.square())], ids=["itself", "of it"])
def test_second_derivatives_where_keys_and_values_are_made_of_the_queries(made):
    """Each input gets the gradient that is its own, not what reaches it through the others."""
    x = inputs(Lq=40)[0]  # more tokens than a row is wide: tiles
    found = []
    for backend in ("cpu", "reference"):
        out = attention(*made(x), backend=backend)
        (first,) = torch.autograd.grad(out.square().sum(), x, create_graph=True)
        many = torch.autograd.grad(out, x, torch.ones(2, *out.shape).double(), retain_graph=True, is_grads_batched=True)
        found.append((first, *torch.autograd.grad(first.square().sum(), x), *many))
    for a, b in zip(*found, strict=True):
        assert relative(a, b) < 1e-12
