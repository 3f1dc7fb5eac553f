"""Long streams: nothing is lost, a step does not get dearer, natural streams stay close to softmax, needles do not."""

import pytest
import torch

from cumulant.bench.work import WorkCounter
from cumulant.cluster import Blocks, ClusterStream

WIDTH = 8


def drifting(length, seed=0):
    """q, k, v (1, 1, L, 8) that follow one state moving on two time scales, with noise."""
    generator = torch.Generator().manual_seed(seed)

    def draw(count):
        return torch.randn(count, WIDTH, generator=generator)

    def moving(span):
        """Linear between random points `span` tokens apart."""
        points, at = draw(length // span + 2), torch.arange(length) / span
        low = at.long()
        return torch.lerp(points[low], points[low + 1], (at - low).unsqueeze(-1))

    state = moving(300) + moving(8000)
    turn = draw(WIDTH)
    k, v, q = state + 0.3 * draw(length), state @ turn + 0.3 * draw(length), state + 0.3 * draw(length)
    return tuple(x[None, None] for x in (q, k, v))


def relative_error(stream, query, key, value):
    exact = (query.double() @ key.double().mT * WIDTH**-0.5).softmax(-1) @ value.double()
    away = exact - value.double().mean(-2, keepdim=True)
    return ((stream.apply(query).double() - exact).norm() / away.norm()).item()


@pytest.fixture(scope="module")
def long():
    return drifting(16_416)


def stream_of(blocks, key, value):
    stream = ClusterStream(blocks)
    for part in torch.arange(key.shape[-2]).split(5000):  # pieces that do not fit the blocks
        stream.append(key[..., part, :], value[..., part, :])
    return stream


def test_no_token_is_lost_in_merging(long):
    _, key, value = long
    stream = stream_of(Blocks(64, keep=2, recent=1), key, value)
    weight = sum(cluster.weight.sum() for level in stream.levels for cluster in level)
    assert weight + stream.key.shape[-2] == key.shape[-2] == stream.length
    merged = sum(
        (cluster.weight[..., None] * cluster.value_mean).sum(2) for level in stream.levels for cluster in level
    )
    torch.testing.assert_close((merged + stream.value.sum(-2)) / stream.length, value.mean(-2), rtol=1e-4, atol=1e-4)


def test_the_work_of_a_step_grows_with_the_logarithm_only(long):
    query, key, value = long
    work = {}
    for length in (2048, 16_384):
        stream = stream_of(Blocks(64, keep=4, recent=1), key[..., :length, :], value[..., :length, :])
        with WorkCounter() as counter:
            stream.step(*(x[..., length : length + 1, :] for x in (query, key, value)))
        work[length] = counter.work.total
    assert work[16_384] < 1.8 * work[2048]


def test_a_natural_stream_stays_close_to_softmax_and_closer_with_more_clusters(long):
    key, value = (x[..., :16_384, :] for x in long[1:])
    asked = long[0][..., 16_384:, :]
    errors = [
        relative_error(stream_of(blocks, key, value), asked, key, value)
        for blocks in (Blocks(64, keep=0), Blocks(64, keep=8, recent=1), Blocks(64, keep=64, recent=7))
    ]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.1


def test_a_single_token_is_found_while_it_is_recent_and_not_once_it_is_merged():
    """Keys and values of noise: a block has nothing in common that its summary could hold."""
    key, value = torch.randn(2, 1, 1, 4096, WIDTH, generator=torch.Generator().manual_seed(0))
    key = torch.nn.functional.normalize(key, dim=-1) * WIDTH**0.5
    stream = stream_of(Blocks(64, keep=2, recent=1), key, value)
    recent, old = (40 * key[..., at : at + 1, :] for at in (4094, 100))
    assert relative_error(stream, recent, key, value) < 1e-3
    assert relative_error(stream, old, key, value) > 0.5


def test_a_million_tokens_are_held_in_a_few_clusters_at_the_same_work_a_step():
    query, key, value = drifting(1_000_016)
    stream, work = ClusterStream(Blocks(256, keep=16, recent=3)), []
    for part in torch.arange(1_000_000).split(100_000):
        stream.append(key[..., part, :], value[..., part, :])
        if len(part) + part[0] in (100_000, 1_000_000):
            with WorkCounter() as counter:
                stream.apply(query[..., part[-1:] + 1, :])
            work.append(counter.work.total)
    assert stream.length == 1_000_000
    assert stream.clusters <= 17 * 9  # sizes of 256 to 65,536 tokens, at most keep + 1 of each
    assert sum(x.numel() for x in stream.state) < 40_000
    assert work[1] < 1.5 * work[0]
    asked = query[..., 1_000_000:, :]
    past = (x[..., :1_000_000, :] for x in (key, value))
    assert relative_error(stream, asked, *past) < 0.2
