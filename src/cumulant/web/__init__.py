"""The explorer: a local web page that shows where attention looks. `cumulant explore` starts it."""

from typing import TYPE_CHECKING

from ..lazy import lazy

if TYPE_CHECKING:
    from .app import create_app as create_app
    from .explorable import Example as Example
    from .explorable import Explorable as Explorable
    from .limits import Limits as Limits

lazy(__name__)
