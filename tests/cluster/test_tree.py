"""Clusters by content: halves along the direction in which queries tell keys apart, and two levels of them."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from cumulant import zoo
from cumulant.cluster import Blocks, Tree, by_content, cluster_attention, cluster_scores, levels, multiply_adds
from cumulant.cluster.basis import logit_basis
from cumulant.cluster.tree import _sorted, _sorted_at_once, order_of, tree_order

TWO = Tree(8, leaves=4, opened=3)


def tokens(L: int = 101, H: int = 2, D: int = 8, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Keys around a few centres in no order; queries and values at random."""
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)  # noqa: E731
    centres = 2 * draw(H, 8, D)
    key = centres[:, torch.randint(0, 8, (L,), generator=generator)] + 0.3 * draw(H, L, D)
    return draw(1, H, L, D), key.unsqueeze(0), draw(1, H, L, D)


def error(out: Tensor, query: Tensor, key: Tensor, value: Tensor, **options: Tensor) -> float:
    exact = F.scaled_dot_product_attention(query, key, value, **options)
    return float((out - exact).norm() / (exact - value.mean(-2, keepdim=True)).norm())


def two_levels_by_hand(query: Tensor, key: Tensor, value: Tensor, tree: Tree, near: int) -> Tensor:
    """One query head, (L, D) each, by loops over clusters: the formula as it is printed."""
    (L, D), key = key.shape, key - key.mean(0)  # a part of all directions depends on where keys are measured from
    parts = tree.count * tree.leaves
    order = tree_order(query[None], key[None], parts, tree)[0]
    of_query = of_key = torch.eye(D, dtype=key.dtype)
    if tree.width:
        of_query, of_key = (x[0] for x in logit_basis(query[None], key[None], tree.width))
        order = order_of((key @ of_key)[None], parts, tree)[0]
    seen = key @ of_key
    leaves = order.split(-(-L // parts))
    leaves = [*leaves, *[order[:0]] * (parts - len(leaves))]
    clusters = [torch.cat(leaves[c * tree.leaves : (c + 1) * tree.leaves]) for c in range(tree.count)]
    inner = sum((seen[x] - seen[x].mean(0)).T @ (value[x] - value[x].mean(0)) for x in clusters if len(x)) / L
    squares = ((query @ of_query) ** 2).mean(0)
    spread = [sum(len(x) * (squares @ seen[x].var(0, correction=0)) for x in y if len(x)) for y in (leaves, clusters)]
    narrower = float(spread[0] / spread[1])

    def met(q: Tensor, x: Tensor) -> tuple[float, float]:
        if not len(x):
            return -math.inf, 0.0
        q = q @ of_query
        s = float((q**2 @ seen[x].var(0, correction=0)).sqrt())
        return float(q @ seen[x].mean(0)) + math.log(len(x) * math.cosh(s)), s

    rows = []
    for q in query * D**-0.5:
        score = lambda x, q=q: met(q, x)[0] + 2 * math.log(max(met(q, x)[1], 1e-30))  # noqa: E731
        opened = sorted(range(tree.count), key=lambda c: -score(clusters[c]))[: tree.opened]
        inside = [leaves[c * tree.leaves + i] for c in opened for i in range(tree.leaves)]
        inside.sort(key=lambda x: -score(x))
        closed = [x for c, x in enumerate(clusters) if c not in opened and len(x)]
        far = closed + [x for x in inside[near:] if len(x)]
        exact, rests = torch.cat([x for x in inside[:near] if len(x)]), []
        met_far, means = [met(q, x) for x in far], [value[x].mean(0) for x in far]
        if tree.exact:
            looked = seen[exact] @ (q @ of_query)
            exact = exact[looked.topk(min(tree.exact, len(exact))).indices]
            rests = [(x, x[~torch.isin(x, exact)]) for x in inside[:near]]
        for leaf, rest in rests:
            if len(rest):
                met_far.append((float((seen[rest] @ (q @ of_query)).logsumexp(0)), met(q, leaf)[1]))
                means.append(value[rest].mean(0))
        logits = torch.cat((torch.tensor([m for m, _ in met_far], dtype=q.dtype), key[exact] @ q))
        w = logits.softmax(0)
        gains = torch.tensor([math.tanh(s) / s if s else 1.0 for _, s in met_far], dtype=q.dtype)
        gains[len(closed) :] *= narrower
        of_far, of_tokens = w[: len(means)], w[len(means) :]
        lift = (of_far * gains).sum()
        rows.append(of_far @ torch.stack(means) + of_tokens @ value[exact] + lift * (q @ of_query @ inner))
    return torch.stack(rows)


def test_runs_of_the_order_are_alike_and_of_one_size() -> None:
    query, key, _ = tokens(96)
    order = tree_order(query[0], key[0], 8, Tree(8))
    assert torch.equal(order.sort(-1).values, torch.arange(96).expand(2, -1))
    runs = key[0].gather(1, order.unsqueeze(-1).expand_as(key[0])).unflatten(1, (8, 12))
    assert float(runs.var(2).sum()) < 0.5 * float(key[0].unflatten(1, (8, 12)).var(2).sum())


def test_runs_of_more_parts_are_those_of_fewer_cut_further() -> None:
    query, key, _ = tokens(96)
    few, many = (tree_order(query[0], key[0], n, Tree(n)).unflatten(1, (4, 24)).sort(-1).values for n in (4, 16))
    assert torch.equal(few, many)


def test_content_comes_closer_to_softmax_than_the_order_of_the_tokens() -> None:
    q, k, v = tokens()
    by_content, by_place = (cluster_attention(q, k, v, clusters=c, near=2) for c in (Tree(16), 16))
    assert error(by_content, q, k, v) < 0.7 * error(by_place, q, k, v)


@pytest.mark.parametrize(
    "tree",
    [
        Tree(16),
        Tree(16, width=3),
        Tree(8, leaves=4, opened=8),
        replace(TWO, opened=8, width=3),
        replace(TWO, opened=8, width=3, exact=77),
    ],
)
def test_everything_near_is_softmax_with_masks_prefix_groups_and_odd_lengths(tree: Tree) -> None:
    q, k, v = tokens(77)
    mask = torch.arange(77) % 5 != 2
    for prefix in (0, 3):
        out = cluster_attention(q, k, v, clusters=tree, near=64, key_mask=mask[None], prefix=prefix)
        assert error(out, q, k, v, attn_mask=mask[None, None, None]) < 1e-12
    out = cluster_attention(q, k[:, :1], v[:, :1], clusters=tree, near=64, enable_gqa=True)
    assert error(out, q, k[:, :1].expand_as(k), v[:, :1].expand_as(v)) < 1e-12


def test_masked_tokens_change_nothing_whatever_they_hold() -> None:
    q, k, v = tokens(64)
    mask = torch.ones(1, 64, dtype=torch.bool)
    mask[:, 40:] = False
    bad = [x.clone() for x in (k, v)]
    for x in bad:
        x[:, :, 40:] = float("nan")
    for tree in (Tree(4), TWO, replace(TWO, width=3), replace(TWO, width=3, exact=3)):
        out, other = (cluster_attention(q, *kv, clusters=tree, near=2, key_mask=mask) for kv in ((k, v), bad))
        torch.testing.assert_close(out, other)
    nothing = cluster_attention(q, k, v, clusters=TWO, near=2, key_mask=mask & False)
    assert torch.equal(nothing, torch.zeros_like(nothing))


@pytest.mark.parametrize("at_once", [True, False], ids=["all leaves at once", "leaves of each row"])
@pytest.mark.parametrize("width", [0, 3])
@pytest.mark.parametrize("exact", [0, 5])
def test_two_levels_are_the_printed_formula(width: int, exact: int, at_once: bool, monkeypatch) -> None:
    for choice in ("_at_once", "_dense"):
        monkeypatch.setattr(levels, choice, lambda *_: at_once)
    q, k, v = tokens(75, H=1)
    tree = replace(TWO, width=width, exact=exact)
    out = cluster_attention(q, k, v, clusters=tree, near=4)[0, 0]
    torch.testing.assert_close(out, two_levels_by_hand(q[0, 0], k[0, 0], v[0, 0], tree, 4), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("masked", [False, True])
def test_exact_tokens_of_one_product_are_those_moved_to_each_row(masked: bool, monkeypatch) -> None:
    """As a GPU does it and as a CPU does it: outputs and gradients, with leaves that hold nothing too."""
    given = tuple(x.requires_grad_() for x in tokens(75))
    mask = torch.arange(75).view(1, -1) % 5 > 1 if masked else None
    found = []
    for dense in (False, True):
        monkeypatch.setattr(levels, "_dense", lambda *_, dense=dense: dense)
        out = cluster_attention(*given, clusters=replace(TWO, width=3, exact=5), near=4, key_mask=mask)
        found.append((out, *torch.autograd.grad(out.square().sum(), given)))
    torch.testing.assert_close(*found)


def few_directions(L: int = 512, D: int = 24, true: int = 4) -> tuple[Tensor, ...]:
    """Queries and keys whose logits have 4 directions of 24, askew to the axes, and a thousandth of noise."""
    draw = torch.Generator().manual_seed(0)
    low = [torch.randn(1, 2, L, true, dtype=torch.float64, generator=draw) for _ in range(2)]
    turn = torch.randn(2, true, D, dtype=torch.float64, generator=draw)
    noise = [0.03 * torch.randn(1, 2, L, D, dtype=torch.float64, generator=draw) for _ in range(2)]
    q, k = (x @ y + z for x, y, z in zip(low, turn, noise, strict=True))
    return 2 * q, k + 5, torch.randn(1, 2, L, 8, dtype=torch.float64, generator=draw)


def test_a_few_directions_hold_the_logits_that_keys_differ_in() -> None:
    q, k, _ = few_directions()
    of_query, of_key = logit_basis(q[0], k[0], 4)
    logits, few = q[0] @ k[0].mT, (q[0] @ of_query) @ (k[0] @ of_key).mT
    apart = (logits - logits.mean(-1, keepdim=True)) - (few - few.mean(-1, keepdim=True))
    assert apart.var() < 1e-2 * (logits - logits.mean(-1, keepdim=True)).var()
    whole = logit_basis(q[0], k[0], 24)
    torch.testing.assert_close((q[0] @ whole[0]) @ (k[0] @ whole[1]).mT, logits)


def test_a_far_field_of_the_directions_that_matter_is_as_near_to_softmax_as_one_of_all() -> None:
    q, k, v = few_directions()
    tree = Tree(16, leaves=4, opened=4)
    all_of_them, few, fewer = (
        error(cluster_attention(q, k, v, clusters=replace(tree, width=w), near=4), q, k, v) for w in (0, 4, 1)
    )
    assert few < 1.1 * all_of_them
    assert fewer > 2 * few


def test_more_near_leaves_come_closer_to_softmax() -> None:
    q, k, v = tokens(128)
    tree = Tree(8, leaves=4, opened=8)
    errors = [error(cluster_attention(q, k, v, clusters=tree, near=t), q, k, v) for t in (0, 4, 16, 32)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 1e-12


def test_exact_tokens_of_many_leaves_come_closer_than_as_many_of_few_leaves() -> None:
    q, k, v = few_directions()
    tree = Tree(16, leaves=4, opened=8, width=4)  # leaves of 8 tokens
    few = error(cluster_attention(q, k, v, clusters=tree, near=4), q, k, v)
    many = error(cluster_attention(q, k, v, clusters=replace(tree, exact=32), near=16), q, k, v)
    assert many < 0.8 * few


def test_what_is_left_of_a_leaf_has_its_own_mean_value_with_a_mask_too() -> None:
    """Where all logits are 0, any choice of exact tokens gives the mean of all values."""
    q, k, v = tokens(64)
    tree = Tree(4, leaves=2, opened=4, width=3, exact=7)
    for mask in (None, torch.arange(64)[None] % 5 != 2):
        out = cluster_attention(0 * q, k, v, clusters=tree, near=8, key_mask=mask)
        mean = v.mean(-2, keepdim=True) if mask is None else v[:, :, mask[0]].mean(-2, keepdim=True)
        torch.testing.assert_close(out, mean.expand_as(out))


def test_scores_of_exact_tokens_give_the_same_output() -> None:
    q, k, v = tokens(77)
    options = {"clusters": replace(TWO, width=3, exact=6), "near": 4}
    weights = cluster_scores(q, k, **options)
    torch.testing.assert_close(weights.sum(-1), torch.ones_like(weights[..., 0]))
    torch.testing.assert_close(weights @ v, cluster_attention(q, k, v, **options))


def test_one_sort_of_all_nodes_is_a_sort_of_each() -> None:
    places = torch.randn(3, 4, 50, generator=torch.Generator().manual_seed(0))
    places[0, 0, 3], places[2, 1, 7] = float("inf"), -1e30
    assert torch.equal(_sorted_at_once(places), _sorted(places))


def test_a_part_of_many_tokens_says_how_all_are_cut() -> None:
    """4,096 tokens around 8 centres: eight clusters of one size hold what k-means with all of them would leave."""
    q, k, _ = tokens(4096, H=1)
    ordered = k[0].gather(1, tree_order(q[0], k[0], 64, Tree(64)).unsqueeze(-1).expand(-1, -1, 8))
    inside = ordered.unflatten(1, (64, 64)).var(2, correction=0).sum(-1).mean()
    assert inside < 0.15 * k.var(-2, correction=0).sum(-1).mean()


def smooth(rows: int, cols: int, seed: int = 0) -> tuple[Tensor, ...]:
    """Queries, keys and values that change slowly over a grid, two heads of 8."""
    generator = torch.Generator().manual_seed(seed)
    few = 3 * torch.randn(3, 2 * 8, rows // 8, cols // 8, generator=generator, dtype=torch.float64)
    all_tokens = F.interpolate(few, (rows, cols), mode="bicubic").flatten(2).unflatten(1, (2, 8)).mT
    return tuple(x.unsqueeze(0) for x in all_tokens)


@pytest.mark.parametrize("near_rows", [32, 64, 128])
def test_tiles_of_a_long_grid_are_as_near_to_softmax_as_queries_by_content(near_rows, monkeypatch):
    q, k, v = smooth(16, 64)
    given = {"grid": (16, 64), "near_rows": near_rows, "rank": "mean", "response": "pooled", "clusters": Tree(16)}
    plain = [error(cluster_attention(q, k, v, near=near, **given), q, k, v) for near in (2, 4, 16)]
    monkeypatch.setattr(by_content, "LONG_GRID", 512)
    found = [error(cluster_attention(q, k, v, near=near, **given), q, k, v) for near in (2, 4, 16)]
    assert found[2] < 1e-12
    assert all(a < 1.5 * b for a, b in zip(found[:2], plain[:2], strict=True))


def test_tiles_of_a_long_grid_compile_in_one_graph_and_have_gradients(monkeypatch) -> None:
    monkeypatch.setattr(by_content, "LONG_GRID", 256)
    q, k, v = (x.requires_grad_() for x in smooth(16, 16))

    def run(*tensors: Tensor) -> Tensor:
        return cluster_attention(*tensors, clusters=Tree(8), near=2, grid=(16, 16), near_rows=32)

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v), run(q, k, v))
    for gradient in torch.autograd.grad(run(q, k, v).square().sum(), (q, k, v)):
        assert gradient.isfinite().all()
        assert gradient.norm() > 0


@pytest.mark.parametrize("tree", [Tree(8, patch=2), Tree(4, leaves=2, opened=3, patch=2)])
def test_patches_of_a_grid_stay_together_and_are_sorted_by_their_mean_key(tree: Tree) -> None:
    q, k, v = smooth(16, 8)
    given = {"near": 2, "near_rows": 1, "response": "pooled", "rank": "error"}
    out = cluster_attention(q, k, v, clusters=tree, grid=(16, 8), **given)
    at = torch.arange(128).view(8, 2, 4, 2).transpose(1, 2).reshape(32, 4)  # the tokens of each patch
    order = tree_order(q[0], k[0][:, at].mean(2), 8, Tree(8))
    for head, patches in enumerate(order):
        places = at[patches].flatten()
        moved = [x[:, head : head + 1] for x in (q, k[:, :, places], v[:, :, places])]
        if tree.leaves == 1:  # clusters are runs of that order
            torch.testing.assert_close(out[:, head : head + 1], cluster_attention(*moved, clusters=Blocks(16), **given))
    assert error(cluster_attention(q, k, v, clusters=tree, grid=(16, 8), **(given | {"near": 8})), q, k, v) < 1e-2
    everything = cluster_attention(q, k, v, clusters=Tree(8, patch=2), grid=(16, 8), near=8)
    assert error(everything, q, k, v) < 1e-12


def test_what_a_patch_does_not_divide_goes_token_by_token() -> None:
    q, k, v = smooth(9, 8)
    mask = torch.arange(72) % 5 != 2
    for given in ({"grid": (9, 8)}, {"grid": (9, 8), "key_mask": mask[None]}, {}):
        out, plain = (cluster_attention(q, k, v, clusters=Tree(4, patch=p), near=1, **given) for p in (2, 1))
        torch.testing.assert_close(out, plain)


def test_patches_compile_in_one_graph_and_have_gradients() -> None:
    q, k, v = (x.requires_grad_() for x in smooth(16, 16))

    def run(*tensors: Tensor) -> Tensor:
        return cluster_attention(*tensors, clusters=Tree(8, patch=4), near=2, grid=(16, 16), near_rows=32)

    with torch.no_grad():
        torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v), run(q, k, v))
    for gradient in torch.autograd.grad(run(q, k, v).square().sum(), (q, k, v)):
        assert gradient.norm() > 0


@pytest.mark.parametrize("exact", [0, 9])
def test_a_width_compiles_in_one_graph_and_has_gradients(exact: int) -> None:
    q, k, v = (x.requires_grad_() for x in few_directions(L=128))
    tree = Tree(4, leaves=4, opened=2, width=4, exact=exact)
    run = lambda *x: cluster_attention(*x, clusters=tree, near=2)  # noqa: E731
    out = run(q, k, v)
    torch.testing.assert_close(torch.compile(run, fullgraph=True, backend="aot_eager")(q, k, v), out)
    for gradient in torch.autograd.grad(out.square().sum(), (q, k, v)):
        assert gradient.norm() > 0


def test_multiply_adds_count_the_search_and_the_leaves_that_are_opened() -> None:
    L, D, tree = 4096, 96, Tree(64, leaves=4, opened=10)
    # Of nodes of 4,096, 2,048 and 1,024 tokens, 256 say how they are cut: 5 + 1/4 + 1/8 + 1/16 passes of 4 looks.
    search = L * 64 * (D + 8 + 4 * 5.4375)
    found = multiply_adds(L, D, D, 64, near_tokens=192, response="pooled", kmeans=tree)
    assert found == L * ((64 + 40) * 3 * D + D * D + 192 * 2 * D + D + D * D) + search
    narrow = multiply_adds(L, D, D, 64, near_tokens=192, response="pooled", kmeans=replace(tree, width=32))
    search = L * 32 * (D + 8 + 4 * 5.4375) + 2 * 512 * D**2 + 12 * D**3
    assert narrow == L * (D * 32 + (64 + 40) * (64 + D) + 32 * D + 192 * 2 * D + 32 + 32 * D) + search
    few = replace(tree, width=32, exact=50)
    saved = 192 * 2 * D - 192 * 32 - 50 * 2 * D
    assert multiply_adds(L, D, D, 64, near_tokens=192, response="pooled", kmeans=few) == narrow - L * saved
    assert replace(tree, patch=2).multiply_adds(L, D) == L * D + tree.multiply_adds(L // 4, D)


def test_queries_that_share_near_clusters_stay_in_their_places() -> None:
    q, k, v = tokens(256)
    shared = cluster_attention(q, k, v, clusters=Tree(16), near=4, near_rows=32)
    assert error(shared, q, k, v) < error(cluster_attention(q, k, v, clusters=Tree(16)), q, k, v)
    moved = torch.randperm(256)
    again = cluster_attention(q[:, :, moved], k, v, clusters=Tree(16, sample=256), near=16, near_rows=32)
    torch.testing.assert_close(again, F.scaled_dot_product_attention(q[:, :, moved], k, v))


@pytest.mark.parametrize("tree", [Tree(4), Tree(4, leaves=2, opened=2), Tree(2, leaves=2, opened=2, exact=2)])
def test_gradients(tree: Tree) -> None:
    q, k, v = (x[:, :1, :12, :3].clone().requires_grad_() for x in tokens(12, D=4))
    assert torch.autograd.gradcheck(lambda *x: cluster_attention(*x, clusters=tree, near=1), (q, k, v))


def test_wrong_trees_are_told_what_would_be_right() -> None:
    q, k, v = tokens(32)
    for wrong, said in (
        ({"count": 48}, "power of two, got 48: take 32 or 64"),
        ({"count": 8, "leaves": 4}, "go together"),
        ({"count": 0}, "at least 1"),
        ({"count": 4, "width": -1}, "width of Tree"),
        ({"count": 4, "exact": 8}, "it needs leaves and opened"),
    ):
        with pytest.raises(ValueError, match=said):
            Tree(**wrong)
    with pytest.raises(ValueError, match="no neighbours"):
        cluster_attention(q, k, v, clusters=Tree(4), near="neighbours")
    with pytest.raises(TypeError, match="is_causal, got Tree"):
        cluster_attention(q, k, v, clusters=Tree(4), is_causal=True)
    with pytest.raises(ValueError, match="near_rows=1"):
        cluster_attention(q, k, v, clusters=TWO, near=2, near_rows=32)
    with pytest.raises(ValueError, match="those of near leaves: pass near"):
        cluster_attention(q, k, v, clusters=replace(TWO, exact=4))
    for name in ("cluster4+find=tree", "cluster4+width=3", "cluster4+exact=3", "cluster4+patch=2"):
        with pytest.raises(ValueError, match="has no causal form"):
            zoo.get(name)(q, k, v, is_causal=True)
    for name in ("cluster4+leaves=2+opened=1", "cluster4+exact=3"):
        with pytest.raises(ValueError, match="belong to find='tree'"):
            zoo.get(name)(q, k, v)


def test_by_name() -> None:
    q, k, v = tokens(64)
    patched = zoo.get("cluster16+find=tree+patch=2+near=2")(q, k, v, grid=(8, 8))
    torch.testing.assert_close(patched, cluster_attention(q, k, v, clusters=Tree(16, patch=2), near=2, grid=(8, 8)))
    named = zoo.get("cluster16+find=tree+leaves=2+opened=4+near=2")(q, k, v)
    torch.testing.assert_close(named, cluster_attention(q, k, v, clusters=Tree(16, 2, 4), near=2))
    named = zoo.get("cluster16+find=tree+leaves=2+opened=4+near=2+width=3")(q, k, v)
    narrow = Tree(16, 2, 4, width=3, iterations=3)
    torch.testing.assert_close(named, cluster_attention(q, k, v, clusters=narrow, near=2))
    named = zoo.get("cluster16+find=tree+leaves=2+opened=4+near=2+width=3+exact=3")(q, k, v)
    torch.testing.assert_close(named, cluster_attention(q, k, v, clusters=replace(narrow, exact=3), near=2))
    short = zoo.get("cluster16+find=tree+leaves=8+opened=4+near=2+exact=3")(*(x[:, :, :9] for x in (q, k, v)))
    assert short.isfinite().all()
