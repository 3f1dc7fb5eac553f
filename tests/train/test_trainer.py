"""The trainer learns, its options do what they say, and a loss that is no number ends it early."""

import io
import json
import re
import sys
import types
from dataclasses import replace

import pytest
import torch
from safetensors.torch import load_file
from small_runs import FULL, PLAIN, few_digits
from torch import nn

from cumulant.data.augmentation import Augmentation
from cumulant.data.part import Source
from cumulant.models import create_model
from cumulant.train import Predictions, evaluate_checkpoint, load, read_log, read_recipe, train
from cumulant.train.checkpoint import read_header
from cumulant.train.optimise import Average, decay_groups
from cumulant.train.processes import Processes
from cumulant.train.progress import CHECK_STEPS, Meter

ONE = replace(PLAIN, epochs=1, warmup_epochs=0.0, ema=0.0, accumulate=1, log_steps=1, checkpoint_steps=0)


def losses(folder):
    return [line["loss"] for line in read_log(folder) if line["kind"] == "train"]


def test_the_digits_recipe_learns_the_digits(tmp_path):
    result = train(replace(read_recipe("digits"), epochs=8, model_options={"in_chans": 3, "depth": 2, "init_std": 0.1}),
                   tmp_path)  # fmt: skip
    curve = losses(tmp_path)
    assert curve[-1] < 0.6 * curve[0]
    assert result.top1 > 0.85
    assert result.loss == curve[-1]


def test_the_result_the_log_the_predictions_and_the_checkpoint_agree(tmp_path):
    result = train(FULL, tmp_path, source=few_digits())
    last = [line for line in read_log(tmp_path) if line["kind"] == "test"][-1]
    assert (last["top1"], last["top5"], last["step"]) == (result.top1, result.top5, result.steps)
    assert json.loads((tmp_path / "result.json").read_text())["result"]["top1"] == result.top1
    again, classes = evaluate_checkpoint(tmp_path, source=few_digits(), batch_size=7)
    torch.testing.assert_close(again.probabilities, result.predictions.probabilities)
    assert classes == few_digits().classes
    assert (again.top(1), again.top(5)) == (result.top1, result.top5)
    best = read_header(tmp_path / "best.safetensors")
    assert float(best["top1"]) == result.best_top1
    assert int(best["epoch"]) == result.best_epoch
    assert load(tmp_path / "best.safetensors").config["attention"] == "cumulant2"


def test_accumulated_parts_give_the_step_of_the_whole_batch(tmp_path):
    train(ONE, tmp_path / "whole", source=few_digits())
    train(replace(ONE, accumulate=4), tmp_path / "parts", source=few_digits())
    assert losses(tmp_path / "parts") == pytest.approx(losses(tmp_path / "whole"), rel=1e-5)
    whole, parts = (load_file(tmp_path / name / "last.safetensors") for name in ("whole", "parts"))
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=1e-3, atol=1e-4)


def test_the_seed_decides_everything(tmp_path):
    curves = []
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        train(replace(ONE, drop_path=0.2, seed=seed), tmp_path / name, source=few_digits())
        curves.append(losses(tmp_path / name))
    assert curves[0] == curves[1]
    assert curves[0] != curves[2]


def test_the_random_state_of_the_caller_is_left_alone(tmp_path):
    torch.manual_seed(3)
    expected = torch.rand(4)
    torch.manual_seed(3)
    train(FULL, tmp_path, source=few_digits())
    assert torch.equal(torch.rand(4), expected)


def test_compiled_blocks_are_called_in_training_and_plain_ones_in_evaluation(tmp_path, monkeypatch):
    train(ONE, tmp_path / "plain", source=few_digits())
    compiled, stances, set_stance = [], [], torch.compiler.set_stance

    def fake(function, **options):
        def call(*arguments, **named):
            compiled.append((type(getattr(function, "__self__", None)).__name__, options.get("mode")))
            return function(*arguments, **named)

        return call

    def stance(name):
        stances.append(name)
        return set_stance(name)

    monkeypatch.setattr(torch, "compile", fake)
    monkeypatch.setattr(torch.compiler, "set_stance", stance)
    train(replace(ONE, compile=True, compile_mode="max-autotune"), tmp_path / "compiled", source=few_digits())
    assert losses(tmp_path / "compiled") == losses(tmp_path / "plain")
    assert ("Block", "max-autotune") in compiled
    assert set(stances) == {"force_eager"}


def test_blocks_that_differ_in_their_rate_of_dropping_alone_are_compiled_once():
    model = create_model("vit_nano_patch2_8", depth=4, drop_path=0.3)
    graphs = []

    def count(graph, _):
        graphs.append(graph)
        return graph.forward

    torch.compiler.reset()
    for block in list(model.blocks)[1:]:
        block.compile(backend=count, dynamic=False)
    model.train()(torch.rand(2, 1, 8, 8))
    assert len(graphs) == 1


