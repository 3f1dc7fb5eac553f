"""The page in a real browser: what a visitor does, with the mouse, with the keyboard, on a phone."""

import json
import shutil
import socket
import threading
import time

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("playwright")

import uvicorn
from playwright.sync_api import expect, sync_playwright
from small_explorer import encoded, noise, png_claiming

from cumulant.web import create_app

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
pytestmark = [pytest.mark.browser, pytest.mark.skipif(CHROMIUM is None, reason="no chromium on this machine")]
READY = "#view[aria-busy=false] *"


@pytest.fixture(scope="module")
def address(models, examples):
    door = socket.socket()
    door.bind(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(create_app(models, examples), log_level="error"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [door]}, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.02)
    yield f"http://127.0.0.1:{door.getsockname()[1]}/"
    server.should_exit = True
    thread.join(10)


@pytest.fixture(scope="module")
def browser():
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@pytest.fixture
def page(browser, address):
    """The page at desktop width; it must neither complain in the console nor ask another server."""
    context = browser.new_context(viewport={"width": 1300, "height": 900}, accept_downloads=True)
    page = context.new_page()
    complaints, strangers = [], []
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("request", lambda asked: strangers.append(asked.url) if address not in asked.url else None)
    page.complaints = complaints
    page.goto(address)
    page.wait_for_selector(READY)
    yield page
    context.close()
    assert [url for url in strangers if not url.startswith(("data:", "blob:", "about:"))] == []
    assert page.complaints == []


def settle(page):
    page.wait_for_selector(READY)


def open_view(page, name):
    page.get_by_role("tab", name=name).click()
    settle(page)


def pixels_of(page, canvas="#view canvas"):
    return page.locator(canvas).first.evaluate("canvas => canvas.toDataURL()")


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


def test_the_lens_parts_from_softmax_as_temperature_rises(page):
    open_view(page, "Lens")

    def off_by():
        return float(page.locator("#view figure").nth(2).locator("dd").first.inner_text())

    page.get_by_role("slider", name="Temperature").fill("-20")
    settle(page)
    low = off_by()
    page.get_by_role("slider", name="Temperature").fill("10")
    settle(page)
    assert off_by() > 10 * low


@pytest.mark.parametrize("reading", ["layer", "rollout", "relevance"])
def test_compare_reads_whole_layers_and_flows(page, reading):
    open_view(page, "Compare")
    before = pixels_of(page)
    page.locator("#reading").select_option(reading)
    settle(page)
    assert pixels_of(page) != before


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


@pytest.mark.parametrize("view", ["maps", "compare", "heads", "lens"])
@pytest.mark.parametrize("width", [360, 768, 1300])
def test_no_width_needs_scrolling_sideways(browser, address, view, width):
    page = browser.new_page(viewport={"width": width, "height": 800})
    page.goto(f"{address}#view={view}")
    page.wait_for_selector(READY)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


NAMELESS = """() => [...document.querySelectorAll("button, input, select, canvas[role], img, [role=tabpanel]")]
  .filter((one) => one.offsetParent !== null)
  .filter((one) => !(one.getAttribute("aria-label") || one.getAttribute("aria-labelledby") || one.innerText?.trim() ||
    one.labels?.[0]?.innerText.trim() || one.hasAttribute("alt")))
  .map((one) => one.outerHTML.slice(0, 100))"""

PALE = """() => {
  const light = (text) => { const [r, g, b] = text.match(/[\\d.]+/g).slice(0, 3).map((c) => c / 255)
    .map((c) => c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const ground = (one) => { for (; one; one = one.parentElement) { const colour = getComputedStyle(one).backgroundColor;
    if (!/, 0\\)|transparent/.test(colour)) return colour; } return "rgb(255, 255, 255)"; };
  return [...document.querySelectorAll("body *")].filter((one) => one.offsetParent !== null && !one.disabled &&
      [...one.childNodes].some((child) => child.nodeType === 3 && child.textContent.trim()))
    .map((one) => { const [a, b] = [light(getComputedStyle(one).color), light(ground(one))];
      return [(Math.max(a, b) + 0.05) / (Math.min(a, b) + 0.05), one.textContent.slice(0, 30)]; })
    .filter(([ratio]) => ratio < 4.5);
}"""


@pytest.mark.parametrize("view", ["maps", "compare", "heads", "lens"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_everything_has_a_name_and_enough_contrast(browser, address, view, scheme):
    page = browser.new_page(color_scheme=scheme)
    page.goto(f"{address}#view={view}&off=softmax~0~1")
    page.wait_for_selector(READY)
    assert page.evaluate(NAMELESS) == []
    assert page.evaluate(PALE) == []
    page.close()


def test_the_page_says_so_when_the_server_is_gone(browser, address):
    page = browser.new_page()
    page.goto(address)
    page.wait_for_selector(READY)
    page.route("**/api/**", lambda route: route.abort())
    page.get_by_role("gridcell", name="patch in row 4, column 4").click()
    expect(page.get_by_role("alert")).to_contain_text("still running")
    page.close()
