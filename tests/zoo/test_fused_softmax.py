"""Softmax stays away from the backend whose gradients are wrong, and from kernels that are slow for tiny heads."""

from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F

from cumulant.zoo import fused
from cumulant.zoo.fused import MANY, NARROW, SHORT, UNEQUAL, better_plain, plain_softmax
from cumulant.zoo.softmax import SOFTMAX


def test_cudnn_is_avoided_where_a_gpu_records_gradients():
    key = SimpleNamespace(is_cuda=True)
    assert fused.may_need_gradients(key)
    with torch.no_grad():
        assert not fused.may_need_gradients(key)
    assert not fused.may_need_gradients(torch.zeros(2, 3, 5, 8))


@pytest.mark.parametrize("avoided", [True, False])
def test_cudnn_is_off_during_the_call_alone(avoided, monkeypatch):
    seen, attend = [], F.scaled_dot_product_attention

    def watched(*arguments, **options):
        seen.append(torch.backends.cuda.cudnn_sdp_enabled())
        return attend(*arguments, **options)

    monkeypatch.setattr(fused, "may_need_gradients", lambda key: avoided)
    monkeypatch.setattr(F, "scaled_dot_product_attention", watched)
    before = torch.backends.cuda.cudnn_sdp_enabled()
    fused.fused_softmax(*torch.randn(3, 1, 2, 5, 4))
    assert seen == [False if avoided else before]
    assert torch.backends.cuda.cudnn_sdp_enabled() == before


def test_the_choice_of_backends_does_not_break_a_compiled_graph(monkeypatch):
    monkeypatch.setattr(fused, "may_need_gradients", lambda key: True)
    q, k, v = torch.randn(3, 1, 2, 5, 4)
    compiled = torch.compile(fused.fused_softmax, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(q, k, v), F.scaled_dot_product_attention(q, k, v))


def drawn(*shape, dtype=torch.float64):
    return torch.randn(*shape, dtype=dtype, requires_grad=True)


def masks(kind):
    if kind == "bool":
        return {"attn_mask": torch.rand(2, 1, 5, 7) < 0.7}
    if kind == "bias":
        return {"attn_mask": torch.randn(4, 5, 7, dtype=torch.float64)}
    return {"is_causal": kind == "causal", "scale": 0.3 if kind == "scale" else None}


@pytest.mark.parametrize("kind", ["none", "causal", "scale", "bool", "bias"])
@pytest.mark.parametrize("key_heads", [4, 2])
def test_plain_products_answer_as_the_fused_kernel_with_its_gradients(kind, key_heads):
    torch.manual_seed(0)
    given = drawn(2, 4, 5, 6), drawn(2, key_heads, 7, 6), drawn(2, key_heads, 7, 3)
    options = {**masks(kind), "enable_gqa": key_heads < 4}
    if kind == "bool":
        options["attn_mask"][..., 0] = True  # a row without a key is the caller's affair
    wanted, found = F.scaled_dot_product_attention(*given, **options), plain_softmax(*given, **options)
    torch.testing.assert_close(found, wanted)
    to = torch.randn_like(wanted)
    for own, other in zip(torch.autograd.grad(found, given, to), torch.autograd.grad(wanted, given, to), strict=True):
        torch.testing.assert_close(own, other)


@pytest.mark.parametrize("mask", [None, (7, 1, 1, 5), (1, 2, 5, 5), (2, 5, 5)])
def test_more_sequences_than_a_kernel_takes_go_in_parts(mask, monkeypatch):
    monkeypatch.setattr(fused, "MOST", 3)
    seen = []

    def attend(*given, **options):
        seen.append(len(given[0]))
        return F.scaled_dot_product_attention(*given, **options)

    given = [torch.randn(7, 2, 5, 4) for _ in range(3)]
    options = {"attn_mask": None if mask is None else torch.randn(mask), "scale": 0.3}
    found = fused.in_parts(attend, *given, **options)
    torch.testing.assert_close(found, F.scaled_dot_product_attention(*given, **options))
    assert seen == [3, 3, 1]


def test_dropout_leaves_out_probabilities_and_keeps_their_mean():
    torch.manual_seed(0)
    query, key, value = (drawn(4096, 1, 3, 2, dtype=torch.float32) for _ in range(3))
    query, key, value = (x[:1].expand(4096, -1, -1, -1) for x in (query, key, value))
    dropped = plain_softmax(query, key, value, dropout_p=0.5)
    torch.testing.assert_close(dropped.mean(0), plain_softmax(query, key, value)[0], atol=0.08, rtol=0)
    assert (dropped == 0).all(-1).any(), "a row that lost all its keys"


