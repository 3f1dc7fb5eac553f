"""What people install: a wheel and an sdist that hold all they need and nothing else, typed, with their extras."""

import re
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import Distribution
from pathlib import Path

import fresh
import pytest

pytestmark = pytest.mark.stranger
ROOT = Path(__file__).parents[1]
pytest.importorskip("hatchling")


@pytest.fixture(scope="module")
def built(tmp_path_factory) -> Path:
    """A folder with the wheel, the sdist, and the wheel unpacked as pip does."""
    folder = tmp_path_factory.mktemp("release")
    subprocess.run(
        [sys.executable, "-m", "hatchling", "build", "-d", str(folder)], cwd=ROOT, check=True, capture_output=True
    )
    with zipfile.ZipFile(next(folder.glob("*.whl"))) as wheel:
        wheel.extractall(folder / "site")
    return folder


def test_the_wheel_holds_the_library_and_nothing_of_the_workshop(built):
    tracked = subprocess.run(["git", "ls-files", "src"], cwd=ROOT, capture_output=True, text=True).stdout.split()
    if not tracked:
        pytest.skip("not a git checkout")
    held = {path.relative_to(built / "site").as_posix() for path in (built / "site").rglob("*") if path.is_file()}
    assert {name for name in held if not name.startswith("cumulant-")} == {
        name.removeprefix("src/") for name in tracked
    }


def test_the_sdist_builds_what_the_checkout_does(built):
    with tarfile.open(next(built.glob("*.tar.gz"))) as archive:
        names = {name.split("/", 1)[1] for name in archive.getnames() if "/" in name}
    assert {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CITATION.cff", "src/cumulant/py.typed"} <= names


def test_an_installed_library_computes_and_its_command_answers(built, tmp_path):
    """Away from the checkout, from the wheel: the dependencies are those of this environment."""
    program = (
        f"import sys; sys.path.insert(0, {str(built / 'site')!r})\n"
        "import torch, cumulant, cumulant.cli\n"
        f"assert cumulant.__file__.startswith({str(built / 'site')!r})\n"
        "print(cumulant.attention(*torch.randn(3, 1, 2, 5, 4)).shape, cumulant.train.read_recipe('digits').epochs)\n"
        "sys.argv = ['cumulant', '--version']; cumulant.cli.main()"
    )
    assert "torch.Size([1, 2, 5, 4])" in fresh.python("-c", program, folder=tmp_path)


def test_every_extra_that_a_hint_names_exists(built):
    extras = set(Distribution.at(next((built / "site").glob("*.dist-info"))).metadata.get_all("Provides-Extra") or [])
    named = {
        extra.strip()
        for path in [*ROOT.glob("src/**/*.py"), *ROOT.glob("docs/**/*.md"), ROOT / "README.md"]
        for found in re.findall(r"(?:cumulant|\.)\[([a-z, ]+)\]'", path.read_text(encoding="utf-8"))
        for extra in found.split(",")
    }
    assert named
    assert named <= extras


def test_the_versions_agree(built):
    version = Distribution.at(next((built / "site").glob("*.dist-info"))).version
    assert f"version: {version}\n" in (ROOT / "CITATION.cff").read_text()
    assert re.search(rf"^## {re.escape(version)}", (ROOT / "CHANGELOG.md").read_text(), re.MULTILINE)


def test_a_users_type_checker_sees_our_types(built, tmp_path):
    """Of our modules those that the call needs; reading torch's own types would take a minute."""
    pytest.importorskip("mypy")
    (tmp_path / "mypy.ini").write_text(
        "[mypy]\nfollow_imports = skip\n[mypy-cumulant,cumulant.attention]\nfollow_imports = silent\n"
    )
    (tmp_path / "user.py").write_text(
        "import cumulant\nreveal_type(cumulant.__version__)\ncumulant.attention(1, 2, 3, order=2)\n"
        "cumulant.attention(1, 2, 3, order='two')\ncumulant.attention(1, 2)\n"
    )
    checked = subprocess.run(
        [sys.executable, "-m", "mypy", "user.py", "--cache-dir", str(tmp_path / "cache")],
        cwd=tmp_path, env={**fresh.environment(), "MYPYPATH": str(built / "site")}, capture_output=True, text=True,
    )  # fmt: skip
    lines = [line for line in checked.stdout.splitlines() if line.startswith("user.py:")]
    assert [line.split(":")[1] for line in lines] == ["2", "4", "5"], checked.stdout
    assert 'incompatible type "str"' in lines[1]
    assert "Missing positional argument" in lines[2]
