"""The page that writes every mechanism and layer as Y = P(X) X W. To write it again: python -m tools.unified_view.

P, the mixing matrix, is told here in one line a name; cost and abilities come from the registries, the size of the
state from streams that ran. A name without a line is an error, so that nothing new is left out.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from cumulant import nn, zoo

PAGE = Path(__file__).parents[1] / "docs" / "unified.md"
WIDTH = 16  # of keys and values where the state of a stream is counted

P = {  # mechanism -> its mixing matrix, up to a scale of the logits
    "softmax": "softmax over j of q_i.k_j",
    "linear": "phi(q_i).phi(k_j) / sum_j, phi = elu + 1",
    "cumulant1": "1/L",
    "cumulant2": "(1/L) (1 + q_i.k~_j), k~ centred keys",
    "cumulant3": "(1/L) (1 + q_i.k~_j + sum_c q_ic^2 (k~_jc^2 - mean) / 2)",
    "cosformer": "relu(q_i).relu(k_j) cos(pi (i-j) / 2M) / sum_j",
    "flow": "gate_i (s(q_i) / in_i).s(k_j) softmax_j(out_j), s = sigmoid",
    "focused_linear": "phi(q_i).phi(k_j) / sum_j, phi a norm-keeping power; plus a convolution",
    "rala": "alpha_j phi(q_i).phi(k_j) / sum_j, alpha a softmax of the mean query; gated, plus a convolution",
    "mala": "(1 + 1/S_i) s_ij - S_i/L, s = phi(q_i).phi(k_j), S its row sum; gated, plus a convolution",
    "agent": "R G: softmax of queries over agents times softmax of agents over keys; plus a convolution",
    "combiner": "softmax over near keys and regions, the latter spread by p_rj",
    "aaren": "softmax over j <= i of q.k_j, one learned q",
    "lla": "softmax_ij (1 - (k_j - mean).g_i), g_i of a local affine fit",
    "hierarchical": "constant on blocks of sibling subtrees",
    "cluster": "softmax over blocks c of log Z_c, times (1/n_c) (1 + f_c q_i.k~_j) within",
}
LAYERS = {  # layer -> its P in terms of the mechanism's
    "multihead": ("P_h of the mechanism, head by head", "W = W_V W_O"),
    "axial": ("P_h along time in half of the heads, within a frame in the others", "as multihead"),
    "moh": ("g_ih P_h, g a router's choice of heads", "as multihead"),
    "sqa": ("P_h, fewer query heads", "narrower W_O"),
    "gda": ("P_signal - lambda P_noise", "as multihead, with a norm"),
    "complexformer": ("P_h of keys and queries turned by learned phases", "as multihead"),
    "gaam": ("diag(g): channels, or tokens, by a Gaussian of their own value", "as multihead"),
    "rcmha": ("P_h with relative places, of convolved tokens and a memory", "as multihead"),
    "lama": ("1 a^T, one row of weights for all queries", "one vector a head"),
    "sparsifiner": ("P_h on the keys that a cheap guess keeps", "as multihead"),
    "biformer": ("P_h on the tokens of the most related regions", "as multihead"),
    "ia_red2": ("P_h among the tokens that are kept, identity elsewhere", "as multihead"),
    "dual_stream": ("P_h", "W_V and W_O block-diagonal, or joined by one number"),
    "marro": ("P_h over sentences", "as multihead, in a block with residual and norm"),
}
HEAD = """# One view of all mixers

Every mechanism of this library takes tokens X (L x C) to

\\[ Y = P(X)\\, X\\, W \\]

with a mixing matrix P (L x L, one a head) that depends on the tokens, and a map W of channels that does not (values
and output projection). They differ in P alone: how it is made, what it costs when it is never formed, and what has to
be kept to add one more token. Written by `python -m tools.unified_view` from the registries; a test keeps it true.

"""
MECHANISMS = """## Mechanisms

Rows sum to 1: a constant added to all values comes out unchanged. Row by row: a row depends on its own query alone.
State: numbers a head keeps for the next token, counted in a stream with D = E = 16 that ran; *all tokens* where the
past itself is needed, *grows* where summaries are added to.

"""
AFTER = """
## Layers

A layer takes a mechanism and changes who computes P, or what W is. Its cost is the mechanism's, times the share of
heads or tokens that take part.

"""
END = """
## How to read it

| if P is | then |
|---|---|
| a function of q_i.k_j with a sum over j below | L x L work, unless the function is a product of features |
| a product of features | P X W = phi(Q) (phi(K)^T X W): the state is phi(K)^T X W, of fixed size |
| a polynomial of q_i.k~_j | features are monomials, no sum stands below: order 2 keeps one covariance, order 3 two |
| constant on blocks | the state is one summary a block |

How many pairs such a state holds is counted in [the study of memories](studies/pavlovian.md).
"""


def family(name: str) -> str:
    return "cluster" if name.startswith("cluster") else name


def state(name: str) -> str:
    """Numbers that a stream keeps for a head after 8 and after 80 tokens."""
    mechanism = zoo.get(name)
    if mechanism.stream is None:
        return "all tokens"
    kept = []
    for tokens in (8, 80):
        options = {"max_len": 128} if name == "cosformer" else {"segment": 8} if name == "combiner" else {}
        stream = mechanism.stream(**options)
        for _ in range(tokens):
            stream.step(*(torch.ones(1, 1, 1, WIDTH) for _ in range(3)))
        kept.append(numbers(stream, set()))
    return str(kept[0]) if kept[0] == kept[1] else "grows"


def numbers(thing: Any, seen: set[int]) -> int:
    """Elements of all tensors that hang on a stream."""
    if id(thing) in seen:
        return 0
    seen.add(id(thing))
    if isinstance(thing, torch.Tensor):
        return thing.numel()
    if isinstance(thing, dict):
        return sum(numbers(one, seen) for one in thing.values())
    if isinstance(thing, list | tuple):
        return sum(numbers(one, seen) for one in thing)
    names = [*getattr(thing, "__dict__", {}), *getattr(type(thing), "__slots__", ())]
    ours = type(thing).__module__.startswith("cumulant")
    return sum(numbers(getattr(thing, name, None), seen) for name in names) if ours else 0


def page() -> str:
    """docs/unified.md in Markdown."""
    rows = [["mechanism", "P_ij", "cost, one head", "state", "rows sum to 1", "row by row"], ["---"] * 6]
    for name in zoo.names():
        one = zoo.get(name)
        link = f"[`{name}`](zoo/{name.rstrip('0123456789')}.md)"
        yes = ["yes" if mark else "" for mark in (one.value_shift, one.independent_rows)]
        rows.append([link, P[family(name)].replace("|", "\\|"), one.cost, state(name), *yes])
    layers = [["layer", "P", "W"], ["---"] * 3]
    for name in nn.layers():
        link = f"[`{name}`](layers/{name}.md)" if (PAGE.parent / "layers" / f"{name}.md").exists() else f"`{name}`"
        layers.append([link, *LAYERS[name]])
    return HEAD + MECHANISMS + _table(rows) + AFTER + _table(layers) + END


def _table(rows: list[list[str]]) -> str:
    return "".join("| " + " | ".join(row) + " |\n" for row in rows)


def main() -> None:
    PAGE.write_text(page(), encoding="utf-8")
    print(PAGE.name)


if __name__ == "__main__":
    main()
