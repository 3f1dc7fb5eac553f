"""Accuracy under one recipe: what is trained, what is kept, and what the runs allow to be said."""

import io
import json
from dataclasses import replace

import pytest
from bench_records import baseline, record

from cumulant.bench import work
from cumulant.bench.pareto import from_checkpoint
from cumulant.cli import main
from cumulant.data import open_source
from cumulant.studies import mechanisms
from cumulant.studies.command import TrainBench
from cumulant.studies.mechanisms import chosen, digest, earlier, judged, planned, run, table
from cumulant.studies.runs import TimeOverError
from cumulant.train import read_recipe


def outcome(result, claim):
    return next(one["outcome"] for one in result["claims"] if one["claim"] == claim)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    settings = TrainBench(
        attention=("softmax", "linear", "lla+ridge=-1.0"), epochs=1, control=1, device="cpu",
        out=tmp_path_factory.mktemp("bench"),
    )  # fmt: skip
    return settings, run(settings)


def test_every_mechanism_and_the_control_are_trained_and_kept(trained):
    settings, result = trained
    assert [(r["variant"], r["seed"], r["role"]) for r in result["runs"]] == [
        ("softmax", 0, "compared"),
        ("softmax", 1, "control"),
        ("linear", 0, "compared"),
        ("lla+ridge=-1.0", 0, "compared"),
    ]
    for run_ in result["runs"][:3]:
        kept = json.loads((settings.out / "digits" / f"{run_['variant']}-{run_['seed']}" / "bench.json").read_text())
        assert kept == {key: value for key, value in run_.items() if key != "role"}
        assert kept["provenance"]["command"] == "cumulant bench train --recipe digits"


def test_a_mechanism_that_fails_is_told_and_the_others_are_not_lost(trained):
    _, result = trained
    assert "ridge must be positive" in result["failed"]["lla+ridge=-1.0"]
    assert [row["variant"] for row in result["ranking"]] != []
    assert "failed: lla+ridge=-1.0: ValueError" in table(result)


def test_costs_stand_beside_accuracy(trained):
    _, result = trained
    rows = {row["variant"]: row for row in result["ranking"]}
    assert rows["softmax"]["parameters"] == rows["linear"]["parameters"] == 136_650
    assert rows["softmax"]["seeds"] == 2
    for row in rows.values():
        assert row["flops"] > 4e6
        assert row["throughput"] > 0
        assert row["step_bytes"] > 1 << 20


def test_the_same_command_again_trains_nothing(trained, monkeypatch):
    settings, result = trained
    monkeypatch.setattr(mechanisms, "costs", lambda *_: pytest.fail("measured again"))
    screen = io.StringIO()
    again = run(settings, screen)
    assert again["runs"][:3] == result["runs"][:3]
    assert "[1/4] softmax, seed 0, compared" in screen.getvalue()


def test_another_recipe_in_the_same_folder_is_refused(trained):
    settings, _ = trained
    changed = TrainBench(attention=("softmax",), epochs=2, control=1, device="cpu", out=settings.out)
    with pytest.raises(ValueError, match="another recipe"):
        run(changed)


def test_flops_of_cumulant_layers_are_not_hidden_by_a_fused_kernel():
    from dataclasses import replace

    from cumulant.data import open_source
    from cumulant.train import read_recipe

    recipe, source = read_recipe("digits"), open_source("digits")
    counted = {name: work.flops(replace(recipe, attention=name), source) for name in ("cumulant1", "cumulant2")}
    tokens, width, heads, layers = 17, 16, 4, 4
    assert counted["cumulant2"] - counted["cumulant1"] == 2 * layers * heads * 2 * tokens * width**2


def test_the_baseline_comes_first_with_its_control_then_seed_by_seed():
    runs = planned(read_recipe("digits"), ("linear", "softmax"), "softmax", TrainBench(seeds=2, control=1))
    assert [(r.configuration, r.seed, r.role) for r in runs] == [
        ("softmax", 0, "compared"),
        ("softmax", 1, "compared"),
        ("softmax", 2, "control"),
        ("linear", 0, "compared"),
        ("linear", 1, "compared"),
    ]


