"""Uploads: what is a picture is taken, what is not is refused in words, and nothing gets where it should not."""

import asyncio
import builtins
import io
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

import numpy as np
from fastapi.testclient import TestClient
from PIL import Image
from small_explorer import encoded, local_client, noise, png_claiming

from cumulant.web import Limits, create_app, engine, serve
from cumulant.web.command import Explore
from cumulant.web.engine import Engine
from cumulant.web.problems import UploadError
from cumulant.web.uploads import UploadStore, read_upload

SVG = (
    b'<svg xmlns="http://www.w3.org/2000/svg" onload="alert(1)"><script>alert(1)</script>'
    b'<rect width="9" height="9"/></svg>'
)
EPS = b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 10 10\n(/etc/passwd) (r) file\n%%EOF\n"


def send(client, content, **parameters):
    return client.post("/api/images", content=content, params=parameters)


@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_pictures_of_every_format_are_taken_and_can_be_asked_about(client, kind):
    taken = send(client, encoded(noise(3, 30), kind))
    assert taken.status_code == 201, taken.text
    image = taken.json()["image"]
    question = {"model": "softmax", "image": image, "query": 3}
    assert client.post("/api/attention", json=question).status_code == 200


def test_an_upload_equal_to_an_example_gives_the_same_weights(client, examples):
    image = send(client, encoded(examples[1].picture)).json()["image"]
    one, other = (
        client.post("/api/attention", json={"model": "cumulant3", "image": name, "query": 4}).json()["weights"]
        for name in (image, "example-1")
    )
    assert one == other


HOSTILE = {
    "empty": (b"", 400),
    "text": (b"this is not a picture", 415),
    "SVG with a script": (SVG, 415),
    "EPS program": (EPS, 415),
    "PDF": (b"%PDF-1.7\n1 0 obj\n", 415),
    "pickle": (b"\x80\x04\x95cos\nsystem\n", 415),
    "PNG without a header": (b"\x89PNG\r\n\x1a\n", 415),
    "GIF that is only a size": (b"GIF89a" + b"\xff" * 4 + bytes(20), 415),
    "truncated PNG": (encoded(noise(0, 60))[:900], 422),
    "truncated JPEG": (encoded(noise(0, 60), "JPEG")[:1500], 422),
    "PNG of 65,000 x 65,000": (png_claiming(65_000, 65_000), 413),
    "PNG of the largest size there is": (png_claiming(2**31 - 1, 2**31 - 1), 413),
    "PNG of one line": (png_claiming(1_000_001, 1), 413),
    "PNG that holds less than it claims": (png_claiming(900, 900), 422),
    "too many bytes": (bytes(200_001), 413),
}


