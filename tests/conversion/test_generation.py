import pytest
import torch
from small_models import llama, padded, transformers

from cumulant.conversion import convert, register_transformers
from cumulant.nn.swapped.choice import KEPT
from cumulant.nn.swapped.plan import apply, attention_layers
from tools.tiny_models import tiny_model


@pytest.fixture(autouse=True)
def registered():
    transformers()
    register_transformers()


def decoder(name="cumulant3"):
    model = llama()
    model.set_attn_implementation(name)
    return model


def generated(model, **kw):
    out = model.generate(**padded("left"), max_new_tokens=6, min_new_tokens=6, do_sample=False, **kw)
    return out[:, 9:]


@pytest.mark.parametrize("name", ["cumulant1", "cumulant2", "cumulant3"])
def test_the_moments_cache_generates_what_the_growing_cache_does(name):
    from cumulant.conversion import MomentsCache

    model = decoder(name)
    expected = generated(model)
    assert torch.equal(generated(model, use_cache=False), expected)
    assert torch.equal(generated(model, past_key_values=MomentsCache(model)), expected)


@pytest.mark.parametrize("heads", [None, [1, 2]], ids=["all heads", "two heads"])
def test_a_token_on_its_own_sees_the_blocks_that_it_would_see_in_the_whole_text(heads):
    """The blocks of cluster attention depend on the pattern: one new query must not be taken for a plain one."""
    model, ids = llama(), padded()["input_ids"][:1]
    choice = {"attention": "cluster4", "options": {"block": 2}, "heads": heads}
    convert(model, layers={0: choice, 1: choice})
    whole = model(ids).logits
    cache = transformers().DynamicCache()
    parts = [model(part, past_key_values=cache).logits for part in (ids[:, :5], *ids[:, 5:].split(1, 1))]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)


def test_the_moments_cache_does_not_grow():
    from cumulant.conversion import MomentsCache

    model, held = decoder(), []
    for length in (4, 40):
        cache = MomentsCache(model)
        model(torch.randint(3, 60, (1, length)), past_key_values=cache)
        held.append(cache.numel())
        assert cache.get_seq_length() == length
    assert held[0] == held[1] > 0


@pytest.mark.parametrize("converted", [False, True], ids=["by name", "converted"])
@pytest.mark.parametrize("name", ["RecurrentGemmaForCausalLM", "JambaForCausalLM"])
def test_recurrent_layers_keep_their_states_beside_the_moments(name, converted):
    from cumulant.conversion import MomentsCache

    model = tiny_model(getattr(transformers(), name), initializer_range=0.2)
    ids = torch.randint(5, 60, (2, 12), generator=torch.Generator().manual_seed(0))
    if converted:
        convert(model, "cumulant3", example={"input_ids": ids}, force=True)
    else:
        model.set_attn_implementation("cumulant3")
    with torch.no_grad():
        whole = model(ids, use_cache=False).logits
        cache = MomentsCache(model)
        parts = [
            model(part, past_key_values=cache, use_cache=True).logits for part in (ids[:, :7], *ids[:, 7:].split(1, 1))
        ]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-3)
    held = cache.numel()
    with torch.no_grad():
        model(ids[:, :1], past_key_values=cache, use_cache=True)
    assert cache.numel() == held > 0


def test_a_layer_that_is_attention_and_a_recurrence_at_once_is_refused():
    from cumulant.conversion import MomentsCache

    model = tiny_model(transformers().FalconH1ForCausalLM)
    model.set_attn_implementation("cumulant3")
    with pytest.raises(ValueError, match=r"a MomentsCache knows no .*FalconH1ForCausalLM keeps"):
        MomentsCache(model)


def test_logits_of_a_prompt_in_two_parts_are_those_of_the_whole():
    from cumulant.conversion import MomentsCache

    model, ids = decoder(), padded()["input_ids"][:1]
    whole = model(ids).logits
    for cache in (MomentsCache(model), transformers().DynamicCache()):
        parts = [model(part, past_key_values=cache).logits for part in (ids[:, :4], ids[:, 4:])]
        torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", ["cumulant2", "cumulant3"])
def test_padding_never_enters_the_moments(name):
    from cumulant.conversion import MomentsCache

    model, batch, new = decoder(name), padded("left"), torch.tensor([[5], [6]])
    mask = torch.cat((batch["attention_mask"], torch.ones(2, 1, dtype=torch.long)), 1)
    found = []
    for cache in (MomentsCache(model), transformers().DynamicCache()):
        model(**batch, past_key_values=cache)
        found.append(model(new, attention_mask=mask, past_key_values=cache).logits)
    torch.testing.assert_close(*found, atol=1e-5, rtol=1e-4)


