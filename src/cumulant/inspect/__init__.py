"""Looking into a model: open it, find its attention, watch what it computes."""

from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .items import labelled_items as labelled_items
    from .items import open_batches as open_batches
    from .opening import Opened as Opened
    from .opening import open_model as open_model
    from .seen import Seen as Seen
    from .sites import Site as Site
    from .sites import find_sites as find_sites
    from .tokens import TokenLayout as TokenLayout
    from .watching import watching as watching

lazy(__name__)
