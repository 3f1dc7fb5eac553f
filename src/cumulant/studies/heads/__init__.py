"""`cumulant study heads`: the orderings that the papers of the twelve layers report, in small, one study each.

`--layers moh` asks one of them. The setting `small` learns from digits and generated texts; `files` from CIFAR-10,
tiny-shakespeare, IMDB and legal judgments in the folder $CUMULANT_DATA, on a GPU.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import IO, Any

from cumulant import nn
from cumulant.bench.provenance import provenance
from cumulant.grammar import suggest
from cumulant.studies import measuring
from cumulant.studies.command import Study as Options
from cumulant.studies.heads import documents, pictures, text
from cumulant.studies.heads.ordering import Ordering
from cumulant.studies.measuring import Table, mean_of
from cumulant.studies.statements import AGAIN, Measured, Statement
from cumulant.train.files import write_atomically

LAYERS = ("moh", "sqa", "gda", "complexformer", "gaam", "rcmha", "lama", "sparsifiner", "biformer", "ia_red2",
          "dual_stream", "marro")  # fmt: skip


@dataclass(frozen=True)
class Settings:
    """`data`: "small" is generated, "files" are data sets in $CUMULANT_DATA; sizes and steps go with it."""

    layer: str
    data: str = "small"
    seeds: int = 3


def published(layer: str) -> Ordering:
    """What the paper of a layer says should come out."""
    return {**text.ORDERINGS, **pictures.ORDERINGS, **documents.ORDERINGS}[layer]


def plan(settings: Settings) -> list[str]:
    return list(published(settings.layer).names)


def statements(settings: Settings) -> list[Statement]:
    return published(settings.layer).statements


def measure(settings: Settings, configuration: str, seed: int, device: str) -> dict[str, Any]:
    """One configuration of a layer's ordering from one seed."""
    one = published(settings.layer)
    return one.measure(one.names[configuration], settings.data, seed, device)


def tables(settings: Settings, seeds: Sequence[Measured]) -> list[Table]:
    one = published(settings.layer)
    names = [*one.names, one.baseline + AGAIN]
    rows = [[name, *(cell(seeds, name, key) for key in one.columns)] for name in names]
    return [Table(f"{one.data[settings.data]}; {one.adapted}", ["", *one.columns], rows)]


def cell(seeds: Sequence[Measured], name: str, key: str) -> str:
    """A figure of the table; what is counted, or does not depend on the seed, as it is."""
    found = {one[name][key] for one in seeds if one.get(name, {}).get(key) is not None}
    if len(found) == 1 and "parameters" in key:
        return f"{found.pop():,}"
    return mean_of(seeds, name, key, 1 if key == "peak memory" else 4)


def study(layer: str) -> measuring.Study:
    """The study of one layer."""
    known, one = nn.get_layer(layer), published(layer)
    return measuring.Study(
        name=layer,
        claim="; ".join(statement.text for statement in one.statements),
        paper=known.paper,
        settings={data: Settings(layer, data) for data in ("small", "files")},
        plan=plan,
        measure=measure,
        statements=statements,
        tables=tables,
        control=one.baseline,
    )


def run(options: Options, progress: IO[str] | None = None) -> dict[str, Any]:
    """Measure what is missing of every layer that is asked and judge it; heads.json has all of them."""
    names = list(LAYERS) if "all" in options.layers else list(dict.fromkeys(options.layers))
    for name in names:
        if name not in LAYERS:
            raise ValueError(f"layer {name!r} has no ordering to try; {suggest(name, LAYERS)}")
    out = options.out / "heads"
    found = {name: measuring.run(study(name), replace(options, out=out), progress) for name in names}
    missing = [f"{name}: {left}" for name, one in found.items() for left in one["missing"]]
    result = {"study": "heads", "layers": found, "missing": missing, **provenance(options.command())}
    write_atomically(out / "heads.json", json.dumps(result, indent=1, allow_nan=False).encode())
    return result


def table(result: Mapping[str, Any]) -> str:
    """Every layer's tables and verdicts for a terminal."""
    return "\n\n".join(measuring.table(one) for one in result["layers"].values())
