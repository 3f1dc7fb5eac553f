"""`cumulant diagnose` and `cumulant convert`: what a user may choose, and what happens then.

No heavy import: help is shown from this.
"""

from __future__ import annotations

import copy
import json
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal, TextIO

import tyro

from ..command import check_least, failed, show, stopped
from .settings import CANDIDATES, DistillRecipe

REPORT = "conversion.json"  # beside the converted model: where it comes from, and what was found

if TYPE_CHECKING:
    from ..inspect.opening import Opened
    from .conversion import ConversionReport, Layers
    from .diagnosis import Diagnosis


@dataclass(frozen=True)
class Diagnose:
    """Measure where a trained model can do without softmax: logit spread and error of each order by layer and head.

    Prints the layers, the safest first, with a proposal; writes diagnosis.json and a heat map.

    Example: cumulant diagnose runs/digits-softmax-0 digits

    Example: cumulant diagnose path/to/sentence-encoder texts.txt --heads

    Example: cumulant diagnose timm:vit_small_patch16_224 path/to/imagenet-100 --budget 0.1 --dial 0.15
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run of `cumulant train` (its last weights) or a file of weights, a folder of transformers, a name OWNER/MODEL
    of the Hugging Face Hub, or timm:NAME."""
    data: Annotated[str | None, tyro.conf.Positional, tyro.conf.arg(metavar="[DATA]")] = None
    """Data set or folder of images or videos; a .txt or .parquet file of texts. Without it, the data that a run of
    `cumulant train` was trained on; for other models noise."""
    attention: tuple[str, ...] = CANDIDATES
    """Mechanisms whose effect on the output is measured, with options: cumulant3+around=mean."""
    budget: float = 0.05
    """Relative change of the output that the proposal may cause."""
    batches: int = 2
    """Batches of the data to look at."""
    batch_size: int = 16
    """Items in each batch."""
    example: Path | None = None
    """In place of data, a file of one batch: an image, a .txt, a .npy, or a .npz of arrays by names of arguments."""
    queries: int = 64
    """Queries sampled in each layer and batch."""
    heads: bool = False
    """Also measure the effect of replacing single heads."""
    dial: float | None = None
    """Also choose clusters for every layer, and the heads that take them, by the error of its own output: say 0.15."""
    device: str | None = None
    """cpu or cuda; by default cuda where there is one."""
    out: Path = Path("runs/diagnosis")
    """Folder for diagnosis.json and diagnosis.svg."""
    json: bool = False
    """Print JSON instead of the table."""

    def __post_init__(self) -> None:
        check_least(self, batches=1, batch_size=1, queries=1, budget=0)
        if self.example is not None and self.data is not None:
            raise ValueError(f"pass --example or data, not both, got {self.example} and {self.data}")
        if self.dial is not None and not self.dial > 0:
            raise ValueError(f"dial must be a positive relative error, got {self.dial}")

    def run(self) -> int:
        try:
            found = run_diagnose(self, progress=sys.stderr)
        except RuntimeError as error:
            return failed(error)
        files = f"wrote {self.out}/diagnosis.json and diagnosis.svg"
        show(found.to_json(), f"{found.table()}\n\n{found.proposal(self.budget)}\n\n{files}", self.json)
        return 0


@dataclass(frozen=True)
class Convert:
    """Put attention of linear cost into a trained model and save it; `cumulant.convert.load(FOLDER)` loads it.

    With --distill it is then trained, without labels, to say what the model said before. Give a stopped command
    again and it continues where it was.

    Example: cumulant convert runs/digits-softmax-0 --data digits --layers auto --budget 0.1 --force

    Example: cumulant convert path/to/sentence-encoder --data texts.txt --layers 3 4 5 --around mean

    Example: cumulant convert path/to/sentence-encoder --data texts.txt --layers dial --target 0.15

    Example: cumulant convert runs/digits-softmax-0 --data digits --distill --epochs 5 --items-a-step 64 --force
    """

    model: Annotated[str, tyro.conf.Positional, tyro.conf.arg(metavar="MODEL")]
    """A run of `cumulant train` (its last weights) or a file of weights, a folder of transformers, a name OWNER/MODEL
    of the Hugging Face Hub, or timm:NAME."""
    data: str | None = None
    """Data to measure the change on and to distil with, as for `cumulant diagnose`; needed with --layers auto and
    dial."""
    attention: str | None = None
    """Mechanism (cumulant3), by the name that `cumulant list` prints, with options: cumulant3+around=mean."""
    layer: str | None = None
    """A layer of `cumulant list layers`, with options: moh+top=4. It takes the place of whole layers, with their
    projections, over --attention (softmax)."""
    around: Literal["zero", "mean"] | None = None
    """Query around which cumulant mechanisms expand softmax: 0, or the mean of a sequence, which is closer and not for
    causal or cross attention. By default 0, and with --layers auto whichever changes the output less."""
    layers: tuple[str, ...] = ("all",)
    """all; auto, to choose by diagnosis; dial, to choose clusters by --target; or numbers, or patterns of names, of
    layers."""
    budget: float | None = None
    """With --layers auto, the relative change of the output to accept (0.05)."""
    target: float | None = None
    """With --layers dial, the relative error of a layer's own output to accept (0.15)."""
    heads: bool = False
    """With --layers auto, also replace single heads."""
    batches: int = 4
    """Batches of the data that the change is measured on."""
    batch_size: int = 16
    """Items in each batch."""
    example: Path | None = None
    """A file of one batch for the dry run, where the model does not tell what it takes: an image, a .txt, or a .npy or
    .npz of arrays by the names of arguments. The change is measured on it unless there is --data."""
    distill: bool = False
    """Train the converted model on what the model said before."""
    distillation: DistillRecipe = field(default_factory=DistillRecipe)
    items_a_step: int = 64
    """With --distill, images, clips or texts of a step."""
    items: int = 0
    """With --distill, use at most this many texts of the data. 0: all."""
    fresh: bool = False
    """With --distill, start again and delete an earlier distillation in the folder."""
    force: bool = False
    """Convert even where the data shows that the model becomes slower on this device."""
    device: str | None = None
    """cpu or cuda; by default cuda where there is one."""
    out: Path = Path("runs/converted")
    """Folder for the converted model and conversion.json; one that holds another model is refused."""
    json: bool = False
    """Print JSON instead of the report."""

    def __post_init__(self) -> None:
        if self.distill and self.data is None:
            raise ValueError("--distill needs --data: inputs like those that the model will see; no labels are used")
        if self.layers != ("auto",) and (self.budget is not None or self.heads):
            raise ValueError(f"--budget and --heads go with --layers auto, got --layers {' '.join(self.layers)}")
        if self.layers == ("dial",):
            if self.data is None:
                raise ValueError("--layers dial needs --data: inputs like those that the model will see, and as long")
            if self.attention is not None or self.around is not None:
                raise ValueError("--layers dial chooses the mechanisms itself: leave --attention and --around out")
        elif self.target is not None:
            raise ValueError(f"--target goes with --layers dial, got --layers {' '.join(self.layers)}")
        if self.target is not None and not self.target > 0:
            raise ValueError(f"target must be a positive relative error, got {self.target}")
        check_least(self, batches=1, batch_size=1, items_a_step=1, items=0, budget=0)

    def run(self) -> int:
        try:
            report = run_convert(self, progress=sys.stderr)
        except RuntimeError as error:
            return failed(error)
        except KeyboardInterrupt:
            return stopped(f". What was saved is in {self.out}; give the same command again to go on.")
        show(report.to_json(), report, self.json)
        if not report.replaced:
            return failed(ValueError(f"nothing was replaced, so no model was written into {self.out}"))
        if not self.json:
            print(f"the model is in {self.out}; load it with cumulant.convert.load({str(self.out)!r})")
        return 0


