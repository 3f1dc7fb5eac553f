"""After set-up nothing is left that is there and does not import: others import it where they find it, and fail too."""

import shutil

from tools import check_environment


def package(folder, name, code):
    (folder / f"{name}.py").write_text(code)
    record = folder / f"{name}-1.0.dist-info"
    record.mkdir()
    (record / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")


def test_what_does_not_import_is_taken_out_with_a_line_and_what_then_lacks_it_too(tmp_path, monkeypatch, capsys):
    package(tmp_path, "broken_vision", "raise RuntimeError('operator does not exist')\n")
    package(tmp_path, "needs_vision", "import broken_vision\n")
    package(tmp_path, "works", "")

    def take_out(name):
        (tmp_path / f"{name}.py").unlink()
        shutil.rmtree(tmp_path / f"{name}-1.0.dist-info")

    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    names = ("broken_vision", "needs_vision", "works", "was_never_installed")
    monkeypatch.setattr(check_environment, "CHECKS", {name: f"import {name}" for name in names})
    monkeypatch.setattr(check_environment, "take_out", take_out)
    assert check_environment.main() == 0
    first, second = capsys.readouterr().out.splitlines()
    assert first.startswith("broken_vision 1.0 does not import beside torch ")
    assert first.endswith("(RuntimeError: operator does not exist): it is taken out again")
    assert "needs_vision 1.0 does not import" in second
    assert "No module named 'broken_vision'" in second
    assert (tmp_path / "works.py").exists()