def test_bf16_computes_in_bf16_and_keeps_the_weights_in_float32(tmp_path):
    seen = set()
    hook = nn.modules.module.register_module_forward_hook(
        lambda module, _, out: seen.add(out.dtype) if isinstance(module, nn.Linear) else None
    )
    try:
        train(replace(ONE, precision="bf16"), tmp_path, source=few_digits())
    finally:
        hook.remove()
    assert seen == {torch.bfloat16}
    assert {tensor.dtype for tensor in load_file(tmp_path / "last.safetensors").values()} == {torch.float32}


def test_label_smoothing_and_augmentation_reach_the_loss(tmp_path):
    plain = replace(ONE, augmentation=Augmentation(), label_smoothing=0.0)
    for name, recipe in (
        ("plain", plain),
        ("smooth", replace(plain, label_smoothing=0.5)),
        ("shifted", replace(plain, augmentation=Augmentation(shift=2))),
    ):
        train(recipe, tmp_path / name, source=few_digits())
    first = {name: losses(tmp_path / name)[0] for name in ("plain", "smooth", "shifted")}
    assert len(set(first.values())) == 3


def test_the_average_follows_its_formula_and_gives_the_weights_back():
    model = nn.Linear(2, 1, bias=False)
    average, expected = Average(model, 0.5), model.weight.detach().clone()
    for step in (1, 2, 3, 40):
        with torch.no_grad():
            model.weight += 1
        average.update(step)
        decay = min(0.5, (1 + step) / (10 + step))
        expected = decay * expected + (1 - decay) * model.weight.detach()
    own = model.weight.detach().clone()
    with average.in_place():
        torch.testing.assert_close(model.weight.detach(), expected)
    assert torch.equal(model.weight, own)


def test_what_is_evaluated_and_kept_is_the_average(tmp_path):
    train(replace(ONE, ema=0.99), tmp_path / "averaged", source=few_digits())
    train(ONE, tmp_path / "plain", source=few_digits())
    assert losses(tmp_path / "averaged") == losses(tmp_path / "plain")
    averaged, plain = (load_file(tmp_path / name / "last.safetensors") for name in ("averaged", "plain"))
    assert not torch.equal(averaged["head.weight"], plain["head.weight"])
    assert read_header(tmp_path / "averaged" / "last.safetensors")["weights"] == "average"


def test_learned_factors_do_not_decay_but_every_layer_does():
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.temperature = nn.Parameter(torch.ones(2, 3))
            self.factor = nn.Parameter(torch.ones(4, 1, 1))
            self.table = nn.Parameter(torch.ones(4, 4))
            self.one = nn.Linear(3, 1)

    model = Layer()
    names = {id(p): name for name, p in model.named_parameters()}
    decayed, kept = ({names[id(p)] for p in group["params"]} for group in decay_groups(model, 0.1))
    assert decayed == {"table", "one.weight"}
    assert kept == {"temperature", "factor", "one.bias"}


BROKEN = replace(PLAIN, epochs=400, lr=1e30, clip=None, weight_decay=0.0, eval_epochs=400, log_steps=0)


def test_a_loss_that_is_no_number_ends_the_run_early_with_advice(tmp_path):
    message = r"loss became (nan|inf).* step (\d+) .*lower lr \(now 1e\+30\).*set clip"
    with pytest.raises(FloatingPointError, match=message) as caught:
        train(replace(BROKEN, batch_size=2, checkpoint_steps=0), tmp_path, source=few_digits())
    assert int(re.search(r"step (\d+)", str(caught.value))[1]) == CHECK_STEPS  # far from the first log line, at step 48
    assert not (tmp_path / "best.safetensors").exists()


def test_weights_that_are_no_numbers_are_never_saved(tmp_path):
    with pytest.raises(FloatingPointError, match="the state saved before that is whole"):
        train(replace(BROKEN, checkpoint_steps=1), tmp_path, source=few_digits())
    assert all(tensor.isfinite().all() for tensor in load_file(tmp_path / "state.safetensors").values())


def test_the_loss_is_handed_over_in_order_and_counted_anew():
    meter, heard = Meter(Processes(torch.device("cpu")), lambda step, loss: FloatingPointError(step)), []
    for step, loss in enumerate([1.0, 3.0, 5.0], 1):
        meter.add(torch.tensor(loss))
        meter.request(step, heard.append if step != 2 else None)
    assert heard == [1.0, 4.0]
    meter.add(torch.tensor(float("nan")))
    with pytest.raises(FloatingPointError):
        meter.request(4)


