"""Modules that compute attention themselves: found by what they do, replaced where that is plain softmax."""

import copy
import math
import pickle

import pytest
import torch
import torch.nn.functional as F
from small_models import transformers
from torch import nn

from cumulant.conversion import convert, load, restore, save
from cumulant.nn.swapped.inside import discovering
from cumulant.nn.swapped.logits import Logits
from tools.tiny_models import tiny_model

TOKENS = torch.randn(2, 9, 16, generator=torch.Generator().manual_seed(3))


class Attention(nn.Module):
    """Plain attention, written in one of many ways."""

    def __init__(self, way="matmul"):
        super().__init__()
        self.way, self.num_heads = way, 4
        self.qkv, self.proj, self.bias = nn.Linear(16, 48), nn.Linear(16, 16), nn.Parameter(torch.randn(9, 9))
        self.attn_drop = nn.Dropout(0.0)
        nn.init.normal_(self.qkv.weight, std=0.5)

    def forward(self, x):
        q, k, v = self.qkv(x).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
        return self.proj(getattr(self, self.way)(q, k, v).transpose(1, 2).flatten(2))

    def matmul(self, q, k, v):
        return self.attn_drop(torch.matmul(q, k.transpose(-1, -2)).div(2.0).softmax(dim=-1)) @ v

    def fused(self, q, k, v):
        return F.scaled_dot_product_attention(q, k, v)

    def einsum(self, q, k, v):
        A = torch.einsum("bhid,bhjd->bhij", q * 0.5, k).softmax(-1)
        return torch.einsum("bhij,bhjd->bhid", A, v)

    def bmm(self, q, k, v):
        q, k, v = (x.reshape(-1, 9, 4) for x in (q, k, v))
        A = F.softmax(torch.bmm(q, k.transpose(1, 2)).view(2, 4, 9, 9) * 0.5, dim=-1).view(8, 9, 9)
        return torch.bmm(A, v).view(2, 4, 9, 4)

    def causal(self, q, k, v):
        A = (q @ k.mT) / math.sqrt(4)
        A = A.masked_fill(torch.ones(9, 9).triu(1).bool(), torch.finfo(A.dtype).min)
        return nn.Softmax(dim=-1)(A).to(v.dtype) @ v

    def where(self, q, k, v):
        A = torch.where(torch.ones(9, 9).tril().bool(), (q @ k.mT) * 0.5, torch.tensor(-1e9))
        return F.dropout(A.softmax(-1), 0.1, self.training) @ v

    def in_place(self, q, k, v):
        A = q @ k.mT
        A.mul_(0.5)
        A.masked_fill_(torch.ones(9, 9).triu(1).bool().expand(2, 4, 9, 9), -torch.inf)
        return A.softmax(-1) @ v

    def padded_in_place(self, q, k, v):
        absent = torch.zeros(2, 9, dtype=torch.bool)
        absent[1, 6:] = True
        A = (q @ k.mT).div_(2.0)
        A.masked_fill_(absent.view(2, 1, 1, 9).expand_as(A), torch.finfo(A.dtype).min)
        return A.softmax(-1) @ v

    def padded_in_a_view(self, q, k, v):
        absent = torch.zeros(2, 1, 9, 9, dtype=torch.bool)
        absent[1, ..., 6:] = True
        A = torch.bmm(q.flatten(0, 1), k.flatten(0, 1).mT).mul_(0.5)
        A.view(2, 4, 9, 9).masked_fill_(absent, -torch.inf)
        return (A.softmax(-1) @ v.flatten(0, 1)).unflatten(0, (2, 4))

    @torch.no_grad()
    def padded_into(self, q, k, v):
        absent = torch.zeros(2, 1, 1, 9)
        absent[1, ..., 6:] = -1e9
        A, made = (q @ k.mT) * 0.5, torch.empty(2, 4, 9, 4)
        torch.add(A, absent, out=A)
        torch.matmul(A.softmax(-1), v, out=made)
        return made

    def padded(self, q, k, v):
        absent = torch.zeros(2, 1, 1, 9)
        absent[1, ..., 6:] = -1e9
        return ((q @ k.mT) * 0.5 + absent).softmax(-1) @ v

    def summed(self, q, k, v):
        q, k, v = (x.reshape(-1, 9, 4) for x in (q, k, v))
        A = torch.baddbmm(torch.zeros(8, 9, 9), q, k.mT, beta=1.0, alpha=0.5)
        return torch.bmm(A.softmax(-1), v).view(2, 4, 9, 4)

    def kept_above(self, q, k, v):
        least = torch.finfo(q.dtype).min
        A = (q @ k.mT) * 0.5 + torch.full((9, 9), least).triu(1)
        return torch.max(A, torch.tensor(least)).clamp(min=least).softmax(-1) @ v

    def capped(self, q, k, v):
        return ((q @ k.mT) * 0.5).clamp(max=1.0).softmax(-1) @ v

    def capped_in_place(self, q, k, v):
        A = (q @ k.mT) * 0.5
        A.clamp_(max=1.0)
        return A.softmax(-1) @ v

    def masked_by_part(self, q, k, v):
        A = (q @ k.mT) * 0.5
        for head in range(4):
            A.select(1, head).masked_fill_(torch.ones(9, 9).triu(1).bool(), -torch.inf)
        return A.softmax(-1) @ v

    def masked_as_data(self, q, k, v):
        A = (q @ k.mT) * 0.5
        A.data.masked_fill_(torch.ones(9, 9).triu(1).bool(), -torch.inf)
        return A.softmax(-1) @ v

    def positions(self, q, k, v):
        return ((q @ k.mT) * 0.5 + self.bias).softmax(-1) @ v

    def changed(self, q, k, v):
        A = (q @ k.mT) * 0.5
        A[..., 1:, 1:] += 1.0
        return A.softmax(-1) @ v

    def powers(self, q, k, v):
        return (q @ k.mT).softmax(-1).square() @ v

    def channels(self, q, k, v):
        return ((q.mT @ k) * 0.1).softmax(-1).matmul(v.mT).mT


