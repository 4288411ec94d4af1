"""examples/findings/gaussian.py: its policies are rows of the paper, and its table has means over seeds."""

import pytest

import fp4graph
from tests.helpers.findings import script
from tests.lab.test_score import QUANTIZED


@pytest.fixture
def gaussian(monkeypatch):
    return script("gaussian", monkeypatch)


def test_every_row_of_the_paper_is_there_with_its_points(gaussian):
    """Complexity points of Table 3's six quantized rows, and of Table 8's pure UE5M3."""
    printed = {
        (float(row["val_loss"]), float(row["complexity_points"]))
        for row in QUANTIZED
        if row["task"] == "gaussian_reg" and (row["table"] == "3" or row["val_loss"] == "31.375")
    }
    assert len(printed) == 7
    policies = [(row, fp4graph.load_policy(row.policy)) for row in gaussian.ROWS]
    assert printed == {
        (loss, policy.complexity + 0.5 * (optimizer == "stablespam"))
        for row, policy in policies if policy.quantizes for optimizer, loss in row.paper.items()
    }  # fmt: skip


def test_the_table_has_mean_and_deviation_of_the_seeds(gaussian):
    found = {
        (row.label, optimizer, dtype, seed): {"outcome": {"validation_loss": 10.0 + seed, "complexity": 0.5}}
        for row in gaussian.ROWS
        for optimizer in row.optimizers
        for dtype in gaussian.DTYPES
        for seed in range(3)
    }
    for row in gaussian.ROWS:
        for seed in range(3):
            found[row.label, gaussian.NONE, "fp32", seed] = {"outcome": {"validation_loss": 5.0 + seed}}
    lines = gaussian.table(found, 3).splitlines()
    assert len(lines) == 2 + sum(len(row.optimizers) for row in gaussian.ROWS)
    assert lines[2] == "| `bf16`: nothing quantized | adam | 0.5 | 25.52 | 11 ± 1 | 11 ± 1 | 6 |"
