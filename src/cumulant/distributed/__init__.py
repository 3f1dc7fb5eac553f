"""Attention over a sequence whose parts several workers hold: `with context_parallel(mesh): ...`."""

from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .context import context_parallel as context_parallel
    from .exchange import Workers as Workers
    from .parts import shard as shard
    from .parts import unshard as unshard

lazy(__name__)
