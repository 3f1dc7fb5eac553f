"""The documentation site builds without a warning, and a link that leads nowhere is one. Needs the extra docs."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LACKING = [name for name in ("mkdocs", "material", "mkdocstrings") if find_spec(name) is None]
pytestmark = [pytest.mark.stranger, pytest.mark.skipif(bool(LACKING), reason="needs the extra docs")]


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    """As `make docs` builds it."""
    asked = re.search(r"mkdocs (build.*)", (ROOT / "Makefile").read_text())[1].split()
    words = [sys.executable, "-m", "mkdocs", *asked, "--config-file", str(config), "--site-dir", str(site)]
    environment = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    return subprocess.run(words, cwd=config.parent, env=environment, capture_output=True, text=True)


def test_the_site_builds_without_a_warning(tmp_path):
    done = build(ROOT / "mkdocs.yml", tmp_path / "site")
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "site" / "training" / "index.html").is_file()


@pytest.mark.parametrize("link", ["nowhere.md", "index.md#no-such-heading"])
def test_a_link_that_leads_nowhere_is_refused(tmp_path, link):
    settings = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    (tmp_path / "docs").mkdir()
    (tmp_path / "mkdocs.yml").write_text(settings)
    (tmp_path / "docs" / "index.md").write_text(f"# A page\n\nSee [there]({link}).\n")
    done = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert done.returncode != 0
    assert link in done.stderr
