"""The folded layer is the plain layer: outputs, gradients, masks, precision, and when the cost model picks it."""

import copy

import pytest
import torch
from oracles import relative
from torch._subclasses.fake_tensor import FakeTensorMode

from cumulant.kernels import launch
from cumulant.nn import CumulantAttention
from cumulant.nn.fold import _chain_obstacle, _kept_blocks, folds, pays, unfolded


def layers(dim=48, heads=4, dtype=torch.float64, **options):
    plain = CumulantAttention(dim, heads, order=2, fold=False, dtype=dtype, **options)
    for bias in (plain.qkv.bias, plain.proj.bias):
        if bias is not None:
            torch.nn.init.normal_(bias)
    folded = CumulantAttention(dim, heads, order=2, fold=True, dtype=dtype, **options)
    folded.load_state_dict(plain.state_dict())
    return plain, folded


def run(layer, x, mask=None):
    x = x.clone().requires_grad_()
    y = layer(x, attn_mask=mask)
    weight = torch.randn(y.shape, generator=torch.Generator().manual_seed(1)).to(y)
    return y, *torch.autograd.grad(y, [x, *layer.parameters()], weight)


@pytest.mark.parametrize("mask", [None, "bool", "float", "one sequence without keys"])
@pytest.mark.parametrize("bias", [True, False])
def test_folded_equals_plain_in_outputs_and_all_gradients(mask, bias):
    plain, folded = layers(qkv_bias=bias, proj_bias=bias)
    x = torch.randn(3, 37, 48, dtype=torch.float64) + 2
    key_mask = {
        None: None,
        "bool": torch.rand(3, 37) > 0.4,
        "float": torch.rand(3, 37, dtype=torch.float64) * (torch.rand(3, 37) > 0.3),
        "one sequence without keys": torch.tensor([True, False, True])[:, None].expand(3, 37),
    }[mask]
    for a, b in zip(run(plain, x, key_mask), run(folded, x, key_mask), strict=True):
        assert (a - b).abs().max() <= 1e-11 * (1 + a.abs().max())


def test_nan_in_masked_tokens_stays_in_their_own_rows():
    _, folded = layers()
    x = torch.randn(1, 9, 48, dtype=torch.float64)
    mask = torch.ones(1, 9, dtype=torch.bool)
    mask[0, 4] = False
    clean = folded(x, attn_mask=mask)
    x[0, 4] = float("nan")
    dirty = folded(x, attn_mask=mask)
    assert torch.equal(clean[mask], dirty[mask])


@pytest.mark.skipif(not launch.INTERPRET, reason="16-bit tokens take the kernel, on the CPU through the interpreter")
def test_second_derivatives_of_the_folded_kernels_are_refused_with_a_way_to_have_them():
    _, folded = layers(dim=32, heads=2, dtype=torch.bfloat16)
    x = torch.randn(1, 20, 32).bfloat16().requires_grad_()
    (first,) = torch.autograd.grad(folded(x).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="in a layer or model, tokens in float64"):
        torch.autograd.grad(first.square().sum(), x)
    x = x.detach().double().requires_grad_()
    (first,) = torch.autograd.grad(folded.double()(x).sum(), x, create_graph=True)
    assert torch.autograd.grad(first.square().sum(), x)[0].abs().max() > 0


@pytest.mark.skipif(not launch.INTERPRET, reason="16-bit tokens take the kernel, on the CPU through the interpreter")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("offset", [0, 3, 100])
def test_sixteen_bit_error_is_at_most_twice_the_plain_layers(dtype, offset):
    """Tokens up to 100 spreads from the origin, against float64 on the same rounded weights and tokens."""
    plain, folded = layers(dtype=dtype)
    x = (torch.randn(2, 300, 48) + offset).to(dtype)
    exact = run(copy.deepcopy(plain).double(), x.double())
    for name, a, b, c in zip(("y", "x", "qkv.weight"), exact, run(plain, x), run(folded, x), strict=False):
        assert relative(c, a) <= 2 * relative(b, a) + 1e-3, name


