"""Short videos: frames spread evenly, decoded within limits; hostile ones are refused, and no other file is opened."""

import pytest

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from PIL import Image
from small_explorer import animated, encoded, film, noise

from cumulant.web import Limits
from cumulant.web.footage import evenly
from cumulant.web.problems import UploadError
from cumulant.web.uploads import UploadStore, read_upload


def greys(frames):
    return [frame.getpixel((5, 5))[0] for frame in frames]


@pytest.mark.parametrize("kind", ["GIF", "WEBP", "PNG"])
def test_an_animation_becomes_its_frames(client, kind):
    taken = client.post("/api/images", content=animated(6, kind))
    assert taken.status_code == 201, taken.text
    assert taken.json()["frames"] == 6
    name = taken.json()["image"]
    pictures = {client.get(f"/api/images/{name}", params={"time": time}).content for time in range(6)}
    assert len(pictures) == 6
    assert client.get(f"/api/images/{name}", params={"time": 6}).json()["error"] == "unknown_time"


def test_a_picture_of_the_same_format_that_stands_still_is_one_frame():
    assert len(read_upload(encoded(noise(0, 30), "GIF"), Limits())) == 1


@pytest.mark.parametrize(
    ("codec", "container"), [("mpeg4", "mp4"), ("libx264", "mp4"), ("libvpx-vp9", "webm"), ("libx264", "matroska")]
)
def test_a_video_becomes_its_frames_in_order(codec, container):
    pytest.importorskip("av")
    frames = read_upload(film(12, codec=codec, container=container), Limits())
    assert [round(grey / 10) for grey in greys(frames)] == list(range(12))
    assert {frame.size for frame in frames} == {(48, 48)}


def test_long_clips_are_kept_as_frames_spread_over_all_of_them():
    pytest.importorskip("av")
    frames = read_upload(film(25), Limits(clip_frames=4))
    # 25 frames were seen, every fourth kept (0, 4, ..., 24), and four of these seven
    assert [round(grey / 10) for grey in greys(frames)] == [0, 8, 16, 24]


def test_what_lies_beyond_the_limits_is_not_decoded():
    pytest.importorskip("av")
    assert [round(g / 10) for g in greys(read_upload(film(25), Limits(decoded_frames=3)))] == [0, 1, 2]
    assert len(read_upload(film(25), Limits(decoded_pixels=5 * 48 * 48))) == 5
    assert len(read_upload(animated(9), Limits(decoded_pixels=4 * 20 * 20))) == 4


def test_clips_take_the_room_of_as_many_pictures_as_they_have_pixels():
    store = UploadStore(Limits(images=4, stored_side=16))
    first = store.add((noise(0, 16),))
    clip = store.add(tuple(noise(seed, 16) for seed in range(3)))
    assert store.get(first) is not None
    store.add((noise(1, 16),))
    assert store.get(clip) is None
    assert store.get(first) is not None


def test_evenly_is_the_identity_where_nothing_is_left_out():
    assert evenly(tuple("abcd"), 4) == tuple("abcd")
    assert evenly(tuple("abcdefgh"), 2) == ("c", "g")
    assert evenly(("a",), 3) == ("a", "a", "a")


def test_dark_and_light_are_exchanged_in_every_frame():
    plain, inverted = (read_upload(animated(3), Limits(), invert=invert) for invert in (False, True))
    assert [255 - grey for grey in greys(plain)] == greys(inverted)


PLAYLIST = b"#EXTM3U\n#EXT-X-TARGETDURATION:1\n#EXTINF:1,\nfile:///etc/passwd\n#EXT-X-ENDLIST\n"
HOSTILE = {
    "playlist that names a file": (PLAYLIST, 415),
    "list of files to join": (b"ffconcat version 1.0\nfile '/etc/passwd'\n", 415),
    "playlist called MP4": (b"\0\0\0\x18ftyp" + PLAYLIST, 422),
    "MP4 of zeros": (b"\0\0\0\x18ftypisom" + bytes(400), 422),
    "Matroska of zeros": (b"\x1a\x45\xdf\xa3" + bytes(400), 422),
    "AVI, which is not read": (b"RIFF\xff\xff\xff\x7fAVI " + bytes(400), 415),
}


@pytest.mark.parametrize(("content", "status"), HOSTILE.values(), ids=HOSTILE)
def test_hostile_videos_are_refused_in_words(client, content, status):
    pytest.importorskip("av")
    answer = client.post("/api/images", content=content)
    assert answer.status_code == status, answer.text
    assert set(answer.json()) == {"error", "message"}
    assert "root:" not in answer.text


def test_half_a_video_is_refused_and_codecs_that_nobody_sends_are_not_tried():
    pytest.importorskip("av")
    whole = film(25)
    with pytest.raises(UploadError, match="damaged"):
        read_upload(whole[: len(whole) // 2], Limits())
    with pytest.raises(UploadError, match="codec ffv1 are not read"):
        read_upload(film(3, codec="ffv1", container="matroska"), Limits())


def test_large_frames_are_refused_by_their_header():
    pytest.importorskip("av")
    with pytest.raises(UploadError, match="at most 1,000 pixels, got 48 x 48") as refused:
        read_upload(film(3), Limits(frame_pixels=1000))
    assert refused.value.status == 413
    with pytest.raises(UploadError, match="at most 1,000 pixels"):
        read_upload(animated(3, side=60), Limits(frame_pixels=1000))


def test_frames_that_grow_on_the_way_are_refused():
    kept = Limits(frame_pixels=500)
    from cumulant.web.footage import Decimated

    frames = Decimated(kept)
    assert frames.wants(20, 20)
    with pytest.raises(UploadError, match="got 30 x 30"):
        frames.wants(30, 30)


def test_without_pyav_a_video_is_refused_and_an_animation_taken(monkeypatch):
    content = film(3) if pytest.importorskip("av") else b""
    monkeypatch.setitem(__import__("sys").modules, "av", None)
    with pytest.raises(UploadError, match="lacks PyAV"):
        read_upload(content, Limits())
    assert len(read_upload(animated(3), Limits())) == 3


def test_transparent_frames_become_white_paper():
    first, second = (Image.new("RGBA", (9, 9), (level, 0, 0, 0)) for level in (0, 255))
    frames = read_upload(encoded(first, "WEBP", save_all=True, append_images=[second], lossless=True), Limits())
    assert {frame.getpixel((4, 4)) for frame in frames} == {(255, 255, 255)}
