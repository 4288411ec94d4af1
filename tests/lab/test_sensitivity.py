"""Sensitivity against loops written by hand; estimates where they are exact; a measurement changes no state."""

import copy
import dataclasses
import math
import random
from collections import UserDict

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp4graph
from fp4graph.lab.sensitivity import Score, Sensitivity
from fp4graph.model.runtime import runtime_of
from fp4graph.technique.operands import Operand
from tests.lab.trainings import Net

QUANTIZE = {"element": "e2m1", "block": 16, "scale": {"format": "e8m0"}}
#: All six operands of every linear layer, rounded to nearest; under "fp4-first" of the first layer alone.
POLICY = {"version": 1, "name": "fp4", "default": QUANTIZE}
FIRST = {"version": 1, "name": "fp4-first", "rules": [{"name": "a", "match": {"module": "0"}, "quantize": QUANTIZE}]}
SITES = ("0", "2", "4")
#: Layers of a checkpointed model, whose middle ones may run several times; an empty row is an activation.
SIZES = ((32, 48), (), (48, 48), (), (48, 16))
Q1, Q2, Q3, Q4, Q5, Q6 = Operand
SPEC = fp4graph.load_policy(POLICY).default.specs[Q1]


def mlp(between=nn.GELU):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 48), between(), nn.Linear(48, 32), between(), nn.Linear(32, 16))
    return model, [(torch.randn(16, 32), torch.randn(16, 16)) for _ in range(3)]


def loss(model, batch):
    x, target = batch
    return (model(x) - target).square().mean()


class Hand(torch.autograd.Function):
    """A linear layer with some operands quantized, its three GEMMs written out."""

    @staticmethod
    def forward(ctx, x, w, operands):
        ctx.save_for_backward(x, w)
        ctx.q = lambda operand, t, dim: fp4graph.fake_quantize(t, SPEC, dim=dim) if operand in operands else t
        return ctx.q(Q1, x, 1) @ ctx.q(Q2, w, 1).T

    @staticmethod
    def backward(ctx, dy):
        x, w = ctx.saved_tensors
        return ctx.q(Q3, dy, 1) @ ctx.q(Q4, w, 0), ctx.q(Q5, dy, 0).T @ ctx.q(Q6, x, 0), None


def by_hand(model, parts, batch, rate=0.0):
    """Return the loss with the operands that ``parts`` names by site quantized; with ``rate``, after a step of SGD."""
    weights = {name: p.detach().clone().requires_grad_() for name, p in model.named_parameters()}

    def value():
        x, target = batch
        for site in SITES:
            x = Hand.apply(x, weights[f"{site}.weight"], parts.get(site, ())) + weights[f"{site}.bias"]
            x = F.gelu(x) if site != SITES[-1] else x
        return (x - target).square().mean()

    if rate:
        value().backward()
        for p in weights.values():
            p.data -= rate * p.grad
    return value().item()


@pytest.mark.slow
@pytest.mark.parametrize("keep", [False, True])
def test_forward_units_are_a_loop_by_hand(keep):
    model, batches = mlp()
    result = fp4graph.sensitivity(model, loss, batches, [POLICY, FIRST], by=("site", "operand"), keep=keep)
    scores = {(s.policy, s.unit): s for s in result.scores if s.measure == "forward"}
    assert list(scores) == [
        *(("fp4", f"{site}, {operand}") for site in SITES for operand in (Q1, Q2)),
        *(("fp4-first", f"0, {operand}") for operand in (Q1, Q2)),
    ]
    assert result.loss == pytest.approx(np.mean([by_hand(model, {}, batch) for batch in batches]), abs=1e-7)
    for (policy, unit), score in scores.items():
        site, operand = unit.split(", ")
        whole = {name: {Q1, Q2} for name in (SITES if policy == "fp4" else SITES[:1])}
        parts = {name: both - {operand} if name == site else both for name, both in whole.items()}
        parts, reference = (parts, whole) if keep else ({site: {operand}}, {})
        pairs = [by_hand(model, parts, batch) - by_hand(model, reference, batch) for batch in batches]
        assert score.increase == pytest.approx(np.mean(pairs), abs=3e-7)
        assert score.error == pytest.approx(np.std(pairs, ddof=1) / math.sqrt(3), abs=3e-7)
        assert abs(score.increase) > 1e-6  # beyond rounding
        assert (score.sites, score.operands) == ((site,), (operand,))
    if not keep:
        x, w = torch.cat([x for x, _ in batches]), model[0].weight.detach()
        for operand, tensor in ((Q1, x), (Q2, w)):
            noise = (fp4graph.fake_quantize(tensor, SPEC) - tensor).square().sum() / tensor.square().sum()
            assert scores["fp4", f"0, {operand}"].snr_db == pytest.approx(-10 * math.log10(noise), abs=1e-3)


