"""Causal kernels on the GPU: correct first, then time, fraction of the memory floor and the share of each kernel.

    python benchmarks/gpu_causal.py            all lengths, forward and backward, orders 2 and 3   (about 1 minute)
    python benchmarks/gpu_causal.py --quick    L 16,384 only, and only what it measures is checked

bfloat16, D 64, H 12, batch so that B H L D is about 100 M, inputs with a non-zero mean, medians by CUDA events with a
cold L2. The floor is the bytes that must move (4 tensors forward, 7 backward) over the copy bandwidth of the same run;
the bytes that these kernels do move are 6 and 11 tensors (20 at order 3, backward). JSON goes to $OUT/gpu_causal.json
where OUT is set. Run with PYTHONPATH=src.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import triton
from gpu_dense import WIDTH, bandwidth, inputs, milliseconds
from torch import Tensor

from cumulant.bench.provenance import provenance
from cumulant.causal import causal_attention
from cumulant.kernels.batch import Batch, batch_of
from cumulant.kernels.causal import host as triton_causal
from cumulant.kernels.causal import plan as causal_plan

LENGTHS = (197, 1568, 4096, 16384, 65536, 262144, 1048576)
GOAL = 1.2  # ms, forward and backward, order 2, B 8, L 16,384: 2.5 times the speed of the best peer
# That each kernel moves; at order 3 `query_gradients` writes and `key_gradients` reads two more.
TENSORS = {"part_sums": 2, "outputs": 4, "query_gradients": 5, "row_sums": 4, "key_gradients": 6}


def reference(q: Tensor, k: Tensor, v: Tensor, weights: Tensor | None, order: int, scale: float) -> Tensor:
    H = k.shape[1]
    out = causal_attention(
        q.unflatten(1, (H, q.shape[1] // H)), k, v, order=order, full=False, scale=scale,
        weights=None if weights is None else weights.unsqueeze(1),
    )  # fmt: skip
    return out.flatten(1, 2)


def check(quick: bool) -> bool:
    """Outputs and gradients against the reference in float64, of the family that is measured if `quick`."""
    right = True
    cases = [
        # B, H, G, L, D, E, dtype, masked, shift of keys and values
        (1, 12, 1, 5000, 64, 64, torch.bfloat16, False, 1.0), (50, 12, 1, 700, 64, 64, torch.bfloat16, False, 1.0),
        (1, 2, 2, 3000, 64, 64, torch.bfloat16, True, 1.0), (1, 3, 1, 2049, 64, 64, torch.bfloat16, False, 100.0),
        (1, 2, 1, 1500, 64, 64, torch.float32, True, 3.0), (2, 2, 1, 1500, 80, 40, torch.float16, False, 1.0),
        (1, 2, 1, 1200, 128, 128, torch.bfloat16, False, 1.0), (1, 1, 1, 900, 256, 256, torch.bfloat16, False, 1.0),
    ]  # fmt: skip
    cases = cases[:2] if quick else cases
    for (B, H, G, L, D, E, dtype, masked, shift), order in itertools.product(cases, (2, 3)):
        if dtype == torch.float16 and order == 3:  # kept from the kernels, see launch.obstacle
            continue
        generator = torch.Generator("cuda").manual_seed(L)

        def tokens(*shape: int, mean: float = 0.0, dtype=dtype, generator=generator) -> Tensor:  # type: ignore[no-untyped-def]
            return (torch.randn(shape, device="cuda", generator=generator) + mean).to(dtype)

        parts = (tokens(B, H * G, L, D, mean=0.2), tokens(B, H, L, D, mean=shift), tokens(B, H, L, E, mean=0.5 * shift))
        grad = tokens(B, H * G, L, E)
        weights = torch.rand(B, L, device="cuda", generator=generator) > 0.3 if masked else None
        ours = [x.clone().requires_grad_() for x in parts]
        exact = [x.double().requires_grad_() for x in parts]
        out = triton_causal.attention(*ours, weights, order, D**-0.5)
        out.backward(grad)
        expected = reference(*exact, weights, order, D**-0.5)
        expected.backward(grad.double())
        pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(ours, exact, strict=True))]
        errors = [float((x.double() - y).norm() / y.norm()) for x, y in pairs]
        fine = max(errors) < {torch.float32: 2e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
        right &= fine
        name = f"B {B} H {H}x{G} L {L} D {D} E {E} order {order} {str(dtype)[6:]} {'masked' if masked else ''}"
        print(f"{'PASS' if fine else 'FAIL'}  {name:60s}", *(f"{e:.1e}" for e in errors), flush=True)
    return right


def batch_for(order: int, q: Tensor, k: Tensor, v: Tensor) -> Batch:
    return batch_of(q, k, v, None, order, WIDTH**-0.5)


def kernel_times(function: Callable[[], Any], runs: int = 5) -> dict[str, float]:
    """Milliseconds of each Triton kernel in one call, by the profiler."""
    function()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(runs):
            function()
        torch.cuda.synchronize()
    names = {*TENSORS, "prefixes", "suffixes"}
    return {e.key: e.device_time_total / runs / 1e3 for e in profile.key_averages() if e.key in names}


def measure(L: int, order: int, speed: float) -> dict[str, Any]:
    q, k, v, grad = inputs(L)
    size = q.numel() * q.element_size()
    forward, backward, batch = triton_causal.run_forward, triton_causal.run_backward, batch_for(order, q, k, v)
    _, *kept = forward(batch, True)
    span, splits = causal_plan.cut(q.shape[0] * q.shape[1], L, q.device)
    row: dict[str, Any] = {
        "L": L, "B": q.shape[0], "order": order, "span": span, "splits": splits,
        "forward_ms": milliseconds(lambda: forward(batch, True)),
        "backward_ms": milliseconds(lambda: backward(batch, grad, *kept)),
    }  # fmt: skip
    for name, tensors in (("forward", 4), ("backward", 7)):
        row[f"{name}_fraction"] = tensors * size / speed / (row[f"{name}_ms"] * 1e-3)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def both(function: Callable[..., Tensor], *rest: Any) -> float:
        return milliseconds(lambda: torch.autograd.grad(function(*leaves, *rest), leaves, grad))

    row["both_ms"] = both(triton_causal.attention, None, order, WIDTH**-0.5)
    with torch.no_grad():
        times = kernel_times(lambda: (forward(batch, True), backward(batch, grad, *kept)))
    row["kernels"] = {
        name: {"ms": ms, "fraction": TENSORS.get(name, 0) * size / speed / (ms * 1e-3)} for name, ms in times.items()
    }
    if L == 16384 and order == 2:
        row["peer_both_ms"] = peer(leaves, grad)
    return row


def peer(leaves: list[Tensor], grad: Tensor) -> float | None:
    """flash-linear-attention's chunked linear attention, where it is installed; its layout is (B, L, H, D)."""
    try:
        from fla.ops.linear_attn import chunk_linear_attn
    except ImportError:
        return None
    turned = [x.detach().transpose(1, 2).contiguous().requires_grad_() for x in leaves]
    turned_grad = grad.transpose(1, 2).contiguous()

    def call() -> Any:
        out = chunk_linear_attn(*turned, scale=WIDTH**-0.5, normalize=False)
        return torch.autograd.grad(out[0] if isinstance(out, tuple) else out, turned, turned_grad)

    return milliseconds(call)


