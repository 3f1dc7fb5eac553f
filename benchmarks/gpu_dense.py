"""Non-causal kernels on the GPU: correct first, then the fraction of the memory floor they reach.

    python benchmarks/gpu_dense.py            all lengths, forward and backward, orders 2 and 3   (about 1 minute)
    python benchmarks/gpu_dense.py --quick    three lengths
    python benchmarks/gpu_dense.py --peers    adds scaled_dot_product_attention (flash and cuDNN) up to length 4,096,
                                              and batch 256 at lengths 64 and 197
    python benchmarks/gpu_dense.py --long     time a token from 4,096 to 1,048,576 tokens (B 1), forward and backward,
                                              and the memory that a forward pass keeps for the backward one

bfloat16, D 64, H 12, batch so that B H L D is about 100 M, inputs with a non-zero mean, medians over replays of a CUDA
graph (inputs are several times the L2). The floor is the bytes that must move (4 tensors forward, 7 backward) over the
copy bandwidth of the same run. JSON goes to $OUT/gpu_dense.json where OUT is set. Run with PYTHONPATH=src.
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
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cumulant.bench.provenance import provenance
from cumulant.kernels.dense import host as triton_dense
from cumulant.moments import Moments

LENGTHS = (64, 197, 577, 1568, 4096, 16384, 65536, 262144)
HEADS, WIDTH, NUMBERS = 12, 64, 100e6
REP = 60  # milliseconds of a replay
GOALS = {  # forward, backward, for orders 2 and 3; at length 64 the goal is to beat the best of SDPA (--peers)
    197: ((0.75, 0.65), (0.65, 0.55)), 577: ((0.80, 0.70), (0.70, 0.60)), 1568: ((0.85, 0.75), (0.75, 0.65)),
    4096: ((0.85, 0.80), (0.75, 0.65)), 16384: ((0.88, 0.82), (0.78, 0.70)), 65536: ((0.85, 0.80), (0.75, 0.65)),
    262144: ((0.85, 0.80), (0.75, 0.65)),
}  # fmt: skip


def milliseconds(function: Callable[[], Any]) -> float:
    """Time on the GPU: replays of a CUDA graph, so that the speed of the host does not enter."""
    with torch.cuda.stream(torch.cuda.Stream()):
        return float(triton.testing.do_bench_cudagraph(function, rep=REP, return_mode="median"))


def eager_milliseconds(function: Callable[[], Any]) -> float:
    """Time as called from Python, one call after the other: for small problems, that of the host."""
    return float(triton.testing.do_bench(function, warmup=25, rep=60, return_mode="median"))


def bandwidth() -> float:
    """Bytes a second, read and written, of a device-to-device copy of 1 GiB."""
    source = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / (eager_milliseconds(lambda: target.copy_(source)) * 1e-3)


def inputs(L: int, B: int | None = None, dtype: torch.dtype = torch.bfloat16, D: int = WIDTH) -> list[Tensor]:
    """query, key, value and a gradient of the output, (B, H, L, D)."""
    B = B or max(1, round(NUMBERS / (HEADS * L * D)))
    generator = torch.Generator("cuda").manual_seed(L)
    shape = (B, HEADS, L, D)
    return [(torch.randn(shape, device="cuda", generator=generator) + m).to(dtype) for m in (0.2, 1.0, 0.5, 0.0)]


def check(quick: bool = False) -> bool:
    """Outputs and gradients against the reference in float64, of what is measured if `quick`; a line for each case."""
    right = True
    cases: list[tuple[int, int, int, torch.dtype, bool]] = [
        (4, 197, 64, torch.bfloat16, False), (60, 1568, 64, torch.bfloat16, True), (1, 5000, 64, torch.bfloat16, True),
        (1, 5000, 64, torch.float32, False), (2, 600, 80, torch.float16, True), (1, 700, 256, torch.bfloat16, True),
        (2, 64, 32, torch.bfloat16, False), (1, 2000, 128, torch.bfloat16, False),
    ]  # fmt: skip
    for (B, L, D, dtype, masked), order in itertools.product(cases[:3] if quick else cases, (2, 3)):
        *tokens, grad = inputs(L, B, dtype, D)
        weights = torch.rand(B, L, device="cuda") > 0.3 if masked else None
        ours = [x.clone().requires_grad_() for x in tokens]
        exact = [x.double().requires_grad_() for x in tokens]
        out = triton_dense.attention(*ours, weights, order, D**-0.5)
        out.backward(grad)
        state = Moments.of(*exact[1:], order=order, key_mask=None if weights is None else weights[:, None])
        expected = state.apply(exact[0], D**-0.5)
        expected.backward(grad.double())
        pairs = [(out, expected), *((x.grad, y.grad) for x, y in zip(ours, exact, strict=True))]
        errors = [float((x.detach().double() - y.detach()).norm() / y.detach().norm()) for x, y in pairs]
        fine = max(errors) < {torch.float32: 2e-5, torch.float16: 1e-3, torch.bfloat16: 6e-3}[dtype]
        right &= fine
        name = f"B {B} L {L} D {D} order {order} {str(dtype)[6:]} {'masked' if masked else ''}"
        print(f"{'PASS' if fine else 'FAIL'}  {name:48s}", *(f"{e:.1e}" for e in errors), flush=True)
    return right


def measure(L: int, order: int, speed: float, peers: bool) -> dict[str, Any]:
    q, k, v, grad = inputs(L)
    arguments = (None, None, None, L, L, order, WIDTH**-0.5, False)
    size = q.numel() * q.element_size()
    forward, backward = triton_dense.attention.forward, triton_dense.attention.backward
    _, *state = forward(q, k, v, *arguments, True)
    row: dict[str, Any] = {
        "L": L, "B": q.shape[0], "order": order,
        "forward_ms": milliseconds(lambda: forward(q, k, v, *arguments, False)),
        "forward_with_state_ms": milliseconds(lambda: forward(q, k, v, *arguments, True)),
        "backward_ms": milliseconds(lambda: backward(grad, q, k, v, *arguments[:3], *state, *arguments[3:])),
    }  # fmt: skip
    for name, tensors in (("forward", 4), ("forward_with_state", 4), ("backward", 7)):
        row[f"{name}_fraction"] = tensors * size / speed / (row[f"{name}_ms"] * 1e-3)
    leaves = [x.requires_grad_() for x in (q, k, v)]

    def both(function: Callable[..., Tensor], *more: Any) -> float:
        return milliseconds(lambda: torch.autograd.grad(function(*leaves, *more), leaves, grad))

    row["both_ms"] = both(triton_dense.attention, None, order, WIDTH**-0.5)
    call = triton_dense.attention
    row["both_eager_ms"] = eager_milliseconds(
        lambda: torch.autograd.grad(call(*leaves, None, order, WIDTH**-0.5), leaves, grad)
    )
    if peers and L <= 4096 and order == 2:
        row |= peer_times(leaves, grad)
    return row


PEERS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}


def peer_times(leaves: list[Tensor], grad: Tensor) -> dict[str, float]:
    """scaled_dot_product_attention with each backend, and the best of them: forward, and forward with backward."""
    sdpa = torch.nn.functional.scaled_dot_product_attention
    times: dict[str, float] = {}
    for name, backend in PEERS.items():
        try:
            with sdpa_kernel(backend):
                with torch.no_grad():
                    times[f"{name}_forward_ms"] = milliseconds(lambda: sdpa(*leaves))
                times[f"{name}_both_ms"] = milliseconds(lambda: torch.autograd.grad(sdpa(*leaves), leaves, grad))
        except RuntimeError as problem:  # a backend that this build or shape does not have
            print(f"skipped SDPA {name}: {str(problem).splitlines()[0]}")
    for what in ("forward", "both"):
        times[f"sdpa_{what}_ms"] = min(t for key, t in times.items() if key.endswith(f"_{what}_ms"))
    return times


def small_batches() -> list[dict[str, Any]]:
    """Batch 256 at lengths 64 and 197, beside both backends of SDPA."""
    rows = []
    for L, order in itertools.product((64, 197), (2, 3)):
        q, k, v, grad = inputs(L, 256)
        leaves = [x.requires_grad_() for x in (q, k, v)]

        def call(leaves: list[Tensor] = leaves, order: int = order) -> Tensor:
            return triton_dense.attention(*leaves, None, order, WIDTH**-0.5)

        with torch.no_grad():
            row = {"L": L, "B": 256, "order": order, "forward_ms": milliseconds(call)}
        row["both_ms"] = milliseconds(lambda call=call, x=leaves, g=grad: torch.autograd.grad(call(), x, g))  # type: ignore[misc]
        rows.append(row | peer_times(leaves, grad))
        print("  ".join(f"{key} {x:.4f}" if isinstance(x, float) else f"{key} {x}" for key, x in rows[-1].items()))
    return rows


def long_sequences() -> list[dict[str, Any]]:
    """Time a token at batch 1, and the bytes a forward pass keeps beyond its inputs and output."""
    rows = []
    for order, L in itertools.product((2, 3), (4096, 16384, 65536, 262144, 1048576)):
        q, k, v, grad = inputs(L, 1)
        leaves = [x.requires_grad_() for x in (q, k, v)]

        def call(leaves: list[Tensor] = leaves, order: int = order) -> Tensor:
            return triton_dense.attention(*leaves, None, order, WIDTH**-0.5)

        torch.cuda.synchronize()
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        out = call()
        kept = torch.cuda.memory_allocated() - before - out.numel() * out.element_size()
        peak = torch.cuda.max_memory_allocated() - before
        del out
        with torch.no_grad():
            forward = milliseconds(call)
        both = milliseconds(lambda call=call, x=leaves, g=grad: torch.autograd.grad(call(), x, g))  # type: ignore[misc]
        rows.append({"L": L, "order": order, "forward_ms": forward, "both_ms": both, "kept_bytes": kept,
                     "forward_peak_bytes": peak, "forward_ns_a_token": forward * 1e6 / L,
                     "both_ns_a_token": both * 1e6 / L})  # fmt: skip
        print(
            f"L {L:8d} order {order} forward {forward:8.4f} ms {forward * 1e6 / L:7.3f} ns a token  both {both:8.4f} "
            f"ms {both * 1e6 / L:7.3f} ns a token  kept {kept / 2**20:.2f} MiB  peak {peak / 2**20:.1f} MiB",
            flush=True,
        )
    return rows


def show(rows: list[dict[str, Any]]) -> None:
    print(f"{'L':>7} {'B':>5} o | {'fwd ms':>8} {'frac':>5} {'goal':>5} | {'+state':>6} {'frac':>5} |", end="")
    print(
        f" {'bwd ms':>8} {'frac':>5} {'goal':>5} | {'both ms':>8} {'eager':>8} | best sdpa fwd, both ms; flash, cudnn"
    )
    for r in rows:
        goal = GOALS.get(r["L"], ((0, 0), (0, 0)))[r["order"] - 2]
        keys = [f"{name}_{what}_ms" for name in ("sdpa", *PEERS) for what in ("forward", "both")]
        peer = " ".join(f"{r[key]:.3f}" for key in keys if key in r)
        if r["L"] == 64 and "sdpa_forward_ms" in r:
            peer += " (beaten)" if r["forward_ms"] < r["sdpa_forward_ms"] else " (NOT beaten)"
        print(
            f"{r['L']:7d} {r['B']:5d} {r['order']} | {r['forward_ms']:8.4f} {r['forward_fraction']:5.2f} {goal[0]:5.2f}"
            f" | {r['forward_with_state_ms']:6.3f} {r['forward_with_state_fraction']:5.2f} | {r['backward_ms']:8.4f} "
            f"{r['backward_fraction']:5.2f} {goal[1]:5.2f} | {r['both_ms']:8.4f} {r['both_eager_ms']:8.4f} | {peer}"
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--peers", action="store_true")
    parser.add_argument("--long", action="store_true")
    options = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks/gpu_dense.py needs a CUDA device")
    if not check():
        raise SystemExit("wrong results: no speed is printed")
    speed = bandwidth()
    print(f"{torch.cuda.get_device_name()}, copy {speed / 1e12:.2f} TB/s, triton {triton.__version__}")
    asked = [f"--{name}" for name in ("quick", "peers", "long") if getattr(options, name)]
    results: dict[str, Any] = provenance(" ".join(["python benchmarks/gpu_dense.py", *asked]), gpu=True)
    results |= {"copy_bytes_per_second": speed, "device": torch.cuda.get_device_name(), "triton": triton.__version__}
    chosen = (197, 1568, 16384) if options.quick else LENGTHS
    results["rows"] = [measure(L, order, speed, options.peers) for order in (2, 3) for L in chosen]
    show(results["rows"])
    if options.peers:
        results["batch_256"] = small_batches()
    if options.long:
        results["long"] = long_sequences()
    if "OUT" in os.environ:
        Path(os.environ["OUT"], "gpu_dense.json").write_text(json.dumps(results, indent=1))


if __name__ == "__main__":
    main()
