"""Every mechanism and every layer has its page, and the pages that list them say what running them says."""

from pathlib import Path

import pytest

from cumulant import nn, zoo
from tools.zoo_page import page, written_pages

ROOT = Path(__file__).parents[2]
PAGES = ROOT / "docs" / "zoo"
SECTIONS = ("Formula", "When to use it", "What it can do", "Cost", "Options", "Example")
LAYER_SECTIONS = (
    "Formula",
    "When to use it",
    "Cost",
    "What it can do",
    "Over which mechanisms",
    "Example",
    "What was found",
)
HEADS = [name for name in nn.layers() if ".heads." in nn.get_layer(name).build.__module__]


def test_the_list_of_mechanisms_is_up_to_date():
    assert (PAGES / "index.md").read_text() == page(), "write it again, python -m tools.zoo_page"


@pytest.mark.parametrize("name", zoo.names())
def test_every_mechanism_has_a_page_with_its_options_and_source(name):
    text = (PAGES / f"{name.rstrip('0123456789')}.md").read_text()
    missing = [section for section in SECTIONS if f"## {section}" not in text]
    assert missing == []
    assert [option for option in zoo.get(name).options if f"`{option}`" not in text] == []
    if zoo.get(name).arxiv:
        assert zoo.get(name).arxiv in text


def test_what_is_known_of_layers_is_up_to_date():
    stale = [path for path, text in written_pages().items() if (ROOT / path).read_text(encoding="utf-8") != text]
    assert stale == [], "write them again: python -m tools.zoo_page"


@pytest.mark.parametrize("name", HEADS)
def test_every_layer_has_a_page_with_all_its_sections_written(name):
    text = (ROOT / "docs" / "layers" / f"{name}.md").read_text(encoding="utf-8")
    parts = dict(part.split("\n", 1) for part in text.split("\n## ")[1:])
    assert [section for section in LAYER_SECTIONS if not parts.get(section, "").strip("` \n")] == []
    assert (nn.get_layer(name).arxiv or "") in text
