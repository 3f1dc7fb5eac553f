"""Small, randomly initialised models of transformers and timm: convert, forward, backward, save, load, compile.

    pip install transformers timm
    python benchmarks/convert_models.py

Prints one row for each model, and the message where a model is refused; writes benchmarks/results/convert-models.json.
"""

from __future__ import annotations

import json
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from cumulant.bench.provenance import provenance
from cumulant.conversion import convert, load, save
from cumulant.inspect.batches import answer, call
from cumulant.inspect.examples import example_for

TEXT = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
SPECIAL = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2}
IMAGE = {**TEXT, "image_size": 32, "patch_size": 8}


def transformers_models() -> dict[str, Callable[[], Any]]:
    import transformers as t

    clip_text, clip_image = {**TEXT, "vocab_size": 99}, IMAGE
    sizes = {"d_model": 32, "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 4,
             "decoder_attention_heads": 4, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64}  # fmt: skip
    return {
        "ViT": lambda: t.ViTModel(t.ViTConfig(**IMAGE)),
        "DINOv2": lambda: t.Dinov2Model(t.Dinov2Config(**{k: v for k, v in IMAGE.items() if k != "intermediate_size"})),
        "CLIP": lambda: t.CLIPModel(t.CLIPConfig(text_config=clip_text, vision_config=clip_image, projection_dim=16)),
        "SigLIP": lambda: t.SiglipModel(t.SiglipConfig(text_config=clip_text, vision_config=clip_image)),
        "ViViT": lambda: t.VivitModel(t.VivitConfig(**TEXT, image_size=32, num_frames=4, tubelet_size=[2, 8, 8])),
        "VideoMAE": lambda: t.VideoMAEModel(t.VideoMAEConfig(**IMAGE, num_frames=4, tubelet_size=2)),
        "BERT": lambda: t.BertModel(t.BertConfig(**TEXT, vocab_size=99)),
        "Llama": lambda: t.LlamaForCausalLM(t.LlamaConfig(**TEXT, num_key_value_heads=2, vocab_size=99)),
        "GPT-2": lambda: t.GPT2LMHeadModel(
            t.GPT2Config(n_embd=32, n_layer=2, n_head=4, vocab_size=99, bos_token_id=1, eos_token_id=1)
        ),
        "Mistral (window 4096)": lambda: t.MistralForCausalLM(
            t.MistralConfig(**TEXT, num_key_value_heads=2, vocab_size=99)
        ),
        "Mistral (window 4)": lambda: t.MistralForCausalLM(
            t.MistralConfig(**TEXT, num_key_value_heads=2, vocab_size=99, sliding_window=4)
        ),
        "Whisper": lambda: t.WhisperModel(
            t.WhisperConfig(
                **sizes,
                vocab_size=99,
                num_mel_bins=8,
                max_source_positions=16,
                max_target_positions=16,
                pad_token_id=0,
                bos_token_id=1,
                eos_token_id=2,
                decoder_start_token_id=1,
            )
        ),
        "T5": lambda: t.T5Model(
            t.T5Config(d_model=32, d_kv=8, num_layers=2, num_heads=4, d_ff=64, vocab_size=99, decoder_start_token_id=0)
        ),
        "Gemma 2": lambda: t.Gemma2ForCausalLM(
            t.Gemma2Config(**TEXT, **SPECIAL, num_key_value_heads=2, head_dim=8, vocab_size=99)
        ),
        "GPT-OSS": lambda: t.GptOssForCausalLM(
            t.GptOssConfig(
                **TEXT,
                **SPECIAL,
                num_key_value_heads=2,
                head_dim=8,
                vocab_size=99,
                num_local_experts=2,
                num_experts_per_tok=1,
            )
        ),
        "ModernBERT": lambda: t.ModernBertModel(
            t.ModernBertConfig(
                **TEXT,
                **SPECIAL,
                cls_token_id=1,
                sep_token_id=2,
                vocab_size=99,
                local_attention=4,
                global_attn_every_n_layers=2,
            )
        ),
        "Swin": lambda: t.SwinModel(
            t.SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4)
        ),
        "Swin v2": lambda: t.Swinv2Model(
            t.Swinv2Config(image_size=32, patch_size=4, embed_dim=16, depths=[1, 1], num_heads=[2, 2], window_size=4)
        ),
        "TimeSformer": lambda: t.TimesformerModel(t.TimesformerConfig(**IMAGE, num_frames=2)),
        "PVT": lambda: t.PvtModel(t.PvtConfig(image_size=64)),
    }


