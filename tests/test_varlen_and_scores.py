import sys

import pytest
import torch
from oracles import by_definition, relative

from cumulant import attention, attention_varlen, scores

ORDERS = [(1, False), (2, False), (3, False), (3, True)]
f64 = torch.float64


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(("order", "full"), ORDERS)
def test_packed_sequences_equal_a_loop(order, full, is_causal):
    q_lengths, k_lengths = [5, 0, 1, 70, 3], [5, 4, 9, 66, 0]
    q, k, v = torch.randn(79, 4, 5, dtype=f64), torch.randn(84, 2, 5, dtype=f64), torch.randn(84, 2, 6, dtype=f64)
    cu_q, cu_k = (
        torch.tensor([0, *torch.tensor(n).cumsum(0).tolist()], dtype=torch.int32) for n in (q_lengths, k_lengths)
    )
    options = dict(order=order, full=full, is_causal=is_causal, enable_gqa=True)
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = attention_varlen(*leaves, cu_q, cu_k, 70, 66, **options)
    grads = torch.autograd.grad(out.square().sum(), leaves)
    assert out.shape == (79, 4, 6)
    for i in range(5):
        rows, keys = slice(cu_q[i], cu_q[i + 1]), slice(cu_k[i], cu_k[i + 1])
        one = [x.transpose(0, 1).clone().requires_grad_() for x in (q[rows], k[keys], v[keys])]
        alone = attention(*one, **options)
        assert torch.equal(out[rows].transpose(0, 1), alone)
        for whole, part, grad in zip(
            grads, torch.autograd.grad(alone.square().sum(), one), (rows, keys, keys), strict=True
        ):
            assert torch.allclose(whole[grad].transpose(0, 1), part, atol=1e-12)


def test_no_sequences_give_no_rows():
    empty = torch.zeros(1, dtype=torch.int32)
    out = attention_varlen(torch.randn(0, 2, 3), torch.randn(0, 2, 3), torch.randn(0, 2, 4), empty, empty, 0, 0)
    assert out.shape == (0, 2, 4)


@pytest.mark.parametrize(
    ("cu", "message"),
    [
        ([0, 3], r"cu_seq_q must rise from 0 to the number of tokens, 5, got \[0, 3\]"),
        ([1, 5], "must rise from 0"),
        ([0, 4, 3, 5], "must rise"),
        ([0.0, 5.0], "1-D integer tensor"),
    ],
)
def test_offsets_that_do_not_cut_the_tokens_are_refused(cu, message):
    x = torch.randn(5, 2, 3)
    with pytest.raises(ValueError, match=message):
        attention_varlen(x, x, x, torch.tensor(cu), torch.tensor(cu), 5, 5)


def test_varlen_checks_what_belongs_together():
    x, cu = torch.randn(5, 2, 3), torch.tensor([0, 5])
    with pytest.raises(ValueError, match="equally many sequences, got 1 and 2"):
        attention_varlen(x, x, x, cu, torch.tensor([0, 2, 5]), 5, 5)
    with pytest.raises(ValueError, match="max_k must be at least the longest sequence, 5, got 4"):
        attention_varlen(x, x, x, cu, cu, 5, 4)
    with pytest.raises(ValueError, match="1-D integer tensor"):
        attention_varlen(x, x, x, torch.tensor([False, True]), cu, 5, 5)
    with pytest.raises(TypeError, match=r"query must be a torch\.Tensor, got list"):
        attention_varlen([1.0], x, x, cu, cu, 5, 5)
    with pytest.raises(ValueError, match="packed"):
        attention_varlen(x[None], x, x, cu, cu, 5, 5)
    with pytest.raises(ValueError, match="equally many tokens"):
        attention_varlen(x, x, x[:4], cu, cu, 5, 5)


@pytest.mark.parametrize("normalization", ["mean", "sum"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(("order", "full"), ORDERS)
def test_scores_times_values_is_the_output(order, full, masked, is_causal, normalization):
    q, k, v = (
        torch.randn(2, 4, 8, 5, dtype=f64),
        torch.randn(2, 2, 11, 5, dtype=f64) + 2,
        torch.randn(2, 2, 11, 6, dtype=f64),
    )
    w = torch.rand(2, 11, dtype=f64) * (torch.rand(2, 11) > 0.3) if masked else None
    options = dict(order=order, full=full, is_causal=is_causal, normalization=normalization)
    A = scores(q, k, key_mask=w, enable_gqa=True, **options)
    assert A.shape == (2, 4, 8, 11)
    assert relative(A @ v.repeat_interleave(2, 1), by_definition(q, k, v, weights=w, **options)) < 1e-12


@pytest.mark.parametrize("asked", [{}, {"order": 2}, {"order": 2, "closure": "tanh"}], ids=str)
def test_a_few_queries_give_their_rows_of_the_whole_map(asked):
    q, k = torch.randn(2, 3, 50, 8, dtype=f64), torch.randn(2, 3, 40, 8, dtype=f64)
    for is_causal in (False, True):
        whole = scores(q, k, is_causal=is_causal, **asked)
        rows = [17, 4, 49, 4]
        few = scores(q[..., rows, :], k, is_causal=is_causal, positions=rows, **asked)
        assert torch.allclose(few, whole[..., rows, :], atol=1e-13)
    with pytest.raises(ValueError, match="one place for each of the 4 queries"):
        scores(q[..., rows, :], k, is_causal=True, positions=[1])


def test_masked_keys_have_no_weight_and_no_influence():
    q, k = torch.randn(1, 2, 3, 4, dtype=f64), torch.randn(1, 2, 6, 4, dtype=f64)
    mask = torch.tensor([[True, True, False, True, False, True]])
    poisoned = k.masked_fill(~mask[:, None, :, None], float("nan"))
    A = scores(q, poisoned, key_mask=mask)
    assert not A[..., ~mask[0]].any()
    assert torch.allclose(A[..., mask[0]], scores(q, k[..., mask[0], :]), atol=1e-13)


def test_keys_without_width_have_equal_scores():
    nothing = torch.randn(1, 2, 3, 0, dtype=f64)
    assert torch.equal(scores(nothing, nothing), torch.full((1, 2, 3, 3), 1 / 3, dtype=f64))


@pytest.mark.parametrize(
    ("offsets", "said"),
    [
        ([0, 9, 3], "cu_seq_q must rise from 0"),
        ([0, 5, 13], "cu_seq_q must rise from 0 to the number of tokens, 12"),
        ([0, 2, 12], "max_q must be at least the longest sequence, 10, got 7"),
    ],
)
def test_offsets_that_lie_on_the_host_are_checked_before_a_kernel_gets_them(monkeypatch, offsets, said):
    monkeypatch.setattr(sys.modules["cumulant.attention"], "path_for", lambda *_, **__: "triton")
    x, good = torch.randn(12, 2, 4), torch.tensor([0, 5, 12])
    with pytest.raises(ValueError, match=said):
        attention_varlen(x, x, x, torch.tensor(offsets), good, 7, 7)
