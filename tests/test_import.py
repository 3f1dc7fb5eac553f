"""`import cumulant` is quick: it does not bring in what only some of its users need."""

import subprocess
import sys

HEAVY = ("torch._dynamo", "triton", "transformers", "timm", "matplotlib", "PIL", "sklearn", "kornia", "fastapi")


def test_importing_the_library_imports_no_compiler_and_no_optional_package():
    code = f"import sys, cumulant; print(*(name for name in {HEAVY} if name in sys.modules))"
    environment = {"PATH": "", "CUDA_VISIBLE_DEVICES": ""}  # without a GPU and without Triton's interpreter
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert found.stdout.split() == []
