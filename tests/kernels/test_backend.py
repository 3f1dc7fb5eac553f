"""attention(backend="triton") through the public function: on the GPU, or in the interpreter on the CPU."""

import re

import pytest
import torch
from oracles import relative

from cumulant import attention, attention_varlen
from cumulant.kernels import launch
from cumulant.optional import install

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def inputs(Lq=37, Lk=45, Hq=4, H=2, D=16, E=24):
    return (
        torch.randn(2, Hq, Lq, D, device=DEVICE),
        torch.randn(2, H, Lk, D, device=DEVICE) + 1,
        torch.randn(2, H, Lk, E, device=DEVICE),
    )


def both(function, tensors):
    """Outputs and gradients by the kernels in float32 and by the reference in float64."""
    results = []
    for backend, dtype in (("triton", torch.float32), ("reference", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        out = function(*leaves, backend=backend)
        weight = torch.linspace(-1, 1, out.numel(), dtype=dtype, device=DEVICE).view_as(out)
        results.append((out, *torch.autograd.grad((out * weight).sum(), leaves)))
    return zip(*results, strict=True)


@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("normalization", ["mean", "sum"])
def test_masked_grouped_cross_attention(order, normalization):
    q, k, v = inputs()
    mask = torch.rand(2, 45, device=DEVICE) > 0.4
    options = dict(order=order, key_mask=mask, enable_gqa=True, normalization=normalization)
    for fast, exact in both(lambda *x, backend: attention(*x, backend=backend, **options), (q, k, v)):
        assert relative(fast, exact) < 1e-5


@pytest.mark.parametrize("order", [2, 3])
def test_packed_sequences(order):
    cu_q = torch.tensor([0, 7, 7, 30], dtype=torch.int32, device=DEVICE)
    cu_k = torch.tensor([0, 20, 25, 41], dtype=torch.int32, device=DEVICE)
    q, k, v = (torch.randn(n, 2, 16, device=DEVICE) for n in (30, 41, 41))

    def packed(*x, backend):
        return attention_varlen(*x, cu_q, cu_k, 23, 20, order=order, backend=backend)

    for fast, exact in both(packed, (q, k, v)):
        assert relative(fast, exact) < 1e-5


@pytest.mark.skipif(not launch.INTERPRET, reason="the causal kernels run in the interpreter only")
@pytest.mark.parametrize("order", [2, 3])
def test_causal_attention_in_the_interpreter(order):
    q, k, v = inputs(Lq=70, Lk=70)

    def causal(*x, backend):
        return attention(*x, order=order, is_causal=True, enable_gqa=True, backend=backend)

    for fast, exact in both(causal, (q, k, v)):
        assert relative(fast, exact) < 1e-5


def test_what_the_kernels_cannot_take_is_refused_by_name():
    q, k, v = inputs()
    with pytest.raises(ValueError, match=r'backend="triton" cannot be used: kernels take .* got torch.float64'):
        attention(q.double(), k.double(), v.double(), enable_gqa=True, backend="triton")
    wide = torch.randn(1, 1, 4, 300, device=DEVICE)
    with pytest.raises(ValueError, match="at most 256 wide, got 300"):
        attention(wide, wide, wide, backend="triton")


def test_without_triton_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(launch, "HAS_TRITON", False)
    with pytest.raises(ValueError, match=re.escape(install("gpu"))):
        attention(*inputs(), enable_gqa=True, backend="triton")


@pytest.mark.gpu
@pytest.mark.parametrize("order", [2, 3])
def test_causal_attention_on_the_gpu_takes_the_kernels(order):
    q, k, v = (x.bfloat16() for x in inputs(Lq=300, Lk=300))
    options = dict(order=order, is_causal=True, enable_gqa=True)
    assert torch.equal(attention(q, k, v, **options), attention(q, k, v, backend="triton", **options))


@pytest.mark.gpu
def test_causal_order_3_in_float16_takes_the_kernels_of_float32():
    q, k, v = (x.half() for x in inputs(Lq=300, Lk=300))
    options = dict(order=3, is_causal=True, enable_gqa=True)
    wide = attention(q.float(), k.float(), v.float(), backend="triton", **options)
    assert torch.equal(attention(q, k, v, **options), wide.half())


@pytest.mark.gpu
@pytest.mark.parametrize("order", [2, 3])
def test_auto_takes_the_kernels_under_compile_autocast_graphs_and_checkpointing(order):
    from torch.utils.checkpoint import checkpoint

    q, k, v = (torch.randn(2, 4, 500, 64, device="cuda", requires_grad=True) for _ in range(3))
    with torch.autocast("cuda", dtype=torch.bfloat16):
        eager = attention(q, k, v, order=order)
        compiled = torch.compile(lambda *x: attention(*x, order=order), fullgraph=True)(q, k, v)
        saved = checkpoint(lambda *x: attention(*x, order=order), q, k, v, use_reentrant=False)
    assert eager.dtype == torch.bfloat16
    assert torch.equal(eager, compiled)
    grads = [torch.autograd.grad(out.float().square().sum(), (q, k, v)) for out in (eager, compiled, saved)]
    for a, b, c in zip(*grads, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(a, c)
    with torch.no_grad():
        graph, half = torch.cuda.CUDAGraph(), [x.bfloat16() for x in (q, k, v)]
        attention(*half, order=order)
        with torch.cuda.graph(graph):
            captured = attention(*half, order=order)
        graph.replay()
        assert torch.equal(captured, attention(*half, order=order))


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize("scale", [0.0, 1e-6])
def test_a_scale_of_nothing_gives_the_mean(scale, order, is_causal, dtype):
    q, k, v = (x.to(dtype) for x in inputs(Lq=20, Lk=20))
    options = dict(is_causal=is_causal, enable_gqa=True)
    out = attention(q, k, v, order=order, scale=scale, backend="triton", **options)
    mean = attention(q.double(), k.double(), v.double(), order=1, **options)
    assert relative(out, mean) < (1e-3 if dtype == torch.float16 else 1e-5)


@pytest.mark.parametrize("is_causal", [False, True])
def test_offsets_may_be_strided_and_of_any_integer_type(is_causal):
    q, k, v = (torch.randn(9, 2, 8, device=DEVICE) for _ in range(3))
    both_lengths = torch.tensor([[0, 0], [5, 3], [9, 9]], dtype=torch.int32, device=DEVICE)
    cu = both_lengths[:, 0]

    def packed(*x, backend):
        return attention_varlen(*x, cu, cu.long(), 5, 5, is_causal=is_causal, backend=backend)

    for fast, exact in both(packed, (q, k, v)):
        assert relative(fast, exact) < 1e-5


def test_offsets_for_different_numbers_of_sequences_are_refused_before_a_kernel_reads_them():
    x = torch.randn(9, 2, 8, device=DEVICE)
    cu = torch.tensor([0, 5, 9], dtype=torch.int32, device=DEVICE)
    with pytest.raises(ValueError, match="equally many sequences, got 2 and 1"):
        attention_varlen(x, x, x, cu, cu[::2], 9, 9, backend="triton")
    with pytest.raises(ValueError, match="1-D integer tensor"):
        attention_varlen(x, x, x, cu.float(), cu, 9, 9, backend="triton")


def test_tokens_too_far_apart_for_32_bits_are_copied():
    """Kernels walk a tile of up to 128 tokens by 32-bit steps: frames of a long video, say, may lie further apart."""
    near, far = launch.FARTHEST - 8, launch.FARTHEST
    for step, is_copied in ((near, False), (far, True)):
        dense = torch.empty(1, device="meta").as_strided((2, 3, 40, 16), (16, 32, step, 1))
        packed = torch.empty(1, device="meta").as_strided((40, 3, 16), (step, 16, 1))
        assert (launch.rows(dense) is not dense) == is_copied
        assert (launch.rows(packed) is not packed) == is_copied
    assert launch.rows(dense).stride() == (3 * 40 * 16, 40 * 16, 16, 1)
    assert 128 * launch.FARTHEST <= 2**31
