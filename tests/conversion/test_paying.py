"""What does not pay is said and refused: every plan states time before and after. The clock is the test's."""

import itertools

import pytest
import torch
from small_models import bert, transformers

import cumulant
from cumulant.conversion import SlowerError, choose_layers, convert, diagnose, paying
from cumulant.conversion.command import Convert, run_convert
from cumulant.conversion.paying import Times, recorded, seconds_of
from cumulant.nn.swapped.plan import is_converted
from cumulant.train import save


def ticking(monkeypatch, growth):
    """A clock whose hours become longer (growth > 1) or shorter: what is measured later takes longer, or less long."""
    monkeypatch.setattr(paying, "clock", itertools.accumulate(growth**n for n in itertools.count()).__next__)


@pytest.fixture
def later_is_slower(monkeypatch):
    ticking(monkeypatch, 1.1)


@pytest.fixture
def later_is_faster(monkeypatch):
    ticking(monkeypatch, 0.9)


def vit(**kw):
    return cumulant.create_model("vit_nano_patch4_32", num_classes=10, init_std=0.1, **kw).eval()


PIXELS = torch.randn(2, 3, 32, 32, generator=torch.Generator().manual_seed(0))
LARGE = torch.randn(1, 3, 64, 64, generator=torch.Generator().manual_seed(0))


@pytest.mark.usefixtures("later_is_slower")
def test_what_is_slower_on_the_data_is_refused_and_the_model_left_as_it_was():
    model = vit()
    said = model(PIXELS)
    with pytest.raises(SlowerError, match=r"replacing 4 layers is slower on cpu .* before, .* after.*force=True"):
        convert(model, "cumulant3", data=PIXELS)
    assert not is_converted(model)
    torch.testing.assert_close(model(PIXELS), said, rtol=0, atol=0)


def test_a_burst_of_other_work_while_the_plan_is_timed_does_not_decide(monkeypatch):
    """Before, after in the burst, and both again: the fastest of each counts."""
    taken = iter([1.0, 5.0, 1.2, 0.5])
    monkeypatch.setattr("cumulant.conversion.conversion.seconds_of", lambda *_: {"": next(taken)})
    model = vit()
    report = convert(model, "cumulant3", data=PIXELS)
    assert report.seconds == (1.0, 0.5)
    assert is_converted(model)
    assert "1 s before, 500 ms after: 2 times as fast" in str(report)


@pytest.mark.usefixtures("later_is_slower")
def test_force_converts_what_is_slower_and_the_report_says_by_how_much():
    report = convert(vit(), "cumulant3", data=PIXELS, force=True)
    assert len(report.replaced) == 4
    assert "times as long" in str(report)
    assert "forward pass on cpu, inputs of shape (2, 3, 32, 32)" in str(report)


@pytest.mark.usefixtures("later_is_slower")
def test_without_data_a_slower_plan_is_a_warning_not_an_error():
    with pytest.warns(UserWarning, match="is slower on cpu .* Pass data="):
        report = convert(vit(), "cumulant3")
    assert len(report.replaced) == 4


@pytest.mark.usefixtures("later_is_faster")
def test_what_is_faster_is_converted_without_a_word_of_warning(recwarn):
    report = convert(vit(), "cumulant3", data=PIXELS)
    assert "times as fast" in str(report)
    assert not [w for w in recwarn if "slower" in str(w.message)]


def test_the_dial_replaces_no_layer_that_a_clock_finds_slower(monkeypatch):
    model = vit(img_size=64)
    assert choose_layers(model, LARGE, target=0.5).plan
    ticking(monkeypatch, 1.1)
    found = choose_layers(model, LARGE, target=0.5)
    assert not found.plan
    assert all(
        "is slower here at 257 tokens" in reason and "times as long" in reason for reason in found.reasons.values()
    )
    report = convert(model, layers="dial", target=0.5, data=LARGE)
    assert not report.replaced
    assert "slower here" in str(report)
    assert len(choose_layers(model, LARGE, target=0.5, force=True).plan) == 4
    assert len(convert(model, layers="dial", target=0.5, data=LARGE, force=True).replaced) == 4


@pytest.mark.parametrize(("taken", "wins"), [((0.9, 0.3, 0.5), 1), ((0.5, 0.49, 0.48), 0), ((1.2, 1.3, 0.8), 2)])
def test_the_dial_takes_what_a_clock_finds_fastest_and_of_alike_times_the_least_work(monkeypatch, taken, wins):
    names = ["cluster4+response=0", "cluster16+response=0", "cluster16+near=2+response=0"]  # the least work first
    times = iter([1.0, *taken])
    monkeypatch.setattr("cumulant.conversion.dial.seconds_of", lambda *_: dict.fromkeys(_[2], next(times)))
    (found,) = choose_layers(vit(img_size=64, depth=1), LARGE, target=1e9, candidates=names[::-1]).layers.values()
    assert found.attention == names[wins]
    assert found.seconds == (1.0, taken[wins])


def test_more_near_clusters_than_are_needed_are_not_timed(monkeypatch):
    asked = []
    monkeypatch.setattr("cumulant.conversion.dial.seconds_of", lambda *_: asked.append(_) or dict.fromkeys(_[2], 1.0))
    names = [f"cluster16+near={near}+response=0" for near in (2, 3, 4)]
    (found,) = choose_layers(vit(img_size=64, depth=1), LARGE, target=1e9, candidates=names).layers.values()
    assert found.attention == names[0]
    assert len(asked) == 2  # before, and with the first


