"""A checkpoint is one safetensors file from which the same model comes back, and it is written whole or not at all."""

import os

import pytest
import torch
from safetensors.torch import load_file

from cumulant.models import VisionTransformer, create_model
from cumulant.train import load, save
from cumulant.train.checkpoint import read_header


def nano(**kw):
    torch.manual_seed(0)
    return create_model("vit_nano_patch2_8", **({"num_classes": 10, "depth": 1, "attention": "cumulant3"} | kw))


def images():
    return torch.randn(3, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("kw", [{}, {"pool": "gap", "attention": "linear"}, {"attention_options": {"full": True}}])
def test_a_saved_model_comes_back_bit_equal(tmp_path, kw):
    model = nano(**kw).eval()
    again = load(save(model, tmp_path / "model.safetensors")).eval()
    assert torch.equal(again(images()), model(images()))
    assert again.config == model.config
    assert again.blocks[0].attn.mechanism.name == model.blocks[0].attn.mechanism.name


def test_precision_survives(tmp_path):
    model = nano().bfloat16()
    again = load(save(model, tmp_path / "model.safetensors"))
    assert again.pos_embed.dtype == torch.bfloat16
    assert all(p.requires_grad for p in again.parameters())


def test_the_file_is_plain_safetensors_with_the_config_in_its_header(tmp_path):
    path = save(nano(), tmp_path / "deep" / "model.safetensors", notes={"epochs": "20"})
    assert set(load_file(path)) == set(nano().state_dict())
    header = read_header(path)
    assert header["epochs"] == "20"
    assert '"name": "vit_nano_patch2_8"' in header["config"]


def test_weights_can_be_put_into_a_model_of_another_size_or_mechanism(tmp_path):
    path = save(nano(), tmp_path / "model.safetensors")
    other = load(path, model=nano(img_size=12, attention="softmax"))
    assert other.pos_embed.shape == (1, 37, 64)
    assert other.blocks[0].attn.mechanism.name == "softmax"
    assert torch.equal(other.head.weight, nano().head.weight)


def test_a_failed_save_leaves_the_old_file_and_no_other(tmp_path, monkeypatch):
    path = save(nano(), tmp_path / "model.safetensors")
    before = path.read_bytes()

    def broken(*_):
        raise OSError("disk full")

    monkeypatch.setattr(os, "fsync", broken)
    with pytest.raises(OSError, match="disk full"):
        save(nano(attention="softmax"), path)
    assert path.read_bytes() == before
    assert os.listdir(tmp_path) == ["model.safetensors"]


def test_a_model_without_config_needs_to_be_given_when_loading(tmp_path):
    model = VisionTransformer(img_size=8, patch_size=2, embed_dim=16, depth=1, num_heads=2, num_classes=3)
    path = save(model, tmp_path / "model.safetensors")
    with pytest.raises(ValueError, match="does not say which model it holds; pass that model"):
        load(path)
    assert torch.equal(load(path, model=model).head.weight, model.head.weight)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"no checkpoint at .*nothing"):
        load(tmp_path / "nothing")
