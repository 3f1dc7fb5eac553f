"""A GGUF file written here, number by number, and read again."""

import struct

import numpy as np
import pytest
import torch

from tools.gguf import Gguf, llama


def text(word):
    return struct.pack("<Q", len(word)) + word.encode()


def field(name, value):
    if isinstance(value, str):
        return text(name) + struct.pack("<I", 8) + text(value)
    return text(name) + (struct.pack("<If", 6, value) if isinstance(value, float) else struct.pack("<II", 4, value))


def written(fields, tensors):
    """tensors: name -> (sizes, kind, bytes)"""
    head = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(fields)) + b"".join(field(*x) for x in fields.items())
    data = b""
    for name, (sizes, kind, raw) in tensors.items():
        head += text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, kind, len(data))
        data += raw + bytes(-len(raw) % 32)
    return head + bytes(-len(head) % 32) + data


def test_numbers_of_every_kind_come_back():
    draw = np.random.default_rng(0)
    plain = draw.normal(size=(2, 3)).astype(np.float32)
    eight = draw.integers(-127, 127, (2, 32)).astype(np.int8)
    halves = draw.integers(0, 16, (1, 32)).astype(np.uint8)
    four = np.float16([0.5, -3.0]).tobytes() + (halves[:, :16] | halves[:, 16:] << 4).tobytes()
    file = Gguf(
        written(
            {"general.name": "a"},
            {
                "plain": ((3, 2), 0, plain.tobytes()),
                "eight": ((32, 2), 8, b"".join(np.float16(0.25).tobytes() + row.tobytes() for row in eight)),
                "four": ((32, 1), 3, four),
                "other": ((32, 1), 12, bytes(18)),
            },
        )
    )
    assert file.fields == {"general.name": "a"}
    np.testing.assert_array_equal(file.tensor("plain"), plain)
    np.testing.assert_array_equal(file.tensor("eight"), 0.25 * eight)
    np.testing.assert_array_equal(file.tensor("four"), 0.5 * halves - 3.0)
    with pytest.raises(ValueError, match=r"other is stored as kind 12 of GGUF; known here: \['F32'"):
        file.tensor("other")


def test_what_is_no_llama_and_no_gguf_is_said():
    with pytest.raises(ValueError, match="no GGUF file"):
        Gguf(b"PK\x03\x04" + bytes(20))
    with pytest.raises(ValueError, match="is a 'gemma3'; known here: 'llama'"):
        llama(Gguf(written({"general.architecture": "gemma3"}, {})))


def test_rows_of_queries_stand_as_rotations_in_transformers_want_them():
    """There the two numbers of a rotation are neighbours, here they are half a head apart."""
    names = ("embedding_length", "feed_forward_length", "block_count", "context_length", "vocab_size")
    fields = {"general.architecture": "llama", **{f"llama.{name}": 8 for name in names}}
    fields |= {"llama.attention.head_count": 2, "llama.attention.head_count_kv": 1, "llama.rope.freq_base": 1e4}
    fields |= {"llama.attention.layer_norm_rms_epsilon": 1e-5}
    fields |= {f"tokenizer.ggml.{name}_token_id": 0 for name in ("bos", "eos", "padding")}
    rows = np.arange(8, dtype=np.float32)
    file = Gguf(written(fields, {"blk.0.attn_q.weight": ((1, 8), 0, rows.tobytes())}))
    config, state = llama(file)
    assert state["model.layers.0.self_attn.q_proj.weight"].flatten().tolist() == [0, 2, 1, 3, 4, 6, 5, 7]
    assert config["num_key_value_heads"] == 1
    assert torch.is_tensor(state["model.layers.0.self_attn.q_proj.weight"])
