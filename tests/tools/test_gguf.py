"""A GGUF file written here, number by number, and read again."""

import struct

import numpy as np
import pytest
import torch

from tools.gemma import gemma3
from tools.gguf import Gguf, llama
from tools.language import opened


def text(word):
    return struct.pack("<Q", len(word.encode())) + word.encode()


def kind_and_bytes(value):
    if isinstance(value, str):
        return 8, text(value)
    if isinstance(value, list):
        kinds, parts = zip(*map(kind_and_bytes, value), strict=True)
        return 9, struct.pack("<IQ", kinds[0], len(value)) + b"".join(parts)
    return (6, struct.pack("<f", value)) if isinstance(value, float) else (4, struct.pack("<I", value))


def field(name, value):
    kind, raw = kind_and_bytes(value)
    return text(name) + struct.pack("<I", kind) + raw


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
                "other": ((32, 1), 2, bytes(18)),
            },
        )
    )
    assert file.fields == {"general.name": "a"}
    np.testing.assert_array_equal(file.tensor("plain"), plain)
    np.testing.assert_array_equal(file.tensor("eight"), 0.25 * eight)
    np.testing.assert_array_equal(file.tensor("four"), 0.5 * halves - 3.0)
    with pytest.raises(ValueError, match=r"other is stored as kind 2 of GGUF; known here: \['F32'"):
        file.tensor("other")


def halves(lower, upper):
    return (lower | upper << 4).astype(np.uint8).tobytes()


def test_numbers_of_five_and_six_bits_and_of_parts_with_scales_come_back():
    draw = np.random.default_rng(1)
    five, six, four = (draw.integers(0, top, count) for top, count in ((32, 32), (64, 256), (16, 256)))
    scales, leasts, signed = draw.integers(0, 64, 8), draw.integers(0, 64, 8), draw.integers(-128, 128, 16)
    q5 = np.float16(0.5).tobytes() + np.packbits(five >> 4, bitorder="little").tobytes()
    q5 += halves(five[:16] & 15, five[16:] & 15)
    q4 = np.float16([0.25, 0.5]).tobytes()
    for a in (scales, leasts):  # six bits of the first four, two upper bits of the others
        q4 += (a[:4] | a[4:] >> 4 << 6).astype(np.uint8).tobytes()
    q4 += halves(scales[4:] & 15, leasts[4:] & 15)
    q4 += b"".join(halves(x[:32], x[32:]) for x in four.reshape(4, 64))
    q6 = b"".join(halves(x[:64] & 15, x[64:] & 15) for x in six.reshape(2, 128))
    quarters = (six >> 4).reshape(2, 4, 32)
    q6 += sum(quarters[:, i] << 2 * i for i in range(4)).astype(np.uint8).tobytes()
    q6 += signed.astype(np.int8).tobytes() + np.float16(2.0).tobytes()
    file = Gguf(written({}, {"q5": ((32,), 6, q5), "q4": ((256,), 12, q4), "q6": ((256,), 14, q6)}))
    np.testing.assert_array_equal(file.tensor("q5"), 0.5 * (five - 16))
    parts = four.reshape(8, 32) * 0.25 * scales[:, None] - 0.5 * leasts[:, None]
    np.testing.assert_array_equal(file.tensor("q4"), parts.reshape(-1))
    np.testing.assert_array_equal(file.tensor("q6"), (2.0 * signed[:, None] * (six.reshape(16, 16) - 32)).reshape(-1))


def test_what_is_no_llama_and_no_gguf_is_said():
    with pytest.raises(ValueError, match="no GGUF file"):
        Gguf(b"PK\x03\x04" + bytes(20))
    with pytest.raises(ValueError, match="is a 'gemma3'; known here: 'llama'"):
        llama(Gguf(written({"general.architecture": "gemma3"}, {})))
    with pytest.raises(ValueError, match="is a 'llama'; known here: 'gemma3'"):
        gemma3(Gguf(written({"general.architecture": "llama"}, {})))
    with pytest.raises(ValueError, match="is a 'mamba'; known here: 'llama', 'gemma3'"):
        opened(Gguf(written({"general.architecture": "mamba"}, {})))


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


