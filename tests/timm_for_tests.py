"""A place with timm, torchvision and diffusers for tests of them, where torchvision does not fit torch: `make test`.

    python tests/timm_for_tests.py FOLDER
    PYTHONPATH=FOLDER python -m pytest -m timm

Such a torchvision has no compiled operators, and timm needs none of them, only the names of two while it is imported.
The folder has both packages with these names; nothing is changed in the environment that all else is tested in.
"""

import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

PACKAGES = ("timm", "torchvision==0.28.0", "diffusers")
NAMES = """import torch

_names = torch.library.Library("torchvision", "DEF")
for _name in ("nms", "qnms"):
    _names.define(f"{_name}(Tensor dets, Tensor scores, float iou_threshold) -> Tensor")
"""


def main(folder: Path) -> int:
    if find_spec("timm") is not None:  # the environment has it: all tests are one session
        shutil.rmtree(folder, ignore_errors=True)
        return 0
    if folder.is_dir():
        return 0
    made = folder.with_name(folder.name + ".part")
    shutil.rmtree(made, ignore_errors=True)  # of a call that was stopped
    pip = [sys.executable, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", "--no-deps"]
    if subprocess.run([*pip, "--target", str(made), *PACKAGES]).returncode != 0:
        print("timm cannot be had here: the tests of its models will be skipped")
        shutil.rmtree(made, ignore_errors=True)
        return 0
    start = made / "torchvision" / "__init__.py"
    start.write_text(NAMES + start.read_text())
    made.rename(folder)
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
