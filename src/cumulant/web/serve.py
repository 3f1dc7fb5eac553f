"""`cumulant explore`: models and examples are made ready, then the page is served until Ctrl-C."""

from __future__ import annotations

import socket
import sys
from collections.abc import Collection
from dataclasses import replace
from importlib.util import find_spec
from typing import IO, TYPE_CHECKING, Any

from ..optional import needed
from .command import MECHANISMS, Explore
from .limits import Limits

if TYPE_CHECKING:
    from fastapi import FastAPI

    from ..train import TrainRecipe
    from .dial import Subject
    from .explorable import Example, Explorable

DEFAULTS = Limits()


def prepare(settings: Explore, progress: IO[str] | None = None) -> FastAPI:
    """The application with the models and example images that the settings name."""
    from ..explain.matches import Matcher
    from . import matcher
    from .app import create_app  # first: a missing package is told before anything is trained
    from .opening import open_models
    from .segmenter import CACHE, SegmentingDial, is_segmenter

    if not settings.checkpoint:
        models, examples = starting_models(settings, progress)
        words = [str(place) for place in (CACHE, matcher.CACHE) if _dialled(str(place))]
        if find_spec("kornia") is None:  # nobody asked for LightGlue: it is shown where it can be
            words = [word for word in words if is_segmenter(word)]
    else:
        words = [word for word in settings.checkpoint if _dialled(word)]
        models, recipe = open_models([word for word in settings.checkpoint if word not in words], settings.device)
        examples = given_examples(settings, recipe, max((one.size for one in models.values()), default=512))
        if not models:  # a segmenter or a matcher alone: the page needs a model whose maps can be clicked
            painters, shipped = painting_models(settings, progress)
            models, examples = painters, examples or shipped
    dials: dict[str, Subject] = {}
    for word in words:
        if is_segmenter(word):
            dials[_unused("SAM 2", dials)] = SegmentingDial(word, settings.device)
        else:
            dials[_unused("LightGlue", dials)] = matcher.MatchingDial(Matcher.open(word, settings.device))
    return create_app(models, examples, dials=dials, **names(settings))


def _dialled(word: str) -> bool:
    """Whether a word of the command line is a model that is shown on the dial alone."""
    from ..explain.matches import is_matcher
    from .segmenter import is_segmenter

    return is_segmenter(word) or is_matcher(word)


def _unused(name: str, taken: Collection[str]) -> str:
    """The name, with a number where it is taken."""
    return next(x for x in (name, *(f"{name} ({n})" for n in range(1, len(taken) + 1))) if x not in taken)


def painting_models(settings: Explore, progress: IO[str] | None) -> tuple[dict[str, Explorable], list[Example]]:
    """Models of the photographs that packages ship, and these as examples."""
    from .photographs import COLLECTION, photograph_models, photographs

    pictures = photographs()
    models = photograph_models(
        pictures, settings.cache, fresh=settings.fresh, device=settings.device, progress=progress
    )
    return models, [replace(one, collection=COLLECTION) for one in pictures]


def starting_models(settings: Explore, progress: IO[str] | None) -> tuple[dict[str, Explorable], list[Example]]:
    """What the page opens on where nothing is named: photographs first, the digits beside them."""
    from .demo import digits_models
    from .explorable import examples_of

    models, examples = painting_models(settings, progress)
    options: dict[str, Any] = {"fresh": settings.fresh, "device": settings.device, "progress": progress}
    models |= digits_models(MECHANISMS, settings.cache, **options)
    digits = [replace(one, collection="digits") for one in examples_of("digits", settings.images, size=12)]
    if settings.data is None:
        return models, [*examples, *digits]
    return models, [*examples_of(settings.data, settings.images, size=512), *examples, *digits]


def given_examples(settings: Explore, recipe: TrainRecipe | None, side: int) -> list[Example]:
    """Pictures of --data, or of the data that the first run was trained on, where it is here."""
    from .explorable import examples_of

    data = settings.data or (recipe.data if recipe else None)
    examples: list[Example] = []
    try:
        examples = examples_of(data, settings.images, side, **as_trained(recipe)) if data else []
    except (OSError, ValueError, ImportError) as error:
        if settings.data is not None:
            raise
        print(f"no example images: {error}", file=sys.stderr)
    if not examples:
        print("choose example images with --data, or upload your own on the page", file=sys.stderr)
    return examples


def names(settings: Explore) -> dict[str, Any]:
    """By what this machine may be asked for; all of 127.0.0.0/8 is this machine."""
    from .app import LOCAL_HOSTS

    return {"hosts": (*LOCAL_HOSTS, settings.host, *settings.allow_host), "addresses": not settings.local}


def as_trained(recipe: TrainRecipe | None) -> dict[str, Any]:
    """How the recipe of a video model reads its data, one clip of each video; nothing for models of pictures."""
    if recipe is None or not recipe.model.startswith("vivit"):
        return {}
    return {**{name: getattr(recipe, name) for name in ("frames", "stride", "split")}, **recipe.data_options}


def explore(settings: Explore, progress: IO[str] | None = None) -> None:
    """Serve the page until it is stopped."""
    with needed("the explorer needs uvicorn", "web"):
        import uvicorn  # noqa: F401 (told before anything is trained)
    from ..train.processes import chosen_device

    settings = replace(settings, device=str(chosen_device(settings.device)))
    with listen(settings.host, settings.port) as door:  # first: a taken port is told before anything is trained
        app = prepare(settings, progress)
        host, port = door.getsockname()[:2]
        address = f"http://{f'[{host}]' if ':' in host else host}:{port}/"
        print(f"the explorer is at {address} (Ctrl-C ends it)", flush=True)
        if not settings.local:
            print(f"it listens on {settings.host}: whoever reaches this machine can use it", file=sys.stderr)
        if settings.browser:
            import threading
            import webbrowser

            threading.Timer(0.5, webbrowser.open, [address]).start()
        serve(app, door)


def serve(app: FastAPI, door: socket.socket, limits: Limits = DEFAULTS) -> None:
    """Serve an application until Ctrl-C. Nobody holds a connection with half a request for long, and nobody keeps the
    program from ending."""
    with needed("the explorer needs uvicorn", "web"):
        import uvicorn
    from .patience import patient

    config = uvicorn.Config(
        app, http=patient(limits.header_seconds), log_level="warning", server_header=False, timeout_keep_alive=30,
        timeout_graceful_shutdown=limits.closing_seconds,
    )  # fmt: skip
    uvicorn.Server(config).run(sockets=[door])


def listen(host: str, port: int) -> socket.socket:
    """A socket on that address; an OSError that says what to do where it is taken."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    door = socket.socket(family, socket.SOCK_STREAM)
    door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        door.bind((host, port))
        door.listen()  # binding alone lets a second explorer, that is being made ready too, take the same port
    except OSError as error:
        door.close()
        raise OSError(
            error.errno, f"cannot listen on {host}:{port} ({error.strerror}); choose another --port or --host"
        ) from error
    return door
