"""Language models for transformers out of GGUF files: weights, tokenizer, and a look whether they speak."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cumulant.train.files import filling

from . import gemma, gguf
from .gguf import Gguf


def opened(file: Gguf) -> tuple[Any, Any]:
    """Model and tokenizer of a GGUF file, a Llama's or a Gemma 3's."""
    from transformers import Gemma3ForCausalLM, Gemma3TextConfig, LlamaConfig, LlamaForCausalLM

    kinds: dict[Any, tuple[Any, Any, Any, Any]] = {
        "llama": (LlamaForCausalLM, LlamaConfig, gguf.llama, gguf.tokenizer),
        "gemma3": (Gemma3ForCausalLM, Gemma3TextConfig, gemma.gemma3, gemma.tokenizer),
    }
    kind = file.fields.get("general.architecture")
    if kind not in kinds:
        raise ValueError(f"this GGUF file is a {kind!r}; known here: {', '.join(map(repr, kinds))}")
    model_class, config_class, read, tokenizer = kinds[kind]
    arguments, state = read(file)
    model = model_class(config_class(**arguments)).eval()
    if arguments["tie_word_embeddings"]:
        state["lm_head.weight"] = state["model.embed_tokens.weight"]
    try:
        model.load_state_dict(state)
    except RuntimeError as error:
        raise ValueError(f"weights of another revision: {error}") from error
    return model, tokenizer(file)


@torch.no_grad()
def kept(file: Gguf, out: Path, beginning: str, end: str) -> Path:
    """The model of a file in a folder for `AutoModelForCausalLM`, if it goes on with `end` after `beginning`.

    No package has a runtime to compare with that pip can fetch. By hand: weights, tokens of a book and logits of the
    first 512 are those that transformers' own reader gives for SmolLM2 and Gemma 3, bit by bit.
    """
    model, words = opened(file)
    said = words.decode(model(**words(beginning, return_tensors="pt")).logits[0, -1].argmax())
    print(f"{beginning}{said}")
    if said != end:
        raise SystemExit(f"the converted model goes on with {said!r} in place of {end!r}: nothing was saved")
    with filling(out) as place:
        model.save_pretrained(place)
        words.save_pretrained(place)
    return out
