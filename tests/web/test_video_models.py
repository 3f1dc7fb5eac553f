"""Models of videos in the explorer: maps over time and space, clips and pictures alike."""

import io
import json

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx")

from PIL import Image
from small_explorer import animated, ask, encoded, local_client, noise, small_model, small_video_model

from cumulant import explain
from cumulant.inspect.opening import open_model
from cumulant.train.checkpoint import save
from cumulant.train.recipe_files import to_json
from cumulant.train.train_recipe import TrainRecipe
from cumulant.web import Example, create_app, serve
from cumulant.web.command import Explore
from cumulant.web.explorable import examples_of
from cumulant.web.opening import explorable

CLIP = tuple(noise(seed) for seed in range(4))
QUERY = {"model": "video", "image": "example-0", "query": 6}  # class token, then 4 patches of each step


def explorer(**options):
    return local_client(create_app({"video": small_video_model(**options)}, [Example(CLIP, "noise")]))


@pytest.mark.parametrize(
    ("variant", "axes"), [(1, ["all", "all"]), (3, ["space", "time", "space", "time"]), (4, ["all", "all"])]
)
def test_weights_cover_time_and_space_and_are_those_of_the_model(variant, axes):
    client = explorer(variant=variant)
    (info,) = client.get("/api/info").json()["models"]
    assert (info["times"], info["grid"], info["axes"]) == (2, [2, 2], axes)
    assert info["lens"] is (variant == 1)
    weights = torch.tensor(ask(client, "attention", **QUERY)["weights"])
    one = small_video_model(variant=variant)
    with explain.capture(one.model, one.images(CLIP), queries=[6]) as captured:
        pass
    expected = torch.stack([captured.maps(layer)[0, :, 0] for layer in captured.layers])
    torch.testing.assert_close(weights, expected, atol=5e-6, rtol=0)
    assert weights.shape[-1] == info["prefix"] + 8


def test_frames_are_given_to_the_model_in_their_order():
    one = small_video_model()
    clip = one.images(CLIP)
    assert clip.shape == (1, 1, 4, 8, 8)
    for time, frame in enumerate(CLIP):
        torch.testing.assert_close(clip[:, :, time], small_model("softmax").images(frame))


def test_a_picture_stands_still_and_a_long_clip_is_spread_evenly():
    one = small_video_model()
    still = one.images(CLIP[2])
    assert torch.equal(still[:, :, 0], still[:, :, 3])
    every_other = one.images([frame for frame in CLIP for _ in range(2)])
    assert torch.equal(every_other, one.images(CLIP))


def test_a_model_of_pictures_sees_the_first_frame_of_a_clip():
    one = small_model("softmax")
    assert torch.equal(one.images(CLIP), one.images(CLIP[0]))


def test_the_page_can_show_each_step_in_time_as_the_model_sees_it():
    client = explorer()

    def shown(time):
        answer = client.get("/api/images/example-0", params={"model": "video", "time": time})
        return list(Image.open(io.BytesIO(answer.content)).tobytes())

    # a token covers two frames; the second of them stands for it
    assert shown(0) == list(CLIP[1].convert("L").tobytes())
    assert shown(1) == list(CLIP[3].convert("L").tobytes())
    assert client.get("/api/images/example-0", params={"model": "video", "time": 2}).status_code == 404


def test_an_uploaded_clip_is_answered_about_in_every_view():
    client = explorer()
    name = client.post("/api/images", content=animated(6)).json()["image"]
    question = {"model": "video", "image": name}
    assert len(ask(client, "prediction", **question)["choices"]) == 5
    summary = ask(client, "summary", **question)
    distance = next(metric for metric in summary["metrics"] if metric["name"] == "distance")
    assert distance["reference"] == pytest.approx(explain.uniform_distance((2, 2, 2)))
    assert sum(ask(client, "flow", **question, query=6)["weights"]) == pytest.approx(1, abs=1e-4)
    assert ask(client, "importance", **question, layer=1)["feature"]
    assert ask(client, "lens", **question, query=6, layer=0)["maps"]


def test_layers_that_see_parts_of_a_clip_say_what_they_cannot_show():
    client = explorer(variant=3)
    for what, extra, kind in (("lens", {"layer": 0}, "no_lens"), ("flow", {"kind": "relevance"}, "no_relevance")):
        answer = client.post(f"/api/{what}", json={**QUERY, **extra})
        assert (answer.status_code, answer.json()["error"]) == (404, kind)


def test_a_checkpoint_of_a_video_model_is_opened_and_served(tmp_path):
    recipe = TrainRecipe(data="gone", image_size=8, frames=4, model="vivit_nano_patch4x2_16", attention="cumulant3")
    notes = {"recipe": to_json(recipe), "classes": json.dumps(list("abcde"))}
    path = save(small_video_model().model, tmp_path / "video.safetensors", notes=notes)
    one = explorable(open_model(path))
    assert (one.frames, one.size, len(one.mean)) == (4, 8, 1)
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "a.gif").write_bytes(animated(5))
    (tmp_path / "clips" / "b.png").write_bytes(encoded(noise(0)))
    client = local_client(serve.prepare(Explore((str(path),), data=str(tmp_path / "clips"))))
    info = client.get("/api/info").json()
    assert [example["frames"] for example in info["examples"]] == [5, 1]
    assert info["models"][0]["times"] == 2
    assert ask(client, "attention", model="cumulant3", image="example-0", query=3)["weights"]


def test_examples_of_a_video_data_set_are_the_clips_that_evaluation_sees(monkeypatch):
    from types import SimpleNamespace

    clip = torch.randint(0, 256, (3, 4, 8, 8), dtype=torch.uint8)
    test = SimpleNamespace(labels=torch.tensor([0, 1]), decode=lambda index, size: clip)
    given = {}

    def open_source(data, **options):
        given.update(options)
        return SimpleNamespace(kind="video", classes=["x", "y"], test=test)

    monkeypatch.setattr("cumulant.data.open_source", open_source)
    recipe = TrainRecipe(model="vivit_nano_patch4x2_16", frames=4, stride=3, views=4)
    examples = examples_of("videos", 2, 8, **serve.as_trained(recipe))
    assert [example.label for example in examples] == ["x", "y"]
    assert [len(example.picture) for example in examples] == [4, 4]
    assert {name: given[name] for name in ("frames", "stride")} == {"frames": 4, "stride": 3}
    assert "views" not in given
