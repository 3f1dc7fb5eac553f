"""Small, randomly initialised models of transformers and timm; a test of the latter is marked so (see conftest)."""

from typing import Any

import pytest
import torch

TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
TIMM = pytest.param("timm", marks=pytest.mark.timm)
IMAGE = {**TEXT, "image_size": 32, "patch_size": 8}
WORDS = 60


def transformers() -> Any:
    return pytest.importorskip("transformers")


def timm() -> Any:
    import timm

    return timm


def bert(**kw: Any) -> Any:
    """Weights five times the usual size, so that attention has something to say."""
    t = transformers()
    return t.BertModel(t.BertConfig(**{**TEXT, "vocab_size": WORDS, "initializer_range": 0.1, **kw})).eval()


def llama(**kw: Any) -> Any:
    t = transformers()
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
    sizes = {**TEXT, **special, "num_key_value_heads": 2, "vocab_size": WORDS, "initializer_range": 0.1}
    return t.LlamaForCausalLM(t.LlamaConfig(**{**sizes, **kw})).eval()


def whisper() -> Any:
    t = transformers()
    layers = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    sizes = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "num_mel_bins": 8, "vocab_size": WORDS}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "decoder_start_token_id": 1}
    lengths = {"max_source_positions": 16, "max_target_positions": 16}
    return t.WhisperModel(t.WhisperConfig(**layers, **sizes, **special, **lengths, init_std=0.1)).eval()


def vision(name: str, **kw: Any) -> Any:
    t = transformers()
    return getattr(t, f"{name}Model")(getattr(t, f"{name}Config")(**{**IMAGE, **kw})).eval()


def padded(side: str = "right") -> dict[str, torch.Tensor]:
    """Two texts of 9 and 6 tokens; the second is padded with token 0."""
    ids = torch.randint(3, WORDS, (2, 9), generator=torch.Generator().manual_seed(1))
    mask = torch.ones_like(ids)
    mask[1, slice(6, None) if side == "right" else slice(0, 3)] = 0
    return {"input_ids": ids * mask, "attention_mask": mask}


def vit(depth: int = 2, **kw: Any) -> Any:
    """timm's ViT, small."""
    sizes = {"img_size": 32, "patch_size": 8, "embed_dim": 32, "num_heads": 4, "num_classes": 5}
    return timm().models.vision_transformer.VisionTransformer(**{**sizes, "depth": depth, **kw}).eval()


def loud(model: Any, scale: float = 8.0) -> Any:
    """The model with larger query, key and value weights, so that its attention is far from uniform."""
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if any(part in name for part in ("qkv.weight", "q_proj.weight", "v_proj.weight")):
                parameter.mul_(scale)
    return model