@pytest.mark.parametrize("world", [2, 3])
def test_the_loss_is_the_same_wherever_its_sum_was_shared_anew_among_the_processes(world):
    losses, told = torch.rand(world, 200, generator=torch.manual_seed(0)), []
    for stop in range(0, 200, 20):
        meters: list[Meter] = []
        team = Processes(torch.device("cpu"), world=world)
        object.__setattr__(team, "sum", lambda tensor, meters=meters: sum(meter.total for meter in meters))
        meters += [Meter(team, lambda step, loss: FloatingPointError(step)) for _ in range(world)]
        for step in range(200):
            if step == stop:  # what a state keeps, and all go on from
                kept = meters[0].shared()
                for meter in meters:
                    meter.total.copy_(kept)
            for meter, loss in zip(meters, losses[:, step], strict=True):
                meter.add(loss)
        meters[0].request(200, told.append)
    assert len(set(told)) == 1
    assert told[0] == pytest.approx(losses.mean().item())


def test_too_large_or_indivisible_batches_are_refused_by_name(tmp_path):
    with pytest.raises(
        ValueError, match="must not exceed the 100 training items of few digits without the hold-out of 12"
    ):
        train(replace(PLAIN, batch_size=128), tmp_path / "large", source=few_digits())
    with pytest.raises(
        ValueError, match="batch_size must be a multiple of accumulate, got batch_size=16, accumulate=3"
    ):
        replace(PLAIN, accumulate=3)


def test_an_odd_batch_is_no_batch_for_mixing_and_told_before_anything_is_decoded(tmp_path, monkeypatch):
    monkeypatch.setattr("cumulant.train.trainer.loader_of", lambda *_: pytest.fail("data was decoded"))
    with pytest.raises(ValueError, match=r"mixup and cutmix pair .* got batch_size=15, 1 processes"):
        train(replace(PLAIN, batch_size=15, accumulate=1), tmp_path, source=few_digits())


