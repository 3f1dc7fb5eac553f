"""`cumulant3+v_conv+pool=gap` means one model, and a wrong word in it is answered with the right one."""

import pytest

from cumulant.studies.configuration import changed, configured
from cumulant.train import read_recipe

DIGITS, UCF = read_recipe("digits"), read_recipe("ucf101")


@pytest.mark.parametrize(
    ("name", "table", "value"),
    [
        ("cumulant3+full", "attention_options", {"full": True}),
        ("cumulant3+normalization=sum", "attention_options", {"normalization": "sum"}),
        ("cumulant3+v_conv", "attention_extras", {"v_conv": True}),
        ("softmax+v_conv=[3,3,3]", "attention_extras", {"v_conv": [3, 3, 3]}),
        ("cumulant3+temperature=order+gate", "attention_extras", {"temperature": "order", "gate": True}),
        ("linear+qk_norm", "model_options", {**DIGITS.model_options, "qk_norm": True}),
        ("linear+pool=gap+patch=4", "model_options", {**DIGITS.model_options, "pool": "gap", "patch_size": 4}),
        ("softmax+lr=0.5", "lr", 0.5),
    ],
)
def test_an_extra_goes_where_it_belongs(name, table, value):
    recipe = configured(DIGITS, name)
    assert recipe.attention == name.split("+")[0]
    assert getattr(recipe, table) == value


def test_patches_of_clips_keep_their_frames():
    assert configured(UCF, "softmax+patch=16+variant=2").model_options == {"tubelet": [2, 16, 16], "variant": 2}


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("cumulant3+v_cnv", r"unknown extra 'v_cnv' in 'cumulant3\+v_cnv'; did you mean 'v_conv'\?"),
        ("cumulant3+pol=gap", "did you mean 'pool'"),
        ("softmax+full", "'full' .* is an option of cumulant1, cumulant2, cumulant3, not of softmax"),
        ("sofmax+gate", "unknown attention mechanism 'sofmax'; did you mean 'softmax'"),
        ("+pool=gap", r"name a mechanism before the extras, e.g. cumulant3\+pool=gap"),
        ("softmax+gate+gate=silu", "each option can be given once"),
        ("softmax+pool=", "options are written"),
        ("softmax+patch=small", "patch must be the side of a patch in pixels, got 'small'"),
        ("softmax+lr=high", "lr .* must be float, got 'high'"),
        ("softmax+lr=none", "lr .* must be float, got None"),
        ("softmax+batch_size=1.5", "batch_size .* must be int, got 1.5"),
        ("softmax+frames", "frames .* must be int, got True"),
        ("softmax+precision=fp16", r"precision .* must be 'fp32' \| 'bf16', got 'fp16'"),
    ],
)
def test_a_wrong_extra_is_refused_with_what_would_be_right(name, words):
    with pytest.raises(ValueError, match=words):
        configured(DIGITS, name)


def test_changes_for_all_runs_reach_recipe_and_model_but_no_single_mechanism():
    recipe = changed(DIGITS, ["batch_size=32", "compile=true", "depth=1", "clip=none"])
    assert (recipe.batch_size, recipe.compile, recipe.clip, recipe.model_options["depth"]) == (32, True, None, 1)
    with pytest.raises(ValueError, match="unknown extra 'full' in '--change'"):
        changed(DIGITS, ["full"])


def test_the_order_of_extras_makes_no_other_model():
    assert configured(DIGITS, "cumulant3+v_conv+gate") == configured(DIGITS, "cumulant3+gate+v_conv")


def test_options_of_a_layer_stand_behind_it():
    recipe = configured(DIGITS, "cumulant3+top=2+layer=moh+v_conv+shared=1")
    assert recipe.model_options["layer"] == "moh+shared=1+top=2"
    assert recipe.attention_extras == {"v_conv": True}
    with pytest.raises(ValueError, match="unknown extra 'top'"):
        configured(DIGITS, "softmax+layer=gda+top=2")
