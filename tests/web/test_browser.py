"""The page in a real browser: what a visitor does, with the mouse, with the keyboard, on a phone."""

import io
import json
import os
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("playwright")

from browsing import NAMELESS, PALE, READY, open_view, pixels_of, serving, settle, visitor, watched_page
from PIL import Image
from playwright.sync_api import expect
from small_explorer import encoded, noise, png_claiming

from cumulant import create_model
from cumulant.optional import install
from cumulant.web import Example, Explorable, create_app

pytestmark = pytest.mark.browser
VIEWS = ["maps", "compare", "heads", "distance", "lens", "overview", "patterns"]


@pytest.fixture(scope="module")
def address(models, examples):
    with serving(create_app(models, examples)) as address:
        yield address


@pytest.fixture
def page(browser, address):
    with watched_page(browser, address) as page:
        yield page


def test_all_heads_shows_one_map_for_every_layer_and_head_of_every_model(page):
    assert page.locator(".map").count() == 2 * 2 * 4
    assert page.get_by_role("heading", name="cumulant3").count() == 2  # prediction and maps


def test_clicking_a_patch_changes_the_maps_and_the_link(page):
    before = pixels_of(page)
    page.get_by_role("gridcell", name="patch in row 1, column 2").click()
    settle(page)
    assert pixels_of(page) != before
    assert "x=0.375" in page.url
    expect(page.get_by_role("gridcell", name="patch in row 1, column 2")).to_have_attribute("aria-selected", "true")


def test_arrow_keys_move_the_query(page):
    page.get_by_role("gridcell", name="patch in row 1, column 1").click()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowDown")
    settle(page)
    expect(page.get_by_role("gridcell", name="patch in row 2, column 2")).to_be_focused()
    expect(page.get_by_role("gridcell", name="patch in row 2, column 2")).to_have_attribute("aria-selected", "true")


def test_everything_can_be_reached_with_the_tab_key(page):
    page.keyboard.press("Tab")
    reached = set()
    for _ in range(60):
        reached.add(page.evaluate("document.activeElement.id || document.activeElement.className"))
        page.keyboard.press("Tab")
    assert {"skip", "copy-link", "file", "invert", "class-token", "tab-maps", "threshold", "map"} <= reached


def test_tabs_are_changed_with_arrow_keys(page):
    page.get_by_role("tab", name="All heads").focus()
    page.keyboard.press("ArrowRight")
    settle(page)
    expect(page.get_by_role("tab", name="Compare")).to_be_focused()
    assert page.locator("#view figure").count() == 2


def test_sliders_choose_layer_head_and_threshold(page):
    open_view(page, "Compare")
    seen = {pixels_of(page)}
    for name in ("Layer", "Head", "Threshold"):
        page.get_by_role("slider", name=name).focus()
        for _ in range(2 if name == "Threshold" else 1):
            page.keyboard.press("ArrowRight")
        page.keyboard.press("ArrowRight")
        settle(page)
        seen.add(pixels_of(page))
    assert len(seen) == 4
    assert page.locator("#layer-out").inner_text() == "2 of 2"


def test_showing_one_sign_leaves_the_other_out(page):
    open_view(page, "Compare")
    page.get_by_role("radio", name="negative").check()
    settle(page)
    softmax, cumulant = page.locator("#view canvas").all()
    colours = "c => new Set(new Uint32Array(c.getContext('2d').getImageData(0, 0, c.width, 1).data.buffer)).size"
    page.get_by_role("slider", name="Picture behind").fill("0")
    page.get_by_role("button", name="Ask with the class token").click()  # no frame around a patch
    settle(page)
    softmax, cumulant = page.locator("#view canvas").all()
    assert softmax.evaluate(colours) == 1
    assert cumulant.evaluate(colours) > 1


def test_a_map_opens_large_in_compare(page):
    page.get_by_role("button", name="cumulant3, layer 2, head 3").click()
    settle(page)
    assert page.get_by_text("in layer 2, head 3").count() == 1


def test_switching_a_head_off_changes_the_prediction_and_back(page):
    before = page.locator("#predictions").inner_text()
    open_view(page, "Head summary")
    page.get_by_role("button", name="softmax, layer 1, head 2").click()
    settle(page)
    changed = page.locator("#predictions").inner_text()
    assert "1 off, changed by" in changed
    assert "→" in changed
    expect(page.get_by_role("button", name="softmax, layer 1, head 2")).to_be_focused()
    page.get_by_role("button", name="Switch all heads on").click()
    settle(page)
    assert page.locator("#predictions").inner_text() == before


