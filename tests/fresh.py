"""Python as a stranger starts it: without what conftest.py sets for the tests.

`python` is a new interpreter. `forked` is a copy of one that has imported torch and cumulant and done nothing else:
what every program here begins with, paid for once.
"""

import atexit
import json
import os
import runpy
import subprocess
import sys
import tempfile
import traceback
from functools import cache
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


def forked(*words: str, folder: Path) -> str:
    """As `python`, in a copy of an interpreter that has imported torch and cumulant: `-c CODE ...` or `FILE ...`."""
    with tempfile.TemporaryDirectory() as said:
        out, err = (str(Path(said) / name) for name in ("out", "err"))
        server = _server()
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps({"words": words, "folder": str(folder), "out": out, "err": err}) + "\n")
        server.stdin.flush()
        status = json.loads(server.stdout.readline())
        printed, errors = (Path(file).read_text() for file in (out, err))
    assert status == 0, f"exit status {status}\n{printed[-4000:]}\n{errors[-4000:]}"
    return printed


@cache
def _server() -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, __file__], env=environment(), **pipes)
    atexit.register(server.communicate)  # which closes its input, and so ends it
    return server


def serve() -> None:
    """Answer every line with the exit status of the program that it names."""
    import torch  # noqa: F401

    import cumulant  # noqa: F401

    for line in sys.stdin:
        process = os.fork()
        if process == 0:
            os._exit(run(**json.loads(line)))
        print(os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]), flush=True)


def run(words: list[str], folder: str, out: str, err: str) -> int:
    """The program, as `python WORDS` would run it there; its exit status."""
    os.chdir(folder)
    for number, name in ((1, out), (2, err)):
        os.dup2(os.open(name, os.O_WRONLY | os.O_CREAT), number)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    status = 0
    try:
        if words[0] == "-c":
            sys.argv, sys.path[0] = ["-c", *words[2:]], ""
            exec(compile(words[1], "<string>", "exec"), {"__name__": "__main__"})
        else:
            sys.argv, sys.path[0] = list(words), str(Path(words[0]).parent)
            runpy.run_path(words[0], run_name="__main__")
    except SystemExit as stop:
        status = stop.code if isinstance(stop.code, int) else int(stop.code is not None)
    except BaseException:
        traceback.print_exc()
        status = 1
    for stream in (sys.stdout, sys.stderr):
        stream.flush()
    return status


if __name__ == "__main__":
    serve()