@pytest.mark.slow
def test_backward_units_are_steps_by_hand():
    model, batches = mlp()
    result = fp4graph.sensitivity(model, loss, batches, POLICY, by=("site", "operand"), decrease=0.2)
    scores = [score for score in result.scores if score.measure == "step"]
    assert len(scores) == 3 * 4
    for score in scores:
        site, operand = score.unit.split(", ")
        pairs = []
        for batch in batches:
            gradients = torch.autograd.grad(loss(model, batch), list(model.parameters()))
            rate = 0.2 * loss(model, batch).item() / sum(g.double().square().sum().item() for g in gradients)
            pairs.append(by_hand(model, {site: {operand}}, batch, rate) - by_hand(model, {}, batch, rate))
        assert score.increase == pytest.approx(np.mean(pairs), abs=1e-6)
        idle = site == "0" and operand in (Q3, Q4)  # nothing reads the gradient of the model's input
        assert (score.increase, score.snr_db) == (0, None) if idle else abs(score.increase) > 1e-5


@pytest.mark.slow
def test_modules_together_are_one_site_by_hand():
    model, batches = mlp()
    result = fp4graph.sensitivity(model, loss, batches, POLICY, by=("site", "gemm"), together=[SITES[:2]])
    first, *others = result.scores
    assert [s.unit for s in result.scores if s.measure == "forward"] == ["0 and 1 more, fprop", "4, fprop"]
    assert (first.sites, len(others)) == (SITES[:2], 5)
    parts = {site: {Q1, Q2} for site in SITES[:2]}
    pairs = [by_hand(model, parts, batch) - by_hand(model, {}, batch) for batch in batches]
    assert first.increase == pytest.approx(np.mean(pairs), abs=3e-7)


def test_the_estimate_is_exact_for_a_quadratic_loss_with_residuals_of_one():
    """L = 1/N Σ (y_n − t_n)²/2 has the Hessian 1/N; with residuals ±1 it equals the Fisher matrix 1/N·(y_n − t_n)²."""
    torch.manual_seed(0)
    model, x = nn.Linear(64, 1), torch.randn(32, 64)
    target = model(x).detach() + torch.randn(32, 1).sign()

    def half(model, batch):
        return (model(batch[0]) - batch[1]).square().mean() / 2

    (score,) = fp4graph.sensitivity(model, half, [(x, target)], POLICY, by="site", repeats=1).scores
    assert score.unit == "(root)"
    assert score.estimate == pytest.approx(score.increase, rel=1e-4)
    (twice,) = fp4graph.sensitivity(model, half, [(x, target)], POLICY, by="site", terms=64, exact=False).scores
    error = F.linear(*(fp4graph.fake_quantize(t, SPEC) for t in (x, model.weight)), model.bias) - model(x)
    assert twice.estimate - score.estimate == pytest.approx(error.square().mean().item() / 2, rel=1e-4)
    assert math.isnan(twice.increase)


class Dependent(nn.Module):
    """A layer that runs twice, and products of a tensor with itself: one factor depends on the other."""

    def __init__(self):
        super().__init__()
        self.twice, self.last = nn.Linear(32, 32), nn.Linear(32, 16)

    def forward(self, x):
        y = F.gelu(self.twice(F.gelu(self.twice(x)))).view(-1, 16, 16)[0]
        return self.last(torch.cat([y @ y, y @ y.T], dim=1))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "count"), [(lambda: mlp(nn.GELU)[0], 6), (lambda: mlp(nn.Identity)[0], 6), (Dependent, 6)]
)
def test_the_estimate_of_a_step_is_exact_in_the_limit_of_small_steps(make, count):
    model, batches = make().double(), [tuple(t.double() for t in batch) for batch in mlp()[1]]
    result = fp4graph.sensitivity(model, loss, batches, POLICY, by=("site", "gemm"), decrease=1e-5)
    steps = [score for score in result.scores if score.measure == "step"]
    assert len(steps) == count
    for score in steps:
        assert (score.increase == 0) == (score.unit == "0, dgrad")
        assert score.estimate == pytest.approx(score.increase, rel=1e-3)


