"""Causal models stay causal under our names; `python -m tools.causal_walk` runs every class, these are some."""

import pytest
import torch
from small_models import llama, transformers

from cumulant.conversion import convert, register_transformers
from cumulant.nn.swapped.masks import every_key, key_mask_function, understood
from tools.causal_walk import looked_at, moved
from tools.tiny_models import tiny_model

# Those whose layers say is_causal=False, or whose mask something else reads too, and one of each way to be causal.
SAID_OTHERWISE = ["NllbMoeForConditionalGeneration", "PegasusXForConditionalGeneration", "BigBirdPegasusForCausalLM"]
SAMPLE = ["GitForCausalLM", "BertLMHeadModel", "GPT2LMHeadModel", "MistralForCausalLM", "MambaForCausalLM"]


@pytest.mark.parametrize("name", [*SAID_OTHERWISE, *SAMPLE])
def test_the_last_token_moves_no_earlier_logit(name):
    transformers()
    register_transformers()
    found = looked_at(name)
    assert found["outcome"] == "causal", found


@pytest.mark.parametrize("name", SAID_OTHERWISE)
def test_a_hybrid_of_such_a_model_is_causal_too(name):
    """One layer replaced, the others softmax: what is causal is told to both."""
    model = tiny_model(getattr(transformers(), name), initializer_range=0.2)
    ids = torch.arange(5, 17)[None]
    batch = {"input_ids": ids, "decoder_input_ids": ids} if model.config.is_encoder_decoder else {"input_ids": ids}
    convert(model, layers=["*decoder.layers.1.self_attn"], example=batch, force=True)
    assert moved(model) < 1e-5


def asked(**more):
    sizes = {"batch_size": 2, "q_length": 4, "kv_length": 4, "q_offset": 0, "device": "cpu"}
    return key_mask_function(**sizes, mask_function=None, **more)


def test_a_causal_mask_of_all_keys_says_so_and_takes_no_memory():
    mask = asked()
    assert every_key(mask)
    assert mask.untyped_storage().nbytes() == 1
    assert understood(mask, False, 4, 4) == (None, True, 0)


def test_an_expanded_mask_of_a_user_is_not_taken_for_all_keys():
    transformers()
    nothing = torch.zeros((), dtype=torch.bool).expand(2, 4)
    pattern = understood(asked(attention_mask=nothing), True, 4, 4)
    assert pattern.key_mask is not None
    assert not pattern.key_mask.any()


def test_layers_that_stay_softmax_get_no_dense_mask(monkeypatch):
    """They had none before: a mask of L x L would cost them the fused causal kernel."""
    from transformers.integrations import sdpa_attention

    model, seen = llama(), []
    batch = {"input_ids": torch.arange(3, 15)[None]}
    with torch.no_grad():
        before = model(**batch).logits
    own = sdpa_attention.sdpa_attention_forward

    def tell(module, query, key, value, mask, **rest):
        seen.append((mask, rest["is_causal"]))
        return own(module, query, key, value, mask, **rest)

    monkeypatch.setattr(sdpa_attention, "sdpa_attention_forward", tell)
    from cumulant.nn.swapped import hf
    from cumulant.nn.swapped.plan import implementation

    with implementation(model, hf.MIXED), hf.discovering(), torch.no_grad():
        torch.testing.assert_close(model(**batch).logits, before)
    assert seen == [(None, True)] * 2