def test_several_views_of_an_item_are_averaged_as_probabilities(tmp_path):
    whole = few_digits()

    class TwoViews:
        """Every image as it is and turned upside down."""

        views, labels = 2, whole.test.labels.repeat_interleave(2)

        def __len__(self):
            return len(self.labels)

        def name(self, index):
            return whole.test.name(index // 2)

        def decode(self, index, size, seed=None):
            image = whole.test.decode(index // 2, size)
            return image.flip(1) if index % 2 else image

    class Turned(TwoViews):
        views, labels = 1, whole.test.labels

        def decode(self, index, size, seed=None):
            return whole.test.decode(index, size).flip(1)

    train(ONE, tmp_path, source=whole)

    def probabilities(test):
        source = Source(whole.name, "image", whole.train, test, whole.classes)
        return evaluate_checkpoint(tmp_path, source=source, batch_size=9)[0].probabilities

    each = (probabilities(whole.test) + probabilities(Turned())) / 2
    torch.testing.assert_close(probabilities(TwoViews()), each)


def test_a_video_source_trains_a_video_model(tmp_path):
    class Clips:
        """Digits that fade in (class 0) or out (class 1): single frames tell nothing."""

        views = 1

        def __init__(self, part):
            self.part, self.labels = part, torch.arange(len(part)) % 2

        def __len__(self):
            return len(self.part)

        def name(self, index):
            return self.part.name(index)

        def decode(self, index, size, seed=None):
            fade = torch.linspace(0, 1, 8)[:, None, None]
            fade = fade.flip(0) if index % 2 else fade
            return (self.part.decode(index, size)[:, None] * fade).to(torch.uint8)

    digits = few_digits()
    source = Source("fading digits", "video", Clips(digits.train), Clips(digits.test), ("in", "out"))
    recipe = replace(
        ONE,
        model="vivit_nano_patch4x2_16",
        model_options={"in_chans": 3, "depth": 1, "tubelet": [2, 4, 4], "init_std": 0.1, "zero_head": False},
        image_size=8,
        frames=8,
        epochs=6,
        augmentation=Augmentation(shift=1),
        ema=0.0,
    )
    assert train(recipe, tmp_path, source=source).top1 > 0.9
    assert load(tmp_path / "last.safetensors").config["frames"] == 8


def test_predictions_count_per_class_and_confusions(tmp_path):
    probabilities = torch.tensor([[0.6, 0.3, 0.1], [0.2, 0.5, 0.3], [0.5, 0.3, 0.2], [0.1, 0.2, 0.7]])
    found = Predictions(probabilities, torch.tensor([0, 1, 1, 0]), torch.arange(4))
    assert (found.top(1), found.top(2), found.top(5)) == (0.5, 0.75, 1.0)
    assert found.confusion().tolist() == [[1, 0, 1], [1, 1, 0], [0, 0, 0]]
    assert found.per_class()[:2].tolist() == [0.5, 0.5]
    assert found.per_class()[2].isnan()
    found.save(tmp_path / "found.safetensors")
    assert torch.equal(Predictions.load(tmp_path / "found.safetensors").probabilities, probabilities)


def test_tensorboard_gets_the_numbers_of_the_log_or_says_what_to_install(tmp_path, monkeypatch):
    told = []

    class Writer:
        def __init__(self, folder, purge_step):
            told.append(purge_step)

        def add_scalar(self, *values):
            told.append(values)

        def close(self):
            pass

    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", types.SimpleNamespace(SummaryWriter=Writer))
    train(replace(ONE, tensorboard=True), tmp_path / "there", source=few_digits())
    first = read_log(tmp_path / "there")[0]
    assert told[0] == 1
    assert ("train/loss", first["loss"], 1) in told
    monkeypatch.setitem(sys.modules, "torch.utils.tensorboard", None)
    with pytest.raises(ImportError, match="pip install tensorboard"):
        train(replace(ONE, tensorboard=True), tmp_path / "missing", source=few_digits())


@pytest.mark.gpu
def test_no_step_makes_the_host_wait_for_the_device(tmp_path, monkeypatch):
    from cumulant.train import trainer

    step = trainer._Run._step

    def strict(self, *batch):
        torch.cuda.set_sync_debug_mode("error" if self.done.step > 2 else "default")
        try:
            step(self, *batch)
        finally:
            torch.cuda.set_sync_debug_mode("default")

    monkeypatch.setattr(trainer._Run, "_step", strict)
    result = train(replace(FULL, precision="bf16"), tmp_path, source=few_digits(), device="cuda")
    assert result.steps == 18


@pytest.mark.gpu
def test_a_replayed_step_trains_like_a_plain_one(tmp_path):
    recipe = replace(FULL, accumulate=1, drop_path=0.2, ema=0.0)
    for name, graph in (("plain", False), ("graph", True)):
        train(replace(recipe, cuda_graph=graph), tmp_path / name, source=few_digits(), device="cuda")
    torch.testing.assert_close(losses(tmp_path / "graph"), losses(tmp_path / "plain"), rtol=1e-3, atol=0)


@pytest.mark.gpu
def test_a_step_that_waits_for_the_device_is_run_piece_by_piece_and_says_so():
    from cumulant.train.stepping import Recorded

    double = Recorded(lambda x: x * (2 if x.sum().item() else 0))
    with pytest.warns(UserWarning, match="cannot be a CUDA graph"):
        answers = [double(torch.full((2,), float(n), device="cuda")).tolist() for n in range(5)]
    assert answers == [[2.0 * n] * 2 for n in range(5)]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:the step cannot be a CUDA graph")
def test_a_step_that_could_not_be_recorded_leaves_stream_and_random_numbers_as_they_were():
    from cumulant.train.stepping import Recorded

    stream, drawn = torch.cuda.current_stream(), []
    for recorded in (False, True):
        torch.manual_seed(1)
        if recorded:
            waits = Recorded(lambda x: x * x.sum().item())
            for _ in range(4):
                waits(torch.ones(2, device="cuda"))
        drawn.append(torch.rand(4, device="cuda"))
    assert torch.equal(*drawn)
    assert torch.cuda.current_stream() == stream


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (
            {"epochs": 2, "warmup_epochs": 3.0},
            "warmup_epochs must not exceed epochs, got a warm-up of 3 .* of 2 epochs",
        ),
        ({"min_lr": 0.1}, r"min_lr must not exceed lr, got min_lr=0.1, lr=0.002"),
        ({"min_lr": 1.5e-3, "lr_batch": 64}, r"min_lr must not exceed lr, got min_lr=0.0015, lr=0.0005"),
    ],
)
def test_a_schedule_that_does_not_fit_the_training_is_refused(tmp_path, change, told):
    with pytest.raises(ValueError, match=told):
        train(replace(ONE, **change), tmp_path, source=few_digits())


def test_a_recipe_for_fewer_epochs_keeps_its_warm_up_where_that_fits():
    recipe = replace(ONE, epochs=20, warmup_epochs=2.0)
    assert recipe.lasting(10) == replace(recipe, epochs=10)
    assert recipe.lasting(1).warmup_epochs == 0.1


def test_a_run_says_at_its_start_what_it_trains_on_what(tmp_path):
    screen = io.StringIO()
    result = train(ONE, tmp_path, source=few_digits(), device="cpu", progress=screen)
    first = screen.getvalue().splitlines()[0]
    assert first == (
        "few digits: 112 train and 50 test images of 10 classes (12 of the train images held out); vit_nano_patch2_8 "
        f"with cumulant2, {result.parameters:,} parameters, on cpu; 1 epochs of 6 steps"
    )
