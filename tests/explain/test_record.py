"""A recording answers for any row what a capture of that row would have shown, without another pass."""

import importlib

import pytest
import torch

import cumulant
from cumulant import explain, zoo

MAPPED = [name for name in zoo.names() if zoo.get(name).weights]


@pytest.mark.parametrize("attention", MAPPED)
def test_rows_of_a_recording_are_those_of_a_capture(attention: str) -> None:
    model = cumulant.create_model("vit_nano_patch2_8", attention=attention, num_classes=10, init_std=0.2).eval()
    images = torch.randn(2, 1, 8, 8)
    recording = explain.record(model, images)
    with explain.capture(model, images) as captured:
        pass
    assert torch.equal(recording.output, model(images))
    assert recording.tokens == captured.tokens
    torch.testing.assert_close(recording.maps(1), captured.maps(1))
    rows = recording.maps(3, queries=[5, -1], heads=[2, 0])
    torch.testing.assert_close(rows, captured.maps(3)[:, [2, 0]][:, :, [5, 16]])


@pytest.mark.parametrize("variant", [2, 3, 4])
def test_recordings_of_clips_cover_the_whole_clip(variant: int) -> None:
    model = cumulant.create_model(
        "vivit_nano_patch4x1_16", attention="cumulant3", num_classes=5, variant=variant, init_std=0.2, depth=1
    ).eval()
    clips = torch.randn(1, 1, 8, 16, 16)
    recording = explain.record(model, clips)
    with explain.capture(model, clips, queries=[40]) as captured:
        pass
    for layer in captured.layers:
        torch.testing.assert_close(recording.maps(layer, [40]), captured.maps(layer))


@pytest.mark.parametrize("attention", ["softmax", "cumulant2", "cumulant3"])
def test_another_mechanism_can_be_tried_on_the_recorded_queries_and_keys(attention: str) -> None:
    model = cumulant.create_model("vit_nano_patch2_8", attention=attention, num_classes=10, init_std=0.2).eval()
    recording = explain.record(model, torch.randn(2, 1, 8, 8))
    query, key, scale = recording.query_key(2)
    scores = zoo.get(attention).scores
    assert scores is not None
    torch.testing.assert_close(scores(query, key, scale=scale), recording.maps(2))


def test_summaries_and_rollout_of_a_recording_are_those_of_a_capture() -> None:
    model = cumulant.create_model("vit_nano_patch2_8", attention="cumulant3", num_classes=10, init_std=0.2).eval()
    images = torch.randn(2, 1, 8, 8)
    recorded = explain.record(model, images).captured()
    with explain.capture(model, images) as captured:
        pass
    for name, value in explain.summary(captured).items():
        torch.testing.assert_close(explain.summary(recorded)[name], value, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(explain.rollout(recorded), explain.rollout(captured), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("library", ["cumulant", pytest.param("timm", marks=pytest.mark.timm)])
def test_a_recording_holds_queries_and_keys_and_no_values(library: str) -> None:
    maker = importlib.import_module(library)
    model = maker.create_model("vit_tiny_patch16_224", img_size=64, depth=2, num_classes=7).eval()
    recording = explain.record(model, torch.randn(3, 3, 64, 64))
    assert recording.nbytes == 2 * (2 * 3 * 17 * 192) * 4  # layers, (query and key), float32
    for _, call, _ in recording._seen.values():
        assert all(z.untyped_storage().nbytes() == z.nbytes for z in call.kept)  # views would hold more
        with pytest.raises(RuntimeError, match="its input and value are gone"):
            call.value()


def test_no_pass_is_made_for_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cumulant.create_model("vit_nano_patch2_8", num_classes=10).eval()
    recording = explain.record(model, torch.randn(1, 1, 8, 8), layers=[2])
    for module in model.modules():
        monkeypatch.setattr(module, "forward", None, raising=False)
    assert recording.maps(2, [0]).shape == (1, 4, 1, 17)
    with pytest.raises(ValueError, match=r"layer must be one of \[2\], got 0"):
        recording.maps(0)
