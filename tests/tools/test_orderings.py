"""The small experiments behind the table of orderings: what they measure; how it comes out only of the quick ones."""

import orderings
import pytest
import torch
from orderings import LANGUAGE, Setting, SmallModel, decoding, fitted, piecewise, regression

from cumulant import zoo


def test_a_local_affine_fit_beats_softmax_and_a_global_fit():
    found = regression(draws=1, length=400)
    assert found["lla"] < found["softmax"]
    assert found["lla"] < found["global ridge"]


def test_keys_of_the_regression_have_length_one_and_maps_change():
    key, value = piecewise(0)
    torch.testing.assert_close(key.norm(dim=-1), torch.ones(1, 1, 1024, dtype=torch.float64))
    assert value.shape == key.shape


def test_decoding_costs_a_stream_the_same_at_every_length_and_softmax_more():
    found = decoding((2, 20), width=8)
    assert set(found) == {"softmax"} | {name for name in zoo.names() if zoo.get(name).streaming}
    for name, (first, last) in found.items():
        assert (first["work"] == last["work"]) == (name != "softmax"), name
        assert (first["held"] == last["held"]) == (name != "softmax"), name


def test_every_setting_of_the_language_models_is_causal():
    ids = torch.randint(5, (2, 128), generator=torch.Generator().manual_seed(0))
    later = ids.clone()
    later[:, 100:] = 4
    for name, setting in LANGUAGE.items():
        torch.manual_seed(0)
        model = SmallModel(5, 128, setting, width=16, depth=1).double().eval()
        with torch.no_grad():
            torch.testing.assert_close(model(ids)[:, :100], model(later)[:, :100], msg=name)


def test_a_segment_alone_sees_nothing_before_it():
    torch.manual_seed(0)
    model = SmallModel(5, 32, Setting("softmax", alone=16), width=16, depth=1).eval()
    ids = torch.randint(5, (1, 32))
    other = ids.clone()
    other[:, :16] = (ids[:, :16] + 1) % 5
    with torch.no_grad():
        torch.testing.assert_close(model(ids)[:, 16:], model(other)[:, 16:])


def test_fitting_lowers_the_loss_on_targets_that_count():
    torch.manual_seed(0)
    ids = torch.arange(8).repeat(4, 1) % 4
    targets = (ids + 1) % 4
    model = fitted(SmallModel(4, 8, Setting("linear"), width=16, depth=1), lambda: (ids, targets), 40)
    with torch.no_grad():
        assert (model(ids).argmax(-1) == targets).float().mean() > 0.9


def test_parts_that_are_there_are_kept_and_a_damaged_file_is_named_before_any_is_run(tmp_path, monkeypatch, capsys):
    ran = []
    for part in ("regression", "decoding", "recall"):
        monkeypatch.setattr(orderings, part, lambda part=part: ran.append(part) or {"by": part})
    out = tmp_path / "new" / "orderings.json"
    orderings.main(["--out", str(out)])
    assert ran == ["regression", "decoding", "recall"]
    orderings.main(["--out", str(out)])
    assert len(ran) == 3
    out.write_text(out.read_text()[:40])
    with pytest.raises(SystemExit):
        orderings.main(["--out", str(out)])
    assert "orderings.json is damaged" in capsys.readouterr().err
    assert len(ran) == 3


def test_a_text_too_short_to_be_tested_on_is_refused():
    with pytest.raises(ValueError, match="1,300 characters or more, got 500"):
        orderings.language("abcde" * 100)
