"""A sequence split over workers gives what one process gives: outputs and gradients, whatever the parts are."""

from __future__ import annotations

import pytest
import torch
from processes import side_by_side
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor.debug import CommDebugMode

import cumulant
from cumulant import shards, zoo
from cumulant.cluster import Blocks, KMeans
from cumulant.distributed import context_parallel, shard, unshard
from cumulant.distributed.parts import first_piece
from cumulant.distributed.softmax import _Part

WORLD = 8
UNEVEN = [13, 0, 5, 3, 9, 1, 0, 4]  # tokens of each worker


def rows_of(lengths: list[int], rank: int, order: str) -> Tensor:
    """The places, in the whole sequence, of the tokens that a worker holds."""
    first = [first_piece(n) for n in lengths] if order == "zigzag" else lengths
    own = torch.arange(first[rank]) + sum(first[:rank])
    if order == "rank":
        return own
    second = [n - m for n, m in zip(lengths, first, strict=True)]
    return torch.cat((own, torch.arange(second[rank]) + sum(lengths) - sum(second[: rank + 1])))


def apart(found: Tensor, wanted: Tensor) -> float:
    """Largest difference, in units of the largest number wanted (1 at least)."""
    difference = (found - wanted).detach().abs().amax() if found.numel() else torch.zeros(())
    return float(difference / wanted.detach().abs().amax().clamp(min=1)) if found.numel() else 0.0


def compared(
    mesh, call, lengths, *, order="rank", softmax="ring", dtype=torch.float64, mask=None, heads=(4, 2), batch=2,
    overlap=False,
) -> float:  # fmt: skip
    """How far `call(query, key, value, key_mask=...)` in parts is from the whole, outputs and gradients."""
    rank, L = mesh.get_local_rank("cp"), sum(lengths)
    torch.manual_seed(1)
    PACK[0] = L
    query, key, value = (
        torch.randn(batch, h, L, w, dtype=dtype) for h, w in zip((*heads, heads[1]), (5, 5, 6), strict=True)
    )
    key, value, grad = key + 3, value - 2, torch.randn(batch, heads[0], L, 6, dtype=dtype)
    there = None
    if mask is not None:
        there = torch.rand(batch, L) > 0.3
        there[0] = False  # a sequence without any key
        if mask == "one worker":
            there = torch.ones(batch, L, dtype=torch.bool)
            there[:, rows_of(lengths, 0, order)[1:]] = False
        there = there * (0.5 + torch.rand(batch, L, dtype=dtype)) if mask == "weights" else there
    whole = [x.clone().requires_grad_() for x in (query, key, value)]
    wanted = call(*whole, key_mask=there)
    wanted.backward(grad)
    rows = rows_of(lengths, rank, order)
    parts = [x[:, :, rows].clone().requires_grad_() for x in (query, key, value)]
    with context_parallel(mesh, order=order, softmax=softmax, overlap=overlap):
        # Whoever has no padding passes no mask.
        own = there[:, rows] if there is not None and (mask != "one worker" or rank == 0) else None
        found = call(*parts, key_mask=own)
        found.backward(grad[:, :, rows])
    errors = [apart(found, wanted[:, :, rows])]
    return max(errors + [apart(p.grad, w.grad[:, :, rows]) for p, w in zip(parts, whole, strict=True)])


def attention(**options):
    def call(query, key, value, key_mask):
        return cumulant.attention(query, key, value, key_mask=key_mask, enable_gqa=True, **options)

    return call


def mechanism(name, **options):
    def call(query, key, value, key_mask):
        return zoo.get(name)(query, key, value, key_mask=key_mask, enable_gqa=True, **options)

    return call


def few_heads(name, **options):
    """Where query heads share no key head."""

    def call(query, key, value, key_mask):
        return zoo.get(name)(query[:, :2], key, value, key_mask=key_mask, **options).repeat(1, 2, 1, 1)

    return call


