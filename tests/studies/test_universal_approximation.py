"""What is written down, not trained: anchors, Legendre keys, routing; and that what is trained learns."""

from dataclasses import replace

import pytest
import torch

from cumulant.studies import universal_approximation as study

SETTINGS = replace(study.Settings(), steps=3, batch=8, tests=32)


@pytest.mark.parametrize(("anchors", "known"), [(8, 0.171), (16, 0.065), (32, 0.029), (64, 0.0135)])
def test_anchors_reach_the_known_error(anchors, known):
    assert study.anchored(anchors, anchors**2) == pytest.approx(known, rel=0.03)


def test_order_two_asked_by_the_token_is_affine_in_it_whatever_the_anchors():
    assert study.anchored(64, 0.0, "cumulant2") > 0.5


def test_order_two_over_legendre_keys_is_the_least_squares_fit():
    errors = [study.projected(degree) for degree in (4, 6, 8)]
    assert errors == pytest.approx([0.143269, 0.00845, 0.000247], rel=0.01)
    x, f = torch.linspace(-1, 1, 64, dtype=torch.float64), torch.linspace(-1, 1, 2001, dtype=torch.float64)
    powers, at = (torch.stack([z**p for p in range(7)], -1) for z in (x, f))
    fit = at @ torch.linalg.lstsq(powers, (3 * x).sin()[:, None]).solution
    assert study.projected(6) == pytest.approx(float((fit[:, 0] - (3 * f).sin()).abs().max()), rel=1e-6)


@pytest.mark.parametrize("order", [2, 3])
def test_as_many_heads_as_tokens_route_them_all(order):
    x = torch.randn(3, 7, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    assert torch.allclose(study.routed(x, order), x[:, None].expand(3, 7, 7))


@pytest.mark.parametrize("order", [2, 3])
def test_without_positions_tokens_act_through_their_moments_alone(order):
    """Two sequences with the same first moments: all permutations, and for order 2 also others."""
    net = study.Net((16, 2, 8), f"cumulant{order}", places=False).double()
    x = torch.tensor([[-1.0, 0.0, 1.0, 0.3], [-1.0, 0.0, 1.0, 0.3]], dtype=torch.float64)
    a, b = 0.9, 0.2  # x2 + x3 and their squares kept, their cubes not: a circle in the plane of constant sum
    turn = torch.tensor([a, b, -a - b], dtype=torch.float64)
    size = turn.square().sum()
    other = torch.tensor([0.8, 0.0, 0.0], dtype=torch.float64)
    c = 0.5 * (-other[0] + torch.sqrt(2 * size - 3 * other[0] ** 2))
    other = torch.tensor([0.8, float(c), float(-0.8 - c)], dtype=torch.float64)
    x[0, :3], x[1, :3] = turn, other
    assert torch.allclose(x[0].square().sum(), x[1].square().sum())
    out = net(x)[:, 3]
    assert torch.allclose(out[0], out[1], atol=1e-9) == (order == 2)


def test_every_network_of_the_plan_trains():
    for name in (
        "max, small",
        "sort, two layers",
        "reverse, no attention",
        "max, cumulant3, many heads",
        "max, 2 moments",
    ):
        assert study.measure(SETTINGS, name, 0, "cpu").keys() == {"error", "largest"}
    assert set(study.plan(SETTINGS)) >= {"construction", "max, cluster4", "prod, linear"}


def test_gradients_are_clipped_where_operators_are_compared_and_nowhere_else():
    clipped = {name: clip for name, (_, _, clip) in study.runs(SETTINGS).items()}
    assert clipped["max, softmax"] == clipped["max, cumulant3"] == clipped["max, 2 moments"] == 1.0
    assert clipped["max, large"] is clipped["sort, two layers"] is clipped["reverse, no positions"] is None
    tight = replace(SETTINGS, clip=1e-9)
    assert study.measure(tight, "max, softmax", 0, "cpu") == study.measure(tight, "max, softmax", 0, "cpu")
    assert study.measure(tight, "max, softmax", 0, "cpu") != study.measure(SETTINGS, "max, softmax", 0, "cpu")
    assert study.measure(tight, "max, large", 0, "cpu") == study.measure(SETTINGS, "max, large", 0, "cpu")
