"""The tables of networks in docs/models.md are those of the registry."""

import importlib.util
import json
from pathlib import Path

from cumulant.listing import counted

ROOT = Path(__file__).parents[2]


def test_tables_are_those_of_the_registry():
    spec = importlib.util.spec_from_file_location("models_page", ROOT / "tools" / "models_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert text.count("<!-- models: ") >= 4
    assert module.page(text) == text, "python tools/models_page.py writes them anew"
    known = json.loads(module.COUNTED.read_text())
    largest = {name.split("_")[0]: name for name in sorted(known, key=lambda name: known[name][1] or 0)}
    for name in largest.values():  # the smallest in tests/cli/test_cli.py
        assert known[name] == list(counted(name)), f"{name}: python tools/models_page.py counts them anew"
