"""Python as a stranger starts it: a new interpreter without what conftest.py sets for the tests."""

import os
import subprocess
import sys
from pathlib import Path

# conftest's own setting, and what pytest tells its processes
NOT_A_STRANGERS = ("TRITON_INTERPRET", "PYTEST_CURRENT_TEST", "PYTEST_VERSION")


def environment() -> dict[str, str]:
    """Of one thread: other tests have the other cores."""
    kept = {name: value for name, value in os.environ.items() if name not in NOT_A_STRANGERS}
    return {**kept, "OMP_NUM_THREADS": "1"}


def python(*words: str, folder: Path) -> str:
    """What `python WORDS` prints in that folder; an AssertionError with all it said where it fails."""
    done = subprocess.run([sys.executable, *words], cwd=folder, env=environment(), capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
