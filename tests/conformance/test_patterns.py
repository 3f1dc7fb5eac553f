"""Uses of attention that a mechanism declares work, by CAB's prefix tests; what it does not declare is refused."""

import pytest
import torch
from cases import HEADS, HEADS_INTERACT, NAMES, calls, draw, fixed, having, tokens

from cumulant import zoo
from cumulant.zoo.probes import own_way
from cumulant.zoo.registry import CAPABILITIES


@pytest.mark.parametrize("name", NAMES)
def test_the_marks_found_by_running_are_those_declared(name):
    declared = {capability: getattr(zoo.get(name), capability) for capability in CAPABILITIES}
    assert zoo.capabilities(name)[name] == declared


@pytest.mark.parametrize("name", NAMES)
def test_every_mechanism_serves_at_least_one_pattern_and_names_them(name):
    served = zoo.get(name).patterns
    assert served
    assert set(served) <= {"noncausal self", "causal self", "noncausal cross", "causal cross"}


@calls()
def test_the_layout_is_that_of_sdpa(name, is_causal):
    query, key, value = (x.float() for x in tokens())
    query, key, value = (x.expand(3, *x.shape) for x in (query, key, value))
    out = zoo.get(name)(query, key, value, is_causal=is_causal)
    assert out.shape == (3, 2, 2, 13, 6)
    assert out.dtype == torch.float32
    torch.testing.assert_close(out[0], zoo.get(name)(query[0], key[0], value[0], is_causal=is_causal))


@calls()
def test_sequences_of_a_batch_do_not_mix_and_heads_only_where_declared(name, is_causal):
    query, key, value = tokens()
    out = zoo.get(name)(query, key, value, is_causal=is_causal)
    for x in (query, key, value):
        x[0] += 1
    again = zoo.get(name)(query, key, value, is_causal=is_causal)
    torch.testing.assert_close(again[1], out[1])
    for x in (query, key, value):
        x[1, 0] -= 1
    again = zoo.get(name)(query, key, value, is_causal=is_causal)
    assert torch.allclose(again[1, 1], out[1, 1]) == (name not in HEADS_INTERACT)


@having("causal")
def test_causal_self_the_first_rows_of_a_prefix_are_those_of_the_whole(name):
    """CAB's test: the first i targets alone give row i; sum of absolute differences at width 512, 8 heads."""
    query, key, value = tokens(50, 50, heads=8, key_heads=8, dim=64, value_dim=64, batch=1, dtype=torch.float32)
    options = fixed(name, 50)
    whole = zoo.get(name)(query, key, value, is_causal=True, **options)
    for i in (1, 2, 17, 32, 49):
        part = zoo.get(name)(*(x[..., :i, :] for x in (query, key, value)), is_causal=True, **options)
        assert (part[..., -1, :] - whole[..., i - 1, :]).abs().sum() < 1e-4 * 8 * 64


@having("causal")
def test_causal_self_later_tokens_leave_earlier_rows_alone(name):
    query, key, value = tokens()
    options = fixed(name, 13)
    before = zoo.get(name)(query, key, value, is_causal=True, **options)
    for x in (query, key, value):
        x[..., 7:, :] += 5
    after = zoo.get(name)(query, key, value, is_causal=True, **options)
    torch.testing.assert_close(after[..., :7, :], before[..., :7, :], rtol=1e-12, atol=1e-12)
    assert not torch.allclose(after[..., 7:, :], before[..., 7:, :])


@having("causal", "causal_cross")
@pytest.mark.parametrize(("queries", "keys"), [(5, 9), (9, 5)])
def test_causal_rows_over_another_sequence_see_the_keys_up_to_their_index(name, queries, keys):
    query, key, value = tokens(queries, keys)
    options = fixed(name, 9)
    out = zoo.get(name)(query, key, value, is_causal=True, **options)
    for i in range(queries):
        seen = (query[..., : i + 1, :], key[..., : i + 1, :], value[..., : i + 1, :])
        row = zoo.get(name)(*seen, is_causal=True, **options)[..., i : i + 1, :]
        torch.testing.assert_close(out[..., i : i + 1, :], row)


@having("cross", "noncausal", "independent_rows")
def test_causal_cross_a_row_of_a_prefix_of_queries_is_that_of_the_whole(name):
    query, key, value = tokens(11, 17)
    options = fixed(name, 17)
    whole = zoo.get(name)(query, key, value, **options)
    for i in (1, 4, 10):
        torch.testing.assert_close(zoo.get(name)(query[..., :i, :], key, value, **options), whole[..., :i, :])


