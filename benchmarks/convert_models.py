"""Small, randomly initialised models of transformers and timm: convert, forward, backward, save, load, compile.

    pip install transformers timm
    PYTHONPATH=src:. python benchmarks/convert_models.py

Prints one row for each model; writes benchmarks/results/convert-models.json. `python -m tools.survey` converts every
class there is, and says why others are refused.
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
from tools.tiny_models import tiny_model

CLASSES: dict[str, tuple[str, dict[str, Any]]] = {
    "ViT": ("ViTModel", {}),
    "DINOv2": ("Dinov2Model", {}),
    "CLIP": ("CLIPModel", {}),
    "SigLIP": ("SiglipModel", {}),
    "ViViT": ("VivitModel", {}),
    "VideoMAE": ("VideoMAEModel", {}),
    "BERT": ("BertModel", {}),
    "Llama": ("LlamaForCausalLM", {}),
    "GPT-2": ("GPT2LMHeadModel", {}),
    "Mistral (window 4096)": ("MistralForCausalLM", {}),
    "Whisper": ("WhisperModel", {}),
    "ModernBERT": ("ModernBertModel", {"local_attention": 4, "global_attn_every_n_layers": 2}),  # every other one local
    "TimeSformer": ("TimesformerModel", {}),
    "PVT": ("PvtModel", {}),
}
TIMM: dict[str, dict[str, Any]] = {
    "vit_tiny_patch16_224": {"depth": 2},
    "deit_tiny_patch16_224": {"depth": 2},
    "vit_small_patch16_dinov3": {"depth": 2},
    "eva02_tiny_patch14_224": {"depth": 2},
    "vit_base_patch16_siglip_224": {"depth": 2, "embed_dim": 96, "num_heads": 4},
    "cait_xxs24_224": {"depth": 2},
    "xcit_nano_12_p16_224": {},
}


def models() -> dict[str, Callable[[], Any]]:
    import timm
    import transformers

    def of_transformers(name: str, options: dict[str, Any]) -> Callable[[], Any]:
        return lambda: tiny_model(getattr(transformers, name), **options)

    def of_timm(name: str, options: dict[str, Any]) -> Callable[[], Any]:
        return lambda: timm.create_model(name, num_classes=10, **options)

    made = {name: of_transformers(*one) for name, one in CLASSES.items()}
    return made | {f"timm {name}": of_timm(name, options) for name, options in TIMM.items()}


def attempt(steps: dict[str, str], name: str, step: Callable[[], bool]) -> None:
    try:
        steps[name] = "yes" if step() else "differs"
    except Exception as error:
        steps[name] = f"{type(error).__name__}: {error}"


def examine(make: Callable[[], Any]) -> dict[str, Any]:
    torch.manual_seed(0)
    model = make().eval()
    batch = example_for(model)
    report = convert(model, "cumulant3")
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
    rows = {}
    for name, make in models().items():
        row = rows[name] = examine(make)
        steps = ("forward", "backward", "save and load", "compile")
        rest = "  ".join(f"{step} {row[step][:160]}" for step in steps)
        print(f"{name:36s} {row['replaced']} of {row['layers']}  {rest}", flush=True)
    out = Path("benchmarks/results/convert-models.json") if len(sys.argv) < 2 else Path(sys.argv[1])
    out.write_text(json.dumps({**provenance("python benchmarks/convert_models.py"), "models": rows}, indent=1))


if __name__ == "__main__":
    main()
