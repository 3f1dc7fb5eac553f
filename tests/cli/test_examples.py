"""Every example in the help of a command is read by the real parser and, in a form that takes seconds, run.

In copies of a fresh interpreter, in a folder of their own, as a stranger would type them; later examples need what
earlier ones wrote. A new example must be put into one of the two tables. Commands in README and docs are read by the
parser too.
"""

import json
import re
import shlex
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.request import urlopen

import fresh
import pytest

pytestmark = pytest.mark.stranger
ROOT = Path(__file__).parents[2]
DIGITS = "runs/digits-softmax-0"

RUN = {  # an example: what is run for it, itself where it takes seconds; in this order
    "cumulant train digits": "cumulant train digits --epochs 2",
    f"cumulant evaluate {DIGITS} digits": None,
    f"cumulant diagnose {DIGITS} digits": None,
    f"cumulant convert {DIGITS} --data digits --layers auto --budget 0.1 --force": None,
    f"cumulant convert {DIGITS} --data digits --distill --epochs 5 --items-a-step 64 --force": (
        f"cumulant convert {DIGITS} --data digits --distill --epochs 1 --items-a-step 64 --force --out runs/distilled"
    ),
    "cumulant list": None,
    "cumulant list mechanisms --json": None,
    "cumulant list models": None,
    "cumulant study list": None,
    "cumulant bench error --sizes 0.1 0.5 1 2": None,
    f"cumulant bench error --attention all --checkpoint {DIGITS}": (
        f"cumulant bench error --attention linear cumulant3 --checkpoint {DIGITS}"
    ),
    "cumulant bench efficiency --attention linear cumulant3 --lengths 512 1024 2048 4096 --pattern causal": (
        "cumulant bench efficiency --attention linear cumulant3 --lengths 64 128 --pattern causal"
    ),
    "cumulant bench train": "cumulant bench train --attention softmax --seeds 1 --epochs 1 --control 1",
    "cumulant reproduce --attention softmax cumulant3 --seeds 3 --epochs 10 --out runs/quick": (
        "cumulant reproduce --attention softmax cumulant3 --seeds 1 --epochs 1 --control 0 --workers 1 --out runs/quick"
    ),
}
SERVED = f"cumulant explore {DIGITS} runs/digits-cumulant3-0 --port 9000"  # below with two models of the above

LONG, DATA, COMPILES = "takes minutes; a short form is run", "needs data", "torch.compile, minutes on a CPU"
PARSED = {  # an example that is read by the parser and not run: why
    "cumulant reproduce": LONG,
    "cumulant reproduce --data path/to/tiny-imagenet-100 --seeds 3 --minutes 25": DATA,
    "cumulant reproduce --data path/to/tiny-imagenet-100 --attention softmax cumulant3 cumulant3+v_conv": DATA,
    "cumulant reproduce --on folder --out /shared/digits": "for several machines; see tests/studies/test_claims.py",
    "cumulant train tiny-imagenet-100 --data path/to/tiny-imagenet-100 --attention cumulant3 --seed 1": DATA,
    "cumulant evaluate runs/ucf101-cumulant3-0 path/to/ucf101 --views 4 --json": DATA,
    "cumulant study heads --layers moh": "takes minutes; tests/studies/test_heads_study.py runs a short form",
    "cumulant study random-features --attention softmax linear cumulant3": LONG,
    "cumulant bench cab --attention linear cumulant2 cumulant3 --tasks lm restore --seeds 1": LONG,
    "cumulant bench cab --data FOLDER --workers 12": DATA,
    "cumulant bench cab --report-only --out FOLDER": DATA,
    "cumulant bench efficiency": LONG,
    "cumulant bench speed": COMPILES,
    "cumulant bench speed --lengths 1024 4096": COMPILES,
    "cumulant bench speed --lengths 1024 4096 --causal --out runs/speed": COMPILES,
    "cumulant bench train --recipe tiny-imagenet-100 --data FOLDER --epochs 50": DATA,
    "cumulant diagnose path/to/sentence-encoder texts.txt --heads": DATA,
    "cumulant diagnose timm:vit_small_patch16_224 path/to/imagenet-100 --budget 0.1 --dial 0.15": DATA,
    "cumulant convert path/to/sentence-encoder --data texts.txt --layers 3 4 5 --around mean": DATA,
    "cumulant convert path/to/sentence-encoder --data texts.txt --layers dial --target 0.15": DATA,
    "cumulant explore": "trains six models first",
    "cumulant explore runs/my-run --data path/to/tiny-imagenet-100": DATA,
    "cumulant explore timm:vit_base_patch16_224 timm:vit_base_patch16_224@cumulant3 --data path/to/pictures": DATA,
    "cumulant explore path/to/dinov2 --data path/to/pictures": DATA,
    "cumulant explore path/to/sam2 path/to/lightglue --data path/to/pictures": DATA,
}

