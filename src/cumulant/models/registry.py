"""Models by name: `create_model("vit_tiny_patch16_224", attention="cumulant3")`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from ..grammar import Registry, read_blocks, suggest, write_blocks
from ..kinds import check_kinds
from ..nn.arguments import check_place
from .activator import Activator
from .backbone import Features
from .crossvit import CrossViT
from .dual_stream import DualStream
from .ia_red2 import InterpretedViT
from .lm import LanguageModel
from .maxvit import MAXVIT_CONFIGS, MaxViT
from .parts import pair
from .shvit import SHViT
from .spectformer import HIERARCHICAL_CONFIGS, SPECTFORMER_CONFIGS, HierarchicalSpectFormer, SpectFormer
from .tic import TIC_CONFIGS, TiC
from .tnt import TNT
from .vit import VisionTransformer
from .vivit import ViViT

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

_VIVIT_NANO = {"frames": 8, "embed_dim": 64, "depth": 3, "temporal_depth": 1, "num_heads": 4, "mlp_ratio": 2}
_UCF = {"frames": 16, "temporal_depth": 2, "num_heads": 6}

# In names, patch16x2 is a tubelet of 16 x 16 pixels and 2 frames, as in "B/16x2"; then the side of a frame.
# The numbers are parameters of variants 1, 2, 3, 4 and "average" with the pooling that each has unless told otherwise.
VIVIT_CONFIGS: dict[str, dict[str, Any]] = {
    # 32 frames, 400 classes (Kinetics): 88,954,000  115,062,928  117,319,312  88,952,464  86,696,080
    "vivit_base_patch16x2_224": {"embed_dim": 768, "depth": 12, "num_heads": 12},
    "vivit_large_patch16x2_224": {"embed_dim": 1024, "depth": 24, "num_heads": 16},
    "vivit_huge_patch16x2_224": {"embed_dim": 1280, "depth": 32, "num_heads": 16},
    # 16 frames, for UCF-101 from scratch
    "vivit_small_patch16x2_112": {**_UCF, "img_size": 112, "embed_dim": 384, "depth": 8},
    "vivit_tiny_patch16x2_112": {**_UCF, "img_size": 112, "embed_dim": 192, "depth": 6},
    "vivit_tiny_patch8x2_64": {**_UCF, "img_size": 64, "tubelet": (2, 8, 8), "embed_dim": 192, "depth": 6},
    # 8 frames; with tubelets of one frame no motion is inside a token, so that "average" is a control
    "vivit_nano_patch4x2_32": {**_VIVIT_NANO, "img_size": 32, "tubelet": (2, 4, 4)},
    "vivit_nano_patch4x2_16": {**_VIVIT_NANO, "img_size": 16, "tubelet": (2, 4, 4), "in_chans": 1},
    "vivit_nano_patch4x1_16": {**_VIVIT_NANO, "img_size": 16, "tubelet": (1, 4, 4), "in_chans": 1},
}


# The numbers are parameters with 65 characters (tiny-shakespeare).
LM_CONFIGS: dict[str, dict[str, Any]] = {
    "lm_nano": {"embed_dim": 64, "depth": 2, "num_heads": 2, "context": 64},  # 104,256
    "lm_tiny": {"embed_dim": 128, "depth": 4, "num_heads": 4, "context": 128},  # 801,664
    "lm_small": {"embed_dim": 384, "depth": 6, "num_heads": 6, "context": 256},  # 10,672,512
}
INTERPRETED = {name.replace("vit", "ia_red2"): VIT_CONFIGS[name] for name in
               ("vit_tiny_patch16_224", "vit_small_patch16_224", "vit_nano_patch2_8")}  # fmt: skip
DUAL_CONFIGS: dict[str, dict[str, Any]] = {"dual_stream_tiny": LM_CONFIGS["lm_tiny"]}


# With 1000 classes; nano ones with 10.
TNT_CONFIGS: dict[str, dict[str, Any]] = {
    "tnt_ti": {"embed_dim": 192, "inner_dim": 12, "num_heads": 3, "inner_heads": 2},  # 6,076,408
    "tnt_s": {"embed_dim": 384, "inner_dim": 24, "num_heads": 6, "inner_heads": 4},  # 23,768,584
    "tnt_b": {"embed_dim": 640, "inner_dim": 40, "num_heads": 10, "inner_heads": 4},  # 65,428,680
    "tnt_s_legacy": {"embed_dim": 384, "inner_dim": 24, "num_heads": 6, "inner_heads": 4, "legacy": True},  # 23,755,336
    "tnt_nano": {  # 189,530
        "img_size": 32, "patch_size": 8, "inner_stride": 2, "embed_dim": 64, "inner_dim": 8, "depth": 3, "num_heads": 4,
        "inner_heads": 2,
    },
}  # fmt: skip
_FOUR = {"depth": (1, 4), "mlp_ratio": 4}
_CROSSVIT: dict[str, dict[str, Any]] = {
    "ti": {"embed_dim": (96, 192), "num_heads": (3, 3), **_FOUR},  # 7,014,800
    "s": {"embed_dim": (192, 384), "num_heads": (6, 6), **_FOUR},  # 26,856,272
    "b": {"embed_dim": (384, 768), "num_heads": (12, 12), **_FOUR},  # 105,025,232
    "9": {"embed_dim": (128, 256), "num_heads": (4, 4), "depth": (1, 3)},  # 8,553,296; dagger 8,776,592
    "15": {"embed_dim": (192, 384), "num_heads": (6, 6), "depth": (1, 5)},  # 27,528,464; dagger 28,209,008
    "18": {"embed_dim": (224, 448), "num_heads": (7, 7), "depth": (1, 6)},  # 43,271,408; dagger 44,266,976
}
_AT_408 = {"conv_stem": True, "img_size": 408, "img_scale": (1.0, 384 / 408)}
CROSSVIT_CONFIGS: dict[str, dict[str, Any]] = {
    **{f"crossvit_{name}": config for name, config in _CROSSVIT.items()},
    **{f"crossvit_{name}_dagger": {**_CROSSVIT[name], "conv_stem": True} for name in ("9", "15", "18")},
    **{f"crossvit_{name}_dagger_408": {**_CROSSVIT[name], **_AT_408} for name in ("15", "18")},
    "crossvit_nano": {  # 228,980
        "img_size": 32, "img_scale": (1.0, 1.0), "patch_size": (4, 8), "embed_dim": (32, 64), "depth": (1, 2),
        "stages": 2, "num_heads": (2, 2), "mlp_ratio": 2,
    },
}  # fmt: skip
SHVIT_CONFIGS: dict[str, dict[str, Any]] = {
    "shvit_s1": {"embed_dim": (128, 224, 320), "depth": (2, 4, 5), "partial_dim": (32, 48, 68)},  # 6,330,808
    "shvit_s2": {"embed_dim": (128, 308, 448), "depth": (2, 4, 5), "partial_dim": (32, 66, 96)},  # 11,483,072
    "shvit_s3": {"embed_dim": (192, 352, 448), "depth": (3, 5, 5), "partial_dim": (48, 75, 96)},  # 14,245,273
    "shvit_s4": {  # 16,588,484
        "img_size": 256, "embed_dim": (224, 336, 448), "depth": (4, 7, 6), "partial_dim": (48, 72, 96),
    },
    "shvit_nano": {  # 186,186
        "img_size": 32, "embed_dim": (32, 48, 64), "depth": (1, 2, 2), "partial_dim": (8, 12, 16), "qk_dim": 8,
        "stem_depth": 2,
    },
}  # fmt: skip
# With the 10 classes of CIFAR-10.
ACTIVATOR_CONFIGS: dict[str, dict[str, Any]] = {
    "activator": {},  # 2,650,890
    "activator_glu": {"mlp": False},  # 1,599,242
    "activator_nano": {"embed_dim": 64, "hidden_dim": 128, "drop_rate": 0.1},
}


# What timm calls them; `create_model` takes both.
TIMM_NAMES = {
    **{f"tnt_{size}_patch16_224": f"tnt_{size}" for size in ("s", "b", "s_legacy")},
    **{f"crossvit_{size}_240": f"crossvit_{own}" for size, own in (("tiny", "ti"), ("small", "s"), ("base", "b"))},
    **{
        f"maxvit_{size}_tf_224": f"maxvit_{own}"
        for size, own in (("tiny", "t"), ("small", "s"), ("base", "b"), ("large", "l"), ("xlarge", "xl"))
    },
    **{f"crossvit_{size}_240": f"crossvit_{size}" for size in ("9", "15", "18", "9_dagger", "15_dagger", "18_dagger")},
}


class Entry(NamedTuple):
    """What a name stands for: a class of models, and the arguments that make this one."""

    kind: Callable[..., nn.Module]
    config: Mapping[str, Any]


_MODELS: Registry[Entry] = Registry("model")


def register_model(name: str, kind: Callable[..., nn.Module], **config: Any) -> None:
    """Let `create_model(name, ...)` make `kind(**config, attention=..., ...)`; the name must be new."""
    _MODELS.add(name, Entry(kind, config))


def names() -> list[str]:
    """Names that `create_model` knows."""
    return list(_MODELS)


def input_kind(name: str) -> str:
    """What the model of that name is for: "image", "video", "text", or "scene", images with a class a pixel."""
    marks = {"takes_clips": "video", "takes_text": "text", "takes_scenes": "scene"}
    return next((kind for mark, kind in marks.items() if getattr(_MODELS[name].kind, mark, False)), "image")


def model_arguments(name: str) -> list[str]:
    """What `create_model` takes for that name beside it."""
    own = TIMM_NAMES.get(name, name) if isinstance(name, str) else name
    return [key for key in inspect.signature(_MODELS.named(own).kind).parameters if key != "self"]


def input_shape(name: str, **told: Any) -> tuple[int, ...]:
    """Channels, for videos frames, height and width that the model of that name is made for; of a text the tokens.

    `told` are arguments that it was made with. Empty for a network that takes any size.
    """
    kind, own = _MODELS[name]
    given = {key: one.default for key, one in inspect.signature(kind).parameters.items()} | dict(own) | told
    if input_kind(name) == "text":
        return (given["context"],)
    if "img_size" not in given:
        return ()
    frames = (given["frames"],) if "frames" in given else ()
    return given["in_chans"], *frames, *pair(given["img_size"])


def create_model(
    name: str,
    *,
    attention: str | Sequence[str] = "softmax",
    layer: str | None = None,
    num_classes: int = 1000,
    features_only: bool = False,
    out_indices: int | Sequence[int] | None = None,
    **kw: Any,
) -> Any:
    """A freshly initialised model; `kw` are further arguments of its class: of `VisionTransformer` (img_size, pool,
    ...), for names that begin with "vivit" of `ViViT` (variant, frames, ...), with "lm" of `LanguageModel`.

    `attention` names a mechanism, with options behind it ("cumulant3+around=mean"), or one for each block, in a list or
    in one text ("4xagent,8xsoftmax"); `layer` names an attention layer. The arguments are kept in `model.config`, from
    which `cumulant.train.load` rebuilds it.

    `features_only` makes a network of images a list of maps, those of `out_indices` (see `Features`): no classifier.
    """
    check_kinds(create_model, {"layer": layer, "num_classes": num_classes, "features_only": features_only})
    known = model_arguments(name)
    name = TIMM_NAMES.get(name, name)
    if features_only:
        if input_kind(name) == "text":
            raise ValueError(f"features_only=True makes maps of images and clips, and {name} takes texts")
        kept = {"features_only": True, **({} if out_indices is None else {"out_indices": out_indices})}
        made = Features(create_model(name, attention=attention, layer=layer, num_classes=0, **kw), out_indices)
        made.config = {**(made.model.config or {}), **kept}
        return made
    if out_indices is not None:
        raise ValueError(f"out_indices={out_indices!r} names levels of features: give features_only=True with it")
    attention = attention if isinstance(attention, str) else write_blocks(read_blocks(attention))
    given = {"attention": attention, "num_classes": num_classes, **kw, **({} if layer is None else {"layer": layer})}
    unknown = [key for key in given if key not in known]
    if unknown:
        raise ValueError(f"unknown argument {unknown[0]!r} of {name}; {suggest(unknown[0], known)}")
    kind, config = _MODELS[name]
    check_kinds(kind, given)
    check_place(kw.get("device"), kw.get("dtype"))
    model: Any = kind(**{**config, **given})
    placement = ("device", "dtype")
    model.config = {"name": name, **{key: value for key, value in given.items() if key not in placement}}
    return model


def named_after(model: nn.Module, state: Mapping[str, Any]) -> str | None:
    """How `create_model` is called for a network of this model's kind that has weights of those names and shapes."""
    heads = [tuple(one.shape) for key, one in state.items() if key.startswith("head") and getattr(one, "ndim", 0) == 2]
    kept = {key: x for key, x in (getattr(model, "config", None) or {}).items() if key in ("attention", "layer")}
    for name in [name for name in names() if _MODELS[name].kind is type(model)]:
        width = _MODELS[name].config.get("widths", _MODELS[name].config.get("embed_dim"))
        last = width[-1] if isinstance(width, Sequence) else width
        if heads and last is not None and last not in {read for _, read in heads}:
            continue  # told by what the classifier reads, without making a large network
        given = {**kept, "num_classes": heads[-1][0] if heads else 0}
        try:
            nn.Module.load_state_dict(create_model(name, device="meta", **given), state, assign=True)
        except (RuntimeError, ValueError):
            continue
        return ", ".join([repr(name), *(f"{key}={one!r}" for key, one in given.items())])
    return None


for _kind, _configs in (
    (VisionTransformer, VIT_CONFIGS),
    (ViViT, VIVIT_CONFIGS),
    (LanguageModel, LM_CONFIGS),
    (DualStream, DUAL_CONFIGS),
    (InterpretedViT, INTERPRETED),
    (TNT, TNT_CONFIGS),
    (CrossViT, CROSSVIT_CONFIGS),
    (SHViT, SHVIT_CONFIGS),
    (Activator, ACTIVATOR_CONFIGS),
    (MaxViT, MAXVIT_CONFIGS),
    (SpectFormer, SPECTFORMER_CONFIGS),
    (HierarchicalSpectFormer, HIERARCHICAL_CONFIGS),
    (TiC, TIC_CONFIGS),
):
    for _name, _config in _configs.items():
        register_model(_name, _kind, **_config)
