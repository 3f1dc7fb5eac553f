"""Training from data on disk: one recipe, one folder, any number of processes, and exact continuation after a kill.

The order of the data, the augmentation and the dropout of a step are functions of (seed, step) alone, so the state to
go on from is weights, their average, the optimizer's moments and the number of steps done. The device never waits for
the host within an epoch: the loss is added up there and read when it has arrived.
"""

from __future__ import annotations

import json
import math
import statistics
import time
from collections.abc import Callable
from contextlib import ExitStack, nullcontext, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..data.holdout import split_off
from ..data.jobs import telling_of_killed_workers
from ..data.order import mix
from ..data.part import Part, Source, shorten
from ..nn.heads.base import auxiliary_loss
from . import optimise
from .build import AUGMENT, DROPOUT, build_model, build_optimizer, check_split, loader_of, open_recipe_source
from .checkpoint import save, start_from
from .files import claim_room, naming, remove_leftovers, sole_owner, write_atomically
from .folder import bytes_held, check_data, check_recipe, claim, clear, read_result
from .log import Log
from .optimise import Average
from .processes import Processes, local, processes
from .progress import Bar, Meter, Stop
from .recipe_files import to_json
from .state import STATE, bytes_needed, load_state, mend_state, remove_states, save_state, whole_weights
from .stepping import Recorded, compile_blocks, quick_float32
from .tasks import Found, TokenScores, load_predictions, task_of
from .train_recipe import TrainRecipe


@dataclass(frozen=True)
class TrainResult:
    """What a finished run reached; accuracies from 0 to 1, of the averaged weights where the recipe averages.

    Of a text the accuracy is that of the next token, `nats` its mean loss; of scenes that of the pixels, beside mIoU.
    All are of the test part; `best`: those of the weights that the hold-out chose, without one of the last.
    """

    out: Path
    top1: float
    top5: float
    loss: float
    best_top1: float | None
    best_epoch: int
    epochs: int
    steps: int
    parameters: int
    seconds: float
    epoch_seconds: float
    nats: float | None = None
    bits_per_byte: float | None = None
    best_nats: float | None = None
    miou: float | None = None

    @property
    def summary(self) -> str:
        """What was reached, in a line."""
        best = f"{self.best_top1:.2%}" if self.best_nats is None else f"{self.best_nats:.4f} nats"
        chosen = f"  (the hold-out chose epoch {self.best_epoch}: {best})" if self.best_epoch != self.epochs else ""
        return self.predictions.summary() + chosen

    @property
    def predictions(self) -> Any:
        """What the last weights say of the test part: `Predictions` of classes, `PixelScores`, or `TokenScores`."""
        return load_predictions(self.out / "predictions.safetensors")


def train(
    recipe: TrainRecipe,
    out: str | Path,
    *,
    source: Source | None = None,
    device: torch.device | str | None = None,
    fresh: bool = False,
    progress: IO[str] | None = None,
) -> TrainResult:
    """Train as the recipe says into the folder `out`, going on from what is there; a finished run is only read.

    `source` replaces the data that the recipe names; `fresh` deletes an earlier run in the folder; `progress` is where
    the progress bar goes. Under torchrun every process calls this with the same arguments and the same folder.
    """
    out, settings = Path(out), recipe.scaled()
    with ExitStack() as stack:
        team = stack.enter_context(processes(device)).sharing(settings.context_parallel)

        def prepare() -> Source | None:
            finished = (out / "result.json").is_file() and not fresh
            if not finished:  # one that is may lie where nothing can be written
                claim_room(out, 0)
                stack.enter_context(sole_owner(out))
                remove_leftovers(out)
            if fresh:
                clear(out)
            renamed, opened = check_recipe(out, settings), source
            if opened is None and (renamed or not finished):  # the data of a finished run may be gone
                opened = open_recipe_source(settings)
            if opened is not None:
                check_data(out, opened)
            if not finished:
                mend_state(out)
                claim(out, settings, opened)
            return opened

        source = team.lead(prepare) or source
        done = read_result(out, {field.name: field.default for field in fields(TrainResult) if field.name != "out"})
        if done is not None:
            if team.first:  # one that was killed when only this was left to do
                with suppress(OSError):
                    remove_states(out)
            return TrainResult(out=out, **done)
        stack.enter_context(torch.random.fork_rng([team.device] if team.device.type == "cuda" else []))
        stack.enter_context(quick_float32(team.device, settings.precision))
        stack.enter_context(telling_of_killed_workers())
        return _Run(settings, out, source or open_recipe_source(settings), team, progress).go()


