"""What README and docs show runs as it stands: README in a fresh interpreter, the pages each in a copy of one.

The `python` blocks of a page are one program; a `py` block is a program of its own.
"""

import re
from pathlib import Path

import fresh
import pytest

pytestmark = pytest.mark.stranger
ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
PATH = ("index", "first", "convert", "explain", "training", "distributed")
ZOO = [page for page in PAGES if page.parent.name in ("zoo", "layers")]


def blocks(page: Path, language: str) -> list[str]:
    """The blocks of a page, each below as many empty lines as there are above it: errors name the page's line."""
    text = page.read_text()
    found = re.finditer(rf"```{language}\n(.*?)```", text, re.DOTALL)
    return ["\n" * text.count("\n", 0, block.start(1)) + block[1] for block in found]


def program(page: Path, folder: Path) -> str:
    """All blocks of a page as a file, every line where it stands on the page; its path."""
    lines: list[str] = []
    for block in blocks(page, "python"):
        lines += block.split("\n")[len(lines) :]
    file = folder / f"{page.stem}.md.py"
    file.write_text("\n".join(lines))
    return str(file)


def name(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


def test_no_page_is_left_out():
    assert {name(page) for page in ZOO if not blocks(page, "python")} == {"docs/zoo/orderings.md"}
    assert len([page for page in PAGES if blocks(page, "python")]) > 20


@pytest.mark.parametrize("page", [x for x in PAGES if blocks(x, "python")], ids=name)
def test_the_code_on_a_page_runs(page, tmp_path):
    run = fresh.python if page.name == "README.md" else fresh.forked
    run(program(page, tmp_path), folder=tmp_path)


ALONE = [
    pytest.param(block, marks=[pytest.mark.timm] * ("import timm" in block), id=f"{name(page)}:{block.split()[1]}")
    for page in PAGES
    for block in blocks(page, "py")
]


@pytest.mark.parametrize("block", ALONE)
def test_a_block_that_stands_alone_runs(block, tmp_path):
    (tmp_path / "block.py").write_text(block)
    fresh.forked("block.py", folder=tmp_path)


def test_words_that_a_newcomer_meets_are_in_the_glossary():
    rows = re.findall(r"^\| ([^|]+?) \|", (ROOT / "docs" / "glossary.md").read_text(), re.MULTILINE)
    explained = {word.strip() for row in rows for word in row.split(",")}
    path = "\n".join((ROOT / page).read_text() for page in ("README.md", *(f"docs/{one}.md" for one in PATH)))
    ours = ("memory floor", "logit scale", "A/A control", "mechanism", "closure", "moments", "recipe", "signed map")
    assert {word for word in ours if word in path} <= explained
    assert not re.search(r"free energy|temperature(?!=|`)", (ROOT / "README.md").read_text())


def test_the_model_that_readme_converts_is_long_enough_to_gain():
    """README says itself from how many tokens on it pays; a clock decides nothing here."""
    import cumulant

    text = (ROOT / "README.md").read_text()
    pays = int(re.search(r"longer than about ([\d,]+) tokens", text)[1].replace(",", ""))
    before_it_is_converted = text[: text.index("print(cumulant.convert(model")].splitlines()[-1]
    model = eval(before_it_is_converted.removeprefix("model = "), {"cumulant": cumulant})
    assert model.pos_embed.shape[1] > pays


def test_readme_is_a_front_door_of_at_most_80_lines():
    assert (ROOT / "README.md").read_text().count("\n") <= 80
    assert [x for x in prose(ROOT / "README.md") if numbers(x) > 4] == []


@pytest.mark.parametrize(
    "page", [x for x in PAGES if x.parent.name in ("docs", "zoo", "layers", "studies", "real-models")], ids=name
)
def test_no_page_is_a_wall(page):
    """Outside the lab: a longer paragraph or point of a list wants to be a table, a figure or two sentences."""
    assert [x for x in prose(page) if numbers(x) > 12 or len(x.split()) > 120] == []


def prose(page: Path) -> list[str]:
    """Paragraphs and points of lists, without code, tables, addresses and what tools write."""
    text = re.sub(r"```.*?```|<!-- results.*?<!-- end -->", "", page.read_text(), flags=re.DOTALL)
    text = re.sub(r"`[^`]*`|\]\(\S+\)", "", text)
    parts = re.split(r"\n\n|\n(?=- |\d+\. )", text)
    return [x for x in parts if not x.lstrip().startswith("|")]


def numbers(text: str) -> int:
    return len(re.findall(r"(?<!\w)\d[\d,.]*(?!\w)", text))


def test_there_are_such_blocks():
    assert len(ALONE) == 4
