"""`cumulant explore`: what a user may choose, and what happens then. No heavy import: help is shown from this."""

from __future__ import annotations

import ipaddress
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import tyro

from ..command import failed

MECHANISMS = ("softmax", "linear", "cumulant2", "cumulant3")


@dataclass(frozen=True)
class Explore:
    """Open a local page that shows where attention looks: click a patch, see the signed map of every layer and head.

    Without a checkpoint, small models are trained first: two on photographs that installed packages ship, four on
    handwritten digits (once; two or three minutes on one core). The page needs no network, and uploads stay in the
    memory of this program.

    Example: cumulant explore

    Example: cumulant explore runs/digits-softmax-0 runs/digits-cumulant3-0 --port 9000

    Example: cumulant explore runs/my-run --data path/to/tiny-imagenet-100

    Example: cumulant explore timm:vit_base_patch16_224 timm:vit_base_patch16_224@cumulant3 --data path/to/pictures

    Example: cumulant explore path/to/dinov2 --data path/to/pictures

    Example: cumulant explore path/to/sam2 path/to/lightglue --data path/to/pictures
    """

    checkpoint: Annotated[tuple[str, ...], tyro.conf.Positional, tyro.conf.arg(metavar="[CHECKPOINT ...]")] = ()
    """Files or folders of `cumulant train` (its last weights) or `cumulant convert`, timm:NAME for a model of timm,
    a folder that save_pretrained of transformers wrote or transformers:NAME; @cumulant3 after one swaps its attention.
    A SAM 2 or a LightGlue is shown on the dial from linear attention to softmax. None: models of photographs and
    digits, trained here."""
    data: str | None = None
    """Folder of pictures and short videos, or data set whose test items are the examples; by default the data of the
    first checkpoint, if it is here."""
    images: int = 40
    """Example images on the page."""
    host: str = "127.0.0.1"
    """Address to listen on. Any other than the default lets other machines use this one's processor: there is no
    password."""
    allow_host: tuple[str, ...] = ()
    """Names, beside its addresses, by which other machines may ask for this one, with --host 0.0.0.0."""
    port: int = 8000
    """Port to listen on; 0: any free one."""
    cache: Path = Path("runs/explore")
    """Folder in which the models that are trained here are kept."""
    fresh: bool = False
    """Train them again."""
    browser: bool = False
    """Open the page in a browser."""
    device: str = "cpu"
    """cpu or cuda."""

    def __post_init__(self) -> None:
        if not 0 <= self.port <= 65535:
            raise ValueError(f"port must be between 0 and 65535, got {self.port}")
        if not 1 <= self.images <= 100:
            raise ValueError(f"images must be between 1 and 100, got {self.images}")

    @property
    def local(self) -> bool:
        """Whether only this machine can reach the page."""
        try:
            return ipaddress.ip_address(self.host).is_loopback
        except ValueError:
            return self.host == "localhost"

    def run(self) -> int:
        from . import serve

        try:
            serve.explore(self, progress=sys.stderr)
        except RuntimeError as error:  # a model or a package that does not work here
            return failed(error)
        except KeyboardInterrupt:
            print("\nthe explorer has ended", file=sys.stderr)
        return 0
