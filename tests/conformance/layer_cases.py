"""What the conformance tests of layers share: parameter counts of their pages, and what each refuses."""

from collections.abc import Callable

from cumulant import nn
from cumulant.nn.probes import DIM, HEADS

NAMES = nn.layers()
D = DIM // HEADS

# Parameters of `create_layer(name, DIM, HEADS)` by the formula of the page; biases where the layer's default has them.
ATTENTION = 4 * DIM * DIM + 4 * DIM
PARAMETERS: dict[str, Callable[[], int]] = {
    "multihead": lambda: ATTENTION,
    "axial": lambda: ATTENTION,
    "moh": lambda: ATTENTION + DIM * (3 + 2),  # 1 shared and 3 routed heads: a router and two stages
}

# name -> (dim, heads, options, words of the error): what each layer refuses, and how.
REFUSED: dict[str, list[tuple[int, int, dict, str]]] = {
    "multihead": [(30, 4, {}, "dim must be a positive multiple of num_heads, got dim=30, num_heads=4")],
    "axial": [(32, 1, {}, "num_heads must be even")],
    "moh": [
        (30, 4, {}, "dim must be a positive multiple of num_heads"),
        (
            32,
            4,
            {"shared": 2, "top": 3},
            "top=3 of 2 routed heads.*cannot choose more heads than there are; take top=2",
        ),
        (32, 4, {"shared": 5}, "shared must be from 0 to num_heads=4, got shared=5"),
        (32, 4, {"top": 0}, "top=0 leaves 3 routed heads that no token uses"),
        (32, 4, {"router": "random"}, "router must be one of 'learned', 'norm'"),
    ],
}
