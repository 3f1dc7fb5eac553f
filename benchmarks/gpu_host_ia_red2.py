"""Where the host's time goes in a call of IA-RED2's layer: calls in a row, alone on a GPU, and the parts of one.

    PYTHONPATH=src python benchmarks/gpu_host_ia_red2.py        15 s; bfloat16, width 384, 6 heads, batch 8

"host" is how long the host takes for a call, "whole" until the device has done it too, both means over 200 calls after
10. gpu_host_ia_red2.json goes to $OUT or benchmarks/results.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import torch

from cumulant.bench.provenance import provenance
from cumulant.nn import create_layer
from cumulant.nn.heads.ia_red2 import Pack, RedundancyReduction
from cumulant.nn.streams import attend_packed

RESULTS = Path(os.environ.get("OUT") or Path(__file__).parent / "results")
CALLS, WIDTH, HEADS, BATCH, LENGTHS = 200, 384, 6, 8, (1024, 4096)


def microseconds(call: Callable[[], Any]) -> tuple[float, float]:
    """Of one call: until the host is free, and until all is done."""
    for _ in range(10):
        call()
    torch.cuda.synchronize()
    begin = time.perf_counter()
    for _ in range(CALLS):
        call()
    issued = time.perf_counter() - begin
    torch.cuda.synchronize()
    return 1e6 * issued / CALLS, 1e6 * (time.perf_counter() - begin) / CALLS


def calls(length: int) -> dict[str, Callable[[], Any]]:
    """The plain layer, that of IA-RED2, and its parts in their order."""
    place: dict[str, Any] = {"device": "cuda", "dtype": torch.bfloat16}
    x = torch.randn(BATCH, length, WIDTH, **place)
    plain, made = (create_layer(name, WIDTH, HEADS, **place).eval() for name in ("multihead", "ia_red2"))
    layer = cast(RedundancyReduction, made)
    kept = layer.kept(x)
    pack = Pack.of(x, kept, room=True)
    out = attend_packed(layer, pack.tokens, pack.cu_seq, length)
    return {
        "multihead": lambda: plain(x),
        "ia_red2": lambda: layer(x),
        "which are kept": lambda: layer.kept(x),
        "laid end to end": lambda: Pack.of(x, kept, room=True),
        "projections and attention": lambda: attend_packed(layer, pack.tokens, pack.cu_seq, length),
        "put back": lambda: pack.unpacked(out),
    }


@torch.no_grad()
def main() -> None:
    rows = []
    for length in LENGTHS:
        for name, call in calls(length).items():
            host, whole = microseconds(call)
            rows.append({"call": name, "tokens": length, "host_us": round(host), "whole_us": round(whole)})
            print(rows[-1], flush=True)
    about = provenance("PYTHONPATH=src python benchmarks/gpu_host_ia_red2.py")
    about["machine"]["gpu"] = torch.cuda.get_device_name()
    text = json.dumps({**about, "calls": CALLS, "rows": rows}, indent=1) + "\n"
    (RESULTS / "gpu_host_ia_red2.json").write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
