"""One self-contained HTML page from the results of a study: plotly is bundled inline, nothing is fetched."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cumulant import style
from cumulant.optional import needed
from cumulant.studies import figures, wording
from cumulant.studies.outcome import confused
from cumulant.studies.verdict import signed
from cumulant.train.files import write_atomically


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
