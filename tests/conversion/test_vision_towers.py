"""Vision models of transformers, tiny and random: SAM 2's Hiera, and the towers of CLIP, SigLIP and DINOv2."""

from __future__ import annotations

from itertools import chain, repeat
from typing import Any

import pytest
import torch
from small_hiera import small_hiera

import cumulant
from cumulant.conversion import choose_layers, restore

transformers = pytest.importorskip("transformers")
TINY: dict[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "image_size": 64,
    "patch_size": 4,
}


def hiera() -> Any:
    """SAM 2's vision encoder: six layers, of which the fourth sees the whole picture."""
    torch.manual_seed(0)
    return transformers.Sam2VisionModel(small_hiera(third=3)).eval()


def test_windows_of_a_hiera_stay_and_the_global_layer_knows_its_grid() -> None:
    model, x = hiera(), torch.randn(1, 3, 128, 128)
    before = model(x).last_hidden_state
    report = cumulant.convert(model, "cluster4+near=1", data=x, force=True)
    assert list(report.replaced) == ["backbone.blocks.3.attn"]
    assert report.kept["backbone.blocks.0.attn"] == "it looks within windows of 4 x 4 tokens"
    seen = []
    from cumulant.nn.swapped.choice import observing

    with observing(lambda module, call: seen.append(call.grid)):
        model(x)
    assert (8, 8) in seen
    wide, seen = torch.randn(1, 3, 64, 256), []  # 4 x 16 tokens, as many as a square would have
    with observing(lambda module, call: seen.append(call.grid)):
        model(wide)
    assert (4, 16) in seen
    assert (8, 8) not in seen
    restore(model)
    torch.testing.assert_close(model(x).last_hidden_state, before)


@pytest.mark.parametrize("name", ["cluster4+find=tree+near=1+patch=2+near_rows=32", "cluster8+find=tree+near=2"])
def test_a_converted_hiera_compiles_without_a_break(name: str) -> None:
    """With four clusters, a mechanism that is listed, and with eight, which is not."""
    model, x = hiera(), torch.randn(1, 3, 128, 128)
    cumulant.convert(model, name, force=True, example=x)
    with torch.no_grad():
        said = model(x).last_hidden_state
        torch._dynamo.reset()
        compiled = torch.compile(model, backend="eager", fullgraph=True)
        torch.testing.assert_close(compiled(x).last_hidden_state, said, atol=1e-5, rtol=1e-4)


def test_blocks_that_are_compiled_one_by_one_say_the_same() -> None:
    """transformers' collector of weights is set outside of these graphs: reading it breaks them, and must not harm."""
    model, x = hiera(), torch.randn(1, 3, 128, 128)
    cumulant.convert(model, "cluster4+near=1", force=True, example=x)
    with torch.no_grad():
        said = model(x).last_hidden_state
        torch._dynamo.reset()
        for number in (0, 3):  # one with windows and the one that was converted: the others are like these
            block = model.backbone.blocks[number]
            block.forward = torch.compile(block.forward, backend="eager")
        torch.testing.assert_close(model(x).last_hidden_state, said, atol=1e-5, rtol=1e-4)


def test_the_dial_of_a_hiera_measures_clusters_by_content() -> None:
    model, x = hiera(), torch.randn(1, 3, 256, 256)
    dial = choose_layers(model, x, target=0.9, candidates=["cluster4+find=tree"], force=True)
    assert dial.layers["backbone.blocks.3.attn"].tried == 1
    assert dial.layers["backbone.blocks.3.attn"].heads


def test_the_dial_of_a_hiera_leaves_windows_alone() -> None:
    dial = choose_layers(hiera(), torch.randn(1, 3, 128, 128), target=1e9, candidates=["cluster4"], force=True)
    assert list(dial.layers) == ["backbone.blocks.3.attn"]
    assert dial.kept["backbone.blocks.0.attn"] == "it looks within windows of 4 x 4 tokens"
    assert "windows of 2 x 2" in str(dial)


@pytest.mark.parametrize("family", ["CLIPVision", "SiglipVision", "Dinov2"])
def test_vision_towers_take_clusters_by_content(family: str) -> None:
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}Model")(getattr(transformers, f"{family}Config")(**TINY)).eval()
    x = torch.randn(1, 3, 64, 64)
    before = model(x).last_hidden_state.detach()
    report = cumulant.convert(model, "cluster16+find=tree+near=2", data=x, force=True)
    assert len(report.replaced) == 2
    after = model(x).last_hidden_state.detach()
    assert 0 < float((after - before).norm()) < 0.2 * float(before.norm())


def test_the_relative_bias_of_mpnet_is_refused_and_nothing_is_converted() -> None:
    config = transformers.MPNetConfig(
        vocab_size=50, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=16
    )
    torch.manual_seed(0)
    model, x = transformers.MPNetModel(config).eval(), torch.arange(20)[None]
    before = model(x).last_hidden_state
    with pytest.raises(ValueError, match="logits"):
        cumulant.convert(model, "cumulant2", data={"input_ids": x}, force=True)
    torch.testing.assert_close(model(x).last_hidden_state, before)


def test_a_candidate_that_is_slower_makes_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    from cumulant.conversion import dial

    model, x = hiera(), torch.randn(1, 3, 256, 256)
    names, found = ["cluster4+response=0", "cluster4+find=tree"], []
    for cheapest, others in ((1.0, 1.0), (2.0, 0.5)):
        seconds = chain((1.0, cheapest), repeat(others))  # softmax, the cheapest and those after it
        monkeypatch.setattr(
            dial, "seconds_of", lambda model, used, names, *_, of=seconds: dict.fromkeys(names, next(of))
        )
        found.append(choose_layers(model, x, target=0.9, candidates=names).layers["backbone.blocks.3.attn"])
    first, second = found
    assert first.attention != second.attention
    assert first.seconds == (1.0, 1.0)
    assert second.seconds == (1.0, 0.5)
