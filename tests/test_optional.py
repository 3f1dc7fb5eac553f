"""A package that is missing, or does not fit another, is told with what to do: in functions and in commands."""

import re
from importlib.metadata import PackageNotFoundError

import fresh
import pytest

from cumulant import optional

CHECKOUT = '{"url": "file:///home/me/cumulant", "dir_info": {"editable": true}}'
FOLDER = '{"url": "file:///home/me/cumulant", "dir_info": {}}'
ASK_EVERYONE = """
import cumulant
from cumulant.cli import main

for words in (["explore", "timm:vit_tiny_patch16_224"], ["diagnose", "timm:vit_tiny_patch16_224", "digits"]):
    print(main(words))
for ask in (cumulant.register_transformers, lambda: cumulant.convert.load("saved")):
    try:
        ask()
    except ImportError as error:
        print(error)
"""


@pytest.fixture
def installed_as(monkeypatch):
    """Lets pip's record of where this library came from be chosen."""

    def choose(record):
        def distribution(name):
            if record is PackageNotFoundError:
                raise PackageNotFoundError(name)
            return type("Installed", (), {"read_text": lambda self, file: record})()

        optional._given.cache_clear()
        monkeypatch.setattr(optional, "distribution", distribution)

    yield choose
    optional._given.cache_clear()


@pytest.mark.parametrize(
    ("record", "command"),
    [
        (CHECKOUT, "pip install -e '.[web]'"),
        (FOLDER, "pip install '.[web]'"),
        (None, "pip install 'cumulant[web]'"),  # from an index: pip keeps no record
        (PackageNotFoundError, "pip install -e '.[web]'"),
    ],
    ids=["an editable checkout", "a checkout", "an index", "sources on the path"],
)
def test_the_command_fits_how_the_library_was_installed(installed_as, record, command):
    installed_as(record)
    assert optional.install("web") == command


def test_a_missing_package_is_told_with_the_command(installed_as):
    installed_as(CHECKOUT)
    with (
        pytest.raises(ImportError, match=re.escape("this needs it: pip install -e '.[web]'")),
        optional.needed("this needs it", "web"),
    ):
        import no_such_package  # noqa: F401


def test_other_errors_stay_what_they_are():
    with pytest.raises(RuntimeError, match=r"^its own$"), optional.needed("this needs it", "web"):
        raise RuntimeError("its own")


def told(folder) -> list[str]:
    """What commands and functions that take models of timm and transformers say in a copy of a fresh interpreter."""
    (folder / "saved").mkdir()
    (folder / "saved" / "cumulant.json").write_text('{"library": "timm", "architecture": "vit_tiny_patch16_224"}')
    done = fresh.begun("-c", ASK_EVERYONE, folder=folder)  # which finds what lies in that folder first
    assert done.wait() == 0, done.err
    assert [line for line in done.out.splitlines() if line.isdigit()] == ["1", "1"]
    lines = (done.out + done.err).splitlines()
    return [line.removeprefix("cumulant: error: ") for line in lines if not line.isdigit()]


def module(folder, name, code, version="0.28.0"):
    (folder / f"{name}.py").write_text(code)
    record = folder / f"{name}-{version}.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")


def test_a_torchvision_that_does_not_fit_torch_is_named(tmp_path):
    module(tmp_path, "torchvision", "raise RuntimeError('operator torchvision::nms does not exist')\n")
    module(tmp_path, "timm", "import torchvision\n")
    lines = told(tmp_path)
    assert len(lines) == 4
    claim = r"but torchvision 0\.28\.0 does not fit torch \S+: reinstall it for that torch, or uninstall it"
    assert all(re.search(claim, line) for line in lines), lines


def test_timm_that_is_missing_or_without_torchvision_is_told_with_the_command(tmp_path):
    module(tmp_path, "timm", "import no_such_torchvision\n")
    found = [line for line in told(tmp_path) if "timm" in line]
    assert len(found) == 3
    assert all(line.endswith(f"needs timm and torchvision: {optional.install('timm')}") for line in found), found
