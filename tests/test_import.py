"""`import cumulant` is quick: it does not bring in what only some of its users need, and names come when used."""

import importlib
import subprocess
import sys
from types import ModuleType

import pytest

import cumulant
from cumulant.lazy import lazy

HEAVY = ("torch._dynamo", "triton", "transformers", "timm", "matplotlib", "PIL", "sklearn", "kornia", "fastapi")


@pytest.fixture(scope="module")
def imported():
    """What a fresh interpreter says of the module `attention`, imported before all else, and then of all names.

    Without a GPU and without Triton's interpreter.
    """
    code = (
        "import importlib, sys, cumulant; importlib.import_module('cumulant.attention'); "
        "print(callable(cumulant.attention)); [getattr(cumulant, name) for name in cumulant.__all__]; "
        f"print(*(name for name in {HEAVY} if name in sys.modules))"
    )
    environment = {"PATH": "", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    return done.stdout.splitlines()


def test_using_the_names_of_the_library_imports_no_compiler_and_no_optional_package(imported):
    assert imported[1].split() == []


def test_importing_the_library_does_not_import_torch():
    code = "import sys, cumulant; print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


def test_reading_a_recipe_does_not_import_torch():
    code = "import sys; from cumulant.train import read_recipe; read_recipe('ucf101'); print('torch' in sys.modules)"
    found = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert found.stdout.strip() == "False"


ROOMS = ("bench", "conversion", "data", "explain", "train", "web")


@pytest.mark.parametrize("room", ["cumulant", *(f"cumulant.{name}" for name in ROOMS)])
def test_every_name_of_a_room_can_be_had_and_is_listed(room):
    module = importlib.import_module(room)
    for name in module.__all__:
        assert getattr(module, name) is not None
    assert set(module.__all__) <= set(dir(module))


def test_a_function_hides_the_module_of_its_name_whichever_is_imported_first(imported):
    assert imported[0] == "True"


def test_rooms_are_there_without_an_import_of_their_own_and_others_are_not():
    assert isinstance(cumulant.explain, ModuleType)
    with pytest.raises(AttributeError, match="module 'cumulant' has no attribute 'explian'"):
        _ = cumulant.explian


def test_what_moved_out_of_the_cluster_room_answers_there_with_a_warning():
    with pytest.warns(DeprecationWarning, match="import it from cumulant.conversion"):
        assert cumulant.cluster.choose_layers is cumulant.conversion.choose_layers


def test_a_copy_without_source_files_is_told_so(monkeypatch):
    class Compiled:
        def get_source(self, name):
            return None

    bare = ModuleType("bare")
    bare.__loader__ = Compiled()
    monkeypatch.setitem(sys.modules, "bare", bare)
    with pytest.raises(ImportError, match="bare was installed without its source files"):
        lazy("bare")


def test_the_earlier_name_of_the_list_of_models_answers_with_a_warning():
    with pytest.warns(DeprecationWarning, match="cumulant.models.names"):
        assert cumulant.models.model_names() == cumulant.models.names()
