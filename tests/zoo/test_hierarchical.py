"""Hierarchical attention against a recursive reference and the KL projection it is defined by."""

import math
import random

import pytest
import torch
import torch.nn.functional as F
from random_tokens import draw

from cumulant.call import Call
from cumulant.nn import MultiheadAttention
from cumulant.zoo import hierarchical
from cumulant.zoo.hierarchical import HierarchicalAttention, make_tree
from cumulant.zoo.probes import LargestTensor
from cumulant.zoo.tree import Tree

HSA = hierarchical.HIERARCHICAL


def energy_of(query, key, **layout):
    """phi(root), (..., H): its gradient is the attention, -N d phi / d q_i = scale sum_j theta_ij k_j."""
    call = Call(query, key, key).prepared()
    tree = make_tree(query.shape[-2], device=query.device, **layout)
    found = hierarchical._leaves(call, "dot", tree, None)
    return hierarchical._up(found, tree, call.softmax_scale, None, torch.float32)[1].squeeze(-1)


def leaves(node):
    return [node] if isinstance(node, int) else [i for child in node for i in leaves(child)]


def recursive(q, k, tree, weight=None, energy="dot"):
    """Dense theta (N, N) and phi(root) of one head, straight from the recursion. q, k (N, D)."""
    N, D = q.shape
    weight = [1.0] * N if weight is None else weight

    def n(node):
        return sum(weight[i] for i in leaves(node))

    def mean(x, node):
        return sum(weight[i] * x[i] for i in leaves(node)) / n(node)

    def score(B, C):
        if energy == "dot":
            return mean(q, B) @ mean(k, C) / math.sqrt(D)
        pairs = sum(weight[i] * weight[j] * (q[i] - k[j]).square().sum() for i in leaves(B) for j in leaves(C))
        return -pairs / (2 * math.sqrt(D) * n(B) * n(C))

    def children(node):
        return [c for c in node if n(c) > 0]

    def Z(B, A):
        return (-phi(B)).exp() + sum(n(C) * score(B, C).exp() for C in children(A) if C is not B)

    def phi(node):
        if isinstance(node, int):
            return -(score(node, node) + math.log(weight[node]))
        return -sum(n(B) / n(node) * Z(B, node).log() for B in children(node))

    theta = q.new_zeros(N, N)

    def descend(node, mass):
        if isinstance(node, int):
            theta[node, node] = mass
            return
        for B in children(node):
            z = Z(B, node)
            for C in children(node):
                if C is not B:
                    for i in (i for i in leaves(B) if weight[i]):
                        for j in leaves(C):
                            theta[i, j] = mass * weight[j] * score(B, C).exp() / z
            descend(B, mass * (-phi(B)).exp() / z)

    descend(tree, q.new_ones(()))
    return theta, phi(tree)


def nested(tree, level=None, node=0):
    """A `Tree` written out again as nested lists of tokens."""
    level = len(tree.levels) - 1 if level is None else level
    children = [int(c) for c in tree.levels[level].children[node] if c >= 0]
    return children if level == 0 else [nested(tree, level - 1, c) for c in children]


TREES = {
    "flat": list(range(7)),
    "two levels": [[0, 1, 2], [3, 4], [5, 6]],
    "not in order": [[4, 0], [6, 2, 1], [5, 3]],
    "leaves at all depths": [0, [1, [2, [3, 4]]], [5, 6]],
    "four levels": [[[[0, 1], [2]], [[3]]], [[[4, 5], [6]]]],
    "sequence of 4": make_tree(7, branching=2),
    "grid and prefix": make_tree(7, grid=(2, 3), prefix=1),
    "grid with a wide root": make_tree(7, grid=(3, 2), prefix=1, branching=(1, 2), levels=1),
}


