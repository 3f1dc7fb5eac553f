"""After set-up: import what was installed, each in a fresh interpreter; what does not import is uninstalled again.

    python tools/check_environment.py          # in the environment that is to be checked; `make install` runs it

A package that is there but broken is worse than none: transformers and timm import torchvision wherever it is found,
and fail with it. Without it transformers works, and what needs timm says what to install.
"""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version

CHECKS = {  # torchvision first: timm cannot do without it, transformers only where it is broken
    "torchvision": "import torchvision",
    "timm": "import timm",
    "transformers": "from transformers import BertModel, ViTModel",
    "scikit-learn": "import sklearn.datasets",
    "pyarrow": "import pyarrow.parquet",
    "av": "import av",
    "onnxruntime": "import onnxruntime",
}


def main() -> int:
    for package, statement in CHECKS.items():
        if (known := installed(package)) is None:
            continue
        tried = subprocess.run([sys.executable, "-c", statement], capture_output=True, text=True)
        if tried.returncode == 0:
            continue
        why = (tried.stderr.strip().splitlines() or [f"exit status {tried.returncode}"])[-1]
        beside = f"beside torch {installed('torch')}"
        print(f"{package} {known} does not import {beside} ({why}): it is taken out again", flush=True)
        take_out(package)
    return 0


def take_out(package: str) -> None:
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check"]
    subprocess.run([*pip, "uninstall", "--yes", "--quiet", package], check=True)


def installed(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


if __name__ == "__main__":
    sys.exit(main())
