"""A diagnosis names the first thing that went wrong, and nothing if the training is healthy."""

import json
import math
import random

import pytest
import torch
from torch import nn

import fp4graph
from fp4graph.lab import Statistics, diagnose
from fp4graph.lab.checks import DIVERGENCE, OF_ERROR, QUANTITIES, SCALES
from fp4graph.lab.diagnose import Diagnosis, Finding, loss_findings
from fp4graph.lab.statistics.storage import FILE, Log
from fp4graph.technique.registry import default_registry
from tests.docs.blocks import ROOT
from tests.helpers.commands import run

pytestmark = pytest.mark.usefixtures("operation_by_operation")


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(64), nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))


def train(folder, policy, *, seed=0, lr=3e-3, optimizer=torch.optim.Adam, planted=1.0, steps=50):
    """Learn to classify points by quadrant; return the losses. ``planted`` multiplies an input channel of ``2.up``."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(8, 64), *(Block() for _ in range(3)), nn.Linear(64, 4))
    with torch.no_grad():
        model[2].norm.weight[5] *= planted
    fp4graph.apply(model, policy, backend="eager")
    chosen = fp4graph.prepare_optimizer(model, optimizer(model.parameters(), lr=lr))
    losses = []
    with Statistics(model, chosen, every=5, directory=folder, window=10, window_every=20):
        for _ in range(steps):
            x = torch.randn(64, 8)
            loss = nn.functional.cross_entropy(model(x), (x[:, 0] > 0) + 2 * (x[:, 1] > 0).long())
            loss.backward()
            chosen.step()
            chosen.zero_grad()
            losses.append(loss.item())
    return losses


@pytest.mark.long
def test_a_diverging_learning_rate_is_told_from_quantization(tmp_path):
    """The loss is the first finding; the headline says whether the baseline diverges too."""
    losses = train(tmp_path / "run", "int4-per-tensor", lr=3.0, optimizer=torch.optim.SGD)
    same = train(tmp_path / "same", "bf16", lr=3.0, optimizer=torch.optim.SGD)
    good = train(tmp_path / "good", "bf16")
    alone, like_baseline, unlike_baseline = (
        diagnose(tmp_path / "run", baseline, losses=losses) for baseline in (None, same, good)
    )
    assert (alone.findings[0].quantity, alone.findings[0].site) == ("loss", "")
    assert (alone.baseline, like_baseline.baseline, unlike_baseline.baseline) == (None, True, False)
    assert "learning rate" in alone.headline
    assert "what both runs share" in like_baseline.headline
    assert like_baseline.headline in like_baseline._repr_html_()
    assert "quantization is part of the cause" in unlike_baseline.headline
    assert {each.range for each in unlike_baseline.findings if each.quantity == "loss"} == {"early", "baseline"}
    assert diagnose(tmp_path / "good", same, losses=good).findings == ()


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["int4-per-tensor", "mxfp4"])
def test_a_planted_outlier_channel_is_the_first_finding(tmp_path, policy):
    diagnosis = diagnose(tmp_path, losses=train(tmp_path, policy, planted=100.0, steps=30))
    first = diagnosis.findings[0]
    assert (first.site, first.operand, first.quantity, first.step) == ("2.up", "fprop.input", "underflowed", 5)
    for name in ("outlier_clamp", "hadamard", "2.up", "fprop.input"):
        assert name in diagnosis.headline


@pytest.mark.long
@pytest.mark.parametrize(("policy", "seed"), [("int4-per-tensor", 1), ("mxfp4", 2), ("tetrajet", 3), ("nvfp4", 4)])
def test_a_healthy_run_has_no_finding(tmp_path, policy, seed):
    diagnosis = diagnose(tmp_path, losses=train(tmp_path, policy, seed=seed))
    assert (diagnosis.findings, diagnosis.missing) == ((), ())
    assert diagnosis.headline == "Nothing left its normal range in 50 losses and 10 records of operands."


def noisy(step, level):
    return level + 0.05 * random.Random(step).uniform(-1, 1)


FALLING = [noisy(n, 0.5 + 2 * 0.97**n) for n in range(100)]


@pytest.mark.parametrize(
    ("losses", "baseline", "expected"),
    [
        (FALLING, [], []),
        ([3.2, 2.8, 2.5, 2.4, 2.3, *FALLING], [], []),  # a quick beginning
        (FALLING[:60] + [2.6] * 40, [], [(61, "early", True)]),  # stuck at the level of the beginning
        ([*FALLING[:60], 2.6, *FALLING[61:]], [], [(61, "early", False)]),  # a spike that passes
        ([*FALLING[:60], None], [], [(61, "early", False)]),
        ([noisy(n, 2.3) for n in range(100)], [], [(100, "limit", True)]),
        ([noisy(n, 1.3 + 1.2 * 0.97**n) for n in range(100)], FALLING, [(36, "baseline", True)]),
        ([None], [], [(1, "early", True)]),
    ],
)
def test_findings_of_losses(losses, baseline, expected):
    found = loss_findings(dict(enumerate(losses, 1)), dict(enumerate(baseline, 1)))
    assert [(each.range, each.stays) for each in found] == [each[1:] for each in expected]
    for finding, (step, _, _) in zip(found, expected, strict=True):
        assert finding.step == pytest.approx(step, abs=6 if finding.range == "baseline" else 0)


def record(folder, values, column="snr_db", tensor="fprop.input", **header):
    """Write a record at every tenth step, with the next of each site's values."""
    log = Log(folder, {"step": 0, "policy": "p", "every": 10, **header})
    for n in range(len(next(iter(values.values())))):
        rows = [{"site": site, "tensor": tensor, column: curve[n]} for site, curve in values.items()]
        log.append([{"step": 10 * (n + 1), **row} for row in rows])


