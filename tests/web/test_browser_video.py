"""Clips in a real browser: choose a frame, click a patch in it, upload a video, upload a hostile one."""

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("uvicorn")
pytest.importorskip("playwright")

from browsing import NAMELESS, PALE, open_view, pixels_of, serving, settle, visitor, watched_page
from playwright.sync_api import expect
from small_explorer import animated, encoded, film, noise, small_model, small_video_model

from cumulant.web import Example, create_app

pytestmark = pytest.mark.browser


@pytest.fixture(scope="module")
def address():
    models = {"joint": small_video_model(), "factorised": small_video_model(variant=3), "still": small_model("softmax")}
    clips = [Example(tuple(noise(seed + t) for t in range(4)), f"clip {seed}") for seed in (0, 10)]
    with serving(create_app(models, [*clips, Example(noise(3), "picture")])) as address:
        yield address


@pytest.fixture
def page(browser, address):
    with watched_page(browser, f"{address}#models=joint&image=example-0") as page:
        yield page


def aspect(page):
    return page.locator("#view canvas").first.evaluate("canvas => canvas.width / canvas.height")


def test_a_map_of_a_clip_shows_all_its_frames_side_by_side(page):
    assert page.locator("#film input").count() == 2
    assert aspect(page) > 1.9  # two frames of 2 x 2 patches
    page.get_by_role("checkbox", name="still").check()
    page.get_by_role("checkbox", name="joint").uncheck()
    settle(page)
    expect(page.locator("#film")).to_be_hidden()
    assert aspect(page) == 1


def test_the_query_is_a_patch_in_a_frame(page):
    page.get_by_role("gridcell", name="patch in row 1, column 2").click()
    settle(page)
    first = pixels_of(page)
    picture = page.locator("#picture").get_attribute("src")
    page.get_by_role("radio", name="frame 1 of 2").check()
    settle(page)
    assert pixels_of(page) != first
    assert page.locator("#picture").get_attribute("src") != picture
    expect(page.get_by_role("gridcell", name="patch in row 1, column 2")).to_have_attribute("aria-selected", "true")
    assert "t=0.25" in page.url


def test_clicking_in_a_large_map_chooses_the_patch_of_that_frame(page):
    open_view(page, "Compare")
    canvas = page.locator("#view canvas")
    box = canvas.bounding_box()
    canvas.click(position={"x": 0.1 * box["width"], "y": 0.8 * box["height"]})
    settle(page)
    expect(page.get_by_role("radio", name="frame 1 of 2")).to_be_checked()
    expect(page.get_by_role("gridcell", name="patch in row 2, column 1")).to_have_attribute("aria-selected", "true")
    canvas.hover(position={"x": 0.9 * box["width"], "y": 0.2 * box["height"]})
    expect(page.locator("#view figcaption small").first).to_contain_text("frame 2, row 1, column 2")


def test_layers_that_look_along_one_axis_say_so(page):
    page.get_by_role("checkbox", name="factorised").check()
    page.get_by_role("checkbox", name="joint").uncheck()
    settle(page)
    assert page.locator("tbody th small").all_inner_texts() == ["space", "time", "space", "time"]
    open_view(page, "Compare")
    page.get_by_role("slider", name="Layer").fill("2")
    settle(page)
    assert page.get_by_text("over time at one place").count() == 1
    open_view(page, "Lens")
    assert page.get_by_text("Not shown: factorised").count() == 1


VIDEOS = {"mine.webp": lambda: animated(6, "WEBP"), "mine.gif": lambda: animated(6), "mine.mp4": lambda: film(6)}


@pytest.mark.parametrize("name", VIDEOS)
def test_an_uploaded_video_is_shown(page, tmp_path, name):
    if name.endswith("mp4"):
        pytest.importorskip("av")
    (tmp_path / name).write_bytes(VIDEOS[name]())
    before = pixels_of(page)
    page.locator("#file").set_input_files(tmp_path / name)
    expect(page.locator("#status")).to_have_text(f"Showing {name}: 6 frames, spread evenly")
    settle(page)
    assert "upload-" in page.locator("#film img").first.get_attribute("src")
    assert pixels_of(page) != before
    assert "upload-" not in page.url


def test_a_video_can_be_dropped_on_the_page(page):
    content = list(animated(5))
    make = """bytes => {
        const carried = new DataTransfer();
        carried.items.add(new File([new Uint8Array(bytes)], "dropped.gif"));
        return carried;
    }"""
    page.dispatch_event("#drop", "drop", {"dataTransfer": page.evaluate_handle(make, content)})
    expect(page.locator("#status")).to_have_text("Showing dropped.gif: 5 frames, spread evenly")


def test_what_models_make_of_pictures_and_clips_is_said(page, tmp_path):
    (tmp_path / "still.png").write_bytes(encoded(noise(5, 30)))
    page.locator("#file").set_input_files(tmp_path / "still.png")
    expect(page.locator("#status")).to_contain_text("it stands still, so every frame is the same")
    page.get_by_role("checkbox", name="still").check()
    page.get_by_role("checkbox", name="joint").uncheck()
    (tmp_path / "clip.gif").write_bytes(animated(3))
    page.locator("#file").set_input_files(tmp_path / "clip.gif")
    expect(page.locator("#status")).to_contain_text("its first frame, as these models see pictures")


@pytest.mark.parametrize("name", ["playlist.m3u8", "zeros.mp4"])
def test_a_hostile_video_is_refused_in_words_and_the_page_goes_on(page, tmp_path, name):
    pytest.importorskip("av")
    content = {
        "playlist.m3u8": b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n",
        "zeros.mp4": b"\0\0\0\x18ftypisom" + bytes(99),
    }
    (tmp_path / name).write_bytes(content[name])
    page.locator("#file").set_input_files(tmp_path / name)
    expect(page.get_by_role("alert")).to_contain_text(name)
    page.complaints.clear()  # the browser itself notes a refused request
    page.get_by_role("radio", name="example clip 10, a clip").check()
    settle(page)
    expect(page.get_by_role("alert")).to_be_hidden()


def test_clips_fit_a_phone_and_everything_has_a_name_and_contrast(browser, address):
    with visitor(browser) as visit:
        for view in ("maps", "compare", "heads", "distance", "lens"):
            page = visit(f"{address}#view={view}&models=joint|factorised", 360)
            assert page.evaluate("document.documentElement.scrollWidth") <= 360, view
            assert page.evaluate(NAMELESS) == [], view
            assert page.evaluate(PALE) == [], view
