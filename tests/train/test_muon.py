"""Muon: orthogonal updates of the matrices of the blocks, AdamW for the rest, whole in a checkpoint."""

import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from small_runs import FULL, few_digits, in_child, kill_self, outcome
from torch import nn

from cumulant import cli
from cumulant.models import create_model
from cumulant.train import TrainRecipe, optimise, train
from cumulant.train.build import build_optimizer
from cumulant.train.optimise import MOMENTUM, Muon, muon_groups, orthogonal


def small(**options):
    torch.manual_seed(0)
    return create_model("vit_tiny_patch16_224", img_size=16, patch_size=8, embed_dim=24, depth=2, num_heads=2,
                        num_classes=4, **options)  # fmt: skip


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 6, 20), (2, 20, 6)])
def test_orthogonal_keeps_singular_vectors_and_levels_singular_values(shape):
    x = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    u, s, vt = torch.linalg.svd(x.double(), full_matrices=False)
    ours = orthogonal(x).double()
    found = torch.einsum("nai,nab,nib->ni", u, ours, vt)
    off = ours - torch.einsum("nai,ni,nib->nab", u, found, vt)
    assert off.abs().max() < 1e-4
    large = s > 0.05 * s.amax(-1, keepdim=True)
    assert found[large].min() > 0.5
    assert found[large].max() < 1.3


def test_matrices_of_the_blocks_are_orthogonalised_and_nothing_else():
    model = small()
    decayed, kept, matrices = muon_groups(model, 0.05)
    names = {parameter: name for name, parameter in model.named_parameters()}
    moved = {names[p] for p in matrices["params"]}
    assert moved == {f"blocks.{i}.{x}.weight" for i in (0, 1) for x in ("attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")}
    assert "head.weight" in {names[p] for p in decayed["params"]}
    assert len(decayed["params"]) + len(kept["params"]) + len(moved) == len(names)


def test_a_step_is_the_formula_for_matrices_and_adamw_for_the_rest():
    recipe = TrainRecipe(optimizer="muon", lr=0.1, weight_decay=0.3)
    model, other = small(), small()
    ours = build_optimizer(model, recipe, recordable=False)
    plain = build_optimizer(other, replace(recipe, optimizer="adamw"), recordable=False)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    for one in (model, other):
        one(torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(2))).square().sum().backward()
    ours.step()
    plain.step()
    matrices = {id(p) for p in ours.param_groups[2]["params"]}
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        if id(p) in matrices:
            gradient = (1 - MOMENTUM) * p.grad + MOMENTUM * ((1 - MOMENTUM) * p.grad)
            update = 0.2 * max(p.shape) ** 0.5 * orthogonal(gradient[None])[0]
            torch.testing.assert_close(p.detach(), (1 - 0.1 * 0.3) * before[name] - 0.1 * update, msg=name)
        else:
            torch.testing.assert_close(p.detach(), q.detach(), rtol=0, atol=0, msg=name)


def test_layers_without_a_gradient_stay_where_they_are():
    model = small()
    optimizer = Muon(muon_groups(model, 0.05), lr=0.1)
    model.head(torch.ones(1, 24)).sum().backward()
    before = model.blocks[0].mlp.fc1.weight.detach().clone()
    optimizer.step()
    assert torch.equal(model.blocks[0].mlp.fc1.weight, before)


def test_a_killed_run_goes_on_bit_equally(tmp_path: Path):
    recipe = replace(FULL, optimizer="muon")

    def work():
        apply, calls = optimise.apply, iter(range(1, 1 << 30))
        optimise.apply = lambda *arguments: kill_self() if next(calls) == 8 else apply(*arguments)
        train(recipe, tmp_path / "cut", source=few_digits())

    assert in_child(work) == -signal.SIGKILL
    for folder in ("cut", "whole"):
        train(recipe, tmp_path / folder, source=few_digits())
    assert outcome(tmp_path / "cut") == outcome(tmp_path / "whole")


def test_shards_are_refused_before_anything_is_written(capsys, tmp_path: Path):
    file = tmp_path / "mine.toml"
    file.write_text('optimizer = "muon"\nparallel = "fsdp"\n')
    assert cli.main(["train", str(file), "--out", str(tmp_path / "run")]) == 2
    with pytest.raises(SystemExit):
        cli.main(["train", "digits", "--optimizer", "muon", "--parallel", "fsdp", "--out", str(tmp_path / "run")])
    assert capsys.readouterr().err.count('use parallel="ddp"') == 2
    assert not (tmp_path / "run").exists()


def test_models_without_blocks_and_sharded_ones_are_refused():
    with pytest.raises(ValueError, match=r"needs linear layers in `blocks`, Linear has none"):
        muon_groups(nn.Linear(3, 3), 0.1)
    with pytest.raises(ValueError, match=r'parallel="fsdp" cuts into shards: use parallel="ddp", or optimizer="adamw"'):
        TrainRecipe(optimizer="muon", parallel="fsdp")
    with pytest.raises(ValueError, match="optimizer must be one of adamw, muon, got 'sgd'"):
        TrainRecipe(optimizer="sgd")