@pytest.mark.skipif(not launch.INTERPRET, reason="16-bit tokens take the kernel, on the CPU through the interpreter")
@pytest.mark.parametrize(
    ("dim", "heads", "kv_heads", "B", "L", "bias"),
    [(48, 3, None, 2, 70, True), (64, 4, 2, 3, 40, True), (24, 2, 1, 18, 20, True), (136, 2, None, 2, 50, False)],
)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_pipeline_of_kernels_has_the_plain_layers_gradients(dim, heads, kv_heads, B, L, bias, dtype):
    """Odd widths and lengths, grouped queries, tokens that are a view; error at most twice the plain layer's."""
    plain, folded = layers(dim, heads, dtype, num_kv_heads=kv_heads, qkv_bias=bias)
    assert _chain_obstacle(torch.empty(B, L, dim, dtype=dtype), None, heads) is None
    x = (torch.randn(B, dim, L) + 0.5).to(dtype).mT
    exact = run(copy.deepcopy(plain).double(), x.double())
    names = ("y", "x", *(name for name, _ in plain.named_parameters()))
    for name, a, b, c in zip(names, exact, run(plain, x), run(folded, x), strict=True):
        assert relative(c, a) <= 2 * relative(b, a) + 1e-6, name


@pytest.mark.gpu
@pytest.mark.parametrize(("dim", "heads", "kv_heads", "B", "L"), [(768, 12, None, 2, 3000), (200, 4, 2, 10, 701)])
def test_the_pipeline_on_a_gpu(dim, heads, kv_heads, B, L):
    """Outputs and gradients as above; twelve runs agree in every bit."""
    plain, folded = (x.cuda() for x in layers(dim, heads, torch.bfloat16, num_kv_heads=kv_heads))
    x = (torch.randn(B, L, dim, device="cuda") + 0.5).bfloat16()
    exact, found = run(copy.deepcopy(plain).double(), x.double()), run(folded, x)
    names = ("y", "x", *(name for name, _ in plain.named_parameters()))
    for name, a, b, c in zip(names, exact, run(plain, x), found, strict=True):
        assert relative(c, a) <= 2 * relative(b, a) + 1e-6, name
    for _ in range(11):
        assert all(torch.equal(a, b) for a, b in zip(found, run(folded, x), strict=True))


def test_autocast_runs_the_folded_layer_in_its_dtype():
    plain, folded = layers(dtype=torch.float32)
    x = torch.randn(2, 70, 48)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        y = folded(x)
        assert y.dtype == plain(x).dtype == torch.bfloat16
    assert relative(y, plain(x)) < 2e-2


def test_only_the_plain_second_order_folds():
    for change in (dict(order=3), dict(qk_norm=True), dict(normalization="sum"), dict(scale_norm=True)):
        with pytest.raises(ValueError, match="fold=True needs order=2"):
            CumulantAttention(48, 4, **{"order": 2, "fold": True, **change})
        assert CumulantAttention(48, 4, **{"order": 2, "fold": "auto", **change}).fold is False
    with pytest.raises(ValueError, match="no causal form"):
        layers()[1](torch.randn(1, 4, 48, dtype=torch.float64), is_causal=True)
    with pytest.raises(ValueError, match='fold must be "auto", True or False'):
        CumulantAttention(48, 4, fold="yes")


def test_auto_folds_long_sequences_and_not_short_or_causal_ones():
    layer = CumulantAttention(48, 4, order=2)
    short, long = torch.randn(1, 8, 48), torch.randn(1, 500, 48)
    assert not folds(layer.fold, short, 4)
    assert folds(layer.fold, long, 4)
    assert not folds(layer.fold, long, 4, is_causal=True)
    with unfolded():  # somebody wants to see query, key and value
        assert not folds(layer.fold, long, 4)
    assert [pays(L, 384, 6, "cuda") for L in (1024, 4096)] == [False, True]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_compiled_folded_layer_is_one_graph(dtype):
    _, folded = layers(dtype=dtype)
    x = torch.randn(2, 70, 48).to(dtype)
    compiled = torch.compile(folded, fullgraph=True, backend="aot_eager")
    for a, b in zip(run(folded, x), run(compiled, x), strict=True):
        assert relative(b, a) < (1e-5 if dtype == torch.float32 else 1e-2)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("fold", [True, False, "auto"])