@pytest.mark.parametrize("name", TREES)
@pytest.mark.parametrize("energy", ["dot", "l2"])
@pytest.mark.parametrize("weights", [None, [2.0, 0.0, 1.0, 0.5, 0.0, 1.0, 3.0]])
def test_it_is_the_recursion(name, energy, weights):
    query, key, value = draw((1, 2, 7, 3), (1, 2, 7, 3), (1, 2, 7, 5))
    plain = nested(TREES[name]) if isinstance(TREES[name], Tree) else TREES[name]
    theta = torch.stack([recursive(query[0, h], key[0, h], plain, weights, energy)[0] for h in range(2)])[None]
    options = {"tree": TREES[name], "energy": energy}
    options["key_mask"] = None if weights is None else torch.tensor([weights], dtype=torch.float64)
    torch.testing.assert_close(HSA.scores(query, key, **options), theta, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(HSA(query, key, value, **options), theta @ value, rtol=1e-10, atol=1e-12)


def random_tree(tokens, rng, depth=0):
    if len(tokens) == 1:
        return tokens[0]
    if depth == 4 or len(tokens) == 2:
        return list(tokens)
    cuts = sorted(rng.sample(range(1, len(tokens)), rng.randint(1, min(3, len(tokens) - 1))))
    parts = [tokens[a:b] for a, b in zip([0, *cuts], [*cuts, len(tokens)], strict=True)]
    return [random_tree(part, rng, depth + 1) for part in parts]


@pytest.mark.parametrize("seed", range(5))
def test_random_ragged_trees_agree_with_the_recursion_and_so_do_their_gradients(seed):
    rng = random.Random(seed)
    order = list(range(9))
    rng.shuffle(order)
    tree = random_tree(order, rng)
    query, key, value = (x.requires_grad_() for x in draw((1, 1, 9, 3), (1, 1, 9, 3), (1, 1, 9, 2), seed=seed))
    (cotangent,) = draw((1, 1, 9, 2), seed=seed + 100)
    naive = (recursive(query[0, 0], key[0, 0], tree)[0] @ value[0, 0])[None, None]
    ours = HSA(query, key, value, tree=tree)
    torch.testing.assert_close(ours, naive, rtol=1e-10, atol=1e-12)
    for got, wanted in zip(
        *(torch.autograd.grad(o, (query, key, value), cotangent) for o in (ours, naive)), strict=True
    ):
        torch.testing.assert_close(got, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize("length", [1, 2, 4, 5, 16, 17, 30])
@pytest.mark.parametrize("branching", [2, 3, 4])
def test_regular_trees_of_any_length_agree_with_the_recursion(length, branching):
    query, key, value = draw((1, 1, length, 3), (1, 1, length, 3), (1, 1, length, 2))
    theta, _ = recursive(query[0, 0], key[0, 0], nested(make_tree(length, branching=branching)))
    torch.testing.assert_close(HSA(query, key, value, branching=branching)[0, 0], theta @ value[0, 0])


def test_a_flat_tree_is_softmax():
    query, key, value = draw((2, 2, 9, 4), (2, 2, 9, 4), (2, 2, 9, 5))
    out = HSA(query, key, value, tree=list(range(9)))
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, value))
    torch.testing.assert_close(HSA(query, key, value, levels=0), out)


def test_chains_of_single_children_change_nothing():
    query, key, value = draw((1, 1, 6, 4), (1, 1, 6, 4), (1, 1, 6, 5))
    plain, chained = [[0, 1, 2], [3, 4], 5], [[[[0, 1, [2]]], [[3, 4]], [[[5]]]]]
    torch.testing.assert_close(HSA(query, key, value, tree=chained), HSA(query, key, value, tree=plain))