def test_layers_that_pay_each_but_not_together_are_not_replaced(monkeypatch):
    model = vit(img_size=64)

    turn = itertools.count(1)

    def seconds(model, batches, names=("",)):
        return {name: float(next(turn)) if name == "" else 1.0 for name in names}

    monkeypatch.setattr("cumulant.conversion.conversion.seconds_of", seconds)
    report = convert(model, layers="dial", target=0.5, data=LARGE)
    assert not report.replaced
    assert not is_converted(model)
    assert "the whole model is slower with it: 1 s before, 2 s after" in str(report)


@pytest.mark.usefixtures("later_is_slower")
def test_auto_chooses_no_layer_that_is_slower_unless_forced():
    model = vit()
    with pytest.raises(SlowerError, match=r"every layer is slower than softmax .* at 65 tokens on cpu"):
        convert(model, layers="auto", budget=1.0, data=PIXELS)
    assert convert(model, layers="auto", budget=1.0, data=PIXELS, force=True).replaced


@pytest.mark.usefixtures("later_is_slower")
def test_the_proposal_does_not_propose_what_is_slower():
    said = diagnose(vit(), PIXELS).proposal(budget=1.0)
    assert said.startswith("keep softmax: 4 of 4 layers fit a relative change of 100%, but none is faster at 65 tokens")
    assert "times as long" in said


def test_the_proposal_has_measured_time_and_counts_only_gains(monkeypatch):
    ticking(monkeypatch, 0.9)
    found = diagnose(vit(), PIXELS)
    assert set(found.layers[0].seconds) == {"softmax", *found.layers[0].effect}
    said = found.proposal(budget=1.0)
    assert said.startswith("replace 4 of 4 layers")
    assert "ms before" in said
    assert "times as fast, measured layer by layer on cpu" in said
    assert "0.9" not in said.split("multiply-adds, counted:")[1]


def test_a_count_below_one_is_no_gain():
    """At 3 tokens the expansion multiplies more than softmax: no such factor is printed."""
    found = diagnose(vit(), PIXELS)
    for layer in found.layers:
        layer.tokens = 3
    said = found.proposal(budget=1.0)
    assert "replace 4 of 4" in said
    assert found.speedup(3) < 1
    assert "at 3 tokens" not in said


def test_softmax_is_not_a_replacement():
    with pytest.raises(ValueError, match=r'attention="softmax" is what the layers compute now'):
        convert(vit(), "softmax")
    with pytest.raises(ValueError, match="softmax"):
        diagnose(vit(), PIXELS, attention=["softmax"])


@pytest.mark.usefixtures("later_is_slower")
def test_the_command_line_refuses_and_forces(tmp_path):
    pytest.importorskip("sklearn", reason="needs the digits: pip install 'cumulant[train]'")
    weights = str(save(cumulant.create_model("vit_nano_patch2_8", num_classes=10), tmp_path / "last.safetensors"))
    how = {"batches": 1, "batch_size": 4, "out": tmp_path / "out"}
    with pytest.raises(SlowerError, match="--force"):
        run_convert(Convert(weights, "digits", **how))
    assert not list((tmp_path / "out").glob("*.safetensors"))
    assert run_convert(Convert(weights, "digits", force=True, **how)).replaced


@pytest.mark.usefixtures("later_is_slower")
def test_layers_of_transformers_are_timed_under_their_names():
    transformers()
    found = diagnose(bert(), {"input_ids": torch.arange(2, 14)[None]}, attention=("cumulant2",))
    assert all(layer.times("cumulant2").slower for layer in found.layers)


def test_a_module_called_twice_counts_twice(monkeypatch):
    monkeypatch.setattr(paying, "clock", itertools.count().__next__)
    once = torch.nn.Linear(2, 2)
    model = torch.nn.Sequential(once, once, torch.nn.Linear(2, 2))
    assert seconds_of(model, [torch.randn(1, 2)], ["0", "2"]) == {"0": 2, "2": 1}


@pytest.mark.parametrize(
    ("times", "words"),
    [((1.0, 2.0), "2 times as long"), ((2.0, 1.0), "2 times as fast"), ((1.0, 1.01), "as fast as before")],
)
def test_times_say_what_they_mean(times, words):
    assert str(Times(*times)).endswith(words)


class Cached(torch.nn.Module):
    """A layer that is called with something that remembers."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Inner()

    def forward(self, x: torch.Tensor, memory: object = None) -> torch.Tensor:
        return self.inner(x, memory=memory)


class Inner(torch.nn.Module):
    def forward(self, x: torch.Tensor, memory: object = None) -> torch.Tensor:
        return x


def test_layers_are_timed_alone_with_what_they_were_called_with(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Linear(3, 4))
    x = torch.randn(1, 2)
    calls = recorded(model, [x, x], ["1"])
    assert [args[0].shape for args, _ in calls["1"]] == [(1, 3), (1, 3)]
    asked = []
    for name, layer in model.named_children():
        layer.register_forward_pre_hook(lambda *_, name=name: asked.append(name))
    monkeypatch.setattr(paying, "clock", itertools.count().__next__)
    assert seconds_of(model, [x, x], ["1"], calls) == {"1": 1}
    assert set(asked) == {"1"}


def test_what_is_clearly_slower_on_a_cpu_is_asked_once(monkeypatch):
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    calls, asked = recorded(model, [torch.randn(1, 2)], ["0"]), []
    model[0].register_forward_pre_hook(lambda *_: asked.append(1))
    monkeypatch.setattr(paying, "clock", itertools.count().__next__)
    assert seconds_of(model, [], ["0"], calls, {"0": 0.4}) == {"0": 1}
    assert len(asked) == 1
    seconds_of(model, [], ["0"], calls, {"0": 0.6})
    assert len(asked) > 2


def test_a_call_with_a_memory_is_not_repeated():
    model, x = Cached(), torch.randn(1, 2)
    assert recorded(model, [(x,)], ["inner"]) is not None
    assert recorded(model, [(x, object())], ["inner"]) is None
