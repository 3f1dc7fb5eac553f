"""Tables and pictures of docs/models.md, and what `cumulant list models` says: python tools/models_page.py

A table stands between `<!-- models: PREFIX -->` and `<!-- end -->`; pictures are docs/figures/model-NAME.svg.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

from cumulant.listing import counted, multiply_adds
from cumulant.models import create_model, names
from cumulant.models.registry import input_shape

DOCS = Path(__file__).parents[1] / "docs"
COUNTED = Path(__file__).parents[1] / "src" / "cumulant" / "models" / "counted.json"  # for 1000 classes
MARKED = re.compile(r"(<!-- models: (\w+) -->\n).*?(<!-- end -->)", re.DOTALL)
CLASSES = {"activator": 10}  # those of the data that a small network is for
COLOURS = {"plain": "#e8ecf1", "attention": "#f6c344", "conv": "#a8d5ba", "sum": "#ffffff", "none": "none"}

# Boxes in rows: (column, row, width, text, colour), "none" for words without a box; arrows between boxes by number.
Box = tuple[float, float, float, str, str]
PICTURES: dict[str, tuple[list[Box], list[tuple[int, int]]]] = {
    "tnt": (
        [
            (0, 0, 2, "image\ncut into patches", "plain"),
            (2.6, 0, 2.2, "7 x 7 convolution\nwithin each patch", "conv"),
            (5.4, 0, 2.2, "words: 16 a patch\nattention inside", "attention"),
            (5.4, 1.5, 2.2, "16 words, flat\nnorm, linear, norm", "plain"),
            (2.6, 3, 2.2, "class token, patches\n+ positions", "plain"),
            (5.4, 3, 2.2, "+ words, then attention\nover all patches", "attention"),
            (8.2, 3, 1.6, "class token\nlinear", "plain"),
        ],
        [(0, 1), (1, 2), (2, 3), (3, 5), (4, 5), (5, 6)],
    ),
    "crossvit": (
        [
            (0, 0, 2, "240 px\npatches of 12", "plain"),
            (2.6, 0, 2.2, "fine branch: 401 tokens\n1 block", "attention"),
            (5.4, 0, 2.4, "its class token asks\nthe coarse patches", "attention"),
            (8.4, 0, 1.4, "head", "plain"),
            (0, 2, 2, "224 px\npatches of 16", "plain"),
            (2.6, 2, 2.2, "coarse branch: 197\ntokens, 3 to 6 blocks", "attention"),
            (5.4, 2, 2.4, "its class token asks\nthe fine patches", "attention"),
            (8.4, 2, 1.4, "head", "plain"),
        ],
        [(0, 1), (1, 2), (2, 3), (4, 5), (5, 6), (6, 7), (1, 6), (5, 2)],
    ),
    "shvit": (
        [
            (0, 1, 1.9, "four 3 x 3, stride 2\n1/16 of the image", "conv"),
            (2.4, 1, 1.7, "depthwise 3 x 3\nresidual", "conv"),
            (4.6, 0, 2, "a fifth of the channels\none head", "attention"),
            (4.6, 2, 2, "the others\npass by", "plain"),
            (7.1, 1, 1.7, "ReLU, 1 x 1\nresidual", "conv"),
            (9.3, 1, 1.6, "1 x 1, ReLU, 1 x 1\nresidual", "conv"),
        ],
        [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5)],
    ),
    "activator": (
        [
            (0, 1, 1.8, "4 x 4 patches\nno positions", "plain"),
            (2.3, 1, 1.4, "norm", "plain"),
            (4.2, 0, 2.1, "linear, GELU, norm", "plain"),
            (4.2, 2, 2.1, "linear, norm", "plain"),
            (6.8, 1, 1.8, "product, linear\nresidual", "sum"),
            (9.1, 1, 1.7, "same norm, MLP\nresidual", "plain"),
            (11.3, 1, 1.6, "mean of tokens\nlinear", "plain"),
        ],
        [(0, 1), (1, 2), (1, 3), (2, 4), (3, 4), (4, 5), (5, 6)],
    ),
    "maxvit": (
        [
            (0, 1, 1.7, "stem: two 3 x 3\nstride 2", "conv"),
            (2.2, 1, 1.9, "MBConv, first of a\nstage: stride 2", "conv"),
            (4.6, 1, 1.9, "attention in\nwindows 7 x 7", "attention"),
            (7, 1, 1.1, "MLP", "plain"),
            (8.6, 1, 2.1, "attention on dilated\ngrids 7 x 7", "attention"),
            (11.2, 1, 1.1, "MLP", "plain"),
            (12.8, 1, 1.6, "mean, norm, tanh\nlinear", "plain"),
            (4.6, 0, 4.6, "a block: five residual parts; four stages of them, strides 4 to 32", "none"),
        ],
        [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)],
    ),
    "spectformer": (
        [
            (0, 1, 1.6, "patches\n16 x 16", "conv"),
            (2.1, 1, 2.1, "frequencies of the map\ntimes learned numbers", "conv"),
            (4.7, 1, 1.5, "MLP\none residual", "plain"),
            (6.7, 1, 1.5, "attention\nresidual", "attention"),
            (8.7, 1, 1.4, "MLP\nresidual", "plain"),
            (10.6, 1, 1.6, "mean of tokens\nlinear", "plain"),
            (2.1, 0, 4.1, "the first blocks", "none"),
            (6.7, 0, 3.4, "the others", "none"),
        ],
        [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)],
    ),
    "tic": (
        [
            (0, 1, 1.7, "3 x 3\nconvolution", "conv"),
            (2.2, 1, 1.7, "query, key, value\nby 1 x 1", "conv"),
            (4.4, 1, 2, "attention of each place\nto its k x k window", "attention"),
            (6.9, 1, 1.2, "+ input", "sum"),
            (8.6, 1, 2, "k x k convolution\nstride, ReLU", "conv"),
            (11.1, 1, 1.6, "mean of places\nlinear", "plain"),
            (2.2, 0, 8.4, "the released layer, repeated", "none"),
        ],
        [(0, 1), (1, 2), (2, 3), (3, 4), (4, 5)],
    ),
}
UNIT, HEIGHT, STEP, MARGIN = 72, 46, 52, 12


def picture(boxes: list[Box], arrows: list[tuple[int, int]]) -> str:
    """An SVG with text that follows the page's size; yellow is attention, green convolution."""
    wide = max(x + width for x, _, width, _, _ in boxes) * UNIT + 2 * MARGIN
    tall = max(row for _, row, _, _, _ in boxes) * STEP + HEIGHT + 2 * MARGIN
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {wide:.0f} {tall:.0f}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="#ffffff"/><defs><marker id="a" viewBox="0 0 8 8" '
        'refX="8" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        '<path d="M0 0L8 4L0 8z" fill="#555"/></marker></defs>'
    ]
    for one, other in arrows:
        (x, row, width, _, _), (x2, row2, width2, _, _) = boxes[one], boxes[other]
        below = x2 < x + width  # in one column: from the lower edge to the upper
        ends = (
            ((x + width / 2) * UNIT, row * STEP + HEIGHT, (x2 + width2 / 2) * UNIT, row2 * STEP)
            if below
            else ((x + width) * UNIT, row * STEP + HEIGHT / 2, x2 * UNIT, row2 * STEP + HEIGHT / 2)
        )
        x1, y1, x2, y2 = (end + MARGIN for end in ends)
        parts.append(
            f'<line x1="{x1:.0f}" y1="{y1:.0f}" x2="{x2:.0f}" y2="{y2:.0f}" stroke="#555" marker-end="url(#a)"/>'
        )
    for x, row, width, text, colour in boxes:
        line = "none" if colour == "none" else "#555"
        left, top, lines = x * UNIT + MARGIN, row * STEP + MARGIN, text.split("\n")
        parts.append(
            f'<rect x="{left:.0f}" y="{top:.0f}" width="{width * UNIT:.0f}" height="{HEIGHT}" rx="6" '
            f'fill="{COLOURS[colour]}" stroke="{line}"/>'
        )
        for number, line in enumerate(lines):
            y = top + HEIGHT / 2 + 4 + 15 * (number - (len(lines) - 1) / 2)
            parts.append(f'<text x="{left + width * UNIT / 2:.0f}" y="{y:.0f}" text-anchor="middle">{line}</text>')
    return "\n".join([*parts, "</svg>\n"])