HEADER = f"{'L':>8} {'B':>4} o {'span':>5} | {'fwd ms':>8} {'frac':>5} | {'bwd ms':>8} {'frac':>5} | {'both ms':>8} |"


def show(r: dict[str, Any]) -> None:
    kernels = "  ".join(f"{name} {t['ms']:.3f} ({t['fraction']:.2f})" for name, t in r["kernels"].items())
    print(
        f"{r['L']:8d} {r['B']:4d} {r['order']} {r['span']:5d} | {r['forward_ms']:8.4f} {r['forward_fraction']:5.2f}"
        f" | {r['backward_ms']:8.4f} {r['backward_fraction']:5.2f} | {r['both_ms']:8.4f} | {kernels}",
        flush=True,
    )
    if r["L"] == 16384 and r["order"] == 2:
        print(f"         goal {GOAL} ms in all; peer {r['peer_both_ms']} ms", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--orders", nargs="*", type=int, default=[2, 3])
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu_causal.py needs a CUDA device")
    if not check(options.quick):
        raise SystemExit("wrong results: no speed is printed")
    speed = bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {speed / 1e12:.2f} TB/s, triton {triton.__version__}")
    asked = " --quick" if options.quick else ""
    results: dict[str, Any] = provenance(f"python benchmarks/gpu_causal.py{asked}", gpu=True)
    results |= {"copy_bytes_per_second": speed, "device": torch.cuda.get_device_name(), "triton": triton.__version__}

    def keep() -> None:
        if "OUT" in os.environ:
            Path(os.environ["OUT"], "gpu_causal.json").write_text(json.dumps(results, indent=1))

    print(HEADER)
    results["rows"] = []
    for order, L in itertools.product(options.orders, (16384,) if options.quick else LENGTHS):
        results["rows"].append(measure(L, order, speed))
        show(results["rows"][-1])
        keep()


if __name__ == "__main__":
    main()
