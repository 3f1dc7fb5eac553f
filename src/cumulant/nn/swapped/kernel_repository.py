"""A folder in the layout of kernel repositories, from which `kernels`, and so transformers, takes our names.

from cumulant.conversion import write_kernel_repository
write_kernel_repository("attention-kernels")

LOCAL_KERNELS=me/attention=attention-kernels python ...   # or pushed to a hub
model = AutoModel.from_pretrained(path, attn_implementation="me/attention:cumulant3", allow_all_kernels=True)
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from .choice import Choice, fitting

BACKENDS = ("cpu", "cuda", "rocm", "xpu", "metal")
CODE = '''"""Attention of linear cost for transformers: `attn_implementation="owner/repository:cumulant3"`."""

from cumulant.nn.swapped.kernel_repository import functions

globals().update(functions())
'''


def write_kernel_repository(folder: str | Path) -> Path:
    """Write the repository, whose code imports the installed `cumulant`; its folder. What is there must be its own."""
    folder = Path(folder)
    if folder.exists() and any(path.name != "build" for path in folder.iterdir()):
        raise FileExistsError(f"{folder} holds other things; name an empty folder or a new one")
    for backend in BACKENDS:
        home = folder / "build" / f"torch-{backend}"
        home.mkdir(parents=True, exist_ok=True)
        facts = {
            "id": f"cumulant_attention_{backend}", "name": "cumulant-attention", "version": 1, "license": "Apache-2.0",
            "backend": {"type": backend}, "python-depends": [],
        }  # fmt: skip
        (home / "metadata.json").write_text(json.dumps(facts, indent=1))
        (home / "__init__.py").write_text(CODE)
    return folder


def functions() -> dict[str, Any]:
    """By name, what transformers calls for each fitting mechanism."""
    ours = {name: _function(Choice.named(name)) for name in fitting()}
    # transformers refuses a repository that has none of the names it knows; it calls the function that is asked for.
    return {**ours, "flash_attn_forward": ours["cumulant3"]}


def _function(choice: Choice) -> Any:
    from .hf import _causal, _entry

    entry = _entry(choice)

    def attend(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **rest: Any
    ) -> tuple[Tensor, Tensor | None]:
        """transformers gives kernels the padding (B, Lk) alone; whether rows are causal, the layer says."""
        if attention_mask is not None and attention_mask.ndim == 2:
            present = attention_mask.bool()[:, None]
            causal = _causal(module, rest.get("is_causal"), None)
            attention_mask = present if causal else present[:, None]
        return entry(module, query, key, value, attention_mask, **rest)

    attend.__name__ = choice.attention
    return attend
