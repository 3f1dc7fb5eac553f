"""What the report shows besides the training runs: error against softmax, time and memory on this machine, and the dial
from linear attention to softmax on one photograph: what each patch takes from those that look like it.

Of the dial no model and nothing is trained: a token is a patch; its key and query are its leading principal components,
whitened, and its place; its value is its pixels in 4 x 4 colours. Softmax over such logits is the non-local mean of a
picture, as sharp as trained attention often is. The photograph comes with scikit-learn. Shape legend: L patches, D
components.
"""

from __future__ import annotations

import base64
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant.attention import attention, scores
from cumulant.bench.error import LOGIT_SIZES, softmax_error
from cumulant.bench.scaling import LENGTHS, scaling
from cumulant.cluster import KMeans, cluster_scores, multiply_adds
from cumulant.grammar import parse, read_blocks

Bar = Callable[[str, int, str], AbstractContextManager[Any]]
PATCH = 16
COMPONENTS = 16
SPREAD = 2.0  # of the logits over the keys; layers of trained encoders have 1.4 to 5.9
QUERY = (10, 20)  # row and column of the patch whose maps are shown: on the roof
SETTINGS = ((16, 0), (64, 0), (64, 4), (64, 16))  # clusters, near
OPTIONS = {"rank": "error", "near_rows": 1, "response": "pooled"}


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


def photograph() -> Tensor:
    """(H, W, 3) bytes, sides that patches divide."""
    from sklearn.datasets import load_sample_image

    pixels = torch.tensor(load_sample_image("china.jpg"))
    return pixels[: pixels.shape[0] // PATCH * PATCH, : pixels.shape[1] // PATCH * PATCH]


def tokens(pixels: Tensor) -> tuple[Tensor, Tensor, tuple[int, int]]:
    """Query and key in one (1, 1, L, D), value (1, 1, L, 48), and the grid."""
    rows, columns = pixels.shape[0] // PATCH, pixels.shape[1] // PATCH
    cut = pixels.double().div(255).reshape(rows, PATCH, columns, PATCH, 3)
    patches = cut.transpose(1, 2).reshape(rows * columns, -1)
    centred = patches - patches.mean(0)
    values, vectors = torch.linalg.eigh(centred.mT @ centred / len(centred))
    looks = centred @ vectors[:, -COMPONENTS:] / values[-COMPONENTS:].sqrt() / COMPONENTS**0.5
    place = torch.cartesian_prod(torch.arange(rows), torch.arange(columns)).double() / rows
    key = F.normalize(torch.cat([looks, (place - place.mean(0)) / 2], -1), dim=-1)
    key = key * (SPREAD / (key @ key.mT).std(-1, correction=0).mean()).sqrt()
    value = cut.transpose(1, 2).reshape(-1, 4, 4, 4, 4, 3).mean((2, 4)).flatten(1)  # 4 x 4 colours
    return key[None, None].float(), value[None, None].float(), (rows, columns)


def dial_on_a_photograph() -> dict[str, Any]:
    """Error, cost and one map at each setting of the dial, second-order attention first and softmax last."""
    pixels = photograph()
    key, value, grid = tokens(pixels)
    length, place = grid[0] * grid[1], QUERY[0] * grid[1] + QUERY[1]
    query = key[:, :, place : place + 1]
    weights = (key @ key.mT).softmax(-1)
    exact, mean = weights @ value, value.mean(-2, keepdim=True)
    whole = float(length * length * (key.shape[-1] + value.shape[-1]))

    def row(title: str, out: Tensor, one: Tensor, work: float) -> dict[str, Any]:
        error = ((out - exact).norm() / (exact - mean).norm()).item()
        shown = [round(weight, 6) for weight in one.flatten().tolist()]
        return {"title": title, "error": error, "cost": work / whole, "weights": shown}

    widths = key.shape[-1], value.shape[-1]
    out, one = attention(key, key, value, order=2, scale=1.0), scores(query, key, order=2, scale=1.0)
    found = [row("linear: order 2", out, one, 2.0 * length * widths[0] * widths[1])]
    for clusters, near in SETTINGS:
        options: dict[str, Any] = {"clusters": KMeans(clusters), "near": near, "scale": 1.0, **OPTIONS}
        maps = cluster_scores(key, key, **options)
        near_tokens = near * length / clusters
        work = multiply_adds(
            length, *widths, clusters, near_tokens=near_tokens, response="pooled", kmeans=options["clusters"]
        )
        found.append(row(f"{clusters} clusters, {near} near", maps @ value, maps[..., place, :], work))
    found.append(row("softmax", exact, weights[..., place, :], whole))
    return {
        "grid": list(grid), "query": place, "spread": SPREAD, "tokens": length, "rows": found,
        "size": [pixels.shape[0] // 4, pixels.shape[1] // 4],
        "pixels": base64.b64encode(pixels[::4, ::4].contiguous().numpy().tobytes()).decode(),
    }  # fmt: skip
