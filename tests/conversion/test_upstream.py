"""timm's and transformers' own tests of a model, with our name where they look for attention.

The tests are in their source packages, which `make test` fetches (tests/upstream_for_tests.py); without them these are
skipped. diffusers' source package holds no tests, and those of `kernels` fetch what they test from the hub.
"""

import importlib
import importlib.util
import inspect
import re
import sys
import textwrap
import types
import unittest
from functools import cache
from pathlib import Path

import pytest
import torch
from upstream_for_tests import FOLDER

from cumulant.nn.swapped.timm_layers import ConvertedAttention

pytestmark = pytest.mark.timm


@pytest.fixture(autouse=True, scope="module")
def their_markers(pytestconfig: pytest.Config) -> None:
    """Ours are strict: the names that their files mark tests with are told to pytest first."""
    helpers = importlib.util.find_spec("transformers.testing_utils")
    files = [*FOLDER.glob("*/tests/*.py"), *([Path(helpers.origin)] if helpers and helpers.origin else [])]
    for name in {name for file in files for name in re.findall(r"\bmark\.(\w+)", file.read_text())}:
        pytestconfig.addinivalue_line("markers", f"{name}: of another library's tests")


@cache
def upstream(package: str, file: str, beside: tuple[str, ...] = ()) -> types.ModuleType:
    """A file of a package's tests. `beside` are "module:Name" that it imports and the source package leaves out."""
    home = FOLDER / package / "tests"
    if not (home / f"{file}.py").is_file():
        pytest.skip(f"{package}'s tests are not here: `make test` fetches them")
    name = f"tests_of_{package}"
    for dotted, made in [(name, None), *(entry.split(":") for entry in beside)]:
        module = types.ModuleType(dotted if made is None else f"{name}.{dotted}")
        module.__path__ = [str(home)] if made is None else []
        if made is not None:
            setattr(module, made, type(made, (), {}))
            for parent in Path(dotted.replace(".", "/")).parents[:-1]:
                sys.modules[f"{name}.{'.'.join(parent.parts)}"] = types.ModuleType(str(parent))
        sys.modules[module.__name__] = module
    return importlib.import_module(f"{name}.{file}")


# --- timm: attn_layer="cumulant3" -------------------------------------------------------------------------------------

OF_TIMM = (
    "test_model_forward", "test_model_backward", "test_model_default_cfgs_non_std",
    "test_model_forward_features", "test_model_forward_intermediates", "test_model_forward_intermediates_features",
    "test_reset_classifier_keeps_pool", "test_forward_after_prune_intermediate_layers",
    "test_prune_intermediate_layers_contract",
)  # fmt: skip


@pytest.mark.parametrize("name", OF_TIMM)
def test_timm_finds_nothing_wrong_with_a_model_of_our_attention(name, monkeypatch):
    pytest.importorskip("timm")
    module = upstream("timm", "test_models")
    made = []

    def create_model(*words, **options):
        made.append(module.timm.create_model(*words, attn_layer="cumulant3", **options))
        return made[-1]

    monkeypatch.setattr(module, "create_model", create_model)
    test = getattr(module, name)
    given = {"model_name": "test_vit", "batch_size": 1, "cfg_device": "cpu"}
    test(**{key: given[key] for key in inspect.signature(test).parameters})
    assert any(isinstance(layer, ConvertedAttention) for model in made for layer in model.modules())


# --- transformers: attn_implementation="cumulant3" --------------------------------------------------------------------

SIZES = {"vocab_size": 99, "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 37}
NAMED = ("test_can_set_attention_dynamically", "test_config_attn_implementation_setter")  # sdpa is the name they set
OF_TRANSFORMERS = (
    *NAMED, "test_determinism", "test_batching_equivalence", "test_training",
    "test_training_gradient_checkpointing_use_reentrant_false",
    "test_training_gradient_checkpointing_use_reentrant_true",
    "test_hidden_states_output", "test_model_outputs_equivalence", "test_inputs_embeds",
    "test_inputs_embeds_matches_input_ids", "test_resize_tokens_embeddings", "test_can_be_initialized_on_meta",
)  # fmt: skip
WITHOUT_A_PASS = (*NAMED, "test_can_be_initialized_on_meta")


class Family:
    """What transformers' tests ask of a family: a small configuration, and inputs with padding."""

    def __init__(self, parent: unittest.TestCase, config: type, side: str) -> None:
        self.parent, self.config, self.side = parent, config, side
        self.batch_size, self.seq_length, self.is_training = 5, 7, True
        self.hidden_size, self.num_hidden_layers, self.num_attention_heads = 32, 2, 4

    def get_config(self):
        return self.config(**SIZES, attn_implementation="cumulant3", pad_token_id=0)

    def prepare_config_and_inputs_for_common(self):
        mask = torch.ones(self.batch_size, self.seq_length, dtype=torch.long)
        mask[1, :2] = mask[3, :4] = 0
        if self.side == "right":
            mask = mask.flip(1)
        return self.get_config(), {"input_ids": torch.randint(1, 99, mask.shape), "attention_mask": mask}


def case(family: str, name: str) -> unittest.TestCase:
    """One test of transformers' common ones, of a family; those of NAMED set our name in the place of sdpa."""
    import transformers

    common = upstream(
        "transformers", "test_modeling_common",
        ("exporters.test_export:ExportTesterMixin", "generation.test_utils:GenerationTesterMixin"),
    )  # fmt: skip
    kinds = {"Bert": ("Model", "ForMaskedLM"), "Llama": ("Model", "ForCausalLM")}[family]
    classes = tuple(getattr(transformers, family + kind) for kind in kinds)
    config, side = getattr(transformers, f"{family}Config"), "left" if family == "Llama" else "right"
    body = {
        "all_model_classes": classes,
        "setUp": lambda self: setattr(self, "model_tester", Family(self, config, side)),
    }
    if name in NAMED:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(getattr(common.ModelTesterMixin, name))))
        assert '"sdpa"' in source
        there = dict(vars(common))
        exec(source.replace('"sdpa"', '"cumulant3"'), there)
        body[name] = there[name]
    return type(f"{family}Test", (common.ModelTesterMixin, unittest.TestCase), body)(name)


@pytest.mark.parametrize("name", OF_TRANSFORMERS)
@pytest.mark.parametrize("family", ["Bert", "Llama"])
def test_transformers_finds_nothing_wrong_with_a_model_of_our_attention(family, name, monkeypatch):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    monkeypatch.syspath_prepend(FOLDER / "site")
    test, result = case(family, name), unittest.TestResult()
    calls, ours = [], ALL_ATTENTION_FUNCTIONS["cumulant3"]
    registered = ALL_ATTENTION_FUNCTIONS._global_mapping
    monkeypatch.setitem(registered, "cumulant3", lambda *a, **k: calls.append(1) or ours(*a, **k))
    test.run(result)
    assert result.wasSuccessful(), "\n".join(text for _, text in [*result.errors, *result.failures])
    assert not result.skipped
    assert calls or name in WITHOUT_A_PASS
