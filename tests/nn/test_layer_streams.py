"""A layer token by token: what is refused is not taken in."""

import pytest
import torch

from cumulant import nn
from cumulant.nn.streams import Recomputed

STEPS = {
    "other batch": lambda x: torch.cat((x, x)),
    "other dtype": lambda x: x.double(),
    "no batch": lambda x: x[0],
    "narrow": lambda x: x[..., :5],
    "a word": lambda x: "x",
}


@pytest.mark.parametrize("wrong", STEPS)
@pytest.mark.parametrize("kind", ["kept keys", "sums", "kept inputs"])
def test_a_refused_step_leaves_the_stream_as_it_was(kind, wrong):
    layer = nn.create_layer("multihead", 8, 2, attention="linear" if kind == "sums" else "softmax").eval()
    stream, other = (Recomputed(layer) if kind == "kept inputs" else layer.stream() for _ in range(2))
    x = torch.randn(2, 2, 8)
    for one in (stream, other):
        one.step(x[:, :1])
    with pytest.raises((ValueError, TypeError), match="x must"):
        stream.step(STEPS[wrong](x[:, 1:]))
    assert torch.equal(stream.step(x[:, 1:]), other.step(x[:, 1:]))
