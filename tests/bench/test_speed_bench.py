import json
import sys

import pytest
import torch

from cumulant.bench import speed
from cumulant.cli import main


def test_bench_speed_writes_what_it_printed(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)  # compiling is torch's business
    assert main(["bench", "speed", "--lengths", "40", "--heads", "2", "--dim", "8", "--out", str(tmp_path)]) == 0
    result = json.loads((tmp_path / "speed.json").read_text())
    rows = {row["name"]: row for row in result["rows"]}
    assert {"cumulant2", "cumulant3", "softmax, flash"} <= set(rows)
    for row in rows.values():
        assert not row["note"], row
        assert set(row["milliseconds"]) == {"forward", "backward", "both"}
        assert bool(row["floor_share"]) == ("softmax" not in row["name"])
    printed = capsys.readouterr().out
    assert all(name in printed for name in rows)
    assert "<svg" in (tmp_path / "speed.svg").read_text()
    assert result["command"] == "cumulant bench speed --lengths 40 --heads 2 --dim 8"


def test_a_wrong_result_gets_no_time(monkeypatch, tmp_path):
    settings = speed.Speed(lengths=(40,), heads=2, dim=8, out=tmp_path)
    row = speed.measure(
        "cumulant2", lambda q, k, v: 1.1 * v, False, settings, 1, 40, "cpu", torch.float32, 1e9
    )  # fmt: skip
    assert "off by" in row.note
    assert not row.milliseconds


def test_a_contender_that_fails_is_reported_and_not_fatal(tmp_path):
    def broken(q, k, v):
        raise RuntimeError("no kernel for this")

    settings = speed.Speed(lengths=(40,), heads=2, dim=8, out=tmp_path)
    row = speed.measure("softmax, flash", broken, True, settings, 1, 40, "cpu", torch.float32, 1e9)
    assert row.note == "did not run: no kernel for this"

    def silent(q, k, v):
        raise NotImplementedError

    row = speed.measure("softmax, flash", silent, True, settings, 1, 40, "cpu", torch.float32, 1e9)
    assert row.note == "did not run: NotImplementedError"


@pytest.mark.parametrize(
    ("given", "message"),
    [({"heads": 0}, "heads must be 1"), ({"dim": 0}, "dim must be 1"), ({"numbers": -1}, "numbers must be 0"),
     ({"lengths": ()}, "lengths must hold at least one")],
)  # fmt: skip
def test_settings_that_mean_nothing_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        speed.Speed(**given)


def test_bad_lengths_and_devices_are_refused_before_measuring(tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "measure", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(ValueError, match="lengths must be positive, got 0"):
        speed.run(speed.Speed(lengths=(40, 0), out=tmp_path, device="cpu"))
    if not torch.cuda.is_available():
        assert main(["bench", "speed", "--device", "cuda", "--out", str(tmp_path)]) == 2


def test_bench_error_prints_a_line_for_each_order(capsys):
    assert main(["bench", "error", "--sizes", "0.1", "1.0", "--length", "20"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split("  ")[0] for line in lines[2:]] == ["order 1", "order 2", "order 3, diagonal", "order 3, full"]


def test_a_device_a_folder_and_a_package_that_are_none_are_told_before_measuring(monkeypatch, tmp_path, capsys):
    monkeypatch.setattr(speed, "measure", lambda *_: pytest.fail("it was measured"))
    with pytest.raises(SystemExit):
        main(["bench", "speed", "--device", "tpu"])
    assert "Expected one of ('auto', 'cpu', 'cuda')" in " ".join(capsys.readouterr().err.replace("│", "").split())
    (tmp_path / "file").write_text("")
    assert main(["bench", "speed", "--out", str(tmp_path / "file")]) == 1
    assert "cannot write files into" in capsys.readouterr().err
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main(["bench", "speed", "--out", str(tmp_path)]) == 1
    assert "need matplotlib: pip install" in capsys.readouterr().err


def test_tokens_that_do_not_fit_are_told_in_a_line(tmp_path, capsys):
    settings = speed.Speed(lengths=(40,), heads=2, dim=8, out=tmp_path)
    row = speed.measure("cumulant2", lambda q, k, v: v, False, settings, 1, 10**13, "cpu", torch.float32, 1e9)
    assert "memory" in row.note
    assert main(["bench", "error", "--sizes", "1", "--length", str(10**13)]) == 1
    assert "memory" in capsys.readouterr().err
