"""Figures are drawn, not empty, and written in three formats; colours say what the text says they do."""

from pathlib import Path

import pytest
import torch
from torch import nn

pytest.importorskip("matplotlib")

from matplotlib import pyplot

import cumulant
from cumulant import explain
from cumulant.explain import figures
from cumulant.explain.map_figures import scale_end
from cumulant.style import DIVERGING, new_figure


def vit(attention: str = "cumulant2") -> nn.Module:
    return cumulant.create_model("vit_nano_patch2_8", attention=attention, num_classes=10, init_std=0.3).eval()


def captured(attention: str = "cumulant2") -> explain.Captured:
    with explain.capture(vit(attention), torch.randn(3, 1, 8, 8)) as found:
        pass
    return found


def colours_of(path: Path) -> int:
    pixels = torch.from_numpy(pyplot.imread(path)[..., :3].copy())
    return len(pixels.flatten(0, 1).unique(dim=0))


def drawings() -> dict:
    found, image = captured(), torch.rand(1, 8, 8)
    importance = {"loss": torch.randn(4, 4), "js": torch.rand(4, 4)}
    curve = explain.PruningCurve((), (0, 8, 16), (0.9, 0.6, 0.1))
    maps, owner = explain.flat_maps(found)
    patterns = explain.find_patterns(maps, owner, clusters=3, code=4, method="pca")
    row = found.maps(0)[0, 0, 6]
    return {
        "overlay": lambda: figures.overlay(found, image, layer=1, head=2, query=6),
        "grid": lambda: figures.layer_grid(found, query=6, image=image),
        "compare": lambda: figures.compare_mechanisms({"a": row, "b": -row}, found.tokens, image=image, query=6),
        "parts": lambda: figures.signed_parts(row, found.tokens, image=image, query=6),
        "profiles": lambda: figures.distance_profiles(found),
        "depth": lambda: figures.distance_by_layer({"cumulant2": found, "softmax": captured("softmax")}),
        "importance": lambda: figures.importance_map(importance),
        "pruning": lambda: figures.pruning_figure({"important first": [curve], "random": [curve, curve]}, chance=0.1),
        "patterns": lambda: figures.pattern_figure(patterns, importance["loss"]),
        "ranks": lambda: figures.correlation_figure(*explain.rank_correlations(importance)),
    }


@pytest.mark.parametrize("name", list(drawings()))
def test_every_figure_is_drawn_and_not_empty(name: str, tmp_path: Path) -> None:
    (file,) = figures.save(drawings()[name](), tmp_path / name, ("png",), dpi=60)
    assert colours_of(file) > 20


def test_a_figure_is_written_as_png_svg_and_pdf(tmp_path: Path) -> None:
    files = figures.save(figures.correlation_figure(["a", "b"], torch.eye(2)), tmp_path / "sub" / "ranks")
    assert [file.suffix for file in files] == [".png", ".svg", ".pdf"]
    starts = {".png": b"\x89PNG", ".svg": b"<?xml", ".pdf": b"%PDF"}
    for file in files:
        assert file.read_bytes().startswith(starts[file.suffix])
        assert file.stat().st_size > 2000
    with pytest.raises(ValueError, match="formats must be among png, svg, pdf, got 'gif'"):
        figures.save(figures.correlation_figure(["a"], torch.eye(1)), tmp_path / "x", ("gif",))


def test_zero_is_white_and_equal_sizes_of_both_signs_are_equally_far_from_it() -> None:
    from matplotlib import colormaps

    shades = colormaps[DIVERGING]
    assert min(shades(0.5)) > 0.95
    _, ((axes,),) = new_figure(1, 1, (2, 2))
    row = torch.zeros(17)
    row[3], row[4] = 0.4, -0.2
    mappable = figures.draw_map(axes, row, explain.TokenLayout(1, (4, 4)))
    assert mappable.norm.vmin == -mappable.norm.vmax
    assert float(mappable.norm(0.0)) == 0.5


def test_a_uniform_map_stays_pale() -> None:
    assert scale_end(torch.ones(16)) == 3.0
    assert scale_end(torch.full((16,), -9.0)) == pytest.approx(9.0)


def test_a_clip_is_drawn_frame_by_frame(tmp_path: Path) -> None:
    model = cumulant.create_model("vivit_nano_patch4x1_16", num_classes=5, variant=3, init_std=0.3, depth=1).eval()
    clip = torch.rand(1, 1, 8, 16, 16)
    with explain.capture(model, clip, queries=[40]) as found:
        pass
    (file,) = figures.save(figures.layer_grid(found, query=40, image=clip[0]), tmp_path / "clip", ("png",), dpi=60)
    assert colours_of(file) > 20


def test_the_callers_settings_are_left_alone() -> None:
    before, backend = dict(pyplot.rcParams), pyplot.get_backend()
    figures.correlation_figure(["a"], torch.eye(1))
    assert dict(pyplot.rcParams) == before
    assert pyplot.get_backend() == backend
    assert pyplot.get_fignums() == []


def test_a_query_that_was_not_captured_is_named() -> None:
    with explain.capture(vit(), torch.randn(1, 1, 8, 8), queries=[2]) as found:
        pass
    with pytest.raises(ValueError, match=r"one that was captured, \[2\].*got 5"):
        figures.overlay(found, torch.rand(1, 8, 8), layer=0, head=0, query=5)


def test_a_grid_of_a_query_that_was_not_captured_names_it() -> None:
    with explain.capture(vit(), torch.randn(1, 1, 8, 8), queries=[3]) as one:
        pass
    with pytest.raises(ValueError, match=r"query must be one that was captured, \[3\].*got 4"):
        figures.layer_grid(one, query=4)


def test_a_head_that_a_layer_does_not_have_gets_no_rank() -> None:
    importance = torch.tensor([[0.3, 0.1], [0.2, torch.nan]])
    shown = figures.importance_map({"loss": importance}).axes[0].texts
    assert sorted(text.get_text() for text in shown) == ["1", "2", "3"]


def test_a_figure_that_cannot_be_drawn_is_not_left_open() -> None:
    found = captured()
    before = pyplot.get_fignums()
    with pytest.raises(ValueError, match="image must be"):
        figures.overlay(found, torch.zeros(2, 8, 8), layer=0, head=0, query=3)
    assert pyplot.get_fignums() == before
