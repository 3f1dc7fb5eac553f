import pytest
import torch
from small_models import WORDS, bert, llama, padded, transformers, vision, whisper

import cumulant
from cumulant.conversion import convert, fitting, register_transformers

NAMES = ("cumulant2", "cumulant3")


@pytest.fixture(autouse=True)
def registered():
    transformers()
    register_transformers()


def test_every_registered_name_is_in_the_mask_registry_too():
    from transformers import AttentionInterface, AttentionMaskInterface

    for name in register_transformers():
        assert name in AttentionInterface._global_mapping
        assert name in AttentionMaskInterface._global_mapping


def test_a_name_with_options_can_be_registered_and_is_what_convert_makes_of_it():
    name = "cumulant3+around=mean"
    assert name in register_transformers(name)
    named, converted, batch = bert(), bert(), padded()
    converted.load_state_dict(named.state_dict())
    named.set_attn_implementation(name)
    convert(converted, name, example=batch)
    found, expected = (model(**batch).last_hidden_state for model in (named, converted))
    torch.testing.assert_close(found, expected)
    named.set_attn_implementation("cumulant3")
    assert (named(**batch).last_hidden_state - expected).abs().max() > 1e-3


def test_a_wrong_option_in_a_name_is_told_when_it_is_registered():
    with pytest.raises(ValueError, match=r"unknown option 'arround'.*did you mean 'around'"):
        register_transformers("cumulant3+arround=mean")


def test_a_causal_model_is_told_that_it_has_no_mean_query():
    register_transformers("cumulant3+around=mean")
    model = llama()
    model.set_attn_implementation("cumulant3+around=mean")
    with pytest.raises(ValueError, match='around="mean" has no causal form'):
        model(padded()["input_ids"])


def test_a_name_that_is_missing_from_the_mask_registry_drops_padding():
    """The trap that registration avoids: without our mask entry the same model answers with padding mixed in."""
    from transformers import AttentionInterface

    AttentionInterface.register("cumulant_without_mask", AttentionInterface._global_mapping["cumulant3"])
    try:
        model, batch = bert(), padded()
        model.set_attn_implementation("cumulant3")
        right = model(**batch).last_hidden_state[1, :6]
        model.set_attn_implementation("cumulant_without_mask")
        wrong = model(**batch).last_hidden_state[1, :6]
    finally:
        del AttentionInterface._global_mapping["cumulant_without_mask"]
    alone = bert()
    alone.load_state_dict(model.state_dict())
    alone.set_attn_implementation("cumulant3")
    expected = alone(batch["input_ids"][1:, :6]).last_hidden_state[0]
    torch.testing.assert_close(right, expected, atol=1e-5, rtol=1e-4)
    assert (wrong - expected).abs().max() > 1e-2


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("side", ["left", "right"])
def test_padding_changes_nothing(name, side):
    model, batch = bert(), padded(side)
    model.set_attn_implementation(name)
    real = slice(0, 6) if side == "right" else slice(3, 9)
    together = model(**batch, position_ids=torch.arange(9)[None]).last_hidden_state[1, real]
    alone = model(batch["input_ids"][1:, real], position_ids=torch.arange(9)[None, real]).last_hidden_state[0]
    torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("name", NAMES)
def test_a_causal_decoder_sees_only_the_past_and_shares_key_heads(name):
    model = llama()
    model.set_attn_implementation(name)
    ids = padded()["input_ids"][:1]
    changed = ids.clone()
    changed[0, 5:] = 3
    torch.testing.assert_close(model(ids).logits[:, :5], model(changed).logits[:, :5], atol=1e-5, rtol=1e-4)
    assert (model(ids).logits[:, 5:] - model(changed).logits[:, 5:]).abs().max() > 1e-2


def test_grouped_queries_equal_repeated_key_heads():
    grouped, repeated = llama(num_key_value_heads=2), llama(num_key_value_heads=4)
    state = grouped.state_dict()
    for name, x in state.items():
        if "k_proj" in name or "v_proj" in name:
            state[name] = x.unflatten(0, (2, 8)).repeat_interleave(2, 0).flatten(0, 1)
    repeated.load_state_dict(state)
    ids = padded()["input_ids"]
    for model in (grouped, repeated):
        model.set_attn_implementation("cumulant3")
    torch.testing.assert_close(grouped(ids).logits, repeated(ids).logits, atol=1e-5, rtol=1e-4)


def test_cross_attention_reads_only_the_encoder_tokens_that_are_there():
    model = bert(is_decoder=True, add_cross_attention=True)
    model.set_attn_implementation("cumulant3")
    batch, memory = padded(), torch.randn(2, 7, 32)
    seen = torch.ones(2, 7, dtype=torch.long)
    seen[:, 4:] = 0
    ids = batch["input_ids"]
    masked = model(ids, encoder_hidden_states=memory, encoder_attention_mask=seen).last_hidden_state
    cut = model(ids, encoder_hidden_states=memory[:, :4]).last_hidden_state
    torch.testing.assert_close(masked, cut, atol=1e-5, rtol=1e-4)
    whole = model(ids, encoder_hidden_states=memory).last_hidden_state
    assert (whole - cut).abs().max() > 1e-3


