"""The steps of a distillation: layers first, then answers, from the state in a folder to the end of the run."""

from __future__ import annotations

import json
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor, nn

from ..inspect.batches import Batch, answer, answers, call, relative_error
from ..nn.swapped.plan import plan_of
from ..train import optimise
from ..train.files import claim_room, naming, read_json, write_atomically
from ..train.log import Log
from ..train.processes import Processes
from ..train.progress import Bar, Meter, Stop
from ..train.state import (
    STATE,
    Progress,
    bytes_needed,
    load_state,
    mend_state,
    read_progress,
    remove_states,
    save_state,
)
from .distill_data import Batches
from .distill_losses import answer_loss, present, unexplained, usual_loss
from .saving import save
from .settings import DistillRecipe

NOTES, RESULT = "notes.json", "distilled.json"
LOGGED = 50  # steps between two lines of the log, at most
Output = Callable[[Any, Batch], Tensor]


@dataclass(frozen=True)
class DistillResult:
    """What a distillation reached. Changes are ||student - teacher|| / ||teacher|| of the output, before and after.

    `layers` gives, for each replaced layer, the share of its output's variance that it misses (0: equal) at the start
    and after the first part; `losses` the mean loss of each part over its first and its last logged steps.
    """

    steps: int
    layer_steps: int
    seconds: float
    layers: dict[str, tuple[float, float]]
    losses: dict[str, tuple[float, float]]
    change: tuple[float, float] | None = None

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    def __str__(self) -> str:
        ends = [sum(pair[at] for pair in self.layers.values()) / max(1, len(self.layers)) for at in (0, 1)]
        lines = [
            f"distilled for {self.steps} steps ({self.layer_steps} of them layer by layer), {self.seconds:.0f} s",
            f"share of a layer's output that it misses, mean over layers: {ends[0]:.1%} before, {ends[1]:.1%} after",
        ]
        lines += [f"loss of the {name}: {a:.4g} at first, {b:.4g} at last" for name, (a, b) in self.losses.items()]
        if self.change is not None:
            lines.append(f"relative change of the output: {self.change[0]:.2%} before, {self.change[1]:.2%} after")
        return "\n".join(lines)


@dataclass(frozen=True)
class Part:
    """One part of a run as `optimise.learning_rate` wants it, with steps for epochs."""

    name: str
    first: int
    epochs: int
    lr: float
    min_lr: float
    warmup_epochs: float

    @property
    def end(self) -> int:
        return self.first + self.epochs


