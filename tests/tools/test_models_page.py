"""The tables of networks in docs/models.md are those of the registry."""

import importlib.util
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_tables_are_those_of_the_registry():
    spec = importlib.util.spec_from_file_location("models_page", ROOT / "tools" / "models_page.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    text = (ROOT / "docs" / "models.md").read_text(encoding="utf-8")
    assert text.count("<!-- models: ") >= 4
    assert module.page(text) == text, "python tools/models_page.py writes them anew"
