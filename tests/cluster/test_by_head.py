"""Options listed by head: each head answers as it does alone, and the dial lists what each needs."""

import math

import pytest
import torch
from torch import nn

import cumulant
from cumulant import zoo
from cumulant.call import Call
from cumulant.conversion import choose_layers, convert, restore
from cumulant.conversion.candidates import work_of
from cumulant.nn.swapped.choice import Choice, weights
from cumulant.zoo.cluster import by_head, joined

NEAR = [1, 4, 1, 2]
NAMES = {
    "near clusters": ("cluster8+find=tree+near=[1,4,1,2]", lambda h: f"cluster8+find=tree+near={NEAR[h]}"),
    "how they are found": (
        'cluster8+find=["tree","blocks","kmeans","tree"]+near=1',
        lambda h: f"cluster8+find={('tree', 'blocks', 'kmeans', 'tree')[h]}+near=1",
    ),
    "leaves": (
        "cluster8+exact=[3,3,5,5]+find=tree+leaves=[2,2,4,2]+near=3+opened=[2,3,2,3]+width=[4,0,4,4]",
        lambda h: (
            f"cluster8+exact={(3, 3, 5, 5)[h]}+find=tree+leaves={(2, 2, 4, 2)[h]}+near=3"
            f"+opened={(2, 3, 2, 3)[h]}+width={(4, 0, 4, 4)[h]}"
        ),
    ),
    "the past": (
        "cluster4+block=8+recent=[0,1,2,0]+sinks=[0,4,4,4]",
        lambda h: f"cluster4+block=8+recent={(0, 1, 2, 0)[h]}+sinks={(0, 4, 4, 4)[h]}",
    ),
}


