"""What the report shows besides the training runs: error against softmax, time and memory on this machine, the dial."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from cumulant.bench.error import LOGIT_SIZES, softmax_error
from cumulant.bench.scaling import LENGTHS, scaling
from cumulant.grammar import parse, read_blocks
from cumulant.studies.photograph import dial_on_a_photograph

Bar = Callable[[str, int, str], AbstractContextManager[Any]]


def measured(results: dict[str, Any], make_bar: Bar) -> dict[str, Any]:
    """Error of every order by the size of the logits, and cost by length, of the mechanisms that were compared."""
    blocks = (one for name in results["attention"] for one in read_blocks(name))
    mechanisms = tuple(dict.fromkeys(parse(one)[0] for one in blocks))
    with make_bar("measuring", len(LOGIT_SIZES) + len(LENGTHS) + 1, "step") as bar:
        bar.set_postfix_str("the dial on a photograph")
        dial = dial_on_a_photograph()
        bar.update()
        bar.set_postfix_str("error against softmax")
        error = softmax_error(on_size=lambda _: bar.update())
        bar.set_postfix_str("time and memory")
        cost = scaling(mechanisms, LENGTHS, on_length=lambda _: bar.update())
        if cost["disturbed"] and cost["threads"] > 1:
            # Threads that wait for one another suffer most from other work on the machine; a single one hardly does.
            bar.total += len(LENGTHS)
            bar.set_postfix_str("time and memory again: the machine is busy")
            disturbed_on = cost["threads"]
            cost = scaling(mechanisms, LENGTHS, num_threads=1, on_length=lambda _: bar.update())
            cost["disturbed_on"] = disturbed_on
    return {"error": error, "scaling": cost, "dial": dial}
