"""MARRO: its block is torch's attention with residual and norm, padding is inert, the CRF is what enumeration says."""

import itertools

import pytest
import torch

from cumulant import nn
from cumulant.nn.heads.marro import CRF, END, FIRST, PAD, START, Marro, mask_of, shifts

LENGTHS = torch.tensor([5, 3])


def documents(seed=0):
    numbers = torch.Generator().manual_seed(seed)
    x = torch.randn(2, 5, 12, dtype=torch.float64, generator=numbers)
    return (
        x,
        torch.randn(2, 5, 6, dtype=torch.float64, generator=numbers),
        torch.tensor([[0, 1, 1, 2, 0], [2, 2, 0, 0, 0]]),
    )


def model(**options):
    torch.manual_seed(0)
    return Marro(3, 12, 3, hidden=4, **{"shift_dim": 6, **options}).double().eval()


def test_a_block_is_attention_with_residual_and_norm():
    block = nn.create_layer("marro", 12, 3, dtype=torch.float64).eval()
    other = torch.nn.MultiheadAttention(12, 3, batch_first=True, dtype=torch.float64).eval()
    other.load_state_dict({"in_proj_weight": block.qkv.weight, "in_proj_bias": block.qkv.bias,
                           "out_proj.weight": block.proj.weight, "out_proj.bias": block.proj.bias})  # fmt: skip
    x, mask = documents()[0], mask_of(LENGTHS, 5)
    torch.testing.assert_close(block(x, attn_mask=mask), block.after(x + other(x, x, x, key_padding_mask=~mask)[0]))


def test_the_released_view_mixes_sentences_unless_there_is_one_head():
    x = documents()[0]
    for heads, same in ((3, False), (1, True)):
        right = nn.create_layer("marro", 12, heads, dtype=torch.float64).eval()
        wrong = nn.create_layer("marro", 12, heads, legacy_view=True, dtype=torch.float64).eval()
        wrong.load_state_dict(right.state_dict())
        assert torch.allclose(right(x), wrong(x)) == same
    context = right.mix_tokens(right.asked(x), x)
    three = nn.create_layer("marro", 12, 3, legacy_view=True, dtype=torch.float64).eval()
    call = three.asked(x)
    heads = super(type(three), three).mix_tokens(call, x)
    assert three.mix_tokens(call, x).transpose(1, 2).flatten(2).equal(heads.reshape(2, 5, 12))
    assert context.shape == (2, 1, 5, 12)


def test_sentences_of_padding_change_nothing():
    made, (x, xs, roles) = model(), documents()
    other, others, labels = x.clone(), xs.clone(), roles.clone()
    other[1, 3:], others[1, 3:], labels[1, 3:] = 9, -9, 1
    mask = mask_of(LENGTHS, 5)
    for one, two in zip(made.emissions(x, LENGTHS, xs), made.emissions(other, LENGTHS, others), strict=True):
        torch.testing.assert_close(one[mask], two[mask])
    torch.testing.assert_close(made.loss(x, LENGTHS, roles, xs), made.loss(other, LENGTHS, labels, others))
    assert made(x, LENGTHS, xs).equal(made(other, LENGTHS, others))


@pytest.mark.parametrize("length", [1, 2, 4])
def test_the_crf_is_what_enumeration_says(length):
    torch.manual_seed(0)
    crf, emissions = CRF(FIRST + 2).double(), torch.randn(1, 4, FIRST + 2, dtype=torch.float64)
    mask = mask_of(torch.tensor([length]), 4)
    every = [torch.tensor([[*tags, *[PAD] * (4 - length)]]) for tags in itertools.product(range(5), repeat=length)]
    scores = torch.cat([crf.score(emissions, tags, mask) for tags in every])
    torch.testing.assert_close(crf.log_partition(emissions, mask), scores.logsumexp(0, keepdim=True))
    best = crf.best(emissions, mask)
    assert best.equal(every[scores.argmax()])
    assert not set(best[mask].tolist()) & {PAD, START, END}
    assert crf.loss(emissions, best, mask) >= 0


def test_blocks_follow_the_order_of_sentences_and_the_model_does_not():
    made, (x, xs, _) = model(), documents()
    order, full = torch.tensor([3, 0, 4, 1, 2]), torch.tensor([5, 5])
    torch.testing.assert_close(made.blocks[0](x[:, order]), made.blocks[0](x)[:, order])
    assert not torch.allclose(
        made.emissions(x[:, order], full, xs[:, order])[0], made.emissions(x, full, xs)[0][:, order]
    )


@pytest.mark.parametrize(("mu", "roles", "shift"), [(0.0, True, False), (1.0, False, True)])
def test_each_loss_trains_its_own_branch_and_roles_read_the_other(mu, roles, shift):
    made, (x, xs, labels) = model(mu=mu), documents()
    made.loss(x, LENGTHS, labels, xs).backward()

    def learns(module):
        return any(p.grad is not None and bool(p.grad.any()) for p in module.parameters())

    assert learns(made.shift_lstm)
    assert learns(made.crf) == learns(made.lstm) == learns(made.blocks) == roles
    assert learns(made.shift_crf) == shift


def test_the_same_documents_get_the_same_roles_unless_states_are_drawn():
    x, xs, _ = documents()
    made = model()
    assert made.emissions(x, LENGTHS, xs)[0].equal(made.emissions(x, LENGTHS, xs)[0])
    drawn = model(random_states=True)
    assert not drawn.emissions(x, LENGTHS, xs)[0].equal(drawn.emissions(x, LENGTHS, xs)[0])


def test_a_change_is_marked_at_the_sentence_before_it():
    assert shifts(documents()[2], LENGTHS).tolist() == [[1, 0, 1, 1, 0], [0, 1, 0, 0, 0]]


@pytest.mark.parametrize("attention", ["softmax", "cumulant2"])
def test_gradients_of_the_whole_loss_agree_with_differences(attention):
    made, (x, xs, roles) = model(attention=attention, mu=0.5), documents()
    given = (x.requires_grad_(), xs.requires_grad_())
    assert torch.autograd.gradcheck(lambda x, xs: made.loss(x, LENGTHS, roles, xs), given, fast_mode=True)


def test_what_cannot_be_is_told():
    x, _, roles = documents()
    with pytest.raises(ValueError, match="every document must have at least one sentence"):
        CRF(5).best(torch.zeros(1, 2, 5), torch.zeros(1, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="xs must be given"):
        model().loss(x, LENGTHS, roles)
    with pytest.raises(ValueError, match="mu must be a weight between 0 and 1, got 2"):
        model(mu=2)
