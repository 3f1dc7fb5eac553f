"""Readers for images and video, clip sampling, loading, augmentation."""

from .augment import random_shift
from .augmentation import DEIT, PRESETS, SMALL_DATA, VIDEO, Augment, Augmentation
from .clips import ClipPart, ClipSampling, TensorVideos
from .digits import digits
from .images import ImageFiles, ImageRows, TensorImages
from .loader import BadItem, Loader
from .part import DataError, DecodeError, Part, Source
from .source import ALIASES, digits_source, open_source
from .split import Split

__all__ = [
    "ALIASES",
    "DEIT",
    "PRESETS",
    "SMALL_DATA",
    "VIDEO",
    "Augment",
    "Augmentation",
    "BadItem",
    "ClipPart",
    "ClipSampling",
    "DataError",
    "DecodeError",
    "ImageFiles",
    "ImageRows",
    "Loader",
    "Part",
    "Source",
    "Split",
    "TensorImages",
    "TensorVideos",
    "digits",
    "digits_source",
    "open_source",
    "random_shift",
]
