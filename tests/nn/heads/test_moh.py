"""MoH: what its page lets one check without trained weights."""

import pytest
import torch
from torch import nn

from cumulant.nn import MultiheadAttention, create_layer
from cumulant.nn.heads.moh import balance_loss
from cumulant.nn.probes import draw


def made(**options):
    torch.manual_seed(0)
    return create_layer("moh", 32, 8, dtype=torch.float64, **options).eval()


def zeroed(layer):
    for linear in (layer.route, layer.weigh_shared, layer.weigh_stages):
        nn.init.zeros_(linear.weight)
    return layer


def test_with_zero_routers_and_all_heads_it_is_plain_attention():
    layer = zeroed(made(shared=2, top=6))
    plain = MultiheadAttention(32, 8, dtype=torch.float64)
    plain.load_state_dict(layer.state_dict(), strict=False)
    x = draw(2, 9, 32)
    torch.testing.assert_close(layer(x), plain(x))


@pytest.mark.parametrize(("shared", "top"), [(2, 3), (1, 2), (0, 4), (8, 0)])
def test_so_many_gates_are_open_and_they_sum_to_their_stages(shared, top):
    layer, x = made(shared=shared, top=top), draw(2, 9, 32)
    gates, _, _ = layer.gates(x)
    assert (gates != 0).sum(-1).eq(shared + top).all()
    stages = 2 * layer.weigh_stages(x).softmax(-1) if shared and top else torch.ones(2, 9, 2, dtype=torch.float64)
    torch.testing.assert_close(gates.sum(-1), stages[..., 0] * shared + stages[..., 1] * top)


def test_a_head_that_a_token_did_not_choose_does_not_act_on_it():
    layer, x = made(shared=2, top=2), draw(1, 9, 32)
    _, _, chosen = layer.gates(x)
    before = layer(x)
    with torch.no_grad():
        layer.qkv.weight[64 + 4 * 5 : 64 + 4 * 6] += 1  # values of head 5, the fourth routed one
    moved = (layer(x) - before).abs().amax(-1)[0] > 1e-9
    assert moved.any()
    assert torch.equal(moved, chosen[0, :, 3] > 0)


@pytest.mark.parametrize("top", [1, 2])
def test_the_router_learns_from_the_task_only_with_two_heads_or_more(top):
    layer = made(shared=2, top=top).train()
    layer(draw(2, 9, 32)).square().sum().backward()
    # One head's gate is p / p: its gradient is rounding.
    assert (layer.route.weight.grad.abs().max() > 1e-8) == (top > 1)
    layer.zero_grad()
    layer(draw(2, 9, 32))
    layer.losses()["balance"].backward()
    assert layer.route.weight.grad.abs().max() > 0


def test_the_balance_loss_is_k_when_heads_are_used_alike_and_r_when_all_choose_the_same():
    R, K = 6, 2
    even = torch.stack([torch.roll(torch.tensor([1.0, 1, 0, 0, 0, 0]), i) for i in range(R)])
    torch.testing.assert_close(balance_loss(torch.full((R, R), 1 / R), even), torch.tensor(float(K)))
    same = torch.tensor([0.5, 0.5, 0, 0, 0, 0]).expand(R, R)
    torch.testing.assert_close(balance_loss(same, 2 * same), torch.tensor(float(R)))


def test_padded_tokens_are_not_in_the_balance():
    p, m = draw(2, 5, 4).softmax(-1), (draw(2, 5, 4, seed=1) > 0).double()
    there = torch.tensor([[True] * 3 + [False] * 2, [True] * 5])
    alone = torch.cat([p[0, :3], p[1]]), torch.cat([m[0, :3], m[1]])
    torch.testing.assert_close(balance_loss(p, m, there), balance_loss(*alone))


@pytest.mark.parametrize("attention", ["softmax", "cumulant3", "linear"])
@pytest.mark.parametrize("router", ["learned", "norm"])
def test_computing_only_the_chosen_rows_gives_the_same_outputs_and_gradients(attention, router):
    dense, sparse = (made(attention=attention, router=router, shared=1, top=2, sparse=s).train() for s in (False, True))
    x = draw(2, 17, 32)
    mask = torch.arange(17).lt(torch.tensor([[11], [17]]))
    a, b = dense(x, mask), sparse(x, mask)
    torch.testing.assert_close(a, b)
    a.square().sum().backward()
    b.square().sum().backward()
    for one, two in zip(dense.parameters(), sparse.parameters(), strict=True):
        if one.grad is not None:
            torch.testing.assert_close(one.grad, two.grad)


def test_heads_that_no_token_chose_are_not_computed_and_uneven_ones_go_one_by_one(monkeypatch):
    layer = made(attention="cumulant2", shared=1, top=1, sparse=True)
    with torch.no_grad():
        layer.route.weight.zero_()
        layer.route.weight[3, 0], layer.route.weight[5, 0] = 5.0, -5.0
    x = draw(1, 17, 32)
    x[0, :, 0] = 1.0
    x[0, 2, 0] = -1.0
    seen, run = [], type(layer.mix).run
    monkeypatch.setattr(
        type(layer.mix), "run", lambda mix, call, x=None: seen.append(call.query.shape) or run(mix, call, x)
    )
    out = layer(x)
    assert [shape[-3:-1] for shape in seen] == [(1, 17), (1, 16), (1, 1)]  # the shared head, head 3, head 5
    layer.sparse = False
    torch.testing.assert_close(out, layer(x))


def test_the_router_without_parameters_opens_heads_wholly_or_not_at_all():
    layer, x = made(router="norm", shared=4, top=2), draw(2, 9, 32)
    gates, p, _ = layer.gates(x, layer.project(x)[0])
    assert gates.unique().tolist() == [0, 1]
    norms = layer.project(x)[0][:, 4:].norm(dim=-1).mT
    torch.testing.assert_close(p, (norms / norms.std(-1, keepdim=True)).softmax(-1))
    assert {name for name, _ in layer.named_parameters()} == {"qkv.weight", "qkv.bias", "proj.weight", "proj.bias"}


def test_sparse_rows_are_refused_where_a_mechanism_has_none():
    with pytest.raises(ValueError, match="sparse=True computes the chosen rows alone, which 'softmax' cannot here"):
        made(sparse=True)(draw(1, 9, 32), is_causal=True)
