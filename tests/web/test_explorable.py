"""From a checkpoint, from timm, or from nothing at all: models that are ready to be shown."""

import io
import subprocess
import sys
from dataclasses import replace
from functools import partial

import pytest
import torch

pytest.importorskip("fastapi")
pytest.importorskip("httpx")
pytest.importorskip("sklearn")

from small_explorer import encoded, local_client, noise, png_claiming

from cumulant.cli import main
from cumulant.inspect.opening import open_model
from cumulant.train import read_recipe, train
from cumulant.web import Example, create_app, photographs, serve
from cumulant.web.command import Explore
from cumulant.web.demo import digits_models
from cumulant.web.explorable import examples_of
from cumulant.web.opening import explorable, open_models


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A digits run of one epoch."""
    folder = tmp_path_factory.mktemp("runs") / "quick"
    recipe = replace(read_recipe("digits"), epochs=1, warmup_epochs=0.0, batch_size=256, checkpoint_epochs=0)
    return folder, train(recipe, folder)


def test_a_checkpoint_brings_its_classes_its_preprocessing_and_its_accuracy(run):
    folder, result = run
    opened = open_model(folder / "last.safetensors")
    one, recipe = explorable(opened), opened.recipe
    assert one.classes == tuple("0123456789")
    assert (one.size, one.mean, one.std) == (8, recipe.mean, recipe.std)
    assert one.accuracy == pytest.approx(result.top1)


def test_a_checkpoint_kept_in_half_precision_is_shown_in_full(run, tmp_path):
    from cumulant.train import load, save
    from cumulant.train.checkpoint import read_header

    folder, _ = run
    header = read_header(folder / "last.safetensors")
    notes = {name: header[name] for name in ("recipe", "classes")}
    path = save(load(folder / "last.safetensors").half(), tmp_path / "half.safetensors", notes=notes)
    models, _ = open_models([str(path)])
    assert next(models["softmax"].model.parameters()).dtype == torch.float32
    create_app(models)


def test_pictures_are_prepared_as_in_evaluation(run):
    folder, result = run
    one = explorable(open_model(folder / "last.safetensors"))
    (example,) = examples_of("digits", 1, 8)
    place = int((result.predictions.labels == int(example.label)).nonzero()[0])
    shown = one.model(one.images(example.picture))[0].softmax(-1)
    torch.testing.assert_close(shown, result.predictions.probabilities[place], atol=1e-5, rtol=0)


def test_models_are_named_by_mechanism_or_by_folder_where_that_is_not_enough(run):
    folder, _ = run
    assert list(open_models([str(folder)])[0]) == ["softmax"]
    assert list(open_models([str(folder), str(folder)])[0]) == ["quick", "quick (2)"]
    file = str(folder / "last.safetensors")
    assert list(open_models([file, file])[0]) == ["quick", "quick (2)"]


def test_what_is_not_a_checkpoint_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*nothing"):
        open_model(tmp_path / "nothing")
    (tmp_path / "x.safetensors").write_bytes(b"\x80\x04pickle")
    with pytest.raises(ValueError, match=r"x\.safetensors is not a safetensors file"):
        open_model(tmp_path / "x.safetensors")


def test_digits_models_are_trained_once_and_then_read(tmp_path):
    screen = io.StringIO()
    first = digits_models(["linear"], tmp_path, epochs=1, progress=screen)["linear"]
    assert "training a small digits model with linear (1 of 1)" in screen.getvalue()
    quiet = io.StringIO()
    second = digits_models(["linear"], tmp_path, epochs=1, progress=quiet)["linear"]
    assert quiet.getvalue() == ""
    assert torch.equal(first.model.head.weight, second.model.head.weight)
    assert first.model.grid_size == (6, 6)


def test_the_first_start_trains_on_one_thread_and_leaves_the_others_as_they_were(tmp_path, monkeypatch):
    seen, before = [], torch.get_num_threads()
    monkeypatch.setattr("cumulant.train.train", lambda *_, **__: seen.append(torch.get_num_threads()) or 1 / 0)
    monkeypatch.setattr(photographs, "learn", lambda *_, **__: seen.append(torch.get_num_threads()) or 1 / 0)
    try:
        torch.set_num_threads(2)
        for first_start in (partial(digits_models, ["linear"]), partial(photographs.photograph_models, [])):
            with pytest.raises(ZeroDivisionError):
                first_start(tmp_path)
        assert (seen, torch.get_num_threads()) == ([1, 1], 2)
    finally:
        torch.set_num_threads(before)


@pytest.mark.timm
def test_a_model_of_timm_is_shown_with_its_own_preprocessing():
    one = explorable(open_model("timm:vit_tiny_patch16_224", pretrained=False))
    assert (one.size, len(one.classes)) == (224, 1000)
    client = local_client(create_app({"timm": one}, [Example(noise(0, 64), "")]))
    answer = client.post("/api/attention", json={"model": "timm", "image": "example-0", "query": 100})
    weights = torch.tensor(answer.json()["weights"])
    assert weights.shape == (12, 3, 197)
    torch.testing.assert_close(weights.sum(-1), torch.ones(12, 3), atol=1e-3, rtol=0)
    lens = client.post("/api/lens", json={"model": "timm", "image": "example-0", "query": 100, "layer": 3}).json()
    torch.testing.assert_close(torch.tensor(lens["maps"][-1]["weights"]), weights[3], atol=3e-6, rtol=0)


def test_examples_can_be_the_pictures_of_a_folder(tmp_path):
    for name in ("b.png", "a.png"):
        (tmp_path / name).write_bytes(encoded(noise(1, 20)))
    (tmp_path / "notes.txt").write_text("no picture")
    assert [example.label for example in examples_of(str(tmp_path), 10, 8)] == ["a", "b"]
    (tmp_path / "a0.png").write_bytes(png_claiming(60_000, 60_000))
    with pytest.warns(UserWarning, match=r"a0.png is left out: .* pixels"):
        assert [example.label for example in examples_of(str(tmp_path), 2, 8)] == ["a", "b"]


def test_examples_of_the_digits_show_every_class():
    assert [example.label for example in examples_of("digits", 10, 8)] == list("0123456789")


def test_explore_serves_checkpoints_with_examples_of_their_data(run):
    folder, _ = run
    client = local_client(serve.prepare(Explore((str(folder),), images=3)))
    info = client.get("/api/info").json()
    assert [model["name"] for model in info["models"]] == ["softmax"]
    assert len(info["examples"]) == 3
    assert client.get("/", headers={"host": "evil.example"}).status_code == 400


def test_settings_are_checked_and_local_by_default():
    assert Explore().local
    assert Explore(host="localhost").local
    assert Explore(host="::1").local
    assert not Explore(host="0.0.0.0").local
    with pytest.raises(ValueError, match="port must be between 0 and 65535, got 70000"):
        Explore(port=70000)
    with pytest.raises(ValueError, match="images must be between 1 and 100, got 0"):
        Explore(images=0)


def test_a_port_that_is_taken_says_so():
    # Also while the models of the first explorer are still being trained.
    with serve.listen("127.0.0.1", 0) as door, pytest.raises(OSError, match="choose another --port"):
        serve.listen("127.0.0.1", door.getsockname()[1])


def test_the_help_does_not_wait_for_web_packages():
    code = "import sys, cumulant.web.command; sys.exit(any(m in sys.modules for m in ('fastapi', 'PIL', 'uvicorn')))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_every_address_of_this_machine_can_be_asked_under_its_own_name(run):
    app = serve.prepare(Explore((str(run[0]),), images=1, host="127.0.0.2"))
    client = local_client(app)
    assert client.get("/", headers={"host": "127.0.0.2:8000"}).status_code == 200
    assert client.get("/", headers={"host": "evil.example"}).status_code == 400


@pytest.mark.parametrize(("device", "words"), [("tpu", "must be cpu or cuda, got 'tpu'"), ("cuda:99", "needs a GPU")])
def test_a_device_that_is_not_there_is_told(run, capsys, device, words):
    assert main(["explore", str(run[0]), "--device", device, "--port", "0"]) == 2
    assert words in capsys.readouterr().err


def test_a_package_that_does_not_work_here_is_told_in_a_line(capsys, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("no CUDA driver was found")

    monkeypatch.setattr(serve, "explore", broken)
    assert main(["explore", "timm:vit_tiny_patch16_224"]) == 1
    assert capsys.readouterr().err == "cumulant: error: no CUDA driver was found\n"
