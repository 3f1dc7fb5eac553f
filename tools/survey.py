"""What `cumulant.convert` says to every model class of transformers and every family of timm.

    python -m tools.survey transformers --out benchmarks/results/survey_transformers.json
    PYTHONPATH=.venv/timm-for-tests python -m tools.survey timm --out benchmarks/results/survey_timm.json
    python -m tools.survey transformers --names BertModel ViTModel      # a few, printed

Models of transformers have tiny configurations (`tools/tiny_models.py`), those of timm their own; weights are random
and nothing is downloaded. Every few models have a process of their own, so that a crash spoils nothing; given again,
the command goes on where it was. `outcome` is one of

    converted      with the layers replaced, those kept and the relative change of the output
    refused        a ValueError, TypeError or RuntimeError that this library raised, with its reason
    no attention   the same, where there is none to convert
    raw error      anything else: a user would be left alone with it
    not built      no tiny model could be made, or it takes a package that is not here; does not count
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from .tiny_models import classes, tiny_model

A_PROCESS, SECONDS = 12, 300  # models of a process, and how long it may take (--seconds)
SIZES = ("test", "atto", "femto", "pico", "nano", "xxs", "xxt", "tiny", "_t", "xs", "mini", "small", "_s", "base", "_b")
FLAVOURS = ("rope", "dinov3", "siglip", "gap", "clip", "reg", "srelpos")
ALSO = (
    "vit_small_patch16_18x2_224",
    "vit_base_patch16_rpn_224",
    "levit_128s",
    "levit_conv_128s",
    "xcit_tiny_12_p16_224",
)
HEAVY = 150_000_000  # parameters of a timm model that is left out
COUNTED = ("converted", "refused", "raw error")


def timm_names(each: int = 1) -> list[str]:
    """Small models, `each` of every family of timm: its module, the letters its name begins with, and its flavour."""
    import timm

    where = timm.models._registry._model_to_module
    families: dict[tuple[Any, ...], list[str]] = {}

    def size(name: str) -> tuple[int, int, str]:
        return next((i for i, word in enumerate(SIZES) if word in name), len(SIZES)), len(name), name

    for name in timm.list_models():
        letters = re.match(r"[a-z]+", name)
        key = (where[name], letters and letters.group(), *(word in name for word in FLAVOURS))
        families.setdefault(key, []).append(name)
    return sorted({*ALSO, *(name for names in families.values() for name in sorted(names, key=size)[:each])})


def made(library: str, name: str) -> Any:
    """The model of that name with random weights."""
    import torch

    if library == "transformers":
        import transformers

        return tiny_model(getattr(transformers, name))
    import timm

    with torch.device("meta"):
        size = sum(p.numel() for p in timm.create_model(name).parameters())
    if size > HEAVY:
        raise ValueError(f"{name} has {size:,} parameters")
    torch.manual_seed(0)
    return timm.create_model(name).eval()


def looked_at(library: str, name: str) -> dict[str, Any]:
    """What became of one model."""
    import cumulant

    try:
        model = made(library, name)
    except Exception as error:
        return {"outcome": "not built", "reason": said(error)}
    try:
        report = cumulant.convert(model)
    except Exception as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = Path(cumulant.__file__).parent in Path(frames[-1].filename).parents
        known = ours and isinstance(error, ValueError | TypeError | RuntimeError)
        none = known and " has no attention" in str(error)
        place = "" if known else f" [{Path(frames[-1].filename).name}:{frames[-1].lineno}]"
        return {
            "outcome": ("no attention" if none else "refused") if known else "raw error",
            "reason": said(error) + place,
        }
    counts = {"replaced": len(report.replaced), "kept": len(report.kept), "change": round(report.measured_error, 6)}
    reasons = [re.sub(r"\d+", "N", why) for why in report.kept.values()]
    return {"outcome": "converted", **counts, "why kept": sorted(set(reasons))}


def said(error: Exception) -> str:
    """Its kind and words in one line, without a path of the machine."""
    text = " ".join(f"{type(error).__name__}: {error}".split())
    return re.sub(r"(/[\w.@-]+){2,}/", "", text)[:300]  # no path of the machine


def work(library: str, names: Sequence[str]) -> None:
    """Print what became of each of these as a line of JSON."""
    import warnings

    warnings.filterwarnings("ignore")
    if library == "transformers":
        import transformers

        transformers.logging.set_verbosity_error()
    for name in names:
        print("\0" + json.dumps({name: looked_at(library, name)}), flush=True)


def share(library: str, names: Sequence[str], seconds: float = SECONDS) -> dict[str, Any]:
    """What became of these, in a process of their own; where that dies, of the one that it died on too."""
    found: dict[str, Any] = {}
    left = list(names)
    while left:
        command = [sys.executable, "-m", "tools.survey", library, "--worker", "--names", *left]
        with tempfile.TemporaryFile("w+") as file:
            try:
                ended = subprocess.run(command, stdout=file, stderr=subprocess.DEVNULL, timeout=seconds)
                how = f"the process ended with status {ended.returncode}"
            except subprocess.TimeoutExpired:
                how = f"no answer after {seconds:g} s"
            file.seek(0)
            for line in file:
                if line.startswith("\0"):
                    found |= json.loads(line[1:])
        left = [name for name in left if name not in found]
        if left:
            found[left.pop(0)] = {"outcome": "raw error", "reason": how}
    return found


def summary(found: dict[str, Any]) -> dict[str, int]:
    counts = Counter(one["outcome"] for one in found.values())
    return {"counted": sum(counts[key] for key in COUNTED), **dict(counts.most_common())}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("library", choices=("transformers", "timm"))
    parser.add_argument("--names", nargs="*", help="only these, looked at again")
    parser.add_argument("--each", type=int, default=1, help="models of a family of timm")
    parser.add_argument("--again", nargs="*", default=[], help="look again at those with these outcomes")
    parser.add_argument("--out", type=Path, help="file of the record; what is in it is not looked at again")
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=SECONDS, help="that a process of a few models may take")
    parser.add_argument("--worker", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.worker:
        work(given.library, given.names)
        return 0
    found: dict[str, Any] = {}
    if given.out is not None and given.out.exists():
        record = json.loads(given.out.read_text())
        found = {name: {"commit": record["commit"], **one} for name, one in record["models"].items()}
        found = {name: one for name, one in found.items() if one["outcome"] not in given.again}
    names = given.names or (list(classes()) if given.library == "transformers" else timm_names(given.each))
    left = names if given.names else [name for name in names if name not in found]
    parts = [left[at : at + A_PROCESS] for at in range(0, len(left), A_PROCESS)]
    start = time.time()
    with ThreadPoolExecutor(given.processes) as pool:
        for part in pool.map(lambda names: share(given.library, names, given.seconds), parts):
            found |= part
            for name, one in part.items():
                print(f"{name:40} {one['outcome']:12} {one.get('reason', '')[:120]}", flush=True)
            if given.out is not None:
                _write(given.out, given.library, found)
    print(f"{summary(found)} after {time.time() - start:.0f} s")
    return 0


def _write(path: Path, library: str, found: dict[str, Any]) -> None:
    from importlib.metadata import version

    from cumulant.bench.provenance import provenance

    known = provenance(f"python -m tools.survey {library}")
    known["versions"][library] = version(library)
    for one in found.values():
        one.setdefault("commit", known["commit"])  # what was looked at before keeps that of its time
    record = {**known, "summary": summary(found), "models": dict(sorted(found.items()))}
    path.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    sys.exit(main())
