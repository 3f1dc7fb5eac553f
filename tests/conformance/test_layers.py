"""Every layer of the registry, by what it claims: found by running it, in float64, with softmax and by moments."""

import copy
import pickle

import pytest
import torch
from layer_cases import NAMES, PARAMETERS, REFUSED, UNREACHED

from cumulant import create_model, nn, shards
from cumulant.nn.probes import DIM, GRID, HEADS, LENGTH, mechanism_for, probe, refusing, small, tokens
from cumulant.nn.registry import CLAIMS

ALL = pytest.mark.parametrize("name", NAMES)
OVER = pytest.mark.parametrize(
    ("name", "attention"),
    [(name, over) for name in NAMES for over in ("softmax", "cumulant3") if over not in nn.get_layer(name).not_over],
)


def trained(layer, x, **call):
    """Output in training mode, and its loss with what the layer adds."""
    out = layer.train()(x, **call)
    more = nn.auxiliary_loss(layer)
    return out, out.square().mean() + (0 if more is None else more)


@OVER
def test_it_does_what_it_claims_and_claims_what_it_does(name, attention):
    found = {claim: probe(name, claim, attention) for claim in CLAIMS}
    assert found == {claim: getattr(nn.get_layer(name), claim) for claim in CLAIMS}


@ALL
def test_it_runs_over_every_mechanism_but_those_it_names(name):
    assert set(refusing(name)) == set(nn.get_layer(name).not_over)


@OVER
def test_gradients_agree_with_differences(name, attention):
    layer, x = small(name, attention), tokens()[:1].requires_grad_()
    names, weights = zip(*layer.named_parameters(), strict=True)

    def output(x, *given):
        return torch.func.functional_call(layer, dict(zip(names, given, strict=True)), (x,))

    assert torch.autograd.gradcheck(output, (x, *weights), fast_mode=True, atol=1e-5, rtol=1e-3)


@OVER
def test_gradients_reach_every_parameter(name, attention):
    layer = small(name, attention)
    trained(layer, tokens())[1].backward()
    unreached = {key for key, p in layer.named_parameters() if p.grad is None or not p.grad.any()}
    apart = UNREACHED.get(name, "none of them")
    assert unreached == {key for key, _ in layer.named_parameters() if key.startswith(apart)}


@ALL
def test_one_workers_part_of_a_sequence_is_refused_where_it_looks_at_other_tokens_itself(name):
    layer = small(name, "cumulant3" if "cumulant3" not in nn.get_layer(name).not_over else "softmax")
    asks = name in ("multihead", "sqa", "gda")  # the answerer, which this one is not
    kind, says = (AttributeError, "agree") if asks else (ValueError, "other workers")
    with shards.answered_by(object()), pytest.raises(kind, match=says):
        layer(tokens())


@ALL
def test_the_parameters_are_those_of_the_page(name):
    assert sum(p.numel() for p in nn.create_layer(name, DIM, HEADS, grid_size=GRID).parameters()) == PARAMETERS[name]()


@ALL
def test_parameters_are_made_where_and_as_asked(name):
    layer = nn.create_layer(name, DIM, HEADS, grid_size=GRID, device="meta", dtype=torch.float16)
    assert {(p.device.type, p.dtype) for p in layer.parameters()} == {("meta", torch.float16)}


@ALL
def test_autocast_computes_in_bfloat16_what_float32_computes(name):
    layer, x = small(name, "softmax").float(), tokens().float()
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.bfloat16
    exact = layer(x)
    assert (out - exact).norm() < 0.03 * exact.norm()


@OVER
def test_it_compiles_in_one_graph(name, attention):
    torch._dynamo.reset()  # one forward of all layers: the limit of its forms is for one model
    layer, x = small(name, attention), tokens()
    compiled = torch.compile(layer, backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), layer(x))


@pytest.mark.parametrize("name", [name for name in NAMES if nn.get_layer(name).losses])
def test_its_losses_are_those_of_the_plain_layer_when_compiled(name):
    torch._dynamo.reset()
    layer, x = small(name), tokens()
    torch.manual_seed(1)
    plain = trained(layer, x)[1]
    torch.manual_seed(1)
    compiled = torch.compile(layer.train(), backend="eager")
    out = compiled(x)
    torch.testing.assert_close(out.square().mean() + nn.auxiliary_loss(layer), plain)


@ALL
def test_it_can_be_exported(name):
    layer, x = small(name).float(), tokens().float()
    exported = torch.export.export(layer, (x,)).module()
    torch.testing.assert_close(exported(tokens(seed=1).float()), layer(tokens(seed=1).float()))


@ALL
def test_its_state_goes_into_another_of_its_kind(name):
    layer = small(name)
    other = nn.create_layer(name, DIM, HEADS, attention=mechanism_for(name), grid_size=GRID).double().eval()
    other.load_state_dict(layer.state_dict())
    torch.testing.assert_close(other(tokens()), layer(tokens()))


@ALL
def test_a_layer_that_has_trained_can_be_copied_and_pickled(name):
    layer = small(name)
    trained(layer, tokens())
    layer.eval()
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer))):
        torch.testing.assert_close(other(tokens()), layer(tokens()))


@ALL
def test_sequences_without_tokens_of_odd_and_of_single_length_pass(name):
    if nn.get_layer(name).needs_grid:
        pytest.skip("its tokens fill a grid")
    layer = small(name, "softmax")
    for length in (1, 2, 7):
        assert layer(tokens(length)).isfinite().all()
    assert layer(tokens()[:0]).shape == (0, LENGTH, DIM)


@ALL
def test_tokens_may_lie_in_memory_as_they_like(name):
    layer, x = small(name, "softmax"), tokens()
    torch.testing.assert_close(layer(x.mT.contiguous().mT), layer(x))


CASES = [pytest.param(name, *case, id=f"{name}-{case[3][:20]}") for name in REFUSED for case in REFUSED[name]]


@pytest.mark.parametrize(("name", "dim", "heads", "options", "words"), CASES)
def test_what_does_not_fit_is_refused_in_words(name, dim, heads, options, words):
    with pytest.raises(ValueError, match=words):
        nn.create_layer(name, dim, heads, **options)


@ALL
def test_an_unknown_option_behind_its_name_is_refused_with_those_that_it_has(name):
    with pytest.raises(ValueError, match=f"unknown option 'colour' of layer {name!r}; accepted: "):
        nn.create_layer(f"{name}+colour=3", DIM, HEADS)


@ALL
def test_a_mask_that_differs_from_query_to_query_is_refused(name):
    with pytest.raises(ValueError, match=r"attn_mask of shape .* cannot be honoured"):
        small(name)(tokens(), attn_mask=torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool))


SHAPE = {"embed_dim": 32, "num_heads": 4, "num_classes": 3}


@pytest.mark.parametrize("name", [name for name in NAMES if not nn.get_layer(name).needs_grid])
@pytest.mark.parametrize("model", ["vit_nano_patch2_8", "vivit_nano_patch4x2_16"])
def test_models_take_it_by_name(name, model):
    made = create_model(model, layer=name, attention=mechanism_for(name), depth=2, **SHAPE)
    size = (8, 8) if model.startswith("vit_") else (8, 16, 16)
    out = made.train()(torch.randn(2, 1, *size))
    assert out.shape == (2, 3)
    assert (nn.auxiliary_loss(made) is not None) == nn.get_layer(name).losses
    assert made.config["layer"] == name
