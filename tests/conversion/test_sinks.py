"""Clusters in causal layers keep the first tokens exact, unless they are told not to."""

import torch
from small_models import bert, llama

from cumulant import create_model
from cumulant.conversion import choose_layers, convert, load, save

IDS = torch.randint(3, 60, (2, 40), generator=torch.Generator().manual_seed(3))


def said(model, name, **options):
    report = convert(model, name, **options)
    return {str(choice) for choice in report.replaced.values()}


def test_clusters_of_a_decoder_have_four_sinks_and_say_so():
    assert said(llama(), "cluster4+block=4") == {"cluster4, block=4, sinks=4"}
    assert said(llama(), "cluster4", layers=[0]) == {"cluster4, sinks=4"}
    assert said(llama(), "cluster4+sinks=0") == {"cluster4, sinks=0"}
    assert said(llama(), "cluster4+sinks=2") == {"cluster4, sinks=2"}


def test_there_are_none_where_attention_is_not_causal_and_for_other_mechanisms():
    assert said(bert(), "cluster4") == {"cluster4"}
    assert said(llama(), "cumulant2") == {"cumulant2"}


def test_a_language_model_of_this_library_has_them_too():
    made = create_model("lm_nano", num_classes=60).eval()
    assert said(made, "cluster4", example=IDS) == {"cluster4, sinks=4"}


def test_the_first_tokens_are_exact_and_the_saved_model_is_the_same(tmp_path):
    models = [llama(initializer_range=0.3, num_hidden_layers=1) for _ in range(3)]
    for other in models[1:]:
        other.load_state_dict(models[0].state_dict())
    convert(models[1], "cluster4+block=4", example={"input_ids": IDS})
    convert(models[2], "cluster4+block=4+sinks=40", example={"input_ids": IDS})
    with torch.no_grad():
        softmax, found, exact = (model(IDS).logits for model in models)
        save(models[1], tmp_path)
        again = load(tmp_path)(IDS).logits
    torch.testing.assert_close(exact, softmax, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, softmax, atol=1e-3)
    torch.testing.assert_close(again, found)


def test_the_dial_measures_what_convert_then_makes():
    model = llama(max_position_embeddings=256)
    ids = torch.randint(3, 60, (1, 256), generator=torch.Generator().manual_seed(4))
    names = ["cluster4+block=8+response=0", "cluster4+block=8+response=0+sinks=0"]
    for name, sinks in zip(names, (4, 0), strict=True):
        found = choose_layers(model, {"input_ids": ids}, target=5.0, candidates=[name], force=True)
        assert [x.attention for x in found.layers.values()] == [name] * 2
        report = convert(model, layers=found.plan, data={"input_ids": ids}, force=True)
        assert {choice.options["sinks"] for choice in report.replaced.values()} == {sinks}
        convert.restore(model)
