"""Whether products of compiled kernels read where their operands are, on an H100 or H200 that is not here.

    python -m tools.astray                                        heads of 64 and 96 in bfloat16, about five minutes
    PYTHONPATH=TRITON python -m tools.astray --widths 80 128      by another Triton, unpacked in that folder

The assembler of Triton 3.6 (ptxas 12.8) can lose the address of a tile that takes the place of one with longer rows:
the product then reads at an argument of the kernel, which is wrong or an illegal memory access, and which no
interpreter shows. Every kernel that public functions launch (`tools.fits`) is compiled, and its registers are followed
(`tools.descriptors`). Exit status 1 where a product reads astray.
"""

# mypy: allow-untyped-defs
from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from pathlib import Path

from tqdm import tqdm

from tools.descriptors import descriptors, strays
from tools.fits import Launch, launched

ARCH = 90  # whose products have descriptors


def assembly(one: Launch) -> tuple[str, int]:
    """The machine code of a launch, as text, and the shared memory that it takes."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource, compile
    from triton.tools.disasm import path_to_cuobjdump

    source = ASTSource(one.kernel, one.signature, one.constants, one.aligned)
    done = compile(source, target=GPUTarget("cuda", ARCH, 32), options=dict(one.options))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "kernel.cubin"
        path.write_bytes(done.asm["cubin"])  # asm["sass"] of Triton 3.6 ends after 4,096 instructions
        return subprocess.check_output([path_to_cuobjdump(), "-sass", str(path)], text=True), done.metadata.shared


def main() -> int:
    import triton

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--widths", type=int, nargs="+", default=[64, 96])
    parser.add_argument("--types", nargs="+", choices=["bfloat16", "float16"], default=["bfloat16"])
    parser.add_argument("--only", nargs="+", default=[""], metavar="NAME", help="kernels whose names end so")
    options = parser.parse_args()
    found = launched(ARCH, options.widths, options.types)
    chosen = [one for one in found.values() if one.name.endswith(tuple(options.only))]
    bad = 0
    for one in tqdm(chosen, disable=None):
        text, _ = assembly(one)
        wrong = strays(text)
        if wrong:
            bad += 1
            told = " ".join(f"{one.kernel.arg_names[i[0]]}={x}" for i, x in one.constants.items() if type(x) is int)
            tqdm.write(f"{one.name}: {wrong} of {len(descriptors(text))} products read astray ({told})")
    print(f"{len(chosen)} kernels by Triton {triton.__version__}, {bad} with products that read astray")
    return int(bad > 0 or not chosen)


if __name__ == "__main__":
    sys.exit(main())