def test_beams_reorder_the_moments():
    from cumulant.conversion import MomentsCache

    model = decoder()
    assert torch.equal(
        generated(model, num_beams=3, past_key_values=MomentsCache(model)), generated(model, num_beams=3)
    )


def test_a_hybrid_keeps_keys_only_where_it_stays_softmax():
    from cumulant.conversion import MomentsCache
    from cumulant.conversion.cache import MomentsLayer

    model = llama()
    convert(model, layers=[1])
    cache = MomentsCache(model)
    assert torch.equal(generated(model, past_key_values=cache), generated(model))
    assert [isinstance(layer, MomentsLayer) for layer in cache.layers] == [False, True]
    assert cache.layers[0].keys.shape[-2] == 14  # the prompt and all but the last new token


def test_tokens_cannot_be_taken_out_of_a_moments_cache():
    from cumulant.conversion import MomentsCache

    model = decoder()
    cache = MomentsCache(model)
    model(padded()["input_ids"], past_key_values=cache)
    with pytest.raises(ValueError, match="cannot forget tokens"):
        cache.crop(-1)


def test_a_softmax_model_has_no_moments_cache():
    from cumulant.conversion import MomentsCache

    with pytest.raises(ValueError, match="is causal cumulant attention"):
        MomentsCache(llama())


def test_a_layer_that_does_not_read_the_cache_is_found_out():
    from cumulant.conversion import MomentsCache

    model = decoder()
    cache = MomentsCache(model)
    key = torch.randn(1, 2, 3, 8)
    cache.update(key, key, 0)
    with pytest.raises(RuntimeError, match="did not hand the cached keys"):
        cache.update(key, key, 0)


def decoder_of(name, **kw):
    """A decoder of that family whose conversion to our softmax must change nothing; attention is loud enough to see."""
    t = transformers()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2}
    special = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "vocab_size": 60, "initializer_range": 0.2}
    config = getattr(t, f"{name}Config")(**sizes, **special, intermediate_size=64, head_dim=8, **kw)
    return getattr(t, f"{name.removesuffix('Text')}ForCausalLM")(config).eval()


def logits_of(model, batch):
    how = {"max_new_tokens": 7, "min_new_tokens": 7, "do_sample": False, "output_logits": True}
    return torch.stack(model.generate(**batch, **how, return_dict_in_generate=True).logits)


def short(side):
    """Texts of 4 tokens, the second of them padded on the left unless side is "none"."""
    ids = torch.randint(3, 60, (2, 4), generator=torch.Generator().manual_seed(2))
    mask = torch.ones_like(ids)
    mask[1, :1] = int(side == "none")
    return {"input_ids": ids * mask, "attention_mask": mask}


CHUNKS = {"attention_chunk_size": 6, "num_local_experts": 2, "intermediate_size_mlp": 64, "no_rope_layers": [1, 1],
          "layer_types": ["chunked_attention"] * 2, "attn_temperature_tuning": False}  # fmt: skip


@pytest.mark.parametrize("side", ["left", "none"])
@pytest.mark.parametrize(
    ("name", "local"), [("Mistral", {"sliding_window": 6}), ("Llama4Text", CHUNKS)], ids=["window", "chunks"]
)
def test_texts_that_outgrow_a_window_or_chunk_are_seen_as_before(name, local, side):
    """7 tokens after 4: the cache lets go of keys, and chunks of 6 begin among those that it keeps."""
    model, batch = decoder_of(name, **local), short(side)
    before = logits_of(model, batch)
    apply(model, dict.fromkeys(attention_layers(model), KEPT))  # our own softmax in every layer
    torch.testing.assert_close(logits_of(model, batch), before)


@pytest.mark.parametrize("how", [{}, {"use_cache": False}], ids=["cache", "no cache"])
def test_a_window_longer_than_the_text_needs_no_attention_mask(how):
    """As `generate` calls a model whose texts have no padding."""
    model, ids = decoder_of("Mistral", sliding_window=64), short("none")["input_ids"]
    convert(model, "cumulant3")
    torch.testing.assert_close(model(ids, **how).logits, model(ids, attention_mask=torch.ones_like(ids)).logits)
    with pytest.raises(ValueError, match="packed sequences"):
        model(ids, position_ids=torch.tensor([[0, 1, 0, 1]]).expand(2, -1), use_cache=False)


