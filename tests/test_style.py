"""One palette: told apart by everybody, on light and on dark, and the same in figures, reports and the explorer."""

import itertools
import json
import re
from pathlib import Path

import numpy as np
import pytest

from cumulant import style, zoo

SCRIPT = (Path(style.__file__).parent / "web" / "static" / "colour.js").read_text()
# What people see who lack one kind of cone (Machado, Oliveira, Fernandes 2009), on linear RGB.
EYES = {
    "all cones": np.eye(3),
    "no red": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "no green": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    "no blue": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
}


def linear(colour):
    share = np.array([int(colour[i : i + 2], 16) for i in (1, 3, 5)]) / 255
    return np.where(share <= 0.04045, share / 12.92, ((share + 0.055) / 1.055) ** 2.4)


def lab(light):
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    x, y, z = np.cbrt(to_xyz @ np.clip(light, 1e-6, 1) / [0.9505, 1, 1.089])
    return np.array([116 * y - 16, 500 * (x - y), 200 * (y - z)])


def contrast(one, other):
    low, high = sorted(float(linear(colour) @ [0.2126, 0.7152, 0.0722]) for colour in (one, other))
    return (high + 0.05) / (low + 0.05)


@pytest.mark.parametrize("eyes", EYES)
def test_the_mechanisms_of_every_comparison_are_told_apart(eyes):
    main = list(style.COLOURS.values())[:5]
    seen = [lab(np.array(EYES[eyes]) @ linear(colour)) for colour in main]
    assert min(np.linalg.norm(a - b) for a, b in itertools.combinations(seen, 2)) > 20


@pytest.mark.parametrize("paper", style.PAGE["paper"])
def test_every_colour_is_seen_on_light_and_on_dark(paper):
    everything = [*style.COLOURS.values(), *style.ALIKE.values(), *style.SPARE]
    assert min(contrast(colour, paper) for colour in everything) > 2.5


def test_every_mechanism_has_a_colour_of_its_own():
    assert set(zoo.names()) <= set(style.COLOURS)
    assert len(set(style.COLOURS.values())) == len(style.COLOURS)


def test_a_setting_has_the_colour_of_its_mechanism_and_is_drawn_dashed():
    assert style.colour("agent+agents=16") == style.COLOURS["agent"]
    assert style.dashed("agent+agents=16")
    assert not style.dashed("agent")
    assert style.mark("agent+agents=16") == style.mark("agent")
    beside = style.palette(["cumulant3", "cumulant3+v_conv"])
    assert beside["cumulant3+v_conv"] != beside["cumulant3"] == style.COLOURS["cumulant3"]


def test_the_explorer_has_the_same_palettes():
    known = {name: json.loads(f"[{values.strip().rstrip(',')}]")
             for name, values in re.findall(r"const (\w+) = \[(.*?)\];", SCRIPT, re.DOTALL)}  # fmt: skip
    assert known == {
        "NEGATIVE": list(style.NEGATIVE),
        "POSITIVE": list(style.POSITIVE),
        "SEQUENTIAL": list(style.SHADES),
        "SPARE": list(style.SPARE),
    }
    table = re.search(r"MECHANISMS = \{(.*?)\};", SCRIPT, re.DOTALL)[1]
    assert dict(re.findall(r'(\w+): "(#\w+)"', table)) == style.COLOURS


def test_figures_and_pages_show_signs_in_the_same_colours():
    matplotlib = pytest.importorskip("matplotlib")
    stops = [*style.NEGATIVE[::-1], *style.POSITIVE[1:]]
    drawn = matplotlib.colormaps[style.DIVERGING](np.linspace(0, 1, len(stops)))
    for colour, found in zip(stops, drawn, strict=True):
        assert [int(colour[i : i + 2], 16) for i in (1, 3, 5)] == pytest.approx(255 * found[:3], abs=4)


def test_the_same_figure_gives_the_same_bytes(tmp_path):
    pytest.importorskip("matplotlib")
    for name in ("one", "two"):
        figure, ((axes,),) = style.new_figure(1, 1, (2, 2))
        axes.plot([1, 2], [3, 4])
        style.save(figure, tmp_path / name)
    for suffix in style.FORMATS:
        assert (tmp_path / f"one.{suffix}").read_bytes() == (tmp_path / f"two.{suffix}").read_bytes()
