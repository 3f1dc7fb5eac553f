"""Error against softmax beside cost, for every mechanism: on random tokens and on those of a trained model.

Shape legend: B sequences, H heads, L tokens, D width.

Two errors are given, in float64. `relative` is ||out - softmax|| / ||softmax||. `centred` is
||out - softmax|| / ||softmax - mean of the values||: the mean, to which no query contributes, has 1, so that only what
is below 1 is worth its cost. Only cumulant and cluster attention set out to equal softmax; for the others
the error says what happens where they replace it without training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import mean
from typing import IO, Any

import torch
from torch import Tensor, nn

from cumulant.bench.command import Error
from cumulant.bench.error import logit_size, relative_error
from cumulant.bench.variants import Variant, parse, select
from cumulant.bench.work import work_of
from cumulant.call import Call, check_count
from cumulant.inspect.batches import evaluating
from cumulant.inspect.items import labelled_items, pixels_of
from cumulant.inspect.opening import open_model
from cumulant.inspect.sites import find_sites
from cumulant.inspect.watching import watching
from cumulant.nn import AxialAttention
from cumulant.train.progress import bar_of

SIZES = (0.25, 0.5, 1.0, 2.0, 4.0)
LARGEST = 1e100  # of the logits: their squares are finite in float64


def random_tokens(
    size: float,
    *,
    length: int = 256,
    dim: int = 64,
    heads: int = 2,
    batch: int = 2,
    seed: int = 0,
    causal: bool = False,
) -> Call:
    """Independent normal q, k, v (B, H, L, D); the standard deviation of the scaled q.k over keys is `size`."""
    if not 0 < size <= LARGEST:
        raise ValueError(f"sizes must be positive and at most {LARGEST:g}, got {size:g}")
    for name, number in (("length", length), ("dim", dim)):
        check_count(name, number)
    generator = torch.Generator().manual_seed(seed)
    query, key, value = torch.randn(3, batch, heads, length, dim, generator=generator, dtype=torch.float64)
    if length > 1:
        query = query * (size / logit_size(query, key))
    return Call(query, key, value, is_causal=causal)


@torch.no_grad()
def case(name: str, call: Call, variants: Sequence[Variant], kind: str) -> dict[str, Any]:
    """Error and work of every variant on the same tokens; `of_softmax` is its work over that of softmax."""
    query, key, value = (x.double() for x in call[:3])
    call = call._replace(query=query, key=key, value=value)
    softmax, plain_mean = parse("softmax"), parse("cumulant1").plain()
    expected = softmax.run(call)
    spread = (expected - plain_mean.run(call)).norm().item()
    query, key, value = (x[:1, :1] for x in call[:3])  # the work is that of one head
    one = call._replace(query=query, key=key, value=value, key_mask=None, query_mask=None)
    exact = work_of(softmax, one).total
    rows = []
    for variant in variants:
        row: dict[str, Any] = {"variant": variant.label, "note": ""}
        try:
            out = variant.plain().run(call)
            work = work_of(variant, one)
        except (ValueError, TypeError) as error:  # a number was asked for, and a word given: an option of the variant
            rows.append({**row, "note": str(error)})
            continue
        gap = (out - expected).norm().item()
        if not math.isfinite(gap):  # also where `out` is finite and its norm is not
            row["note"] = "not finite"
        row |= {
            "relative": None if row["note"] else relative_error(out, expected),
            "centred": None if row["note"] or not spread else gap / spread,
            **asdict(work),
            "total": work.total,
            "of_softmax": work.total / exact,
        }
        rows.append(row)
    mark_front(rows)
    return {
        "name": name,
        "kind": kind,
        "logit_size": logit_size(call.query, call.key),
        "heads": call.query.shape[-3],
        "tokens": call.query.shape[-2],
        "dim": call.query.shape[-1],
        "is_causal": call.is_causal,
        "rows": rows,
    }


def mark_front(rows: Sequence[dict[str, Any]]) -> None:
    """Set `front` on every row: whether no other is both cheaper (or equal) and closer to softmax.

    Softmax itself is the end of every front and is not on it; nor is what is further off than the mean of the values.
    """
    able = [row for row in rows if row.get("centred") is not None and row["variant"] != "softmax"]
    best = 0.999
    for row in rows:
        row["front"] = False
    for row in sorted(able, key=lambda row: (row["total"], row["centred"])):
        if row["centred"] < best and row["of_softmax"] < 1:
            row["front"], best = True, row["centred"]


def error_against_cost(
    texts: Sequence[str] = ("all",),
    *,
    sizes: Sequence[float] = SIZES,
    length: int = 256,
    dim: int = 64,
    seed: int = 0,
    causal: bool = False,
    captured: Mapping[str, Call] | None = None,
    captured_from: str = "",
    on_case: Callable[[str], None] | None = None,
) -> dict[str, Any]:
    """Error and cost of the named variants ("all": every mechanism) on random tokens and on captured ones.

    Cost: that of softmax and of every mechanism, in float64, once for each size and each captured layer.
    """
    variants, left_out = select(texts, "causal" if causal else "noncausal")
    cases = []
    shape: dict[str, Any] = {"length": length, "dim": dim, "seed": seed, "causal": causal}
    drawn = {f"random, logit size {size:g}": random_tokens(size, **shape) for size in sizes}
    for kind, group in (("random", drawn), ("captured", captured or {})):
        for name, call in group.items():
            cases.append(case(name, call, variants, kind))
            if on_case is not None:
                on_case(name)
    if not cases:
        raise ValueError("there is nothing to measure: give sizes, or a checkpoint")
    return {
        "bench": "error",
        "variants": [variant.label for variant in variants],
        "left_out": left_out,
        "cases": cases,
        "groups": [group for kind in ("random", "captured") for group in _groups(cases, kind)],
        "captured_from": captured_from,
        "setting": {"length": length, "dim": dim, "seed": seed, "causal": causal, "sizes": list(sizes)},
    }


def run(settings: Error, progress: IO[str] | None = None) -> dict[str, Any]:
    """What `cumulant bench error` measures when mechanisms or a checkpoint are named; `progress` gets a bar."""
    captured: Mapping[str, Call] = {}
    words = ""
    if settings.checkpoint is not None:
        captured, words = from_checkpoint(settings.checkpoint, data=settings.data, images=settings.images)
    with bar_of("error", len(settings.sizes) + len(captured), "case", progress, leave=False) as bar:
        return error_against_cost(
            settings.attention or ("all",),
            sizes=settings.sizes,
            length=settings.length,
            dim=settings.dim,
            causal=settings.causal,
            captured=captured,
            captured_from=words,
            on_case=lambda _: bar.update(),
        )


def _groups(cases: Sequence[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    """What a panel shows: each random case, and the captured layers together.

    Of these the root mean square of their errors, and the mean of their work: layers may differ in their tokens.
    """
    own = [one for one in cases if one["kind"] == kind]
    if kind == "random" or not own:
        return [{"name": one["name"], "kind": kind, "rows": one["rows"]} for one in own]
    rows = []
    for number, first in enumerate(own[0]["rows"]):
        layers = [one["rows"][number] for one in own]
        errors = [layer.get("centred") for layer in layers]
        if any(error is None for error in errors):
            rows.append({"variant": first["variant"], "note": first["note"] or "not on every layer", "front": False})
            continue
        work = {key: round(mean(layer[key] for layer in layers)) for key in ("multiply_adds", "other", "total")}
        share = mean(layer["total"] for layer in layers) / mean(
            layer["total"] / layer["of_softmax"] for layer in layers
        )
        rows.append({**first, **work, "of_softmax": share, "centred": mean(error**2 for error in errors) ** 0.5})
    mark_front(rows)
    return [{"name": f"trained model, {len(own)} layers", "kind": kind, "rows": rows}]


def table(result: dict[str, Any]) -> str:
    """For a terminal: cost beside the centred error of every group; * marks the front of a column."""
    groups = result["groups"]
    heads = [_head(group["name"]) for group in groups]
    lines = [
        "centred error against softmax (1: no better than the mean of the values); * not beaten at its cost",
        f"{'':28s}{'multiply-adds':>15s}{'all work':>15s}{'of softmax':>12s}" + "".join(f"{h:>11s}" for h in heads),
    ]
    lines[1] = lines[1].replace("    trained", f"{'of softmax':>12s}    trained")
    by_name = [{row["variant"]: row for row in group["rows"]} for group in groups]
    by_variant = {name: [rows[name] for rows in by_name] for name in result["variants"]}
    ordered = sorted(by_variant, key=lambda name: by_variant[name][0].get("total", float("inf")))
    for name in ordered:
        rows = by_variant[name]
        if "total" not in rows[0]:
            lines.append(f"{name:28s}  {rows[0]['note']}")
            continue
        cost = f"{rows[0]['multiply_adds']:>15,}{rows[0]['total']:>15,}{rows[0]['of_softmax']:>12.3f}"
        cells = [_cell(row, group["kind"]) for row, group in zip(rows, groups, strict=True)]
        lines.append(f"{name:28s}{cost}" + "".join(cells))
    lines += [f"left out: {name}: {reason}" for name, reason in result["left_out"].items()]
    return "\n".join(lines)


def _cell(row: dict[str, Any], kind: str) -> str:
    """The error; that of the trained model behind the share of work at its own number of tokens."""
    error = f"{row['centred']:.3g}" + "* "[not row["front"]] if row.get("centred") is not None else row["note"][:9]
    share = f"{row['of_softmax']:>12.3f}" if "of_softmax" in row else f"{'':12s}"
    return (share if kind == "captured" else "") + f"{error or '-':>11s}"


def _head(name: str) -> str:
    return name.replace("random, logit size ", "size ").replace("trained model", "trained").split(",")[0]


@torch.no_grad()
def capture(model: nn.Module, images: Tensor) -> dict[str, Call]:
    """What every attention layer of the model is asked to compute, by its name, in the order in which they run.

    Query, key and value (B, H, L, D) have norms and temperatures applied. The model runs once in evaluation mode and is
    left as it was. Cost: one forward pass and its projections again.
    """
    sites, found = find_sites(model), dict[str, Call]()
    for site in sites:
        if isinstance(site.module, AxialAttention):
            raise ValueError(f"{site.name} attends along two axes in turn: it has no single set of q, k, v")
    with evaluating(model), watching(model, sites, lambda site, seen, _: found.update({site.name: seen.call})):
        model(images)
    return found


def from_checkpoint(path: str | Path, *, data: str | None = None, images: int = 32) -> tuple[dict[str, Call], str]:
    """What a model sees in `images` test inputs of its data, and that in words.

    `path` is a word of `inspect.open_model`; `data` replaces the data of the recipe in its weights.
    """
    opened = open_model(path)
    model: Any = opened.model.float()  # a file may hold half-precision weights
    config = getattr(model, "config", None) or {}
    if opened.recipe is None and data is None and config.get("name") == "vit_nano_patch2_8":
        data = "digits"
    pixels, _, source = labelled_items(opened, data, images)
    words = f"{config['name']} trained with {config.get('attention', 'softmax')}, {len(pixels)} of"
    return capture(model, pixels_of(opened).batch(pixels)), f"{words} {Path(source.name).name}"
