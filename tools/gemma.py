"""Weights and tokenizer of a Gemma 3 (text) out of a GGUF file, for transformers.

What a GGUF file of it does not say is as in all models of the family: five layers in six see a window of the text and
turn by rotations of base 10,000. Norms are stored as 1 + weight. The weights are under the Gemma Terms of Use
(https://ai.google.dev/gemma/terms), which bind who uses them; nothing of them is in this repository.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from .gguf import NAMES, SPECIAL, Gguf, described

CONTROL, OWN = 3, 4  # token_type of special tokens, and of others that are never cut
OTHER_NAMES = (
    (".post_attention_norm.", ".post_attention_layernorm."),
    (".ffn_norm.", ".pre_feedforward_layernorm."),
    (".post_ffw_norm.", ".post_feedforward_layernorm."),
    (".attn_q_norm.", ".self_attn.q_norm."),
    (".attn_k_norm.", ".self_attn.k_norm."),
)
PATTERN, LOCAL_BASE = 6, 1e4


def gemma3(file: Gguf) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments of transformers' Gemma3TextConfig, and the weights under the names of Gemma3ForCausalLM."""
    f, config = described(file, "gemma3")
    bases = {"sliding_attention": LOCAL_BASE, "full_attention": f["rope.freq_base"]}
    layers = range(1, f["block_count"] + 1)
    config |= {
        "head_dim": f["attention.key_length"],
        "query_pre_attn_scalar": f["attention.key_length"],
        "sliding_window": f["attention.sliding_window"],
        "layer_types": ["sliding_attention" if layer % PATTERN else "full_attention" for layer in layers],
        "rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in bases.items()},
        "vocab_size": len(f["tokenizer.ggml.tokens"]),
    }
    state = {}
    for name in file.tensors:
        known = name
        for old, new in (*OTHER_NAMES, *NAMES):
            known = known.replace(old, new)
        weight = file.tensor(name)
        state["lm_head.weight" if name == "output.weight" else known] = weight - 1 if "norm" in name else weight
    return config, state


def tokenizer(file: Gguf) -> Any:
    """Gemma's tokenizer: pairs merge in the order in which the file has what they make; bytes where nothing fits."""
    from tokenizers import AddedToken
    from transformers import GemmaTokenizer

    f = {name.removeprefix("tokenizer.ggml."): x for name, x in file.fields.items() if "tokenizer." in name}
    if f["model"] != "llama":
        raise ValueError(f"a tokenizer {f['model']!r}; known here: 'llama', which is SentencePiece's")
    words = ["▁" * len(word) if word.strip(" ") == "" else word for word in f["tokens"]]
    special = {name: words[f[f"{key}_token_id"]] for name, key in SPECIAL.items()}
    edges: dict[str, Any] = {name: bool(f.get(name, False)) for name in ("add_bos_token", "add_eos_token")}
    pairs: Any = merges(words)
    made = GemmaTokenizer(vocab={word: i for i, word in enumerate(words)}, merges=pairs, **special, **edges)
    kinds = list(zip(words, f["token_type"], strict=True))
    control = [AddedToken(word, normalized=False, special=True) for word, kind in kinds if kind == CONTROL]
    made.add_special_tokens({"additional_special_tokens": control}, replace_extra_special_tokens=False)
    made.add_tokens([AddedToken(word, normalized=False, special=False) for word, kind in kinds if kind == OWN])
    return made


def merges(words: list[str]) -> list[tuple[str, str]]:
    """All pairs of words that make a word, those of an earlier word first, and of earlier parts."""
    place = {word: i for i, word in enumerate(words)}
    found = []
    for word in words:
        cuts = ((word[:at], word[at:]) for at in range(1, len(word)))
        pairs = [(a, b) for a, b in cuts if a in place and b in place]
        found += sorted(pairs, key=lambda pair: (place[pair[0]], place[pair[1]]))
    return found
