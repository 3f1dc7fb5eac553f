"""One token of a stream on a GPU: the kernel that reads a state and writes it where it was."""

from __future__ import annotations

from pathlib import Path

import fresh
import pytest
import torch

import cumulant
from cumulant.streaming import Stream

COMPILED = """
import re
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
from cumulant.kernels.dense.decode import step_kernel

numbers = dict(ORDER=3, H=12, G=1, D=64, E=64, BD=64, BE=64)
kinds = dict.fromkeys(("q", "k", "v", "out", "W", "S", "P", "T"), "*fp32") | dict.fromkeys(numbers, "constexpr")
kinds |= {"k_mean": "*fp64", "v_mean": "*fp64", "scale": "fp32"}
names = step_kernel.arg_names
source = ASTSource(
    step_kernel, {x: kinds.get(x, "i32") for x in names}, {(names.index(x),): n for x, n in numbers.items()}, {}
)
code = compile(source, target=GPUTarget("cuda", 90, 32)).asm["ptx"]
found = re.findall(r"ld\\.global|st\\.global|bar\\.sync", code)
print("".join("L" if "ld" in x else "S" if "st" in x else "|" for x in found))
"""


def test_no_warp_writes_the_state_before_all_have_read_it(tmp_path: Path) -> None:
    """Means and weight of a head are read by all four warps: what the quickest writes must not reach the others."""
    pytest.importorskip("triton")
    order = fresh.forked("-c", COMPILED, folder=tmp_path).strip().splitlines()[-1]
    assert "S" in order
    assert order[: order.index("S")].endswith("|"), order


@pytest.mark.gpu
@pytest.mark.parametrize("order", [2, 3])
@pytest.mark.parametrize(("dtype", "bound"), [(torch.float32, 1e-6), (torch.bfloat16, 3e-3)])
def test_a_stream_on_a_gpu_answers_as_causal_attention(dtype: torch.dtype, bound: float, order: int) -> None:
    for seed in range(5):
        generator = torch.Generator("cuda").manual_seed(seed)
        q, k, v = (
            (torch.randn(8, 12, 40, 64, device="cuda", generator=generator) + mean).to(dtype) for mean in (0, 3, 0)
        )
        exact = cumulant.attention(*(x.double() for x in (q, k, v)), order=order, is_causal=True, backend="reference")
        stream = Stream(order=order)
        found = torch.cat([stream.step(*(x[:, :, t : t + 1] for x in (q, k, v))) for t in range(40)], 2)
        assert (found.double() - exact).norm() / exact.norm() < bound
