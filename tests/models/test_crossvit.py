"""CrossViT: two branches that meet in their class tokens. Each test is a claim of its page."""

import pytest
import torch

import cumulant
from cumulant.listing import multiply_adds

COUNTS = {
    "crossvit_ti": 7_014_800,
    "crossvit_s": 26_856_272,
    "crossvit_b": 105_025_232,
    "crossvit_9": 8_553_296,
    "crossvit_15": 27_528_464,
    "crossvit_18": 43_271_408,
    "crossvit_9_dagger": 8_776_592,
    "crossvit_15_dagger": 28_209_008,
    "crossvit_18_dagger": 44_266_976,
    "crossvit_15_dagger_408": 28_500_080,
    "crossvit_18_dagger_408": 44_606_560,
}


def nano(**kw):
    torch.manual_seed(0)
    return cumulant.create_model("crossvit_nano", **{"num_classes": 10, "init_std": 0.2, **kw}).eval()


def images(side=32):
    return torch.randn(2, 3, side, side, generator=torch.Generator().manual_seed(1))


@pytest.mark.parametrize("name", COUNTS)
def test_counts_are_those_of_the_released_code(name):
    model = cumulant.create_model(name, device="meta")
    assert sum(weight.numel() for weight in model.parameters()) == COUNTS[name]


def test_the_small_one_has_the_count_of_the_page():
    assert sum(weight.numel() for weight in nano().parameters()) == 228_980


def test_tokens_of_the_two_branches():
    shapes = [tokens.shape[1] for tokens in nano().forward_features(images())]
    assert shapes == [65, 17]
    large = cumulant.create_model("crossvit_15_dagger_408", device="meta")
    assert [large.pos_embed_0.shape[1], large.pos_embed_1.shape[1]] == [1157, 577]
    assert cumulant.create_model("crossvit_15", device="meta").grids == ((20, 20), (14, 14))


def test_the_fusion_leaves_patches_alone_and_changes_class_tokens():
    model = nano()
    stage, (state, grids) = model.blocks[0], model._begin(images())
    before = [stage.blocks[i][0](state[i], grid=grids[i], prefix=1) for i in (0, 1)]
    before[1] = stage.blocks[1][1](before[1], grid=grids[1], prefix=1)
    for one, old in zip(stage(*state, grids=grids), before, strict=True):
        assert torch.equal(one[:, 1:], old[:, 1:])
        assert not torch.allclose(one[:, 0], old[:, 0])


def test_class_tokens_have_no_way_around_the_fusion():
    model = nano()
    for back in model.blocks[0].revert_projs:
        torch.nn.init.zeros_(back[2].weight)
        torch.nn.init.zeros_(back[2].bias)
    state, grids = model._begin(images())
    for one in model.blocks[0](*state, grids=grids):
        assert (one[:, 0] == 0).all()
        assert (one[:, 1:] != 0).any()


def test_one_query_is_the_first_row_of_self_attention():
    fusion = nano().blocks[0].fusion[0]
    query, patches = torch.randn(2, 1, 64), torch.randn(2, 16, 64)
    normed = fusion.norm1(torch.cat([query, patches], 1))
    torch.testing.assert_close(fusion(query, patches, (4, 4)), query + fusion.attn(normed)[:, :1])


def test_the_fusion_is_linear_in_the_patches():
    class Asked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.fusion = cumulant.create_model("crossvit_nano", device="meta").blocks[0].fusion[0]

        def forward(self, tokens):
            return self.fusion(tokens[:, :1], tokens[:, 1:], (tokens.shape[1] - 1, 1))

    work = [multiply_adds(Asked(), (1 + patches, 64)) for patches in (0, 100, 200)]
    assert work[2] - work[1] == work[1] - work[0] > 0


def test_the_answer_is_the_mean_of_two_heads():
    model, x = nano(), images()
    features = model.forward_features(x)
    said = model(x)
    torch.nn.init.zeros_(model.head[0].weight)
    torch.testing.assert_close(model(x), model.head[1](features[1][:, 0]) / 2)
    assert model.forward_head(features, pre_logits=True).shape == (2, 96)
    assert nano(num_classes=0)(x).shape == (2, 96)
    assert not torch.allclose(said, model(x))


@pytest.mark.parametrize("head", [0, 1])
def test_either_head_reaches_both_stems_by_the_fusion(head):
    model = nano()
    tokens = model.forward_features(images())[head]
    model.head[head](tokens[:, 0]).square().sum().backward()
    assert all(embed.proj.weight.grad.abs().max() > 0 for embed in model.patch_embed)


def test_an_image_of_another_size_has_more_tokens_or_is_resized_as_published():
    model, published = nano(), nano(other_sizes="image")
    assert [tokens.shape[1] for tokens in model.forward_features(images(48))] == [145, 37]
    assert [tokens.shape[1] for tokens in published.forward_features(images(48))] == [65, 17]
    torch.testing.assert_close(model(images()), published(images()))
    odd = torch.randn(1, 3, 30, 41)  # no multiple of anything
    assert model(odd).shape == published(odd).shape == (1, 10)


def test_stochastic_depth_is_that_of_the_page():
    model = nano(drop_path=0.3)
    assert [round(block.drop_path.rate, 6) for stage in model.blocks for block in stage.blocks[1]] == [0, 0.1, 0.2, 0.3]
    assert [round(block.drop_path.rate, 6) for stage in model.blocks for block in stage.blocks[0]] == [0, 0.2]
    assert [round(one.drop_path.rate, 6) for stage in model.blocks for one in stage.fusion] == [0.1, 0.1, 0.3, 0.3]


def test_each_branch_can_have_its_own_mechanism():
    model = nano(attention="2xcumulant3,4xsoftmax")
    fine, coarse = ([block.attn.mechanism.name for stage in model.blocks for block in stage.blocks[i]] for i in (0, 1))
    assert (fine, coarse) == (["cumulant3"] * 2, ["softmax"] * 4)
    assert [one.attn.mechanism.name for one in model.blocks[0].fusion] == ["softmax", "cumulant3"]  # of what they read
    given = nano(attention="cumulant2", cross_attention="softmax")
    assert {one.attn.mechanism.name for stage in given.blocks for one in stage.fusion} == {"softmax"}


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"attention": "hierarchical"}, 'has no cross attention.*nearest mechanism.*cross_attention="softmax"'),
        ({"attention": "agent"}, 'need one grid for both.*cross_attention="softmax"'),
        ({"layer": "biformer"}, "layer='biformer' has no cross attention.*cross_attention=\"softmax\""),
        ({"conv_stem": True}, r"patches of 12 or 16 pixels, got patch_size=\(4, 8\)"),
        ({"embed_dim": 64}, "embed_dim must be two whole numbers.*got 64"),
        ({"other_sizes": "crop"}, "other_sizes must be one of 'tables', 'image'"),
    ],
)
def test_what_does_not_fit_is_said_with_what_would(given, said):
    with pytest.raises(ValueError, match=said):
        nano(**given)


def test_a_mechanism_without_cross_attention_runs_with_another_in_the_fusion():
    assert nano(attention="hierarchical", cross_attention="softmax")(images()).shape == (2, 10)