def test_weights_are_positive_with_rows_of_sum_one_and_constant_on_sibling_blocks():
    query, key, value = draw((1, 1, 16, 4), (1, 1, 16, 4), (1, 1, 16, 3))
    theta = HSA.scores(query, key, branching=4)[0, 0]
    torch.testing.assert_close(theta.sum(-1), torch.ones(16, dtype=torch.float64))
    assert (theta > 0).all()
    for B in range(4):
        for C in range(4):
            block = theta[4 * B : 4 * B + 4, 4 * C : 4 * C + 4]
            if B != C:
                torch.testing.assert_close(block, block[:1, :1].expand(4, 4))
    out = HSA(query, key, value, branching=4)
    assert (out <= value.amax(-2, keepdim=True)).all()
    assert (out >= value.amin(-2, keepdim=True)).all()


def kl(theta, softmax):
    return (theta * (theta / softmax).log()).sum()


def test_it_is_the_nearest_block_matrix_to_softmax_and_the_energy_says_how_near():
    query, key = draw((1, 1, 9, 4), (1, 1, 9, 4))
    tree = [[0, 1, 2], [3, [4, 5]], [6, 7, 8]]
    logits = query[0, 0] @ key[0, 0].mT / 2
    theta, softmax = HSA.scores(query, key, tree=tree)[0, 0], logits.softmax(-1)
    best = kl(theta, softmax)
    energy = energy_of(query, key, tree=tree)
    torch.testing.assert_close(9 * energy[0, 0] + logits.logsumexp(-1).sum(), best)
    for seed in range(20):  # other block matrices: those of other queries and keys, from near to far
        q, k = draw((1, 1, 9, 4), (1, 1, 9, 4), seed=seed + 1)
        step = 10 ** (-seed / 10)
        other = HSA.scores(query + step * q, key + step * k, tree=tree)[0, 0]
        assert kl(other, softmax) > best


def test_tokens_that_agree_within_every_node_get_softmax():
    q, k, value = draw((1, 1, 4, 3), (1, 1, 4, 3), (1, 1, 12, 2))
    query, key = q.repeat_interleave(3, -2), k.repeat_interleave(3, -2)
    out = HSA(query, key, value, branching=3, levels=1)
    torch.testing.assert_close(out, F.scaled_dot_product_attention(query, key, value))


def test_the_gradient_of_the_energy_is_the_attention():
    query, key = draw((1, 2, 10, 4), (1, 2, 10, 4))
    query.requires_grad_()
    (gradient,) = torch.autograd.grad(energy_of(query, key, branching=3).sum(), query)
    torch.testing.assert_close(-10 * gradient, HSA(query, key, key, branching=3) / 2)


def test_siblings_may_change_places_with_their_subtrees():
    query, key, value = draw((1, 1, 8, 4), (1, 1, 8, 4), (1, 1, 8, 3))
    order = [6, 7, 4, 5, 2, 3, 1, 0]  # halves, pairs and tokens of the binary tree, exchanged
    out = HSA(query, key, value, branching=2)
    moved = HSA(*(x[..., order, :] for x in (query, key, value)), branching=2)
    torch.testing.assert_close(moved, out[..., order, :])
    across = [1, 2, 0, 3, 4, 5, 6, 7]
    moved = HSA(*(x[..., across, :] for x in (query, key, value)), branching=2)
    assert not torch.allclose(moved, out[..., across, :])


def test_a_padded_leaf_is_a_removed_leaf_whatever_it_holds():
    query, key, value = draw((2, 2, 8, 4), (2, 2, 8, 4), (2, 2, 8, 3))
    kept = [0, 2, 3, 6, 7]  # of the pairs (4, 5) nothing is left
    removed = HSA(*(x[..., kept, :] for x in (query, key, value)), tree=[[[0], [1, 2]], [[3, 4]]])
    mask = torch.zeros(2, 8, dtype=torch.bool)
    mask[:, kept] = True
    for x in (query, key, value):
        x[..., [1, 4, 5], :] = float("nan")
    inputs = [x.requires_grad_() for x in (query, key, value)]
    out = HSA(*inputs, key_mask=mask, branching=2)
    torch.testing.assert_close(out[..., kept, :], removed)
    assert torch.equal(out[..., [1, 4, 5], :], torch.zeros(2, 2, 3, 3, dtype=out.dtype))
    out.sum().backward()
    assert all(x.grad.isfinite().all() for x in inputs)


