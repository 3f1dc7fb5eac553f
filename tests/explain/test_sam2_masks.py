"""SAM 2 by the dial, on a tiny random one: prompts, sizes, and what is refused."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from small_hiera import small_hiera

transformers = pytest.importorskip("transformers")

from cumulant.explain.masks import Segmenter, iou  # noqa: E402
from cumulant.web.segmenter import is_segmenter  # noqa: E402


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A SAM 2 of five small layers, one of which looks at the whole picture."""
    config = transformers.Sam2Config(
        vision_config=small_hiera(third=2),
        prompt_encoder_config={"hidden_size": 32, "image_size": 128, "mask_input_channels": 4},
        mask_decoder_config={"hidden_size": 32, "mlp_dim": 32, "num_attention_heads": 2, "iou_head_hidden_dim": 32},
    )
    torch.manual_seed(0)
    path = tmp_path_factory.mktemp("sam2")
    transformers.Sam2Model(config).save_pretrained(path)
    return str(path)


def picture(rows: int = 90, cols: int = 120) -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (rows, cols, 3), dtype=np.uint8)


def test_a_click_gives_a_mask_of_the_picture_at_every_step(folder: str) -> None:
    segmenter = Segmenter.open(folder, size=128)
    kinds = {"points": [(60.0, 40.0), (5.0, 80.0)], "boxes": [(10.0, 10.0, 50.0, 60.0)]}
    exact = segmenter.masks(picture(), **kinds)
    assert exact.on_picture().shape == (3, 90, 120)
    close = segmenter.masks(picture(), **kinds, dial="cluster64+near=64")
    far = segmenter.masks(picture(), **kinds, dial="cumulant2")
    torch.testing.assert_close(close.logits, exact.logits, atol=1e-4, rtol=1e-3)
    assert float((far.logits - exact.logits).norm()) > float((close.logits - exact.logits).norm())
    torch.testing.assert_close(segmenter.masks(picture(), **kinds).logits, exact.logits)
    assert 0 < segmenter.cost("cluster4+response=0") < segmenter.cost("cluster4")
    assert segmenter.cost("softmax") == 1
    assert float(iou(exact.best, exact.best).min()) == 1


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"points": [(130.0, 10.0)]}, r"x=130, y=10 is outside the picture, 120 x 90 pixels"),
        ({"boxes": [(0.0, 0.0, 20.0, 91.0)]}, r"x=20, y=91 is outside"),
        ({"boxes": [(50.0, 60.0, 10.0, 10.0)]}, r"a box is \(left, top, right, bottom\), got \(50.0, 60.0"),
        ({"boxes": [(50.0, 60.0, 10.0)]}, r"boxes must be a list of \(left, top, right, bottom\), got \[\(50"),
        ({"points": (60.0, 40.0)}, r"points must be a list of \(x, y\), got \(60"),
        ({"points": "here"}, r"points must be a list of \(x, y\), got here"),
        ({"points": [(1.0, 1.0)], "dial": 3}, r"dial must be the name of a mechanism"),
        ({}, r"nothing to segment: give points="),
        ({"points": [(1.0, 1.0)], "dial": "cluster64+nearr=4"}, r"nearr"),
        ({"points": [(1.0, 1.0)], "picture": np.zeros((4, 4), np.uint8)}, r"an array \(rows, cols, 3\) of 8 bits"),
        (
            {"points": [(1.0, 1.0)], "picture": np.broadcast_to(np.zeros(3, np.uint8), (20000, 20000, 3))},
            r"20000 x 20000 pixels is too large: make it at most 64 megapixels",
        ),
    ],
)
def test_what_cannot_be_is_said(folder: str, given: dict, said: str) -> None:
    segmenter = Segmenter.open(folder, size=128)
    with pytest.raises((ValueError, TypeError), match=said):
        segmenter.masks(**{"picture": picture(), **given})


def test_places_may_be_arrays_and_tensors(folder: str) -> None:
    segmenter, places = Segmenter.open(folder, size=128), [(60.0, 40.0), (5.0, 80.0)]
    exact = segmenter.masks(picture(), places).logits
    for given in (np.array(places), torch.tensor(places)):
        torch.testing.assert_close(segmenter.masks(picture(), given).logits, exact)


def test_a_folder_without_a_whole_sam2_is_said(folder: str, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="there is no SAM 2 at"):  # of an empty folder transformers makes one up
        Segmenter.open(tmp_path)
    (tmp_path / "config.json").write_bytes((Path(folder) / "config.json").read_bytes())
    with pytest.raises(ValueError, match="says that it is a SAM 2 and has no weights"):
        Segmenter.open(tmp_path, size=128)
    (tmp_path / "model.safetensors").write_bytes((Path(folder) / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(ValueError, match=r"model.safetensors is not a safetensors file, or is cut short"):
        Segmenter.open(tmp_path, size=128)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json is damaged"):
        is_segmenter(str(tmp_path))
    with pytest.raises(ValueError, match="there is no SAM 2 at"):
        Segmenter.open(tmp_path)


def test_what_is_no_sam2_is_said(folder: str, tmp_path: object) -> None:
    with pytest.raises(ValueError, match=r"there is no SAM 2 at .*tools.models sam2"):
        Segmenter.open(f"{tmp_path}/nowhere")
    transformers.CLIPVisionConfig().save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=r"not a SAM 2"):
        Segmenter.open(str(tmp_path))
    with pytest.raises(ValueError, match=r"size must be a multiple of 32"):
        Segmenter.open(folder, size=100)
    with pytest.raises(ValueError, match=r"has no vision encoder with Hiera's blocks"):
        Segmenter(torch.nn.Linear(2, 2))


def test_weights_of_another_revision_are_said(folder: str, tmp_path: object) -> None:
    from safetensors.torch import load_file, save_file

    model = transformers.Sam2Model.from_pretrained(folder)
    model.save_pretrained(tmp_path)
    state = load_file(f"{tmp_path}/model.safetensors")
    state.pop("vision_encoder.backbone.blocks.3.attn.qkv.weight")
    save_file(state, f"{tmp_path}/model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"weights of another revision: 1 are missing.*blocks.3.attn.qkv"):
        Segmenter.open(str(tmp_path), size=128)
