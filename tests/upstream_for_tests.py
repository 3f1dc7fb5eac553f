"""The tests that timm and transformers ship in their source packages, of the versions that are here: `make test`.

    PYTHONPATH=PLACE_OF_TIMM python tests/upstream_for_tests.py

tests/conversion/test_upstream.py runs some of them with our attention. They lie in the environment as PACKAGE/tests,
and in `site` what they need.
"""

import shutil
import subprocess
import sys
import tarfile
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

FOLDER = Path(sys.prefix) / "upstream-for-tests"
PIP = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check"]


def fetch(package: str, number: str, place: Path) -> None:
    words = [*PIP, "download", "--no-deps", "--no-binary", ":all:", "--dest", str(place), f"{package}=={number}"]
    subprocess.run(words, check=True)
    file = next(place.glob(f"{package}-*.tar.gz"))
    with tarfile.open(file) as tar:
        inside = f"{package}-{number}/tests/"
        for member in tar.getmembers():
            if member.isfile() and member.name.startswith(inside) and member.name.count("/") == 2:
                member.name = member.name.removeprefix(f"{package}-{number}/")
                tar.extract(member, place / package, filter="data")
    file.unlink()


def main() -> int:
    if FOLDER.is_dir():
        return 0
    made = FOLDER.with_name(FOLDER.name + ".part")
    shutil.rmtree(made, ignore_errors=True)  # of a call that was stopped
    made.mkdir()
    try:
        for package in ("timm", "transformers"):
            fetch(package, version(package), made)
        subprocess.run([*PIP, "install", "--no-deps", "--target", str(made / "site"), "parameterized"], check=True)
    except (PackageNotFoundError, StopIteration, subprocess.CalledProcessError):
        print("source packages cannot be had here: upstream's own tests will be skipped")
        shutil.rmtree(made)
        return 0
    made.rename(FOLDER)
    return 0


if __name__ == "__main__":
    sys.exit(main())