@pytest.mark.parametrize(
    ("values", "column", "expected"),
    [
        ({"a": [20.0] * 8}, "snr_db", None),
        ({"a": [20.0] * 6 + [13.0, 20.0]}, "snr_db", None),  # a single record
        ({"a": [20.0] * 6 + [13.0, 13.0]}, "snr_db", (70, "a", "early", 14.0)),
        ({"a": [20.0] * 7 + [13.0]}, "snr_db", None),  # only the last record
        ({s: [20.0] * 4 + [13.0] * 4 for s in "abc"}, "snr_db", None),  # all sites drift
        ({"0.a": [20.0, 20.0], "1.a": [20.0, 20.0], "2.a": [13.0, 13.0]}, "snr_db", (10, "2.a", "peers", 14.0)),
        ({"0.a": [20.0, 20.0], "2.a": [13.0, 13.0]}, "snr_db", None),  # too few peers
        ({"a": [2.0, 2.0]}, "snr_db", (10, "a", "limit", 3.0)),
        ({"a": [0, 3, 0]}, "nonfinite", (20, "a", "limit", 0.0)),
        ({"a": [0.01] * 6 + [0.09] * 2}, "underflowed", None),  # shares as small as these are normal
        ({"a": [1.0] * 6 + [40.0, 40.0]}, "gradient_norm", (70, "a", "early", 30.0)),
    ],
)
def test_findings_of_operands(tmp_path, values, column, expected):
    record(tmp_path, values, column)
    found = diagnose(tmp_path).findings
    assert [(each.step, each.site, each.range) for each in found] == ([expected[:3]] if expected else [])
    if expected:
        assert found[0].normal == pytest.approx(expected[3])


def test_an_operand_precedes_the_bias_that_follows_from_it(tmp_path):
    bias = {"site": "a", "tensor": "dgrad", "bias": 0.99}
    ratio = {"site": "a", "tensor": "dgrad.grad", "snr_db": 2.9}  # just below the limit, so the smaller finding
    log = Log(tmp_path, {"step": 0, "policy": "p", "every": 10})
    for step in (10, 20):
        log.append([{"step": step, **row} for row in (bias, ratio)])
    assert [each.quantity for each in diagnose(tmp_path).findings] == ["snr_db", "bias"]


