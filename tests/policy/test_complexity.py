"""Ω counts each technique once, however a policy writes it.

With the weights of Table 9 of "Elucidating the design space of FP4 training" it gives the complexity points that Tables
3 to 8 print, except in rows that contradict themselves.
"""

from __future__ import annotations

import csv
import itertools
from pathlib import Path
from typing import Any

import pytest

from fp4graph.policy import load_policy
from fp4graph.technique.registry import Registry
from tests.helpers.policies import one_rule

STOCHASTIC = {"rounding": "stochastic"}


@pytest.mark.parametrize(
    ("content", "complexity"),
    [
        ({"default": {}}, 0.0),
        ({"default": STOCHASTIC}, 0.5),
        ({"default": {"operands": {"dgrad.weight": STOCHASTIC}}}, 0.5),
        ({"default": {}, "techniques": ["dither"]}, 0.5),
        ({"default": STOCHASTIC, "techniques": ["dither"]}, 0.5),
        ({"rules": [{"match": {}, "quantize": STOCHASTIC}]}, 0.5),
        ({"rules": [{"match": {}, "quantize": {}, "techniques": ["dither"]}]}, 0.5),
        ({"default": STOCHASTIC, "rules": [{"match": {}, "quantize": STOCHASTIC, "techniques": ["dither"]}]}, 0.5),
        ({"default": {}, "techniques": ["average", "dither"]}, 2.0),
        ({"default": {}, "techniques": ["dither", "average"]}, 2.0),
        ({"default": STOCHASTIC, "techniques": ["average", "echo"]}, 3.0),
        ({"default": "keep", "techniques": ["average"]}, 1.5),
    ],
)
@pytest.mark.filterwarnings("ignore:.*has no effect here:fp4graph.PolicyWarning")
def test_each_technique_counts_once(content: dict[str, Any], complexity: float, registry: Registry) -> None:
    policy = load_policy({"version": 1, **content}, registry)
    assert policy.complexity == complexity
    assert isinstance(policy.complexity, float)


def test_the_largest_weight_counts_where_options_differ(registry: Registry) -> None:
    cheap, dear = [{"dither": {"bits": 8}}], [{"dither": {"bits": 24}}]
    assert load_policy({"version": 1, "default": {}, "techniques": cheap}, registry).complexity == 0.25
    for order in itertools.permutations([cheap, dear]):
        rules = [{"match": {}, "quantize": {}, "techniques": techniques} for techniques in order]
        assert load_policy({"version": 1, "rules": rules}, registry).complexity == 0.5


def test_used_has_the_techniques_of_policy_and_rules_and_the_implied_ones(registry: Registry) -> None:
    rule = {"match": {}, "quantize": STOCHASTIC, "techniques": ["echo"]}
    policy = load_policy({"version": 1, "rules": [rule], "techniques": ["average"]}, registry)
    assert {technique.name for technique in policy.used} == {"dither", "echo", "average"}


with (Path(__file__).parents[1] / "golden" / "design_space.csv").open(encoding="utf-8", newline="") as file:
    QUANTIZED = [row for row in csv.DictReader(file) if row["kind"] == "quantized"]

#: One technique of a policy's list: its name and options.
Entry = dict[str, dict[str, str]]


def kinds(technique: str, **cells: str) -> dict[str, Entry]:
    return {cell: {technique: {"kind": kind}} for cell, kind in cells.items()}


SR = {operands: {"stochastic_rounding": {"operands": operands}} for operands in ("backward", "all_activation")}
#: For each column, the technique that each printed cell stands for. Cells that only Table 10 has are included.
ENTRIES: dict[str, dict[str, Entry]] = {
    "max_grad": kinds("smooth_max", absmax="absmax", softsoftmax="softmax", hardsoftmax="hybrid"),
    "quant_grad": kinds("step_gradient", baseline="dge", spline="spline"),
    "scale_grad": kinds("scale_gradient", baseline="dge", spline="spline"),
    "hadamard": {
        "all_exact": {"hadamard": {"scope": "all"}},
        **{cell: {"hadamard": {"scope": "backward"}} for cell in ("backward.exact", "backward_exact")},
    },
    "sr": {
        **dict.fromkeys(("IntelFP4_exact", "IntelfP4.exact", "IntFP4.exact"), SR["backward"]),
        **dict.fromkeys(("all_activation.exact", "all_activation_exact"), SR["all_activation"]),
    },
    "round_mode": {"Stochastic": {"stochastic_scale_rounding": {}}},
    "tensor_scaling": {"True": {"tensor_scaling": {}}},
    "tensor_grad": kinds("tensor_scaling_gradient", absmax="absmax", STE="ste"),
    "loss_scaling": {"True": {"loss_scaling": {}}},
    "optimiser": {cell: {"stable_spam": {}} for cell in ("StableSPAM", "StablesPAM")},
}
#: Cells that stand for no technique, unless :data:`ENTRIES` has them in their column.
NOTHING = {"STE", "N/A", "None.exact", "None_exact", "TiesToEven", "TowardPositive", "False", "ignore", "Adam"}

#: Rows whose complexity points contradict their columns: the points printed, and the points of the columns by Table 9.
CONTRADICTORY = {
    "Table 4: llama.1B, Pure FP4, E8M0": (0.0, 1.0),
    "Table 4: llama.350M, Best Score (Neg), E8M0": (1.5, 2.0),
    "Table 4: llama.60M, Best loss NVFP4, E4M3": (1.5, 2.0),
    "Table 5: CIFAR10, Best Score (Pos), E4M3": (1.0, 1.5),
    "Table 5: CIFAR10, Pure FP4, E4M3": (0.0, 0.5),
    "Table 5: MNIST, Best Score (Neg), E4M3": (1.0, 1.5),
    "Table 5: llama.9M, Best loss NVFP4, E4M3": (2.0, 1.5),
}


def name(row: dict[str, str]) -> str:
    return f"Table {row['table']}: {row['dataset']}, {row['source']}, {row['scale']}"


def entries(row: dict[str, str]) -> list[Entry]:
    """Return the techniques that the columns of a row name."""
    assert not [row[column] for column, cells in ENTRIES.items() if row[column] not in {*cells, *NOTHING}]
    return [cells[row[column]] for column, cells in ENTRIES.items() if row[column] in cells]


# Some rows name a gradient of scales that have none.
@pytest.mark.filterwarnings("ignore:.*has no effect:fp4graph.PolicyWarning")
def test_printed_complexity_follows_from_the_columns() -> None:
    printed = {name(row): float(row["complexity_points"].replace(",", ".")) for row in QUANTIZED}
    policies = {name(row): load_policy(one_rule(quantize={}, techniques=entries(row))) for row in QUANTIZED}
    assert len(policies) == 118
    pairs = {row: (printed[row], policy.complexity) for row, policy in policies.items()}
    assert {row: pair for row, pair in pairs.items() if pair[0] != pair[1]} == CONTRADICTORY
    assert {name(row) for row in QUANTIZED if "complexity points" in row["misprint"]} == CONTRADICTORY.keys()