def test_in_bfloat16_it_is_off_by_no_more_than_plain_torch():
    torch.manual_seed(0)
    given = [drawn(64, 4, 16, 6, dtype=torch.bfloat16) for _ in range(3)]
    query, key, value = given
    exact = F.scaled_dot_product_attention(*(x.double() for x in given))
    plain = (query @ key.mT * 6**-0.5).softmax(-1) @ value
    assert (plain_softmax(*given) - exact).norm() <= 2 * (plain - exact).norm()


def test_only_very_many_short_and_narrow_heads_on_a_gpu_take_it():
    def taken(heads, tokens, width, device):
        class OnGpu:  # what the choice looks at
            shape, is_cuda = torch.Size((heads, tokens, width)), device == "cuda"

        return better_plain(OnGpu, OnGpu, OnGpu)

    assert taken(MANY, SHORT, NARROW, "cuda")
    assert not taken(MANY, SHORT, NARROW, "cpu")
    for change in ((MANY - 1, SHORT, NARROW), (MANY, SHORT + 1, NARROW), (MANY, SHORT, NARROW + 1)):
        assert not taken(*change, "cuda")


@pytest.mark.parametrize(
    ("queries", "tokens", "values", "plain"),
    [
        (UNEQUAL, UNEQUAL, 96, True),
        (UNEQUAL, UNEQUAL, 16, False),
        (UNEQUAL + 1, UNEQUAL + 1, 96, False),
        (1, 4096, 96, True),
        (1, 4096, 16, False),
    ],
)
def test_short_sequences_and_single_queries_with_values_wider_than_keys_take_plain_products(
    queries, tokens, values, plain
):
    key, value = (torch.empty(2, 1, tokens, width, device="meta") for width in (16, values))

    class OnGpu:
        shape, is_cuda = torch.Size((2, 1, queries, 16)), True

    assert better_plain(OnGpu, key, value) is plain


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["none", "causal", "mask"])
def test_tiny_heads_on_a_gpu_answer_as_in_float64(kind):
    torch.manual_seed(0)
    given = [torch.randn(512, 4, 16, 6, device="cuda", dtype=torch.bfloat16, requires_grad=True) for _ in range(3)]
    mask = torch.rand(512, 16, device="cuda") < 0.8 if kind == "mask" else None
    options = {"is_causal": kind == "causal", "key_mask": mask}
    exact = SOFTMAX(*(x.double() for x in given), **options)
    assert better_plain(*given)
    assert (SOFTMAX(*given, **options) - exact).norm() < 0.01 * exact.norm()


@pytest.mark.gpu
def test_a_gpu_takes_any_number_of_sequences():
    torch.manual_seed(0)
    given = torch.randn(3, fused.MOST + 2, 1, 33, 8, device="cuda", dtype=torch.bfloat16).requires_grad_()
    out = SOFTMAX(*given)
    exact = F.scaled_dot_product_attention(*given[:, -3:].double())
    assert (out[-3:] - exact).norm() < 0.01 * exact.norm()
    (found,) = torch.autograd.grad(out[-3:].float().sum(), given)
    assert found[:, -3:].isfinite().all()


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 65, 192])
def test_rows_of_very_negative_logits_have_finite_gradients(tokens):
    torch.manual_seed(0)
    q, k, v = (torch.randn(2, 3, tokens, 64, device="cuda", dtype=torch.bfloat16) for _ in range(3))
    q[..., 0], k[..., 0] = 8.0, -120.0  # q.k / 8 is about -120 for all keys
    q, k, v = (x.requires_grad_() for x in (q, k, v))
    SOFTMAX(q, k, v).sum().backward()
    assert all(torch.isfinite(x.grad).all() for x in (q, k, v))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [64, 65, 512])
@pytest.mark.parametrize("by_heads", [True, False])
def test_gradients_do_not_depend_on_the_layout_of_those_of_the_output(tokens, by_heads):
    torch.manual_seed(0)
    x = torch.randn(4, tokens, 3, 3, 64, device="cuda", dtype=torch.bfloat16)
    grad = torch.randn(4, tokens, 3, 64, device="cuda", dtype=torch.bfloat16).transpose(1, 2)
    exact, found = x.double().requires_grad_(), x.requires_grad_()
    for one, given in ((exact, grad.double()), (found, grad.contiguous() if by_heads else grad)):
        SOFTMAX(*(part.transpose(1, 2) for part in one.unbind(2))).backward(given)
    assert (found.grad - exact.grad).norm() < 0.01 * exact.grad.norm()
