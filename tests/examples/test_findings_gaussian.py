"""examples/findings/gaussian.py: its policies are rows of the paper, and its table has means over seeds."""

import math
from types import SimpleNamespace

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
    found["`mxfp4`", "adam", "fp32", 1]["outcome"]["validation_loss"] = None
    lines = gaussian.table(found, 3).splitlines()
    assert len(lines) == 2 + sum(len(row.optimizers) for row in gaussian.ROWS)
    assert lines[2] == "| `bf16`: nothing quantized | adam | 0.5 | 25.52 | 11 ± 1 | 11 ± 1 | 6 |"
    (diverged,) = [line for line in lines if line.startswith("| `mxfp4` | adam |")]
    assert diverged == "| `mxfp4` | adam | 0.5 | 34 | 11 ± 1 | diverged | 6 |"


def test_a_torn_line_is_trained_again_and_a_loss_that_is_not_finite_is_kept_as_none(gaussian, tmp_path):
    file = tmp_path / "results.jsonl"
    file.write_text('{"seed": 0, "loss": 1.0}\n{"seed": 1, "lo')
    trained = []

    def train(seed):
        trained.append(seed)
        return {"loss": math.nan}

    for _ in range(2):
        results = gaussian.finished(file, [{"seed": 0}, {"seed": 1}], train)
        assert results == {(0,): {"seed": 0, "loss": 1.0}, (1,): {"seed": 1, "loss": None}}
    assert trained == [1]


def test_a_variant_that_diverged_is_a_row_of_the_table(monkeypatch):
    operands = script("operands", monkeypatch)
    whole, torn = [(44, 0.5), (88, 0.25)], [(44, 0.5)]
    table = operands.comparison("mxfp4", {"none": [whole, whole], "all": [whole, torn], "dgrad": [whole, whole]})
    assert [[*column.cells][1] for column in table.columns] == ["all", *["diverged"] * 6]
    with pytest.raises(fp4graph.Error, match="mxfp4 diverged with nothing quantized"):
        operands.comparison("mxfp4", {"none": [torn, whole]})


def test_a_diverged_run_of_oscillation_is_a_cell(monkeypatch, tmp_path, capsys):
    oscillation = script("oscillation", monkeypatch)
    monkeypatch.setattr(oscillation, "train", lambda run, watch: SimpleNamespace(diverged=True))
    oscillation.main(tmp_path / "oscillation.jsonl", seeds=1)
    assert f"| tetrajet {'| diverged ' * 8}|" in capsys.readouterr().out
