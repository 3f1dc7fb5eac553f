"""The page of the documentation that lists all mechanisms; its marks come from running them.

To write it again: python -m tools.zoo_page > docs/zoo/index.md
"""

from __future__ import annotations

from cumulant.zoo import capabilities, get, names

HEAD = """# The zoo: published attentions behind one interface

Every mechanism below is called like `F.scaled_dot_product_attention`, works by name in
`nn.MultiheadAttention(..., attention="agent")` and in the vision transformers, and passes one conformance suite
(`tests/conformance`). The marks were filled by running each mechanism, not by declaration; a test keeps this page
true.

"""

PATTERNS = {"noncausal self": "NS", "causal self": "CS", "noncausal cross": "NC", "causal cross": "CC"}

MARKS = {
    "key_mask": "key mask",
    "grouped_queries": "grouped queries",
    "weights": "weights",
    "subquadratic": "sub-quadratic",
    "streaming": "streaming",
    "ragged": "ragged",
}

LEGEND = """
Patterns: NS attention of a sequence to itself, CS the same with only the past in sight, NC to another sequence, CC to
another sequence with only earlier queries in sight. Key mask: padding. Grouped queries: several query
heads share a key head. Weights: the L x L map can be shown. Sub-quadratic: no L x L work. Streaming: a state of
constant size. Ragged: packed sequences of different lengths. Cost: multiply-adds of one head for L tokens,
key width D, value width E, without a causal mask. Parts: the mechanism has parameters of its own in a layer.
"""


def page() -> str:
    """docs/zoo/index.md in Markdown."""
    rows = [["mechanism", "year", "cost", "patterns", *MARKS.values(), "parts"]]
    rows.append(["---"] * len(rows[0]))
    for name in names():
        mechanism, marks = get(name), capabilities(name)[name]
        row = [f"[`{name}`]({name.rstrip('0123456789')}.md)", str(mechanism.year), mechanism.cost]
        # Rows that do not look at other queries have causal cross attention for free.
        has = {
            "NS": marks["noncausal"],
            "CS": marks["causal"],
            "NC": marks["cross"] and marks["noncausal"],
            "CC": marks["cross"] and marks["noncausal"] and marks["independent_rows"],
        }
        row.append(" ".join(pattern for pattern in PATTERNS.values() if has[pattern]))
        row += ["yes" if marks[mark] else "" for mark in MARKS]
        rows.append([*row, "yes" if mechanism.module is not None else ""])
    table = "\n".join("| " + " | ".join(row) + " |" for row in rows)
    return f"{HEAD}{table}\n{LEGEND}"


if __name__ == "__main__":
    print(page(), end="")