def _open(settings: Diagnose | Convert) -> Opened:
    from ..inspect.opening import open_model
    from ..nn.swapped.plan import is_converted

    opened = open_model(settings.model, settings.device)
    if is_converted(opened.model):
        raise ValueError(f"{settings.model} holds a converted model already: name the model that it was made from")
    return opened


def _check_out(out: Path, model: str) -> None:
    """Refuse a folder that holds another model: it would be lost, and its tokenizer taken for that of the new one."""
    from ..train.files import read_json

    if not any(any(out.glob(pattern)) for pattern in ("config.json", "*.safetensors")):
        return
    report = out / REPORT
    source = read_json(report).get("source") if report.is_file() else None
    if source is None or Path(source).resolve() != Path(model).resolve():
        what = "a model" if source is None else f"the conversion of {source}"
        raise ValueError(f"{out} holds {what}, which would be lost; name another folder with --out")


def run_diagnose(settings: Diagnose, progress: TextIO | None = None) -> Diagnosis:
    """Diagnose the model; diagnosis.json and diagnosis.svg go to the folder `out`."""
    from ..inspect.items import open_batches, open_example
    from ..train.files import claim_room, write_atomically
    from .diagnosis import diagnose

    opened, data = _open(settings), None
    if settings.example is not None:
        data = [open_example(opened, settings.example)]
    elif settings.data is not None or opened.recipe is not None:
        data = open_batches(opened, settings.data, settings.batches, settings.batch_size)
    claim_room(settings.out, 0)
    found = diagnose(
        opened.model,
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
    from ..inspect.items import open_batches, open_example
    from ..train.files import claim_room, write_atomically
    from .conversion import convert
    from .distill_data import open_training
    from .distillation import distill, planned
    from .saving import save

    layers: Layers = [int(x) if x.lstrip("-").isdigit() else x for x in settings.layers]
    if settings.layers in (("all",), ("auto",), ("dial",)):
        layers = None if settings.layers == ("all",) else settings.layers[0]
    begun = planned(settings.out) if settings.distill and not settings.fresh else None
    if begun is None:
        _check_out(settings.out, settings.model)
    opened = _open(settings)
    model = opened.model
    teacher = copy.deepcopy(model) if settings.distill else None
    data = None
    if settings.data is not None:
        data = open_batches(opened, settings.data, settings.batches, settings.batch_size)
    claim_room(settings.out, 0)
    if begun and layers in ("auto", "dial"):
        layers = begun  # a run that goes on has chosen its layers
    report = convert(
        model,
        settings.attention,
        layer=settings.layer,
        layers=layers,
        options={} if settings.around is None else {"around": settings.around},
        budget=settings.budget if layers == "auto" else None,
        target=settings.target if layers == "dial" else None,
        data=data,
        example=None if settings.example is None else open_example(opened, settings.example),
        heads=settings.heads,
        batches=settings.batches,
        force=settings.force or begun is not None,  # what is half done is not refused for a clock
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
        training = open_training(opened, settings.data, settings.items_a_step, items=settings.items, seed=how.seed)
        report.distillation = distill(
            model, teacher, training, how, out=settings.out, measure=data, fresh=settings.fresh, progress=progress
        )
    stated = {"source": settings.model, **report.to_json()}
    write_atomically(settings.out / REPORT, json.dumps(stated, indent=1).encode())
    return report