def test_a_whole_weight_counts_as_so_many_equal_leaves():
    query, key, value = draw((1, 1, 3, 4), (1, 1, 3, 4), (1, 1, 3, 2))
    weighted = HSA(query, key, value, tree=[[0, 1], 2], key_mask=torch.tensor([[1.0, 3.0, 2.0]], dtype=torch.float64))
    many = [0, 1, 1, 1, 2, 2]
    copies = HSA(*(x[..., many, :] for x in (query, key, value)), tree=[[0, [1, 2, 3]], [4, 5]])
    torch.testing.assert_close(copies[..., [0, 1, 4], :], weighted)


def test_a_later_query_changes_the_first_output():
    """Why there is no causal form: means and energies of a subtree hold its later tokens."""
    query, key, value = draw((1, 1, 8, 4), (1, 1, 8, 4), (1, 1, 8, 3))
    out = HSA(query, key, value, branching=2)
    query[..., 3, :] += 1
    assert not torch.allclose(HSA(query, key, value, branching=2)[..., 0, :], out[..., 0, :])


def test_places_of_children_add_products_of_their_embeddings():
    query, key, value, e, f = draw((1, 2, 6, 3), (1, 2, 6, 3), (1, 2, 6, 4), (6, 5), (2, 6, 5))
    logits = query @ key.mT / math.sqrt(3)
    for table in (e, f):
        wanted = (logits + table @ table.mT).softmax(-1) @ value
        torch.testing.assert_close(HSA(query, key, value, levels=0, tables=[table]), wanted)
    with pytest.raises(ValueError, match=r"tables must hold a table for each level.*\(4, 2\) children, got \(6,\)"):
        HSA(query, key, value, tables=[e])


def test_gradcheck_with_a_mask():
    inputs = tuple(x.requires_grad_() for x in draw((1, 1, 6, 2), (1, 1, 6, 2), (1, 1, 6, 2)))
    mask = torch.tensor([[1, 1, 0, 1, 0, 1]]).bool()
    for energy in ("dot", "l2"):
        options = {"branching": 2, "energy": energy, "key_mask": mask}
        assert torch.autograd.gradcheck(lambda *x, options=options: HSA(*x, **options), inputs)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_summed_in_float32(dtype):
    query, key, value = draw((1, 2, 100, 16), (1, 2, 100, 16), (1, 2, 100, 8), dtype=dtype)
    exact = HSA(query.double(), key.double(), value.double(), grid=(10, 10))
    out = HSA(query, key, value, grid=(10, 10))
    assert out.dtype == dtype
    assert (out.double() - exact).norm() <= torch.finfo(dtype).eps * exact.norm()


def test_large_scores_stay_finite_in_float32():
    query, key, value = draw((1, 1, 33, 4), (1, 1, 33, 4), (1, 1, 33, 2), dtype=torch.float32)
    inputs = [x.requires_grad_() for x in (100 * query, 100 * key, value)]
    out = HSA(*inputs)
    assert out.isfinite().all()
    assert all(g.isfinite().all() for g in torch.autograd.grad(out.sum(), inputs))


@pytest.mark.parametrize("layout", [{}, {"grid": (128, 256)}])
def test_no_tensor_is_quadratic_in_the_length(layout):
    query, key, value = (x.requires_grad_() for x in draw(*[(1, 1, 32768, 2)] * 3, dtype=torch.float32))
    with LargestTensor() as seen:
        HSA(query, key, value, **layout).sum().backward()
    assert seen.elements <= 8 * 32768