def test_an_encoder_decoder_keeps_the_keys_of_its_encoder_beside_the_moments():
    from transformers.cache_utils import DynamicCache, EncoderDecoderCache

    from cumulant.conversion import MomentsCache

    t = transformers()
    layers = {"encoder_layers": 1, "decoder_layers": 2, "encoder_attention_heads": 4, "decoder_attention_heads": 4}
    special = {"pad_token_id": 0, "eos_token_id": 2, "decoder_start_token_id": 1, "forced_eos_token_id": 2}
    sizes = {"d_model": 32, "encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "vocab_size": 60, "init_std": 0.2}
    model = t.MarianMTModel(t.MarianConfig(**layers, **special, **sizes)).eval()
    ids = torch.randint(3, 60, (2, 5))
    convert(model, "cumulant3", example={"input_ids": ids, "decoder_input_ids": ids})
    how = {"max_new_tokens": 5, "min_new_tokens": 5, "do_sample": False}
    both = EncoderDecoderCache(MomentsCache(model), DynamicCache())
    assert torch.equal(model.generate(ids, past_key_values=both, **how), model.generate(ids, **how))
    with pytest.raises(ValueError, match=r"for self-attention, got 1 queries and 5 new keys.*EncoderDecoderCache"):
        model.generate(ids, past_key_values=MomentsCache(model), **how)


CLUSTERS = [
    "cluster4+block=2",
    "cluster4+block=3+recent=1+response=2",
    "cluster4+block=2+closure=langevin+variance=full",
]


def clusters_of(name):
    """A decoder with clusters in both layers, and a text of 40 tokens."""
    model = llama(initializer_range=0.3)
    ids = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(3))
    convert(model, name, example={"input_ids": ids})
    return model, ids


@pytest.mark.parametrize("name", CLUSTERS)
def test_clusters_are_streamed_and_answer_as_in_the_whole_text(name):
    from cumulant.conversion import MomentsCache
    from cumulant.conversion.cache import StreamLayer

    model, ids = clusters_of(name)
    whole, cache = model(ids).logits, MomentsCache(model)
    assert all(isinstance(layer, StreamLayer) for layer in cache.layers)
    parts = [model(part, past_key_values=cache).logits for part in (ids[:, :7], *ids[:, 7:30].split(1, 1), ids[:, 30:])]
    torch.testing.assert_close(torch.cat(parts, 1), whole, atol=1e-4, rtol=1e-3)
    assert cache.get_seq_length() == 40


def test_a_cache_of_clusters_grows_with_the_logarithm_of_the_length():
    from cumulant.conversion import MomentsCache

    model, held = llama(), []
    convert(model, "cluster4+block=2", example={"input_ids": torch.arange(3, 9)[None]})
    for length in (64, 128, 256, 512):
        cache = MomentsCache(model)
        model(torch.randint(3, 60, (1, length)), past_key_values=cache)
        held.append(cache.numel())
    steps = torch.tensor(held).diff().tolist()
    assert max(steps) < 1.3 * min(steps)  # as much more for every doubling
    assert 0 < min(steps)


@pytest.mark.parametrize("how", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_clusters_generate_what_they_do_with_the_growing_cache(how):
    from cumulant.conversion import MomentsCache

    model, ids = clusters_of("cluster4+block=3+recent=1+response=2")
    how = {**how, "max_new_tokens": 12, "min_new_tokens": 12, "do_sample": False}
    expected = model.generate(ids, **how)
    assert torch.equal(model.generate(ids, past_key_values=MomentsCache(model), **how), expected)


def test_a_layer_of_clusters_with_softmax_heads_or_a_near_field_keeps_its_keys():
    from cumulant.conversion import MomentsCache
    from cumulant.conversion.cache import StreamLayer

    model = llama()
    some = {"attention": "cluster4", "options": {"block": 2}, "heads": [0]}
    convert(model, layers={0: some, 1: "cluster4+block=2"}, example={"input_ids": torch.arange(3, 9)[None]})
    assert [isinstance(layer, StreamLayer) for layer in MomentsCache(model).layers] == [False, True]


def test_padding_has_no_place_in_streamed_clusters():
    from cumulant.conversion import MomentsCache

    model, _ = clusters_of("cluster4+block=2")
    with pytest.raises(ValueError, match=r"blocks of a cluster layer .* are those of unpadded texts"):
        generated(model, past_key_values=MomentsCache(model))


@pytest.mark.parametrize("layers", [{0: "cumulant3", 1: "cumulant3"}, {0: "cumulant3", 1: "cluster4"}, {1: "linear"}])
def test_a_static_cache_says_what_the_default_one_says(layers):
    """Keys that are not there yet count for nothing; `cluster4` asks for the places of its queries, too."""
    model = llama()
    convert(model, layers=layers)
    assert torch.equal(generated(model, cache_implementation="static"), generated(model))


def test_generation_from_a_static_cache_compiles_to_one_graph():
    model = decoder("cumulant3")
    wanted = generated(model)
    torch.compiler.reset()
    model.forward = torch.compile(model.forward, backend="eager", fullgraph=True)
    assert torch.equal(generated(model, cache_implementation="static"), wanted)
