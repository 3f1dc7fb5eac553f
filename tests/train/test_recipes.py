"""Recipes: the built-in ones are complete, files are checked word by word, and two can be told apart."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import few_digits

from cumulant.data.augmentation import SMALL_DATA
from cumulant.data.part import Source
from cumulant.train import TrainRecipe, parse_recipe, read_recipe, recipe_names
from cumulant.train.build import build_model, loader_of, open_recipe_source
from cumulant.train.processes import Processes
from cumulant.train.recipe_files import differences, from_json, recipe_text, to_json


def test_the_recipes_of_the_experiments_are_there():
    wanted = {"digits", "tiny-imagenet-100", "tiny-imagenet-100-patch4", "cifar10", "ucf101", "imagenet-100"}
    assert wanted <= set(recipe_names())


@pytest.mark.parametrize("name", recipe_names())
def test_a_built_in_recipe_says_what_to_expect_and_makes_its_model(name):
    head = [line for line in recipe_text(name).splitlines() if line.startswith("#")]
    for mark in (f"Command:  cumulant train {name}", "Machine:  ", "Time:     ", "Expected: "):
        assert any(mark in line for line in head), mark
    recipe, digits = read_recipe(name), few_digits()
    kind = {"vivit": "video", "segmenter": "scene"}.get(recipe.model.split("_")[0], "image")
    source = Source("stand-in", kind, digits.train, digits.test, digits.classes)
    if recipe.model.startswith("lm_"):
        source = open_recipe_source(recipe, "sentences")
    assert build_model(recipe, source).num_classes == len(source.classes)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"precision": "fp16"}, "precision must be one of fp32, bf16, got 'fp16'"),
        ({"parallel": "dp"}, "parallel must be one of ddp, fsdp, got 'dp'"),
        ({"in_memory": "maybe"}, "in_memory must be one of auto, yes, no, got 'maybe'"),
        ({"max_bad": -1}, "max_bad must be 0 or more, or None, got -1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_a_word_that_is_no_choice_is_refused_also_outside_the_command_line(wrong, message):
    with pytest.raises(ValueError, match=message):
        TrainRecipe(**wrong)


def test_the_limit_of_damaged_items_reaches_the_loader_and_may_change_between_two_parts_of_a_run():
    recipe = replace(read_recipe("digits"), max_bad=3)
    assert loader_of(recipe, few_digits().train, Processes(torch.device("cpu")), None).max_bad == 3
    assert differences(read_recipe("digits"), recipe) == []


def test_tiny_imagenet_is_vit_tiny_with_patches_of_8_at_64_pixels():
    recipe = read_recipe("tiny-imagenet-100")
    assert (recipe.image_size, recipe.epochs, recipe.batch_size) == (64, 100, 1024)
    assert recipe.augmentation == SMALL_DATA
    model = build_model(recipe, few_digits())
    assert (model.embed_dim, len(model.blocks), model.grid_size) == (192, 12, (8, 8))
    assert model.blocks[-1].drop_path.rate == 0.1


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("epoch = 3", r"unknown key 'epoch'; did you mean 'epochs'\?"),
        ('epochs = "3"', "epochs must be int, got '3'"),
        ("epochs = 0", "epochs must be 1 or more, got 0"),
        ("compile = 1", "compile must be bool, got 1"),
        ('precision = "fp16"', "precision must be 'fp32' | 'bf16', got 'fp16'"),
        ("mean = 0.5", "mean must be .*tuple.*, got 0.5"),
        ("ema = 1.0", "ema must be at least 0 and below 1, got 1.0"),
        ("[augmentation]\nmixupp = 0.8", r"augmentation has an unknown key 'mixupp'; did you mean 'mixup'\?"),
        (
            '[augmentation]\npreset = "smal-data"',
            r"unknown augmentation preset 'smal-data'; did you mean 'small-data'\?",
        ),
        ("[augmentation]\nflip = 2.0", "flip: got 2.0"),
        ("epochs = ", "is not valid TOML"),
    ],
)
def test_a_wrong_word_in_a_file_is_named_with_what_is_right(text, message):
    with pytest.raises(ValueError, match=message):
        parse_recipe(text)


def test_a_missing_file_and_an_unknown_name_are_told_apart(tmp_path):
    with pytest.raises(ValueError, match=r"there is no recipe file .*mine\.toml"):
        read_recipe(tmp_path / "mine.toml")
    with pytest.raises(ValueError, match=r"there is no recipe file .*digits\.toml; the built-in one is called digits"):
        read_recipe(tmp_path / "digits.toml")
    with pytest.raises(ValueError, match=r"unknown recipe 'cifar'; did you mean 'cifar10'\?"):
        read_recipe("cifar")


def test_a_file_that_is_no_text_is_named(tmp_path):
    (tmp_path / "mine.toml").write_bytes(b"# \xff\xfe\nepochs = 3\n")
    with pytest.raises(ValueError, match=r"mine\.toml is not a text in UTF-8"):
        read_recipe(tmp_path / "mine.toml")


def test_a_file_is_read_as_it_stands():
    recipe = parse_recipe(
        'clip = "none"\nlr = 1\nmean = [0, 0, 0]\n[model_options]\npool = "gap"\n'
        '[augmentation]\npreset = "deit"\nerase = 0'
    )
    assert recipe.clip is None
    assert (recipe.lr, recipe.mean, recipe.model_options) == (1.0, (0.0, 0.0, 0.0), {"pool": "gap"})
    assert (recipe.augmentation.erase, recipe.augmentation.cutmix) == (0.0, 1.0)


@pytest.mark.parametrize("word", ["none", "None", "null"])
def test_no_value_in_a_file_is_a_word(word):
    assert parse_recipe(f'clip = "{word}"\nworkers = "{word}"') == TrainRecipe()


@pytest.mark.parametrize("name", recipe_names())
def test_a_recipe_survives_json(name):
    recipe = read_recipe(name)
    assert from_json(to_json(recipe)) == recipe
    assert differences(recipe, from_json(to_json(recipe))) == []


def test_differences_name_fields_also_inside_tables_but_not_what_is_free_to_change():
    old = TrainRecipe(model_options={"depth": 2})
    new = replace(old, lr=0.5, workers=4, model_options={"depth": 3}, augmentation=SMALL_DATA)
    found = differences(old, new)
    assert "lr: 0.001 -> 0.5" in found
    assert "model_options.depth: 2 -> 3" in found
    assert "augmentation.mixup: 0.0 -> 1.0" in found
    assert not any("workers" in line for line in found)


def test_the_rate_is_scaled_to_the_batch_where_the_recipe_asks_for_it():
    assert TrainRecipe(lr=5e-4, lr_batch=512, batch_size=1024).scaled().lr == 1e-3
    assert TrainRecipe(lr=5e-4, batch_size=1024).scaled().lr == 5e-4


def test_options_are_added_to_those_of_the_recipe_and_none_takes_one_away():
    recipe = TrainRecipe(model_options={"patch_size": 8, "pool": "gap"})
    given = replace(recipe, epochs=3, model_options={"depth": 2, "pool": None})
    assert recipe.merged(given).model_options == {"patch_size": 8, "depth": 2}
    assert recipe.merged(given).epochs == 3


def test_recipes_on_pages_are_recipes():
    pages = (Path(__file__).parents[2] / "docs").rglob("*.md")
    shown = [block for page in pages for block in re.findall(r"```toml\n(.*?)```", page.read_text(), re.DOTALL)]
    assert [parse_recipe(text).data for text in shown] == ["path/to/pets"]
