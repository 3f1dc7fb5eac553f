"""Every mechanism has its page in the documentation, and the page that lists them says what running them says."""

from pathlib import Path

import pytest

from cumulant import zoo
from tools.zoo_page import page

PAGES = Path(__file__).parents[2] / "docs" / "zoo"
SECTIONS = ("Formula", "When to use it", "What it can do", "Cost", "Options", "Example")


def test_the_list_of_mechanisms_is_up_to_date():
    assert (PAGES / "index.md").read_text() == page(), "write it again, see tools/zoo_page.py"


@pytest.mark.parametrize("name", zoo.names())
def test_every_mechanism_has_a_page_with_its_options_and_source(name):
    text = (PAGES / f"{name.rstrip('0123456789')}.md").read_text()
    missing = [section for section in SECTIONS if f"## {section}" not in text]
    assert missing == []
    assert [option for option in zoo.get(name).options if f"`{option}`" not in text] == []
    if zoo.get(name).arxiv:
        assert zoo.get(name).arxiv in text
