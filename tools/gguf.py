"""Weights and tokenizer of a Llama out of a GGUF file, by numpy: enough of the format for SmolLM2 and Gemma (`gemma`).

header:  "GGUF", version, number of tensors, number of fields, the fields (name, kind, value)
tensors: name, sizes (the fastest first), kind, offset; the data follow, aligned
Q8_0:    32 numbers as a scale (float16) and 32 bytes;  Q4_1: scale, smallest (float16), and 32 halves of bytes
Q5_0:    32 numbers as a scale, the highest bit of each, and 32 halves of bytes; 16 is 0
Q4_K:    256 numbers as a scale and a smallest, of which eight parts have 6 bits each, and 256 halves of bytes
Q6_K:    256 numbers as 4 lower and 2 upper bits each, sixteen parts with a byte of a scale; 32 is 0
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
TEXT, ARRAY = 8, 9
CONTROL = 3  # token_type of a special token
SPECIAL = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
KINDS = {  # numbers of a block, its bytes
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    8: ("Q8_0", 32, 34),
    12: ("Q4_K", 256, 144),
    14: ("Q6_K", 256, 210),
}
NAMES = (
    ("token_embd.", "model.embed_tokens."),
    ("output_norm.", "model.norm."),
    ("blk.", "model.layers."),
    (".attn_q.", ".self_attn.q_proj."),
    (".attn_k.", ".self_attn.k_proj."),
    (".attn_v.", ".self_attn.v_proj."),
    (".attn_output.", ".self_attn.o_proj."),
    (".ffn_gate.", ".mlp.gate_proj."),
    (".ffn_up.", ".mlp.up_proj."),
    (".ffn_down.", ".mlp.down_proj."),
    (".attn_norm.", ".input_layernorm."),
    (".ffn_norm.", ".post_attention_layernorm."),
)


class Gguf:
    """`fields` by name, and `tensor(name)` in float32."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0
        if data[:4] != b"GGUF" or struct.unpack_from("<I", data, 4)[0] not in (2, 3):
            raise ValueError(f"this is no GGUF file of version 2 or 3: it begins with {data[:8]!r}")
        self.at = 8
        tensors, fields = self._scalar("Q"), self._scalar("Q")
        self.fields = {self._text(): self._value(self._scalar("I")) for _ in range(fields)}
        self.tensors: dict[str, tuple[list[int], int, int]] = {}
        for _ in range(tensors):
            name = self._text()
            sizes = [self._scalar("Q") for _ in range(self._scalar("I"))]
            self.tensors[name] = sizes, self._scalar("I"), self._scalar("Q")
        align = int(self.fields.get("general.alignment", 32))
        self.start = -(-self.at // align) * align

    def _scalar(self, kind: str) -> Any:
        (found,) = struct.unpack_from("<" + kind, self.data, self.at)
        self.at += struct.calcsize("<" + kind)
        return found

    def _text(self) -> str:
        size = self._scalar("Q")
        self.at += size
        return self.data[self.at - size : self.at].decode()

    def _value(self, kind: int) -> Any:
        if kind == TEXT:
            return self._text()
        if kind == ARRAY:
            kind = self._scalar("I")
            return [self._value(kind) for _ in range(self._scalar("Q"))]
        return self._scalar(SCALARS[kind])

    def tensor(self, name: str) -> Tensor:
        sizes, kind, offset = self.tensors[name]
        if kind not in KINDS:
            raise ValueError(f"{name} is stored as kind {kind} of GGUF; known here: {[x[0] for x in KINDS.values()]}")
        what, block, size = KINDS[kind]
        blocks = int(np.prod(sizes)) // block
        raw = np.frombuffer(self.data, np.uint8, blocks * size, self.start + offset).reshape(blocks, size)
        return torch.from_numpy(_numbers(what, raw)).reshape(sizes[::-1])


def _numbers(what: str, raw: np.ndarray) -> np.ndarray:
    """Float32 (blocks, numbers) of blocks of bytes (blocks, bytes)."""
    if what in ("F32", "F16"):
        return raw.reshape(-1).view(f"<f{raw.shape[1]}").astype(np.float32)
    if what == "Q6_K":
        lower, upper = _halves(raw[:, :128], 64), raw[:, 128:192].reshape(-1, 2, 1, 32)
        upper = upper >> np.array([0, 2, 4, 6], np.uint8)[:, None] & 3
        numbers = (lower.reshape(-1, 8, 32) | upper.reshape(-1, 8, 32) << 4).astype(np.float32) - 32
        scale = _half(raw[:, 208:]) * raw[:, 192:208].view(np.int8)
        return (scale[..., None] * numbers.reshape(-1, 16, 16)).reshape(len(raw), 256)
    scale = _half(raw[:, :2])
    if what == "Q8_0":
        return scale * raw[:, 2:].view(np.int8)
    if what == "Q5_0":
        highest = np.unpackbits(raw[:, 2:6], axis=1, bitorder="little")
        return scale * ((_halves(raw[:, 6:], 16).reshape(-1, 32) | highest << 4).astype(np.float32) - 16)
    least = _half(raw[:, 2:4])
    if what == "Q4_1":
        return scale * _halves(raw[:, 4:], 16).reshape(-1, 32) + least
    first, second, both = raw[:, 4:16].reshape(-1, 3, 4).transpose(1, 0, 2)  # Q4_K: 8 scales and 8 smallest of 6 bits
    scales = np.concatenate((first & 63, both & 15 | first >> 2 & 48), 1)
    leasts = np.concatenate((second & 63, both >> 4 | second >> 2 & 48), 1)
    numbers = _halves(raw[:, 16:], 32).reshape(-1, 8, 32)
    return ((scale * scales)[..., None] * numbers - (least * leasts)[..., None]).reshape(len(raw), 256)


def _half(raw: np.ndarray) -> np.ndarray:
    """Float16 numbers in bytes (blocks, 2), as float32 (blocks, 1)."""
    return raw.copy().view("<f2").astype(np.float32)


def _halves(raw: np.ndarray, run: int) -> np.ndarray:
    """Bytes (blocks, n) as numbers of 4 bits (blocks, n / run, 2, run): of each run the lower ones, then the upper."""
    return raw.reshape(len(raw), -1, 1, run) >> np.array([0, 4], np.uint8)[:, None] & 15


def described(file: Gguf, architecture: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """The file's fields without the name of the architecture, and what configurations in transformers take of them."""
    if file.fields.get("general.architecture") != architecture:
        found = file.fields.get("general.architecture")
        raise ValueError(f"this GGUF file is a {found!r}; known here: {architecture!r}")
    f = {name.removeprefix(f"{architecture}."): x for name, x in file.fields.items()}
    return f, {
        "hidden_size": f["embedding_length"],
        "intermediate_size": f["feed_forward_length"],
        "num_hidden_layers": f["block_count"],
        "num_attention_heads": f["attention.head_count"],
        "num_key_value_heads": f["attention.head_count_kv"],
        "max_position_embeddings": f["context_length"],
        "rms_norm_eps": f["attention.layer_norm_rms_epsilon"],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "bos_token_id": f["tokenizer.ggml.bos_token_id"],
        "eos_token_id": f["tokenizer.ggml.eos_token_id"],
        "pad_token_id": f["tokenizer.ggml.padding_token_id"],
    }


def llama(file: Gguf) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Arguments of transformers' LlamaConfig, and the weights under the names of LlamaForCausalLM."""
    f, config = described(file, "llama")
    heads, key_heads = f["attention.head_count"], f["attention.head_count_kv"]
    config |= {
        "rope_parameters": {"rope_type": "default", "rope_theta": f["rope.freq_base"]},
        "vocab_size": f["vocab_size"],
    }
    state = {}
    for name in file.tensors:
        weight, known = file.tensor(name), name
        for old, new in NAMES:
            known = known.replace(old, new)
        if ".attn_q." in name or ".attn_k." in name:  # pairs of a rotation side by side there, halves apart here
            rows = heads if ".attn_q." in name else key_heads
            weight = weight.unflatten(0, (rows, -1, 2)).transpose(1, 2).reshape(weight.shape)
        state["lm_head.weight" if name == "output.weight" else known] = weight
    return config, state


def tokenizer(file: Gguf) -> Any:
    """The byte-level tokenizer of the file for transformers; digits stand alone, as SmolLM's do."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    f = {name.removeprefix("tokenizer.ggml."): x for name, x in file.fields.items() if "tokenizer." in name}
    if (f["model"], f["pre"]) != ("gpt2", "smollm"):
        raise ValueError(f"a tokenizer {f['model']!r} with words by {f['pre']!r}; known here: 'gpt2', 'smollm'")
    words = {word: i for i, word in enumerate(f["tokens"])}
    made = Tokenizer(models.BPE(words, [tuple(pair.split(" ")) for pair in f["merges"]]))
    bytes_of = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), bytes_of])
    made.decoder = decoders.ByteLevel()
    control = [word for word, kind in zip(f["tokens"], f["token_type"], strict=True) if kind == CONTROL]
    made.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in control])
    special = {name: f["tokens"][f[f"{key}_token_id"]] for name, key in SPECIAL.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=made, chat_template=file.fields.get("tokenizer.chat_template"), **special
    )


def read(*parts: Path) -> Gguf:
    """A file, or the parts it was cut into."""
    return Gguf(b"".join(part.read_bytes() for part in parts))
