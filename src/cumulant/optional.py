"""Optional packages: an import that fails says what to install, or which of the installed packages do not fit.

Imports nothing of this library and nothing heavy, so that every room may use it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from importlib.metadata import PackageNotFoundError, distribution, version


@contextmanager
def needed(says: str, extra: str) -> Iterator[None]:
    """`with needed("the digits need scikit-learn", "train"):` an import that fails inside says so, and the remedy."""
    try:
        yield
    except (ImportError, RuntimeError) as error:
        if (misfit := _misfit(error)) is not None:
            raise ImportError(f"{says}, but {misfit}") from error
        if isinstance(error, ImportError):
            raise ImportError(f"{says}: {install(extra)}") from error
        raise


def install(extra: str) -> str:
    """The command that brings the packages of an extra, as this library itself was installed."""
    return f"pip install {_given().format(extra)}"


@cache
def _given() -> str:
    """What pip was given: the folder of a checkout (PEP 610 records it), or the name of the package."""
    try:
        stated = json.loads(distribution("cumulant").read_text("direct_url.json") or "{}")
    except PackageNotFoundError:  # the sources of a checkout on Python's path
        return "-e '.[{}]'"
    if "dir_info" not in stated:
        return "'cumulant[{}]'"
    return "-e '.[{}]'" if stated["dir_info"].get("editable") else "'.[{}]'"


def _misfit(error: BaseException) -> str | None:
    """Where a torchvision built for another torch is behind the error, what to do; timm and transformers import it."""
    cause: BaseException | None = error
    while cause is not None:
        # "operator torchvision::nms does not exist": its compiled operators did not load
        if isinstance(cause, RuntimeError) and "torchvision::" in str(cause):
            found = f"torchvision {version('torchvision')} does not fit torch {version('torch')}"
            return f"{found}: reinstall it for that torch, or uninstall it if nothing needs it"
        cause = cause.__cause__ or cause.__context__
    return None