def table(prefix: str) -> str:
    """Names of a family with parameters and multiply-adds, for 1000 classes or those it is made for."""
    classes, known = CLASSES.get(prefix, 1000), json.loads(COUNTED.read_text(encoding="utf-8"))
    lines = [f"| name | input | parameters, {classes} classes | GMACs |", "|---|---|---|---|"]
    for name in [name for name in names() if name.split("_")[0] == prefix and "nano" not in name]:
        model, shape = create_model(name, num_classes=classes, device="meta"), input_shape(name)
        count = sum(weight.numel() for weight in model.parameters())
        work = known[name][1] if classes == 1000 else multiply_adds(model, shape)
        lines.append(f"| `{name}` | {' x '.join(map(str, shape))} | {count:,} | {(work or 0) / 1e9:.3f} |")
    return "\n".join(lines) + "\n"


def page(text: str) -> str:
    """The page with its tables made anew."""
    return MARKED.sub(lambda found: f"{found[1]}\n{table(found[2])}\n{found[3]}", text)


def main() -> int:
    rows = ",\n".join(f"{json.dumps(name)}: {json.dumps(counted(name))}" for name in names())
    COUNTED.write_text(f"{{\n{rows}\n}}\n", encoding="utf-8")
    path = DOCS / "models.md"
    path.write_text(page(path.read_text(encoding="utf-8")), encoding="utf-8")
    for name, (boxes, arrows) in PICTURES.items():
        (DOCS / "figures" / f"model-{name}.svg").write_text(picture(boxes, arrows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
