"""BiFormer's routing: full attention in its limits, windows by force, exact masks, no gradient through the choice."""

import pytest
import torch

from cumulant import nn
from cumulant.nn.heads.biformer import Regions

GRID = (6, 4)


def layer(attention="softmax", **options):
    torch.manual_seed(0)
    made = nn.create_layer("biformer", 16, 2, attention=attention, dtype=torch.float64, grid_size=GRID, **options)
    return made.eval()


def plain(made, x, **call):
    """The same weights in an ordinary layer with the convolution, the query scaled as BiFormer scales it."""
    other = nn.create_layer("multihead", 16, 2, v_conv=5, dtype=torch.float64, grid_size=GRID).eval()
    other.load_state_dict(made.state_dict())
    with torch.no_grad():
        for part in (other.qkv.weight, other.qkv.bias):
            part[:16] *= 2**-0.5
    return other(x, **call)


def tokens(length=24, seed=0):
    return torch.randn(2, length, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("options", [{"regions": 2, "top": 4}, {"regions": 1, "top": 1}, {"regions": 3, "top": 6}])
def test_all_regions_are_full_attention(options):
    made, x = layer(**options), tokens()
    torch.testing.assert_close(made(x), plain(made, x))
    mask = torch.arange(24).lt(torch.tensor([[15], [24]]))
    torch.testing.assert_close(made(x, attn_mask=mask)[mask], plain(made, x, key_mask=mask)[mask])


@pytest.mark.parametrize("grid", [(5, 7), (3, 2)])
def test_cells_that_pad_a_region_take_no_part(grid):
    made = nn.create_layer("biformer", 16, 2, regions=2, top=4, lce=0, dtype=torch.float64, logit_scale="head").eval()
    other = nn.create_layer("multihead", 16, 2, dtype=torch.float64).eval()
    other.load_state_dict(made.state_dict())
    x = tokens(grid[0] * grid[1] + 1)
    torch.testing.assert_close(made(x, grid=grid, prefix=1), other(x))


def test_one_token_a_region_is_top_k_attention_of_tokens():
    made, x = layer(regions=6, top=3, lce=0, logit_scale="head"), tokens()
    call = made.asked(x)
    logits = call.query.transpose(1, 2).flatten(2) @ call.key.transpose(1, 2).flatten(2).mT
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter(-1, logits.topk(3).indices, True)[:, None]
    dense = (call.query @ call.key.mT * 8**-0.5).masked_fill(~kept, -torch.inf).softmax(-1)
    torch.testing.assert_close(made.scores(x), dense)
    expected = made.proj((dense @ call.value).transpose(1, 2).flatten(2))
    torch.testing.assert_close(made(x), expected)


def test_regions_that_choose_themselves_are_windows(monkeypatch):
    made, x = layer(regions=2, top=1, lce=0), tokens()
    monkeypatch.setattr(made, "_chosen", lambda call, regions: torch.arange(4).view(1, 4, 1).expand(2, 4, 1))
    out, whole = made(x), layer(regions=1, top=1, lce=0)
    for where in Regions.of(GRID, 2).places(x.device):
        torch.testing.assert_close(out[:, where], whole(x[:, where], grid=(3, 2)))


def test_an_output_depends_on_the_values_of_its_regions_alone():
    made, x = layer(regions=2, top=2, lce=0), tokens()
    weights, chosen = made.scores(x), made.choose(x)
    places = Regions.of(GRID, 2).places(x.device)
    for region, where in enumerate(places):
        for b in range(2):
            seen = set(places[chosen[b, region]].flatten().tolist())
            columns = weights[b, 0, where].sum(0).nonzero().flatten().tolist()
            assert set(columns) <= seen
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))


def test_the_choice_has_no_gradient(monkeypatch):
    made, x = layer(regions=2, top=2), tokens()
    made(x).square().sum().backward()
    free = made.qkv.weight.grad.clone()
    call, regions = made._laid_out(made.asked(x))
    fixed = made._chosen(call, regions)
    monkeypatch.setattr(made, "_chosen", lambda call, regions: fixed)
    made.zero_grad()
    made(x).square().sum().backward()
    torch.testing.assert_close(made.qkv.weight.grad, free)


def test_swapping_whole_regions_swaps_their_outputs():
    made, x = layer(regions=2, top=2, lce=0), tokens()
    places = Regions.of(GRID, 2).places(x.device)
    order = places[[2, 0, 3, 1]].flatten()
    swapped = torch.empty_like(x)
    swapped[:, places.flatten()] = x[:, order]
    out = torch.empty_like(x)
    out[:, places.flatten()] = made(x)[:, order]
    torch.testing.assert_close(made(swapped), out)


def test_far_regions_by_cumulants_are_closer_to_softmax_than_dropped_ones():
    x = tokens()
    near, far, exact = (layer(regions=3, top=top, far=given) for top, given in ((2, False), (2, True), (6, False)))
    error = {name: (one(x) - exact(x)).norm() for name, one in (("dropped", near), ("expanded", far))}
    assert error["expanded"] < 0.5 * error["dropped"]
    torch.testing.assert_close(layer(regions=3, top=6, far=True)(x), exact(x))


def test_more_regions_than_there_are_cannot_be_chosen():
    with pytest.raises(ValueError, match=r"top=5 regions, but the grid \(2, 2\) has 4.*take top=4 or fewer"):
        layer(regions=3, top=5)(tokens(4), grid=(2, 2))