@pytest.mark.parametrize(("content", "status"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_files_are_refused_in_words(client, content, status):
    answer = send(client, content)
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error", "message"}
    assert answer.json()["message"]


def test_a_bomb_is_refused_before_its_pixels_are_decoded(monkeypatch):
    bomb = encoded(Image.new("L", (3000, 3000)))
    assert len(bomb) < 30_000
    from PIL import ImageFile

    monkeypatch.setattr(ImageFile.ImageFile, "load", lambda *_: pytest.fail("decoded"))
    with pytest.raises(UploadError, match="1,000,000 pixels, got 3000 x 3000"):
        read_upload(bomb, Limits(pixels=1_000_000))


def test_a_body_without_announced_length_is_cut_off_at_the_limit(client):
    answer = client.post("/api/images", content=(b"x" * 10_000 for _ in range(30)))
    assert "content-length" not in answer.request.headers
    assert (answer.status_code, answer.json()["error"]) == (413, "too_large")


def test_a_large_json_body_is_refused(client):
    answer = client.post("/api/attention", content=b'{"model": "' + b"x" * 300_000 + b'"}')
    assert answer.status_code == 413
    assert answer.json()["error"] == "too_large"


def test_two_senders_have_names_that_say_nothing_of_each_other(client):
    first, second = (send(client, encoded(noise(1))).json()["image"] for _ in range(2))
    assert first != second
    assert len(first) >= len("upload-") + 20
    assert first not in client.get("/api/info").text


def test_the_oldest_upload_makes_room_and_is_gone(client):
    names = [send(client, encoded(noise(n))).json()["image"] for n in range(4)]
    assert client.get(f"/api/images/{names[0]}").status_code == 404
    assert client.get(f"/api/images/{names[3]}").status_code == 200


def test_an_upload_in_use_stays():
    store = UploadStore(Limits(images=2))
    first = store.add((noise(0),))
    store.add((noise(1),))
    assert store.get(first) is not None
    store.add((noise(2),))
    assert store.get(first) is not None
    assert len(store) == 2


def test_nothing_is_written_to_disk(client, monkeypatch):
    def no_writing(path, mode="r", *_, **__):
        if set(mode) & set("wax+"):
            pytest.fail(f"opened {path} for writing")
        return original(path, mode, *_, **__)

    original = builtins.open
    monkeypatch.setattr(builtins, "open", no_writing)
    monkeypatch.setattr(io, "open", no_writing)
    monkeypatch.setattr("tempfile._get_default_tempdir", lambda *_: pytest.fail("a temporary file"))
    assert send(client, encoded(noise(9, 200))).status_code == 201


def test_only_the_centre_square_is_kept_and_only_so_large():
    (picture,) = read_upload(encoded(noise(0, 900).resize((900, 600))), Limits())
    assert picture.size == (448, 448)


def test_inverting_exchanges_light_and_dark():
    (plain,), (inverted,) = (read_upload(encoded(noise(4)), Limits(), invert=invert) for invert in (False, True))
    assert [255 - x for x in plain.tobytes()] == list(inverted.tobytes())


def test_transparent_parts_become_white_paper():
    (picture,) = read_upload(encoded(Image.new("RGBA", (9, 9), (0, 0, 0, 0))), Limits())
    assert picture.getpixel((4, 4)) == (255, 255, 255)


def test_the_orientation_that_a_camera_notes_is_followed():
    picture = Image.new("RGB", (9, 9), "black")
    picture.putpixel((0, 0), (255, 255, 255))
    exif = Image.Exif()
    exif[0x0112] = 3  # turned by half
    (turned,) = read_upload(encoded(picture, "PNG", exif=exif), Limits())
    assert turned.getpixel((8, 8)) == (255, 255, 255)


def test_limits_must_be_positive():
    with pytest.raises(ValueError, match="pixels must be 1 or more, got 0"):
        Limits(pixels=0)


@pytest.mark.parametrize("name", ["../../etc/passwd", "..%2f..%2fetc%2fpasswd", "example-0/../../x", "\\..\\x", "%00"])
def test_no_file_can_be_named_as_an_image(client, name):
    answer = client.get(f"/api/images/{name}")
    assert answer.status_code == 404
    assert "root:" not in answer.text


@pytest.mark.parametrize(
    "path", ["/static/../app.py", "/static/%2e%2e/app.py", "/static/..%2fapp.py", "/static//etc/passwd"]
)
def test_no_file_outside_the_page_is_served(client, path):
    assert client.get(path).status_code == 404


def test_foreign_pages_and_foreign_names_are_refused(client):
    question = {"model": "softmax", "image": "example-0", "query": 1}
    foreign = client.post("/api/attention", json=question, headers={"origin": "http://evil.example"})
    assert foreign.status_code == 403
    assert foreign.json()["error"] == "foreign_page"
    sneaky = client.post("/api/images", content=b"x", headers={"sec-fetch-site": "cross-site"})
    assert sneaky.status_code == 403
    assert client.get("/api/info", headers={"host": "evil.example"}).status_code == 400
    own = client.post("/api/attention", json=question, headers={"origin": "http://localhost"})
    assert own.status_code == 200


def test_a_page_of_other_machines_can_be_allowed_by_name(models, examples):
    client = TestClient(create_app(models, examples, hosts=["explorer.example"]), base_url="http://explorer.example")
    assert client.get("/api/info").status_code == 200


def test_every_answer_keeps_the_page_to_itself(client):
    for path in ("/", "/static/app.js", "/api/info", "/nowhere", "/api/images/example-0"):
        headers = client.get(path).headers
        assert "default-src 'none'" in headers["content-security-policy"], path
        assert headers["x-content-type-options"] == "nosniff"
        assert headers["cache-control"] == "no-store"


def test_a_wrong_address_gives_people_a_page_and_programs_json(client):
    page = client.get("/nowhere", headers={"accept": "text/html"})
    assert (page.status_code, "nothing at this address" in page.text) == (404, True)
    assert client.get("/api/nowhere").json()["error"] == "not_found"
    assert client.get("/api/attention").status_code == 405


def test_sixteen_bits_of_grey_are_scaled_and_not_clipped():
    deep = np.linspace(0, 65535, 64 * 64).reshape(64, 64).astype(np.uint16)
    kept = np.asarray(read_upload(encoded(Image.fromarray(deep)), Limits())[0])
    assert kept[..., 0].tolist() == (deep >> 8).tolist()


def test_a_transparent_picture_is_turned_too_and_a_damaged_note_turns_nothing():
    picture = Image.new("RGBA", (20, 20), (0, 0, 255, 200))
    picture.paste((255, 0, 0, 200), (0, 0, 20, 5))  # red above
    note = Image.Exif()
    note[0x0112] = 6  # to be turned by 90 degrees: red to the right
    (turned,) = read_upload(encoded(picture, exif=note.tobytes()), Limits())
    assert turned.getpixel((19, 10))[0] > turned.getpixel((0, 10))[0]
    (kept,) = read_upload(encoded(picture, exif=b"Exif\0\0garbage"), Limits())
    assert kept.getpixel((10, 0))[0] > kept.getpixel((10, 19))[0]


def test_two_threads_decode_for_all_senders(models, monkeypatch):
    """Each thread keeps the memory of its largest picture."""
    engine, seen = Engine(models, [], Limits()), set()

    def watched(content, limits, **options):
        seen.add(threading.get_ident())
        time.sleep(0.01)
        return read_upload(content, limits, **options)

    monkeypatch.setattr("cumulant.web.engine.read_upload", watched)

    async def send_all():
        return await asyncio.gather(*(engine.receive(encoded(noise(seed)), False) for seed in range(10)))

    with ThreadPoolExecutor(1) as apart:  # a browser's tests may have left a loop in this thread
        taken = apart.submit(asyncio.run, send_all()).result()
    assert len({name for name, _ in taken}) == 10
    assert len(seen) <= 2
    with pytest.raises(UploadError, match="not a picture"):
        ThreadPoolExecutor(1).submit(asyncio.run, engine.receive(b"text", False)).result()


def test_a_name_of_no_meaning_is_refused_and_addresses_are_allowed_where_other_machines_may_ask(models, examples):
    local = local_client(create_app(models, examples))
    assert local.get("/api/info", headers={"host": "testserver"}).json()["error"] == "unknown_host"
    assert local.get("/api/info", headers={"host": "192.0.2.1:8000"}).status_code == 400
    settings = Explore(host="0.0.0.0", allow_host=("my-server",))
    everywhere = local_client(create_app(models, examples, **serve.names(settings)))
    expected = {
        "my-server:80": 200,
        "192.0.2.1:80": 200,
        "[2001:db8::1]:80": 200,
        "localhost": 200,
        "evil.example": 400,
    }
    assert {host: everywhere.get("/api/info", headers={"host": host}).status_code for host in expected} == expected


def test_a_picture_of_one_endless_column_is_refused_before_it_is_decoded():
    column = png_claiming(1, 20_000_000)
    with pytest.raises(UploadError, match=r"sides of at most 16,384 pixels, got 1 x 20000000") as refused:
        read_upload(column, Limits())
    assert refused.value.status == 413


def test_what_was_computed_from_an_upload_goes_with_it(client):
    first = client.post("/api/images", content=encoded(noise(0))).json()["image"]
    question = {"model": "softmax", "image": first, "query": 1}
    assert client.post("/api/attention", json=question).status_code == 200
    for seed in range(1, 5):  # three are kept
        client.post("/api/images", content=encoded(noise(seed)))
    assert client.post("/api/attention", json=question).json()["error"] == "unknown_image"


def test_uploads_that_wait_hold_no_page_and_too_many_are_asked_to_come_back(models, examples, monkeypatch):
    """Two are decoded, one waits, the fourth is refused; the page answers meanwhile."""
    go, begun = threading.Event(), threading.Semaphore(0)

    def slow(content, limits, invert=False):
        begun.release()
        assert go.wait(20)
        return (noise(0),)

    monkeypatch.setattr(engine, "read_upload", slow)
    app = create_app(models, examples, Limits(waiting_uploads=1))
    with local_client(app) as client, ThreadPoolExecutor(3) as senders:
        sent = [senders.submit(client.post, "/api/images", content=b"x") for _ in range(3)]
        for _ in range(2):
            assert begun.acquire(timeout=20)
        while app.state.engine._decoding < 3:
            time.sleep(0.01)
        busy = client.post("/api/images", content=b"x")
        assert (busy.status_code, busy.json()["error"]) == (503, "busy")
        assert client.get("/api/info").status_code == 200
        go.set()
        assert [one.result().status_code for one in sent] == [201] * 3