PARSE_EACH = """
import json, sys
from cumulant.cli import parse
for words in json.loads(sys.argv[1]):
    try:
        parse(words)
    except SystemExit as stop:
        assert not stop.code, f"not understood: cumulant {' '.join(words)}"
"""
RUN_EACH = """
import json, sys
import cumulant.studies.measured
from cumulant.cli import main
cumulant.studies.measured.LENGTHS = (64, 128)  # of the sequences that the report of a study measures
for words in json.loads(sys.argv[1]):
    print("$ cumulant", *words, flush=True)
    status = main(words)
    assert status == 0, f"exit status {status}: cumulant {' '.join(words)}"
"""


def words(command: str) -> list[str]:
    """Those after `cumulant`."""
    every = shlex.split(command)
    return every[every.index("cumulant") + 1 :]


def examples() -> set[str]:
    """Those in the docstrings that the help is made of."""
    sources = (file.read_text() for file in (ROOT / "src" / "cumulant").rglob("*.py"))
    return {one for text in sources for one in re.findall(r"^ *Example[^:\n]*: (cumulant .+)$", text, re.MULTILINE)}


def commands_on_pages() -> list[list[str]]:
    """The words after `cumulant` of every command in a block of README and docs that is not Python."""
    found = []
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        for language, block in re.findall(r"^```(\w*)\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE):
            typed = [] if language.startswith("py") else block.replace("\\\n", " ").splitlines()
            for line in typed:
                if re.match(r"(\w+=\S+ )*cumulant ", line):
                    found += map(words, shlex.join(shlex.split(line, comments=True)).split(" '&&' "))
    return found


def test_every_example_is_in_one_table():
    told = [*RUN, SERVED, *PARSED]
    assert sorted(told) == sorted(examples())


def test_examples_and_commands_on_pages_are_understood(tmp_path):
    recipe = next((ROOT / "src" / "cumulant").rglob("digits.toml"))
    (tmp_path / "my.toml").write_bytes(recipe.read_bytes())  # of docs/training.md
    every = [*map(words, sorted(examples())), *commands_on_pages()]
    assert len(every) > 70
    fresh.forked("-c", PARSE_EACH, json.dumps(every), folder=tmp_path)


def test_the_examples_run_and_the_explorer_shows_their_models(tmp_path):
    commands = json.dumps([words(short or example) for example, short in RUN.items()])
    printed = fresh.forked("-c", RUN_EACH, commands, folder=tmp_path)
    assert printed.count("$ cumulant") == len(RUN)
    assert (tmp_path / "runs" / "quick" / "report.html").is_file()
    with explorer(DIGITS, "runs/distilled", folder=tmp_path) as address, urlopen(f"{address}api/info") as answer:
        assert len(json.load(answer)["models"]) == 2


@contextmanager
def explorer(*models: str, folder: Path) -> Iterator[str]:
    """`cumulant explore` in a process of its own until the block ends, as by Ctrl-C; its address."""
    process = fresh.begun(*fresh.CUMULANT, "explore", *models, "--port", "0", folder=folder)
    try:
        told = process.first_line()
        assert "the explorer is at http://" in told, told + process.err
        yield re.search(r"http://\S+", told)[0]
    finally:
        process.send_signal(signal.SIGINT)
        assert process.wait() == 0