def timm_models() -> dict[str, Callable[[], Any]]:
    import timm

    names = {
        "vit_tiny_patch16_224": {"depth": 2},
        "deit_tiny_patch16_224": {"depth": 2},
        "vit_small_patch16_dinov3": {"depth": 2},
        "eva02_tiny_patch14_224": {"depth": 2},
        "vit_base_patch16_siglip_224": {"depth": 2, "embed_dim": 96, "num_heads": 4},
        "cait_xxs24_224": {"depth": 2},
        "beit_base_patch16_224": {"depth": 2},
        "swin_tiny_patch4_window7_224": {},
        "vit_relpos_small_patch16_224": {"depth": 2},
        "xcit_nano_12_p16_224": {},
    }
    return {
        f"timm {name}": lambda name=name, kw=kw: timm.create_model(name, num_classes=10, **kw)
        for name, kw in names.items()
    }


def attempt(steps: dict[str, str], name: str, step: Callable[[], bool]) -> None:
    try:
        steps[name] = "yes" if step() else "differs"
    except Exception as error:
        steps[name] = f"{type(error).__name__}: {error}"


def examine(make: Callable[[], Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = make().eval()
    batch = example_for(model)
    try:
        report = convert(model, "cumulant3")
    except (ValueError, RuntimeError) as error:
        return {"refused": str(error)}
    row: dict[str, Any] = {"replaced": len(report.replaced), "layers": len(report.replaced) + len(report.kept)}
    row["kept"] = dict(report.kept)
    steps: dict[str, str] = {}
    said = answer(call(model, batch))

    def same(x: torch.Tensor) -> bool:
        return bool(torch.allclose(x, said, atol=1e-5, rtol=1e-4))

    def forward() -> bool:
        return bool(said.isfinite().all())

    def backward() -> bool:
        model.train()
        model.zero_grad()
        answer(call(model, batch)).float().square().mean().backward()
        model.eval()
        return all(p.grad.isfinite().all() for p in model.parameters() if p.grad is not None)

    def save_and_load() -> bool:
        with tempfile.TemporaryDirectory() as folder:
            save(model, folder)
            options = {"model": make()} if hasattr(model, "pretrained_cfg") else {}
            return same(answer(call(load(folder, **options).eval(), batch)))

    def compiled() -> bool:
        torch._dynamo.reset()
        return same(answer(call(torch.compile(model, backend="aot_eager"), batch)))

    for name, step in {
        "forward": forward,
        "save and load": save_and_load,
        "compile": compiled,
        "backward": backward,
    }.items():
        attempt(steps, name, step)
    return {**row, **steps}


def main() -> None:
    warnings.filterwarnings("ignore")
    wanted = {**transformers_models(), **timm_models()}
    rows = {}
    for name, make in wanted.items():
        row = rows[name] = examine(make)
        if "refused" in row:
            print(f"{name:34s} refused: {row['refused'][:220]}", flush=True)
        else:
            steps = ("forward", "backward", "save and load", "compile")
            rest = "  ".join(f"{step} {row[step][:160]}" for step in steps)
            print(f"{name:34s} {row['replaced']} of {row['layers']}  {rest}", flush=True)
    out = Path("benchmarks/results/convert-models.json") if len(sys.argv) < 2 else Path(sys.argv[1])
    out.write_text(json.dumps({**provenance("python benchmarks/convert_models.py"), "models": rows}, indent=1))


if __name__ == "__main__":
    main()
