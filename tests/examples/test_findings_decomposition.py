"""examples/findings/decomposition.py: its shares are those of the operands that it observes."""

import pytest

from fp4graph.lab import decompose
from fp4graph.policy import load_policy
from fp4graph.technique.operands import Operand
from tests.helpers import findings


@pytest.mark.long
def test_every_site_is_measured_at_every_observed_step(monkeypatch, tmp_path):
    """Two steps of the eight linears of digits. Under a policy without techniques the shares are ``decompose``'s."""
    script = findings.script("decomposition", monkeypatch)
    monkeypatch.setattr(script, "STEPS", 4)
    monkeypatch.setattr(script, "OBSERVED", (3, 4))
    first = []
    measure = script.OperandErrors.measure

    def keeping(self, *sides):
        if not first:
            first.append(sides[1].given.detach().clone())
        measure(self, *sides)

    monkeypatch.setattr(script.OperandErrors, "measure", keeping)
    shares = script.measure()
    assert {len(each) for each in shares.values()} == {2 * 8}
    assert len(shares) == len(script.RECIPES) * 6
    spec = load_policy("mxfp4-full").rules[0].specs[Operand.FPROP_WEIGHT]
    parts, signal = decompose(first[0], spec), first[0].double().square().sum()
    for name, share in shares["MXFP4", Operand.FPROP_WEIGHT][0].items():
        assert share == pytest.approx((getattr(parts, name).square().sum() / signal).item())
    script.picture(shares, tmp_path / "a.png")
    assert (tmp_path / "a.png").stat().st_size > 20_000
