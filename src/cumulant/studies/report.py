"""The pages of a study, each one file that fetches nothing: of classifiers with plotly bundled inline, of what was
measured with figures as SVG."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cumulant import style
from cumulant.optional import needed
from cumulant.studies import figures, wording
from cumulant.studies.outcome import confused
from cumulant.studies.verdict import signed
from cumulant.train.files import write_atomically

TAGS = {"confirmed": "above", "refuted": "below"}  # the classes of report.css; all else is open
WHOLE = "page"  # has everything


def check_packages() -> None:
    """Fail early, and say what to install, where the packages of the report are missing."""
    with needed("the report needs jinja2, plotly and scipy", "train"):
        import jinja2
        import plotly.offline  # noqa: F401
        import scipy.stats  # type: ignore[import-untyped]  # noqa: F401
    assert jinja2.__version__


def render(results: dict[str, Any]) -> str:
    """The page as text."""
    noun, names = wording.noun(results), results["attention"]
    return style.page(
        "studies",
        {"points": lambda share: f"{100 * share:.2f}", "signed": signed, "listed": wording.listed},
        results=results,
        verdict=results["verdict"],
        title=wording.title(results),
        noun=noun,
        class_token=wording.class_token(results),
        about_data=wording.about_data(results),
        missing=wording.missing(results),
        failures=wording.failures(results),
        collapses=wording.collapses(results),
        on_cpu=any(run["device_kind"] == "cpu" for run in results["runs"]),
        colours=style.palette(names),
        confused={name: confused(results["confusion"][name], results["classes"]) for name in names},
        class_order=figures.by_accuracy(results) if names else [],
        page={
            "figures": figures.figures(results),
            "maps": results["maps"],
            "dial": results.get("dial"),
            "attention": names,
            "classes": [figures.short(name) for name in results["classes"]],
            "noun": noun,
            "signs": {"below": style.NEGATIVE, "above": style.POSITIVE},
        },
        about_maps=wording.about_maps(results) if results["maps"]["locality"] else [],
        about_error=wording.about_error(results) if results["error"] else [],
        about_cost=wording.about_cost(results) if results["scaling"] else [],
    )


def write(results: dict[str, Any], path: Path) -> None:
    """Write the page to `path`, whole or not at all."""
    write_atomically(path, render(results).encode())


def write_pages(
    result: Mapping[str, Any], figures: Sequence[tuple[str, str]], folder: Path, views: Mapping[str, Sequence[str]]
) -> None:
    """Write page.html, and a page for each view with those of the `figures` (title, SVG) whose titles begin so."""
    shown = {name: [one for one in figures if one[0].startswith(tuple(starts))] for name, starts in views.items()}
    for name, own in {WHOLE: figures, **shown}.items():
        given = {"result": result, "figures": own, "view": "" if name == WHOLE else name, "pages": [WHOLE, *views]}
        filters = {"tag": lambda word: TAGS.get(word, "level")}
        text = style.page("studies", filters, "study.html.j2", plotly=False, **given)
        write_atomically(folder / f"{name}.html", text.encode())