def test_output_attentions_are_the_signed_scores():
    model, batch = bert(initializer_range=0.4), padded()
    model.set_attn_implementation("cumulant3")
    layer = model.encoder.layer[0].attention.self
    caught = {}
    layer.register_forward_hook(lambda module, args, output: caught.update(x=args[0], out=output[0]))
    A = model(**batch, output_attentions=True).attentions[0]
    x = caught["x"]
    q, k, v = (f(x).unflatten(-1, (4, 8)).transpose(1, 2) for f in (layer.query, layer.key, layer.value))
    expected = cumulant.scores(q, k, key_mask=batch["attention_mask"].bool())
    torch.testing.assert_close(A, expected, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close((A @ v).transpose(1, 2).flatten(2), caught["out"], atol=1e-5, rtol=1e-4)
    assert (A < 0).any()
    assert len(model(**batch, output_attentions=True).attentions) == 2
    assert model(**batch).attentions is None


def test_weights_of_a_layer_that_stays_local_stand_beside_those_of_a_replaced_one():
    """As many as there are layers, and in the local one those of the model itself."""
    t = transformers()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    kinds = ["sliding_attention", "full_attention"]
    config = t.ModernBertConfig(**sizes, **special, vocab_size=WORDS, local_attention=4, layer_types=kinds)
    model, batch = t.ModernBertModel(config).eval(), padded()
    model.set_attn_implementation("eager")
    own = model(**batch, output_attentions=True).attentions
    convert(model, "cumulant3", force=True)
    found = model(**batch, output_attentions=True).attentions
    assert [x.shape for x in found] == [x.shape for x in own]
    there = batch["attention_mask"].bool()
    torch.testing.assert_close(found[0].transpose(1, 2)[there], own[0].transpose(1, 2)[there])
    assert found[1].min() < 0 or not torch.allclose(found[1], own[1])


def test_models_that_pass_no_keywords_on_still_return_scores():
    model = vision("VideoMAE", num_frames=2, tubelet_size=2)
    model.set_attn_implementation("cumulant2")
    A = model(torch.randn(1, 2, 3, 32, 32), output_attentions=True).attentions
    assert len(A) == 2
    torch.testing.assert_close(A[0].sum(-1), torch.ones_like(A[0].sum(-1)), atol=1e-5, rtol=1e-5)


def test_the_name_can_be_given_at_load(tmp_path):
    model = bert()
    model.save_pretrained(tmp_path)
    loaded = transformers().BertModel.from_pretrained(tmp_path, attn_implementation="cumulant2").eval()
    model.set_attn_implementation("cumulant2")
    torch.testing.assert_close(loaded(**padded()).last_hidden_state, model(**padded()).last_hidden_state)


@pytest.mark.parametrize("converted", [False, True], ids=["by name", "converted"])
def test_attention_dropout_drops_whole_keys_in_training_and_nothing_else(converted):
    """With all but one key dropped a query gets the value of that key, whatever it asks."""
    model = bert(attention_probs_dropout_prob=0.4, hidden_dropout_prob=0.0, num_hidden_layers=1)
    if converted:
        assert set(convert(model).key_dropout.values()) == {0.4}
    else:
        model.set_attn_implementation("cumulant3")
    batch = {"input_ids": torch.arange(3, 12)[None]}
    said = model(**batch).last_hidden_state
    assert torch.equal(model(**batch).last_hidden_state, said)
    model.train()
    torch.manual_seed(1)
    stay = torch.rand(1, 9) >= 0.4
    torch.manual_seed(1)
    dropped = model(**batch).last_hidden_state
    wanted = model.eval()(**batch, attention_mask=stay.long()).last_hidden_state
    assert 0 < stay.sum() < 9
    torch.testing.assert_close(dropped, wanted)


def swin():
    t = transformers()
    return t.SwinModel(
        t.SwinConfig(image_size=32, patch_size=4, embed_dim=16, depths=[1], num_heads=[2], window_size=4)
    )


def test_a_dense_bias_in_place_of_a_mask_is_an_error():
    """Swin hands its relative position bias over as a float mask."""
    model = swin().eval()
    model.set_attn_implementation("cumulant3")
    with pytest.raises(ValueError, match="differs from head to head or from query to query"):
        model(torch.randn(1, 3, 32, 32))
    with pytest.raises(ValueError, match="no attention layer of SwinModel can be replaced"):
        convert(swin().eval())


def test_t5_is_refused_for_its_position_bias():
    t = transformers()
    config = t.T5Config(
        d_model=32, d_kv=8, num_layers=1, num_heads=4, d_ff=64, vocab_size=WORDS, decoder_start_token_id=0
    )
    with pytest.raises(ValueError, match="adds a position bias"):
        convert(t.T5Model(config).eval())


@pytest.mark.parametrize("name", ["Timesformer", "Pvt"])
def test_models_that_accept_the_name_and_never_call_it_are_replaced_as_modules(name):
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "patch_size": 8, "num_frames": 2}
    t = transformers()
    config = getattr(t, f"{name}Config")(image_size=32, **(sizes if name == "Timesformer" else {}))
    report = convert(getattr(t, f"{name}Model")(config).eval())
    assert report.replaced
    assert not report.kept


