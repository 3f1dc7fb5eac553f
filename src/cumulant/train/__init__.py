"""Training for data that fits in memory, recipes and checkpoints."""

from .checkpoint import load, save
from .loop import History, evaluate, fit
from .recipe import DIGITS, Recipe

__all__ = ["DIGITS", "History", "Recipe", "evaluate", "fit", "load", "save"]
