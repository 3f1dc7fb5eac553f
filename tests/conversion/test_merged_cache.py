"""`MergedCache`: generate() of an unconverted model in a fixed number of places."""

import pytest
import torch
from small_models import TEXT, WORDS, llama, padded, transformers

from cumulant.conversion import convert

SMALL = {"chunk": 4, "sample": 4, "recent": 2, "sinks": 1}


def windowed(kind, **kw):
    """A model in which layers see the last 5 tokens: all of them (Mistral), or one in two."""
    t = transformers()
    sizes = {**TEXT, "num_key_value_heads": 2, "head_dim": 8, "vocab_size": WORDS, "initializer_range": 0.1}
    sizes |= {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2, "sliding_window": 5}
    if kind.startswith("Gemma"):
        sizes |= {"layer_types": ["sliding_attention", "full_attention"], "query_pre_attn_scalar": 8}
    config = getattr(t, "Gemma3TextConfig" if kind == "Gemma3" else f"{kind}Config")
    return getattr(t, f"{kind}ForCausalLM")(config(**{**sizes, **kw})).eval()


SOFTCAP = {"attn_logit_softcapping": 1.0}


def generated(model, ids, **kw):
    return model.generate(ids, max_new_tokens=12, min_new_tokens=12, do_sample=False, **kw)


def test_with_room_for_all_tokens_generate_says_what_it_says_without():
    from cumulant.conversion import MergedCache

    transformers()
    model, given = llama(), padded("left")
    for how in ({}, {"num_beams": 3}):
        kw = {"max_new_tokens": 6, "do_sample": False, **how}
        expected = model.generate(**given, **kw)
        assert torch.equal(model.generate(**given, **kw, past_key_values=MergedCache(model, 64, **SMALL)), expected)
        assert torch.equal(model.generate(**given, **kw), expected)  # and the model is as it was under other caches


def test_the_cache_keeps_its_size_and_the_model_close_to_itself():
    from cumulant.conversion import MergedCache

    transformers()
    torch.manual_seed(0)
    model, ids = llama(), torch.randint(3, 60, (1, 60))
    whole, held = model(ids).logits[:, 30:], []
    for length in (40, 60):
        cache = MergedCache(model, 32, **SMALL)
        model(ids[:, :8], past_key_values=cache)
        out = model(ids[:, 8:length], past_key_values=cache).logits
        held.append(cache.numel())
        assert cache.get_seq_length() == length
    assert held[0] == held[1]
    assert (out[:, 22:] - whole).norm() < 0.1 * whole.norm()


@pytest.mark.parametrize(("kind", "options"), [("Gemma3", {}), ("Gemma2", SOFTCAP)])
@pytest.mark.parametrize("how", [{}, {"num_beams": 3}])
def test_layers_that_see_a_window_keep_it_and_the_others_merge(kind, options, how):
    """Texts of three windows, one of them padded at its left; with room for all of it nothing changes."""
    from cumulant.conversion import MergedCache

    torch.manual_seed(0)
    model, given = windowed(kind, **options), padded("left")
    kw = {"max_new_tokens": 8, "min_new_tokens": 8, "do_sample": False, "return_dict_in_generate": True, **how}
    expected = model.generate(**given, **kw, output_logits=True)
    cache = MergedCache(model, 64, **SMALL)
    found = model.generate(**given, **kw, output_logits=True, past_key_values=cache)
    assert torch.equal(found.sequences, expected.sequences)
    torch.testing.assert_close(torch.stack(found.logits), torch.stack(expected.logits))
    assert [type(layer).__name__ for layer in cache.layers] == ["DynamicSlidingWindowLayer", "MergedLayer"]
    assert cache.layers[0].keys.shape[2] == 4


@pytest.mark.parametrize(("kind", "options"), [("Gemma3", {}), ("Gemma2", SOFTCAP)])
def test_a_model_with_windows_stays_close_to_itself_where_its_other_layers_have_merged(kind, options):
    from cumulant.conversion import MergedCache

    torch.manual_seed(0)
    model, ids = windowed(kind, **options), torch.randint(3, 60, (1, 60))
    whole, cache = model(ids).logits, MergedCache(model, 32, **SMALL)
    parts = [model(part, past_key_values=cache).logits for part in ids.split([8, 50, 1, 1], 1)]
    rest = torch.cat(parts, 1) - whole
    assert 0 < rest.norm() < 0.1 * whole.norm()
    assert cache.layers[1].stream.used < 32


def test_where_every_layer_sees_a_window_nothing_is_merged_and_that_is_said():
    from cumulant.conversion import MergedCache

    model, given = windowed("Mistral"), padded("left")
    expected = model.generate(**given, max_new_tokens=6, do_sample=False)
    with pytest.warns(UserWarning, match="every layer of MistralForCausalLM sees a window"):
        cache = MergedCache(model, 64, **SMALL)
    assert torch.equal(model.generate(**given, max_new_tokens=6, do_sample=False, past_key_values=cache), expected)


def test_one_number_is_given_for_each_layer_that_sees_all_of_the_text():
    from cumulant.conversion import MergedCache

    model = windowed("Gemma3")
    assert MergedCache(model, [64], **SMALL).layers[1].options["tokens"] == 64
    with pytest.raises(ValueError, match="one for each of 1 layers that see all of the text, got 2"):
        MergedCache(model, [64, 64], **SMALL)


def test_a_converted_model_and_cropping_are_refused():
    from cumulant.conversion import MergedCache

    transformers()
    model = llama()
    convert(model, "cumulant2")
    with pytest.raises(ValueError, match=r"is converted.*MomentsCache"):
        MergedCache(model, 64)
    convert.restore(model)
    cache = MergedCache(model, 64, **SMALL)
    generated(model, torch.randint(3, 60, (1, 5)), past_key_values=cache)
    with pytest.raises(ValueError, match="cannot forget tokens"):
        cache.crop(3)
