"""Training: recipes, the trainer, evaluation and checkpoints."""

from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .checkpoint import load as load
    from .checkpoint import save as save
    from .evaluation import evaluate_checkpoint as evaluate_checkpoint
    from .folder import RecipeError as RecipeError
    from .log import read_log as read_log
    from .predictions import Predictions as Predictions
    from .predictions import predict as predict
    from .recipe_files import parse_recipe as parse_recipe
    from .recipe_files import read_recipe as read_recipe
    from .recipe_files import recipe_names as recipe_names
    from .tasks import TokenScores as TokenScores
    from .train_recipe import TrainRecipe as TrainRecipe
    from .trainer import TrainResult as TrainResult
    from .trainer import train as train

lazy(__name__)
