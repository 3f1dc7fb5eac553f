"""The report in a real browser, by day and by night."""

import copy
import json
import re
from contextlib import contextmanager

import pytest

from cumulant.studies.report import write

# The contrast of every number in the confusion matrix with its cell, which lets the page through.
CONTRASTS = """() => {
  const numbers = (colour) => (colour.match(/[\\d.]+/g) || []).map(Number);
  const light = (rgb) => { const [r, g, b] = rgb.map(c => c / 255)
      .map(c => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const page = numbers(getComputedStyle(document.body).backgroundColor).slice(0, 3);
  const stops = document.getElementById("confusion").data[0].colorscale.map(([at, colour]) => [at, numbers(colour)]);
  const cell = (share) => { const i = Math.max(1, stops.findIndex(([at]) => at >= share));
    const [a, from] = stops[i - 1], [b, to] = stops[i];
    const [r, g, bl, alpha] = from.map((c, k) => c + (to[k] - c) * (share - a) / (b - a));
    return [r, g, bl].map((c, k) => alpha * c + (1 - alpha) * page[k]); };
  return [...document.querySelectorAll("#confusion .heatmap-label text")].filter(one => one.textContent).map(one => {
    const [a, b] = [light(numbers(getComputedStyle(one).fill).slice(0, 3)), light(cell(Number(one.textContent) / 100))];
    return (Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05); });
}"""


@contextmanager
def opened(browser, results, folder, **options):
    """The report on these results in a browser; its script must not fail."""
    write(results, folder / "report.html")
    complaints = []
    page = browser.new_page(**options)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.goto((folder / "report.html").as_uri())
    page.wait_for_selector("#confusion .heatmap-label", state="attached")
    yield page
    page.close()
    assert complaints == []


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_the_numbers_of_the_confusion_matrix_can_be_read(browser, study, tmp_path, scheme):
    with opened(browser, study[1], tmp_path, color_scheme=scheme) as page:
        contrasts = page.evaluate(CONTRASTS)
    assert len(contrasts) > 10
    assert min(contrasts) > 4.5


def test_on_a_phone_long_names_do_not_make_the_page_wider_than_it_is(browser, study, tmp_path):
    long = json.dumps(study[1]).replace('"cumulant3"', '"cumulant3+temperature=order+v_conv"')
    results = json.loads(long) | {"verdict": study[1]["verdict"]}
    with opened(browser, results, tmp_path, viewport={"width": 400, "height": 800}) as page:
        assert page.evaluate("document.documentElement.scrollWidth") == 400


def test_with_few_configurations_maps_are_not_blown_up(browser, study, tmp_path):
    with opened(browser, study[1], tmp_path, viewport={"width": 1200, "height": 800}) as page:
        assert 100 < page.locator("#map-grid svg").first.bounding_box()["width"] < 180


def test_with_many_configurations_plots_and_maps_keep_their_size(browser, study, tmp_path):
    results = copy.deepcopy(study[1])
    for name in [f"cumulant3+lr={i}" for i in range(11)]:
        results["attention"].append(name)
        results["runs"] += [
            run | {"configuration": name} for run in results["runs"] if run["configuration"] == "cumulant3"
        ]
        for each in (results["per_class"], results["confusion"], results["maps"]["models"]):
            each[name] = each["cumulant3"]
    with opened(browser, results, tmp_path, viewport={"width": 1200, "height": 800}) as page:
        heights = page.evaluate(
            "['loss-curves', 'class-accuracy'].map(id => document.getElementById(id)._fullLayout._size.h)"
        )
        assert min(heights) > 180
        assert page.locator("#map-grid svg").first.bounding_box()["width"] > 80
        assert page.evaluate("document.documentElement.scrollWidth") == 1200


@pytest.mark.parametrize(("tokens", "pressed"), [(17, "per row"), (65, "per map")])
def test_maps_over_other_numbers_of_tokens_have_scales_of_their_own(browser, study, tmp_path, tokens, pressed):
    results = copy.deepcopy(study[1])
    results["maps"]["locality"]["cumulant3"]["tokens"] = tokens
    with opened(browser, results, tmp_path) as page:
        assert page.locator('#scale-buttons [aria-pressed="true"]').inner_text() == pressed


def test_signed_maps_open_where_most_is_subtracted_and_a_finger_reads_a_weight(browser, study, tmp_path):
    results = copy.deepcopy(study[1])
    maps = results["maps"]["models"]["cumulant3"]
    for item in maps["scores"]:
        for layer in item:
            for head in layer:
                head[:] = [abs(weight) for weight in head]
        item[-1][-1][1] = -5.0  # of the first patch, in the last layer and head alone
    with opened(browser, results, tmp_path, has_touch=True, viewport={"width": 400, "height": 800}) as page:
        negative = page.locator("#map-grid").inner_text()
        assert "neg 5.00" in negative
        before = page.locator("#map-readout").inner_text()
        page.locator("#map-grid rect[data-weight]").first.tap()
        read = page.locator("#map-readout").inner_text()
        assert read != before
        assert re.search(r"\d", read)
