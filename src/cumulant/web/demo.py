"""The models that the explorer starts with when it is given none: trained on the embedded digits, here and now."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import IO, TYPE_CHECKING

from ..inspect.opening import open_model
from .explorable import Explorable
from .opening import explorable

if TYPE_CHECKING:
    from ..train import TrainRecipe

EPOCHS = 8  # of the digits models: 88 (linear) to 96 % of the test images; 20 to 27 s each on a busy core


def digits_recipe(attention: str, epochs: int = EPOCHS) -> TrainRecipe:
    """A ViT with 6 x 6 patches on the embedded digits: enough patches to see a map, few enough to train in seconds.

    The 8 x 8 images are enlarged to 12 x 12, so that each patch holds a piece of stroke and not one grey level.
    """
    from ..train import read_recipe

    recipe = read_recipe("digits")
    return replace(
        recipe,
        attention=attention,
        epochs=epochs,
        image_size=12,
        lr=3e-3,
        warmup_epochs=1.0,
        eval_epochs=epochs,
        checkpoint_epochs=0,
        model_options={**recipe.model_options, "patch_size": 2},
    )


def digits_models(
    mechanisms: Sequence[str],
    cache: Path,
    *,
    fresh: bool = False,
    epochs: int = EPOCHS,
    device: str = "cpu",
    progress: IO[str] | None = None,
) -> dict[str, Explorable]:
    """Digits models of these mechanisms: read from the folder `cache`, or trained into it with a progress bar."""
    from ..tensors import threads
    from ..train import RecipeError, train

    models = {}
    for number, name in enumerate(mechanisms, start=1):
        folder, recipe = cache / f"digits-{name}", digits_recipe(name, epochs)
        if not (folder / "result.json").is_file() and progress is not None:
            print(f"training a small digits model with {name} ({number} of {len(mechanisms)})", file=progress)
        with threads(1):  # models this small gain nothing from more, and on a busy machine wait for them
            try:
                train(recipe, folder, device=device, fresh=fresh, progress=progress)
            except RecipeError:  # made by another version with another recipe
                train(recipe, folder, device=device, fresh=True, progress=progress)
        models[name] = replace(explorable(open_model(folder, device)), collection="digits")
    return models
