"""`cumulant study heads`: the orderings that the papers of the layers report, in small, each against a plain layer.

A layer's ordering is a recipe (digits, or generated stories as characters), configurations with the baseline first, and
links of the paper. What is judged is the accuracy on the test part, of a text that of the next character.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import IO, TYPE_CHECKING, Any

from cumulant.studies.budget import Budget
from cumulant.studies.plan import CONTROL_SEED
from cumulant.studies.runs import Record, complete
from cumulant.studies.training import Training, Trainings, device_of, trainings
from cumulant.studies.verdict import Claim, verdict

if TYPE_CHECKING:
    from cumulant.data.part import Source
    from cumulant.studies.command import Study


@dataclass(frozen=True)
class Ordering:
    """What a page says should come out, and on what it is tried here; `names` maps short names to configurations."""

    recipe: str
    names: Mapping[str, str]  # the baseline first
    links: tuple[tuple[str, str, bool], ...]  # above, below, whether a tie agrees
    adapted: str  # how this differs from what the paper did

    @property
    def claim(self) -> Claim:
        return Claim(tuple((self.names[a], self.names[b], tie) for a, b, tie in self.links))


_MOH = "softmax+num_heads=8+layer=moh"
_SQA = "softmax+num_heads=8+layer=sqa+variant"
_GDA = "softmax+num_heads=8+layer=gda"
ORDERINGS = {
    "moh": Ordering(
        "digits",
        {"plain": "softmax+num_heads=8", "three quarters": f"{_MOH}+shared=2+top=4", "half": f"{_MOH}+shared=2+top=2",
         "half, none shared": f"{_MOH}+shared=0+top=4"},
        (("three quarters", "plain", True), ("plain", "half", True), ("half", "half, none shared", True)),
        "digits in place of ImageNet and of 100 billion tokens",
    ),
    "sqa": Ordering(
        "sentences",
        {"plain": "softmax+num_heads=8", **{kind: f"{_SQA}={kind}" for kind in ("ssqa", "sqa", "xsqa", "xsmqa")}},
        (("plain", "ssqa", False), ("ssqa", "sqa", False), ("sqa", "xsqa", False), ("xsqa", "xsmqa", False)),
        "generated stories in place of Wikipedia",
    ),
    "gda": Ordering(
        "sentences",
        {"plain": "softmax+num_heads=8", "ratio 1": f"{_GDA}+ratio=1", "ratio 3": f"{_GDA}+ratio=3"},
        (("ratio 3", "ratio 1", True), ("ratio 1", "plain", True)),
        "generated stories; heads of one width, so that parameters differ",
    ),
    "complexformer": Ordering(
        "sentences",
        {"rotary": "softmax", "complexformer": "softmax+layer=complexformer+scale=none",
         "no places": "softmax+positions=none"},
        (("complexformer", "rotary", True), ("rotary", "no places", True)),
        "generated stories; scores over sqrt(D)",
    ),
    "gaam": Ordering(
        "digits",
        {"plain": "softmax", "gaam": "softmax+layer=gaam", "density over tokens": "softmax+layer=gaam+axis=tokens"},
        (("gaam", "plain", False), ("plain", "density over tokens", False)),
        "a whole model trained in place of a head on features of a frozen encoder",
    ),
    "lama": Ordering(
        "digits",
        {"mean": "cumulant1", "lama": "softmax+layer=lama", "lama, learned": "softmax+layer=lama+context=learned"},
        (("lama", "lama, learned", True), ("lama, learned", "mean", True)),
        "tokens of digits in place of texts behind a GRU; the mean of the values in place of mean pooling",
    ),
}  # fmt: skip
CLAIMS = {name: one.claim for name, one in ORDERINGS.items()}


class Layers(Trainings):
    """Trains one model a run; its record has the accuracy, of a text the loss too, and what it cost."""

    def share(self, run: Training) -> Source | None:
        from cumulant.train.build import open_recipe_source

        source = open_recipe_source(run.recipe)
        return source if source.kind == "text" else super().share(run)

    def make(self, run: Training, shared: Source | None = None, progress: IO[str] | None = None) -> Record:
        from cumulant.tensors import threads
        from cumulant.train import train

        recipe, start = replace(run.recipe, seed=run.seed, workers=0), time.perf_counter()
        with ExitStack() as stack:
            if self.device == "cpu":
                stack.enter_context(threads(1))
            where: dict[str, Any] = {"source": shared, "device": self.device, "fresh": self.fresh, "progress": progress}
            result = train(recipe, self.folder(run), **where)
        told = {name: getattr(result, name, None) for name in ("nats", "parameters", "epochs", "steps")}
        seconds = round(time.perf_counter() - start, 1)
        return {"configuration": run.configuration, "seed": run.seed, "role": run.role, "accuracy": result.top1,
                **told, "seconds": seconds, **self.made}  # fmt: skip


def planned(name: str, seeds: int = 3, controls: int = 3, epochs: int = 0, data: str | None = None) -> list[Training]:
    """The runs of one layer's ordering."""
    from cumulant.train import read_recipe

    one = ORDERINGS[name]
    recipe = read_recipe(one.recipe)
    recipe = recipe.lasting(epochs or recipe.epochs)
    names = list(one.names.values())
    return trainings(recipe, names, names[0], seeds, controls, data=data, first_control=CONTROL_SEED)


