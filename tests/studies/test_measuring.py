"""The engine of studies that measure: one judge, kept records, mechanisms that lack a pattern, changed settings."""

import json
from dataclasses import dataclass, replace

import pytest
from scipy.stats import ttest_1samp

from cumulant import cli, studies
from cumulant.studies import measuring
from cumulant.studies.command import Study
from cumulant.studies.statements import Statement, above, interval, judge, judged


def seeds(*values):
    return [{"a": {"x": value}, "b": {"x": 0.0}} for value in values]


def test_the_interval_is_that_of_students_test():
    values = [0.3, 0.5, 0.4, 0.7]
    assert interval(values) == pytest.approx(tuple(ttest_1samp(values, 0).confidence_interval(0.95)))


@pytest.mark.parametrize(
    ("low", "high", "word"),
    [(0.1, 0.3, "confirmed"), (-0.3, -0.1, "refuted"), (-0.1, 0.1, "not told apart"), (0.0, 0.0, "not told apart"),
     (None, None, "not told apart")],
)  # fmt: skip
def test_a_tie_agrees_with_nothing(low, high, word):
    assert judge(low, high, least=0.0) == word


def test_a_band_is_confirmed_only_by_an_interval_inside_it():
    band = Statement("x", lambda of: of["a"]["x"], least=0.9, most=1.1)
    assert judged(band, seeds(1.0, 1.01, 0.99)).verdict == "confirmed"
    assert judged(band, seeds(2.0, 2.01, 1.99)).verdict == "refuted"
    assert judged(band, seeds(1.0, 1.2, 0.9)).verdict == "not told apart"


def test_one_seed_decides_only_what_is_exact():
    drawn = Statement("x", lambda of: of["a"]["x"], least=0.0)
    assert judged(drawn, seeds(1.0)).verdict == "not told apart"
    assert judged(replace(drawn, exact=True), seeds(1.0)).verdict == "confirmed"


def test_a_difference_that_the_control_makes_too_does_not_count():
    found = [{**one, "b, again": {"x": 3.0}} for one in seeds(1.0, 1.01, 0.99)]
    assert judged(above("a", "b", "x"), found).verdict == "confirmed"
    told = judged(above("a", "b", "x", control="b"), found)
    assert (told.verdict, told.why) == ("not told apart", "the control differs from itself by 3")


def test_what_was_not_measured_is_not_tested():
    told = judged(above("a", "c", "x"), seeds(1.0, 2.0))
    assert (told.verdict, told.why) == ("not tested", "c was not measured")


@dataclass(frozen=True)
class Settings:
    size: float = 2.0
    attention: tuple[str, ...] = ("softmax", "aaren")
    seeds: int = 3


MADE = []


def measure(settings, configuration, seed, device):
    MADE.append((configuration, seed))
    return {"x": settings.size + 0.01 * seed, "nan": float("nan")}


def figures(settings, seeds):
    from cumulant.style import new_figure

    return {"A line": new_figure(1, 1, (2, 2))[0]}


STUDY = measuring.Study(
    "toy", "sizes are two", "nowhere", {"small": Settings()}, lambda settings: settings.attention, measure,
    lambda settings: [Statement("the size", lambda of: of["softmax"]["x"], least=1.5, most=2.5)],
    lambda settings, seeds: [measuring.Table("T", ["a", "x"], [["softmax", measuring.mean_of(seeds, "softmax", "x")]])],
    figures=figures, needs=("noncausal", "subquadratic"), control="softmax",
)  # fmt: skip


def test_a_study_is_kept_goes_on_and_says_when_its_settings_changed(tmp_path, capsys):
    import sys

    able = replace(STUDY, needs=())
    options = Study("toy", out=tmp_path, workers=1, device="cpu", attention=("softmax",))
    MADE.clear()
    first = measuring.run(able, options)
    assert MADE == [("softmax", seed) for seed in (0, 1, 2, 1000, 1001, 1002)]
    assert first["statements"][0]["verdict"] == "confirmed"
    assert "2.010 ± 0.025" in measuring.table(first)
    (tmp_path / "toy" / "records").joinpath(sorted(p.name for p in (tmp_path / "toy/records").iterdir())[0]).unlink()
    MADE.clear()
    assert measuring.run(able, options, sys.stderr)["statements"] == first["statements"]
    assert len(MADE) == 1
    assert "5 of 6 runs are finished already" in capsys.readouterr().err
    changed = replace(options, change=("size=7",))
    assert measuring.run(able, changed, sys.stderr)["statements"][0]["verdict"] == "refuted"
    assert "(size 2.0, now 7.0): a new record is begun" in capsys.readouterr().err
    kept = json.loads((tmp_path / "toy" / "results.json").read_text())
    assert kept["runs"][0]["values"]["nan"] is None
    page = (tmp_path / "toy" / "page.html").read_text()
    assert "<svg" in page
    assert "refuted" in page
    assert "http" not in page.replace("http://www.w3.org", "").replace("http://purl.org", "").replace(
        "http://creativecommons.org", ""
    ).replace("https://matplotlib.org", "")


