import gc
import importlib.util
import itertools
import os
import re
import shutil
from pathlib import Path

# Before torch is imported: bf16 matmuls of some CPUs die with SIGILL under oneDNN's newest instruction set, and
# Triton decides at import whether it interprets.
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")

import pytest
import torch
from quick_interpreter import quicken

try:
    from hypothesis import settings
except ImportError:  # a GPU machine may run `pytest -m gpu` without it
    settings = None

if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    quicken()

torch.set_num_threads(1)  # pytest-xdist uses the cores
if settings is not None:
    settings.register_profile("default", deadline=None, max_examples=30, derandomize=True)
    settings.load_profile("default")


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


@pytest.fixture(autouse=True)
def even_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    """To `convert` every pass takes as long as any other: no test is decided by time."""
    monkeypatch.setattr("cumulant.conversion.paying.clock", itertools.count().__next__)


@pytest.fixture(scope="session")
def browser():
    """One for all tests of pages: playwright cannot be started twice in a process."""
    api = pytest.importorskip("playwright.sync_api")
    chromium = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if chromium is None:
        pytest.skip("needs a chromium on this machine")
    api.expect.set_options(timeout=20_000)  # a chart takes seconds where cores are shared
    with api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        yield browser
        browser.close()


def pytest_configure() -> None:
    if importlib.util.find_spec("torchvision") is not None:
        try:
            importlib.import_module("torchvision")
        except RuntimeError as error:  # transformers and timm fail with it
            pytest.exit(f"torchvision does not fit torch ({error}): run `python tools/check_environment.py` first", 1)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """`pytest -m gpu` and `-m timm` open only files that have such tests: a GPU machine need not have what all others
    import, and to import it takes longer than the tests of timm."""
    if collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    asked = re.findall(r"(?<!not )\b(gpu|timm|stranger)\b", config.option.markexpr)
    text = collection_path.read_text() if asked else ""
    return any(f"mark.{name}" not in text for name in asked) or None


def pytest_collection_finish() -> None:
    """All that is there now stays to the end: without this each collection of garbage walks through it for a second,
    and studies ask for one after every run."""
    gc.collect()
    gc.freeze()


def pytest_sessionfinish() -> None:
    gc.unfreeze()  # or libraries complain of what they still hold


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    lacking = {}
    if not torch.cuda.is_available():
        lacking["gpu"] = pytest.mark.skip(reason="needs a CUDA device")
    if importlib.util.find_spec("timm") is None:
        lacking["timm"] = pytest.mark.skip(reason="timm is not in this environment: `make test` has a place for it")
    for item in items:
        for name, skip in lacking.items():
            if item.get_closest_marker(name):
                item.add_marker(skip)
