"""Options that change what a mechanism computes: each such form keeps the promises of its mechanism."""

import pytest
import torch
from cases import LONG, draw, tokens

from cumulant import zoo
from cumulant.zoo.probes import LargestTensor

FULL, CAUSAL = (False,), (True,)
BOTH = FULL + CAUSAL
FORMS = [
    ("combiner", {"variant": "axial", "segment": 4, "summary_key": "wsum", "pooling": "mean"}, BOTH),
    ("combiner", {"variant": "axial", "segment": 4, "summary_key": "none", "pooling": "mean"}, BOTH),
    ("combiner", {"variant": "logsparse", "pooling": "mean"}, CAUSAL),
    ("cosformer", {"max_len": 40_000}, BOTH),
    ("cumulant3", {"full": True}, BOTH),
    ("flow", {"clamp": None}, BOTH),
    ("focused_linear", {"power": 2.0, "chunk": 3}, BOTH),
    ("linear", {"chunk": 3}, BOTH),
    ("lla", {"solver": "cg"}, BOTH),
    ("lla", {"solver": "direct"}, BOTH),
    ("mala", {"use_rope": True}, BOTH),
    ("mala", {"scaled": False}, BOTH),
    ("rala", {"use_rope": True}, FULL),
    ("rala", {"use_alpha": False}, FULL),
]
CASES = [
    pytest.param(name, options, way, id=f"{name}-{'-'.join(map(str, options.values()))}-{'causal' if way else 'full'}")
    for name, options, ways in FORMS
    for way in ways
]
forms = pytest.mark.parametrize(("name", "options", "is_causal"), CASES)


@forms
def test_weights_applied_to_the_values_are_the_output(name, options, is_causal):
    mechanism = zoo.get(name)
    query, key, value = tokens()
    weights = mechanism.scores(query, key, is_causal=is_causal, **options)
    # The conjugate-gradient solver stops at a squared residual of 1e-12.
    tolerance = {"rtol": 1e-4, "atol": 1e-4} if options.get("solver") == "cg" else {}
    expected = mechanism(query, key, value, is_causal=is_causal, **options)
    torch.testing.assert_close(weights @ value, expected, **tolerance)


@forms
def test_later_tokens_leave_earlier_causal_rows_alone(name, options, is_causal):
    query, key, value = tokens()
    before = zoo.get(name)(query, key, value, is_causal=is_causal, **options)
    for x in (query, key, value):
        x[..., 7:, :] += 5
    after = zoo.get(name)(query, key, value, is_causal=is_causal, **options)
    assert torch.allclose(after[..., :7, :], before[..., :7, :], rtol=1e-9, atol=1e-9) == is_causal


@forms
def test_nan_in_masked_tokens_reaches_neither_output_nor_gradient(name, options, is_causal):
    query, key, value = tokens()
    mask = torch.arange(13).lt(torch.tensor([[9], [13]]))
    shared = {"key_mask": mask, "is_causal": is_causal, **options}
    clean = zoo.get(name)(query, key, value, **shared)
    absent = ~mask[:, None, :, None]
    inputs = [x.masked_fill(absent, float("nan")).requires_grad_() for x in (key, value)]
    out = zoo.get(name)(query.requires_grad_(), *inputs, **shared)
    torch.testing.assert_close(out, clean)
    out.square().sum().backward()
    assert all(x.grad.isfinite().all() for x in (query, *inputs))


@forms
def test_gradients_agree_with_differences(name, options, is_causal):
    inputs = tuple(x.sign() * (0.1 + x.abs()) for x in (draw(1, 2, 5, 4, seed=s) for s in range(3)))
    tolerance = {"atol": 1e-4, "rtol": 1e-2} if options.get("solver") == "cg" else {}

    def function(*x):
        return zoo.get(name)(*x, is_causal=is_causal, **options)

    assert torch.autograd.gradcheck(function, tuple(x.requires_grad_() for x in inputs), fast_mode=True, **tolerance)


@pytest.mark.parametrize(
    ("name", "options", "is_causal"),
    [case for case in CASES if zoo.get(case.values[0]).subquadratic and 3 not in case.values[1].values()],
)
def test_no_tensor_grows_with_the_square_of_the_length(name, options, is_causal):
    query, key, value = tokens(LONG, LONG, heads=1, key_heads=1, dim=4, value_dim=4, batch=1, dtype=torch.float32)
    options = options | ({"segment": 181} if "segment" in options else {})  # the root of L
    with torch.no_grad(), LargestTensor() as largest:
        zoo.get(name)(query, key, value, is_causal=is_causal, **options)
    assert largest.elements < LONG**2 / 16, f"{largest.operation} made {largest.elements} elements"