class _Run:
    """One run from its state in the folder to the end."""

    def __init__(
        self, recipe: TrainRecipe, out: Path, source: Source, team: Processes, progress: IO[str] | None
    ) -> None:
        recipe.check_schedule()
        share, rest = divmod(recipe.batch_size, team.data_world * recipe.accumulate)
        each = f" of context_parallel={team.context}" if team.context > 1 else ""
        if rest:
            raise ValueError(
                f"batch_size must be a multiple of processes times accumulate, got batch_size={recipe.batch_size}, "
                f"{team.data_world} {'groups' if each else 'processes'}{each}, accumulate={recipe.accumulate}"
            )
        mixes = recipe.augmentation.mixup > 0 or recipe.augmentation.cutmix > 0
        if mixes and recipe.batch_size // team.data_world % 2:
            raise ValueError(
                "mixup and cutmix pair the samples of a process: batch_size must be a multiple of twice the processes, "
                f"got batch_size={recipe.batch_size}, {team.data_world} {'groups' if each else 'processes'}{each}"
            )
        self.part: Part = source.train
        self.held: Part | None = None
        if recipe.holdout:
            self.part, self.held = split_off(source.train, recipe.holdout)
        if recipe.batch_size > len(self.part):
            without = f" without the hold-out of {len(self.held)}" if self.held else ""
            raise ValueError(
                f"batch_size must not exceed the {len(self.part)} training items of {source.name}{without}, "
                f"got {recipe.batch_size}"
            )
        self.recipe, self.out, self.source, self.team = recipe, out, source, team
        self.screen = progress if team.first else None
        self.log: Log | None = None
        self.share, self.task = share, task_of(recipe, source)
        self.model = build_model(recipe, source)
        if team.context > 1:
            check_split(self.model, recipe)
        self.fresh: list[str] = []
        if recipe.init is not None and not (out / STATE).is_file():
            self.fresh = start_from(self.model, recipe.init)
        self.model.to(team.device)
        self.parameters = sum(p.numel() for p in self.model.parameters())
        team.lead(lambda: claim_room(out, bytes_needed(self.model, recipe.ema > 0, bytes_held(out))))
        self.core = team.spread(self.model, recipe.parallel)
        alone = team.device.type == "cuda" and team.world == 1 and recipe.accumulate == 1
        graph = recipe.cuda_graph and alone and recipe.compile_mode in ("default", "max-autotune-no-cudagraphs")
        self.optimizer = build_optimizer(self.model, recipe, recordable=graph)
        self.average = Average(self.model, recipe.ema) if recipe.ema else None
        self.meter = Meter(team, lambda step, loss: self.not_finite(step, f"the training loss became {loss}"))
        self.done = load_state(out / STATE, self.model, self.optimizer, self.average, self.meter)
        self.loader = loader_of(recipe, self.part, team, self.screen, training=True)
        self.test = loader_of(recipe, source.test, team, self.screen)
        self.chooser = loader_of(recipe, self.held, team, self.screen) if self.held else None
        self.steps = len(self.loader)
        self.objective = self._compiled()
        self.update: Callable[[Tensor, Tensor], Tensor] = Recorded(self._update) if graph else self._update

    def _about(self) -> str:
        """Data, model, device and length of the run, in one line."""
        recipe, team, done = self.recipe, self.team, self.done
        many = f" in {team.world} processes" if team.world > 1 else ""
        many += f", {team.context} to a sequence" if team.context > 1 else ""
        later = f", going on after step {done.step}" if done.step else ""
        apart = f" ({len(self.held):,} of the train {self.source.kind}s held out)" if self.held else ""
        begins = f"; begins with the weights of {recipe.init}" if recipe.init is not None and not done.step else ""
        begins += f", but for {shorten(self.fresh)}" if self.fresh else ""
        return (
            f"{self.source}{apart}; {recipe.model} with {recipe.attention}, {self.parameters:,} parameters, on "
            f"{team.device}{many}{begins}; {recipe.epochs} epochs of {self.steps} steps{later}"
        )

    def _compiled(self) -> Callable[[Tensor, Tensor], Tensor]:
        """Loss of (inputs, targets) in training."""
        core, model, task, recipe = self.core, self.model, self.task, self.recipe

        def objective(inputs: Tensor, targets: Tensor) -> Tensor:
            loss = task.loss(core(inputs), targets)
            more = auxiliary_loss(model)
            return loss if more is None else loss + more

        mode = None if recipe.compile_mode == "default" else recipe.compile_mode
        sharded = self.team.world > 1 and recipe.parallel == "fsdp"
        if not recipe.compile or (not sharded and compile_blocks(self.model, mode)):
            return objective
        return torch.compile(objective, dynamic=False, mode=mode)

    def go(self) -> TrainResult:
        recipe, done = self.recipe, self.done
        total = recipe.epochs * self.steps
        if self.screen is not None:
            print(self._about(), file=self.screen)
        began, times = time.perf_counter() - done.seconds, []
        with ExitStack() as stack:
            if self.team.first:
                where: dict[str, Any] = {"tensorboard": recipe.tensorboard, "wandb": recipe if recipe.wandb else None}
                self.log = stack.enter_context(Log(self.out, after=done.step, **where))
            stop = stack.enter_context(Stop(self.team))
            self.bar = stack.enter_context(Bar(self.screen, total, done.step, recipe.batch_size))
            found: Found | None = None
            for epoch in range(done.step // self.steps, recipe.epochs):
                start, first = time.perf_counter(), done.step - epoch * self.steps
                self.model.train()
                for pixels, labels, positions in self.loader.epoch(epoch, first):
                    self._step(pixels, labels, self.loader.ratios_of(positions))
                    done.seconds = time.perf_counter() - began
                    at_end = done.step % self.steps == 0
                    self._log_loss(at_end)
                    self.bar.update()
                    stop.poll()
                    if not at_end and (stop.asked or _due(done.step, recipe.checkpoint_steps)):
                        self._save()
                    if not at_end:
                        stop.obey()
                if not first:
                    times.append(time.perf_counter() - start)
                number = epoch + 1
                if _due(number, recipe.eval_epochs) or number == recipe.epochs:
                    found = self._evaluate(number)
                    done.seconds = time.perf_counter() - began
                saved = _due(number, recipe.checkpoint_epochs) or _due(done.step, recipe.checkpoint_steps)
                if number < recipe.epochs and (saved or stop.asked):
                    self._save()
                    stop.obey()
            assert found is not None  # no state is saved after the last step, so the last epoch was evaluated here
            return self._finish(found, statistics.median(times) if times else 0.0)

    def _step(self, pixels: Tensor, labels: Tensor, ratio: Tensor | None) -> None:
        """One step of the optimizer on this process's share of a batch."""
        recipe, team, done = self.recipe, self.team, self.done
        step = done.step
        seed = int(mix(recipe.seed, AUGMENT, step))
        images, targets = self.task.prepare(
            pixels, labels, seed=seed, rank=team.data_rank, world=team.data_world, ratio=ratio
        )
        # Those who share a sequence drop the same branches of it, or with dropout each its own numbers.
        torch.manual_seed(int(mix(recipe.seed, DROPOUT, step, team.data_rank if recipe.drop_path else team.rank)))
        optimise.set_rate(self.optimizer, optimise.learning_rate(recipe, (step + 1) / self.steps))
        loss = self.update(images, targets)
        done.step = step + 1
        if self.average is not None:
            self.average.update(done.step)
        self.meter.add(loss)

    def _update(self, images: Tensor, targets: Tensor) -> Tensor:
        """Gradients of the batch, part by part, and one step along them; the mean loss."""
        recipe, team = self.recipe, self.team
        parts = zip(images.split(self.share), targets.split(self.share), strict=True)
        loss = torch.zeros((), device=team.device)
        for number, (x, y) in enumerate(parts, 1):
            with team.without_exchange(self.core, quiet=number < recipe.accumulate), self.task.split(team):
                x, y = self.task.own(x), self.task.own(y)
                with torch.autocast(team.device.type, torch.bfloat16, enabled=recipe.precision == "bf16"):
                    part = self.objective(x, y)
                (part / recipe.accumulate).backward()
            loss += part.detach()
        optimise.apply(self.optimizer, self.model.parameters(), recipe.clip)
        return loss / recipe.accumulate

    def _log_loss(self, at_end: bool) -> None:
        """Log the loss where the recipe wants it, and look now and then whether it is still a number."""
        recipe, step, seconds = self.recipe, self.done.step, self.done.seconds
        if not at_end and not _due(step, recipe.log_steps):
            self.meter.check(step)
            return
        epoch = step / self.steps
        rate = optimise.learning_rate(recipe, epoch)

        def write(loss: float) -> None:
            self.last_loss = loss
            self.bar.say(loss=f"{loss:.3f}")
            self._write("train", step=step, epoch=epoch, loss=loss, lr=rate, seconds=seconds)

        self.meter.request(step, write)

    def _evaluate(self, epoch: int) -> Found:
        """What the test part says; the weights that are best on the hold-out are kept, of equal ones the later."""
        recipe, done = self.recipe, self.done
        self._check_numbers()
        # Seldom and short: compiling the evaluation too would take longer than it saves.
        eager = torch.compiler.set_stance("force_eager") if recipe.compile else nullcontext()
        with self.average.in_place() if self.average else nullcontext(), eager:
            with self.task.split(self.team):
                found = self.task.evaluate(self.model, self.test, self.team)
                held = None if self.chooser is None else self.task.evaluate(self.model, self.chooser, self.team)
            if held is None or held.score >= done.best:
                done.best, done.best_epoch = -1.0 if held is None else held.score, epoch
                told = found.told()
                done.best_top1, done.best_nats = told["top1"], told.get("nats")
                if held is not None:
                    self._keep("best.safetensors", epoch, found.top(1))
        self.bar.say(**found.shown())
        if held is not None:
            self._write("holdout", step=done.step, epoch=epoch, **held.told(), seconds=done.seconds)
        self._write("test", step=done.step, epoch=epoch, **found.told(), seconds=done.seconds)
        return found

    def _save(self) -> None:
        """The state to go on from, after the log is on the disk."""
        self.done.epochs = self.done.step / self.steps
        self.meter.request(self.done.step)
        self._check_numbers()
        with naming(f"the state after step {self.done.step} into {self.out}"):
            if self.log is not None:
                self.log.settle()
            save_state(self.out, self.model, self.optimizer, self.average, self.meter, self.done)

    def _check_numbers(self) -> None:
        """Nothing is evaluated or kept with a loss or weights that are no numbers. A gradient that is none spoils the
        weights; the loss shows it one step later."""
        self.meter.deliver(wait=True)
        weights = [part for p in self.model.parameters() if (part := local(p)).numel()]  # a shard may be empty
        sizes = [size.float() for size in torch._foreach_norm(weights, math.inf)] if weights else []
        good = torch.stack([torch.zeros((), device=self.team.device), *sizes]).isfinite()
        if self.team.sum((~good).sum()):
            raise self.not_finite(self.done.step, "the weights are no longer finite")

    def _keep(self, name: str, epoch: int, top1: float) -> None:
        """Write the weights that the model has now, with all that evaluation needs to know."""
        tensors = whole_weights(self.model)
        if self.team.first:
            notes = {"recipe": to_json(self.recipe), "classes": json.dumps(self.source.classes), "epoch": str(epoch)}
            notes |= {"top1": repr(top1), "weights": "average" if self.average else "plain"}
            with naming(str(self.out / name)):
                save(self.model, self.out / name, notes=notes, tensors=tensors)

    def _finish(self, found: Found, epoch_seconds: float) -> TrainResult:
        with self.average.in_place() if self.average else nullcontext():
            self._keep("last.safetensors", self.recipe.epochs, found.top(1))
        text = isinstance(found, TokenScores)
        result = TrainResult(
            out=self.out,
            **found.told(),
            loss=self.last_loss,
            best_top1=None if text else self.done.best_top1,
            best_nats=self.done.best_nats,
            best_epoch=self.done.best_epoch,
            epochs=self.recipe.epochs,
            steps=self.done.step,
            parameters=self.parameters,
            seconds=self.done.seconds,
            epoch_seconds=epoch_seconds,
        )
        if self.team.first:
            values = {key: value for key, value in asdict(result).items() if key != "out"}
            content = {"recipe": asdict(self.recipe), "torch": torch.__version__, "result": values}
            with naming(f"the result into {self.out}"):
                found.save(self.out / "predictions.safetensors")
                write_atomically(self.out / "result.json", json.dumps(content, indent=1).encode())
            remove_states(self.out)
        self.team.wait()
        return result

    def _write(self, kind: str, **values: Any) -> None:
        if self.log is not None:
            with naming(str(self.log.path)):
                self.log.write({"kind": kind, **values})

    def not_finite(self, step: int, what: str) -> FloatingPointError:
        recipe = self.recipe
        clip = "set clip (e.g. 1.0)" if recipe.clip is None else f"lower clip (now {recipe.clip:g})"
        kept = "the state saved before that is whole" if (self.out / STATE).exists() else "nothing was saved"
        return FloatingPointError(
            f"{what} at or shortly before step {step} (epoch {step / self.steps:.2f}); lower "
            f"lr (now {recipe.lr:g}), lengthen warmup_epochs (now {recipe.warmup_epochs:g}), {clip}"
            + (", or try precision='fp32'" if recipe.precision == "bf16" else "")
            + f"; {kept}"
        )


def _due(count: int, every: int) -> bool:
    return every > 0 and count % every == 0
