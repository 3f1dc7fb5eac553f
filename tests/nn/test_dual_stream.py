"""The Dual-Stream transformer: an ordinary one in its limit, exact bookkeeping, heads that stay apart when told to."""

import pytest
import torch

from cumulant import create_model, nn
from cumulant.models import LanguageModel
from cumulant.models.dual_stream import DualStream
from cumulant.nn.heads.dual_stream import ChannelNorm, HeadMixing

SMALL = {"num_classes": 11, "embed_dim": 16, "depth": 2, "num_heads": 4, "context": 32, "init_std": 0.3}


def model(**options):
    torch.manual_seed(0)
    return DualStream(**{**SMALL, "dtype": torch.float64, **options}).eval()


def some_tokens(length=9):
    return torch.randint(0, 11, (2, length), generator=torch.Generator().manual_seed(1))


def test_dense_mixing_with_full_norms_is_an_ordinary_transformer():
    made = model(mixing="dense", norm="full")
    plain = LanguageModel(**SMALL, layer="dual_stream+mixing=dense", qkv_bias=False, dtype=torch.float64).eval()
    plain.load_state_dict(made.state_dict())
    torch.testing.assert_close(made(some_tokens()), plain(some_tokens()))


@pytest.mark.parametrize("frozen", [False, True])
def test_each_stream_is_the_sum_of_what_was_written_to_it(frozen):
    made, written = model(frozen=frozen), {"attn": [], "mlp": []}
    for block in made.blocks:
        for name in written:
            getattr(block, name).register_forward_hook(lambda m, i, out, name=name: written[name].append(out))
    token, other = made.flows(some_tokens())
    embedded = made.embedded(some_tokens())
    moved, computed = (sum(parts) for parts in written.values())
    if frozen:
        assert token.equal(embedded)
        torch.testing.assert_close(other, moved + computed)
    else:
        torch.testing.assert_close(token, embedded + moved)
        torch.testing.assert_close(other, computed)


def isolation(norm, mixing):
    """Largest derivative of one head's output channels by another head's input channels."""
    torch.manual_seed(0)
    layer = nn.create_layer("dual_stream", 16, 4, mixing=mixing, mix_qk=True, dtype=torch.float64)
    x = torch.randn(5, 16, dtype=torch.float64)
    derivative = torch.autograd.functional.jacobian(lambda x: layer(norm(x), is_causal=True), x)
    return derivative[:, :4, :, 4:].abs().max()


def test_independent_heads_know_nothing_of_each_other():
    channel, full = ChannelNorm(16, 4, dtype=torch.float64), torch.nn.LayerNorm(16, dtype=torch.float64)
    assert isolation(channel, "independent") == 0
    assert isolation(channel, "kronecker") > 0
    assert isolation(full, "independent") > 0


def test_kronecker_mixing_is_the_kronecker_product():
    mixing = HeadMixing(12, 3, "kronecker", dtype=torch.float64)
    x = torch.randn(5, 12, dtype=torch.float64)
    torch.testing.assert_close(mixing(x), x @ torch.kron(mixing.pairs, torch.eye(4, dtype=torch.float64)).mT)
    with torch.no_grad():
        mixing.pairs.copy_(torch.eye(3))
    torch.testing.assert_close(mixing(x), x)


@pytest.mark.parametrize(
    ("strategy", "count"), [("identity", 0), ("independent", 36), ("kronecker", 16), ("kron_block", 52), ("dense", 144)]
)
def test_parameters_of_each_strategy(strategy, count):
    assert sum(p.numel() for p in HeadMixing(12, 4, strategy).parameters()) == count


def test_amplified_attention_goes_from_the_mean_to_the_best_key():
    x = torch.randn(1, 6, 16, dtype=torch.float64)
    layer = nn.create_layer("dual_stream", 16, 4, dtype=torch.float64, alpha=0.0)
    torch.testing.assert_close(layer.scores(x), torch.full((1, 4, 6, 6), 1 / 6, dtype=torch.float64))
    layer.alpha = 1.0
    best = layer.scores(x).argmax(-1)
    layer.alpha = 1e6
    hard = layer.scores(x)
    torch.testing.assert_close(hard.amax(-1), torch.ones_like(hard[..., 0]))
    assert hard.argmax(-1).equal(best)


@pytest.mark.parametrize("options", [{}, {"frozen": True, "attention": "cumulant3"}, {"read": "value_from_token"}])
def test_it_is_causal_and_generates_as_without_a_cache(options):
    made, tokens = model(head_ffn=True, **options), some_tokens()
    other = tokens.clone()
    other[:, 5] = (other[:, 5] + 1) % 11
    torch.testing.assert_close(made(other)[:, :5], made(tokens)[:, :5])
    assert made.generate(tokens, 6).equal(made.generate(tokens, 6, cache=False))


def test_a_stream_alone_can_be_read():
    made = model()
    token, other = made.lens(some_tokens())
    assert token.shape == other.shape == (2, 9, 11)
    assert create_model("dual_stream_tiny", num_classes=5)(torch.zeros(1, 3, dtype=torch.long)).shape == (1, 3, 5)