def test_a_folder_that_cannot_be_written_is_told_before_anything_is_measured(tmp_path):
    (tmp_path / "toy").write_text("in the way")
    MADE.clear()
    with pytest.raises(OSError, match=r"cannot write files into .*toy: .*; choose another folder"):
        measuring.run(STUDY, Study("toy", out=tmp_path, workers=1))
    assert not MADE


def test_a_strange_table_among_the_records_is_no_record(tmp_path):
    (tmp_path / "toy" / "records").mkdir(parents=True)
    (tmp_path / "toy" / "records" / "other.json").write_text("{}")
    assert not measuring.run(STUDY, Study("toy", out=tmp_path, workers=1, seeds=1, control=0))["missing"]


def test_views_are_pages_of_their_own_that_lead_to_each_other(tmp_path):
    options = Study("toy", out=tmp_path, workers=1, device="cpu", attention=("softmax",))
    measuring.run(replace(STUDY, needs=(), views={"lines": ("A line",), "others": ("Another",)}), options)
    lines, others = ((tmp_path / "toy" / f"{name}.html").read_text() for name in ("lines", "others"))
    assert "<svg" in lines
    assert "<svg" not in others
    assert all(f'href="{name}.html"' in lines for name in ("page", "lines", "others"))
    assert "What was claimed" not in lines


def test_without_the_packages_of_the_page_the_numbers_are_there_all_the_same(tmp_path, monkeypatch):
    def lacking(*_, **__):
        raise ImportError("the report needs jinja2")

    monkeypatch.setattr("cumulant.style.page", lacking)
    options = Study("toy", out=tmp_path, workers=1, device="cpu", attention=("softmax",))
    result = measuring.run(replace(STUDY, needs=()), options)
    assert result["no page"] == "the report needs jinja2"
    assert (tmp_path / "toy" / "results.json").is_file()


def test_a_study_without_time_is_written_from_what_is_there(tmp_path):
    options = Study("toy", out=tmp_path, workers=1, device="cpu", attention=("softmax", "linear"))
    able = replace(
        STUDY, needs=(), control=None, figures=lambda settings, seeds: [one["linear"] for one in seeds] and {}
    )
    measuring.run(able, options)
    next((tmp_path / "toy" / "records").glob("linear-0-*")).unlink()
    result = measuring.run(able, replace(options, minutes=0))
    assert result["missing"] == ["linear, seed 0"]
    assert result["statements"][0]["seeds"] == 3


def test_a_mechanism_that_lacks_the_pattern_is_skipped_with_a_line(tmp_path):
    result = measuring.run(STUDY, Study("toy", out=tmp_path, workers=1, device="cpu", attention=("softmax", "linear")))
    assert result["skipped"] == {"softmax": "lacks subquadratic"}
    assert "skipped: softmax lacks subquadratic" in measuring.table(result)
    assert result["statements"][0]["verdict"] == "not tested"


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["randomfeatures"], "unknown study 'randomfeatures'; did you mean 'random-features'?"),
        (["random-features", "--setting", "large"], "random-features has no setting 'large'; known: small, paper"),
        (["random-features", "--change", "head=3"], "random-features has no value 'head'; did you mean 'heads'?"),
        (["random-features", "--change", "heads=x"], "heads of random-features must be int, got 'x'"),
        (["random-features", "--attention", "softmx"], "unknown attention mechanism 'softmx'; did you mean 'softmax'?"),
    ],
)
def test_wrong_words_are_answered_with_the_right_ones(words, told, capsys, tmp_path):
    assert cli.main(["study", *words, "--out", str(tmp_path)]) == 2
    assert told in capsys.readouterr().err


def test_the_list_says_what_each_claims_and_how_long_it_takes(capsys):
    assert cli.main(["study", "list", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert [row["name"] for row in rows] == studies.names()
    assert all(row["summary"] for row in rows)
