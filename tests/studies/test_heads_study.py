"""The study of the layers: every ordering can be measured, and is judged by its seeds and its control."""

from dataclasses import replace

import pytest
import torch

from cumulant import cli, nn
from cumulant.studies import heads, measuring
from cumulant.studies.heads import documents, pictures, text
from cumulant.studies.statements import AGAIN, CONFIRMED, OPEN, REFUTED, judged


@pytest.fixture
def quick(monkeypatch):
    """Sizes at which a run takes a moment, and says nothing."""
    monkeypatch.setitem(text.SIZES, "small", text.Size(context=8, batch=2, steps=2))
    monkeypatch.setattr(text, "STORIES", 6)
    tiny = pictures.Size(width=16, depth=3, heads=2, batch=4, steps=4, rewarded=2)
    for sizes in (pictures.SIZES, pictures.ROUTED):
        monkeypatch.setitem(sizes, "small", tiny)
    monkeypatch.setitem(documents.SIZES, "small", replace(documents.SIZES["small"], width=16, steps=2))
    caches = (text.characters, pictures.pictures, pictures.dense, pictures.interpreted, documents.tensors)
    for kept in caches:
        kept.cache_clear()
    yield
    for kept in caches:
        kept.cache_clear()


def test_every_published_layer_has_an_ordering():
    published = {name for name in nn.layers() if nn.get_layer(name).paper}  # not those that other tests register
    assert set(heads.LAYERS) == published - {"multihead", "axial"}


@pytest.mark.parametrize("layer", heads.LAYERS)
def test_every_configuration_is_measured_in_what_its_claims_and_its_table_ask_for(layer, quick):
    one = heads.published(layer)
    seed = {name: one.measure(options, "small", 0, "cpu") for name, options in one.names.items()}
    seed |= {one.baseline + AGAIN: seed[one.baseline]}
    on_a_gpu = {"peak memory"}
    for statement in one.statements:
        found = judged(statement, [seed, seed])
        assert found.seeds == 2 or any(word in statement.text for word in on_a_gpu), found.why
    assert all(key in values or key in on_a_gpu for values in seed.values() for key in one.columns)
    assert all(torch.isfinite(torch.tensor(float(x))) for values in seed.values() for x in values.values())


@pytest.mark.parametrize(("half", "verdict"), [(1.70, CONFIRMED), (1.50, REFUTED), (1.605, OPEN)])
def test_a_claim_of_no_loss_is_judged_by_its_margin(half, verdict):
    seeds = [{"plain": {"nats": 1.6 + e}, "half": {"nats": half + 3 * e}} for e in (-0.01, 0.0, 0.01)]
    claim = text.NATS.not_worse("plain", "half").statement("plain")
    assert judged(claim, seeds).verdict == verdict


def test_a_study_measures_what_is_missing_and_reads_the_rest(quick, tmp_path, capsys):
    words = ["study", "heads", "--layers", "lama", "--seeds", "1", "--control", "1", "--device", "cpu"]
    words += ["--workers", "1", "--out", str(tmp_path)]
    assert cli.main(words) == 0
    first = capsys.readouterr()
    assert "lama, learned" in first.out
    assert len(list((tmp_path / "heads" / "lama" / "records").iterdir())) == 6
    assert cli.main(words) == 0
    again = capsys.readouterr()
    assert again.out == first.out
    assert "6 of 6 runs are finished already" in again.err


def test_a_setting_from_files_says_where_they_must_lie(monkeypatch):
    monkeypatch.delenv("CUMULANT_DATA", raising=False)
    text.characters.cache_clear()
    with pytest.raises(ValueError, match=r"set \$CUMULANT_DATA to the folder"):
        heads.measure(heads.Settings("moh", "files"), "plain", 0, "cpu")


def test_a_layer_without_an_ordering_is_named(capsys):
    assert cli.main(["study", "heads", "--layers", "mho"]) == 2
    assert "layer 'mho' has no ordering to try; did you mean 'moh'?" in capsys.readouterr().err


def test_a_study_of_a_layer_plans_its_control():
    runs, _ = measuring.planned(heads.study("moh"), heads.Settings("moh", seeds=2), 1)
    assert [run.role for run in runs] == ["compared"] * 8 + ["control"]
