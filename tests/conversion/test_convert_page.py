"""Blocks of docs/convert.md that need packages which the development install does not have are run here."""

import re
from pathlib import Path

import pytest
from small_models import timm, transformers

PAGE = Path(__file__).parents[2] / "docs" / "convert.md"
BLOCKS = re.findall(r"```py\n(.*?)```", PAGE.read_text(), re.DOTALL)


def test_there_are_such_blocks():
    assert len(BLOCKS) == 4


@pytest.mark.parametrize("block", BLOCKS, ids=lambda block: block.split()[1])
def test_a_block_runs_as_it_stands(block, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    if "timm" in block:
        timm()
    if "transformers" in block:
        transformers()
    exec(compile(block, PAGE.name, "exec"), {})
