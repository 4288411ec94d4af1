"""The environment variable FP4GRAPH_KERNELS, which selects kernels, and contexts that change its switches."""

from __future__ import annotations

import os
import subprocess

import pytest
import torch

from fp4graph.errors import Error
from fp4graph.kernels import gpu, machine, operators, switches
from fp4graph.kernels.machine import Machine
from fp4graph.kernels.switches import Switches, read
from tests.helpers.processes import IMPORTS, PATIENCE, python

CPU, CUDA = torch.device("cpu"), torch.device("cuda")


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        *((value, Switches(True, 4096, True)) for value in (None, "", "1")),
        ("0", Switches(False, 0, True)),
        ("none", Switches(False, 0, False)),
        ("quantizers", Switches(True, 0, False)),
        ("products", Switches(False, 4096, False)),
        ("products=512", Switches(False, 512, False)),
        (" bf16-products , products = 0 ", Switches(False, 0, True)),
        ("quantizers,products=8192,bf16-products", Switches(True, 8192, True)),
    ],
)
def test_what_a_value_means(value, expected):
    assert read({} if value is None else {"FP4GRAPH_KERNELS": value}) == expected


@pytest.mark.parametrize(
    ("value", "wrong"),
    [
        *((value, value) for value in ("yes", "2", "quantisers", "quantizers=1", "bf16_products")),
        *((value, value) for value in ("products=", "products=abc", "products=-1", "products=4e3")),
        ("quantizers,1", "1"),
        ("quantizers,", ""),
        ("quantizers,quantizers", "quantizers"),
        ("products=1,products=2", "products=2"),
    ],
)
def test_other_values_are_refused_with_a_list_of_valid_values(value, wrong):
    with pytest.raises(Error) as refused:
        read({"FP4GRAPH_KERNELS": value})
    said = str(refused.value)
    assert f"FP4GRAPH_KERNELS is {value!r}" in said
    assert f"{wrong!r} is not understood" in said
    for meaning in ("unset it", "1 for everything", "0 for", "none for", "quantizers,products=4096,bf16-products"):
        assert meaning in said


@pytest.mark.parametrize(
    ("environment", "now"),
    [
        ({"FP4GRAPH_PRODUCT_LENGTH": "512"}, "quantizers,products=512,bf16-products"),
        ({"FP4GRAPH_PRODUCT_LENGTH": "0"}, "quantizers,bf16-products"),
        ({"FP4GRAPH_PRODUCT_LENGTH": "abc"}, "quantizers,products=4096,bf16-products"),
        ({"FP4GRAPH_BF16_PRODUCTS": "0"}, "quantizers,products=4096"),
        ({"FP4GRAPH_BF16_PRODUCTS": "1"}, "quantizers,products=4096,bf16-products"),
        ({"FP4GRAPH_KERNELS": "0", "FP4GRAPH_BF16_PRODUCTS": "0"}, "none"),
        ({"FP4GRAPH_KERNELS": "0", "FP4GRAPH_PRODUCT_LENGTH": "512"}, "bf16-products"),
        ({"FP4GRAPH_PRODUCT_LENGTH": "64", "FP4GRAPH_BF16_PRODUCTS": "0"}, "quantizers,products=64"),
    ],
)
def test_variables_of_former_versions_are_refused_with_the_value_to_write_now(environment, now):
    with pytest.raises(Error) as refused:
        read(environment)
    assert all(name in str(refused.value) for name in environment if name != "FP4GRAPH_KERNELS")
    assert str(refused.value).endswith(f"unset it and write FP4GRAPH_KERNELS={now}")
    assert str(read({"FP4GRAPH_KERNELS": now})) == now


def ended(variables: dict[str, str], *code: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, **IMPORTS, **variables}
    return subprocess.run(python("-c", *code), env=environment, capture_output=True, text=True, timeout=PATIENCE)


@pytest.mark.long
@pytest.mark.process
def test_a_program_ends_at_a_variable_of_a_former_version():
    done = ended({"FP4GRAPH_PRODUCT_LENGTH": "0"}, "import fp4graph; fp4graph.apply")
    assert done.returncode != 0
    assert done.stderr.rstrip().endswith("FP4GRAPH_KERNELS=quantizers,bf16-products")


@pytest.mark.process
def test_the_command_ends_at_a_misspelt_value_with_one_line():
    command = "from fp4graph.__main__ import main; main()", "check", "tetrajet"
    done = ended(
        {"FP4GRAPH_KERNELS": "quantisers"}, *command, "--target", "b200"
    )  # planning products reads the switches
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert line.startswith("the environment variable FP4GRAPH_KERNELS is 'quantisers'")


@pytest.mark.compiler
def test_contexts_change_switches_and_restore_them():
    assert switches.current() == Switches()
    assert Machine.of(CPU).lacks is None
    with operators.tensor_code():
        assert Machine.of(CPU).lacks == "the kernels of this cpu are switched off (FP4GRAPH_KERNELS)"
        assert switches.current() == Switches(False, 0, True)
    with gpu.products_in_fp32():
        assert not gpu.multiplies_bfloat16(CUDA)
        assert switches.current() == Switches(True, 4096, False)
    assert switches.current() == Switches()


def test_products_and_quantizers_have_separate_switches(monkeypatch):
    """CPU tensors stand in for operands on a GPU that runs the kernels: the kind of their device is patched."""
    monkeypatch.setattr(machine, "available_on_gpu", lambda: True)
    monkeypatch.setattr(operators.target, "kind", lambda device: "cuda")
    left, right = (torch.empty(rows, 64, dtype=torch.bfloat16) for rows in (2, 8))
    assert operators.multiplies(left, right, None)
    with switches.using(products=63):
        assert not operators.multiplies(left, right, None)
    with switches.using(quantizers=False):
        assert operators.multiplies(left, right, None)
        assert Machine.of(CUDA).lacks == "the kernels of this cuda are switched off (FP4GRAPH_KERNELS)"
    with switches.using(products=0):
        assert Machine.of(CUDA).lacks is None
        assert not operators.multiplies(left, right, None)