@pytest.mark.parametrize(("quantizer", "ranges"), [("e2m1/32", ["baseline"]), ("int4/tensor", [])])
def test_only_a_baseline_with_the_same_quantizer_gives_a_range(tmp_path, quantizer, ranges):
    for name, level, words in (("run", 12.0, "e2m1/32"), ("baseline", 20.0, quantizer)):
        record(tmp_path / name, {"a": [level] * 4}, weights=[{"site": "a", "operands": {"fprop.input": words}}])
        lines = "".join(json.dumps({"step": n, "train_loss": 1.0 - n / 20}) + "\n" for n in range(1, 11))
        (tmp_path / name / "metrics.jsonl").write_text(lines)
    assert [each.range for each in diagnose(tmp_path / "run", tmp_path / "baseline").findings] == ranges


def test_the_command_prints_findings_or_json(tmp_path):
    record(tmp_path / "statistics", {"0.a": [20.0] * 6, "1.a": [19.0] * 6, "2.a": [5.0] * 6})
    lines = [{"step": n, "train_loss": 2.3 - n / 50, "gradient_norm": 1.0 if n < 45 else 100.0} for n in range(1, 61)]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    findings = json.loads(run("diagnose", tmp_path, "--json").out)["findings"]
    assert [(each["quantity"], each["step"]) for each in findings] == [("snr_db", 10), ("gradient_norm", 45)]
    assert findings[0]["remedy"]["evidence"]
    text = run("diagnose", tmp_path).out
    for word in ("2.a", "fprop.input", "peers", "the model", "100"):
        assert word in text


def test_missing_folders_losses_and_statistics_are_named(tmp_path):
    with pytest.raises(fp4graph.Error, match="there is no folder"):
        diagnose(tmp_path / "nowhere")
    with pytest.raises(fp4graph.Error, match="neither losses nor statistics"):
        diagnose(tmp_path)
    (tmp_path / FILE).write_text('{"format": "fp4graph.statistics", "version": 1, "metrics": ["snr"]}\n')
    missing = diagnose(tmp_path).missing
    assert any(each.startswith("losses") for each in missing)
    assert any(each.startswith("underflow:") for each in missing)
    with pytest.raises(fp4graph.Error, match="no losses of a baseline"):
        diagnose(tmp_path, tmp_path / "nowhere")


def test_evidence_and_techniques_of_remedies_exist():
    """The evidence of a remedy is a section of docs/findings.md."""
    text = (ROOT / "docs" / "findings.md").read_text("utf-8")
    known = set(default_registry().techniques)
    for remedy in {SCALES, *OF_ERROR.values(), *(q.remedy for q in QUANTITIES.values() if q.remedy)}:
        for section in remedy.evidence.split("; "):
            assert f"\n## {section}\n" in text, section
        assert all(word in known for word in remedy.techniques.replace(",", "").split() if "_" in word)
    assert [name for name, quantity in QUANTITIES.items() if not quantity.remedy] == ["snr_db"]
    assert all(math.isclose(q.units.inverse(q.units.transform(0.5)), 0.5) for q in QUANTITIES.values())


def test_sites_that_left_one_range_share_a_row():
    """Findings are sorted by size, so those of two operands may alternate."""
    findings = [
        Finding(5, f"blocks.{n}", f"fprop.{'input' if n % 2 else 'weight'}", "snr_db", 1.0, 3.0, "limit", 9.0 - n, True,
                DIVERGENCE)
        for n in range(6)
    ]  # fmt: skip
    table = Diagnosis("run", "", tuple(findings), None, ()).table()
    assert [*table.columns[1].cells] == ["blocks.0 and 2 more", "blocks.1 and 2 more"]


def test_a_baseline_that_nan_stopped_left_its_range(tmp_path):
    stopped = [*FALLING[:60], math.nan]
    Log(tmp_path, {})
    assert "The baseline's loss left its range too" in str(diagnose(tmp_path, baseline=stopped, losses=stopped))
