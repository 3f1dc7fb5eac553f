"""In-context regression: closed forms, and what pairs of cumulant heads are."""

from dataclasses import replace

import pytest
import torch

from cumulant.studies import in_context_regression as study

SMALL = study.Settings(steps=2, batch=8, test=400, lengths=(10, 20), starts=2, trial=2)


def test_closed_forms_of_the_page():
    settings = study.Settings()
    assert study.best_eta(settings, False) == pytest.approx(0.860, abs=5e-4)
    assert study.step_risk(settings, 40, study.best_eta(settings, False)) == pytest.approx(0.2398, abs=1e-4)
    assert study.step_risk(settings, 80, 2 * study.best_eta(settings, False)) == pytest.approx(0.849, abs=0.02)
    assert study.debiased_risk(settings, 40, study.best_eta(settings, True)) == pytest.approx(1.1 - 39 / 45.5)


def test_the_risk_of_a_debiased_step_is_what_prompts_say():
    settings = replace(study.Settings(), lengths=(12,), test=40000)
    found = study.risks(settings, study.gradient_step(0.7, True), "cpu")["L=12"]
    assert found == pytest.approx(study.debiased_risk(settings, 12, 0.7), rel=0.03)


def test_a_pair_of_second_order_heads_is_a_debiased_gradient_step_and_one_of_softmax_nearly():
    differences = {
        name: study.ideals(SMALL, name, "cpu", 0)["pair from debiased step"] for name in ("cumulant2", "softmax")
    }
    assert differences["cumulant2"] < 1e-12
    assert differences["softmax"] > 1e-2


def test_ideal_heads_are_read_as_they_were_made():
    model = study.Heads("softmax", 2, 6, torch.Generator().manual_seed(0))
    with torch.no_grad():
        model.K.copy_(torch.eye(6) * torch.tensor([1.0, 1, 1, 1, 1, 0])[:, None])
        model.Q.copy_(torch.stack([0.3 * 6**0.5 * torch.eye(6), -0.3 * 6**0.5 * torch.eye(6)]))
        model.V.copy_(torch.eye(6).expand(2, 6, 6))
        model.out.copy_(torch.tensor([[[0.0] * 5 + [2.0]], [[0.0] * 5 + [-2.0]]]))
    found = study.structure(*model.read())
    assert found["w"] == pytest.approx([0.3, -0.3])
    assert found["product"] == pytest.approx(1.2)
    assert max(found[key] for key in ("off-diagonal", "label of KQ", "x of OV", "sum of OV")) < 1e-6
    examples, query, _ = study.prompts(SMALL, 5, 20, torch.Generator().manual_seed(0))
    torch.testing.assert_close(
        model(examples, query), study.ideal_heads("softmax", found["w"], found["m"])(examples, query)
    )


def test_groups_of_heads_learn_each_by_itself_and_one_of_them_goes_on():
    both = study.Heads("softmax", 4, 6, torch.Generator().manual_seed(0))
    alone = both.part(1, 2)
    study.descend(SMALL, both, 2, 5, 0.001, torch.Generator().manual_seed(1))
    study.descend(SMALL, alone, 2, 5, 0.001, torch.Generator().manual_seed(1))
    torch.testing.assert_close(alone.K, both.K[2:])
    torch.testing.assert_close(alone.out, both.out[2:])


@pytest.mark.parametrize("configuration", ["references", "unnormalised, 1 heads", "cumulant3, 2 heads"])
def test_every_kind_of_run_has_its_numbers(configuration):
    found = study.measure(SMALL, configuration, 0, "cpu")
    assert any(key.endswith("L=20") for key in found)
