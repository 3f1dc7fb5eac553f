"""Are the gradients of torch's fused softmax right? Every backend against float64, as a ViT calls it.

    python benchmarks/gpu_softmax.py            every backend alone, then a compiled layer (about 40 s)
    python benchmarks/gpu_softmax.py --quick    tiny sizes on the CPU: that all of it runs

The baseline of every comparison here is softmax, so its gradients have to be as good as ours. q, k and v are views of
one projection in bfloat16; "negative" shifts every logit of a row far below 0, which softmax does not see; the gradient
of the output comes in the layout of the projection ("tokens") or of the heads ("heads"). Shown is the relative error of
dq, dk and dv, which should be near 0.004; that of a layer may be twice that of plain torch in bfloat16. JSON goes to
$OUT/gpu_softmax.json if OUT is set. Run with PYTHONPATH=src.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from cumulant.nn import MultiheadAttention
from cumulant.zoo.fused import fused_softmax

QUICK = "--quick" in sys.argv
DEVICE = "cpu" if QUICK else "cuda"
BACKENDS = {
    "cudnn": SDPBackend.CUDNN_ATTENTION,
    "flash": SDPBackend.FLASH_ATTENTION,
    "efficient": SDPBackend.EFFICIENT_ATTENTION,
    "math": SDPBackend.MATH,
}
LENGTHS = (17,) if QUICK else (64, 65, 128, 197, 257, 512)
BATCH = 2 if QUICK else 64
SUSPECT = 0.02  # five times the error that bfloat16 makes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="tiny sizes, on the CPU")
    parser.parse_args()
    rows: list[dict[str, Any]] = []

    def tell(row: dict[str, Any], most: float) -> None:
        rows.append(row)
        mark = "  <-- WRONG" if any(not x < most for x in row["errors"].values()) else ""
        errors = "  ".join(f"{name} {x:.1e}" for name, x in row["errors"].items())
        print(f"{row['what']:44} {errors}{mark}", flush=True)
        if "OUT" in os.environ:
            Path(os.environ["OUT"], "gpu_softmax.json").write_text(json.dumps(rows, indent=1))

    for L, size, shift, layout in itertools.product(LENGTHS, (0.5, 4.0), (0.0, -120.0), ("tokens", "heads")):
        for name in (*BACKENDS, "ours"):
            errors = alone(name, L, size, shift, layout)
            if errors is not None:
                tell({"what": f"{name} L {L} logits {size} {shift:+.0f} {layout}", "errors": errors}, SUSPECT)
    for gate, size in itertools.product((False, True), (1.0, 3.0)):
        allowed = 2 * max(layer(gate, size, "math").values())
        for how in ("eager", "compiled"):
            tell({"what": f"layer gate {gate} weights {size} {how}", "errors": layer(gate, size, how)}, allowed)


def alone(name: str, L: int, size: float, shift: float, layout: str) -> dict[str, float] | None:
    """Relative errors of dq, dk, dv of one backend; None where it does not take the case."""
    torch.manual_seed(L)
    H, D = 3, 64
    x = torch.randn(BATCH, L, 3, H, D, device=DEVICE, dtype=torch.bfloat16)
    x[:, :, :2] *= size**0.5
    if shift:  # one direction of every query and key, so that each logit moves by the shift
        x[:, :, 0, :, 0], x[:, :, 1, :, 0] = 1.0, shift * D**0.5
    grad = torch.randn(BATCH, L, H, D, device=DEVICE, dtype=torch.bfloat16).transpose(1, 2)
    grad = grad.contiguous() if layout == "heads" else grad
    exact = _gradients(x.double(), grad.double(), lambda q, k, v: F.scaled_dot_product_attention(q, k, v))
    try:
        if name == "ours":
            found = _gradients(x, grad, fused_softmax)
        else:
            with sdpa_kernel(BACKENDS[name]):
                found = _gradients(x, grad, lambda q, k, v: F.scaled_dot_product_attention(q, k, v))
    except RuntimeError:  # not built, or not for these sizes
        return None
    pairs = zip(found.unbind(2), exact.unbind(2), strict=True)
    if shift:  # dq and dk along the shifted direction are differences of large numbers in every backend
        pairs = ((a[..., 1:], b[..., 1:]) for a, b in pairs)
    return {label: _error(a, b) for label, (a, b) in zip(("dq", "dk", "dv"), pairs, strict=True)}


def _gradients(x: Tensor, grad: Tensor, attend: Any) -> Tensor:
    x = x.clone().requires_grad_()
    attend(*(part.transpose(1, 2) for part in x.unbind(2))).backward(grad)
    assert x.grad is not None
    return x.grad


def layer(gate: bool, size: float, how: str) -> dict[str, float]:
    """Relative errors of the gradients of a whole layer under autocast, against the same layer in float64."""
    torch.manual_seed(0)
    torch._dynamo.reset()
    plain = MultiheadAttention(192, 3, gate=gate).to(DEVICE)
    with torch.no_grad():
        plain.qkv.weight[: 2 * 192] *= size * 4
    exact = MultiheadAttention(192, 3, gate=gate).to(DEVICE).double()
    exact.load_state_dict(plain.state_dict())
    x, target = torch.randn(2, BATCH, 17 if QUICK else 65, 192, device=DEVICE)
    (exact(x.double()) * target.double()).sum().backward()
    run = torch.compile(plain) if how == "compiled" else plain
    backends = [SDPBackend.MATH] if how == "math" else list(BACKENDS.values())
    with sdpa_kernel(backends), torch.autocast(DEVICE, torch.bfloat16):
        out = run(x)
    (out.float() * target).sum().backward()
    theirs = dict(exact.named_parameters())
    return {
        name.removesuffix(".weight"): _error(parameter.grad, theirs[name].grad)
        for name, parameter in plain.named_parameters()
        if name.endswith("weight")
    }


def _error(a: Tensor | None, b: Tensor | None) -> float:
    if a is None or b is None:
        raise ValueError("no gradient")
    return float((a.double() - b).norm() / b.norm())


if __name__ == "__main__":
    main()
