"""Every wrong argument gets an error that names it, shows what came and says what is accepted."""

import pytest
import torch

from cumulant import Moments, attention, scores

x = torch.randn(2, 4, 5, 3)


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        (dict(query=x[0, 0]), ValueError, r"query must have shape \(\.\.\., heads, length, width\), got \(5, 3\)"),
        (dict(key=x[..., :2]), ValueError, "key must have the width of the query, 3, got 2"),
        (dict(value=x[:, :, :4]), ValueError, "value must have as many tokens as key, 5, got 4"),
        (dict(key=x[:, :2], value=x[:, :2]), ValueError, "query has 4 heads and key 2.*enable_gqa=True"),
        (dict(value=x[:, :2]), ValueError, "value must have as many heads as key, 4, got 2"),
        (dict(key=x[:, :3], value=x[:, :3], enable_gqa=True), ValueError, r"query heads \(4\) must be a multiple"),
        (dict(value=x[:1]), ValueError, "value must have the leading dimensions of key"),
        (dict(query=torch.randn(3, 4, 5, 3)), ValueError, r"leading dimensions of query \(3,\) and key \(2,\)"),
        (dict(key=x.double()), TypeError, "share a dtype, got key torch.float64, query torch.float32"),
        (dict(key=x.to("meta")), ValueError, "share a device, got key meta, query cpu"),
        (
            dict(query=x.long(), key=x.long(), value=x.long()),
            TypeError,
            "query must be floating point.*got torch.int64",
        ),
        (dict(query=[1.0]), TypeError, "query must be a torch.Tensor, got list"),
        (dict(order=4), ValueError, "order must be 1, 2 or 3, got 4"),
        (
            dict(query=x.to(torch.float8_e4m3fn), key=x.to(torch.float8_e4m3fn), value=x.to(torch.float8_e4m3fn)),
            TypeError,
            "query must be floating point.*got torch.float8",
        ),
        (dict(order=2.0), ValueError, "order must be 1, 2 or 3, got 2.0"),
        (dict(order=True), ValueError, "order must be 1, 2 or 3, got True"),
        (dict(order=2, full=True), ValueError, "full=True.*needs order=3, got order=2"),
        (dict(full="maybe"), TypeError, "full must be True or False, got 'maybe'"),
        (dict(normalization="max"), ValueError, "normalization must be one of .*'mean', 'sum'.*got 'max'"),
        (dict(scale=torch.ones(4)), TypeError, "scale must be a number"),
        (dict(scale="0.1"), TypeError, "scale must be a number, got '0.1'"),
        (dict(scale=True), TypeError, "scale must be a number, got True"),
        (dict(order=2, full=True, closure="tanh"), ValueError, "full"),
        (dict(backend="cuda"), ValueError, "backend must be one of .*'reference'.*got 'cuda'"),
        (
            dict(key_mask=torch.ones(2, 4, dtype=torch.bool)),
            ValueError,
            r"key_mask must have shape \(2, 5\).*got \(2, 4\)",
        ),
        (dict(key_mask=torch.ones(3, 5)), ValueError, r"key_mask must have shape \(2, 5\).*got \(3, 5\)"),
        (
            dict(key_mask=torch.ones(2, 1, dtype=torch.bool)),
            ValueError,
            r"key_mask must have shape \(2, 5\).*got \(2, 1\)",
        ),
        (dict(key_mask=torch.ones(2, 1, 5, 5)), ValueError, "masks that differ from query to query cannot be honoured"),
        (dict(key_mask=torch.ones(2, 5, 5), is_causal=True), ValueError, "cannot be honoured"),
        (dict(key_mask=-torch.ones(2, 5)), ValueError, "finite and not negative, got values from -1 to -1"),
        (dict(key_mask=torch.full((2, 5), float("nan"))), ValueError, "finite and not negative"),
        (dict(key_mask=torch.full((2, 5), -torch.inf)), ValueError, "an additive mask"),
        (
            dict(key_mask=torch.ones(2, 5, dtype=torch.int64)),
            TypeError,
            "bool or floating point weights, got torch.int64",
        ),
        (dict(key_mask=torch.ones(2, 5, device="meta")), ValueError, "key_mask must be on the device of the key"),
        (dict(key_mask=[True] * 5), TypeError, "key_mask must be a torch.Tensor, got list"),
    ],
)
def test_wrong_arguments_are_named(change, error, message):
    with pytest.raises(error, match=message):
        attention(**{"query": x, "key": x, "value": x, **change})


def test_scores_checks_the_same_way():
    with pytest.raises(ValueError, match="order must be"):
        scores(x, x, order=0)
    with pytest.raises(ValueError, match="key must have the width"):
        scores(x, x[..., :2])


@pytest.mark.parametrize("backend", ["auto", "reference"])
@pytest.mark.parametrize("is_causal", [False, True])
def test_nan_in_one_query_stays_in_its_row(backend, is_causal):
    q = x.clone()
    q[0, 1, 2] = float("nan")
    out = attention(q, x, x, is_causal=is_causal, backend=backend)
    rows = out.isnan().any(-1)
    assert rows[0, 1, 2]
    assert rows.sum() == 1


def test_moments_of_nan_are_nan_not_silently_something_else():
    k = x.clone()
    k[0, 0, 0] = float("nan")
    assert Moments.of(k, x).apply(x)[0, 0].isnan().all()
    assert attention(x, k, x)[0, 0].isnan().all()
