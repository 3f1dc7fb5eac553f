"""What is compared: a mechanism and extras, written `cumulant3+v_conv+pool=gap`, turned into values of a recipe.

A layer is an extra, and its options stand behind it: `softmax+layer=moh+top=2`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from cumulant import grammar, nn, zoo
from cumulant.call import whole
from cumulant.grammar import read_option, suggest
from cumulant.models.registry import VIVIT_CONFIGS, model_arguments
from cumulant.nn.arguments import EXTRAS
from cumulant.train import TrainRecipe
from cumulant.train.recipe_files import check_value

# Arguments of the models that are chosen in another way.
NOT_EXTRAS = {"attention", "attention_options", "attention_extras", "img_size", "frames", "num_classes"}
NOT_EXTRAS |= {"drop_path", "device", "dtype", "in_chans", "distilled", "distilled_training"}
# Values of the recipe that decide a run, each a single number or word.
RECIPE_EXTRAS = (
    "image_size", "decode_size", "frames", "stride", "views", "crops", "split", "model", "drop_path", "batch_size",
    "lr", "lr_batch", "min_lr", "warmup_epochs", "optimizer", "weight_decay", "beta2", "label_smoothing", "clip", "ema",
    "accumulate", "repeats", "precision",
)  # fmt: skip
# Values that change how a run is done and not what comes out of it; `--change` takes them too.
MANNERS = ("compile", "compile_mode", "cuda_graph", "workers", "in_memory", "max_bad", "eval_epochs",
           "checkpoint_epochs", "checkpoint_steps", "log_steps", "tensorboard", "wandb")  # fmt: skip


def configured(recipe: TrainRecipe, name: str) -> TrainRecipe:
    """The recipe with the mechanism and the extras that `cumulant3+v_conv+pool=gap` stands for.

    In `4xagent+agents=9,8xsoftmax+pool=gap` options stay with their block, and all other extras are of the model.
    """
    blocks = grammar.read_blocks(name)
    if len(blocks) > 1:
        return _by_block(recipe, blocks, name)
    mechanism, extras = grammar.parse(name)
    if not mechanism:
        raise ValueError(f"name a mechanism before the extras, e.g. cumulant3{name}; got {name!r}")
    zoo.get(mechanism)
    # Of every run the last weights are compared: nothing is chosen, so nothing is held out.
    recipe = replace(recipe, attention=mechanism, holdout=0.0)
    for key, value in _layer_whole(extras, mechanism).items():
        recipe = with_extra(recipe, key, value, name)
    return recipe


def _layer_whole(extras: Mapping[str, Any], mechanism: str) -> dict[str, Any]:
    """The extras with those of a layer behind its name: `layer=moh`, `top=2` as `layer=moh+top=2`."""
    if not isinstance(extras.get("layer"), str):
        return dict(extras)
    known = nn.get_layer(extras["layer"]).options
    own = {key: value for key, value in extras.items() if key in known and key not in zoo.get(mechanism).options}
    rest = {key: value for key, value in extras.items() if key not in own}
    return {**rest, "layer": grammar.write(extras["layer"], own)}


def _by_block(recipe: TrainRecipe, blocks: Sequence[str], name: str) -> TrainRecipe:
    written: list[str] = []
    extras: dict[str, Any] = {}
    for block in blocks:
        mechanism, options = grammar.parse(block)
        own = {key: value for key, value in options.items() if key in zoo.get(mechanism).options}
        written.append(grammar.write(mechanism, own))
        extras |= {key: value for key, value in options.items() if key not in own}
    recipe = replace(recipe, attention=grammar.write_blocks(written))
    for key, value in extras.items():
        recipe = with_extra(recipe, key, value, name, mechanism=False)
    return recipe


def changed(recipe: TrainRecipe, words: Sequence[str]) -> TrainRecipe:
    """The recipe with `--change key=value ...`; options that belong to one mechanism alone have no place there."""
    for word in words:
        key, value = read_option(word, "--change", "extras")
        recipe = with_extra(recipe, key, value, "--change", (*RECIPE_EXTRAS, *MANNERS), mechanism=False)
    return recipe


def with_extra(
    recipe: TrainRecipe, key: str, value: Any, where: str, fields: Sequence[str] = RECIPE_EXTRAS, mechanism: bool = True
) -> TrainRecipe:
    """The recipe with one extra: an option of the mechanism, of every layer, of the model or of the recipe itself."""
    options = zoo.get(recipe.attention).options if mechanism else ()
    if key in options:
        return replace(recipe, attention_options={**recipe.attention_options, key: value})
    if key in EXTRAS:
        return replace(recipe, attention_extras={**recipe.attention_extras, key: value})
    if key == "patch":
        return replace(recipe, model_options={**recipe.model_options, **_patch(recipe, value)})
    of_model = [name for name in model_arguments(recipe.model) if name not in NOT_EXTRAS]
    if key in of_model:
        return replace(recipe, model_options={**recipe.model_options, key: value})
    if key in fields:
        check_value(key, value, where)
        return replace(recipe, **{key: value})
    owners = [name for name in zoo.names() if key in zoo.get(name).options]
    if owners and mechanism:
        raise ValueError(
            f"{key!r} in {where!r} is an option of {', '.join(owners)}, not of {recipe.attention}, which has: "
            f"{', '.join(options) or 'none'}"
        )
    known = [*options, *EXTRAS, "patch", *of_model, *fields]
    raise ValueError(f"unknown extra {key!r} in {where!r}; {suggest(key, list(dict.fromkeys(known)))}")


def _patch(recipe: TrainRecipe, side: Any) -> dict[str, Any]:
    """The argument of the model for patches of `side` x `side` pixels, in clips with as many frames as before."""
    if not whole(side, 1):
        raise ValueError(f"patch must be the side of a patch in pixels, got {side!r}")
    if not recipe.model.startswith("vivit"):
        return {"patch_size": side}
    usual = VIVIT_CONFIGS[recipe.model].get("tubelet", (2, 16, 16))
    frames = recipe.model_options.get("tubelet", usual)[0]
    return {"tubelet": [frames, side, side]}
