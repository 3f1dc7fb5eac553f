"""The four views of a model, and the checks that need no training."""

from dataclasses import replace

import torch

import cumulant
from cumulant.studies import visual_analytics as study
from cumulant.studies.statements import judged


def test_what_is_known_of_maps_is_confirmed_without_training():
    found = [{"checks": study.checks(seed, count=40)} for seed in (0, 1)]
    known = study.statements(replace(study.Settings(), attention=()))
    assert [judged(one, found).verdict for one in known] == ["confirmed"] * len(known)


def test_a_model_is_described_and_drawn():
    torch.manual_seed(0)
    model = cumulant.create_model("vit_nano_patch2_8", attention="cumulant2", num_classes=10, init_std=0.3).eval()
    images, labels = torch.randn(40, 1, 8, 8), torch.arange(40) % 10
    found = study.findings(model, images, labels, orders=1, prunings=3, steps=3)
    assert found["mean negative_mass"] > 0
    seeds = [{"cumulant2": found}]
    settings = replace(study.Settings(), attention=("cumulant2",), images=40)
    assert {table.title.split(":")[0] for table in study.tables(settings, seeds)} >= {
        "Strength",
        "Pruning, depth and patterns",
    }
    drawn = study.figures(settings, seeds)
    assert {"Image overview", "Attention strength", "Attention patterns"} < drawn.keys()
