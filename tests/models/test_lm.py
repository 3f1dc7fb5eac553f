"""The language model: causal with every mechanism, the same text with and without a cache, reproducible drawing."""

import pytest
import torch

import cumulant
from cumulant import zoo
from cumulant.grammar import Registry
from cumulant.models import LanguageModel
from cumulant.nn import registry
from cumulant.nn.extras import rotate
from cumulant.nn.streams import KeysValues, Recomputed, Sums
from cumulant.train import load, save

CAUSAL = [name for name in zoo.names() if zoo.get(name).causal]
SMALL = {"num_classes": 11, "embed_dim": 16, "depth": 2, "num_heads": 2, "context": 40, "init_std": 0.3}


def small(attention="softmax", **options):
    torch.manual_seed(0)
    return LanguageModel(attention=attention, **{**SMALL, "dtype": torch.float64, **options}).eval()


def one_key_head(name):
    return {"num_kv_heads": 1} if zoo.get(name).grouped_queries else {}


def some_tokens(length=36):
    return torch.randint(0, 11, (2, length), generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", CAUSAL)
def test_a_token_acts_on_no_earlier_logits_and_on_its_own(name):
    model, tokens = small(name), some_tokens()
    other = tokens.clone()
    other[:, 20] = (other[:, 20] + 1) % 11
    before, after = model(tokens), model(other)
    torch.testing.assert_close(after[:, :20], before[:, :20], rtol=0, atol=1e-12)
    assert not torch.allclose(after[:, 20], before[:, 20])
    torch.testing.assert_close(model(tokens[:, :13]), before[:, :13])


@pytest.mark.parametrize("name", [*CAUSAL, "cumulant3+full", "cumulant2+normalization=sum"])
def test_tokens_taken_in_pieces_give_the_logits_of_the_whole_with_one_key_head_too(name):
    model, tokens = small(name, attention_extras=one_key_head(name)), some_tokens()
    streams, rows = model.streams(), []
    for start, end in ((0, 7), (7, 8), (8, 9), (9, 33), (33, 36)):
        rows.append(model.take(tokens[:, start:end], streams, start))
    torch.testing.assert_close(torch.cat(rows, 1), model(tokens))


def test_moments_do_not_grow_and_keys_do():
    sizes = {}
    for name in ("softmax", "cumulant3"):
        model, streams = small(name), None
        for length in (10, 30):
            streams = model.streams()
            model.take(some_tokens(length), streams, 0)
            sizes[name, length] = sum(stream.numel() for stream in streams)
    assert sizes["softmax", 30] == 3 * sizes["softmax", 10]
    assert sizes["cumulant3", 30] == sizes["cumulant3", 10]


def test_each_mechanism_has_the_smallest_cache_that_is_exact():
    made = {name: small(name).streams()[0] for name in ("softmax", "linear", "cumulant2")}
    kinds = {name: type(stream.mixes[0]) for name, stream in made.items()}
    assert kinds == {"softmax": KeysValues, "linear": Sums, "cumulant2": Sums}
    assert type(small("lla").streams()[0]) is Recomputed
    assert (
        type(small("cumulant2+normalization=sum").streams()[0]) is Recomputed
    )  # its stream would be another mechanism


@pytest.mark.parametrize(
    "how", [{"temperature": 0}, {"temperature": 0.7, "top_k": 3, "seed": 5}], ids=["greedy", "top 3"]
)
@pytest.mark.parametrize("name", ["softmax", "cumulant3"])
def test_generation_with_a_cache_is_that_without(name, how):
    model, prompt = small(name), some_tokens(5)
    found = model.generate(prompt, 20, **how)
    assert found.shape == (2, 25)
    assert found[:, :5].equal(prompt)
    assert found.equal(model.generate(prompt, 20, cache=False, **how))


def test_drawing_follows_the_seed_and_top_1_is_greedy():
    model, prompt = small(), some_tokens(3)
    first, again, other = (model.generate(prompt, 30, seed=seed) for seed in (1, 1, 2))
    assert first.equal(again)
    assert not first.equal(other)
    assert model.generate(prompt, 9, top_k=1, seed=3).equal(model.generate(prompt, 9, temperature=0))


def test_generation_leaves_training_mode_and_global_random_numbers_alone():
    model = small().train()
    torch.manual_seed(0)
    drawn = torch.rand(1)
    torch.manual_seed(0)
    model.generate(some_tokens(3), 2)
    assert model.training
    assert torch.rand(1).equal(drawn)


def test_rotated_products_depend_on_distances_only():
    q, k = torch.randn(2, 1, 8, dtype=torch.float64), torch.randn(2, 1, 8, dtype=torch.float64)
    near, far = ((rotate(q, 1e4, s + 3) * rotate(k, 1e4, s)).sum(-1) for s in (0, 50))
    torch.testing.assert_close(near, far)
    assert not torch.allclose(near, (rotate(q, 1e4, 4) * rotate(k, 1e4, 0)).sum(-1))
    odd = torch.randn(2, 5, 7)
    torch.testing.assert_close(rotate(odd, 1e4).norm(dim=-1), odd.norm(dim=-1))
    assert rotate(odd, 1e4)[..., -1].equal(odd[..., -1])


def test_a_model_reads_and_writes_text_of_characters_and_of_bytes(tmp_path):
    chars = cumulant.create_model("lm_nano", num_classes=4, vocabulary="ab c")
    assert set(chars.generate("ab", 10)) <= set("ab c")
    again = load(save(chars, tmp_path / "lm.safetensors"))
    assert again.generate("c a", 20, seed=2) == chars.generate("c a", 20, seed=2)
    with pytest.raises(ValueError, match=r"text has 'd', which is not among the 4 characters"):
        chars.generate("abd")
    text = cumulant.create_model("lm_nano", num_classes=256, positions="learned").generate("é", 3)
    assert text.startswith("é")


def test_every_parameter_learns():
    model = cumulant.create_model("lm_nano", num_classes=11, attention="cumulant3", tie=False, positions="learned")
    model(some_tokens()).square().sum().backward()
    assert [name for name, p in model.named_parameters() if p.grad is None] == []


@pytest.mark.parametrize(
    ("what", "how"),
    [
        (r"'rala' does not have \w+; nearest mechanism that can", lambda: small("rala")),
        (r'positions must be one of .*"?rotary"?', lambda: small(positions="sine")),
        (r"tokens must be whole numbers of shape .* got torch.float32", lambda: small()(torch.zeros(1, 3))),
        (r"prompt must hold at least one token", lambda: small().generate(torch.zeros(1, 0, dtype=torch.long))),
        (
            r"temperature must be finite and at least 0, got -1",
            lambda: small().generate(some_tokens(2), temperature=-1),
        ),
        (r"top_k must be at least 1 or None, got 0", lambda: small().generate(some_tokens(2), top_k=0)),
        (r"11 classes and no vocabulary", lambda: small().generate("text")),
        (r"learned positions end after context=40", lambda: small(positions="learned").generate(some_tokens(30), 20)),
        (r"num_classes must be the size of the vocabulary, 2, got 11", lambda: small(vocabulary="ab")),
    ],
)
def test_what_cannot_be_is_told(what, how):
    with pytest.raises(ValueError, match=what):
        how()


def test_a_layer_that_mixes_otherwise_is_computed_again_from_its_inputs(monkeypatch):
    known = Registry("attention layer", registry._LAYERS)  # other tests do not meet the one below
    monkeypatch.setattr(registry, "_LAYERS", known)

    class Residual(cumulant.nn.MultiheadAttention):
        def mix_tokens(self, call, x, context=None):
            return super().mix_tokens(call, x, context) + call.value

    cumulant.nn.register_layer(cumulant.nn.Layer("residual for the test of lm", "", Residual))
    model = small("cumulant2", layer="residual for the test of lm")
    assert model.positions == "rotary"
    assert type(model.streams()[0]) is Recomputed
    prompt = some_tokens(4)
    assert model.generate(prompt, 6).equal(model.generate(prompt, 6, cache=False))
