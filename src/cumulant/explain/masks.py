"""SAM 2's masks with softmax and with the dial, side by side: what a click on a picture gives at each step between.

    segmenter = Segmenter.open("facebook/sam2.1-hiera-tiny")            # a Hub name, or the folder of tools/models.py
    exact = segmenter.masks(picture, points=[(320, 200)])               # softmax; picture (rows, cols, 3) of 8 bits
    name = list(DIAL)[-3]                                               # 12 % of softmax's multiply-adds
    found = segmenter.masks(picture, points=[(320, 200)], dial=name)
    print(iou(found.best[0], exact.best[0]), segmenter.cost(name), found.seconds)

Places are in pixels of the picture as given, (x, y); a box is (left, top, right, bottom). The picture is encoded once
for each step of the dial, and further clicks on it only run the mask decoder. The layers that see the whole picture are
replaced, its windows are not; nothing is trained.
"""

from __future__ import annotations

import hashlib
import time
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ..call import Call
from ..conversion.candidates import work_of
from ..nn.swapped.choice import KEPT, Choice
from ..nn.swapped.plan import applied, attention_layers
from ..optional import needed
from ..train.checkpoint import read_header
from ..train.files import read_json

# From linear to softmax, by rising cost, and what a page calls them; docs/real-models/sam-2.md has IoU of their kinds.
DIAL = {
    "cumulant2": "linear",
    "cluster16+response=pooled": "16 squares",
    "cluster64+response=pooled": "64 squares",
    "cluster64+find=tree+response=pooled": "64 clusters by content",
    "cluster64+find=tree+leaves=4+opened=16+near=24+width=24+exact=92": "92 exact tokens",
    "cluster64+find=tree+leaves=4+opened=24+near=40+width=24+exact=208": "208 exact tokens",
    "cluster64+find=tree+leaves=4+opened=40+near=100+width=32+exact=640": "640 exact tokens",
    "softmax": "softmax",
}
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
LARGEST = 1 << 26  # pixels of a picture: 64 megapixels are 0.8 GB of float32
KEPT_PICTURES = 16  # encoded, for each segmenter


class Masks(NamedTuple):
    """For P prompts: logits of three masks (P, 3, R, C) in the model's own size, and its own scores (P, 3)."""

    logits: Tensor
    scores: Tensor
    shape: tuple[int, int] = (0, 0)  # rows and columns of the picture
    seconds: float = 0.0  # of encoding the picture

    @property
    def best(self) -> Tensor:
        """The mask that the model itself calls best, (P, R, C), bool."""
        return self.logits[torch.arange(len(self.logits)), self.scores.argmax(-1)] > 0

    def on_picture(self) -> np.ndarray:
        """The best masks in the size of the picture, (P, rows, cols), bool."""
        best = self.logits[torch.arange(len(self.logits)), self.scores.argmax(-1)].float()
        return (F.interpolate(best[None], self.shape, mode="bilinear")[0] > 0).cpu().numpy()


def iou(a: Tensor, b: Tensor) -> Tensor:
    """Intersection over union of masks (..., R, C), bool; 1 where both are empty."""
    both, either = (a & b).sum((-2, -1)), (a | b).sum((-2, -1))
    return torch.where(either > 0, both / either.clamp(min=1), torch.ones_like(both, dtype=torch.float32))