def clusters(count, grid=False, **options):
    """Local cumulants; a grid has two columns, of what one or two prefix tokens leave."""

    def call(query, key, value, key_mask):
        prefix = 2 - PACK[0] % 2
        laid = {"grid": ((PACK[0] - prefix) // 2, 2), "prefix": prefix} if grid else {}
        given = {"clusters": count, "key_mask": key_mask, "enable_gqa": True, **laid, **options}
        return cumulant.cluster_attention(query, key, value, **given)

    return call


def packed(**options):
    """Sequences end to end, of which some lie on several workers; batch 1."""

    def call(query, key, value, key_mask):
        at = torch.tensor([0, 2, 2, 11, 12, 33, 35]).clamp(max=PACK[0])
        rows = (x[0].transpose(0, 1) for x in (query, key, value))
        return cumulant.attention_varlen(*rows, at, at, enable_gqa=True, **options).transpose(0, 1)[None]

    return call


PACK = [0]  # tokens of the whole pack
CASES = {
    "order 1": (attention(order=1), {}),
    "order 2": (attention(order=2), {}),
    "order 3": (attention(order=3), {}),
    "full third order": (attention(full=True), {}),
    "plain torch": (attention(backend="reference"), {}),
    "the printed form, sums": (attention(normalization="sum"), {"mask": "weights"}),
    "masked": (attention(), {"mask": "bool"}),
    "order 2, messages in halves": (attention(order=2), {"overlap": True, "mask": "one worker"}),
    "messages in halves of the batch": (attention(), {"overlap": True, "heads": (2, 1)}),
    "weighted": (attention(), {"mask": "weights"}),
    "padding on one worker": (attention(), {"mask": "one worker"}),
    "causal, order 1": (attention(order=1, is_causal=True), {}),
    "causal, order 2": (attention(order=2, is_causal=True), {}),
    "causal": (attention(is_causal=True), {}),
    "causal, full third order": (attention(full=True, is_causal=True), {}),
    "causal, masked": (attention(is_causal=True), {"mask": "bool"}),
    "causal, weighted sums": (attention(normalization="sum", is_causal=True), {"mask": "weights"}),
    "causal, padding on one worker": (attention(is_causal=True), {"mask": "one worker"}),
    "zigzag": (attention(is_causal=True), {"order": "zigzag"}),
    "zigzag, masked": (attention(order=2, is_causal=True), {"order": "zigzag", "mask": "bool"}),
    "softmax": (mechanism("softmax"), {}),
    "softmax, causal": (mechanism("softmax", is_causal=True), {}),
    "softmax, masked": (mechanism("softmax"), {"mask": "one worker"}),
    "softmax, causal and weighted": (mechanism("softmax", is_causal=True), {"mask": "weights"}),
    "softmax, zigzag": (mechanism("softmax", is_causal=True), {"order": "zigzag"}),
    "softmax, gathered": (mechanism("softmax"), {"softmax": "gather", "mask": "weights"}),
    "softmax, gathered, zigzag": (mechanism("softmax", is_causal=True), {"order": "zigzag", "softmax": "gather"}),
    **{f"{name}{', causal' * causal}": (mechanism(name, is_causal=causal), {"mask": mask})
       for name in ("linear", "mala", "focused_linear", "cosformer", "cumulant1", "cumulant2", "cumulant3")
       for causal, mask in ((False, "weights"), (True, "one worker"))},
    "packed": (packed(), {"batch": 1}),
    "packed, full, sums": (packed(full=True, normalization="sum"), {"batch": 1}),
    "packed, causal": (packed(order=2, is_causal=True), {"batch": 1}),
    "packed, causal sums": (packed(is_causal=True, normalization="sum"), {"batch": 1}),
    "rala": (few_heads("rala"), {"mask": "one worker"}),
    "flow": (few_heads("flow"), {"mask": "weights"}),
    "flow, causal": (few_heads("flow", is_causal=True), {"mask": "one worker"}),
    "zigzag, not causal": (attention(), {"order": "zigzag"}),
    "blocks": (clusters(4), {}),
    "blocks, near by row": (clusters(6, near=2), {}),
    "blocks, near by tiles": (clusters(Blocks(3), near=2, near_rows=8, rank="mean", response="pooled"), {}),
    "blocks, near by mass of tiles": (clusters(5, near=1, near_rows=4, rank="error", response=0), {"mask": "bool"}),
    "blocks, neighbours": (clusters(Blocks(3), near="neighbours", prefix=2), {}),
    "blocks, neighbours, masked": (clusters(5, near="neighbours"), {"mask": "weights"}),
    "blocks of those there": (clusters(4, near=1, prefix=1, variance="full", closure="gauss"), {"mask": "one worker"}),
    "blocks, few respond": (clusters(Blocks(2), near=1, response=2, variance="full"), {"mask": "weights"}),
    "blocks of a grid": (clusters((4, 2), grid=True, near=1), {}),
    "blocks of a grid, neighbours": (clusters(3, grid=True, near="neighbours"), {}),
    "blocks, all near": (clusters(2, near=2, prefix=1), {"mask": "one worker"}),
    "a mechanism of blocks": (mechanism("cluster4", near=1), {}),
    "past blocks": (clusters(5, is_causal=True), {}),
    "past blocks, merged": (clusters(Blocks(2, keep=1, recent=1), is_causal=True), {"mask": "one worker"}),
    "past blocks, near": (clusters(Blocks(3, recent=1), is_causal=True, near=2), {"mask": "weights"}),
}  # fmt: skip


def everything(rank: int, world: int) -> dict[tuple[str, int, str], float]:
    """The largest error of every case, for 1, 2, 4 and 8 workers."""
    found = {}
    for size in (1, 2, 4, 8):
        mesh = init_device_mesh("cpu", (world // size, size), mesh_dim_names=("dp", "cp"))
        for name, (call, how) in CASES.items() if rank < size else ():  # other groups would do the same again
            found[name, size, "float64"] = compared(mesh, call, UNEVEN[:size], **how)
        if size == 4:  # two groups at once
            for name, (call, how) in CASES.items():
                found[name, size, "float32"] = compared(mesh, call, [6] * size, dtype=torch.float32, **how)
    return found


@pytest.fixture(scope="module")
def errors():
    answers = side_by_side(WORLD, everything)
    return {key: max(answer[key] for answer in answers if key in answer) for key in answers[0]}


@pytest.mark.parametrize("workers", [1, 2, 4, 8])
@pytest.mark.parametrize("name", CASES)
def test_uneven_parts_give_what_one_process_gives(errors, name, workers):
    assert errors[name, workers, "float64"] <= 1e-10


@pytest.mark.parametrize("name", CASES)
def test_so_do_parts_in_single_precision(errors, name):
    assert errors[name, 4, "float32"] <= 1e-4


def counts_and_layers(rank: int, world: int) -> dict[str, object]:
    """Collectives and numbers sent; a layer with rotary places; bfloat16; what is refused."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    found: dict[str, object] = {}

    def sizes(order, tokens, is_causal=False, overlap=False):
        query, key, value = (torch.randn(1, 3, tokens, 8, requires_grad=True) for _ in range(3))
        with context_parallel(mesh, overlap=overlap):
            cumulant.attention(query, key, value, order=order, is_causal=is_causal)  # kinds of tokens are compared once
            with Sent() as forward:
                out = cumulant.attention(query, key, value, order=order, is_causal=is_causal)
            with Sent() as backward:
                out.sum().backward()
        return forward.sizes, backward.sizes

    found["sizes"] = {(order, n): sizes(order, n) for order in (2, 3) for n in (4, 40)}
    found["sizes of halves"] = sizes(2, 4, overlap=True)
    found["causal sizes"] = {n: sizes(3, n, is_causal=True) for n in (4, 40)}

    def cluster_sizes(tokens):
        query, key, value = (torch.randn(1, 3, tokens, 8, requires_grad=True) for _ in range(3))
        with context_parallel(mesh):
            cumulant.cluster_attention(query, key, value, clusters=8)
            with Sent() as forward:
                out = cumulant.cluster_attention(query, key, value, clusters=8)
            with Sent() as backward:
                out.sum().backward()
        return forward.sizes, backward.sizes

    found["cluster sizes"] = {n: cluster_sizes(n) for n in (4, 40)}

    torch.manual_seed(2)
    layer = cumulant.nn.MultiheadAttention(16, 4, attention="cumulant2", rotary=True, num_kv_heads=2)
    folded = cumulant.nn.CumulantAttention(16, 4, order=2, fold=True)
    x = torch.randn(2, 6 * world, 16)
    own = slice(6 * rank, 6 * rank + 6)
    with context_parallel(mesh):
        found["rotary layer"] = apart(layer(x[:, own], is_causal=True), layer_whole(layer, x, is_causal=True)[:, own])
        found["folded layer"] = apart(folded(x[:, own]), layer_whole(folded, x)[:, own])

    narrow = [torch.randn(1, 2, 8 * world, 8).bfloat16() for _ in range(3)]
    part = [t[:, :, 8 * rank : 8 * rank + 8] for t in narrow]
    exact = cumulant.attention(*(t.double() for t in narrow))[:, :, 8 * rank : 8 * rank + 8]
    plain = cumulant.attention(*narrow, backend="reference")[:, :, 8 * rank : 8 * rank + 8]
    with context_parallel(mesh):
        found["bfloat16"] = float((cumulant.attention(*part) - exact).abs().max()), float((plain - exact).abs().max())
        found["shard"] = float((unshard(shard(narrow[0], mesh), mesh) - narrow[0]).abs().max())
        found["zigzag shard"] = apart(unshard(shard(x, mesh, order="zigzag"), mesh, order="zigzag"), x)

    own, softmax = slice(8 * rank, 8 * rank + 8), zoo.get("softmax")
    tokens = [narrow[0], narrow[1] + 30, narrow[2][..., :6]]  # not of one width: torch has no kernel for them

    def gradient(query, key, value):
        """Of the query, by a loss that is no sum of the values alone."""
        query = query.clone().requires_grad_()
        return torch.autograd.grad(softmax(query, key, value).square().sum(), query)[0]

    exact, plain = gradient(*(t.double() for t in tokens))[:, :, own], gradient(*tokens)[:, :, own]
    with context_parallel(mesh):
        parted = gradient(*(t[:, :, own] for t in tokens))
    found["softmax gradient"] = tuple(float((x - exact).norm() / exact.norm()) for x in (parted, plain))
    tokens = [narrow[0].float(), narrow[1].float() + 3000, narrow[2].float()]
    exact = gradient(*(t.double() for t in tokens))[:, :, own]
    with context_parallel(mesh):
        parted = gradient(*(t[:, :, own] for t in tokens))
    found["softmax far from zero"] = float((parted - exact).norm() / exact.norm())

    q = torch.randn(1, 2, 5, 4)
    for name, error in (
        ("dtype", lambda: cumulant.attention(*(q.double() if rank == 1 else q for _ in range(3)))),
        ("heads", lambda: cumulant.attention(*(torch.randn(1, 2 + rank % 2, 5, 4) for _ in range(3)))),
        ("mechanism", lambda: zoo.get("lla")(q, q, q)),
        ("cluster", lambda: cumulant.cluster_attention(q, q, q, clusters=KMeans(2))),
        ("tiles", lambda: cumulant.cluster_attention(q, q, q, clusters=4, near=1, near_rows=2, response=1)),
        ("scores", lambda: cumulant.scores(q, q)),
        ("layer", lambda: cumulant.nn.create_layer("moh", 8, 2)(torch.randn(1, 4, 8))),
        ("v_conv", lambda: cumulant.nn.MultiheadAttention(8, 2, attention="linear", v_conv=True)(
            torch.randn(1, 4, 8), grid=(2, 2))),
    ):  # fmt: skip
        with context_parallel(mesh), pytest.raises((ValueError, TypeError)) as raised:
            error()
        found[f"refused {name}"] = str(raised.value)
    with pytest.raises(ValueError, match="no dimension 'tp', its dimensions are"), context_parallel(mesh, "tp"):
        pass
    with pytest.raises(TypeError, match="mesh must be a torch"), context_parallel("cpu"):
        pass
    return found


def layer_whole(layer, x, **how):
    """What the layer gives one process that holds all tokens."""
    with shards.answered_by(None):
        return layer(x, **how)


class Sent(CommDebugMode):
    """Bytes of each collective of this process, what it sends to itself left out."""

    def __init__(self) -> None:
        super().__init__()
        self.sizes: list[int] = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if "all_to_all" in str(func):
            self.sizes.append(max(args[2]))  # to each other worker
        return super().__torch_dispatch__(func, types, args, kwargs)

    def __exit__(self, *args):
        super().__exit__(*args)
        assert len(self.sizes) == self.get_total_counts()


@pytest.fixture(scope="module")
def told():
    return side_by_side(4, counts_and_layers)


def test_a_call_is_one_collective_each_way_whose_size_knows_nothing_of_the_length(told):
    for answer in told:
        for order, numbers in ((2, 1 + 2 * 8 + 8 * 8), (3, 1 + 3 * 8 + 2 * 8 * 8)):
            forward, backward = answer["sizes"][order, 4]
            assert answer["sizes"][order, 40] == (forward, backward)
            means = 2 * 8  # which travel in float64
            assert 0 <= forward[0] - 3 * 4 * (numbers + means) < 8  # three heads; whole words of 8 bytes
            assert (len(forward), len(backward)) == (1, 1)
            assert backward[0] <= forward[0]


def test_messages_in_halves_are_two_each_way(told):
    assert all([len(one) for one in answer["sizes of halves"]] == [2, 2] for answer in told)


def test_causal_parts_scan_in_log2_steps_of_constant_size(told):
    for answer in told:
        assert answer["causal sizes"][4] == answer["causal sizes"][40]
        assert all(len(one) == 2 for one in answer["causal sizes"][4])


def test_clusters_send_the_moments_of_the_blocks_they_touch_whatever_these_hold(told):
    for answer in told:
        forward, backward = answer["cluster sizes"][4]
        assert answer["cluster sizes"][40] == (forward, backward)
        state = 1 + 8 + 8 * 8 + 2 * 2 * 8  # weight, spread, S and two means in float64, of two blocks for each worker
        assert (len(forward), len(backward)) == (2, 1)
        assert sorted(forward)[0] == 3 * 8  # how many tokens each has, and whether any are masked
        assert 0 <= max(forward) - 3 * 4 * 2 * state < 8


def test_layers_know_the_places_of_their_tokens_and_do_not_fold(told):
    assert max(answer[name] for answer in told for name in ("rotary layer", "folded layer")) < 1e-5


def test_bfloat16_is_as_close_as_plain_torch(told):
    for answer in told:
        ours, plain = answer["bfloat16"]
        assert ours <= 2 * plain


def test_softmax_in_16_bits_has_gradients_as_close_as_in_one_process(told):
    for answer in told:
        parted, plain = answer["softmax gradient"]
        assert parted <= 2 * plain


def test_softmax_of_keys_far_from_zero_loses_no_digits(told):
    assert all(answer["softmax far from zero"] < 1e-5 for answer in told)


def test_shards_go_together_again(told):
    assert all(answer["shard"] == 0 and answer["zigzag shard"] == 0 for answer in told)


@pytest.mark.parametrize(
    ("what", "words"),
    [
        ("dtype", ["worker 1", "torch.float64", "worker 0", "torch.float32"]),
        ("heads", ["worker 1", "heads 3 and 3", "worker 0", "heads 2 and 2"]),
        ("mechanism", ["'lla' does not have mergeable", "nearest mechanism that can"]),
        ("cluster", ["clusters=KMeans", "which no worker holds", "Blocks(size)"]),
        ("tiles", ["response=1", "near_rows=2", 'response=None, 0 or "pooled"']),
        ("scores", ["which no worker holds"]),
        ("layer", ["layer 'moh'", "'multihead', 'sqa' or 'gda'"]),
        ("v_conv", ["v_conv", "other workers hold"]),
    ],
)
def test_what_cannot_be_split_is_refused_by_all_workers_alike(told, what, words):
    for answer in told:
        assert all(word in answer[f"refused {what}"] for word in words), answer[f"refused {what}"]


def left_alone(rank: int, world: int) -> str:
    """Worker 1 stops between two calls; the others are told."""
    mesh = init_device_mesh("cpu", (world,), mesh_dim_names=("cp",))
    q = torch.randn(1, 2, 5, 4)
    with context_parallel(mesh):
        cumulant.attention(q, q, q)
        if rank == 1:
            return "stopped"
        try:
            cumulant.attention(q, q, q)
        except RuntimeError as error:
            return str(error)
    return "nothing happened"


def test_a_worker_that_stops_ends_the_others_with_a_word_and_no_hang():
    answers = side_by_side(3, left_alone, patience=60)
    assert answers[1] == "stopped"
    for rank in (0, 2):
        assert f"worker {rank} of 3 on mesh dimension 'cp' did not get its message" in answers[rank]
        assert "one of them has stopped" in answers[rank]


def one_fails(rank: int, world: int) -> None:
    """Worker 1 fails where the others wait for its message."""
    if rank == 1:
        raise ValueError("out of cheese")
    torch.distributed.barrier()


def test_an_error_of_a_worker_ends_the_wait_at_once_with_its_traceback():
    with pytest.raises(RuntimeError, match=r"(?s)worker 1 of 3 failed:.*one_fails.*ValueError: out of cheese"):
        side_by_side(3, one_fails, patience=600)


def test_softmax_of_a_part_reads_channels_that_do_not_lie_side_by_side():
    query, key, value = (torch.randn(1, 2, 40, 8) for _ in range(3))
    strided = (x.mT.contiguous().mT for x in (query, key, value))
    wanted, found = (_Part(*inputs, None, 1.0, False).forward() for inputs in ((query, key, value), strided))
    torch.testing.assert_close(found, wanted)
