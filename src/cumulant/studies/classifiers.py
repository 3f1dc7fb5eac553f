"""Trained classifiers: every run leaves a model, a record of accuracies and confusions, and maps of its attention."""

from __future__ import annotations

import json
import multiprocessing
import time
from contextlib import ExitStack, suppress
from dataclasses import replace
from pathlib import Path
from typing import IO

from cumulant.data.part import Source
from cumulant.studies.maps import look
from cumulant.studies.records import MAPS, failed_record, is_record, key_of, make_record
from cumulant.studies.runs import Record
from cumulant.studies.training import Training, Trainings
from cumulant.tensors import threads
from cumulant.train import TrainRecipe, load, train
from cumulant.train.build import open_recipe_source
from cumulant.train.files import write_atomically
from cumulant.train.stepping import room_for_compiled_code


class Classifiers(Trainings):
    """Trains one model a run into runs/ and keeps what is said about it in records/."""

    def maps(self, run: Training) -> Path:
        return self.out / "records" / f"{run.name}{MAPS}"

    def finished(self, run: Training) -> Record | None:
        """A file that is no record of this version does not count."""
        with suppress(OSError, ValueError):
            record = super().finished(run)
            return record if is_record(record) and key_of(record) == run.key else None
        return None

    def make(self, run: Training, shared: Source | None = None, progress: IO[str] | None = None) -> Record:
        """Train one model and look at its maps.

        On a CPU it has one thread, so that the result does not depend on how many run beside it. A loss that is no
        number ends the run, not the study: its record says so.
        """
        recipe, start = replace(run.recipe, seed=run.seed), time.perf_counter()
        with ExitStack() as stack:
            if self.device == "cpu":
                stack.enter_context(threads(1))
            if recipe.compile:
                stack.enter_context(room_for_compiled_code())
            if shared is not None or multiprocessing.current_process().daemon:
                # There is nothing to decode, or this may have no processes of its own.
                recipe = replace(recipe, workers=0)
            source = shared or open_recipe_source(recipe)
            # By name only: the run goes on, and its files say the same, wherever the data lies.
            recipe = replace(recipe, data=Path(recipe.data).name)
            try:
                record = self._trained(run, recipe, source, progress)
            except FloatingPointError as error:
                record = failed_record(run, str(error), self.device, self.made)
            # With start and evaluation; of a run that went on, at least all its training.
            record["wall_seconds"] = round(max(time.perf_counter() - start, record.get("seconds", 0.0)), 2)
        return record

    def _trained(self, run: Training, recipe: TrainRecipe, source: Source, progress: IO[str] | None) -> Record:
        result = train(recipe, self.folder(run), source=source, device=self.device, fresh=self.fresh, progress=progress)
        record = make_record(run, result, source, self.device, self.made)
        seen = look(load(result.out / "last.safetensors"), recipe, source, examples=run.seed == 0) or {}
        record["locality"] = seen.get("locality")
        record["trained"] = seen.get("trained", [])
        if "maps" in seen:
            write_atomically(self.maps(run), json.dumps(seen["maps"], allow_nan=False).encode())
        return record