@having("cross", "noncausal", missing=("independent_rows",))
def test_rows_that_look_at_other_queries_are_declared_so(name):
    query, key, value = tokens(11, 17)
    before = zoo.get(name)(query, key, value)
    query[..., 0, :] += 1
    query[..., -1, :] -= 1
    assert not torch.allclose(zoo.get(name)(query, key, value)[..., 1:-1, :], before[..., 1:-1, :])
    assert "causal cross" not in zoo.get(name).patterns


@pytest.mark.parametrize("name", [n for n in NAMES if zoo.get(n).stream is not None])
def test_streaming_is_the_causal_form_row_by_row(name):
    mechanism = zoo.get(name)
    query, key, value = tokens(21, 21)
    options = fixed(name, 21)
    whole = mechanism(query, key, value, is_causal=True, **options)
    stream = mechanism.stream(**options)
    rows = [stream.step(*(x[..., t : t + 1, :] for x in (query, key, value))) for t in range(21)]
    torch.testing.assert_close(torch.cat(rows, -2), whole)


@pytest.mark.parametrize("name", [n for n in NAMES if isinstance(zoo.get(n).stream, type)])  # the zoo's own ones
def test_a_stream_sums_in_float32_under_autocast(name):
    """In bfloat16 a sum of 300 tokens no longer notices the next one."""
    mechanism = zoo.get(name)
    query, key, value = tokens(300, 300, heads=1, key_heads=1, batch=1)
    options = fixed(name, 300)
    whole = mechanism(query, key, value, is_causal=True, **options)[..., -20:, :]
    stream = mechanism.stream(**options)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        steps = [stream.step(*(x[..., t : t + 1, :].float() for x in (query, key, value))) for t in range(300)]
    rows = torch.cat(steps[-20:], -2).double()
    assert (rows - whole).norm() < 1e-4 * whole.norm()


@having("streaming")
def test_a_stream_keeps_a_state_of_constant_size(name):
    mechanism = zoo.get(name)
    stream = mechanism.stream(**fixed(name, 40))
    sizes = []
    for _ in range(40):
        stream.step(*tokens(1, 1))
        sizes.append(sum(x.numel() for x in stream.state if x is not None))
    assert len(set(sizes)) == 1


@having(missing=("streaming",))
def test_what_does_not_stream_offers_no_stream_of_constant_size(name):
    mechanism = zoo.get(name)
    with pytest.raises(ValueError, match=r"streaming was asked for.*nearest mechanism that can: "):
        mechanism.require("streaming")


REFUSALS = {
    "causal": ((13, 13), {"is_causal": True}, "has no causal form"),
    "noncausal": ((13, 13), {"is_causal": False}, "has only a causal form"),
    "cross": ((5, 13), {}, "has no cross attention"),
    "key_mask": ((13, 13), {"key_mask": torch.ones(2, 13, dtype=torch.bool)}, "takes no key mask"),
    "grouped_queries": ((13, 13), {"enable_gqa": True}, "has no grouped queries"),
}


@pytest.mark.parametrize(
    ("name", "capability"), [(n, c) for n in NAMES for c in REFUSALS if not getattr(zoo.get(n), c)]
)
def test_what_is_not_declared_is_refused_with_the_nearest_alternative(name, capability):
    (queries, keys), arguments, message = REFUSALS[capability]
    mechanism = zoo.get(name)
    arguments = own_way(mechanism) | arguments
    with pytest.raises(ValueError, match=f"{name!r}.*{message}.*nearest mechanism that can: '(\\w+)'") as error:
        mechanism(*tokens(queries, keys), **arguments)
    alternative = zoo.get(str(error.value).rsplit("'", 2)[1])
    assert getattr(alternative, capability)


@having("cross", "causal", missing=("causal_cross",))
def test_causal_rows_over_another_sequence_are_refused_where_they_are_not_defined(name):
    with pytest.raises(ValueError, match=r"5 queries and 13 keys.*nearest mechanism that can"):
        zoo.get(name)(*tokens(5, 13), is_causal=True)


@having("grouped_queries")
def test_grouped_queries_are_repeated_key_heads(name):
    query = draw(2, 3 * HEADS, 9, 8)
    _, key, value = tokens(9, 9)
    for is_causal in [False] * zoo.get(name).noncausal + [True] * zoo.get(name).causal:
        grouped = zoo.get(name)(query, key, value, enable_gqa=True, is_causal=is_causal)
        repeated = (x.repeat_interleave(3, -3) for x in (key, value))
        torch.testing.assert_close(grouped, zoo.get(name)(query, *repeated, is_causal=is_causal))