def tensors(key_heads=4, length=77):
    g = torch.Generator().manual_seed(3)
    q = 2 * torch.randn(2, 4, length, 8, generator=g, dtype=torch.float64)
    k, v = (torch.randn(2, key_heads, length, E, generator=g, dtype=torch.float64) for E in (8, 5))
    return [x.requires_grad_() for x in (q, k, v)]


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("what", NAMES)
def test_each_head_answers_and_learns_as_it_does_alone(what, key_heads):
    name, alone = NAMES[what]
    q, k, v = tensors(key_heads)
    mask = torch.arange(77) < torch.tensor([[77], [50]])
    options = {"is_causal": what == "the past", "key_mask": mask}
    out = zoo.get(name)(q, k, v, enable_gqa=True, **options)
    served = 4 // key_heads
    each = [
        zoo.get(alone(h))(*(x[:, n : n + 1] for x, n in ((q, h), (k, h // served), (v, h // served))), **options)
        for h in range(4)
    ]
    expected = torch.cat(each, 1)
    torch.testing.assert_close(out, expected)
    toward = torch.randn(out.shape, generator=torch.Generator().manual_seed(4), dtype=out.dtype)
    for own, other in zip(
        torch.autograd.grad(out, (q, k, v), toward), torch.autograd.grad(expected, (q, k, v), toward), strict=True
    ):
        torch.testing.assert_close(own, other)


def test_weights_are_those_of_each_head():
    q, k, _ = (x.detach() for x in tensors())
    scores = zoo.get("cluster8+near=[1,4,1,2]").scores(q, k)
    for h, near in enumerate(NEAR):
        alone = zoo.get(f"cluster8+near={near}").scores(q[:, h : h + 1], k[:, h : h + 1])
        torch.testing.assert_close(scores[:, h : h + 1], alone)


def test_a_head_of_a_layer_with_softmax_heads_has_its_own_place_in_the_list():
    q, k, v = (x.detach() for x in tensors())
    choice = Choice("cluster8", (1, 3), {"near": [4, 2], "near_rows": 1, "rank": "mass", "response": 0})
    A = weights(choice, Call(q, k, v))
    softmax = (q @ k.mT / math.sqrt(8)).softmax(-1)
    torch.testing.assert_close(A[:, ::2], softmax[:, ::2])
    for h, near in ((1, 4), (3, 2)):
        alone = zoo.get(f"cluster8+near={near}+near_rows=1+rank=mass+response=0").scores(
            q[:, h : h + 1], k[:, h : h + 1]
        )
        torch.testing.assert_close(A[:, h : h + 1], alone)
    with pytest.raises(ValueError, match=r"options are listed for 2 heads, and heads=\[1\] take them"):
        Choice("cluster8", (1,), {"near": [4, 2]})


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("cluster8+near=[1,2]", r"one value a head: query has 4 heads, got near=\[1, 2\]"),
        ("cluster8+near=[1,2,1,2]+response=[0,0]", r"all of the same length, got near of 4, response of 2"),
        ("cluster8+near=[]", r"all of the same length, got near of 0"),
        ("cluster8+near=[1,2,-1,2]", r"near must be a number of clusters.*got -1"),
        ("cluster8+find=tree+width=[1,2,x,2]", r"width must be a whole number, at least 0, got"),
    ],
)
def test_lists_that_say_nothing_are_named(name, message):
    q, k, v = (x.detach() for x in tensors())
    with pytest.raises(ValueError, match=message):
        zoo.get(name)(q, k, v)


def test_a_stream_has_one_value_for_all_heads():
    with pytest.raises(ValueError, match="one value for all heads"):
        zoo.get("cluster4+recent=[1,2]").stream()


def test_lists_and_options_of_heads_are_one_and_the_same():
    heads = [{"near": 2, "find": "tree"}, {"near": 4, "find": "tree"}, {"near": 4, "find": "blocks"}]
    assert joined(heads) == {"near": [2, 4, 4], "find": ["tree", "tree", "blocks"]}
    assert by_head(joined(heads)) == heads
    assert joined(heads[1:2] * 3) == heads[1]
    assert by_head(heads[1]) == []
    assert joined([{"near": 2}, {}]) == {"near": [2, 0]}


def test_multiply_adds_are_the_mean_over_heads():
    q = torch.empty(1, 4, 4096, 32, device="meta")
    call = Call(q, q, q)
    each = [work_of(Choice.named(f"cluster64+find=tree+near={n}"), call) for n in (4, 8, 8, 16)]
    assert work_of(Choice.named("cluster64+find=tree+near=[4,8,8,16]"), call) == pytest.approx(sum(each) / 4)


class Layer(nn.Module):
    """Four heads of which the last two look sharply."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.attn = cumulant.nn.MultiheadAttention(32, 4)
        with torch.no_grad():
            self.attn.qkv.weight[:32] *= torch.tensor([0.5, 0.5, 6.0, 6.0]).repeat_interleave(8)[:, None]

    def forward(self, x):
        return self.attn(x)


TOKENS = torch.randn(2, 256, 32, generator=torch.Generator().manual_seed(1))
CANDIDATES = ("cluster16+near=1+near_rows=1+response=0", "cluster16+near=6+near_rows=1+response=0")


def test_the_dial_gives_each_head_its_own_and_says_what_that_errs():
    model = Layer().eval()
    target = 0.3
    alone = choose_layers(model, TOKENS, target=target, samples=256, candidates=CANDIDATES[1:], force=True)
    dial = choose_layers(model, TOKENS, target=target, samples=256, candidates=CANDIDATES, force=True)
    (found,), (wide,) = dial.layers.values(), alone.layers.values()
    assert found.cost < wide.cost
    assert found.heads == (0, 1, 3)  # one of those that look sharply stays softmax
    assert Choice.named(found.attention).options["near"] == [1, 1, 6]
    q, k, v = model.attn.project(TOKENS)
    exact = model.attn.mix(q, k, v)
    convert(model, layers=dial.plan, example=TOKENS)
    out = model.attn.mix(q, k, v)
    restore(model)
    error = ((out - exact).norm() / (exact - v.mean(-2, keepdim=True)).norm()).item()
    assert found.error == pytest.approx(error, rel=1e-3)
    assert error <= target


def test_a_layer_of_another_number_of_heads_is_refused_and_stays():
    model = Layer().eval()
    with pytest.raises(ValueError, match="options are listed for 3 heads, and it has 4"):
        convert(model, "cluster16+near=[1,2,3]", example=TOKENS)
    assert model.attn.mechanism.name == "softmax"


def test_what_is_listed_by_head_survives_saving(tmp_path):
    model = Layer().eval()
    convert(model, layers={"attn": "cluster16+near=[1,2,1,6]"}, example=TOKENS)
    said = model(TOKENS)
    cumulant.convert.save(model, tmp_path / "saved")
    again = cumulant.convert.load(tmp_path / "saved", model=Layer().eval(), example=TOKENS)
    torch.testing.assert_close(again(TOKENS), said)


def test_the_dial_takes_names_for_all_heads():
    with pytest.raises(ValueError, match=r"the dial gives each head its own, got 'cluster16\+near=\[1, ?2"):
        choose_layers(Layer().eval(), TOKENS, candidates=["cluster16+near=[1,2,1,6]"])