class Checkpointed(nn.Module):
    def __init__(self, layers, reentrant, times):
        super().__init__()
        self.layers, self.reentrant, self.times = layers, reentrant, times

    def forward(self, x):
        x = self.layers[0](x)
        for _ in range(self.times):
            middle = self.layers[1:4]
            x = middle(x) if self.reentrant is None else checkpoint(middle, x, use_reentrant=self.reentrant)
        return self.layers[4](x)


@pytest.mark.slow
def test_a_checkpoint_changes_no_estimate():
    def estimates(reentrant, times=1):
        torch.manual_seed(0)
        layers = nn.Sequential(*(nn.Linear(*size) if size else nn.GELU() for size in SIZES))
        model, batch = Checkpointed(layers, reentrant, times), (torch.randn(16, 32), torch.randn(16, 16))
        options = {"by": ("site", "gemm"), "exact": False}
        return [score.estimate for score in fp4graph.sensitivity(model, loss, [batch], POLICY, **options).scores]

    assert all(estimates(None)[3:])
    assert estimates(None) == estimates(False) == estimates(True)
    with pytest.raises(fp4graph.Error, match="runs 2 times in checkpoints with use_reentrant=True"):
        estimates(True, times=2)


@pytest.mark.slow
def test_a_measurement_changes_neither_the_model_nor_a_random_state():
    torch.manual_seed(0)
    layers = nn.Linear(32, 32), nn.BatchNorm1d(32), nn.Dropout(0.1), nn.Linear(32, 16)
    model, batch = fp4graph.apply(nn.Sequential(*layers), "tetrajet", backend="eager"), mlp()[1][0]
    model[3].eval()
    runtime, state = runtime_of(model), copy.deepcopy(model.state_dict())

    def generators():
        return torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()

    before = generators()
    results = [fp4graph.sensitivity(model, loss, [batch], "tetrajet", by="gemm", repeats=2) for _ in range(2)]
    assert results[0].scores == results[1].scores
    assert all(score.error > 0 for score in results[0].scores[1:])  # TetraJet draws in the backward
    assert runtime_of(model) is runtime
    assert (model.training, model[3].training) == (True, False)
    assert all(torch.equal(state[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())
    assert generators() == before


@pytest.mark.slow
def test_units_by_site_block_gemm_or_operand():
    model, batch = Net(), torch.randn(8, 32)
    sites = ("blocks.0.up", "blocks.0.down", "blocks.1.up", "blocks.1.down", "head")
    expected = {
        "site": {site: (site,) for site in sites},
        "block": {"blocks.0": sites[:2], "blocks.1": sites[2:4], "head": ("head",)},
        "gemm": dict.fromkeys(("fprop", "dgrad", "wgrad"), sites),
        "operand": dict.fromkeys(Operand, sites),
    }
    for by, units in expected.items():
        scores = fp4graph.sensitivity(
            model, lambda *call: call[0](call[1])["loss"], [batch], POLICY, by=by, exact=False
        ).scores
        assert {score.unit: score.sites for score in scores} == units


def score(unit, increase, estimate, policy="p"):
    return Score(unit, (unit,), ("fprop.input",), policy, increase, 0.1, 20.0, estimate)


def test_ranking_correlation_and_files(tmp_path):
    scores = (score("a", 3.0, 1.0), score("b", math.inf, 4.0), score("c", 1.0, 3.0), score("d", 2.0, 2.0),
              score("e", math.nan, 0.5, "q"), score("f", math.nan, 0.7, "q"))  # fmt: skip
    result = Sensitivity(scores, 1.0, 2, 1)
    assert [s.unit for s in result.ranking("p")] == ["b", "a", "d", "c"]
    assert [s.unit for s in dataclasses.replace(result, keep=True).ranking("p")] == ["c", "d", "a", "b"]
    assert [s.unit for s in result.ranking("q")] == ["f", "e"]
    # Ranks 3, 4, 1, 2 against 1, 4, 3, 2: 1 − 6·(4 + 0 + 4 + 0)/(4·15)
    assert result.correlation == {("p", "forward"): pytest.approx(0.2)}
    result.to_json(tmp_path / "a.json")
    read = Sensitivity.from_json(tmp_path / "a.json")
    assert repr(read) == repr(result)  # NaN does not equal itself
    text, file = (tmp_path / "a.json").read_text(), tmp_path / "b.json"
    for content, says in (
        (None, r"cannot read .*b\.json: No such file"), ("{}", r"was not written by Sensitivity\.to_json"),
        (text.replace('"batches"', '"batch"'), "b.json is damaged: batches: field required"),
        (text.replace('"unit"', '"units"'), r"scores\.0\.unit: field required; restore it or measure it again"),
    ):  # fmt: skip
        if content is not None:
            file.write_text(content)
        with pytest.raises(fp4graph.Error, match=says):
            Sensitivity.from_json(file)
    cells = [str(cell) for column in result.table(limit=1).columns for cell in column.cells]
    assert {"b", "f"} <= set(cells)
    assert not {"a", "e"} & set(cells)
    assert "0.20" in str(result.table().caption)
    assert "0.20" in result._repr_html_()
    image = result.figure("p").axes[0].images[0].get_array()
    assert np.ma.masked_invalid(image).ravel().filled(-1).tolist() == [3.0, -1, 1.0, 2.0]
    with pytest.raises(fp4graph.Error, match="no scores of policy 'r'"):
        result.figure("r")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"by": "sit"}, "by has 'sit', .*; did you mean 'site'"),
        ({"by": ()}, "nothing to measure"),
        ({"batches": []}, "no batches"),
        ({"together": [("0", "3x")]}, "together has '3x', which is no module of the model"),
        ({"together": ("0.x", "2")}, "together has '.', which is no module"),
        ({"repeats": 0}, "repeats must be a whole number of at least 1; got 0"),
        ({"decrease": -0.01}, "decrease must be a number above 0; got -0.01"),
        ({"decrease": float("nan")}, "decrease must be a number above 0; got nan"),
        ({"policies": "bf16"}, "policy 'bf16' quantizes nothing"),
        ({"policies": [POLICY, {**FIRST, "rules": [FIRST["rules"][0] | {"match": {"module": "nowhere"}}]}]}, "nowhere"),
        ({"loss": lambda model, batch: model(batch[0])}, r"returned a tensor of shape \(16, 16\) for batch 0"),
        ({"loss": lambda model, batch: 1.0}, "returned 1.0 for batch 0"),
        ({"loss": lambda model, batch: loss(model, batch) * math.nan}, "the loss of batch 0 is nan before"),
        ({"loss": lambda model, batch: loss(model, batch).detach()}, "has no gradient"),
    ],
)
def test_bad_input_is_named(changed, message):
    model, batches = mlp()
    arguments = {"loss": loss, "batches": batches, "policies": POLICY, "by": "site"} | changed
    with pytest.raises(fp4graph.Error, match=message):
        fp4graph.sensitivity(model, **arguments)


