"""What `cumulant diagnose` and `cumulant convert` do."""

from __future__ import annotations

import copy
import json
from typing import TextIO

from ..train.files import claim_room, write_atomically
from .conversion import ConversionReport, Layers, convert
from .diagnosis import Diagnosis, diagnose
from .distillation import distill, planned
from .opening import open_batches, open_model, open_training
from .saving import save
from .settings import Convert, Diagnose


def run_diagnose(settings: Diagnose, progress: TextIO | None = None) -> Diagnosis:
    """Diagnose the model; diagnosis.json and diagnosis.svg go to the folder `out`."""
    model = open_model(settings.model, settings.device)
    data = None
    if settings.data is not None:
        data = open_batches(model, settings.model, settings.data, settings.batches, settings.batch_size)
    claim_room(settings.out, 0)
    found = diagnose(
        model,
        data,
        attention=settings.attention,
        batches=settings.batches,
        queries=settings.queries,
        heads=settings.heads,
        dial=settings.dial,
        progress=progress,
    )
    write_atomically(settings.out / "diagnosis.json", json.dumps(found.to_json(), indent=1).encode())
    found.figure(settings.out / "diagnosis.svg")
    return found


def run_convert(settings: Convert, progress: TextIO | None = None) -> ConversionReport:
    """Convert the model and, if asked, distil it; it and conversion.json go to the folder `out`.

    Nothing is written where the dial found nothing to replace.
    """
    layers: Layers = [int(x) if x.lstrip("-").isdigit() else x for x in settings.layers]
    if settings.layers in (("all",), ("auto",), ("dial",)):
        layers = None if settings.layers == ("all",) else settings.layers[0]
    model = open_model(settings.model, settings.device)
    teacher = copy.deepcopy(model) if settings.distill else None
    data = None
    if settings.data is not None:
        data = open_batches(model, settings.model, settings.data, settings.batches, settings.batch_size)
    claim_room(settings.out, 0)
    if settings.distill and not settings.fresh and layers in ("auto", "dial"):
        layers = planned(settings.out) or layers  # a run that goes on has chosen its layers
    report = convert(
        model,
        settings.attention,
        layers=layers,
        options={} if settings.around is None else {"around": settings.around},
        budget=settings.budget if layers == "auto" else None,
        target=settings.target if layers == "dial" else None,
        data=data,
        heads=settings.heads,
        batches=settings.batches,
        progress=progress,
    )
    if settings.layers == ("dial",):
        report.attention = "dial"  # also where a run that goes on names the layers
    if not report.replaced:
        return report
    if teacher is None or settings.data is None or data is None:
        save(model, settings.out)
    else:
        how = settings.distillation
        training = open_training(
            model, settings.model, settings.data, settings.items_a_step, items=settings.items, seed=how.seed
        )
        report.distillation = distill(
            model, teacher, training, how, out=settings.out, measure=data, fresh=settings.fresh, progress=progress
        )
    write_atomically(settings.out / "conversion.json", json.dumps(report.to_json(), indent=1).encode())
    return report
