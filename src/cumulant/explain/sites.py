"""Where a model has attention: our own layers, converted ones, and timm or transformers modules with fused softmax."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import nn

from ..conversion.sites import is_linear
from ..models import ViViT
from ..nn import MultiheadAttention

QKV_NAMES = (
    *(("qkv",), ("Wqkv",), ("qkv_proj",), ("query_key_value",), ("c_attn",)),
    *(("q", "k", "v"), ("q_proj", "k_proj", "v_proj"), ("q_lin", "k_lin", "v_lin"), ("query", "key", "value")),
)
OUTPUT_NAMES = ("proj", "o_proj", "out_proj", "dense", "c_proj", "out_lin", "Wo")
HEAD_NAMES = ("num_heads", "num_attention_heads", "n_heads")
OWN, CONVERTED, FUSED = "own", "converted", "fused"


@dataclass(frozen=True)
class TokenLayout:
    """How the tokens of a map lie: `prefix` of them (class token, registers) and then the patches of `grid`, row by
    row, (rows, cols) for images and (frames, rows, cols) for clips."""

    prefix: int
    grid: tuple[int, ...]

    @property
    def patches(self) -> int:
        return math.prod(self.grid)

    @property
    def count(self) -> int:
        return self.prefix + self.patches


@dataclass(frozen=True)
class Site:
    """An attention layer: its number and name, how its weights are had (`kind`), and along which `axes` it looks.

    axes: "all" tokens; within frames, "space"; at one place, "time"; or "frames", over one token for each frame.
    """

    number: int
    name: str
    module: Any
    heads: int
    kind: str
    axes: str = "all"

    @property
    def attention(self) -> str:
        """Name of the mechanism."""
        choice = self.choice
        if self.kind == OWN:
            return self.module.mechanism.name
        return "softmax" if choice is None else choice.attention

    @property
    def choice(self) -> Any:
        """What `cumulant.convert` put there, or None."""
        return getattr(self.module, "choice", None) or getattr(self.module, "_cumulant_choice", None)


def find_sites(model: nn.Module) -> list[Site]:
    """Attention layers in the order of the model's modules, numbered from 0; an error where there are none."""
    video = [(name, module) for name, module in model.named_modules() if isinstance(module, ViViT)]
    sites: list[Site] = []
    for name, module in model.named_modules():
        kind = _kind(module)
        if kind is not None:
            sites.append(Site(len(sites), name, module, _heads(module), kind, _axes(name, video)))
    if not sites:
        raise ValueError(
            f"{type(model).__name__} has no attention layer that can be looked into: no "
            "cumulant.nn.MultiheadAttention, and no module with qkv (or q, k, v) projections and a number of heads"
        )
    return sites


def model_info(model: nn.Module) -> dict[str, Any]:
    """What there is to look at: layers, heads (of each layer: the greatest number), prefix, grid, attention, classes.

    `grid` is what the model was made for; None where only a forward pass can tell. `attention` is the name of the
    mechanism, or "mixed". `classes` is None for a model without a classifier.
    """
    sites = find_sites(model)
    layout = expected_layout(model)
    names = {site.attention for site in sites}
    return {
        "layers": len(sites),
        "heads": max(site.heads for site in sites),
        "prefix": layout.prefix if layout else 0,
        "grid": layout.grid if layout else None,
        "attention": names.pop() if len(names) == 1 else "mixed",
        "classes": _classes(model),
        "names": [site.name for site in sites],
        "axes": [site.axes for site in sites],
    }


