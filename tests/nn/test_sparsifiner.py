"""Sparsifiner: plain attention where all keys are kept, exactly b elsewhere, a predictor that only its loss teaches."""

import math

import pytest
import torch

from cumulant import create_model, nn
from cumulant.nn.heads.sparsifiner import Sparsifiner, set_stage, sparse_loss

N = 13  # with the class token


def layer(**options):
    torch.manual_seed(0)
    made = nn.create_layer("sparsifiner", 16, 2, **{"tokens": N, "prefix": 1, "dtype": torch.float64, **options}).eval()
    for p in made.predictor.parameters():
        torch.nn.init.normal_(p, std=0.5)
    return made


def tokens(seed=0):
    return torch.randn(2, N, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("attention", ["softmax", "cumulant3"])
@pytest.mark.parametrize("block", [1, 5])
def test_with_all_keys_it_is_plain_attention(attention, block):
    made, x = layer(keep=1.0, attention=attention, block=block), tokens()
    plain = nn.create_layer("multihead", 16, 2, attention=attention, dtype=torch.float64).eval()
    plain.load_state_dict({k: v for k, v in made.state_dict().items() if not k.startswith("predictor")})
    torch.testing.assert_close(made(x), plain(x))
    mask = torch.arange(N).lt(torch.tensor([[8], [N]]))
    torch.testing.assert_close(made(x, attn_mask=mask)[mask], plain(x, key_mask=mask)[mask])


def test_every_query_meets_exactly_b_keys_and_the_class_token_all():
    weights = layer().scores(tokens())
    met = (weights > 0).sum(-1)
    assert (met[:, :, 1:] == math.ceil(0.25 * N)).all()
    assert (met[:, :, 0] == N).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_gathered_keys_give_what_a_dense_mask_gives():
    made, x = layer(), tokens()
    call = made.asked(x)
    guess = made.guess(made._flat(call))
    kept = torch.zeros_like(guess, dtype=torch.bool).scatter(-1, guess.topk(4).indices, True)
    kept = torch.cat((torch.ones_like(kept[:, :, :1]), kept), 2)
    dense = (call.query @ call.key.mT * 8**-0.5).masked_fill(~kept, -torch.inf).softmax(-1)
    torch.testing.assert_close(made.scores(x), dense)
    torch.testing.assert_close(made(x), made.proj((dense @ call.value).transpose(1, 2).flatten(2)))


def test_rows_in_parts_are_the_rows_at_once(monkeypatch):
    made, x = layer(block=2), tokens()
    whole = made(x)
    monkeypatch.setattr("cumulant.nn.heads.sparsifiner.GATHERED", 1)
    torch.testing.assert_close(made(x), whole)


def test_the_task_does_not_teach_the_predictor_and_its_own_loss_teaches_nothing_else():
    made = layer().train()
    made(tokens()).square().sum().backward()
    assert all(p.grad is None for p in made.predictor.parameters())
    made = layer(stage="reconstruct").train()
    made(tokens())
    nn.auxiliary_loss(made).backward()
    learned = {name for name, p in made.named_parameters() if p.grad is not None and p.grad.any()}
    assert learned == {f"predictor.{name}" for name, _ in made.predictor.named_parameters()}


def test_a_true_guess_keeps_more_than_any_other_and_a_random_one_its_share():
    exact = nn.create_layer("multihead", 16, 2, dtype=torch.float64).scores(tokens()).detach()[:, :, 1:]
    best = exact.topk(4).values.sum(-1)
    drawn = exact.gather(-1, torch.rand_like(exact).topk(4).indices).sum(-1)
    assert (best >= drawn).all()
    assert drawn.mean().item() == pytest.approx(4 / N, abs=0.05)


def test_the_guess_has_the_rank_of_its_basis_and_is_not_negative_later():
    made = layer(stage="reconstruct")
    made.training = True
    guess = made.guess(made._flat(made.asked(tokens())))
    assert torch.linalg.matrix_rank(guess).max() <= N // 6
    made.stage = "sparse"
    assert (made.guess(made._flat(made.asked(tokens()))) >= 0).all()


def test_reconstruction_learns_the_map():
    made = layer(stage="reconstruct").train()
    steps = torch.optim.Adam(made.predictor.parameters(), 0.02)
    losses = []
    for _ in range(30):
        made(tokens())
        loss = nn.auxiliary_loss(made)
        losses.append(loss.item())
        steps.zero_grad()
        loss.backward()
        steps.step()
    assert losses[-1] < 0.3 * losses[0]


def test_the_keys_that_are_chosen_know_later_tokens():
    made, x = layer(), tokens()
    other = x.clone()
    other[:, -1] += 3
    before, after = (made.guess(made._flat(made.asked(y)))[:, :, :5, :6] for y in (x, other))
    assert not torch.allclose(before, after)  # so a causal mask would not be causal
    with pytest.raises(ValueError, match="is_causal=True, but which keys"):
        made(x, is_causal=True)


def test_stages_of_a_model_say_what_learns():
    model = create_model("vit_nano_patch2_8", layer="sparsifiner", num_classes=3)
    set_stage(model, "reconstruct")
    learning = {name for name, p in model.named_parameters() if p.requires_grad}
    assert learning
    assert all("predictor" in name for name in learning)
    set_stage(model, "sparse")
    assert {name for name, p in model.named_parameters() if not p.requires_grad} == learning
    assert all(module.stage == "sparse" for module in model.modules() if isinstance(module, Sparsifiner))
    with pytest.raises(ValueError, match="no layer of this model is 'sparsifiner'"):
        set_stage(create_model("vit_nano_patch2_8"), "sparse")


def test_the_loss_of_the_second_stage_is_least_for_the_teacher_itself():
    logits, labels = torch.randn(4, 3), torch.tensor([0, 1, 2, 0])
    same = sparse_loss(logits, labels, logits, logits, logits)
    torch.testing.assert_close(same, torch.nn.functional.cross_entropy(logits, labels))
    assert sparse_loss(logits, labels, logits + torch.randn(4, 3)) > same


def test_another_number_of_tokens_is_interpolated():
    assert layer()(torch.randn(2, 29, 16, dtype=torch.float64)).shape == (2, 29, 16)
