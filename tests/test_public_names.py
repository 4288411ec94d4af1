"""The names that ``import fp4graph`` gives, without any other import."""

from __future__ import annotations

import inspect

import pytest

import fp4graph
from tests.helpers.processes import python, run

FUNCTIONS = {
    "apply": "model policy backend seed dynamic total_forwards example_inputs strict recompile_limit",
    "remove": "model",
    "bypass": "model",
    "load_policy": "ref",
    "explain": "model policy args kwargs",
    "prepare_optimizer": "model optimizer",
    "grad_scaler": "model",
    "set_total_forwards": "model total_forwards",
    "detect_nonfinite": "model",
    "fake_quantize": "x spec dim key",
    "pack": "x spec dim key",
    "unpack": "packed",
    "strip": "state_dict",
    "load_quantized": "model directory",
    "export": "model directory",
    "compare": "train policies seeds folder baseline",
    "search": "model loss batches",
    "sensitivity": "model loss batches policies",
    "pack_frozen": "model",
    "unpack_frozen": "model",
    "packed_weights": "model",
}
CLASSES = [
    *("CaptureError", "Context", "Error", "Explanation", "Gemm", "NonFiniteError", "Operand", "Overhead", "Packed"),
    *("PluginError", "Policy", "PolicyError", "PolicyWarning", "QuantSpec", "ScaleSpec", "Site", "SpecError"),
    *("StateEntry", "Technique", "UncompiledError"),
]
MODULES = ("formats", "integrations", "lab", "optim", "training")


def test_every_name_is_there_after_one_import():
    assert {*FUNCTIONS, *CLASSES, *MODULES, "hookimpl"} == set(fp4graph.__all__) <= set(dir(fp4graph))
    assert [name for name in fp4graph.__all__ if not hasattr(fp4graph, name)] == []
    assert [name for name in CLASSES if not isinstance(getattr(fp4graph, name), type)] == []


@pytest.mark.parametrize("name", FUNCTIONS)
def test_functions_begin_with_the_same_parameters_in_every_version(name):
    first = FUNCTIONS[name].split()
    assert list(inspect.signature(getattr(fp4graph, name)).parameters)[: len(first)] == first


@pytest.mark.long
@pytest.mark.process
def test_modules_need_no_import_of_their_own():
    code = f"import fp4graph; print(*[getattr(fp4graph, name).__name__ for name in {MODULES}])"
    assert run(python("-c", code)).split() == [f"fp4graph.{name}" for name in MODULES]
    assert isinstance(fp4graph.optim.StableSPAM, type)


def test_one_except_catches_every_error():
    for error in ("CaptureError", "NonFiniteError", "PluginError", "PolicyError", "SpecError", "UncompiledError"):
        assert issubclass(getattr(fp4graph, error), fp4graph.Error)
