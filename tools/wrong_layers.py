"""Wrong calls of what is built of mechanisms: layers, models, recipes, and what looks into them."""

# mypy: disable-error-code="arg-type,misc,assignment"
from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor

import cumulant
from cumulant import explain, nn, zoo
from cumulant.conversion import DistillRecipe
from cumulant.nn.streams import stream_of
from cumulant.train import TrainRecipe
from tools.wrong_values import (
    COUNTS,
    FLAGS,
    INF,
    MASKS,
    NAN,
    OBJECTS,
    SCALES,
    SWITCH,
    B,
    L,
    Wrong,
    nested,
    only,
    tokens,
    words,
    wrong_values,
)


def layers() -> Iterator[Wrong]:
    C = 32
    made: dict[str, Mapping[str, Any]] = {
        "dim": {**COUNTS, "no multiple": 30, "None": None},
        "num_heads": {**COUNTS, "no divisor": 5, "None": None},
        "num_kv_heads": {**only(COUNTS, "True"), "3": 3},
        "attn_drop": {"2": 2.0, "-1": -1.0, "NaN": NAN, "text": "x"},
        "proj_drop": {"2": 2.0, "-1": -1.0, "NaN": NAN, "text": "x"},
        "attention": {**words(), "None": None},
        "attention_options": {"unknown": {"nonsense": 1}, "text": "x", "list": ["full"]},
        "v_conv": {"2": 2, "text": "x", "-1": -1},
        "gate": words(),
        "temperature": words(),
        "grid_size": {"text": "4x4", "1-D": (16,), "number": 16, "0": (0, 4)},
        "prefix": {"-1": -1, "2.5": 2.5, "text": "x"},
        "nonsense": {"number": 3},
        "v_conv_init": words(),
    }
    for name in nn.layers():
        grid = (2, 2, 4) if nn.get_layer(name).needs_grid else (4, 4)

        def build(name: str = name, grid: Any = grid, **kw: Any) -> Any:
            extra = {"v_conv": 3} if "v_conv_init" in kw else {}
            return nn.create_layer(name, **{"dim": C, "num_heads": 4, "grid_size": grid, **extra, **kw})

        plain = name in ("multihead", "axial")  # others have more to say about their heads and extras
        own_rules = {"v_conv_init", "num_kv_heads"}
        kept = {arg: x if plain else only(x, "no multiple", "no divisor") for arg, x in made.items()}
        kept = {arg: x for arg, x in kept.items() if plain or arg not in own_rules}
        yield from wrong_values(f"layer {name}", build, kept, ("option",))
        x, layer = tokens(B, L, C), build()
        bad = OBJECTS | {
            "narrow": x[..., :7],
            "1-D": x[0, 0],
            "integers": x.long(),
            "complex": x * 1j,
            "double": x.double(),
        }
        for kind, one in bad.items():
            yield Wrong(f"layer {name}: x {kind}", ("x",), partial(layer, one))
        calls: dict[str, Mapping[str, Any]] = {"attn_mask": only(MASKS, "by query"), "is_causal": FLAGS}
        if nn.get_layer(name).needs_grid:
            calls |= {"grid": {"other size": (3, 3), "text": "4x4", "number": 16}}
        if nn.get_layer(name).key_mask:
            yield from wrong_values(f"layer {name}", partial(layer, x), calls)
        if nn.get_layer(name).cross:
            others = {"narrow": x[..., :7], "text": "x", "integers": x.long(), "other batch": x[:1].repeat(3, 1, 1)}
            yield from wrong_values(f"layer {name}", partial(layer, x), {"context": others}, ("leading dimensions",))
    cumulants = partial(nn.CumulantAttention, C, 4)
    own = {"order": {**COUNTS, "4": 4}, "fold": words(), "full": FLAGS, "normalization": words(), "nonsense": {"1": 1}}
    yield from wrong_values("CumulantAttention", cumulants, own)
    x = tokens(B, L, C)
    for fold in (True, False):
        layer = cumulants(order=2, fold=fold)
        bad = OBJECTS | {"narrow": x[..., :7], "1-D": x[0, 0], "integers": x.long(), "double": x.double()}
        for kind, one in bad.items():
            yield Wrong(f"CumulantAttention fold={fold}: x {kind}", ("x",), partial(layer, one))
        masks = {"attn_mask": MASKS, "is_causal": FLAGS}
        yield from wrong_values(f"CumulantAttention fold={fold}", partial(layer, x), masks)
        packed = partial(layer.forward_packed, x[0])
        at = {
            "falling": torch.tensor([0, 9, 3]),
            "text": "x",
            "floats": torch.tensor([0.0, 16.0]),
            "short": torch.tensor([0, 9]),
        }
        yield from wrong_values(f"CumulantAttention fold={fold} packed", packed, {"cu_seq": at})


