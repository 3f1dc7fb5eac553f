"""Readers for images, video and text, clip sampling, loading, augmentation."""

from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .augment import Augment as Augment
    from .augmentation import DEIT as DEIT
    from .augmentation import PRESETS as PRESETS
    from .augmentation import SMALL_DATA as SMALL_DATA
    from .augmentation import VIDEO as VIDEO
    from .augmentation import Augmentation as Augmentation
    from .clips import ClipPart as ClipPart
    from .clips import ClipSampling as ClipSampling
    from .clips import TensorVideos as TensorVideos
    from .digits import ScenePart as ScenePart
    from .digits import digits_source as digits_source
    from .images import TensorImages as TensorImages
    from .loader import BadItem as BadItem
    from .loader import Loader as Loader
    from .part import DataError as DataError
    from .part import DecodeError as DecodeError
    from .part import Part as Part
    from .part import Source as Source
    from .source import ALIASES as ALIASES
    from .source import open_source as open_source
    from .text import TextLoader as TextLoader
    from .text import TextPart as TextPart

lazy(__name__)
