"""Whether kernels fit GPUs that are not here: the shared memory that each takes, as Triton compiles it.

    python -m tools.fits                                  heads of 64 in bfloat16 on GPUs like an RTX 4090, L4, RTX 3090
    python -m tools.fits --arch 80 --widths 64 128 --types bfloat16 float32

Public functions are called as on a GPU of that kind, with launches that only note what would be compiled. That is then
compiled as far as the layout of shared memory: no GPU is needed. Nothing is said of speed, or of registers.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import argparse
import importlib
import os
import pkgutil
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from itertools import product
from typing import Any, NamedTuple

import torch
from torch import Tensor
from tqdm import tqdm

ROOMS = {80: 166_912, 86: 101_376, 89: 101_376, 90: 232_448, 100: 232_448, 120: 101_376}  # bytes a program may have
PROCESSORS = {80: 108, 86: 82, 89: 128, 90: 132, 100: 148, 120: 170}
NAMES = {"bfloat16": "bf16", "float16": "fp16", "float32": "fp32", "int32": "i32", "int64": "i64", "bool": "i1"}
NAMES |= {"uint8": "u8", "int16": "i16", "float64": "fp64"}


class Launch(NamedTuple):
    """What Triton compiles for: types of arguments, constants by place, alignment, options of the compiler."""

    kernel: Any
    signature: dict[str, str]
    constants: dict[tuple[int], Any]
    aligned: dict[tuple[int], Any]
    options: dict[str, Any]

    @property
    def name(self) -> str:
        return f"{self.kernel.__module__.removeprefix('cumulant.kernels.')}.{self.kernel.__name__}"

    def stages(self, most: int) -> Launch:
        """The same with so many stages of its loops, at most."""
        of = self.kernel.arg_names
        constants = {i: min(x, most) if of[i[0]].endswith("STAGES") else x for i, x in self.constants.items()}
        options = {name: min(x, most) if name == "num_stages" else x for name, x in self.options.items()}
        return self._replace(constants=constants, options=options)


def noted(counts: set[str], kernel: Any, given: Any, constants: dict[str, Any]) -> Launch:
    """One launch; numbers named in `counts` are not looked at by Triton."""
    values = dict(zip(kernel.arg_names, given, strict=False)) | constants
    signature, known, aligned = {}, {}, {}
    for i, name in enumerate(kernel.arg_names):
        x = values.get(name)
        if name in constants or x is None or (name not in counts and type(x) is int and x == 1):
            signature[name], known[(i,)] = "constexpr", x
        elif isinstance(x, float):
            signature[name] = "fp32"
        else:
            pointer = isinstance(x, Tensor)
            wide = not pointer and not -(2**31) <= x < 2**31
            signature[name] = f"*{NAMES[str(x.dtype)[6:]]}" if pointer else "i64" if wide else "i32"
            if pointer or (name not in counts and x % 16 == 0):
                aligned[(i,)] = [["tt.divisibility", 16]]
    options = {name: x for name, x in constants.items() if name not in kernel.arg_names and x is not None}
    return Launch(kernel, signature, known, aligned, options)


def pretend(arch: int) -> dict[str, Launch]:
    """From here on tensors stand on a GPU of that kind, whose launches come to be in what is returned."""
    import cumulant.kernels as kernels
    from cumulant import tensors
    from cumulant.kernels import launch

    launch.INTERPRET = True  # kernels take tensors that torch has on the CPU
    for one in pkgutil.walk_packages(kernels.__path__, "cumulant.kernels."):
        importlib.import_module(one.name)
    from cumulant.kernels import products, replay, tokens

    products.INTERPRET.value = False  # ... and are compiled as for a GPU
    real: dict[Any, Any] = {
        launch.multiprocessors: lambda device: PROCESSORS[arch],
        launch.shared_memory: lambda device: ROOMS[arch],
        tensors.inverse: lambda order: order,  # what no kernel has written is no order
    }
    for module in [x for name, x in sys.modules.items() if name.startswith("cumulant.")]:
        for name, x in list(vars(module).items()):
            if callable(x) and any(x is function for function in real):
                setattr(module, name, real[x])
    found: dict[str, Launch] = {}

    def note(self, grid, *given, **constants):
        counts = {x for i, x in enumerate(self.numbers) if i not in self.special}
        one = noted(counts, self.jitted, given, constants)
        found.setdefault(repr((one.name, *one[1:])), one)

    for owner, name, other in (
        (Tensor, "is_cuda", property(lambda self: True)),
        (torch.cuda, "is_current_stream_capturing", lambda: False),
        (replay, "kind", lambda *given, **more: None),
        (tokens.Kernel, "start", lambda self, grid, fixed, *given: note(self, grid, *given, **fixed.constants)),
        (tokens.Kernel, "__getitem__", lambda self, grid: partial(note, self, grid)),
    ):
        setattr(owner, name, other)
    return found


def calls(width: int) -> Iterator[tuple[int, int, Callable[..., Tensor]]]:
    """Sequences, tokens, and a public call of them."""
    from cumulant import attention, cluster_attention
    from cumulant.cluster import Blocks, KMeans

    for order in (2, 3):
        for L in (64, 197, 1024, 5000):
            yield 1, L, partial(attention, order=order)
        yield 96, 1024, partial(attention, order=order)  # heads enough to fill a GPU
        yield 1, 3000, partial(attention, order=order, is_causal=True)
    if width > 128:
        return
    near = partial(cluster_attention, near=2)
    yield 2, 256, partial(cluster_attention, clusters=16)
    yield 2, 1024, partial(cluster_attention, clusters=16)
    yield 2, 4096, partial(near, clusters=64)
    yield 2, 4096, partial(near, clusters=(8, 8), grid=(64, 64))
    yield 2, 1025, partial(near, clusters=16, prefix=1)
    yield 2, 4096, partial(near, clusters=64, response=None)
    yield 1, 16384, partial(near, clusters=256)
    yield 2, 2048, partial(cluster_attention, clusters=KMeans(64))
    yield 2, 4096, partial(near, clusters=KMeans(64))
    yield 2, 4097, partial(near, clusters=KMeans(64), prefix=1, rank="mean")
    for options in ({"clusters": 64}, {"clusters": 64, "prefix": 4}, {"clusters": Blocks(64, keep=4, recent=1)}):
        yield 2, 4096, partial(cluster_attention, is_causal=True, **options)


def taken(one: Launch, arch: int) -> int:
    """Bytes of shared memory of a program."""
    from triton._C.libtriton import ir, nvidia, passes
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.compiler.compiler import make_backend

    target = GPUTarget("cuda", arch, 32)
    backend, source = make_backend(target), ASTSource(one.kernel, one.signature, one.constants, one.aligned)
    options, context = backend.parse_options(dict(one.options)), ir.context()
    stages: dict[str, Any] = {}
    ir.load_dialects(context)
    backend.load_dialects(context)
    functions = backend.get_codegen_implementation(options), backend.get_module_map()
    module = source.make_ir(target, options, *functions, context)
    backend.add_stages(stages, options, source.language)
    for name in ("ttir", "ttgir"):
        module = stages[name](module, {"target": target, **options.__dict__})
    steps = ir.pass_manager(module.context)
    passes.ttgpuir.add_allocate_warp_groups(steps, False)
    passes.convert.add_scf_to_cf(steps)
    passes.gluon.add_inliner(steps)
    nvidia.passes.ttgpuir.add_allocate_shared_memory_nv(steps, arch, 87 if arch >= 100 else 83)
    steps.run(module, "shared")
    return int(module.get_int_attr("ttg.shared"))


def launched(arch: int, widths: Iterable[int], types: Iterable[str]) -> dict[str, Launch]:
    """What `calls` of heads of these widths and types launch on such a GPU, forward and backward."""
    os.environ.update(TRITON_INTERPRET="0", TRITON_DEFAULT_FP_FUSION="1")
    found = pretend(arch)
    for kind, width in product(types, widths):
        for B, L, call in calls(width):
            q, k, v = (torch.empty(B, 4, L, width, dtype=getattr(torch, kind)) for _ in range(3))
            tensors = [x.normal_().requires_grad_() for x in (q, k, v)]
            out = call(*tensors)
            torch.autograd.grad(out, tensors, torch.ones_like(out))
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--arch", type=int, choices=ROOMS, default=89, help="compute capability, without the point")
    parser.add_argument("--widths", type=int, nargs="+", default=[64])
    parser.add_argument("--types", nargs="+", choices=["bfloat16", "float16", "float32"], default=["bfloat16"])
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="kernels whose names end so")
    options = parser.parse_args()
    found = launched(options.arch, options.widths, options.types)
    room, over = ROOMS[options.arch], 0
    rows = []
    chosen = [one for one in found.values() if one.name.endswith(tuple(options.only))]
    for one in tqdm(chosen, disable=None):
        size, word = taken(one, options.arch), ""
        if size > room:  # as `kernels.tokens` does it
            size, word = taken(one.stages(1), options.arch), "one stage"
        over += size > room
        sizes = {one.kernel.arg_names[i[0]]: x for i, x in one.constants.items()}
        told = " ".join(f"{x}={sizes[x]}" for x in ("BD", "BE", "M", "N") if x in sizes)
        rows.append((size, f"{size:9,d}  {one.name:34s} {told} {'DOES NOT FIT' if size > room else word}"))
    for _, row in sorted(rows, reverse=True):
        print(row)
    print(f"{len(rows)} kernels for sm_{options.arch}, of {room:,} bytes; {over} do not fit")
    return int(over > 0 or not rows)


if __name__ == "__main__":
    sys.exit(main())
