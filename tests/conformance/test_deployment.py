"""Every mechanism compiles into one graph, exports, and, if it says so, never holds an L x L tensor."""

import pytest
import torch
from cases import LONG, NAMES, calls, tokens
from torch import nn

from cumulant import zoo
from cumulant.zoo.probes import LargestTensor, own_way


@calls()
def test_it_compiles_into_one_graph(name, is_causal):
    torch._dynamo.reset()
    inputs = tokens(dtype=torch.float32)
    mechanism = zoo.get(name)

    def function(query, key, value):
        return mechanism(query, key, value, is_causal=is_causal)

    compiled = torch.compile(function, fullgraph=True, backend="eager", dynamic=False)
    torch.testing.assert_close(compiled(*inputs), function(*inputs))


class Operator(nn.Module):
    def __init__(self, name):
        super().__init__()
        self.mechanism = zoo.get(name)

    def forward(self, query, key, value):
        return self.mechanism(query, key, value, **own_way(self.mechanism))


@pytest.mark.parametrize("name", NAMES)
def test_it_exports(name):
    inputs = tokens(dtype=torch.float32)
    program = torch.export.export(Operator(name), inputs)
    torch.testing.assert_close(program.module()(*inputs), Operator(name)(*inputs))


@calls("subquadratic")
def test_no_tensor_of_forward_or_backward_grows_with_the_square_of_the_length(name, is_causal):
    query, key, value = tokens(LONG, LONG, heads=1, key_heads=1, dim=4, value_dim=4, batch=1, dtype=torch.float32)
    inputs = [x.requires_grad_() for x in (query, key, value)]
    with LargestTensor() as largest:
        out = zoo.get(name)(*inputs, is_causal=is_causal)
        out.sum().backward()
    assert out.isfinite().all()
    # Chunks of C tokens hold L C numbers; L^2 / 16 would be 2048 of them for each token.
    assert largest.elements < LONG**2 / 16, f"{largest.operation} made {largest.elements} elements"


def test_the_largest_tensor_of_a_quadratic_form_is_seen():
    query, key, _ = tokens(256, 256, heads=1, key_heads=1, batch=1)
    with LargestTensor() as largest:
        zoo.get("softmax").scores(query, key)
    assert largest.elements == 256**2
