"""Models by name: `create_model("vit_tiny_patch16_224", attention="cumulant3")`."""

from __future__ import annotations

from typing import Any

from ..zoo.registry import suggest
from .vit import VisionTransformer

_TINY = {"patch_size": 16, "embed_dim": 192, "depth": 12, "num_heads": 3}
_NANO = {"embed_dim": 64, "depth": 4, "num_heads": 4, "mlp_ratio": 2}

# The numbers are parameters: with 1000 classes, or with those of the data that a small model is for.
VIT_CONFIGS: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": _TINY,  # 5,717,416
    "vit_small_patch16_224": {"patch_size": 16, "embed_dim": 384, "depth": 12, "num_heads": 6},  # 22,050,664
    "vit_base_patch16_224": {"patch_size": 16, "embed_dim": 768, "depth": 12, "num_heads": 12},  # 86,567,656
    "vit_base_patch32_224": {"patch_size": 32, "embed_dim": 768, "depth": 12, "num_heads": 12},  # 88,224,232
    "vit_large_patch16_224": {  # 304,326,632
        "patch_size": 16, "embed_dim": 1024, "depth": 24, "num_heads": 16,
    },
    "deit_tiny_distilled_patch16_224": {**_TINY, "distilled": True},  # 5,910,800
    "vit_smalldata_patch4_32": {  # 2,714,980 with 100 classes (CIFAR-100)
        "img_size": 32, "patch_size": 4, "embed_dim": 192, "depth": 9, "num_heads": 12, "mlp_ratio": 2,
    },
    "vit_nano_patch2_8": {"img_size": 8, "patch_size": 2, "in_chans": 1, **_NANO},  # 136,138 with 10 (digits)
    "vit_nano_patch4_32": {"img_size": 32, "patch_size": 4, **_NANO},  # 142,026 with 10 classes
}  # fmt: skip


def model_names() -> list[str]:
    """Names that `create_model` knows."""
    return list(VIT_CONFIGS)


def create_model(name: str, *, attention: str = "softmax", num_classes: int = 1000, **kw: Any) -> VisionTransformer:
    """A freshly initialised model; `kw` are further arguments of `VisionTransformer` (img_size, pool, ...).

    The arguments are kept in `model.config`, from which `cumulant.train.load` rebuilds it.
    """
    if name not in VIT_CONFIGS:
        raise ValueError(f"unknown model {name!r}; {suggest(name, model_names())}")
    model = VisionTransformer(**{**VIT_CONFIGS[name], "attention": attention, "num_classes": num_classes, **kw})
    placement = ("device", "dtype")
    described = {key: value for key, value in kw.items() if key not in placement}
    model.config = {"name": name, "attention": attention, "num_classes": num_classes, **described}
    return model
