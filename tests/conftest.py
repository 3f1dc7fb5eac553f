import importlib.util
import os

# Before torch is imported: bf16 matmuls of some CPUs die with SIGILL under oneDNN's newest instruction set, and
# Triton decides at import whether it interprets.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch

try:
    from hypothesis import settings
except ImportError:  # a GPU machine may run `pytest -m gpu` without it
    settings = None

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

torch.set_num_threads(1)  # pytest-xdist uses the cores
if settings is not None:
    settings.register_profile("default", deadline=None, max_examples=30, derandomize=True)
    settings.load_profile("default")


# timm and transformers import torchvision where it is there; of its compiled operators they need only two schemas.
_SCHEMAS = (
    "nms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
    "qnms(Tensor dets, Tensor scores, float iou_threshold) -> Tensor",
)
_kept = []  # a library lives as long as something holds it


def _has_nms() -> bool:
    try:
        import torchvision  # noqa: F401
    except RuntimeError:  # the general wheel of torchvision has no compiled operators
        return False
    return True


if importlib.util.find_spec("torchvision") is not None and not _has_nms():
    library = torch.library.Library("torchvision", "DEF")
    for schema in _SCHEMAS:
        library.define(schema)
    _kept.append(library)


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if not torch.cuda.is_available():
        for item in items:
            if item.get_closest_marker("gpu"):
                item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