def run(settings: Study, progress: IO[str] | None = None) -> dict[str, Any]:
    """Train what is missing and judge each ordering; `missing` names runs for which there was no time."""
    from cumulant.bench.provenance import provenance
    from cumulant.grammar import suggest
    from cumulant.train.build import open_recipe_source

    names = list(ORDERINGS) if "all" in settings.layers else list(dict.fromkeys(settings.layers))
    for name in names:
        if name not in ORDERINGS:
            raise ValueError(f"layer {name!r} has no ordering to try; {suggest(name, ORDERINGS)}")
    made = {"provenance": provenance(f"cumulant study heads --layers {' '.join(names)}")}
    budget, found = Budget(settings.minutes), {}
    for name in names:
        counts = settings.seeds or 3, 3 if settings.control is None else settings.control, settings.epochs
        runs = planned(name, *counts)
        data = open_recipe_source(runs[0].recipe).identity()["digest"]
        runs = planned(name, *counts, data)
        shop = Layers(settings.out / "heads" / name, device_of(settings), made, settings.fresh)
        records = complete(runs, shop, workers=settings.workers or 1, budget=budget, progress=progress, on=settings.on)
        found[name] = judged(name, runs, records)
        settings.out.mkdir(parents=True, exist_ok=True)
        content = json.dumps({"study": "heads", **made, "layers": found}, indent=1)
        (settings.out / "heads.json").write_text(content, encoding="utf-8")
    missing = [left for one in found.values() for left in one["missing"]]
    return {"study": "heads", **made, "layers": found, "missing": missing}


def judged(name: str, runs: Sequence[Training], records: Mapping[Training, Record]) -> dict[str, Any]:
    """Table and verdict of one layer from the records that there are."""
    one = ORDERINGS[name]
    compared: dict[str, list[float]] = {}
    control: list[float] = []
    for done, record in records.items():
        place = control if done.role == "control" else compared.setdefault(done.configuration, [])
        place.append(record["accuracy"])
    baseline = next(iter(one.names.values()))
    rows = []
    for label, configuration in one.names.items():
        own = [
            record for done, record in records.items() if (done.configuration, done.role) == (configuration, "compared")
        ]
        if own:
            reached = [record["accuracy"] for record in own]
            nats = [record["nats"] for record in own if record.get("nats") is not None]
            rows.append({
                "name": label, "configuration": configuration, "accuracies": reached, "mean": statistics.mean(reached),
                "nats": statistics.mean(nats) if nats else None, "parameters": own[0]["parameters"],
                "seconds": statistics.mean(record["seconds"] for record in own),
            })  # fmt: skip
    said = verdict(one.claim, compared, control, baseline) if compared.get(baseline) else None
    missing = [str(left) for left in runs if left not in records]
    return {"recipe": one.recipe, "adapted": one.adapted, "rows": rows, "control": control, "verdict": said,
            "missing": missing}  # fmt: skip


def table(result: Mapping[str, Any]) -> str:
    """Every layer's rows and verdict for a terminal."""
    lines = []
    for name, found in result["layers"].items():
        lines.append(f"{name}, recipe {found['recipe']} ({found['adapted']})")
        for row in found["rows"]:
            nats = "" if row["nats"] is None else f"  {row['nats']:.3f} nats"
            each = " ".join(f"{100 * one:.1f}" for one in row["accuracies"])
            lines.append(f"  {row['name']:22s}{100 * row['mean']:6.2f} %{nats}  {row['parameters']:>9,}  ({each})")
        if found["verdict"] is not None:
            lines += [f"  {found['verdict'][key]}" for key in ("claim_text", "control_text")]
        lines += [f"  no time was left for {left}" for left in found["missing"]]
    return "\n".join(lines)
