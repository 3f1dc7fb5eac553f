"""Kernels of the layers in `nn.heads` against plain torch in float64: outputs and gradients, odd sizes, any layout."""

import pytest
import torch

from cumulant.kernels import launch
from cumulant.nn import create_layer
from cumulant.nn.extras import turns
from cumulant.nn.heads.ia_red2 import Pack, decide

pytestmark = pytest.mark.skipif(not launch.HAS_TRITON, reason="needs Triton")
DEVICE = "cpu" if launch.INTERPRET else "cuda"
runs = pytest.mark.skipif(
    not launch.INTERPRET and not torch.cuda.is_available(), reason="needs a GPU or the interpreter"
)


@runs
@pytest.mark.parametrize(("H", "L", "D", "places"), [(3, 70, 12, True), (1, 5, 64, False)])
def test_turning_by_phases_is_the_formula_in_values_and_gradients(H, L, D, places):
    from cumulant.kernels.heads.turned import turned

    torch.manual_seed(0)
    layer = create_layer("complexformer", H * D, H, places=places)
    z = torch.randn(2, L, H, D, device=DEVICE).transpose(1, 2).requires_grad_()
    delta, shift = (torch.randn(H, D // 2, device=DEVICE, requires_grad=True) for _ in range(2))
    exact = [x.detach().double().requires_grad_() for x in (z, delta, shift)]
    tables = [table.float() for table in turns(exact[0], D // 2, 10000.0, 3)[1:]] if places else None
    out = turned(z, delta, shift, tables, 1.7)
    wanted = layer._turned(exact[0], 3, *exact[1:], 1.7)
    torch.testing.assert_close(out.double(), wanted, rtol=1e-5, atol=5e-5)
    grad = torch.randn_like(out)
    out.backward(grad)
    wanted.backward(grad.double())
    for found, other in zip((z, delta, shift), exact, strict=True):
        torch.testing.assert_close(found.grad.double(), other.grad, rtol=1e-4, atol=5e-4)


@runs
@pytest.mark.parametrize(("places", "norm"), [(True, False), (False, False), (True, True)])
@torch.no_grad()
def test_queries_and_keys_turned_at_once_are_the_layer_written_out(monkeypatch, places, norm):
    torch.manual_seed(0)
    layer = create_layer("complexformer", 36, 3, places=places, qk_norm=norm).to(DEVICE).eval()  # norms part them
    layer.b.normal_()
    x = torch.randn(2, 70, 36, device=DEVICE)
    wanted = layer.double()(x.double())
    monkeypatch.setattr(launch, "direct", launch.available)
    query, key, _ = super(type(layer), layer.float()).project(x)
    assert (layer._at_once(query, key) is None) == norm
    torch.testing.assert_close(layer(x).double(), wanted, rtol=1e-4, atol=1e-4)


@pytest.fixture
def kernels(monkeypatch):
    """Layers take their kernels on this device too."""
    monkeypatch.setattr(launch, "direct", launch.available)


@runs
@pytest.mark.parametrize(("shared", "top"), [(1, 2), (0, 1)])
@torch.no_grad()
def test_chosen_rows_by_kernels_are_all_rows_times_their_gates(kernels, shared, top):
    torch.manual_seed(0)
    layer = create_layer("moh", 5 * 12, 5, shared=shared, top=top, sparse=True).to(DEVICE).eval()
    x = torch.randn(2, 70, 60, device=DEVICE)
    found = layer(x)
    layer.sparse = False
    torch.testing.assert_close(found, layer(x), rtol=1e-4, atol=1e-5)


@runs
@pytest.mark.parametrize("attention", ["softmax", "cumulant2"])
@pytest.mark.parametrize(("shared", "top"), [(1, 2), (0, 1), (2, 3), (3, 1)])
@torch.no_grad()
def test_gates_by_a_kernel_are_those_of_the_formula(kernels, attention, shared, top):
    torch.manual_seed(0)
    layer = create_layer("moh", 5 * 12, 5, shared=shared, top=top, attention=attention).to(DEVICE).eval()
    x = torch.randn(2, 70, 60, device=DEVICE)
    for linear in (layer.route, layer.weigh_shared, layer.weigh_stages):
        if linear is not None:  # or all gates are about 1
            linear.weight.mul_(20)
    found = layer(x)
    torch.testing.assert_close(found.double(), layer.double()(x.double()), rtol=1e-4, atol=1e-5)


@runs
@torch.no_grad()
def test_each_chosen_row_has_a_place_of_its_own(kernels):
    from cumulant.kernels.heads.routes import routed

    torch.manual_seed(0)
    B, L, S, R, K = 2, 150, 2, 6, 2
    logits = torch.randn(B, L, S + R + 2, device=DEVICE)
    gates, place, counts = routed(logits, (S, R, K), weighed=True, stages=True, places=True)
    assert place is not None
    assert counts is not None
    m = torch.zeros(B, L, R, device=DEVICE).scatter(-1, logits[..., S : S + R].topk(K).indices, 1.0)
    assert torch.equal(place.mT >= 0, m > 0)
    assert torch.equal(counts.long(), m.sum(1).long())
    for b in range(B):
        for head in range(R):
            of = place[b, head][place[b, head] >= 0].sort().values
            assert torch.equal(of.long().cpu(), torch.arange(len(of)))
    torch.testing.assert_close(gates.mean((0, 1)).sum(), torch.tensor(float(S + K), device=DEVICE), rtol=0.2, atol=0)


@runs
@pytest.mark.parametrize(("rows", "cols", "regions", "top", "lce"), [(6, 10, 2, 3, 5), (8, 8, 4, 5, 0)])
@torch.no_grad()
def test_regions_by_kernels_are_the_layer_written_out(kernels, rows, cols, regions, top, lce):
    torch.manual_seed(0)
    layer = create_layer("biformer", 24, 2, regions=regions, top=top, lce=lce).to(DEVICE).eval()
    x = torch.randn(2, rows * cols, 24, device=DEVICE)
    call = layer.asked(x, grid=(rows, cols))
    assert layer._direct(call)
    found = layer(x, grid=(rows, cols))
    wanted = layer.double()(x.double(), grid=(rows, cols))
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


@runs
@pytest.mark.parametrize(("heads", "width", "masked"), [(2, 24, False), (3, 36, True)])
@torch.no_grad()
def test_an_interpreter_by_its_kernel_is_the_formula(kernels, heads, width, masked):
    torch.manual_seed(0)
    layer = create_layer("ia_red2", width, heads).to(DEVICE)
    layer.interpreter.qk.bias.normal_()
    x = torch.randn(3, 37, width, device=DEVICE)
    kept = torch.rand(3, 37, device=DEVICE) < 0.5 if masked else None  # of some the first token is absent too
    wanted = layer.double().interpreter(x.double(), kept)
    found = layer.float().interpreter.told(x, kept)
    assert wanted.std() > 0.02
    torch.testing.assert_close(found.double(), wanted, rtol=1e-5, atol=1e-6)
    middle = float(wanted.median())
    assert torch.equal(layer.interpreter.chosen(x, middle), decide(layer.interpreter.told(x), middle))


@runs
@pytest.mark.parametrize("share", [0.0, 0.4, 1.0])
@torch.no_grad()
def test_kept_tokens_are_taken_out_and_put_back_by_kernels_as_by_indices(kernels, monkeypatch, share):
    torch.manual_seed(0)
    x = torch.randn(3, 37, 20, device=DEVICE)[:, :, :12]  # rows that do not touch
    kept = torch.rand(3, 37, device=DEVICE) < share
    kept[:, 0] = True
    found, roomy = Pack.of(x, kept), Pack.of(x, kept, room=True)
    monkeypatch.setattr(launch, "direct", lambda x: False)
    wanted = Pack.of(x, kept)
    assert torch.equal(found.tokens, wanted.tokens)
    assert torch.equal(found.cu_seq, wanted.cu_seq)
    assert torch.equal(found.unpacked(found.tokens + 1), wanted.unpacked(wanted.tokens + 1))
    T = len(wanted.tokens)
    assert torch.equal(roomy.tokens[:T], wanted.tokens)
    roomy.tokens[T:] = torch.nan  # nobody reads what is not a token
    assert torch.equal(roomy.unpacked(roomy.tokens + 1), wanted.unpacked(wanted.tokens + 1))


def apart(layer):
    """Or all guesses of a fresh predictor are about equal, and rounding decides."""
    for table in (layer.predictor.pool, layer.predictor.basis, layer.predictor.query.weight):
        table.mul_(20)


@runs
@pytest.mark.parametrize(("block", "prefix", "reduce_n"), [(1, 1, 6), (8, 0, 2), (20, 1, 16)])
@torch.no_grad()
def test_listed_keys_by_kernels_are_the_layer_written_out(kernels, block, prefix, reduce_n):
    torch.manual_seed(0)
    layer = create_layer("sparsifiner", 24, 2, tokens=60 + prefix, block=block, reduce_n=reduce_n, prefix=prefix)
    layer = layer.to(DEVICE).eval()
    apart(layer)
    x = torch.randn(2, 60 + prefix, 24, device=DEVICE)
    call = layer.asked(x, grid=(6, 10), prefix=prefix)
    assert layer._direct(layer._flat(call))
    found = layer(x, grid=(6, 10), prefix=prefix)
    wanted = layer.double()(x.double(), grid=(6, 10), prefix=prefix)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-4, atol=1e-5)


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("b", [1, 7, 50])
def test_the_largest_are_chosen_with_the_first_of_equals_in_their_order(b, dtype):
    from cumulant.kernels.heads.sparse import largest_places

    torch.manual_seed(0)
    guess = torch.randn(3, 5, 50, device=DEVICE).mul(3).round().to(dtype)  # many are equal, some below 0, some -0
    order = guess.sort(dim=-1, descending=True, stable=True).indices[..., :b]
    assert torch.equal(largest_places(guess, b).long(), order.sort(-1).values)


ON_A_GPU = {
    "moh": (48, 4, {"shared": 1, "top": 2, "sparse": True}, {}),
    "biformer": (32, 2, {"regions": 7, "top": 4}, {"grid": (14, 14)}),
    "complexformer": (64, 2, {}, {}),
    "sparsifiner": (64, 2, {"tokens": 196, "block": 16}, {}),
}


@pytest.mark.gpu
@torch.no_grad()
def test_layers_by_kernels_on_a_gpu_are_those_written_out():  # in one test: processes take longer than it
    for name, (width, heads, options, call) in ON_A_GPU.items():
        torch.manual_seed(0)
        layer = create_layer(name, width, heads, **options).cuda().eval()
        if name == "sparsifiner":
            apart(layer)
        x = torch.randn(2, 196, width, device="cuda")
        found, wanted = layer(x, **call), layer.double()(x.double(), **call)
        assert (found - wanted).norm() < 1e-3 * wanted.norm(), name
    interpreter = create_layer("ia_red2", 64, 2).cuda().interpreter
    x, kept = torch.randn(2, 196, 64, device="cuda"), torch.rand(2, 196, device="cuda") < 0.5
    assert (interpreter.told(x) - interpreter.double()(x.double())).abs().max() < 1e-4
    pack = Pack.of(x, kept)
    assert torch.equal(pack.tokens, x[kept])
    assert torch.equal(pack.unpacked(pack.tokens), x * kept.unsqueeze(-1))
