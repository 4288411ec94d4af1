"""The shipped spaces beside design-space: appendix A.4 and A.5 of its paper, and the tables of the TetraJet paper."""

import csv
import dataclasses
import itertools
import random
from pathlib import Path

import pytest

import fp4graph.lab.sweeps
from fp4graph.graph.plan import plan_site
from fp4graph.lab.sweeps.space import load_space
from fp4graph.numerics.spec import QuantSpec, ScaleSpec
from fp4graph.policy import load_policy
from fp4graph.technique.operands import Operand
from fp4graph.technique.site import SiteView
from tests.lab.test_space import SPELLED

with (Path(__file__).parents[1] / "golden" / "design_space.csv").open(encoding="utf-8", newline="") as file:
    ROWS = [row for row in csv.DictReader(file) if row["kind"] == "quantized" and row["table"] in ("7", "8")]

NAMES = ["e8m3", "ue5m3", "tetrajet-backward", "tetrajet-qema", "tetrajet-qramping"]
Q1, Q2, Q3, Q4, Q5, Q6 = Operand


def test_every_shipped_space_is_tested():
    spaces = Path(fp4graph.lab.sweeps.__file__).with_name("spaces")
    assert sorted(path.stem for path in spaces.glob("*.yaml")) == sorted([*NAMES, "design-space"])


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("e8m3", 3 * 2 * 2 * 2 * 2 * 3 * 3),
        ("ue5m3", 3 * 2 * 2 * 2 * 2 * 3 * 3),
        ("tetrajet-backward", 2**3),
        ("tetrajet-qema", 10),
        ("tetrajet-qramping", 10),
    ],
)
def test_size(name, size):
    assert load_space(name).size() == size


@pytest.mark.parametrize("name", NAMES)
def test_every_configuration_is_a_policy(name):
    space, generator = load_space(name), random.Random(0)
    assignments = list(space.assignments())
    chosen = assignments if len(assignments) <= 10 else generator.sample(assignments, 25)
    for assignment in chosen:
        configuration = space.configuration(assignment)
        assert configuration.error is None
        assert load_policy(configuration.document).fingerprint == configuration.policy.fingerprint


@pytest.mark.parametrize(("name", "table", "rows"), [("e8m3", "7", 6), ("ue5m3", "8", 34)])
def test_printed_rows_are_configurations_of_the_printed_complexity(name, table, rows):
    space = load_space(name)
    plain = next(iter(space.assignments()))
    mine = [row for row in ROWS if row["table"] == table and row["scale_corrected"] == name.upper()]
    assert len(mine) == rows
    for row in mine:
        spelled = {parameter: labels[row[column].replace(".", "_")] for column, (parameter, labels) in SPELLED.items()
                   if parameter in plain}  # fmt: skip
        chosen = {**plain, **spelled, "underflow": row["nan_mode"]}
        assert space.contains(chosen)
        policy = policy_of(space, chosen)
        (rule,) = (rule for rule in policy.rules if rule.quantizes)
        assert {spec.scale.zero for spec in rule.specs.values() if spec} == {row["nan_mode"]}
        if "complexity points" not in row["misprint"]:
            assert policy.complexity == float(row["complexity_points"].replace(",", "."))


@pytest.mark.parametrize("name", ["e8m3", "ue5m3"])
def test_the_plain_configuration_is_the_shipped_pure_policy(name):
    space = load_space(name)
    assert specs(policy_of(space, next(iter(space.assignments())))) == specs(load_policy(name))


def test_what_is_best_in_table_8_is_the_shipped_recipe():
    space = load_space("ue5m3")
    plain = next(iter(space.assignments()))
    best = {"underflow": "to_one", "optimizer": "stablespam", "tensor scaling": "with"}
    best["stochastic rounding"] = "backward"
    policy, shipped = policy_of(space, {**plain, **best}), load_policy("ue5m3-best")
    assert specs(policy) == specs(shipped)
    assert set(policy.techniques) == set(shipped.techniques)


def test_the_cells_of_tetrajets_table_5():
    space = load_space("tetrajet-backward")
    cells = {tuple(chosen.values()): specs(policy_of(space, chosen)) for chosen in space.assignments()}
    switches = [
        ("stochastic", "deterministic"), ("double quantization", "microscaling"), ("truncation-free", "microscaling"),
    ]  # fmt: skip
    assert list(cells) == list(itertools.product(*switches))
    for (backward, source, scale), found in cells.items():
        x = QuantSpec(block=32, scale=ScaleSpec("e8m0", "ceil" if scale == "truncation-free" else "floor"), ties="up")
        dy = dataclasses.replace(x, rounding="nearest" if backward == "deterministic" else "stochastic")
        again = dataclasses.replace(dy, source="fprop" if source == "double quantization" else "original")
        assert found == {Q1: x, Q2: x, Q3: dy, Q4: again, Q5: dy, Q6: again}
    assert cells[tuple(first for first, _ in switches)] == specs(load_policy("tetrajet"))
    microscaling = specs(load_policy("microscaling"))
    ties_up = {operand: dataclasses.replace(spec, ties="up") for operand, spec in microscaling.items()}
    assert cells[tuple(second for _, second in switches)] == ties_up


def test_the_hyperparameters_of_tetrajets_tables_8_to_10():
    def options(name, technique):
        space, wanted = load_space(name), {"q_ema": ("beta",), "q_ramping": ("k1", "k2")}[technique]
        found = []
        for assignment in space.assignments():
            mine = [t for t in policy_of(space, assignment).techniques if t.name == technique]
            found.append(tuple(getattr(mine[0], option) for option in wanted) if mine else None)
        return found

    table9, table8 = {0.993, 0.995, 0.997, 0.998, 0.999, 0.9995}, {0.9983, 0.9972, 0.999, 0.9975, 0.998}
    assert options("tetrajet-qema", "q_ema") == [None, *((beta,) for beta in sorted(table8 | table9))]
    table10 = [(16, 3), (16, 4), (16, 5), (16, 6), (16, 7), (16, 8), (8, 5), (12, 5), (20, 5)]
    assert options("tetrajet-qramping", "q_ramping") == [None, *table10]


def policy_of(space, assignment):
    policy = space.configuration(assignment).policy
    assert policy is not None
    return policy


def specs(policy):
    """The six specs of the policy's one rule, after what techniques make of them."""
    (rule,) = (rule for rule in policy.rules if rule.quantizes)
    planned = plan_site(SiteView("fc", "linear", 64, 64, 4096), rule).specs
    return {operand: spec for operand, spec in planned if spec is not None}
