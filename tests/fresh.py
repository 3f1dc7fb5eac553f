"""Python as a stranger starts it: without what conftest.py sets for the tests.

`python` is a new interpreter. `forked` is a copy of one that has imported cumulant, torch and what torch imports at the
first step of an optimiser, and done nothing else: what most programs here begin with, paid for once. `begun` is such a
copy that goes on by itself.
"""

import atexit
import json
import os
import runpy
import subprocess
import sys
import tempfile
import time
import traceback
from functools import cache
from pathlib import Path
from typing import Any

# conftest's own setting, and what pytest tells its processes
NOT_A_STRANGERS = ("TRITON_INTERPRET", "PYTEST_CURRENT_TEST", "PYTEST_VERSION")
CUMULANT = ("-c", "import sys; from cumulant.cli import main; sys.exit(main())")  # and its words: the command


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
    program = begun(*words, folder=folder)
    status = program.wait()
    assert status == 0, f"exit status {status}\n{program.out[-4000:]}\n{program.err[-4000:]}"
    return program.out


class begun:  # noqa: N801  # reads as `python` and `forked` do
    """A program in such a copy, in a process group of its own; what it said so far is in `out` and `err`."""

    def __init__(self, *words: str, folder: Path) -> None:
        self.said = tempfile.TemporaryDirectory()
        files = {name: str(Path(self.said.name) / name) for name in ("out", "err")}
        self.pid, self.returncode = _asked({"words": words, "folder": str(folder), **files}), None

    @property
    def out(self) -> str:
        return self._said("out")

    @property
    def err(self) -> str:
        return self._said("err")

    def _said(self, where: str) -> str:
        """Nothing, while the copy has not begun to write."""
        file = Path(self.said.name) / where
        return file.read_text() if file.exists() else ""

    def first_line(self) -> str:
        """As soon as it is there; what is there where the program ends before."""
        while "\n" not in self.out and self.poll() is None:
            time.sleep(0.02)
        return self.out.partition("\n")[0]

    def poll(self, flags: int = os.WNOHANG) -> int | None:
        """Its exit status; None while it runs."""
        if self.returncode is None:
            self.returncode = _asked({"pid": self.pid, "flags": flags})
        return self.returncode

    def wait(self) -> int:
        """Its exit status, after its end."""
        self.poll(0)
        assert self.returncode is not None
        return self.returncode

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)


def _asked(question: dict[str, object]) -> Any:
    server = _server()
    assert server.stdin is not None
    assert server.stdout is not None
    server.stdin.write(json.dumps(question) + "\n")
    server.stdin.flush()
    return json.loads(server.stdout.readline())


@cache
def _server() -> subprocess.Popen[str]:
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    server = subprocess.Popen([sys.executable, __file__], env=environment(), **pipes)
    atexit.register(server.communicate)  # which closes its input, and so ends it
    return server


def serve() -> None:
    """Begin the program that a line names and answer with its process, or answer with the exit status of a process."""
    import torch._dynamo  # noqa: F401

    import cumulant  # noqa: F401

    for line in sys.stdin:
        asked = json.loads(line)
        if "pid" in asked:
            ended, status = os.waitpid(asked["pid"], asked["flags"])
            print(json.dumps(os.waitstatus_to_exitcode(status) if ended else None), flush=True)
            continue
        process = os.fork()
        if process == 0:
            os._exit(run(**asked))
        print(process, flush=True)


def run(words: list[str], folder: str, out: str, err: str) -> int:
    """The program, as `python WORDS` would run it there; its exit status."""
    os.setsid()
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
