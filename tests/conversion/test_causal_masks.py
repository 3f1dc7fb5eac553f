"""Causal models stay causal under our names: those that once leaked, and one of each way in which a mask arrives.

`python -m tools.causal_walk` runs every class; its record has to know all of the installed transformers.
"""

import json
from pathlib import Path

import pytest
import torch
from small_models import llama, transformers

from cumulant.conversion import convert, register_transformers
from cumulant.nn.swapped.masks import every_key, key_mask_function, understood
from tools.causal_walk import looked_at, moved, names
from tools.tiny_models import tiny_model

# Those whose layers say is_causal=False, or whose mask something else reads too, and one of each way to be causal.
SAID_OTHERWISE = ["NllbMoeForConditionalGeneration", "PegasusXForConditionalGeneration", "BigBirdPegasusForCausalLM"]
LEAKED = [*SAID_OTHERWISE, "BigBirdPegasusForConditionalGeneration", "GitForCausalLM"]
WAYS = {
    "GPT2LMHeadModel": "a mask of all keys",
    "BertLMHeadModel": "an encoder told to be a decoder",
    "MistralForCausalLM": "a window",
    "Gemma3ForCausalLM": "windows and all keys in turn",
    "Llama4ForCausalLM": "chunks",
    "BartForConditionalGeneration": "a decoder that looks at an encoder",
    "WhisperForCausalLM": "a decoder alone",
    "BambaForCausalLM": "attention between recurrent layers",
    "RecurrentGemmaForCausalLM": "a window between recurrent layers",
    "MambaForCausalLM": "no attention",
}
REFUSED = {
    "DogeForCausalLM": "DenseMaskError",
    "T5ForConditionalGeneration": "position bias",
    "GptOssForCausalLM": "attention sinks",
    "Gemma2ForCausalLM": "softcap",
    "GPTNeoForCausalLM": "takes attn_implementation='cumulant3' but computes",
}
CLUSTERS = "cluster4+block=2+sinks=2"
RECORD = Path(__file__).parents[2] / "benchmarks" / "results" / "causal_walk.json"


@pytest.mark.parametrize("name", [*LEAKED, *WAYS])
def test_the_last_token_moves_no_earlier_logit(name):
    transformers()
    register_transformers()
    found = looked_at(name)
    assert found["outcome"] == "causal", found


@pytest.mark.parametrize("padded", [False, True], ids=["whole", "padded"])
@pytest.mark.parametrize("name", [*LEAKED, *WAYS])
def test_nor_does_it_in_clusters_with_sinks(name, padded):
    transformers()
    register_transformers(CLUSTERS)
    found = looked_at(name, CLUSTERS, padded)
    assert found["outcome"] == "causal", found


@pytest.mark.parametrize("name", ["LlamaForCausalLM", *SAID_OTHERWISE])
def test_a_mask_that_loses_its_order_is_seen_as_a_leak(name):
    """As one would be that reaches a layer as a mask of padding alone."""
    from transformers import AttentionMaskInterface

    register_transformers("cumulant3+apart=0")
    AttentionMaskInterface.register(
        "cumulant3+apart=0",
        lambda batch_size, kv_length, **_: torch.ones(batch_size, 1, 1, kv_length, dtype=torch.bool),
    )
    assert looked_at(name, "cumulant3+apart=0")["outcome"] == "leak"


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_causal_here_is_refused(name):
    transformers()
    register_transformers()
    found = looked_at(name)
    assert found["outcome"] == "refused", found
    assert REFUSED[name] in found["reason"]


def test_every_causal_class_was_run_and_none_leaks():
    known = json.loads(RECORD.read_text())
    assert not [name for name, found in known["classes"].items() if found["outcome"] == "leak"]
    if known["versions"]["transformers"] != transformers().__version__:
        pytest.skip(f"the record is of transformers {known['versions']['transformers']}")
    assert set(names()) <= set(known["classes"]), f"run: {known['command']} --out {RECORD.name}"


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
