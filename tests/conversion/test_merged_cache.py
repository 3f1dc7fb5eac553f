"""`MergedCache`: generate() of an unconverted model in a fixed number of places."""

import pytest
import torch
from small_models import llama, padded, transformers

from cumulant.conversion import convert

SMALL = {"chunk": 4, "sample": 4, "recent": 2, "sinks": 1}


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
