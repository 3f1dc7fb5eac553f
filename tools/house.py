"""Draws docs/figures/architecture.svg, the map of the rooms: `python tools/house.py`."""

from __future__ import annotations

from pathlib import Path

OUTSIDE = ("inspect", "conversion", "explain", "bench", "studies", "web")
INNER = (
    ("train", "loop, recipes"),
    ("distributed", "split sequences"),
    ("data", "readers"),
    ("models", "networks"),
    ("nn", "layers"),
    ("zoo", "mechanisms"),
    ("cluster", "local cumulants"),
    ("attention", "the expansion"),
    ("kernels", "Triton, CPU"),
)
GROUND = "call · moments · closures · tensors · tracing · style"
WIDE, HIGH, GAP, LEFT = 108, 58, 14, 20


def box(x: float, y: float, width: float, title: str, below: str, fill: str) -> str:
    middle = x + width / 2
    text = f'<text x="{middle}" y="{y + (25 if below else 34)}" class="t">{title}</text>'
    if below:
        text += f'<text x="{middle}" y="{y + 43}" class="s">{below}</text>'
    return f'<rect x="{x}" y="{y}" width="{width}" height="{HIGH}" rx="7" fill="{fill}" stroke="#444"/>{text}'


def drawing() -> str:
    width = 2 * LEFT + len(INNER) * WIDE + (len(INNER) - 1) * GAP
    inside = width - 2 * LEFT
    step = (inside + GAP) / len(OUTSIDE)
    parts = [box(LEFT, 20, inside, "cli · cumulant.*", "what a user calls", "#fff3d6")]
    parts += [box(LEFT + i * step, 112, step - GAP, name, "", "#e3ecfb") for i, name in enumerate(OUTSIDE)]
    for i, (name, below) in enumerate(INNER):
        x = LEFT + i * (WIDE + GAP)
        parts.append(box(x, 204, WIDE, name, below, "#e2f3e6"))
        if i:
            parts.append(f'<line x1="{x - GAP}" y1="{204 + HIGH / 2}" x2="{x - 2}" y2="{204 + HIGH / 2}" class="a"/>')
    parts.append(box(LEFT, 296, inside, GROUND, "what every room may use", "#eeeeee"))
    for y, words in (
        (98, "looks into every room"),
        (190, "look in from outside, each only at those before it"),
        (282, ""),
    ):
        parts.append(f'<line x1="{width / 2}" y1="{y - 18}" x2="{width / 2}" y2="{y + 12}" class="a"/>')
        parts.append(f'<text x="{width / 2 + 12}" y="{y + 1}" class="n">{words}</text>')
    style = (
        "text{font-family:system-ui,sans-serif;text-anchor:middle;fill:#222}.t{font-size:15px;font-weight:600}"
        ".s{font-size:10.5px;fill:#555}.n{font-size:11px;fill:#666;text-anchor:start}"
        ".a{stroke:#444;stroke-width:1.5;marker-end:url(#m)}"
    )
    head = (
        '<marker id="m" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="6" markerHeight="6" orient="auto">'
        '<path d="M0 0L10 5L0 10z" fill="#444"/></marker>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} 374"><style>{style}</style><defs>{head}</defs>'
        f'<rect width="{width}" height="374" fill="#fff"/>{"".join(parts)}</svg>\n'
    )


if __name__ == "__main__":
    file = Path(__file__).parents[1] / "docs" / "figures" / "architecture.svg"
    file.write_text(drawing(), encoding="utf-8")
    print(f"wrote {file.name}")
