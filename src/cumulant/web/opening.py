"""The models that the explorer shows, by the words of the command line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from ..inspect.opening import Opened, open_model
from ..nn.swapped.plan import is_converted
from .explorable import Explorable

if TYPE_CHECKING:
    from ..train import TrainRecipe


def open_models(words: Sequence[str], device: str = "cpu") -> tuple[dict[str, Explorable], TrainRecipe | None]:
    """Models by a short name each, and the recipe of the first that has one.

    A word is one that `inspect.open_model` takes; `@cumulant3` after it swaps the attention of that model first,
    untrained as `cumulant convert` begins, to be compared with the original.
    """
    opened: list[tuple[str, str, Explorable]] = []
    recipe: TrainRecipe | None = None
    for word in words:
        place, _, swapped = word.partition("@") if not Path(word).exists() else (word, "", "")
        one = open_model(place, device, pickles=False)
        recipe = recipe or one.recipe
        short, longer = _names(one)
        if swapped:
            from ..conversion import convert

            convert(one.model, swapped, force=True)  # to look at, not to be fast
            one = replace(one, accuracy=None)  # that of the original
            short = longer = f"{longer} {swapped}"
        opened.append((short, longer, explorable(one)))
    names = [short for short, _, _ in opened]
    models: dict[str, Explorable] = {}
    for short, longer, shown in opened:
        name = unique = short if names.count(short) == 1 else longer
        while unique in models:
            unique = f"{name} ({len(models) + 1})"
        models[unique] = shown
    return models, recipe


def _names(one: Opened) -> tuple[str, str]:
    """A short name and a longer one: a run is known by its mechanism or its folder, a file on its own by its name."""
    path = Path(one.place)
    if path.is_file():
        path = path.parent if path.stem in ("best", "last") else path.with_suffix("")
    longer = path.resolve().name if path.exists() else path.name
    if one.recipe is None or is_converted(one.model):
        return longer, longer
    return one.recipe.attention, longer


def explorable(one: Opened) -> Explorable:
    """An opened model as the explorer shows it, in full precision; an error for one of other things than pictures."""
    seen = one.pixels
    if seen is None or seen.channels not in (1, 3):
        raise ValueError(f"{one.place} holds {one.title}; the explorer shows models of square images or videos")
    return Explorable(
        one.model.float(),
        one.classes,
        seen.size,
        seen.mean[: seen.channels],
        seen.std[: seen.channels],
        accuracy=one.accuracy,
        title=one.title,
        frames=seen.frames,
        time_first=seen.key is not None,
    )
