"""Data sets in memory and augmentation."""

from .augment import random_shift
from .digits import digits
from .split import Split

__all__ = ["Split", "digits", "random_shift"]
