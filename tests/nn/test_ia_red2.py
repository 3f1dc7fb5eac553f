"""IA-RED^2: an ordinary ViT when all is kept, dropped tokens without effect, a reward whose gradient is right."""

import itertools

import pytest
import torch
from torch.nn import functional as F

from cumulant import create_model, nn
from cumulant.nn import streams
from cumulant.nn.heads.ia_red2 import Interpreter, decide, policy_loss, reward

NANO = {"num_classes": 3, "depth": 3, "embed_dim": 16, "num_heads": 2, "init_std": 0.3, "dtype": torch.float64}


def model(**options):
    torch.manual_seed(0)
    made = create_model("ia_red2_nano_patch2_8", **{**NANO, **options}).eval()
    for interpreter in made.interpreters:
        torch.nn.init.normal_(interpreter.qk.weight, std=0.5)
    return made


def images(count=3, seed=0):
    return torch.randn(count, 1, 8, 8, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


def test_where_all_is_kept_it_is_the_ordinary_model():
    made = model(threshold=-1.0)
    plain = create_model("vit_nano_patch2_8", **NANO).eval()
    plain.load_state_dict({k: v for k, v in made.state_dict().items() if not k.startswith("interpreters")})
    assert made(images()).equal(plain(images()))
    assert made.work(images()) == 1


@pytest.mark.parametrize("attention", ["softmax", "cumulant3"])
def test_gathered_tokens_give_what_masked_ones_give(attention):
    made = model(attention=attention)
    gathered, found = made.passed(images())
    masked, _ = made.passed(images(), dense=True)
    assert 0 < found.kept[-1][:, 1:].float().mean() < 1  # something is dropped, not everything
    torch.testing.assert_close(made.forward_head(gathered), made.forward_head(masked))


@pytest.mark.parametrize("attention", ["softmax", "cumulant3"])
def test_tokens_end_to_end_give_what_masked_ones_give(attention, monkeypatch):
    monkeypatch.setattr(streams, "DEVICES", ("cpu",))
    monkeypatch.setattr(streams, "DTYPES", (torch.float64,))
    made = model(attention=attention)
    packed, masked = made(images()), made.forward_head(made.passed(images(), dense=True)[0])
    torch.testing.assert_close(packed, masked)
    layer = nn.create_layer("ia_red2", 16, 2, attention=attention, sparse=True, dtype=torch.float64).eval()
    x = torch.randn(2, 30, 16, dtype=torch.float64)
    there = torch.arange(30) < torch.tensor([[30], [11]])
    found = layer(x, attn_mask=there)
    layer.sparse = False
    torch.testing.assert_close(found, layer(x, attn_mask=there))


def test_what_is_dropped_stays_dropped_and_the_class_token_never_is():
    _, found = model().passed(images())
    for before, after in itertools.pairwise(found.kept):
        assert not (after & ~before).any()
    assert all(kept[:, 0].all() for kept in found.kept)


def test_pixels_of_a_dropped_patch_say_nothing():
    made, x = model(), images(1)
    _, found = made.passed(x)
    gone = int((~found.kept[0][0, 1:]).nonzero()[0])
    other = x.clone()
    row, col = divmod(gone, 4)
    other[..., 2 * row : 2 * row + 2, 2 * col : 2 * col + 2] += 5
    same = made.forward_head(made.passed(other, fixed=found.kept)[0])
    torch.testing.assert_close(same, made.forward_head(made.passed(x, fixed=found.kept)[0]))


def test_the_task_does_not_teach_the_interpreter_and_the_reward_does():
    made, labels = model(), torch.tensor([0, 1, 2])
    F.cross_entropy(made(images()), labels).backward()
    assert all(p.grad is None for p in made.interpreters.parameters())
    for group in range(3):
        made.zero_grad()
        for seed in range(9):  # a draw that is no better than the greedy choice teaches nothing
            torch.manual_seed(seed)
            made.reward_loss(images(), labels, group).backward()
        learned = [any(bool(p.grad.any()) for p in one.parameters() if p.grad is not None) for one in made.interpreters]
        assert learned == [number == group for number in range(3)]
        assert made.blocks[0].attn.qkv.weight.grad is None


def test_without_advantage_there_is_no_gradient():
    told = torch.rand(2, 5, requires_grad=True)
    policy_loss(told, told > 0.5, torch.zeros(2)).backward()
    assert not told.grad.any()


def test_the_sampled_gradient_is_that_of_the_mean_reward():
    torch.manual_seed(0)
    logits = torch.tensor([[0.3, -0.4, 0.8, -0.1]], dtype=torch.float64, requires_grad=True)

    def gained(kept):  # right as long as patch 0 or 2 is seen
        return reward(kept, kept[:, 0] | kept[:, 2], tau=1.0).double()

    told = logits.sigmoid()
    every = torch.tensor(list(itertools.product((False, True), repeat=4)))
    chances = torch.where(every, told, 1 - told).prod(-1)
    exact = torch.autograd.grad((chances * gained(every)).sum(), logits)[0]
    drawn = torch.rand(40_000, 4, dtype=torch.float64) < logits.sigmoid()
    advantage = gained(drawn) - gained(logits > 0)
    sampled = torch.autograd.grad(-policy_loss(logits.sigmoid().expand(40_000, 4), drawn, advantage), logits)[0]
    torch.testing.assert_close(sampled, exact, atol=0.02, rtol=0)


def test_rewards_as_in_the_table():
    kept = torch.tensor([[True] * 4, [False] * 4, [True] * 4])
    assert reward(kept, torch.tensor([True, True, False]), tau=5).tolist() == [0, 1, -5]


def test_gradients_are_numbers_however_many_are_dropped():
    made, x = nn.create_layer("ia_red2", 16, 2, dtype=torch.float64), torch.randn(1, 6, 16, dtype=torch.float64)
    for threshold in (-1.0, 0.45, 0.5, 0.55, 2.0):
        made.threshold = threshold
        y = x.clone().requires_grad_()
        made(y).square().sum().backward()
        assert y.grad.isfinite().all()


def test_the_heat_map_follows_its_patches():
    torch.manual_seed(0)
    interpreter, x = Interpreter(16, 2).double(), torch.randn(1, 7, 16, dtype=torch.float64)
    order = torch.tensor([0, 3, 1, 6, 2, 5, 4])
    torch.testing.assert_close(interpreter(x[:, order]), interpreter(x)[:, order])
    heat = model().heat(images())
    assert heat.shape == (3, 3, 4, 4)
    assert ((heat >= 0) & (heat <= 1)).all()


@pytest.mark.parametrize("attention", ["softmax", "cumulant2"])
def test_the_layer_computes_with_the_kept_tokens_alone(attention, monkeypatch):
    torch.manual_seed(0)
    made = nn.create_layer("ia_red2", 16, 2, attention=attention, dtype=torch.float64, sparse=True).eval()
    torch.nn.init.normal_(made.interpreter.qk.weight, std=0.5)
    x = torch.randn(3, 9, 16, dtype=torch.float64)
    mask = torch.arange(9).lt(torch.tensor([[9], [6], [3]]))
    for given in (None, mask):
        gathered = made(x, attn_mask=given)
        made.sparse = False
        torch.testing.assert_close(gathered, made(x, attn_mask=given))
        made.sparse = True
    padded = made(x)
    monkeypatch.setattr("cumulant.nn.heads.ia_red2.GATHERED_FROM", 1)  # image by image
    torch.testing.assert_close(made(x), padded)
    dropped = ~decide(made.importance(x), 0.5)
    assert dropped.any()
    assert not made(x)[dropped].any()


def test_what_cannot_be_is_told():
    with pytest.raises(ValueError, match=r"groups must be of at least one block each and 3 together, got \(1, 1\)"):
        model(groups=(1, 1))
    with pytest.raises(ValueError, match="pool must be 'cls'"):
        model(pool="gap")
    with pytest.raises(ValueError, match="needs at least one token"):
        nn.create_layer("ia_red2", 16, 2)(torch.zeros(1, 0, 16))