def test_packed_sequences_equal_a_loop_over_them(fold, order):
    if order == 3 and fold is True:
        fold = "auto"
    layer = CumulantAttention(48, 4, order=order, fold=fold, dtype=torch.float64)
    cu_seq = torch.tensor([0, 5, 5, 37, 90])  # one of them without tokens
    x = (torch.randn(90, 48, dtype=torch.float64) + 1).requires_grad_()
    y = layer.forward_packed(x, cu_seq)
    loop = torch.cat([layer(x[a:b].unsqueeze(0))[0] for a, b in ((0, 5), (5, 37), (37, 90))])
    torch.testing.assert_close(y, loop, rtol=1e-10, atol=1e-10)
    weight = torch.randn_like(y)
    for ours, theirs in zip(
        *(torch.autograd.grad(z, [x, *layer.parameters()], weight) for z in (y, loop)), strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_packed_sequences_can_be_causal():
    layer = CumulantAttention(32, 4, order=2, dtype=torch.float64)
    x = torch.randn(20, 32, dtype=torch.float64)
    y = layer.forward_packed(x, torch.tensor([0, 12, 20]), is_causal=True)
    torch.testing.assert_close(y[:12], layer(x[:12].unsqueeze(0), is_causal=True)[0])


def test_packed_sequences_refuse_what_they_cannot_honour():
    layer = CumulantAttention(32, 4, order=2)
    x = torch.randn(20, 32)
    with pytest.raises(ValueError, match=r"cu_seq.*rise from 0"):
        layer.forward_packed(x, torch.tensor([0, 12, 19]))
    with pytest.raises(ValueError, match="packed as"):
        layer.forward_packed(x.unsqueeze(0), torch.tensor([0, 20]))
    with pytest.raises(ValueError, match="gate"):
        CumulantAttention(32, 4, order=2, gate=True).forward_packed(x, torch.tensor([0, 20]))


def test_no_packed_sequences_give_no_tokens():
    layer = CumulantAttention(32, 4, order=2, fold=True)
    assert layer.forward_packed(torch.zeros(0, 32), torch.tensor([0])).shape == (0, 32)


@pytest.mark.parametrize("first", [torch.inference_mode, FakeTensorMode])
def test_what_the_first_call_keeps_serves_later_training(first):
    """Scores on validation data come before the first step; a count of the work runs on tensors without numbers."""
    _kept_blocks.cache_clear()
    with first():
        layers(dtype=torch.float32)[1](torch.randn(2, 9, 48))
    _, folded = layers(dtype=torch.float32)
    folded(torch.randn(2, 9, 48)).sum().backward()
    assert folded.qkv.weight.grad.isfinite().all()


@pytest.mark.parametrize("shape", [(9, 48), (2, 3, 9, 48)])
def test_any_leading_dimensions_are_a_batch_where_it_folds_too(shape):
    plain, folded = layers()
    x = torch.randn(shape, dtype=torch.float64)
    mask = torch.rand(shape[:-1]) < 0.7
    torch.testing.assert_close(folded(x, attn_mask=mask), plain(x, attn_mask=mask))


def test_transforms_of_torch_func_take_the_folded_layer():
    plain, folded = layers()
    x, direction = (torch.randn(3, 2, 9, 48, dtype=torch.float64) for _ in range(2))
    torch.testing.assert_close(torch.func.vmap(folded)(x), plain(x))
    outcomes = (torch.func.jvp(layer, (x[0],), (direction[0],)) for layer in (plain, folded))
    for a, b in zip(*outcomes, strict=True):
        torch.testing.assert_close(a, b)
    _kept_blocks.cache_clear()
    parameters = dict(folded.named_parameters())
    torch.func.grad(lambda p: torch.func.functional_call(folded, p, (x[0],)).sum())(parameters)
    folded(x[0]).sum().backward()  # nothing of the transform is left


def test_autocast_leaves_double_precision_alone_and_the_meta_device_has_shapes():
    plain, folded = layers()
    x = torch.randn(2, 9, 48, dtype=torch.float64)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(folded(x), plain(x))
    assert folded.to("meta")(x.to("meta")).shape == x.shape