def expected_layout(model: nn.Module) -> TokenLayout | None:
    """Layout at the image size the model was made for; None for models that do not tell, such as text models."""
    for module in model.modules():
        grid = getattr(module, "grid_size", None)
        embed = getattr(module, "patch_embed", None)
        if embed is not None:
            grid = grid or getattr(embed, "grid_size", None)
            prefix = getattr(module, "num_prefix_tokens", None)
            if grid is not None and prefix is not None:
                return TokenLayout(int(prefix), tuple(int(side) for side in grid))
    config = getattr(model, "config", None)
    size, patch = getattr(config, "image_size", None), getattr(config, "patch_size", None)
    frames, tubelet = getattr(config, "num_frames", None), getattr(config, "tubelet_size", None)
    if isinstance(tubelet, list | tuple) and len(tubelet) == 3:  # ViViT of transformers: frames, height, width
        tubelet, patch = tubelet[0], tubelet[1]
    if isinstance(size, int) and isinstance(patch, int):
        time = (frames // tubelet,) if isinstance(frames, int) and isinstance(tubelet, int) else ()
        return TokenLayout(_prefix_of(model), (*time, size // patch, size // patch))
    return None


def layout_of(length: int, model: nn.Module) -> TokenLayout:
    """Layout of so many tokens: square after the model's prefix, or one row of tokens where that does not fit."""
    expected = expected_layout(model)
    if expected is not None:
        if expected.count == length:
            return expected
        side = math.isqrt(max(0, length - expected.prefix))
        if side * side == length - expected.prefix and len(expected.grid) == 2:
            return TokenLayout(expected.prefix, (side, side))
    return TokenLayout(0, (1, length))


def output_projection(model: nn.Module, site: Site) -> nn.Module:
    """The linear layer that the heads' outputs enter side by side."""
    parents = [site.name]
    if "." in site.name:
        parents.append(site.name.rsplit(".", 1)[0] + ".output")
    for parent in parents:
        for child in OUTPUT_NAMES:
            try:
                found = model.get_submodule(f"{parent}.{child}" if parent else child)
            except AttributeError:
                continue
            if is_linear(found):
                return found
    raise ValueError(f"layer {site.number} ({site.name}) has no output projection named {', '.join(OUTPUT_NAMES)}")


def numbered(name: str, wanted: list[int] | None, count: int) -> list[int]:
    """The numbers asked for, or all; negative ones count from the end."""
    if wanted is None:
        return list(range(count))
    if isinstance(wanted, int):
        raise ValueError(f"{name} must be a list of numbers or None, got {wanted}")
    for number in wanted:
        if isinstance(number, bool) or not isinstance(number, int) or not -count <= number < count:
            raise ValueError(f"{name} must be numbers from 0 to {count - 1}, got {number!r}")
    return [number % count for number in wanted]


def _kind(module: nn.Module) -> str | None:
    if isinstance(module, MultiheadAttention):
        return OWN
    if type(module).__module__.startswith("cumulant.convert") and hasattr(module, "choice"):
        return CONVERTED if hasattr(module, "num_heads") else None
    children = dict(module.named_children())
    projects = any(all(is_linear(children.get(part)) for part in parts) for parts in QKV_NAMES)
    return FUSED if projects and _heads(module) else None


def _heads(module: nn.Module) -> int:
    """Number of heads, which many decoders of transformers leave to their config; 0 where neither says."""
    for owner in (module, getattr(module, "config", None)):
        for key in HEAD_NAMES:
            if isinstance(getattr(owner, key, None), int):
                return int(getattr(owner, key))
    return 0


def _axes(name: str, video: list[tuple[str, ViViT]]) -> str:
    for root, model in video:
        if name.startswith(f"{root}." if root else ""):
            inner = name[len(root) + 1 if root else 0 :]
            if inner.startswith("temporal_blocks"):
                return "frames"
            if model.variant == 3:
                return "time" if inner.endswith("temporal_attn") else "space"
            if model.per_frame:
                return "space"
    return "all"


def _prefix_of(model: nn.Module) -> int:
    """Tokens before the patches of a transformers model: the tokens that its embeddings own, and registers."""
    names = {name.rsplit(".", 1)[-1]: p for name, p in model.named_parameters()}
    count = sum(key in names for key in ("cls_token", "distillation_token", "class_embedding"))
    registers = names.get("register_tokens")
    return count + (registers.shape[1] if registers is not None else 0)


def _classes(model: nn.Module) -> int | None:
    count = getattr(model, "num_classes", None)
    if count is None and "Classification" in type(model).__name__:
        count = getattr(getattr(model, "config", None), "num_labels", None)
    return int(count) if isinstance(count, int) and count > 0 else None