def test_a_bias_in_a_model_that_never_calls_the_registry_is_refused():
    t = transformers()
    sizes = {"embed_dim": 16, "depths": [1], "num_heads": [2], "window_size": 4, "patch_size": 4, "image_size": 32}
    with pytest.raises(ValueError, match="logits that moments cannot honour"):
        convert(t.Swinv2Model(t.Swinv2Config(**sizes)).eval())


def test_a_mechanism_without_softmax_is_told_as_one_that_is_never_called():
    t = transformers()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "intermediate_size": 64}
    with pytest.raises(RuntimeError, match="never calls it"):
        convert(t.YosoModel(t.YosoConfig(**sizes, vocab_size=WORDS)).eval())


def test_a_window_shorter_than_the_text_is_refused_and_a_longer_one_is_not():
    t = transformers()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = dict(**sizes, intermediate_size=64, vocab_size=WORDS)
    with pytest.raises(ValueError, match="a window"):
        convert(t.MistralForCausalLM(t.MistralConfig(**config, sliding_window=4)).eval())
    assert convert(t.MistralForCausalLM(t.MistralConfig(**config, sliding_window=64)).eval()).replaced


@pytest.mark.parametrize(("name", "reason"), [("Gemma2", "caps its logits"), ("GptOss", "attention sinks")])
def test_capped_logits_and_sinks_are_refused(name, reason):
    t = transformers()
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 4, "num_key_value_heads": 2}
    special = {
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "num_local_experts": 2,
        "num_experts_per_tok": 1,
    }
    config = getattr(t, f"{name}Config")(**sizes, **special, head_dim=8, intermediate_size=64, vocab_size=WORDS)
    with pytest.raises(ValueError, match=reason):
        convert(getattr(t, f"{name}ForCausalLM")(config).eval())


def test_local_layers_stay_softmax_and_global_ones_are_replaced():
    t = transformers()
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64}
    special = dict.fromkeys(("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0)
    config = t.ModernBertConfig(**sizes, **special, vocab_size=WORDS, local_attention=4, global_attn_every_n_layers=2)
    report = convert(t.ModernBertModel(config).eval())
    assert list(report.replaced) == ["layers.0.attn"]
    assert "differs from head to head or from query to query" in report.kept["layers.1.attn"]


def test_packed_sequences_are_refused():
    model = llama()
    model.set_attn_implementation("cumulant3")
    with pytest.raises(ValueError, match="packed"):
        model(torch.randint(3, WORDS, (1, 6)), position_ids=torch.tensor([[0, 1, 2, 0, 1, 2]]), use_cache=False)


def test_whisper_is_replaced_in_self_and_cross_attention():
    model = whisper()
    report = convert(model)
    assert len(report.replaced) == 5
    assert set(report.calls.values()) == {1}


@pytest.mark.parametrize("name", ["ViT", "Dinov2"])
def test_vision_models_train_after_conversion(name):
    model = vision(name)
    convert(model, "cumulant2")
    model.train()(torch.randn(2, 3, 32, 32)).last_hidden_state.square().mean().backward()
    grads = [p.grad for n, p in model.named_parameters() if "query" in n or "q_proj" in n]
    assert grads
    assert all(g is not None and g.isfinite().all() and g.abs().max() > 0 for g in grads)


def test_a_converted_model_compiles_without_a_break():
    model, batch = bert(), padded()
    convert(model, "cumulant3")
    said = model(**batch).last_hidden_state
    torch._dynamo.reset()
    compiled = torch.compile(model, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(**batch).last_hidden_state, said, atol=1e-5, rtol=1e-4)


def test_mechanisms_with_parameters_are_not_offered():
    assert {"cumulant1", "cumulant2", "cumulant3", "linear"} <= set(fitting())
    assert "agent" not in fitting()
    with pytest.raises(ValueError, match="parameters or inputs of its own"):
        convert(bert(), "agent")


def test_a_model_that_stumbles_over_our_mask_is_one_that_never_asks_the_registry():
    t = transformers()
    model = t.BloomForCausalLM(t.BloomConfig(hidden_size=32, n_layer=1, n_head=4, vocab_size=WORDS)).eval()
    with pytest.raises(ValueError, match="ALiBi"):
        convert(model, example=padded())
    with pytest.raises(ValueError, match=r"does not take the batch input_ids \(1, 3\): .*indices"):
        convert(model, example={"input_ids": torch.zeros(1, 3)})