def test_only_differences_beyond_the_spread_of_the_baseline_count():
    result = judged([*baseline(0.50, 0.52), record("linear", 0.40), record("agent", 0.525)], "softmax")
    assert result["control"]["spread"] == pytest.approx(2)
    beyond = {row["variant"]: row["beyond_chance"] for row in result["ranking"]}
    assert beyond == {"agent": False, "softmax": None, "linear": True}
    assert outcome(result, "softmax > linear") == "confirmed"
    assert outcome(result, "agent > softmax") == "not resolved"
    assert outcome(result, "rala > focused_linear") == "not tested"


def test_as_many_test_items_as_the_spread_are_not_beyond_it():
    counts = {"low": 430, "high": 437, "above": 430, "below": 423}  # of 450: seven apart both times
    share = {name: count / 450 for name, count in counts.items()}
    difference, spread = 100 * (share["above"] - share["below"]), 100 * (share["high"] - share["low"])
    assert difference > spread  # by rounding alone
    assert not mechanisms.beyond(difference, spread)
    assert mechanisms.beyond(100 * 8 / 450, spread)


def test_claims_are_refuted_when_the_other_side_is_beyond_the_spread():
    records = [*baseline(0.50, 0.51), record("mala", 0.40), record("rala", 0.45), record("linear", 0.60)]
    result = judged(records, "softmax")
    assert outcome(result, "mala >= rala") == "refuted"
    assert outcome(result, "softmax > linear") == "refuted"


def test_a_tie_agrees_with_at_least():
    result = judged([*baseline(0.5, 0.6), record("mala", 0.50), record("rala", 0.52)], "softmax")
    assert outcome(result, "mala >= rala") == "not contradicted"


def test_with_several_seeds_the_interval_decides():
    far = [record("linear", x, seed) for seed, x in enumerate((0.40, 0.41, 0.405))]
    near = [record("cumulant3", x, seed) for seed, x in enumerate((0.40, 0.60, 0.49))]
    own = [record("softmax", x, seed) for seed, x in enumerate((0.50, 0.51))] + baseline(0.505, 0.5)[1:]
    result = judged([*own, *far, *near], "softmax")
    claims = {one["claim"]: one for one in result["claims"]}
    assert claims["softmax > linear"]["outcome"] == "confirmed"
    low, high = claims["softmax > cumulant3"]["interval"]
    assert low < 0 < high
    assert claims["softmax > cumulant3"]["outcome"] == "not resolved"


def test_failed_runs_are_no_results():
    failed = {"variant": "linear", "seed": 0, "role": "compared", "failure": "FloatingPointError: nan"}
    result = judged([*baseline(0.5, 0.6), failed], "softmax")
    assert [row["variant"] for row in result["ranking"]] == ["softmax"]
    assert result["failed"] == {"linear": "FloatingPointError: nan"}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"seeds": 0}, "seeds must be 1"),
        ({"control": 0}, "control must be 1"),
        ({"minutes": float("nan")}, "minutes must be 0 or more, got nan"),
    ],
)
def test_settings_that_mean_nothing_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        TrainBench(**given)


def test_a_baseline_that_fails_ends_it(tmp_path):
    settings = TrainBench(attention=("lla+ridge=-1.0", "linear"), epochs=1, device="cpu", out=tmp_path)
    with pytest.raises(ValueError, match=r"the baseline lla\+ridge=-1.0 failed: ValueError: ridge must be positive"):
        run(settings)


def test_an_unknown_option_of_a_layer_is_refused_before_training():
    with pytest.raises(ValueError, match="unknown extra 'cone'"):
        planned(read_recipe("digits"), chosen(("agent+cone=false",)), "agent+cone=false", TrainBench())


def test_a_kept_run_gives_real_queries_keys_and_values(trained):
    settings, _ = trained
    layers, words = from_checkpoint(settings.out / "digits" / "linear-0", images=6)
    assert [call.query.shape for call in layers.values()] == [(6, 4, 17, 16)] * 4
    assert words == "vit_nano_patch2_8 trained with linear, 6 of digits"