def test_the_head_summary_shows_every_metric(page):
    open_view(page, "Head summary")
    metrics = page.locator("#metric option").all_inner_texts()
    assert len(metrics) > 8
    page.locator("#metric").select_option(label="negative mass")
    settle(page)
    softmax = page.locator("button.heat[data-model=softmax][data-head]").all_inner_texts()
    assert set(softmax) == {"0.00"}


def test_the_lens_parts_from_softmax_as_the_logit_scale_rises(page):
    open_view(page, "Lens")

    def off_by():
        return float(page.locator("#view figure").nth(3).locator("dd").first.inner_text().rstrip(" %"))

    page.get_by_role("slider", name="Logit scale").fill("-20")
    settle(page)
    low = off_by()
    page.get_by_role("slider", name="Logit scale").fill("10")
    settle(page)
    assert off_by() > 5 + 10 * low


def test_the_order_slider_goes_from_the_mean_over_2_and_3_to_softmax(page):
    open_view(page, "Lens")
    slider, now = page.get_by_role("slider", name="Order"), page.locator("#view figure.now").first
    fixed = page.locator("#view .row").first.locator("canvas")
    seen = []
    # the large map is redrawn at another size: its facts are compared with those of the fixed maps
    for step, name, like in ((0, "order 1", 0), (10, "order 2", 1), (20, "order 3", 2), (30, "softmax", 4)):
        slider.fill(str(step))
        settle(page)
        assert now.locator("h3").inner_text() == name
        away = float(now.locator("dd").first.inner_text().rstrip(" %"))
        small = page.locator("#view .row").first.locator("figure").nth(like).locator("dd").first.inner_text()
        assert round(away) == pytest.approx(float(small.rstrip(" %")), abs=1)
        seen.append(pixels_of(page, "#view figure.now canvas"))
    assert len(set(seen)) == 4
    assert fixed.count() == 5
    assert slider.get_attribute("aria-valuetext") == "softmax"


def test_between_whole_orders_the_map_lies_between(page):
    open_view(page, "Lens")

    def largest(step):
        page.get_by_role("slider", name="Order").fill(str(step))
        settle(page)
        return float(page.locator("#view figure.now dd").nth(2).inner_text())

    two, between, three = (largest(step) for step in (10, 15, 20))
    assert min(two, three) - 1e-3 <= between <= max(two, three) + 1e-3
    assert "order=20" in page.url


def test_the_order_moves_by_itself_when_asked(page):
    open_view(page, "Lens")
    page.get_by_role("button", name="Watch").click()
    expect(page.locator("#order-out")).to_have_text("softmax", timeout=20_000)


def test_distance_and_importance_have_charts_and_the_same_numbers_as_a_table(page):
    open_view(page, "Distance")
    expect(page.locator(".chart[data-drawn]")).to_have_count(2)
    assert page.locator(".chart .main-svg").count() >= 2
    assert page.locator("table.numbers").count() == 2
    first = page.locator("table.numbers tbody tr").first.inner_text()
    page.get_by_role("slider", name="Layer").fill("2")
    settle(page)
    expect(page.locator(".chart[data-drawn]")).to_have_count(2)
    assert "in layer 2" in page.locator("#view").inner_text()
    assert page.locator("table.numbers tbody tr").first.inner_text() == first
    open_view(page, "Head summary")
    expect(page.locator(".chart[data-drawn]")).to_have_count(2)
    page.locator(".chart .scatterlayer .point").first.hover(force=True)
    expect(page.locator(".chart .hoverlayer .hovertext").first).to_contain_text("layer")


def test_distances_begin_at_zero_and_their_numbers_stand_upright_on_a_phone(browser, models):
    large = create_model("vit_nano_patch2_8", attention="cumulant3", num_classes=10, img_size=32, depth=2)
    shown = {"16 x 16 patches": replace(models["cumulant3"], model=large, size=32)}
    with serving(create_app(shown, [Example(noise(0, 32), "0")])) as other, visitor(browser) as visit:
        ticks = visit(f"{other}#view=distance", 400).locator(".chart").nth(1).locator(".xtick text")
        expect(ticks.first).to_have_text("0")
        assert len(ticks.all()) <= 10
        assert not any("rotate(90" in one.get_attribute("transform") for one in ticks.all())


def test_titles_of_the_lens_are_whole_on_a_phone(visit, address):
    titles = visit(f"{address}#view=lens", 400).locator(".lens .panel-title :is(h3, span)")
    assert titles.evaluate_all("all => all.every(one => one.scrollWidth <= one.offsetWidth)")
    assert titles.count()