def test_trees_of_windows_are_as_described():
    vit = make_tree(197, grid=(14, 14), prefix=1, levels=1)
    assert vit.widths == (4, 50)
    assert nested(vit)[0] == [0] or [0] in nested(vit)  # the class token, in a chain of its own
    assert [1, 2, 15, 16] in nested(vit)
    assert make_tree(256, grid=(16, 16)).widths == (4, 4, 4, 4)
    assert make_tree(10).widths == (4, 3)
    assert make_tree(24, grid=(2, 3, 4)).widths == (8, 4)
    assert nested(make_tree(5, prefix=1, branching=2)) == [[0], [1, 2], [3, 4]]


def test_a_layer_builds_its_tree_from_the_grid_and_learns_places():
    options = {"levels": 1, "position": 3}
    layer = MultiheadAttention(8, 2, attention="hierarchical", attention_options=options, grid_size=(4, 4), prefix=1)
    (x,) = draw((2, 17, 8), dtype=torch.float32)
    out = layer(x)
    assert [tuple(p.shape) for p in layer.mix.position] == [(2, 4, 3), (2, 5, 3)]
    query, key, value = layer.project(x)
    theta = layer.mix.scores(query, key)
    torch.testing.assert_close(layer.mix(query, key, value), theta @ value)
    out.square().sum().backward()
    assert all((p.grad != 0).any() for p in layer.mix.parameters())
    plain = HierarchicalAttention(8, 2, grid_size=(4, 4))
    assert not list(plain.parameters())
    assert plain(query, key, value, grid=(2, 8), prefix=1).shape == (2, 2, 17, 4)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grid": (2, 5)}, r"grid \(2, 5\) holds 10 patches, but there are 9 tokens"),
        ({"branching": 1}, "branching must be a number of at least 2 children.*got 1"),
        ({"branching": 8, "grid": (3, 3)}, "branching must be a square number.*got 8"),
        ({"branching": (2, 2, 2), "grid": (3, 3)}, r"2 sides of a window.*got \(2, 2, 2\)"),
        ({"levels": -1}, "levels must not be negative, got -1"),
        ({"tree": [[0, 1], 2]}, "tree holds 3 tokens, but there are 9"),
        ({"tree": [[0, 1], 1]}, r"every token from 0 to N - 1 once, got \[0, 1, 1\]"),
        ({"tree": [[0, 1], []]}, r"sequences that are not empty, got \[\]"),
        ({"energy": "cosine"}, "energy must be one of 'dot', 'l2', got 'cosine'"),
        ({"is_causal": True}, "'hierarchical' has no causal form"),
    ],
)
def test_bad_input_is_named(options, message):
    with pytest.raises(ValueError, match=message):
        HSA(*draw((1, 1, 9, 4), (1, 1, 9, 4), (1, 1, 9, 4)), **options)


def test_a_layer_refuses_what_it_cannot_build():
    with pytest.raises(ValueError, match="position needs to know the tree"):
        HierarchicalAttention(8, 2, position=4)
    with pytest.raises(ValueError, match="energy must be one of"):
        HierarchicalAttention(8, 2, energy="cosine")
    with pytest.raises(
        ValueError, match=r"unknown option 'branch' of mechanism 'hierarchical'.*did you mean 'branching'"
    ):
        HSA.build(8, 2, branch=2)
    query, key, value = draw((1, 1, 9, 4), (1, 1, 5, 4), (1, 1, 5, 4))
    with pytest.raises(ValueError, match="'hierarchical' has no cross attention"):
        HSA(query, key, value)


def test_a_tree_given_to_a_layer_survives_the_meta_device():
    with torch.device("meta"):
        module = HierarchicalAttention(8, 2, tree=[[0, 1], [2, 3]])
    inputs = draw((1, 2, 4, 4), (1, 2, 4, 4), (1, 2, 4, 4))
    torch.testing.assert_close(module(*inputs), HierarchicalAttention(8, 2, tree=[[0, 1], [2, 3]])(*inputs))
