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
    "sqa": lambda: DIM * D * (2 * 2 + 2 * 1) + DIM,  # 2 query heads, 1 key head
    "gda": lambda: DIM * D * (4 + 2 * 2 + 2 * 3) + 4 * D + 2 * D,  # 3 signal heads, 1 noise head, 1 pair of key heads
    "complexformer": lambda: 4 * DIM * DIM + DIM,
    "gaam": lambda: ATTENTION + 2 * 5 * HEADS,
    "lama": lambda: 2 * DIM * HEADS + HEADS * DIM * DIM + DIM,
    "rcmha": lambda: ATTENTION + 2 * 512 * (DIM + HEADS) + DIM + 3 * (3 * D + D),
    "sparsifiner": lambda: ATTENTION + 2 * (D * D // 2 + D // 2) + 2 * 12 * 2,  # 12 tokens, 2 basis maps
    "biformer": lambda: ATTENTION + 25 * DIM,  # a bias of the convolution would be one of the projection
    "ia_red2": lambda: ATTENTION + 2 * DIM * DIM + 2 * DIM,
    "dual_stream": lambda: 2 * DIM * DIM + 2 * HEADS * HEADS,
    "marro": lambda: ATTENTION + 2 * DIM,
}

# Parameters that the task does not teach, by the beginning of their name.
UNREACHED = {"sparsifiner": "predictor.", "ia_red2": "interpreter."}

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
    "sqa": [
        (30, 4, {}, "dim must be a positive multiple of num_heads"),
        (36, 6, {}, "variant 'sqa' of layer 'sqa' needs num_heads to be a multiple of 4, got num_heads=6.*num_heads=8"),
        (32, 4, {"variant": "msqa"}, "variant must be one of 'sqa', 'ssqa'"),
        (32, 8, {"query_heads": 4, "key_heads": 3}, "query_heads=4 and key_heads=3 must divide.*works: key_heads=2"),
        (32, 4, {"query_heads": 5}, "query_heads and key_heads must be from 1 to num_heads=4, got 5 and 1"),
        (
            32,
            4,
            {"attention": "flow"},
            "layer 'sqa' has 2 query heads over 1 key heads and needs grouped queries, which "
            "'flow' does not have; nearest mechanism that has it: '.*'; or key_heads=2",
        ),
    ],
    "gda": [
        (30, 4, {}, "dim must be a positive multiple of num_heads"),
        (32, 4, {"ratio": 2}, r"ratio=2 of layer 'gda' needs num_heads to be a multiple of ratio \+ 1.*num_heads=3"),
        (35, 7, {}, "num_heads=7 is not a multiple of 2, 3, 4, 5, 6; nearest that works: num_heads=8"),
        (32, 8, {"pairs": 3}, r"pairs must divide the 2 noise heads, one of \[1, 2\], got pairs=3"),
        (
            32,
            4,
            {"attention": "agent"},
            "layer 'gda' cannot be over 'agent': .* nearest mechanism that works: 'cumulant3'",
        ),
        (32, 4, {"v_conv": 3}, "layer 'gda' has heads in groups and no v_conv, got v_conv=3"),
    ],
    "complexformer": [
        (30, 4, {}, "dim must be a positive multiple of num_heads"),
        (36, 4, {}, "dim / num_heads must be even, got 36 / 4 = 9; nearest that works: num_heads=3"),
    ],
    "lama": [
        (32, 0, {}, "num_heads"),
        (32, 4, {"rank": 0}, "rank must be at least 1, got 0"),
        (32, 4, {"context": "max"}, "context must be one of 'mean', 'learned', got 'max'"),
        (32, 4, {"qk_norm": True}, "layer 'lama' has no projected query and key, and no qk_norm"),
        (
            32,
            4,
            {"attention": "lla"},
            "layer 'lama' cannot be over 'lla': .* nearest mechanism that works: 'cumulant3'",
        ),
    ],
    "gaam": [
        (30, 4, {}, "dim must be a positive multiple of num_heads"),
        (32, 4, {"form": "experiment"}, 'form="experiment" has a width for every feature, which needs axis="tokens"'),
        (32, 4, {"axis": "tokens", "attention": "linear"}, "takes no mechanism, got attention='linear'"),
        (32, 32, {}, "dim / num_heads must be at least 2, got 32 / 32; nearest that works: num_heads=16"),
    ],
    "rcmha": [
        (32, 4, {"attention": "cumulant3"}, "needs attention='softmax', got 'cumulant3'.*relative=False"),
        (32, 4, {"offsets": 0}, "offsets must be at least 1, got 0"),
    ],
    "sparsifiner": [
        (32, 4, {"keep": 0}, "keep must be a share of the keys above 0, at most 1, got 0"),
        (32, 4, {"attention": "combiner"}, "needs cross, which 'combiner' does not have; nearest mechanism that has"),
        (32, 4, {"stage": "third"}, "stage must be one of 'sparse', 'reconstruct', got 'third'"),
    ],
    "biformer": [
        (32, 4, {"regions": 2, "top": 5}, "top=5 regions of 2 x 2.*cannot choose more regions than there are"),
        (32, 4, {"far": True, "attention": "linear"}, "far=True expands softmax.*got attention='linear'"),
        (32, 4, {"attention": "hierarchical"}, "needs cross, which 'hierarchical' does not have"),
    ],
    "ia_red2": [(32, 4, {"interpreter_heads": 5}, "interpreter heads must divide the width 32, got 5")],
    "dual_stream": [
        (32, 4, {"mixing": "some"}, "mixing must be one of 'identity', 'independent'"),
        (32, 4, {"alpha": -1.0}, "alpha must be a finite factor of 0 or more, got -1"),
        (32, 4, {"num_kv_heads": 2}, "has a block of channels for each head: no num_kv_heads"),
    ],
    "marro": [(32, 4, {"block_drop": 1.0}, "block_drop must be at least 0 and below 1, got 1")],
}
