"""Where a number came from: commit, versions and machine, and results read back from their files.

No host name, user name or path is ever recorded.
"""

from __future__ import annotations

import os
import platform
import subprocess
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import cumulant
from cumulant.train.files import read_json


def commit() -> str | None:
    """Short commit of the checkout that `cumulant` was imported from, marked when files differ from it.

    CUMULANT_COMMIT tells that of a copy whose history stayed behind, or is another's. None for an installed wheel or a
    checkout without a commit: a wrong commit would be worse than none.
    """
    if told := os.environ.get("CUMULANT_COMMIT"):
        return told[:12]
    root = Path(cumulant.__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        return subprocess.run(
            ["git", "-C", str(root), *arguments], capture_output=True, text=True, check=True, timeout=20
        ).stdout.strip()

    try:
        name = git("rev-parse", "--short=12", "HEAD")
        return name + (" with uncommitted changes" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def cpu_model() -> str:
    """The processor as its maker names it, or the architecture where that is not told."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                return line.split(":", 1)[1].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()


def cores() -> int:
    """Processor cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def read_result(path: Path, *keys: str) -> dict[str, Any]:
    """A results file that must have these keys; a ValueError that names it where it is damaged or none of the bench."""
    try:
        result = read_json(path)
    except ValueError as error:
        raise ValueError(f"{error}; move it away, or choose another folder with --out") from error
    missing = [key for key in keys if key not in result] if isinstance(result, dict) else ["an object"]
    if missing:
        raise ValueError(f"{path} is not a result of the bench: it lacks {', '.join(missing)}; move it away")
    return result


def provenance(command: str, gpu: bool = False) -> dict[str, Any]:
    """What a results file says about its origin; `gpu`: it was measured on one."""
    found: dict[str, Any] = {
        "command": command,
        "commit": commit(),
        "date": datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        "versions": {
            "cumulant": cumulant.__version__,
            "python": platform.python_version(),
            **{name: metadata.version(name) for name in ("torch", "numpy")},
        },
        "machine": {
            "processor": cpu_model(),
            "cores": cores(),
            "system": f"{platform.system()} {platform.machine()}",
            "threads": torch.get_num_threads(),
        },
    }
    if gpu and torch.cuda.is_available():
        found["machine"]["gpu"] = torch.cuda.get_device_name()
        found["versions"]["triton"] = metadata.version("triton")
    return found