class Run:
    """One distillation from its state in the folder, if there is one, to the end."""

    def __init__(
        self,
        model: nn.Module,
        teacher: nn.Module,
        batches: Batches,
        recipe: DistillRecipe,
        folder: Path | None,
        output: Output | None,
        measured: list[Batch],
        progress: IO[str] | None,
    ) -> None:
        self.model, self.teacher, self.batches, self.recipe = model, teacher, batches, recipe
        self.folder, self.output, self.measured, self.screen = folder, output, measured, progress
        self.device = next(model.parameters()).device
        names = list(plan_of(model))
        self.pairs = {name: (model.get_submodule(name), teacher.get_submodule(name)) for name in names}
        total = recipe.epochs * len(batches)
        first = round(recipe.layer_share * total)
        shared = {"min_lr": recipe.min_lr}
        self.parts = [
            Part("layers", 0, first, recipe.layer_lr, warmup_epochs=recipe.warmup * first, **shared),
            Part("answers", first, total - first, recipe.lr, warmup_epochs=recipe.warmup * (total - first), **shared),
        ]
        self.total = total
        self.kind: str = recipe.loss
        self.meter = Meter(Processes(self.device), self._not_finite)
        self.notes: dict[str, Any] = {"layers": {}, "losses": {}, "before": None}
        self.done = Progress()
        if folder is not None:
            claim_room(folder, bytes_needed(model, averaged=False))
            mend_state(folder)
        if folder is None or not (folder / STATE).is_file():
            self._begin(self._part_at(0))
            return
        # The part first: the state holds the moments of that part's optimizer.
        self._begin(self._part_at(read_progress(folder / STATE).step))
        self.done = load_state(folder / STATE, model, self.optimizer, None, self.meter)
        self.notes = read_json(folder / NOTES)

    def _part_at(self, step: int) -> Part:
        return next((part for part in self.parts if step < part.end), self.parts[-1])

    def _begin(self, part: Part) -> None:
        """The weights that this part trains, and an optimizer for them."""
        self.part = part
        own = {id(p) for student, _ in self.pairs.values() for p in student.parameters()}
        for name, parameter in self.model.named_parameters():
            trained = part.name == "answers" or id(parameter) in own
            parameter.requires_grad_(trained and not name.startswith(self.recipe.frozen))
        groups = optimise.decay_groups(self.model, self.recipe.weight_decay)
        self.optimizer = optimise.adamw(groups, lr=part.lr, beta2=0.999)

    def go(self) -> DistillResult:
        recipe, done = self.recipe, self.done
        steps = len(self.batches)
        began = time.perf_counter() - done.seconds
        with ExitStack() as stack:
            self.log = stack.enter_context(Log(self.folder, after=done.step)) if self.folder is not None else None
            stop = stack.enter_context(Stop(active=self.folder is not None))
            self.bar = stack.enter_context(Bar(self.screen, self.total, done.step, 1))
            # Before the loop: a loader that streams serves one epoch at a time.
            self.probe = next(iter(self.batches.epoch(0)))
            if not done.step:
                self.notes["layers"] = {name: [missed, missed] for name, missed in self._missed().items()}
                self.notes["before"] = self._change() if self.measured else None
            for epoch in range(done.step // steps, recipe.epochs):
                for batch in self.batches.epoch(epoch, done.step - epoch * steps):
                    self._step(batch)
                    done.seconds = time.perf_counter() - began
                    self._log_loss()
                    self.bar.update()
                    due = recipe.checkpoint_steps and done.step % recipe.checkpoint_steps == 0
                    if done.step < self.total and (stop.asked or due):
                        self._save()
                        stop.obey()
            self.meter.deliver(wait=True)
        return self._finish()

    def _step(self, batch: Batch) -> None:
        part, step = self.part, self.done.step
        loss = self._layers(batch) if part.name == "layers" else self._answers(batch)
        rate = optimise.learning_rate(part, step + 1 - part.first)
        optimise.step(self.optimizer, [p for p in self.model.parameters() if p.requires_grad], rate, self.recipe.clip)
        self.done.step = step + 1
        self.meter.add(loss)

    def _layers(self, batch: Batch) -> Tensor:
        """Mean over the layers of the share of a layer's output that its replacement misses on the same input.

        Each is trained as soon as the teacher has passed its layer, so that one layer at a time is kept for it.
        """
        mask, losses = present(batch), []

        def train(student: nn.Module, args: tuple, kwargs: dict[str, Any], wanted: Any) -> None:
            with torch.enable_grad():
                with self._autocast(cache_enabled=False):
                    found = student(*args, **kwargs)
                loss = unexplained(_first(found), _first(wanted), mask)
                if loss.requires_grad:  # else all of the layer is frozen
                    with torch.autocast(self.device.type, enabled=False):
                        (loss / len(self.pairs)).backward()
            losses.append(loss.detach())

        self._watch_teacher(batch, train)
        return torch.stack(losses).mean()

    def _watch_teacher(self, batch: Batch, see: Callable[[nn.Module, tuple, dict[str, Any], Any], None]) -> Any:
        """The teacher's answer; `see(student layer, args, kwargs, output)` hears what passes each replaced layer."""
        with ExitStack() as stack, torch.no_grad(), self._autocast():
            for student, layer in self.pairs.values():

                def told(_: Any, args: tuple, kwargs: dict[str, Any], output: Any, own: nn.Module = student) -> None:
                    see(own, args, kwargs, output)

                stack.callback(layer.register_forward_hook(told, with_kwargs=True).remove)
            return call(self.teacher, batch)

    def _answers(self, batch: Batch) -> Tensor:
        """The loss between both models' answers, plus `layer_weight` times that of the replaced layers' outputs."""
        recipe, mask = self.recipe, present(batch)
        wanted: dict[nn.Module, list[Tensor]] = defaultdict(list)
        found: dict[nn.Module, list[Tensor]] = defaultdict(list)
        compared = [student for student, _ in self.pairs.values()] if recipe.layer_weight else []

        def keep(student: nn.Module, _: tuple, __: dict[str, Any], output: Any) -> None:
            if compared:
                wanted[student].append(_first(output))

        said = self._watch_teacher(batch, keep)
        with ExitStack() as stack, self._autocast():
            for student in compared:
                hook = student.register_forward_hook(lambda module, _, output: found[module].append(_first(output)))
                stack.callback(hook.remove)
            answered = call(self.model, batch)
        read = self.output or answer
        if self.kind == "auto":
            self.kind = usual_loss(self.teacher, said, self.output is not None)
        loss = answer_loss(self.kind, read(answered, batch), read(said, batch), mask, recipe.temperature)
        if recipe.layer_weight:
            pairs = ((a, b) for one in wanted for a, b in zip(found[one], wanted[one], strict=True))
            missed = [unexplained(a, b, mask) for a, b in pairs]
            loss = loss + recipe.layer_weight * torch.stack(missed).mean()
        loss.backward()
        return loss.detach()

    def _autocast(self, **how: Any) -> torch.autocast:
        return torch.autocast(self.device.type, torch.bfloat16, enabled=self.recipe.precision == "bf16", **how)

    def _log_loss(self) -> None:
        """Log the mean loss now and then, and change to the next part where this one ends."""
        part, step, seconds = self.part, self.done.step, self.done.seconds
        at_end = step == part.end
        every = max(1, min(LOGGED, part.epochs // 4))
        if not at_end and (step - part.first) % every:
            self.meter.check(step)
            return
        rate = optimise.learning_rate(part, step - part.first)

        def write(loss: float) -> None:
            ends = self.notes["losses"].setdefault(part.name, [loss, loss])
            ends[1] = loss
            self.bar.say(part=part.name, loss=f"{loss:.4g}")
            if self.log is not None and self.folder is not None:
                with naming(str(self.log.path)):
                    self.log.write({"kind": part.name, "step": step, "loss": loss, "lr": rate, "seconds": seconds})

        self.meter.request(step, write)
        if at_end and part is not self.parts[-1]:
            for name, missed in self._missed().items():
                self.notes["layers"][name][1] = missed
            self._begin(self._part_at(step))

    def _missed(self) -> dict[str, float]:
        """The share of its output that each replaced layer misses, on the first batch."""
        mask, names = present(self.probe), {id(student): name for name, (student, _) in self.pairs.items()}
        seen: dict[str, list[Tensor]] = {}

        def compare(student: nn.Module, args: tuple, kwargs: dict[str, Any], wanted: Any) -> None:
            with torch.no_grad(), self._autocast():
                found = student(*args, **kwargs)
            seen.setdefault(names[id(student)], []).append(unexplained(_first(found), _first(wanted), mask))

        self._watch_teacher(self.probe, compare)
        return {name: float(torch.stack(values).mean()) for name, values in seen.items()}

    def _change(self) -> float:
        return relative_error(
            answers(self.model, self.measured, self.output), answers(self.teacher, self.measured, self.output)
        )

    def _save(self) -> None:
        """The state to go on from: only with a loss that is a number, and after log and notes are on the disk."""
        if self.folder is None:
            return
        self.meter.request(self.done.step)
        self.meter.deliver(wait=True)
        if self.log is not None:
            self.log.settle()
        with naming(f"the state after step {self.done.step} into {self.folder}"):
            write_atomically(self.folder / NOTES, json.dumps(self.notes).encode())
            save_state(self.folder, self.model, self.optimizer, None, self.meter, self.done)

    def _finish(self) -> DistillResult:
        change = (self.notes["before"], self._change()) if self.measured else None
        result = DistillResult(
            steps=self.total,
            layer_steps=self.parts[0].epochs,
            seconds=self.done.seconds,
            layers={name: (a, b) for name, (a, b) in self.notes["layers"].items()},
            losses={name: (a, b) for name, (a, b) in self.notes["losses"].items()},
            change=change,
        )
        if self.folder is not None:
            with naming(f"the model into {self.folder}"):
                save(self.model, self.folder)
                write_atomically(self.folder / RESULT, json.dumps(result.to_json(), indent=1).encode())
            remove_states(self.folder)
            (self.folder / NOTES).unlink(missing_ok=True)
        return result

    def _not_finite(self, step: int, loss: float) -> FloatingPointError:
        recipe = self.recipe
        rate = f"layer_lr (now {recipe.layer_lr:g})" if step <= self.parts[0].end else f"lr (now {recipe.lr:g})"
        return FloatingPointError(
            f"the loss of the distillation became {loss} at or shortly before step {step}; lower {rate} or clip (now "
            f"{recipe.clip}), or raise warmup (now {recipe.warmup:g})"
        )


def _first(output: Any) -> Tensor:
    """The tensor that a layer gives: its output, or the first part of it."""
    return output[0] if isinstance(output, tuple | list) else output