def models() -> Iterator[Wrong]:
    made: dict[str, Mapping[str, Any]] = {
        "attention": {**words(), "None": None, "few": ["softmax"] * 2, "not words": [1, 2, 3, 4]},
        "layer": {"text": "nonsense", "number": 3},
        "num_classes": {"-1": -1, "2.5": 2.5, "text": "x"},
        "img_size": {"9": 9, "0": 0, "-8": -8, "text": "x", "3 sides": (8, 8, 8)},
        "patch_size": {"3": 3, "0": 0, "-1": -1, "text": "x", "2.5": 2.5},
        "depth": COUNTS,
        "num_heads": {**COUNTS, "5": 5},
        "embed_dim": COUNTS,
        "pool": {**words(), "None": None},
        "drop_path": {"1": 1.0, "-1": -1.0, "NaN": NAN, "text": "x"},
        "gelu": words(),
        "attention_options": {"unknown": {"nonsense": 1}},
        "attention_extras": {"unknown": {"nonsense": 1}},
        "nonsense": {"number": 3},
        "mlp_ratio": {"0": 0.0, "-1": -1.0, "NaN": NAN, "text": "x"},
        "in_chans": COUNTS,
        "attn_drop": {"2": 2.0, "text": "x"},
        "drop_rate": {"2": 2.0, "-1": -1.0, "text": "x", "NaN": NAN},
        "is_causal": SWITCH,
        "init_std": {"-1": -1.0, "NaN": NAN, "text": "x"},
    }
    image = partial(cumulant.create_model, "vit_nano_patch2_8")
    yield from wrong_values("create_model", image, made, ("option", "extra", "image size", "patch size", "layer"))
    video = partial(cumulant.create_model, "vivit_nano_patch4x2_16")
    some = {
        "variant": {"5": 5, "text": "x"},
        "frames": {**COUNTS, "7": 7},
        "tubelet": {"text": "x", "2-D": (2, 2), "0": (0, 4, 4)},
    }
    some |= {"tubelet_init": words(), "axis_order": words(), "drop_path_style": words(), "nonsense": {"number": 3}}
    yield from wrong_values("create_model video", video, some)
    x = tokens(2, 1, 8, 8)
    bad = OBJECTS | {"3-D": x[0], "channels": tokens(2, 3, 8, 8), "odd": tokens(2, 1, 9, 9), "integers": x.long()}
    for kind, one in bad.items():
        yield Wrong(f"ViT: images {kind}", ("images", "image"), partial(image(), one))
    for kind, one in (
        OBJECTS | {"4-D": x, "channels": tokens(2, 3, 8, 16, 16), "odd": tokens(2, 1, 7, 16, 16)}
    ).items():
        yield Wrong(f"ViViT: clips {kind}", ("clips", "clip"), partial(video(), one))
    for kind, name in {"text": "nonsense", "None": None, "number": 3}.items():
        yield Wrong(f"create_model: name {kind}", ("model", "name"), partial(cumulant.create_model, name))
        yield Wrong(f"zoo.get: name {kind}", ("mechanism", "name"), partial(zoo.get, name))
        yield Wrong(f"create_layer: name {kind}", ("layer", "name", "mechanism"), partial(nn.create_layer, name, 32, 4))


