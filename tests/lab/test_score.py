"""The score, against every row of the paper's tables and against its definition."""

import csv
import itertools
import math
from collections import Counter
from pathlib import Path

import pytest

from fp4graph.lab.sweeps import gain, score

with (Path(__file__).parents[1] / "golden" / "design_space.csv").open(encoding="utf-8", newline="") as file:
    ROWS = list(csv.DictReader(file))
QUANTIZED = [row for row in ROWS if row["kind"] == "quantized"]
HALF = 0.0005  # losses and scores are printed with three decimals
NOT_FINITE = (math.nan, math.inf, -math.inf)

#: The scores that follow from no loss that rounds to the printed one; the golden file says what is wrong with each.
DEVIANT = {
    "Table 3: gaussian_reg, Best Score (Neg), E4M3",
    "Table 4: llama.350M, Pure FP4, E4M3",
    "Table 5: CIFAR10, Best loss NVFP4, E4M3",
    "Table 5: MNIST, Pure FP4, E4M3",
    "Table 8: big_diffusion, Pure FP4, ESM3",
}


def name(row):
    return f"Table {row['table']}: {row['dataset']}, {row['source']}, {row['scale']}"


def reference(row):
    """Return the loss of the better baseline of the row's task in the row's table."""
    place = row["table"], row["task"]
    return min(float(r["val_loss"]) for r in ROWS if r["kind"] == "baseline" and (r["table"], r["task"]) == place)


def follows(row, rule):
    """Return whether losses that round to the printed losses give a score that rounds to the printed score."""
    best, loss, printed = reference(row), float(row["val_loss"]), float(row["score"])
    points = float(row["complexity_points"].replace(",", "."))
    corners = itertools.product((loss - HALF, loss + HALF), (best - HALF, best + HALF))
    # The score is monotone in both losses, hence extreme at the corners.
    scores = [score(corner_loss, corner_best, points, rule) for corner_loss, corner_best in corners]
    return min(scores) <= printed + HALF and max(scores) >= printed - HALF


def test_the_golden_file_is_whole():
    assert {row["kind"] for row in ROWS} == {"quantized", "baseline"}
    assert Counter(row["table"] for row in QUANTIZED) == {"3": 22, "4": 18, "5": 27, "6": 8, "7": 6, "8": 37}
    assert Counter(row["table"] for row in ROWS) == {"3": 28, "4": 24, "5": 35, "6": 16, "7": 10, "8": 57}
    for table, rows in itertools.groupby(ROWS, key=lambda row: row["table"]):
        numbers = [int(row["row"]) for row in rows]
        assert numbers == list(range(1, len(numbers) + 1)), table
    assert len({name(row) for row in QUANTIZED}) == 118
    assert not [name(row) for row in ROWS if None in row.values() or None in row]


def test_a_corrected_source_agrees_with_its_row():
    formats = {"MXFP4": "E8M0", "NVFP4": "E4M3", "UE5M3": "UE5M3", "E8M3": "E8M3"}
    for row in ROWS:
        source = row["source_corrected"]
        assert (source == "Baseline") == (row["kind"] == "baseline"), name(row)
        if source.startswith("Best loss"):
            assert formats[source.removeprefix("Best loss ")] == row["scale_corrected"], name(row)
        if source.startswith("Best Score"):
            assert ("(Neg)" in source) == row["score"].startswith("-"), name(row)
        if (row["source"], row["scale"]) != (source, row["scale_corrected"]):
            assert row["misprint"], name(row)


def test_printed_scores_follow_the_rule_of_the_tables_and_46_follow_that_of_the_text():
    deviant = [row for row in QUANTIZED if not follows(row, "table")]
    assert {name(row) for row in deviant} == DEVIANT
    assert all(row["misprint"] for row in deviant)
    assert sum(follows(row, "text") for row in QUANTIZED) == 46


@pytest.mark.parametrize(
    ("loss", "complexity", "text", "table"),
    [
        (1.5, 0.0, 0.25, 0.25),
        (1.5, 0.25, 0.2, 0.25),
        (1.5, 1.0, 0.125, 0.25),
        (1.5, 4.0, 0.05, 0.0625),
        (3.0, 0.0, -0.5, -0.5),
        (3.0, 0.25, -0.4, -0.5),
        (3.0, 4.0, -0.1, -2.0),
        (2.0, 4.0, 0.0, 0.0),
        *((diverged, complexity, -math.inf, -math.inf) for diverged in NOT_FINITE for complexity in (0.0, 7.5)),
    ],
)
def test_scores_by_both_rules(loss, complexity, text, table):
    """A diverged run scores below every other."""
    assert score(loss, 2.0, complexity) == score(loss, 2.0, complexity, "text") == pytest.approx(text, abs=1e-15)
    assert score(loss, 2.0, complexity, rule="table") == table


def test_gain_is_the_relative_decrease_of_the_loss():
    losses = {1.5: 0.25, 2.0: 0.0, 3.0: -0.5, 0.0: 1.0, -2.0: 2.0, 1: 0.5, **dict.fromkeys(NOT_FINITE, -math.inf)}
    assert {loss: gain(loss, 2) for loss in losses} == losses


REFERENCE, COMPLEXITY = "reference loss must be positive and finite", "complexity must be finite and at least 0"


@pytest.mark.parametrize(
    ("function", "arguments", "says"),
    [
        *((gain, (loss, bad), REFERENCE) for loss in (1.0, math.nan) for bad in (0.0, -1.0, *NOT_FINITE)),
        *((score, (loss, bad, 1.0), REFERENCE) for loss in (1.0, math.nan) for bad in (0.0, -1.0, *NOT_FINITE)),
        *((score, (1.0, 2.0, bad), COMPLEXITY) for bad in (-0.5, *NOT_FINITE)),
        (score, (1.0, 2.0, 1.0, "tables"), "unknown rule 'tables' of the score; known: text, table"),
    ],
)
def test_arguments_without_a_score_are_errors(function, arguments, says):
    with pytest.raises(ValueError, match=says):
        function(*arguments)
