"""Training: recipes, the trainer for data on disk, a small loop for data in memory, evaluation and checkpoints."""

from .checkpoint import load, save
from .evaluation import Predictions, evaluate_checkpoint, predict
from .folder import RecipeError
from .log import read_log
from .loop import History, evaluate, fit
from .recipe import DIGITS, Recipe
from .recipe_files import parse_recipe, read_recipe, recipe_names
from .train_recipe import TrainRecipe
from .trainer import TrainResult, train

__all__ = [
    "DIGITS",
    "History",
    "Predictions",
    "Recipe",
    "RecipeError",
    "TrainRecipe",
    "TrainResult",
    "evaluate",
    "evaluate_checkpoint",
    "fit",
    "load",
    "parse_recipe",
    "predict",
    "read_log",
    "read_recipe",
    "recipe_names",
    "save",
    "train",
]
