"""torch's caches of compiled code hit for equal policies and code, and miss for any that have changed."""

from __future__ import annotations

import importlib
import itertools
import json
import os
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch._dynamo.utils import counters

import fp4graph
from fp4graph.commands.catalogue import shipped_registry
from fp4graph.graph.functions import site_function
from fp4graph.graph.plan import plan_site
from fp4graph.kernels import operators
from fp4graph.ops.gemm import MatmulProgram
from fp4graph.policy import Policy
from fp4graph.technique.registry import Registry
from fp4graph.technique.site import BlockPosition, SiteView
from tests.helpers.policies import one_rule, quantizer
from tests.helpers.processes import IMPORTS, python, run
from tests.kernels.models import train

pytestmark = pytest.mark.compiler  # caches of Inductor

TECHNIQUE = '''
from typing import ClassVar

import fp4graph
from fp4graph.technique import Wrapper


class Louder(fp4graph.Technique):
    """Multiplies the quantized weight of fprop."""

    name: ClassVar[str] = "louder"
    overhead: ClassVar[fp4graph.Overhead] = fp4graph.Overhead("O(n)", "O(1)", fusable=True)
    by: float = 1.0

    @property
    def complexity(self):
        return 0.5

    def parts(self, site):
        return (LouderWeight(options=self, operands=frozenset({fp4graph.Operand.FPROP_WEIGHT})),)


class LouderWeight(Wrapper):
    mixes = "none"

    def after(self, y, context):
        return y * self.options.by * FACTOR


@fp4graph.hookimpl
def fp4graph_techniques():
    return [Louder]
'''


def policy(case: str) -> Policy:
    """Return the policy of a case, without noise: MXFP4 whose ties go ``up`` or to ``even``. ``louder`` adds to ``up``
    the technique of the module that the test has written, with options as JSON after the name."""
    name, _, options = case.partition(" ")
    match = {"op": "linear", "block": True}
    data = one_rule(quantize=quantizer(ties="even" if name == "even" else "up"), match=match)
    plugins = []
    if name == "louder":
        plugins = [(name, importlib.import_module(name))]
        data["techniques"] = [{name: json.loads(options or "{}")}]
    return fp4graph.load_policy(data, Registry(plugins))


def trained(case: str) -> dict[str, Any]:
    """Train under Inductor. Return the cache's hits and misses, the weights, and how far they are from eager mode's."""
    counters.clear()
    weights = train(policy(case), backend="inductor", width=32, blocks=1)
    hits, misses = (counters["aot_autograd"][f"autograd_cache_{event}"] for event in ("hit", "miss"))
    off = (weights - train(policy(case), width=32, blocks=1)).abs().max().item()
    return {"hits": hits, "misses": misses, "off": off, "weights": weights.tolist()}


class Process:
    """Runs this file in processes that share a cache and a technique in a test's folder."""

    def __init__(self, folder: Path) -> None:
        self.technique = folder / "louder.py"
        self.write(1.5)
        self.environment = {
            "TORCHINDUCTOR_CACHE_DIR": str(folder / "cache"),
            "TORCHINDUCTOR_COMPILE_THREADS": "1",  # starting workers takes longer than compiling here
            "PYTHONPATH": os.pathsep.join([str(folder), IMPORTS["PYTHONPATH"]]),
            "PYTHONDONTWRITEBYTECODE": "1",
        }

    def write(self, factor: float) -> None:
        self.technique.write_text(f"FACTOR = {factor}\n" + TECHNIQUE)

    def train(self, *cases: str) -> dict[str, Any]:
        said = run(python("-m", __name__, *cases), env=self.environment)
        result: dict[str, Any] = json.loads(said.splitlines()[-1])
        return result


@pytest.mark.long
@pytest.mark.process
def test_code_of_another_process_is_reused_for_an_equal_policy_and_equal_plugins_alone(tmp_path):
    process = Process(tmp_path)
    first = process.train("up", "louder")
    for case in first.values():
        assert (case["hits"], case["misses"]) == (0, 1)
        assert case["off"] < 1e-4
    again = process.train("louder", "up", "even", 'louder {"by": 1.25}')
    for name in ("up", "louder"):
        assert (again[name]["hits"], again[name]["misses"]) == (1, 0)
        assert again[name]["weights"] == first[name]["weights"]
    assert (
        len({tuple(again[name]["weights"]) for name in again if name != "even"}) == 3
    )  # "even" may have the weights of "up": ties are rare
    for name in ("even", 'louder {"by": 1.25}'):
        assert again[name]["hits"] == 0
        assert again[name]["off"] < 1e-4
    process.write(0.5)
    (changed,) = process.train("louder").values()
    assert changed["hits"] == 0
    assert changed["off"] < 1e-4
    apart = torch.tensor(changed["weights"]) - torch.tensor(first["louder"]["weights"])
    assert apart.abs().max() > 1e-2


# ------------------------------------------------------------------ names

SITE = SiteView("blocks.5.mlp.fc2", "linear", 256, 256, 1 << 16, BlockPosition("blocks", 5, 12))


def programs() -> dict[str, MatmulProgram]:
    """Return the programs of a linear layer under every shipped policy, in training and in evaluation."""
    made = {}
    for name in sorted(shipped_registry().policies):
        rules = fp4graph.load_policy(name).rules
        for (index, rule), training in itertools.product(enumerate(rules), (True, False)):
            program = plan_site(SITE, rule, training=training).program if rule.quantizes else None
            if program is not None:
                made[f"{name} {index} {training}"] = program
    return made


def name_of(program: MatmulProgram, form: str = "linear", alpha: float = 1.0, beta: float = 1.0) -> str:
    return site_function(program, form, alpha, beta).__name__


def names() -> dict[str, str]:
    return {case: name_of(program) for case, program in programs().items()}


@pytest.mark.slow
def test_equal_programs_have_one_name_and_others_other_names():
    by_program: dict[MatmulProgram, str] = {}
    for program in programs().values():
        assert by_program.setdefault(program, name_of(program)) == name_of(program)
    assert len(set(by_program.values())) == len(by_program) > 30
    program = next(iter(by_program))
    names = {name_of(program), name_of(program, "matmul"), name_of(program, alpha=2), name_of(program, beta=2)}
    with operators.tensor_code():
        names.add(name_of(program))
    assert len(names) == 5


@pytest.mark.long
@pytest.mark.process
def test_names_are_the_same_in_every_process():
    """Whatever the order of sets."""
    for seed in ("1", "2"):
        assert json.loads(run(python("-m", __name__, "names"), env={"PYTHONHASHSEED": seed})) == names()


if __name__ == "__main__":
    print(json.dumps(names() if sys.argv[1] == "names" else {case: trained(case) for case in sys.argv[1:]}))
