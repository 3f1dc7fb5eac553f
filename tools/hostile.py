"""Wrong calls of everything public, and what came of each: `python -m tools.hostile [PART OF A NAME ...]`.

A wrong call must raise a ValueError or TypeError whose text holds the name of the argument. Every other one is listed:
those that return something, those that raise something else, and those whose error names nothing. Exit status 1 if
there are any. On a CPU in a minute or two; values are only looked at where that costs nothing, so that wrong values on
a GPU (negative weights, offsets that fall) are not in the list.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter

import torch
from torch import Tensor

from tools.wrong_calls import attention, clusters, mechanisms, moments, streams, varlen
from tools.wrong_layers import kinds, layers, models
from tools.wrong_values import Wrong

PARTS = (attention, varlen, clusters, moments, streams, mechanisms, layers, models, kinds)


def verdict(wrong: Wrong) -> str | None:
    """What is not as it should be with a call, or None."""
    try:
        out = wrong.call()
    except (ValueError, TypeError) as error:
        said = str(error)
        if any(name in said for name in wrong.names) and "unexpected keyword" not in said.replace("nonsense", ""):
            return None
        if "unexpected keyword" in said and "nonsense" in wrong.names:
            return None  # Python names it itself
        return f"{type(error).__name__} that names none of {', '.join(wrong.names)}: {said.splitlines()[0][:110]}"
    except Exception as error:
        return f"{type(error).__name__}: {str(error).splitlines()[0][:120] if str(error) else ''}"
    return f"returned {tuple(out.shape) if isinstance(out, Tensor) else type(out).__name__}"


def main(chosen: list[str]) -> int:
    warnings.simplefilter("ignore")
    torch.manual_seed(0)
    torch.set_num_threads(1)
    made: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    for part in PARTS:
        if chosen and not any(word in part.__name__ for word in chosen):
            continue
        for wrong in part():
            made[part.__name__] += 1
            said = verdict(wrong)
            if said is not None:
                bad[part.__name__] += 1
                print(f"{wrong.what} -> {said}", flush=True)
    print(f"{sum(made.values())} wrong calls, {sum(bad.values())} not answered as they should be")
    print(", ".join(f"{name} {bad[name]} of {count}" for name, count in made.items()))
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