def test_a_batch_may_be_any_mapping():
    """The batches of Hugging Face's tokenizers are no dictionaries."""
    model, batches = mlp()
    results = [
        fp4graph.sensitivity(
            model, lambda model, batch: loss(model, (batch["x"], batch["y"])), batches, POLICY, exact=False
        )
        for batches in ([kind({"x": x, "y": y}) for x, y in batches] for kind in (dict, UserDict))
    ]
    assert results[0].scores[0].estimate == results[1].scores[0].estimate


class Frozen(nn.Module):
    """A frozen layer whose output is changed in place, and a frozen layer whose input is."""

    def __init__(self, in_place):
        super().__init__()
        torch.manual_seed(0)
        self.layers, self.in_place = nn.ModuleList(nn.Linear(32, 32) for _ in range(3)), in_place
        self.layers[0].requires_grad_(False)
        self.layers[2].requires_grad_(False)

    def forward(self, x):
        first, second, third = self.layers
        x = second(F.relu(first(x), inplace=self.in_place))
        y = third(x)
        x = x.add_(y) if self.in_place else x + y
        return x[:, :16]


def test_layers_may_be_frozen_beside_operations_in_place():
    batches = mlp()[1]
    apart, in_place = (
        fp4graph.sensitivity(Frozen(each), loss, batches, POLICY, by=("site", "gemm")).scores for each in (False, True)
    )
    assert in_place == apart
    assert any(score.estimate for score in apart if score.unit == "layers.2, dgrad")
