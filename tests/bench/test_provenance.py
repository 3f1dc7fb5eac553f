"""What a results file says about its origin, and what it must not say."""

import getpass
import json
import platform
from pathlib import Path

import torch

from cumulant.bench import provenance
from cumulant.bench.provenance import cores


def test_versions_machine_and_command_are_named():
    origin = provenance("cumulant reproduce --seeds 3")
    assert origin["command"] == "cumulant reproduce --seeds 3"
    assert origin["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    assert origin["machine"]["cores"] == cores() >= 1


def test_no_host_user_or_path_is_recorded():
    text = json.dumps(provenance("cumulant reproduce"))
    assert platform.node() not in text or platform.node() in ("", "localhost")
    assert str(Path.home()) not in text
    assert str(Path.cwd()) not in text
    assert f'"{getpass.getuser()}"' not in text


def test_a_copy_is_told_its_commit(monkeypatch):
    monkeypatch.setenv("CUMULANT_COMMIT", "0123456789ab" + "0" * 28)
    assert provenance("x")["commit"] == "0123456789ab"