def test_charts_can_be_saved_as_pictures(page):
    open_view(page, "Head summary")
    expect(page.locator(".chart[data-drawn]")).to_have_count(2)
    with page.expect_download() as figure:
        page.get_by_role("button", name="Save figure").click()
    assert figure.value.path().read_bytes().startswith(b"\x89PNG")


def test_without_plotly_the_views_keep_their_tables_and_say_what_is_missing(browser, models, examples, monkeypatch):
    import cumulant.web.plotly
    import cumulant.web.routes

    for module in (cumulant.web.plotly, cumulant.web.routes):
        monkeypatch.setattr(module, "find_plotly", lambda: None)
    with serving(create_app(models, examples)) as bare, watched_page(browser, bare) as page:
        open_view(page, "Distance")
        assert page.locator(".chart").count() == 0
        assert page.get_by_text(f"charts need plotly ({install('web')})").count() == 2
        assert page.locator("table.numbers").count() == 2
        answer = page.request.get(f"{bare}vendor/plotly.min.js")
        assert (answer.status, answer.json()["error"]) == (404, "not_found")


@pytest.mark.parametrize("reading", ["layer", "rollout", "relevance"])
def test_compare_reads_whole_layers_and_flows(page, reading):
    open_view(page, "Compare")
    before = pixels_of(page)
    page.locator("#reading").select_option(reading)
    settle(page)
    assert pixels_of(page) != before


def test_compare_shows_what_an_interpreter_keeps_where_there_is_one(browser, examples, page):
    open_view(page, "Compare")
    assert page.locator("#reading option[value=interpreter]").count() == 0
    torch.manual_seed(0)
    model = create_model("ia_red2_nano_patch2_8", num_classes=10)
    red = Explorable(model, tuple(map(str, range(10))), 8, (0.5,), (0.5,))
    with serving(create_app({"red": red}, examples)) as address, watched_page(browser, address) as own:
        open_view(own, "Compare")
        before = pixels_of(own)
        own.locator("#reading").select_option("interpreter")
        settle(own)
        assert pixels_of(own) != before
        assert own.get_by_text("How much each patch says to the last interpreter").count() == 1


def test_an_upload_is_shown(page, tmp_path):
    (tmp_path / "mine.png").write_bytes(encoded(noise(7, 50)))
    page.locator("#file").set_input_files(tmp_path / "mine.png")
    expect(page.locator("#status")).to_have_text("Showing mine.png")
    assert "upload-" in page.locator("#picture").get_attribute("src")
    assert "upload-" not in page.url