class Segmenter:
    """SAM 2 whose global layers take any mechanism by name for one picture at a time."""

    def __init__(self, model: Any, size: int = 1024) -> None:
        self.model, self.size = model, size
        self._encoded: OrderedDict[tuple[str, str], tuple[list[Tensor], float]] = OrderedDict()
        self.layers = global_layers(model)

    @classmethod
    def open(cls, path: str | Path, size: int = 1024, device: str | torch.device = "cpu") -> Segmenter:
        """From a folder or a name on the Hub, for pictures squared to `size` pixels."""
        with needed("SAM 2 is opened by transformers", "transformers"):
            from transformers import Sam2Config, Sam2Model
        kind: Any = Sam2Model
        if size % 32 or size < 128:
            raise ValueError(f"size must be a multiple of 32 and at least 128 pixels, got {size}")
        folder = Path(path)
        try:
            if folder.is_dir():
                read_json(folder / "config.json")  # without one transformers makes up a SAM 2
            config: Any = Sam2Config.from_pretrained(path)
        except (OSError, TypeError, ValueError) as error:
            raise ValueError(
                f"there is no SAM 2 at {str(path)!r}: give a folder of it or a name on the Hub such as "
                "'facebook/sam2.1-hiera-tiny'; without the Hub, `python -m tools.models sam2` makes such a folder"
            ) from error
        if config.model_type not in ("sam2", "sam2_video"):
            raise ValueError(f"{str(path)!r} is a {config.model_type!r}, not a SAM 2")
        config.vision_config.backbone_feature_sizes = [[size // n, size // n] for n in (4, 8, 16)]
        config.prompt_encoder_config.image_size = size
        for file in folder.glob("*.safetensors"):
            read_header(file)  # a damaged file is told by its name
        try:
            model, said = kind.from_pretrained(path, config=config, output_loading_info=True)
        except OSError as error:
            raise ValueError(f"{str(path)!r} says that it is a SAM 2 and has no weights: {error}") from error
        lacking = sorted({*said["missing_keys"], *(name for name, *_ in said["mismatched_keys"])})
        if lacking:
            raise ValueError(
                f"{str(path)!r} holds weights of another revision: {len(lacking)} are missing, the first {lacking[0]}"
            )
        return cls(model.eval().requires_grad_(False).to(device), size)

    def masks(
        self,
        picture: np.ndarray,
        points: Sequence[tuple[float, float]] | np.ndarray | Tensor = (),
        boxes: Sequence[tuple[float, float, float, float]] | np.ndarray | Tensor = (),
        dial: str = "softmax",
    ) -> Masks:
        """Masks for each point and each box, in this order."""
        rows, cols = check_picture(picture)
        clicks = check_places("points", points, 2, rows, cols)
        corners = check_places("boxes", boxes, 4, rows, cols)
        if not len(clicks) and not len(corners):
            raise ValueError(
                "there is nothing to segment: give points=[(x, y), ...] or boxes=[(left, top, right, bottom)]"
            )
        if not isinstance(dial, str):
            raise ValueError(f"dial must be the name of a mechanism, as {list(DIAL)[3]!r}, got {dial!r}")
        embeddings, seconds = self.encoded(picture, dial)
        scale = torch.tensor([self.size / cols, self.size / rows])
        answers = []
        if len(clicks):
            answers.append(ask(self.model, embeddings, points=clicks * scale))
        if len(corners):
            answers.append(ask(self.model, embeddings, boxes=corners * scale.repeat(2)))
        logits, scores = torch.cat([a.logits for a in answers]), torch.cat([a.scores for a in answers])
        return Masks(logits, scores, (rows, cols), seconds)

    def encoded(self, picture: np.ndarray, dial: str) -> tuple[list[Tensor], float]:
        """The embeddings of a picture at a step of the dial, and the seconds that they took."""
        name = (hashlib.sha256(picture.tobytes() + repr(picture.shape).encode()).hexdigest(), dial)
        if name not in self._encoded:
            x = pixels(picture, self.size).to(self.model.device, self.model.dtype)
            start = time.perf_counter()
            with torch.no_grad(), replaced(self.model, dial):
                found = self.model.get_image_embeddings(x)
            if x.is_cuda:
                torch.cuda.synchronize()
            self._encoded[name] = found, time.perf_counter() - start
            while len(self._encoded) > KEPT_PICTURES:
                self._encoded.popitem(last=False)
        self._encoded.move_to_end(name)
        return self._encoded[name]

    def cost(self, dial: str) -> float:
        """Multiply-adds of the replaced layers at a step of the dial, of softmax's; NaN where nobody counts them."""
        attention = self.model.vision_encoder.get_submodule(self.layers[0])
        return share_of_work(dial, (self.size // 16) ** 2, attention.dim_out // attention.num_attention_heads)


def check_picture(picture: np.ndarray) -> tuple[int, int]:
    """Rows and columns of a picture that can be taken."""
    if not isinstance(picture, np.ndarray) or picture.ndim != 3 or picture.shape[2] != 3 or picture.dtype != np.uint8:
        kind = f"{picture.dtype} {picture.shape}" if isinstance(picture, np.ndarray) else type(picture).__name__
        raise ValueError(
            f"a picture is an array (rows, cols, 3) of 8 bits, got {kind}: np.asarray(image.convert('RGB'))"
        )
    rows, cols = picture.shape[:2]
    if not 0 < rows * cols <= LARGEST:
        raise ValueError(
            f"a picture of {cols} x {rows} pixels is {'empty' if not rows * cols else 'too large'}: make it at most "
            f"{LARGEST >> 20} megapixels; it is squared to the size of the model anyway"
        )
    return rows, cols


def check_places(what: str, given: Any, numbers: int, rows: int, cols: int) -> Tensor:
    """Points (P, 2) or boxes (P, 4) in a picture of so many rows and columns; an error for what is none."""
    try:
        found = torch.as_tensor(given, dtype=torch.float64, device="cpu")
    except (TypeError, ValueError, RuntimeError):
        found = torch.zeros(())
    if found.ndim and not len(found):
        return torch.zeros(0, numbers)
    if found.shape[1:] != (numbers,):
        one = "(x, y)" if numbers == 2 else "(left, top, right, bottom)"
        raise ValueError(f"{what} must be a list of {one}, got {str(given)[:100]}")
    for x, y in found.reshape(-1, 2).tolist():
        if not (0 <= x <= cols and 0 <= y <= rows):
            raise ValueError(f"the prompt at x={x:g}, y={y:g} is outside the picture, {cols} x {rows} pixels")
    for box in found.tolist() if numbers == 4 else ():
        if box[0] > box[2] or box[1] > box[3]:
            raise ValueError(f"a box is (left, top, right, bottom), got {tuple(box)}, whose sides are the other way")
    return found.float()


def pixels(picture: np.ndarray, size: int) -> Tensor:
    """(1, 3, size, size), normalised, as the model's own processor does."""
    from PIL import Image

    image = np.asarray(Image.fromarray(picture).resize((size, size), Image.Resampling.BILINEAR))
    x = torch.from_numpy(image.copy()).permute(2, 0, 1).float() / 255
    return ((x - torch.tensor(MEAN).view(3, 1, 1)) / torch.tensor(STD).view(3, 1, 1)).unsqueeze(0)


@torch.no_grad()
def ask(model: Any, embeddings: list[Tensor], points: Tensor | None = None, boxes: Tensor | None = None) -> Masks:
    """Masks for points (P, 2) or boxes (P, 4), in pixels of the squared picture."""
    given: dict[str, Any] = {}
    if points is not None:
        given["input_points"] = points[None, :, None].to(embeddings[-1])
    if boxes is not None:
        given["input_boxes"] = boxes[None].to(embeddings[-1])
    said = model(image_embeddings=embeddings, multimask_output=True, **given)
    return Masks(said.pred_masks[0].float(), said.iou_scores[0].float())


def global_layers(model: Any) -> list[str]:
    """Names of the vision encoder's attention layers that look at the whole picture."""
    try:
        blocks = model.vision_encoder.backbone.blocks
        found = [f"backbone.blocks.{i}.attn" for i, block in enumerate(blocks) if not block.window_size]
    except AttributeError as error:
        raise ValueError(f"{type(model).__name__} has no vision encoder with Hiera's blocks: {error}") from error
    if not found:
        raise ValueError(f"no layer of {type(model).__name__} looks at the whole picture: there is nothing to replace")
    return found


@contextmanager
def replaced(model: Any, plan: dict[str, str] | str) -> Iterator[None]:
    """Mechanisms by name in the global layers (one for all, or by layer) for a while."""
    encoder = model.vision_encoder
    wanted = dict.fromkeys(global_layers(model), plan) if isinstance(plan, str) else plan
    kept = dict.fromkeys(attention_layers(encoder), KEPT)
    with applied(encoder, {**kept, **{name: Choice.named(x) for name, x in wanted.items()}}):
        yield


def share_of_work(name: str, tokens: int, D: int) -> float:
    """Multiply-adds of a mechanism in a layer of a square picture, of softmax's; NaN where nobody counts them."""
    choice, side = Choice.named(name), int(tokens**0.5)
    if choice.order == 2:
        return 2 * D * D / (tokens * 2 * D)
    if name == "softmax":
        return 1.0
    if not name.startswith("cluster"):
        return float("nan")
    empty = torch.empty(1, 1, tokens, D, device="meta")
    return work_of(choice, Call(empty, empty, empty, grid=(side, side))) / (tokens * tokens * 2 * D)
