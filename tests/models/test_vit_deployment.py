"""A ViT with cumulant attention goes through torch.compile, torch.export, autocast and lower precision."""

import pytest
import torch
import torch.nn.functional as F

from cumulant.models import create_model

MECHANISMS = ("linear", "cumulant3")


def model(attention, depth=2):
    torch.manual_seed(0)
    return create_model("vit_nano_patch2_8", attention=attention, num_classes=10, depth=depth, init_std=0.1)


def images(count=3):
    return torch.randn(count, 1, 8, 8, generator=torch.Generator().manual_seed(1))


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def loss_and_gradients(network, parameters):
    loss = F.cross_entropy(network(images()), torch.tensor([1, 2, 3]))
    return [loss, *torch.autograd.grad(loss, parameters)]


@pytest.mark.parametrize("attention", MECHANISMS)
def test_compiled_as_one_graph_it_trains_the_same(attention):
    network = model(attention)
    parameters = list(network.parameters())
    compiled = torch.compile(network, fullgraph=True, backend="aot_eager")
    expected = loss_and_gradients(network, parameters)
    torch.testing.assert_close(loss_and_gradients(compiled, parameters), expected, rtol=1e-4, atol=1e-5)


def test_generated_code_gives_the_same_answer():
    network = model("cumulant3", depth=1).eval()
    compiled = torch.compile(network, fullgraph=True)
    with torch.no_grad():
        torch.testing.assert_close(compiled(images()), network(images()), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", MECHANISMS)
def test_exported_it_gives_the_same_answer_for_any_batch_size(attention):
    network = model(attention).eval()
    batch = torch.export.Dim("batch", min=1, max=64)
    program = torch.export.export(network, (images(),), dynamic_shapes=({0: batch},))
    for count in (1, 3, 5):
        torch.testing.assert_close(program.module()(images(count)), network(images(count)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("attention", ["softmax", *MECHANISMS])
def test_autocast_to_bfloat16_stays_close_and_trains(attention):
    network = model(attention)
    exact = network(images())
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out = network(images())
    assert out.dtype == torch.bfloat16
    assert (out - exact).abs().max() < 0.05 * exact.abs().max()
    F.cross_entropy(out.float(), torch.tensor([1, 2, 3])).backward()
    assert all(p.grad.isfinite().all() for p in network.parameters())


@pytest.mark.parametrize("attention", ["softmax", *MECHANISMS])
def test_a_model_in_bfloat16_stays_close(attention):
    exact = model(attention).eval()(images())
    out = model(attention).eval().bfloat16()(images().bfloat16())
    assert out.dtype == torch.bfloat16
    assert (out - exact).abs().max() < 0.05 * exact.abs().max()
