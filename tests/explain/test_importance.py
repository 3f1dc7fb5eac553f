"""V3 and V4 of the study; heads switched off, whole or in part; pruning curves and ranks."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import cumulant
from cumulant import explain
from cumulant.explain.importance import IMPORTANCE, Answers, answers, changes, spearman


def vit(attention: str = "cumulant3", **kw) -> nn.Module:
    return cumulant.create_model("vit_nano_patch2_8", attention=attention, num_classes=10, init_std=0.2, **kw).eval()


def images() -> tuple[Tensor, Tensor]:
    return torch.randn(12, 1, 8, 8), torch.randint(10, (12,))


def test_v3_a_head_that_is_not_projected_has_importance_exactly_0() -> None:
    model = vit()
    with torch.no_grad():
        model.blocks[1].attn.proj.weight[:, 32:48] = 0
    found = explain.head_importance(model, *images())
    assert set(found) == set(IMPORTANCE)
    for name, value in found.items():
        assert float(value[1, 2]) == 0, name
        assert bool((value.flatten() != 0).any()), name


def test_v3_two_identical_heads_are_equally_important() -> None:
    model = vit("softmax")
    attn = model.blocks[2].attn
    with torch.no_grad():
        for part in range(3):
            attn.qkv.weight[part * 64 + 16 : part * 64 + 32] = attn.qkv.weight[part * 64 : part * 64 + 16]
        attn.proj.weight[:, 16:32] = attn.proj.weight[:, :16]
    for name, value in explain.head_importance(model, *images()).items():
        assert float(value[2, 0]) == pytest.approx(float(value[2, 1]), abs=1e-5), name
        assert float(value[2, 0]) != float(value[2, 2]) or name == "accuracy", name


def distributions() -> st.SearchStrategy[list[float]]:
    return st.lists(st.floats(0, 1), min_size=5, max_size=5).filter(lambda x: sum(x) > 0.01)


@given(distributions(), distributions())
def test_v4_jensen_shannon_is_symmetric_and_within_0_and_log_2(a: list[float], b: list[float]) -> None:
    p, q = (torch.tensor(x, dtype=torch.float64) / sum(x) for x in (a, b))
    there, back = float(explain.jensen_shannon(p, q)), float(explain.jensen_shannon(q, p))
    assert there == pytest.approx(back, abs=1e-12)
    assert 0 <= there <= math.log(2)
    assert float(explain.jensen_shannon(p, p)) == 0
    if float((p - q).abs().max()) > 1e-3:
        assert there > 0


def test_v4_disjoint_distributions_are_log_2_apart() -> None:
    p, q = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.0, 0.5, 0.5])
    assert float(explain.jensen_shannon(p, q)) == pytest.approx(math.log(2))


def test_the_measures_are_what_their_names_say() -> None:
    before = Answers(torch.tensor([[2.0, 0.0]]), torch.tensor([[1.0, 0.0]]))
    after = Answers(torch.tensor([[0.0, 2.0]]), torch.tensor([[0.0, 3.0]]))
    found = changes(before, after, torch.tensor([0]))
    p = math.exp(2) / (math.exp(2) + 1)
    assert float(found["probability"]) == pytest.approx(2 * p - 1)
    assert float(found["loss"]) == pytest.approx(2)
    assert float(found["accuracy"]) == 1
    assert float(found["feature"]) == pytest.approx(1)  # 1 - cosine of right angles


def test_switching_a_head_off_is_zeroing_its_columns_of_the_projection() -> None:
    model, (x, _) = vit(), images()
    before = model(x)
    with explain.head_off(model, [(0, 1), (3, -1)]) as same:
        inside = model(x)
    assert same is model
    with torch.no_grad():
        model.blocks[0].attn.proj.weight[:, 16:32] = 0
        model.blocks[3].attn.proj.weight[:, 48:] = 0
    torch.testing.assert_close(inside, model(x))
    assert not torch.allclose(inside, before)


def test_heads_are_on_again_after_the_block_and_after_an_exception() -> None:
    model, (x, _) = vit(), images()
    before = model(x)
    with pytest.raises(RuntimeError, match="inside"), explain.head_off(model, [(1, 1)]):
        raise RuntimeError("inside")
    assert torch.equal(model(x), before)


def test_a_head_can_be_replaced_by_its_mean() -> None:
    model, (x, _) = vit("cumulant1"), images()  # its output is the same for every query of an image
    means = explain.head_means(model, [x[:1]])
    with explain.head_off(model, [(0, 2)], means):
        inside = model(x[:1])
    torch.testing.assert_close(inside, model(x[:1]), atol=1e-5, rtol=1e-4)


@pytest.mark.parametrize("attention", ["softmax", "cumulant2", "linear"])
def test_the_blocks_of_a_map_add_up_to_the_head(attention: str) -> None:
    """With three blocks left out, one inside the other, all that is left is what the class token takes of itself."""
    model, (x, _) = vit(attention), images()
    features: list[Tensor] = []
    with (
        torch.no_grad(),
        explain.block_off(model, 0, 1, "class to patches"),
        explain.block_off(model, 0, 1, "patches to class"),
        explain.block_off(model, 0, 1, "patches to patches"),
    ):
        model.blocks[0].attn.proj.register_forward_pre_hook(lambda _, args: features.append(args[0]))
        model(x)
    left = features[-1].unflatten(-1, (4, 16))[:, :, 1]
    assert float(left[:, 1:].abs().max()) < 1e-5  # patches take nothing any more
    assert float(left[:, 0].abs().max()) > 1e-4  # the class token still takes itself


def test_partial_pruning_reports_the_weight_that_went_missing() -> None:
    model, (x, labels) = vit("softmax"), images()
    found = explain.partial_importance(model, (1, 0), x, labels)
    assert list(found)[:4] == ["whole head", "class to patches", "patches to class", "patches to patches"]
    rings = [value["lost"] for name, value in found.items() if "distance" in name]
    assert sum(rings) == pytest.approx(found["patches to patches"]["lost"], rel=1e-4)
    assert found["patches to patches"]["lost"] + found["patches to class"]["lost"] == pytest.approx(1, rel=1e-4)


def test_keeping_one_head_prunes_the_others() -> None:
    model, (x, labels) = vit(), images()
    found = explain.head_importance(model, x, labels, keep_one=True)
    before = answers(model, x)
    with explain.head_off(model, [(1, 0), (1, 1), (1, 3)]):
        after = answers(model, x)
    assert float(found["loss"][1, 2]) == pytest.approx(float(changes(before, after, labels)["loss"].mean()))


def test_a_pruning_curve_starts_at_the_model_and_ends_without_heads() -> None:
    model, (x, labels) = vit(), images()
    order = explain.ranked(torch.arange(16.0).reshape(4, 4))
    assert (order[0], order[-1]) == ((3, 3), (0, 0))
    curve = explain.pruning_curve(model, x, labels, order, steps=2)
    assert curve.removed == (0, 8, 16)
    right = answers(model, x).logits.argmax(-1) == labels
    assert curve.accuracy[0] == pytest.approx(float(right.float().mean()))
    assert explain.PruningCurve((), (0, 2, 4), (1.0, 0.5, 0.0)).area == pytest.approx(0.5)


def test_pruning_curves_have_one_random_order_for_each_seed() -> None:
    model, (x, labels) = vit(), images()
    curves = explain.pruning_curves(model, x, labels, torch.rand(4, 4), seeds=(0, 1), steps=1)
    assert {name: len(several) for name, several in curves.items()} == {
        "important first": 1, "random": 2, "least important first": 1,
    }  # fmt: skip
    assert curves["random"][0].order != curves["random"][1].order
    assert curves["important first"][0].order == curves["least important first"][0].order[::-1]


def test_spearman_agrees_with_scipy_on_ties() -> None:
    stats = pytest.importorskip("scipy.stats")
    a, b = torch.tensor([1.0, 2, 2, 5, 3, 3, 0]), torch.tensor([2.0, 1, 4, 4, 4, 0, 7])
    assert spearman(a, b) == pytest.approx(stats.spearmanr(a, b).statistic)
    names, matrix = explain.rank_correlations({"up": a, "down": -a})
    assert names == ["up", "down"]
    torch.testing.assert_close(matrix, torch.tensor([[1.0, -1.0], [-1.0, 1.0]]))


def test_a_wrong_head_or_block_names_what_there_is() -> None:
    model = vit()
    with pytest.raises(ValueError, match="head of layer 1 must be numbers from 0 to 3, got 9"):
        explain.head_off(model, [(1, 9)]).__enter__()
    with pytest.raises(ValueError, match="block must be one of 'class to patches'"):
        explain.block_off(model, 0, 0, "corner").__enter__()
    with pytest.raises(ValueError, match="no class token"):
        explain.heads.block_mask(explain.TokenLayout(0, (2, 2)), "class to patches")


def test_modules_keep_their_own_modes() -> None:
    model, (x, _) = vit(), images()
    model.train()
    model.blocks[0].eval()
    explain.head_importance(model, x[:2])
    assert model.training
    assert model.blocks[1].training
    assert not model.blocks[0].training


def test_blocks_of_a_map_are_those_of_the_images_at_hand() -> None:
    """A model made for 4 x 4 patches is shown 4 x 8 of them."""
    found = explain.partial_importance(vit(), (0, 0), torch.randn(2, 1, 8, 16), torch.tensor([0, 1]))
    assert "patches at distance 7" in found
    rings = sum(parts["lost"] for name, parts in found.items() if name.startswith("patches at distance"))
    assert rings == pytest.approx(found["patches to patches"]["lost"], abs=1e-5)


def test_labels_that_are_not_one_for_each_image_are_told() -> None:
    model, (x, _) = vit(), images()
    for measure in (
        lambda labels: explain.head_importance(model, x, labels),
        lambda labels: explain.partial_importance(model, (0, 0), x, labels),
        lambda labels: explain.pruning_curve(model, x, labels, [(0, 0)]),
    ):
        with pytest.raises(ValueError, match=r"labels must be \(\d+,\), one for each image, got \(1,\)"):
            measure(torch.tensor([1]))
