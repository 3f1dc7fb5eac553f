"""How long the explorer takes to answer a click on a ViT-B/16 at 224 pixels, through its whole interface: one table.

    python benchmarks/explorer_clicks.py --threads 2

For each image: choosing it (the pass that keeps queries and keys, asked for as the page does it), the first click,
further clicks, a step of the lens's logit-scale slider, and switching a head off. Random weights, so that nothing is
fetched. Times are wall-clock in ms, median and largest over images; beside them the load of the machine, since other
work slows all of them down.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import time
from collections import defaultdict
from pathlib import Path

import torch
from fastapi.testclient import TestClient
from PIL import Image

import cumulant
from cumulant.bench.provenance import provenance
from cumulant.web import Example, Explorable, create_app


def milliseconds(work) -> float:  # type: ignore[no-untyped-def]
    begin = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - begin)


def measure(name: str, attention: str, images: int, clicks: int) -> dict[str, list[float]]:
    """Times of each step for one model, over its images."""
    torch.manual_seed(0)
    model = cumulant.create_model(name, attention=attention).eval()
    size = int(name.rsplit("_", 1)[-1])
    pictures = [Image.effect_noise((size, size), 40 + 10 * i).convert("RGB") for i in range(images)]
    shown = Explorable(model, tuple(map(str, range(1000))), size)
    client = TestClient(create_app({"model": shown}, [Example(picture) for picture in pictures]))
    tokens = client.app.state.engine.facts["model"].tokens  # type: ignore[attr-defined]
    found: dict[str, list[float]] = defaultdict(list)

    def ask(what: str, **question: object) -> None:
        answer = client.post(f"/api/{what}", json={"model": "model", **question})
        assert answer.status_code == 200, answer.text

    for number in range(images):
        image, off = f"example-{number}", [{"layer": 3, "head": 1}]
        found["choose the image"].append(milliseconds(lambda image=image: ask("prediction", image=image)))
        for click in range(clicks):
            query = (37 * click + 5) % tokens
            step = "first click" if click == 0 else "further click"
            found[step].append(milliseconds(lambda i=image, q=query: ask("attention", image=i, query=q)))
        lens = {"image": image, "query": 7, "layer": 5, "logit_scale": 1.5}
        found["lens: logit scale"].append(milliseconds(lambda q=lens: ask("lens", **q)))
        found["switch a head off"].append(milliseconds(lambda i=image, o=off: ask("prediction", image=i, off=o)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="vit_base_patch16_224")
    parser.add_argument("--attention", nargs="+", default=["softmax", "cumulant3"])
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--images", type=int, default=6)
    parser.add_argument("--clicks", type=int, default=6)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    results = {}
    print(f"load of the machine before: {os.getloadavg()[0]:.1f}", flush=True)
    for attention in options.attention:
        results[attention] = measure(options.model, attention, options.images, options.clicks)
        print(f"\n| {options.model}, {attention} | median ms | largest ms |\n|---|---|---|")
        for step, times in results[attention].items():
            print(f"| {step} | {statistics.median(times):.0f} | {max(times):.0f} |", flush=True)
    print(f"\nload of the machine after: {os.getloadavg()[0]:.1f}")
    if options.out:
        record = {**provenance(shlex.join(["python", *sys.argv])), "load": os.getloadavg()[0], "results": results}
        options.out.write_text(json.dumps(record, indent=1) + "\n")


if __name__ == "__main__":
    main()
