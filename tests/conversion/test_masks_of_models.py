"""Padding, packed texts, caches and masks of the user mean to our attention what they mean to a model's own.

`python -m tools.mask_walk` runs every class; here are those that once differed, and a few of the usual ones.
"""

import pytest
import torch
from small_models import transformers

from cumulant.conversion import convert, register_transformers
from cumulant.nn.swapped.masks import merged
from tools.mask_walk import looked_at
from tools.tiny_models import tiny_model

ONCE = {
    "SplinterModel": "an encoder whose layers do not say whether they are causal",
    "ClapTextModel": "another",
    "AlignTextModel": "another",
    "BigBirdPegasusForConditionalGeneration": "an encoder with a softmax of its own, which reads the mask",
    "XLMModel": "logits that are masked in place",
    "GPTJForCausalLM": "packed texts where nothing asks the registry",
    "GlmMoeDsaForCausalLM": "keys that an indexer selects",
    "T5Gemma2ForConditionalGeneration": "a mask that is joined with another, in a static cache",
}
USUAL = ("BertModel", "LlamaForCausalLM", "MistralForCausalLM", "BartForConditionalGeneration")


@pytest.mark.parametrize("name", [*ONCE, *USUAL])
def test_softmax_under_our_names_says_what_the_model_says(name):
    transformers()
    register_transformers("softmax")
    found = looked_at(name)
    cases = [case for way in found.values() if isinstance(way, dict) for case in way.values()]
    assert len(cases) >= 4, found
    assert set(cases) == {"same"}, found


def test_where_a_cache_changes_what_eager_says_the_finding_is_about_transformers():
    """GIT takes the first tokens of a cache for a picture, also where there was none, and so reads padding."""
    transformers()
    register_transformers("softmax")
    cases = looked_at("GitModel")["converted"]
    assert cases.pop("cached").startswith("eager differs from itself")
    assert set(cases.values()) == {"same"}


def sparse(**more):
    """Two layers, of which the second selects two blocks of four keys for each query."""
    kinds = ["full_attention", "minimax_m3_sparse"]
    sizes = {"layer_types": kinds, "index_block_size": 4, "index_topk_blocks": 2, "initializer_range": 0.2}
    model = tiny_model(transformers().MiniMaxM3VLForCausalLM, **sizes)
    return model, torch.randint(5, 60, (2, 40), generator=torch.Generator().manual_seed(0))


def test_a_layer_whose_keys_are_selected_is_refused_also_where_the_example_is_too_short_to_tell():
    model, ids = sparse()
    report = convert(model, example={"input_ids": ids[:, :6]}, force=True)
    assert list(report.replaced) == ["model.layers.0.self_attn"]
    assert "an indexer selects" in report.kept["model.layers.1.self_attn"]


def test_a_layer_whose_keys_are_selected_keeps_its_selection_beside_others_that_are_replaced():
    model, ids = sparse()
    register_transformers("softmax")
    with torch.no_grad():
        said = model(input_ids=ids).logits
        model.set_attn_implementation("softmax")
        torch.testing.assert_close(model(input_ids=ids).logits, said, rtol=1e-4, atol=1e-5)


def test_a_decoder_that_is_told_to_see_everything_does():
    t = transformers()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    config = t.StableLmConfig(**sizes, num_key_value_heads=4, vocab_size=99, initializer_range=0.2, is_causal=False)
    model, ids = t.StableLmModel(config).eval(), torch.arange(5, 15)[None]
    register_transformers("softmax")
    with torch.no_grad():
        model.set_attn_implementation("eager")
        said = model(ids).last_hidden_state
        model.set_attn_implementation("softmax")
        torch.testing.assert_close(model(ids).last_hidden_state, said, rtol=1e-4, atol=1e-5)


def test_rows_that_see_keys_of_their_own_are_not_taken_for_padding():
    """Two packed texts: to the last row the first text is absent, but the rows of the first text are there."""
    text = torch.tensor([0, 0, 0, 1, 1, 1])
    seen = (text[:, None] == text) & torch.ones(6, 6, dtype=torch.bool).tril()
    with pytest.raises(ValueError, match="packed sequences"):
        merged([seen[None, None]], 6, 6)
    left = torch.ones(6, 6, dtype=torch.bool).tril() & (torch.arange(6) >= 2)  # padding: its rows see nothing
    assert merged([left[None, None]], 6, 6).is_causal
    left[:2] = True  # or, as some makers fill them, everything
    assert merged([left[None, None]], 6, 6).is_causal
