"""Statistics of a model with experts: their operands and weights are recorded like those of linear layers."""

import json

import pytest

from fp4graph.lab import Statistics
from fp4graph.technique.operands import Operand
from tests.model.test_experts import applied, prepared, train

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("policy", ["nvfp4-te", "tetrajet-qema"])
def test_experts_are_recorded(policy, tmp_path):
    model = applied(policy)
    optimizer = prepared(model)
    with Statistics(model, optimizer, directory=tmp_path, every=1, window=2, window_every=2):
        train(model, optimizer, range(4))
    rows = [json.loads(line) for line in (tmp_path / "statistics.jsonl").read_text().splitlines()]
    recorded = {(row.get("site"), row.get("tensor")) for row in rows}
    operands = {str(operand) for operand in Operand}
    for site in ("layers.1.experts", "layers.1.experts#1"):
        assert operands <= {tensor for own, tensor in recorded if own == site}
    followed = {row["tensor"] for row in rows if row.get("site") == "layers.1.experts" and "window" in row}
    assert followed == {"w1", "w2"}
