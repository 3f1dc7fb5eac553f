"""A recording answers for any row what a capture of that row would have shown, without another pass."""

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


def test_no_pass_is_made_for_a_row(monkeypatch: pytest.MonkeyPatch) -> None:
    model = cumulant.create_model("vit_nano_patch2_8", num_classes=10).eval()
    recording = explain.record(model, torch.randn(1, 1, 8, 8), layers=[2])
    for module in model.modules():
        monkeypatch.setattr(module, "forward", None, raising=False)
    assert recording.maps(2, [0]).shape == (1, 4, 1, 17)
    with pytest.raises(ValueError, match=r"layer must be one of \[2\], got 0"):
        recording.maps(0)
