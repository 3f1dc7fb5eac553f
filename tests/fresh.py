"""Python as a stranger starts it: a new interpreter without what conftest.py sets for the tests."""

import os
import subprocess
import sys
from pathlib import Path

# conftest's own setting; what pytest and pytest-xdist tell their processes
NOT_A_STRANGERS = ("TRITON_INTERPRET", "PYTEST_CURRENT_TEST", "PYTEST_VERSION")
ONE_THREAD = {"OMP_NUM_THREADS": "1"}  # other tests have the other cores


def python(*words: str, folder: Path, seconds: float = 600) -> str:
    """What `python WORDS` prints in that folder; an AssertionError with all it said where it fails."""
    env = {name: value for name, value in os.environ.items() if name not in NOT_A_STRANGERS}
    command, options = [sys.executable, *words], dict(capture_output=True, text=True, timeout=seconds)
    done = subprocess.run(command, cwd=folder, env={**env, **ONE_THREAD}, **options)
    assert done.returncode == 0, f"{done.stdout[-4000:]}\n{done.stderr[-4000:]}"
    return done.stdout