def test_records_alone_are_enough_to_go_on_with(trained, tmp_path, monkeypatch):
    """What a visit to another machine brings back is one train.json; the runs in it are not trained again."""
    settings, result = trained
    (tmp_path / "train.json").write_text(json.dumps(result))
    monkeypatch.setattr(mechanisms.Bench, "make", lambda *_, **__: pytest.fail("a run was trained again"))
    again = run(replace(settings, attention=("softmax", "linear"), out=tmp_path))
    assert [one["top1"] for one in again["runs"]] == [one["top1"] for one in result["runs"][:3]]
    assert again["missing"] == []


def test_runs_that_a_later_command_does_not_name_stay_in_the_table(trained, tmp_path, monkeypatch):
    settings, result = trained
    (tmp_path / "train.json").write_text(json.dumps(result))
    monkeypatch.setattr(mechanisms.Bench, "make", lambda *_, **__: pytest.fail("a run was trained again"))
    again = run(replace(settings, attention=("softmax",), out=tmp_path))
    assert [(one["variant"], one["role"]) for one in again["runs"]] == [
        ("softmax", "compared"), ("softmax", "control"), ("linear", "compared"),
    ]  # fmt: skip


def test_records_of_another_recipe_do_not_count(trained, tmp_path):
    settings, result = trained
    (tmp_path / "train.json").write_text(json.dumps(result))
    recipe, data = read_recipe(settings.recipe), open_source("digits").identity()["digest"]
    own = digest(replace(recipe.lasting(1), attention="linear", seed=7), data)
    kept, strange = earlier(tmp_path, [], own)
    assert (len(kept), strange) == (3, 0)
    assert earlier(tmp_path, [], digest(replace(recipe, epochs=2), data)) == ({}, 3)
    assert earlier(tmp_path, [], digest(recipe.lasting(1), "other content")) == ({}, 3)
    assert earlier(tmp_path / "none", [], own) == ({}, 0)


def test_without_time_nothing_is_begun_and_what_is_left_is_named(trained, tmp_path):
    settings, _ = trained
    more = run(replace(settings, attention=("softmax", "linear", "flow"), minutes=1e-9))
    assert more["missing"] == ["flow, seed 0"]
    assert "no time was left for flow, seed 0" in table(more)
    with pytest.raises(TimeOverError, match="no run was finished within the 1e-09 minutes"):
        run(replace(settings, out=tmp_path, minutes=1e-9))


def test_the_control_of_another_baseline_is_no_run_of_this_one():
    """An earlier command compared with softmax; this one, in the same folder, compares with linear."""
    own = [record("linear", 0.50), record("linear", 0.52, 1, "control")]
    result = judged([*own, *baseline(0.90, 0.92), record("cumulant2", 0.60)], "linear")
    assert result["control"]["runs"] == 2
    assert result["control"]["spread"] == pytest.approx(2)
    rows = {row["variant"]: row for row in result["ranking"]}
    assert rows["linear"]["mean"] == pytest.approx(0.51)
    assert (rows["softmax"]["mean"], rows["softmax"]["seeds"]) == (pytest.approx(0.91), 2)


def test_runs_without_their_baseline_are_still_shown():
    result = {**judged([record("linear", 0.5)], "softmax"), "baseline": "softmax", "missing": ["softmax, seed 0"]}
    assert "linear" in table(result)
    assert "A/A spread of softmax: not known" in table(result)


def test_a_failure_without_words_is_told_by_its_kind(trained, tmp_path, monkeypatch):
    def fails(*_, **__):
        raise NotImplementedError

    settings, _ = trained
    monkeypatch.setattr("cumulant.studies.mechanisms.train", fails)
    with pytest.raises(ValueError, match="the baseline softmax failed: NotImplementedError"):
        run(replace(settings, out=tmp_path))


def test_time_that_is_over_has_a_status_of_its_own(trained, tmp_path, capsys):
    _, result = trained
    words = ["bench", "train", "--epochs", "1", "--control", "1", "--minutes", "1e-9", "--out", str(tmp_path)]
    assert main([*words, "--attention", "softmax"]) == 3
    assert "no run was finished within the 1e-09 minutes" in capsys.readouterr().err
    sound = [one for one in result["runs"] if not one["failure"]]
    (tmp_path / "train.json").write_text(json.dumps({**result, **judged(sound, "softmax"), "runs": sound}))
    assert main([*words, "--attention", "softmax", "flow"]) == 3
    assert "no time was left for flow, seed 0" in capsys.readouterr().out
