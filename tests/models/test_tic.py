"""TiC: attention inside the window of a convolution, its border rule, and images of any size."""

import pytest
import torch
import torch.nn.functional as F

import cumulant
from cumulant.models.tic import MSA, MSAConv, rolled, window_attention


def maps(*shape):
    return torch.randn(*shape, dtype=torch.float64)


def by_loops(q, k, v, kernel, dilation, pad):
    B, h, d, H, W = q.shape
    out = torch.zeros_like(q)
    reach = [(side - 1) // 2 for side in kernel]
    for row in range(H):
        for column in range(W):
            logits, values = [], []
            for i in range(-reach[0], reach[0] + 1):
                for j in range(-reach[1], reach[1] + 1):
                    r, c = row + dilation * i, column + dilation * j
                    inside = 0 <= r < H and 0 <= c < W
                    if not inside and pad == "mask":
                        continue
                    zero = torch.zeros(B, h, d, dtype=q.dtype)
                    key, value = (x[..., r, c] if inside else zero for x in (k, v))
                    logits.append((q[..., row, column] * key).sum(-1) * d**-0.5)
                    values.append(value)
            a = torch.stack(logits, -1).softmax(-1)
            out[..., row, column] = (a.unsqueeze(2) * torch.stack(values, -1)).sum(-1)
    return out


@pytest.mark.parametrize("pad", ["zero", "mask"])
@pytest.mark.parametrize(("kernel", "dilation"), [((3, 3), 1), ((5, 1), 1), ((1, 5), 1), ((3, 3), 2)])
def test_a_window_is_softmax_over_its_places(kernel, dilation, pad):
    q, k, v = (maps(1, 2, 3, 5, 6) for _ in range(3))
    found = window_attention(q, k, v, kernel, dilation=dilation, pad=pad)
    torch.testing.assert_close(found, by_loops(q, k, v, kernel, dilation, pad))


@pytest.mark.parametrize(("pad", "counted"), [("zero", True), ("mask", False)])
def test_equal_keys_give_the_mean_with_or_without_what_lies_outside(pad, counted):
    q, v = maps(1, 1, 4, 5, 5), maps(1, 1, 4, 5, 5)
    mean = F.avg_pool2d(v[:, 0], 3, 1, 1, count_include_pad=counted)
    torch.testing.assert_close(window_attention(q, torch.zeros_like(v), v, (3, 3), pad=pad)[:, 0], mean)
    torch.testing.assert_close(window_attention(q, v, v, (1, 1), pad=pad), v)


def test_a_window_over_the_whole_map_is_global_attention_but_for_the_border_rule():
    q, k, v = (maps(1, 2, 3, 3, 4) for _ in range(3))
    tokens = [x.flatten(-2).mT for x in (q, k, v)]
    whole = F.scaled_dot_product_attention(*tokens)
    masked = window_attention(q, k, v, (7, 7), pad="mask").flatten(-2).mT
    torch.testing.assert_close(masked, whole)
    mass = (tokens[0] @ tokens[1].mT * 3**-0.5).exp().sum(-1, keepdim=True)
    zero = window_attention(q, k, v, (7, 7)).flatten(-2).mT
    torch.testing.assert_close(zero, whole * mass / (mass + 49 - 12))  # places outside have logit 0 and value 0


@pytest.mark.parametrize("pad", ["zero", "mask"])
def test_a_mechanism_inside_the_window_is_asked_the_same(pad):
    torch.manual_seed(0)
    plain = MSA(8, 2, (3, 3), pad=pad, pooling=True, dtype=torch.float64)
    torch.nn.init.ones_(plain.gate)
    laid_out = MSA(8, 2, (3, 3), pad=pad, pooling=True, mixing="window", dtype=torch.float64)
    laid_out.load_state_dict(plain.state_dict())
    laid_out.plain = False  # softmax of the zoo, over windows in memory
    x = maps(2, 8, 5, 6)
    torch.testing.assert_close(laid_out(x), plain(x))


def test_parameters_are_those_of_the_formula():
    for dim, out, kernel in ((16, 32, 3), (8, 8, 5), (4, 6, 1)):
        layer = MSAConv(MSA(dim, 1, (kernel, kernel)), dim, out, (kernel, kernel), 1)
        assert sum(p.numel() for p in layer.parameters()) == 3 * dim**2 + 3 * dim + dim * out * kernel**2
    for more, count in (({}, 31_226), ({"norm": "batch"}, 31_482)):
        assert sum(p.numel() for p in cumulant.create_model("tic_nano", num_classes=10, **more).parameters()) == count
    assert sum(p.numel() for p in cumulant.create_model("tic_tiny", device="meta").parameters()) == 19_902_440


def test_shifting_the_image_shifts_the_answer_away_from_the_border():
    torch.manual_seed(0)
    layer, x = MSA(4, 1, (3, 3), dtype=torch.float64), maps(1, 4, 9, 9)
    moved = layer(torch.roll(x, (2, 1), (2, 3)))
    torch.testing.assert_close(moved[..., 3:-1, 2:-1], torch.roll(layer(x), (2, 1), (2, 3))[..., 3:-1, 2:-1])


def test_rolled_keys_reach_farther_and_rolling_back_is_the_identity():
    torch.manual_seed(0)
    x = maps(1, 10, 9, 9).requires_grad_()
    assert torch.equal(rolled(rolled(x, 2, 3), -2, -3), x)
    for shift, reach in ((0, 1), (2, 3)):
        layer = MSA(10, 1, (3, 3), shift=shift, dtype=torch.float64)
        (g,) = torch.autograd.grad(layer(x)[0, :, 4, 4].sum(), x)
        rows = (g.abs().sum((0, 1, 3)) > 0).nonzero().flatten()
        assert (4 - rows.min(), rows.max() - 4) == (reach, reach)


@pytest.mark.parametrize("more", [{}, {"variant": "block", "norm": "layer", "shift": True, "pooling": "attention"},
                                  {"variant": "block", "pooling": "pool"}, {"attention": "cumulant3"}])  # fmt: skip
def test_any_size_runs_with_the_same_parameters(more):
    torch.manual_seed(0)
    model = cumulant.create_model("tic_nano", num_classes=10, **more)
    for height, width in ((8, 8), (13, 20)):
        maps = model.forward_intermediates(torch.randn(2, 3, height, width), intermediates_only=True)
        sides = [(-(-height // 2**n), -(-width // 2**n)) for n in range(3)]
        assert [tuple(one.shape[2:]) for one in maps] == sides
    model(torch.randn(2, 3, 13, 20)).square().sum().backward()
    assert all(p.grad is not None for p in model.parameters())


def test_what_belongs_to_blocks_is_refused_elsewhere():
    with pytest.raises(ValueError, match="belong to blocks"):
        cumulant.create_model("tic_nano", shift=True)
    with pytest.raises(ValueError, match="odd sides"):
        cumulant.create_model("tic_nano", kernel=4)
