"""`convert(model, layer="moh")`: a whole layer takes the place of trained ones, with their projections."""

import pytest
import torch

import cumulant

PICTURES = torch.randn(2, 1, 8, 8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def model():
    torch.manual_seed(0)
    return cumulant.create_model("vit_nano_patch2_8", num_classes=10).eval()


def converted(model, layer, **rest):
    return cumulant.convert(model, layer=layer, example=PICTURES, force=True, **rest)


@pytest.mark.parametrize("layer", ["biformer+regions=2+top=4+lce=0+logit_scale=head", "sparsifiner+keep=1.0"])
def test_a_layer_in_the_limit_of_ordinary_attention_changes_nothing(model, layer):
    before = model(PICTURES)
    report = converted(model, layer)
    assert report.measured_error < 1e-5
    assert list(report.calls.values()) == [1] * 4
    torch.testing.assert_close(model(PICTURES), before, rtol=1e-4, atol=1e-5)


def test_a_model_with_new_layers_trains_is_saved_is_loaded_and_taken_back(model, tmp_path):
    before = {name: weight.clone() for name, weight in model.state_dict().items()}
    converted(model, "moh+top=1", layers=[1, 3], attention="cumulant3")
    assert [type(block.attn).__name__ for block in model.blocks].count("MixtureOfHeads") == 2
    with torch.no_grad():
        model.blocks[1].attn.route.weight.fill_(0.1)
    after = model(PICTURES)
    cumulant.convert.save(model, tmp_path)
    torch.testing.assert_close(cumulant.convert.load(tmp_path, example=PICTURES).eval()(PICTURES), after)
    cumulant.convert.restore(model)
    assert model.state_dict().keys() == before.keys()
    assert all(torch.equal(weight, before[name]) for name, weight in model.state_dict().items())


def test_a_language_model_takes_layers_too_and_goes_on_causally():
    model = cumulant.create_model("lm_nano", num_classes=40).eval()
    tokens = torch.arange(12)[None]
    report = cumulant.convert(model, layer="moh", attention="cumulant2", example=tokens, force=True)
    assert list(report.calls.values()) == [1, 1]
    torch.testing.assert_close(model(tokens)[:, :6], model(tokens[:, :6]), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("layer", "said"),
    [
        ("sqa", "its qkv has shape .192, 64., and the layer has one of"),
        ("lama", "the layer has none"),
        ("mho", "did you mean 'moh'"),
    ],
)
def test_a_layer_without_a_place_for_the_weights_is_refused_and_nothing_is_changed(model, layer, said):
    before = model(PICTURES)
    with pytest.raises(ValueError, match=said):
        converted(model, layer)
    assert torch.equal(model(PICTURES), before)
    assert not hasattr(model, "_cumulant_plan")


def test_whole_layers_are_not_chosen_by_diagnosis(model):
    with pytest.raises(ValueError, match="takes the place of whole layers"):
        converted(model, "moh", layers="auto")


def test_attention_of_torch_keeps_its_own_projections():
    model = torch.nn.TransformerEncoderLayer(16, 2, batch_first=True)
    with pytest.raises(ValueError, match="models of this library and of timm"):
        cumulant.convert(model, layer="moh", example=torch.randn(1, 5, 16), force=True)