class Model(nn.Module):
    def __init__(self, way="matmul"):
        super().__init__()
        self.attn = Attention(way)

    def forward(self, x):
        return x + self.attn(x)


PLAIN = (
    *("matmul", "fused", "einsum", "bmm", "causal", "where", "padded", "summed", "kept_above"),
    *("in_place", "padded_in_place", "padded_in_a_view", "padded_into"),
)


def model_of(way):
    torch.manual_seed(0)
    return Model(way).eval()


@pytest.mark.parametrize("way", PLAIN)
def test_plain_attention_is_found_however_it_is_written_and_computes_the_mechanism(way):
    """Third order computed by the public function from the projections is what the converted model says."""
    import cumulant

    model = model_of(way)
    q, k, v = model.attn.qkv(TOKENS).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
    mask = None
    if way.startswith("padded"):
        mask = torch.ones(2, 9, dtype=torch.bool)
        mask[1, 6:] = False
    causal = way in ("causal", "where", "kept_above", "in_place")
    out = cumulant.attention(q, k, v, order=3, is_causal=causal, key_mask=mask)
    wanted = TOKENS + model.attn.proj(out.transpose(1, 2).flatten(2))
    report = convert(model, "cumulant3", example=TOKENS)
    assert list(report.replaced) == ["attn"]
    torch.testing.assert_close(model(TOKENS), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("way", PLAIN)
def test_taken_back_it_says_what_it_said(way):
    model = model_of(way)
    said = model(TOKENS)
    convert(model, "cumulant2", example=TOKENS)
    assert not torch.allclose(model(TOKENS), said, atol=1e-4)
    restore(model)
    torch.testing.assert_close(model(TOKENS), said, rtol=0, atol=0)
    assert "forward" not in model.attn.__dict__


@pytest.mark.parametrize(
    ("way", "reason"),
    [
        ("positions", "differs from head to head or from query to query"),
        ("changed", "does more to its logits than to scale and mask them"),
        ("powers", "does more to its logits than to scale and mask them"),
        ("masked_by_part", "does more to its logits than to scale and mask them"),
        ("masked_as_data", "does more to its logits than to scale and mask them"),
        ("capped_in_place", "does more to its logits than to scale and mask them"),
        ("capped", "does more to its logits than to scale and mask them"),
    ],
)
def test_what_is_more_than_softmax_is_refused_and_left_as_it_was(way, reason):
    model = model_of(way)
    said = model(TOKENS)
    with pytest.raises(ValueError, match=reason):
        convert(model, "cumulant3", example=TOKENS)
    torch.testing.assert_close(model(TOKENS), said, rtol=0, atol=0)


def test_attention_over_channels_is_linear_already():
    model, x = model_of("channels"), torch.randn(2, 7, 16)
    with pytest.raises(ValueError, match="attends over channels"):
        convert(model, "cumulant3", example=x)


def test_while_looking_a_module_says_exactly_what_it_says():
    for way in (*PLAIN, "positions", "changed", "powers"):
        model = model_of(way)
        said = model(TOKENS)
        with discovering(model, [model.attn]) as seen:
            torch.testing.assert_close(model(TOKENS), said, rtol=1e-5, atol=1e-6)
        assert seen, way


def test_gradients_reach_the_projections():
    model = model_of("matmul")
    convert(model, "cumulant3", example=TOKENS)
    model(TOKENS).square().sum().backward()
    assert all(p.grad.abs().sum() > 0 for p in model.attn.qkv.parameters())


def test_copies_and_pickles_compute_the_mechanism_with_weights_of_their_own():
    model = model_of("fused")
    convert(model, "cumulant2", example=TOKENS)
    said = model(TOKENS)
    for other in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        nn.init.zeros_(model.attn.proj.weight)
        torch.testing.assert_close(other(TOKENS), said)
        restore(other)
        assert not torch.allclose(other(TOKENS), said, atol=1e-4)
        model = other if other is not model else model
        convert(model, "cumulant2", example=TOKENS)


def test_it_is_saved_and_loaded_into_a_fresh_model(tmp_path):
    model = model_of("einsum")
    convert(model, "cumulant3", example=TOKENS)
    save(model, tmp_path)
    loaded = load(tmp_path, model=Model("einsum").eval(), example=TOKENS)
    torch.testing.assert_close(loaded(TOKENS), model(TOKENS))


@pytest.mark.parametrize("batch_first", [True, False])
def test_the_attention_of_torch_pads_as_it_did_and_gives_signed_weights(batch_first):
    import cumulant

    torch.manual_seed(0)
    layer = nn.MultiheadAttention(16, 4, batch_first=batch_first).eval()
    absent = torch.zeros(2, 9, dtype=torch.bool)
    absent[1, 5:] = True
    x = TOKENS if batch_first else TOKENS.transpose(0, 1)
    convert(layer, "cumulant3", example={"query": x, "key": x, "value": x, "key_padding_mask": absent})
    out, A = layer(x, x, x, key_padding_mask=absent)
    q, k, v = F.linear(TOKENS, layer.in_proj_weight, layer.in_proj_bias).unflatten(-1, (3, 4, 4)).permute(2, 0, 3, 1, 4)
    wanted = cumulant.attention(q, k, v, key_mask=~absent)
    wanted = layer.out_proj(wanted.transpose(1, 2).flatten(2))
    torch.testing.assert_close(out if batch_first else out.transpose(0, 1), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(A, cumulant.scores(q, k, key_mask=~absent).mean(1), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
def test_an_encoder_of_torch_is_converted_past_its_fast_path(causal):
    torch.manual_seed(0)
    made = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    model = nn.TransformerEncoder(made, 2).eval()
    mask = nn.Transformer.generate_square_subsequent_mask(9) if causal else None
    batch = {"src": TOKENS, "mask": mask, "is_causal": causal} if causal else {"src": TOKENS}
    report = convert(model, "cumulant3", example=batch)
    assert list(report.replaced) == ["layers.0.self_attn", "layers.1.self_attn"]
    with torch.no_grad():
        said = model(**batch)
        later = {**batch, "src": torch.cat((TOKENS[:, :8], torch.ones(2, 1, 16)), 1)}
        assert torch.allclose(model(**later)[:, :8], said[:, :8], atol=1e-6) is causal
    restore(model)
    assert model.layers[0].activation_relu_or_gelu == made.activation_relu_or_gelu == 1
    assert model.use_nested_tensor


@pytest.mark.parametrize(
    ("name", "sizes", "replaced"),
    [
        ("GPTJ", {"n_embd": 32, "n_layer": 2, "n_head": 4, "rotary_dim": 4, "vocab_size": 60}, 2),
        ("BlipVision", {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "image_size": 32}, 2),
    ],
)
def test_models_of_transformers_that_never_ask_the_registry(name, sizes, replaced):
    t = transformers()
    torch.manual_seed(0)
    model = getattr(t, f"{name}Model")(getattr(t, f"{name}Config")(**sizes)).eval()
    assert len(convert(model, "cumulant3").replaced) == replaced


@pytest.mark.parametrize("name", ["XGLMModel", "GPTNeoXJapaneseModel"])
def test_decoders_that_sum_from_zeros_or_keep_logits_above_the_least_number(name):
    """And that stay causal: the last token moves nothing before it."""
    model = tiny_model(getattr(transformers(), name))
    assert len(convert(model, "cumulant3").replaced) == 2
    ids = torch.randint(5, 60, (1, 12), generator=torch.Generator().manual_seed(0))
    other = ids.clone()
    other[0, -1] = 61
    with torch.no_grad():
        before, after = (model(input_ids=x).last_hidden_state for x in (ids, other))
    torch.testing.assert_close(before[:, :-1], after[:, :-1], rtol=1e-4, atol=1e-5)
    assert not torch.allclose(before[:, -1], after[:, -1], atol=1e-3)


def test_a_converted_decoder_that_never_asks_generates_what_a_whole_pass_says():
    t = transformers()
    torch.manual_seed(0)
    config = t.GPTJConfig(n_embd=32, n_layer=2, n_head=4, rotary_dim=4, vocab_size=60, n_positions=32)
    model = t.GPTJForCausalLM(config).eval()
    convert(model, "cumulant3")
    ids = torch.randint(3, 60, (2, 5))
    made = model.generate(ids, max_new_tokens=4, min_new_tokens=4, do_sample=False, pad_token_id=0)
    torch.testing.assert_close(model(made[:, :-1]).logits.argmax(-1)[:, 4:], made[:, 5:])


@pytest.mark.parametrize("name", ["MPNet", "DebertaV2"])
def test_a_position_bias_is_refused_by_name(name):
    t = transformers()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 32}
    extra = {"relative_attention": True, "pos_att_type": ["c2p"]} if name == "DebertaV2" else {}
    model = getattr(t, f"{name}Model")(getattr(t, f"{name}Config")(**sizes, **extra, vocab_size=60)).eval()
    with pytest.raises(ValueError, match="logits"):
        convert(model, "cumulant3")


def test_logits_are_never_formed_for_a_plain_module(monkeypatch):
    model = model_of("matmul")
    convert(model, "cumulant2", example=TOKENS)
    monkeypatch.setattr(Logits, "actual", lambda self: pytest.fail("logits were formed"))
    model(TOKENS)
