"""Streams of sums: tokens in, queries answered, with several tokens or queries at a time."""

import pytest
import torch
from random_tokens import draw

from cumulant import zoo


@pytest.mark.parametrize("name", ["linear", "mala", "focused_linear"])
def test_a_memory_appended_in_blocks_is_read_as_cross_attention(name):
    query, key, value = draw((2, 4, 3, 8), (2, 2, 9, 8), (2, 2, 9, 5))
    mechanism = zoo.get(name)
    stream = mechanism.stream()
    for block in (slice(0, 5), slice(5, 9)):
        stream.append(key[..., block, :], value[..., block, :])
    torch.testing.assert_close(stream.read(query), mechanism(query, key, value, enable_gqa=True))


def test_reading_before_anything_was_appended_says_so():
    with pytest.raises(ValueError, match="append keys and values first"):
        zoo.get("linear").stream().read(torch.zeros(1, 1, 1, 4))
