"""Products read what is meant, and while it is there: judged by what Triton compiles for a H200."""

from __future__ import annotations

import re
from pathlib import Path

import fresh
import pytest

from tools.descriptors import lost, strays

ROOT = Path(__file__).parents[2]
COMPILED = """
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource, compile
import torch
from cumulant.kernels.dense import backward, forward
from cumulant.kernels.dense.plan import FUSED, Plan
from cumulant.kernels.fold import chain
from cumulant.kernels.fold import forward as fold
from cumulant.kernels.fold import host

FLOATS = {"vectors", "partial_matrices", "partial_sums", "grad_vectors", "products", "sums", "dWq", "dWk", "dbq"}
TOKENS = {"q", "k", "v", "o", "g", "dq", "dk", "dv", "x", "matrices", "dR", "A", "qkv", "S", "dS", "dA"}
WIDTHS = {"C", "K", "D", "wide"}
NONE = {"w", "offsets_q", "offsets_k"}

def show(name, kernel, constants):
    kernel = getattr(kernel, "jitted", kernel)
    options = {x: constants.pop(x) for x in ("num_warps", "maxnreg") if constants.get(x)}
    constants = {x: y for x, y in constants.items() if x in kernel.arg_names} | {x: None for x in NONE}
    known = dict.fromkeys(TOKENS, "*bf16") | dict.fromkeys(FLOATS, "*fp32") | {"scale": "fp32"}
    kinds = {x: "constexpr" if x in constants else known.get(x, "i32") for x in kernel.arg_names}
    places = {x: (i,) for i, x in enumerate(kernel.arg_names)}
    even = [x for x in kinds if kinds[x][0] == "*" or (kinds[x] == "i32" and x in WIDTHS or x[-2:] in ("_b", "_t"))]
    aligned = {places[x]: [["tt.divisibility", 16]] for x in even}
    source = ASTSource(kernel, kinds, {places[x]: y for x, y in constants.items() if x in places}, aligned)
    print("KERNEL", name)
    print(compile(source, target=GPUTarget("cuda", 90, 32), options=options).asm["ttgir"])

for order, length in ((2, 16384), (3, 16384), (3, 1568), (3, 64)):
    plan = Plan(order, False, False, 8, 12, 1, 64, 64, 64, 64, length, length, torch.bfloat16, "ieee", 132)
    rest = {"UNIT": 8, "WEIGHTED": False, "KEEP": True}
    if length > 2000:
        config = plan.config("backward_queries", length)
        show(f"backward_queries {order}", backward.backward_queries, rest | plan.constants(config, "ROWS"))
        config = plan.config("partial_moments", length)
        show(f"partial_moments {order}", forward.partial_moments, rest | plan.constants(config, "ROWS"))
    else:
        config = plan.config("fused_backward", length)
        show(f"fused_backward {order}", backward.fused_backward, rest | plan.constants(config, *FUSED))
for stages in (host.STAGES, host.STAGES + 1):
    show("sums_kernel", fold.sums_kernel, dict(BM=128, N=host.TOKENS, STAGES=stages, EVEN=True, num_warps=host.WARPS))
show("weights_kernel", chain.weights_kernel, dict(BIAS=True, BD=64, W=128, num_warps=4))
"""

WALKS = """
import sys
sys.path.insert(0, sys.argv[1])
import torch
from tools.astray import assembly
from tools.fits import pretend

found = pretend(90)
from cumulant import attention, cluster_attention

for heads, Lq, Lk in ((2, 197, 197), (8, 1000, 777)):  # the second with masks, and heads that share keys
    q = torch.randn(1, heads, Lq, 64, dtype=torch.bfloat16, requires_grad=True)
    k, v = (torch.randn(1, 2, Lk, 64, dtype=torch.bfloat16, requires_grad=True) for _ in range(2))
    out = attention(q, k, v, order=3, is_causal=True, enable_gqa=True)
    torch.autograd.grad(out, (q, k, v), torch.ones_like(out))
q, k, v = (torch.randn(1, 2, 4096, 96, dtype=torch.bfloat16, requires_grad=True) for _ in range(3))
attention(q, k, v, order=3, is_causal=True)  # values in 64 and 32 columns
cluster_attention(q, k, v, clusters=(8, 8), grid=(64, 64), near=4)  # near tokens in 64 and 32 columns
for one in found.values():
    if one.name in (
        "causal.forward.outputs", "causal.third.query_gradients", "causal.third.key_gradients", "cluster.forward.attend"
    ):
        text, shared = assembly(one)
        print("KERNEL", one.name, one.options["num_stages"], shared)
        print(text)
"""