def kinds() -> Iterator[Wrong]:
    """Options of another kind than their annotation says: a word for a flag, a flag for a number."""
    flags, numbers, counts = FLAGS, {**only(SCALES, "inf", "-inf"), "None": None}, only(COUNTS, "0", "-1")
    x, some = tokens(B, L, 32), {"qkv_bias": flags, "proj_bias": flags, "qk_norm": flags, "scale_norm": flags}
    build = partial(nn.create_layer, "multihead", 32, 4)
    own = {"norm_layer": words(), "v_conv": {"2.5": 2.5, "None": None}, "rotary": only(numbers, "True")}
    yield from wrong_values("create_layer", build, {**some, **own, "attention_options": {"numbers": {3: 4}}})
    for name, bad in {
        "moh": {"top": counts, "balance": numbers | {"inf": INF}},
        "complexformer": {"places": flags, "base": numbers | {"0": 0.0, "inf": INF}},
        "lama": {"bounded": flags, "sharpness": numbers | {"-1": -1.0}, "wide_start": flags, "diversity": numbers},
        "gda": {"ratio": {**counts, "-1": -1}, "pairs": counts},
        "ia_red2": {"threshold": numbers, "sparse": words(), "interpreter_heads": {**counts, "0": 0}},
        "rcmha": {"relative": flags, "convolve": flags, "carry_query": flags},
        "sparsifiner": {"keep": numbers, "block": counts, "signed_basis": flags, "reduce_c": counts},
        "dual_stream": {"mix_qk": flags, "alpha": numbers},
        "marro": {"legacy_view": flags, "block_drop": numbers},
    }.items():
        yield from wrong_values(f"create_layer {name}", partial(nn.create_layer, name, 32, 4), bad)
        if nn.get_layer(name).ragged:
            layer: Any = nn.create_layer(name, 32, 4)
            packed = OBJECTS | {"integers": x[0].long(), "sparse": x[0].to_sparse(), "nested": nested(3, 4), "3-D": x}
            run = partial(layer.forward_packed, cu_seq=torch.tensor([0, 5, L]))
            yield from wrong_values(f"{name}.forward_packed", run, {"x": packed})
    for name in ("multihead", "rcmha"):
        steps = {"other batch": x[:1, :1], "double": x[:, :1].double(), "2-D": x[:, 0], "text": "x", "None": None}
        for kind, one in steps.items():
            yield Wrong(f"{name}, token by token: {kind}", ("x",), partial(_layer_step, name, x[:, :1], one))
    image = partial(cumulant.create_model, "vit_nano_patch2_8")
    made = {"qkv_bias": flags, "qk_norm": flags, "distilled": flags, "features_only": flags, "layer": {"3": 3}}
    yield from wrong_values("create_model", image, {**made, "num_classes": counts, "drop_path": numbers})
    recipe = {"epochs": counts, "lr": numbers, "compile": flags, "workers": counts, "ema": numbers, "data": {"3": 3}}
    recipe |= {"model_options": {"text": "a=1"}, "augmentation": {"text": "x"}, "std": {"0": (0.0,) * 3, "text": "x"}}
    yield from wrong_values("TrainRecipe", TrainRecipe, {**recipe, "mean": {"NaN": (NAN,) * 3, "number": 0.5}})
    distilling = {"epochs": counts, "warmup": numbers, "temperature": numbers}
    yield from wrong_values("DistillRecipe", DistillRecipe, distilling)
    model = image(num_classes=3).eval()
    with explain.capture(model, queries="all") as captured:
        model(tokens(2, 1, 8, 8))
    good: dict[str, Any] = {"maps": captured.maps(0), "tokens": captured.tokens}
    shown = {"sign": words(), "metric": words(), "axes": words(), "maps": OBJECTS, "tokens": OBJECTS}
    yield from wrong_values("mean_distance", lambda **kw: explain.mean_distance(**{**good, **kw}), shown)
    yield from wrong_values("entropy", explain.entropy, {"maps": OBJECTS})
    yield from wrong_values("rollout", partial(explain.rollout, captured), {"sign": words(), "residual": numbers})
    convert = partial(cumulant.convert, example=tokens(2, 1, 8, 8))
    asked = {"force": flags, "heads": flags, "batches": counts, "budget": only(numbers, "None"), "attention": {"3": 3}}
    yield from wrong_values("convert", lambda **kw: convert(image(num_classes=3), **kw), asked)


def _layer_step(name: str, good: Tensor, bad: Any) -> Any:
    layer, claimed = nn.create_layer(name, 32, 4).eval(), nn.get_layer(name).streaming
    stream, fresh = (stream_of(layer, claimed) for _ in range(2))
    stream.step(good)
    fresh.step(good)
    try:
        return stream.step(bad)
    except (ValueError, TypeError) as error:
        if not torch.equal(stream.step(good), fresh.step(good)):
            raise RuntimeError("the failed step kept its token") from error
        raise
