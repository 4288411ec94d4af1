"""Checkpointed regions that write state: training with checkpoints equals training without, to the bit."""

from __future__ import annotations

import itertools

import pytest
import torch
import torch._functorch.config
from torch import nn
from torch.utils.checkpoint import checkpoint

import fp4graph
from fp4graph.technique import Operand, StateEntry
from fp4graph.technique.registry import Registry
from tests.helpers.policies import NVFP4, one_rule
from tests.helpers.steps import descend, differences
from tests.helpers.techniques import Offers, technique
from tests.helpers.training import uncompiled

BACKENDS = ("eager", "aot_eager", "inductor")
DEFAULT = [("eager", "delayed", "region+nested"), ("eager", "held", "region"), ("aot_eager", "delayed", "region")]


def entry(operand):
    return StateEntry("amax", operand, lambda w: torch.ones((), device=w.device), writer="graph", weight_like=False)


#: Divides fprop.input by a running average of its amax, which the former forward wrote.
Delayed = technique(
    "delayed",
    frozenset({Operand.FPROP_INPUT}),
    [entry(Operand.FPROP_INPUT)],
    mixes="tensor",
    normalizes=True,
    group_granularity="tensor",
    group_scale=lambda self, z, group, context: (context.state["amax"] / 8).expand_as(group("tensor")),
    observe=lambda self, q, context: {"amax": (context.state["amax"] + q.statistic.amax()) / 2},
)
POLICIES = {
    "delayed": fp4graph.load_policy(one_rule("delayed", quantize=NVFP4), Registry([("delayed", Offers(Delayed))])),
    "held": fp4graph.load_policy(one_rule({"tensor_scaling": {"hold_steps": 2}}, quantize=NVFP4)),
}


class Net(nn.Module):
    def __init__(self, regions):
        super().__init__()
        # Layer 1 has no bias, so that its state is the last input of the region that ends with it.
        self.regions, self.layers = regions, nn.ModuleList(nn.Linear(32, 32, bias=i != 1) for i in range(3))

    def inner(self, x):
        return self.layers[1](torch.relu(self.layers[0](x)))

    def outer(self, x):
        return torch.relu(self.run(self.inner, x, "nested")) + x

    def run(self, function, x, kind):
        return checkpoint(function, x, use_reentrant=False) if kind in self.regions else function(x)

    def forward(self, x):
        for _ in range(2):  # both regions write the state of the same layers
            x = self.run(self.outer, x, "region")
        return self.layers[2](x)


def trained(regions, policy, backend):
    torch.manual_seed(0)
    model = fp4graph.apply(Net(regions), policy, backend=backend)
    optimizer = fp4graph.prepare_optimizer(model, torch.optim.SGD(model.parameters(), 0.05))
    losses = descend(lambda: model(torch.randn(8, 32)).square().mean(), optimizer, 4)
    return {"losses": torch.tensor(losses), **model.state_dict(), **dict(model.named_buffers())}


CASES = [
    pytest.param(*names, marks=[] if names in DEFAULT else pytest.mark.long)
    for names in itertools.product(BACKENDS, POLICIES, ("region", "nested", "region+nested"))
]


@pytest.mark.slow
@pytest.mark.parametrize(("backend", "policy", "regions"), CASES)
def test_checkpoints_change_no_bit(backend, policy, regions):
    expected = trained((), POLICIES[policy], backend)
    seen = trained(regions.split("+"), POLICIES[policy], backend)
    assert differences(expected, seen) == []


@pytest.mark.slow
def test_the_state_is_written():
    state = {name: value for name, value in trained((), POLICIES["delayed"], "eager").items() if "amax" in name}
    assert len(state) == 3
    assert all(0 < value != 1 for value in state.values())


@pytest.mark.slow
def test_checkpoints_change_no_bit_where_the_partitioner_recomputes_all_that_it_may():
    with torch._functorch.config.patch(aggressive_recomputation=True):
        assert differences(*(trained(regions, POLICIES["delayed"], "aot_eager") for regions in ((), ["region"]))) == []


class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q = nn.Linear(32, 32)

    def forward(self, x):
        q = self.q(x)
        return torch.softmax(q @ q.mT, -1) @ x


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attn = Attention()

    @torch.compiler.nested_compile_region
    def forward(self, x):
        return self.attn(x) + x


@uncompiled
@pytest.mark.parametrize("repeated", [False, True])
def test_each_call_of_a_nested_region_has_its_own_sites_and_noise(repeated):
    """Dynamo hands over one body for all calls, with the places of the first."""
    policy = one_rule("stochastic_rounding", match={"op": ["linear", "matmul"]})

    def made():
        torch.manual_seed(0)
        block = Block()
        return nn.Sequential(block, block if repeated else Block()), torch.randn(32, 32, requires_grad=True)

    model, x = made()
    found = fp4graph.explain(model, policy, (x,))
    assert found.problem is None
    assert [site.module for site in found.sites] == [
        f"{name}.attn{part}" for name in ("0", "0" if repeated else "1") for part in (".q", "", "")
    ]
    results = []
    for stance in ("default", "force_eager"):
        model, x = made()
        model = fp4graph.apply(model, policy, backend="eager")
        with torch.compiler.set_stance(stance):
            y = model(x)
        y.square().sum().backward()
        results.append([y, x.grad, *(parameter.grad for parameter in model.parameters())])
    assert all(map(torch.equal, *results))