def test_products_read_where_their_operands_are(tmp_path: Path) -> None:
    """The ptxas of Triton 3.6 has lost the address of an operand that took the place of one with longer rows."""
    pytest.importorskip("triton")
    text = fresh.forked("-c", WALKS, str(ROOT), folder=tmp_path)
    kernels = text.split("KERNEL ")[1:]
    assert len(kernels) == 10
    assert all("HGMMA" in kernel for kernel in kernels)
    for kernel in kernels:
        name, stages, shared = kernel.split("\n")[0].split()
        assert not strays(kernel), name
        if stages == "1" and name.startswith("causal"):  # then tiles have their places; others name stages by loop
            assert not lost(kernel, int(shared)), name


def test_no_copy_lands_where_a_product_reads(tmp_path: Path) -> None:
    """A tile that products read in place needs as many places as the loop's other tiles, or products that are done."""
    pytest.importorskip("triton")
    text = fresh.forked("-c", COMPILED, folder=tmp_path)
    kernels = text.split("KERNEL ")[1:]
    assert len(kernels) == 9
    assert all("warp_group_dot" in kernel for kernel in kernels)
    for kernel in kernels:
        for loop in loops(kernel.splitlines()):
            places, read, under_way = of_loop(loop)
            short = {x for x in read if places[x] < max(places.values())}
            everywhere = len(set(places.values())) == 1 and read & in_registers(loop)
            assert not (under_way and (short or everywhere)), (kernel.split("\n")[0], places, short)


def loops(lines: list[str]) -> list[list[str]]:
    """The lines of each loop, inner loops within their outer ones."""
    found = []
    for i, line in enumerate(lines):
        if "scf.for" in line:
            closing = " " * (len(line) - len(line.lstrip())) + "}"
            found.append(lines[i : next(j for j in range(i + 1, len(lines)) if lines[j].startswith(closing))])
    return found


def sources(loop: list[str]) -> dict[str, tuple[str, int]]:
    """What each tile of the loop is one place of, and of how many."""
    found: dict[str, tuple[str, int]] = {}
    for line in loop:
        index = re.search(r"(%[\w#]+) = ttg.memdesc_index (%[\w#]+)\[.*?: !ttg.memdesc<(\d+)x", line)
        if index:
            found[index[1]] = index[2], int(index[3])
        view = re.search(r"(%[\w#]+) = ttg.memdesc_(?:trans|subslice|reshape) (%[\w#]+)", line)
        if view and view[2] in found:
            found[view[1]] = found[view[2]]
    return found


def of_loop(loop: list[str]) -> tuple[dict[str, int], set[str], bool]:
    """Places of each buffer, the buffers that products read in place, and whether products outlast a turn."""
    tiles = sources(loop)
    products = [
        re.findall(r"%[\w#]+", line.split("warp_group_dot ")[1])[:2] for line in loop if "warp_group_dot " in line
    ]
    read = {tiles[x][0] for pair in products for x in pair if x in tiles}
    waits = [int(x) for line in loop for x in re.findall(r"warp_group_dot_wait.*pendings = (\d+)", line)]
    return dict(tiles.values()), read, bool(waits) and waits[-1] > 0


def in_registers(loop: list[str]) -> set[str]:
    tiles = sources(loop)
    loads = (re.search(r"ttg.local_load (%[\w#]+)", line) for line in loop)
    return {tiles[x[1]][0] for x in loads if x and x[1] in tiles}