def gemma_file(leave_out=()):
    """A Gemma 3 of seven layers and eight words, every weight its own number."""
    words = ["<pad>", "<eos>", "<bos>", "<unk>", "a", "b", "▁", "ab", "  ", "ab▁"]
    sizes = {"embedding_length": 4, "feed_forward_length": 6, "block_count": 7, "context_length": 64}
    sizes |= {"attention.head_count": 2, "attention.head_count_kv": 1, "attention.key_length": 2}
    sizes |= {"attention.sliding_window": 16, "attention.layer_norm_rms_epsilon": 1e-6, "rope.freq_base": 1e6}
    fields = {"general.architecture": "gemma3", **{f"gemma3.{name}": x for name, x in sizes.items()}}
    special = {"bos": 2, "eos": 1, "unknown": 3, "padding": 0}
    fields |= {f"tokenizer.ggml.{name}_token_id": at for name, at in special.items()}
    fields |= {"tokenizer.ggml.model": "llama", "tokenizer.ggml.add_bos_token": 1, "tokenizer.ggml.tokens": words}
    fields["tokenizer.ggml.token_type"] = [3, 3, 3, 3, 1, 1, 1, 1, 4, 1]
    shapes = {"token_embd": (4, len(words)), "output_norm": (4,)}
    layer = {"attn_q": (4, 4), "attn_k": (4, 2), "attn_v": (4, 2), "attn_output": (4, 4), "ffn_down": (6, 4)}
    layer |= {"ffn_gate": (4, 6), "ffn_up": (4, 6), "attn_q_norm": (2,), "attn_k_norm": (2,)}
    layer |= dict.fromkeys(("attn_norm", "ffn_norm", "post_attention_norm", "post_ffw_norm"), (4,))
    shapes |= {f"blk.{i}.{name}": shape for i in range(7) for name, shape in layer.items()}
    draw = np.random.default_rng(0)
    tensors = {
        f"{name}.weight": (shape, 0, draw.normal(size=shape).astype(np.float32).tobytes())
        for name, shape in shapes.items()
        if name not in leave_out
    }
    return Gguf(written(fields, tensors))


def test_a_gemma_opens_with_its_windows_norms_and_words():
    pytest.importorskip("transformers")
    file = gemma_file()
    model, words = opened(file)
    assert model.config.layer_types == ["sliding_attention"] * 5 + ["full_attention", "sliding_attention"]
    assert model.config.sliding_window == 16
    assert model.config.rope_parameters["sliding_attention"]["rope_theta"] == 1e4
    assert model.config.rope_parameters["full_attention"]["rope_theta"] == 1e6
    state = model.state_dict()
    assert torch.equal(state["model.norm.weight"], file.tensor("output_norm.weight") - 1)
    assert torch.equal(
        state["model.layers.6.pre_feedforward_layernorm.weight"], file.tensor("blk.6.ffn_norm.weight") - 1
    )
    assert torch.equal(state["model.layers.5.self_attn.q_proj.weight"], file.tensor("blk.5.attn_q.weight"))
    assert torch.equal(state["lm_head.weight"], file.tensor("token_embd.weight"))
    ids = words("ab a  b").input_ids  # "ab" and the space before it; two spaces are one word
    assert ids == [2, 9, 4, 8, 5]
    assert words.decode(ids, skip_special_tokens=True) == "ab a  b"


def test_a_gemma_that_lacks_a_weight_is_refused_by_its_name():
    pytest.importorskip("transformers")
    with pytest.raises(ValueError, match=r"another revision(.|\n)*layers\.3\.mlp\.up_proj"):
        opened(gemma_file(leave_out=("blk.3.ffn_up",)))
