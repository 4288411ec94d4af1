"""Modules of random statements train compiled as they train uncompiled, and under ``bf16`` as without a policy."""

from __future__ import annotations

import copy
import random
import re
from contextlib import nullcontext
from dataclasses import replace

import pytest
import torch
from torch import nn

import fp4graph
from tests.helpers import random_modules
from tests.helpers.policies import one_rule
from tests.helpers.training import applied, assert_equal, prepared, train, uncompiled
from tests.model.test_uncompiled import MODES, Case, Whole, force_eager

pytestmark = [uncompiled, pytest.mark.long]

NOISE = {"block": 16, "rounding": "stochastic"}
LATER = {
    "backward": {"rounding": "stochastic"},
    "dgrad.weight": {"source": "fprop"},
    "wgrad.input": {"source": "fprop"},
}
POLICIES = {
    "bf16": "bf16",
    "all products": one_rule(quantize=NOISE, match={"op": ["linear", "matmul", "sdpa"]}),
    "nearest": one_rule(quantize={"block": 16, "rounding": "nearest"}, op=["linear"]),
    "state": one_rule({"q_ema": {"beta": 0.9}}, quantize={"block": 16}, op=["linear"], operands=LATER),
    "rotation": one_rule("tensor_scaling", {"hadamard": {"block": 16}}, quantize=NOISE, op=["linear", "matmul"]),
}
#: Techniques that keep state for a weight refuse weights of no layer.
REFUSED = (
    r"keeps state for each weight, but this product multiplies with (parameter|a tensor that the forward computes)"
)


def trained(net, policy, stance, *, plain=False):
    """Return the results of two steps, or the error that refuses the module."""
    torch._dynamo.reset()
    model = copy.deepcopy(net) if plain else applied(copy.deepcopy(net), policy, seed=3)
    kind = torch.optim.SGD
    optimizer = kind(model.parameters(), lr=0.05) if plain else prepared(model, kind, lr=0.05)
    torch.manual_seed(5)
    batches = [(torch.randn(2, 8, 32).requires_grad_(),) for _ in range(2)]
    try:
        with torch.compiler.set_stance(stance):
            return train(model, optimizer, batches)
    except fp4graph.CaptureError as error:
        return str(error)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize(
    "seed", [*range(8), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(8, 200))]
)
def test_a_random_module_trains_compiled_as_uncompiled(seed, policy, tmp_path):
    torch.manual_seed(seed)
    net: nn.Module = random_modules.module(seed, tmp_path)()
    compiled = trained(net, POLICIES[policy], "default")
    expected = trained(net, POLICIES[policy], "force_eager", plain=policy == "bf16")
    if isinstance(compiled, str) and isinstance(expected, str):
        assert policy == "state"
        assert re.search(REFUSED, compiled)
        assert re.search(REFUSED, expected)
        return
    assert len(compiled) == len(expected)
    assert all(map(torch.equal, compiled, expected))


#: Policies of the test below, beside those above.
FURTHER = {
    "phases": one_rule(quantize=NOISE, match={"op": ["linear", "matmul", "sdpa"]})
    | {"phases": [{"at": 1, "operands": {"dgrad": "keep"}}, {"at": 2, "operands": {"wgrad": "keep"}}]},
    "hold": one_rule({"tensor_scaling": {"hold_steps": 2}}, quantize={"block": 16}, op=["linear"]),
    "shared": one_rule({"tensor_scaling": {"share": "siblings"}}, quantize={"block": 16}, op=["linear"]),
    "low rank": one_rule("low_rank_residual", quantize={"block": 16}, op=["linear"]),
    "clamp": one_rule("outlier_clamp", quantize=NOISE, op=["linear"]),
    "mean": one_rule("mean_split", quantize=NOISE, op=["linear"]),
    "mxfp4-full-rht": "mxfp4-full-rht",
}
#: Modes that fit every module. Assigned weights are no longer tied; a policy applied before may not fit.
FITTING = sorted(MODES.keys() - {"weights assigned", "weights assigned, uncompiled", "method and call by turns",
                                 "methods of a part", "applied again", "rehearsed"})  # fmt: skip


def ran(net, policy, mode, context):
    """Return the results of three steps and an evaluation in ``mode``, or the error that refuses the module."""
    torch._dynamo.reset()
    torch.manual_seed(5)
    batches = {step: (torch.randn(2, 8, 32).requires_grad_(step != 99),) for step in (0, 1, 2, 99)}
    case, results = Case(lambda: copy.deepcopy(net), batches.__getitem__), []

    def run(*args):
        with mode.around(), context():
            return mode.run(model, *args).float()

    try:
        model = applied(Whole(case.make(), mode.way), policy, seed=3, total_forwards=20, **mode.options)
        optimizer = prepared(model)
        for step in range(3):
            if mode.between is not None and step == 1:
                model, optimizer = mode.between(model, optimizer, policy, case)
            results += train(model, optimizer, [batches[step]], run)
        model.eval()
        with torch.no_grad():
            return [*results, run(*batches[99])]
    except fp4graph.Error as error:
        return str(error)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")  # a reentrant checkpoint in an evaluation
@pytest.mark.parametrize(
    "seed", [*range(20), *(pytest.param(seed, marks=pytest.mark.exhaustive) for seed in range(20, 400))]
)
def test_a_random_module_trains_in_a_random_mode_as_uncompiled(seed, tmp_path):
    rng = random.Random(seed)
    policies = POLICIES | FURTHER
    policy, mode = policies[rng.choice(sorted(policies))], MODES[rng.choice(FITTING)]
    context = rng.choice([nullcontext, nullcontext, lambda: torch.autocast("cpu", torch.bfloat16)])
    torch.manual_seed(seed)
    net = random_modules.module(seed, tmp_path)()
    expected, seen = (ran(net, policy, each, context) for each in (replace(MODES["call"], around=force_eager), mode))
    assert isinstance(seen, str) == isinstance(expected, str), (seen, expected)
    if not isinstance(seen, str):
        assert_equal(seen, expected)