HOSTILE = {
    "bomb.png": (png_claiming(60_000, 60_000), "at most 24,000,000 pixels"),
    "half.png": (encoded(noise(1, 60))[:900], "damaged or incomplete"),
    "page.svg": (b"<svg xmlns='http://www.w3.org/2000/svg' onload='alert(1)'/>", "not a picture"),
    "huge.png": (bytes(9 * 2**20), "at most 8 MiB"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_hostile_file_is_refused_in_words_and_the_page_goes_on(page, tmp_path, name):
    content, words = HOSTILE[name]
    (tmp_path / name).write_bytes(content)
    page.on("dialog", lambda _: pytest.fail("a script ran"))
    page.locator("#file").set_input_files(tmp_path / name)
    expect(page.get_by_role("alert")).to_contain_text(words)
    page.complaints.clear()  # the browser itself notes a refused request
    page.get_by_role("radio", name="example 1").check()
    settle(page)
    expect(page.get_by_role("alert")).to_be_hidden()


def test_a_link_brings_everything_back(page, browser):
    open_view(page, "Head summary")
    page.get_by_role("button", name="cumulant3, layer 2, head 1").click()
    page.get_by_role("checkbox", name="softmax").uncheck()
    settle(page)
    other = browser.new_page()
    other.goto(page.url)
    other.wait_for_selector(READY)
    for one in (page, other):
        expect(one.locator(".chart[data-drawn]")).to_have_count(2)
    assert other.locator("#view").inner_text() == page.locator("#view").inner_text()
    assert other.locator("#predictions").inner_text() == page.locator("#predictions").inner_text()
    other.close()


def test_a_link_that_makes_no_sense_shows_the_first_page(page, address):
    page.goto("about:blank")
    page.goto(f"{address}#view=nope&models=x|y&layer=99999&off=softmax~77~0&x=nan&threshold=<b>")
    page.wait_for_selector(READY)
    assert page.locator(".map").count() == 16


def test_figure_and_data_can_be_saved(page):
    with page.expect_download() as data:
        page.get_by_role("button", name="Save data").click()
    saved = json.loads(data.value.path().read_text())
    assert [len(one["weights"]) for one in saved["shown"]] == [2, 2]
    with page.expect_download() as figure:
        page.get_by_role("button", name="Save figure").click()
    assert figure.value.path().read_bytes().startswith(b"\x89PNG")


def test_a_saved_figure_says_what_it_shows_and_has_a_colour_bar(page):
    open_view(page, "Compare")
    page.evaluate("""() => { window.painted = []; window.drawn = [];
      const {fillText, drawImage} = CanvasRenderingContext2D.prototype;
      CanvasRenderingContext2D.prototype.fillText = function (...a) { painted.push(a[0]); fillText.apply(this, a); };
      CanvasRenderingContext2D.prototype.drawImage = function (...a) { drawn.push(a[0].id); drawImage.apply(this, a); };
    }""")
    with page.expect_download():
        page.get_by_role("button", name="Save figure").click()
    texts = page.evaluate("painted")
    assert "softmax, cumulant3" in texts
    assert any(re.fullmatch(r"example 2 · query: .* · layer 1, head 1", text) for text in texts), texts
    assert {page.locator(f"#legend-{end}").inner_text() for end in ("low", "high")} <= set(texts)
    assert {"picture", "legend-bar"} <= set(page.evaluate("drawn"))


@pytest.fixture(scope="module")
def visit(browser):
    with visitor(browser) as visit:
        yield visit


@pytest.mark.parametrize("width", [400, 768, 1280])
@pytest.mark.parametrize("view", VIEWS)
def test_every_view_is_a_picture_that_fits_its_width(visit, address, tmp_path, view, width):
    """CUMULANT_SCREENSHOTS=folder keeps the pictures, to be looked at."""
    page = visit(f"{address}#view={view}", width)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    folder = Path(os.environ.get("CUMULANT_SCREENSHOTS", tmp_path))
    shot = Image.open(io.BytesIO(page.screenshot(path=folder / f"{view}-{width}.png", full_page=True)))
    assert len(shot.convert("RGB").getcolors(maxcolors=2**24)) > 100


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_has_a_name_and_enough_contrast(browser, address, scheme):
    with visitor(browser, color_scheme=scheme) as visit:
        for view in VIEWS:
            page = visit(f"{address}#view={view}&off=softmax~0~1")
            assert page.evaluate(NAMELESS) == [], view
            assert page.evaluate(PALE) == [], view


def test_the_page_says_so_when_the_server_is_gone(browser, address):
    page = browser.new_page()
    page.goto(address)
    page.wait_for_selector(READY)
    page.route("**/api/**", lambda route: route.abort())
    page.get_by_role("gridcell", name="patch in row 4, column 4").click()
    expect(page.get_by_role("alert")).to_contain_text("still running")
    page.close()


def hold_back(page, image, what="prediction"):
    """Answers about one picture come only when they are let go; asking for `what` about it is counted."""
    held = []
    page.route(
        f"**/api/{what}", lambda route: held.append(route) if image in route.request.post_data else route.continue_()
    )
    return held


def test_the_prediction_of_another_picture_is_never_shown(page):
    """An unseen picture is asked for, and before it answers one that was seen before."""
    first = page.locator("#predictions").inner_text()
    held = hold_back(page, "example-0")
    page.locator("#examples input").nth(0).check(force=True)
    page.wait_for_selector("#predictions[aria-busy=true]")
    expect(page.locator("#predictions")).to_have_css("opacity", "0.45")  # those of the picture before
    page.locator("#examples input").nth(2).check(force=True)
    settle(page)
    for route in held:
        route.continue_()
    page.wait_for_timeout(300)
    assert page.locator("#examples input:checked").get_attribute("value") == "example-2"
    assert page.locator("#predictions").inner_text() == first


def test_head_summary_stops_asking_when_one_leaves_it(page):
    held = hold_back(page, "", "importance")
    page.get_by_role("tab", name="Head summary").click()
    page.wait_for_timeout(200)
    page.get_by_role("tab", name="All heads").click()
    settle(page)
    for route in list(held):
        route.continue_()
    page.wait_for_timeout(300)
    layers = {route.request.post_data_json["layer"] for route in held}
    assert layers == {0}, "the second layer was asked for after the view was left"


def test_back_goes_back_one_step_and_stays_on_the_page(page):
    start = page.url
    page.get_by_role("tab", name="Compare").click()
    settle(page)
    page.locator("#examples input").nth(0).check(force=True)
    settle(page)
    page.go_back()
    settle(page)
    assert page.locator("#examples input:checked").get_attribute("value") == "example-2"
    assert page.get_by_role("tab", name="Compare").get_attribute("aria-selected") == "true"
    page.go_back()
    settle(page)
    assert page.url.partition("#")[0] == start.partition("#")[0]
    assert page.get_by_role("tab", name="All heads").get_attribute("aria-selected") == "true"


def test_an_upload_has_a_thumbnail_and_outlives_a_reload(page, tmp_path):
    (tmp_path / "mine.png").write_bytes(encoded(noise(9, 30)))
    page.locator("#file").set_input_files(tmp_path / "mine.png")
    page.wait_for_selector("#examples input[value^=upload-]:checked", state="attached")
    settle(page)
    mine = page.locator("#examples input:checked").get_attribute("value")
    assert mine not in page.url
    page.reload()
    settle(page)
    assert page.locator("#examples input:checked").get_attribute("value") == mine


def test_the_legend_has_numbers_where_one_scale_serves_all_maps(page):
    assert page.locator("#legend-high").inner_text() == "+max"
    page.get_by_role("radio", name="same for all").check()
    settle(page)
    assert (
        0
        < float(page.locator("#legend-high").inner_text())
        == -float(page.locator("#legend-low").inner_text().replace("−", "-"))
    )


def test_on_a_phone_the_maps_begin_right_below_the_picture(visit, address):
    page = visit(address, 390)
    board, view = (page.locator(one).bounding_box() for one in ("#board", "#view canvas >> nth=0"))
    assert view["y"] - (board["y"] + board["height"]) < 400


def test_who_looks_at_a_patch_is_another_map_than_what_it_looks_at(page):
    open_view(page, "Compare")
    before = pixels_of(page)
    page.get_by_role("radio", name="is looked at").check()
    settle(page)
    assert pixels_of(page) != before
    assert "What each patch takes from the chosen one" in page.locator("#view").inner_text()


def test_the_difference_of_two_models_is_a_map_of_its_own(page):
    open_view(page, "Compare")
    page.locator("#reading").select_option("difference")
    settle(page)
    assert page.locator("#view figure h3").all_inner_texts() == ["softmax", "cumulant3", "softmax − cumulant3"]


def test_pictures_are_chosen_by_class_and_heads_asked_over_them(page):
    open_view(page, "Pictures")
    assert page.locator(".tile").count() == 3
    page.get_by_label("Class").select_option("1")
    settle(page)
    assert page.locator(".tile").count() == 1
    open_view(page, "Head summary")
    assert page.get_by_label("Over").locator("option").all_inner_texts() == ["this picture", "the 1 of Pictures"]
    one = page.locator("#view .heat").all_inner_texts()
    page.get_by_label("Over").select_option("many")
    settle(page)
    assert page.locator("#view .heat").all_inner_texts() != one  # picture 1 in place of picture 2
    assert "whole head" in page.locator("#parts").inner_text()


def test_names_and_accuracies_of_models_take_one_line_however_long(browser, models, examples):
    long = {f"{name} with a name that does not fit": replace(one, accuracy=0.958) for name, one in models.items()}
    with serving(create_app(long, examples)) as other, visitor(browser) as visit:
        heights = visit(other, 400).locator(".panel-title").evaluate_all("all => all.map(one => one.offsetHeight)")
    assert max(heights) < 36


def test_the_dial_goes_from_linear_to_softmax_on_a_photograph(browser, tmp_path):
    from test_photographs import SHORT

    from cumulant.web.photographs import photograph_models, photographs

    pictures = photographs()[:1]
    shown = photograph_models(pictures, tmp_path, recipe=SHORT)
    with serving(create_app(shown, pictures)) as other, watched_page(browser, other) as page:
        open_view(page, "Dial")
        expect(page.locator(".dial-strip img")).to_have_count(8)
        assert page.locator(".dial-strip button").first.inner_text().startswith("linear")
        assert page.locator(".dial-strip button small").last.inner_text() == "change 0.0 %"
        first = page.locator(".dial-pair .now img").get_attribute("src")
        page.locator(".dial-strip button").last.click()
        settle(page)
        assert page.locator(".dial-pair .now h3").inner_text() == "attention: softmax"
        assert page.locator(".dial-pair .now img").get_attribute("src") != first
        page.reload()
        settle(page)
        assert page.locator(".dial-pair .now h3").inner_text() == "attention: softmax"
        assert page.evaluate("document.documentElement.scrollWidth") <= 1300
