"""Operations that Inductor on a CPU compiles for one step of a linear layer. It compiles them again for every site and
shape, so techniques should leave few."""

from __future__ import annotations

from collections import Counter

import pytest
import torch
from torch import Tensor
from torch.fx.experimental.proxy_tensor import make_fx

from fp4graph.graph.functions import site_function
from fp4graph.numerics import noise
from tests.helpers.sites import program_of

pytestmark = pytest.mark.compiler

VIEWS = {"view", "t", "transpose", "squeeze", "unsqueeze", "detach", "expand", "alias", "select", "slice", "permute"}


def operations(policy: str) -> Counter[str]:
    """Count torch's operations in a step of a linear layer from 256 to 128 features, without views."""
    f = site_function(program_of(policy, inputs=256, outputs=128), "linear", 1.0, 1.0)
    key, step = noise.make_key("site"), noise.make_step(0, 0, 0)

    def run(x: Tensor, w: Tensor, dy: Tensor, key: Tensor, step: Tensor) -> tuple[Tensor, ...]:
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = f(x, w, None, key, step, 0)
        return y.detach(), *torch.autograd.grad(y, (x, w), dy)

    args = torch.randn(64, 256), torch.randn(128, 256), torch.randn(64, 128), key, step
    graph = make_fx(run, tracing_mode="fake")(*args).graph
    graph.eliminate_dead_code()
    targets = [node.target for node in graph.nodes if isinstance(node.target, torch._ops.OpOverload)]
    names = Counter(target._opname for target in targets if target.namespace == "aten")
    return Counter({name: count for name, count in names.items() if name not in VIEWS})


def test_a_policy_without_techniques_leaves_its_three_products():
    assert operations("mxfp4-full") == {"mm": 3}


@pytest.mark.slow
def test_techniques_for_reinforcement_learning_leave_elementwise_operations():
    """No statistic, scale, hash or sort: only x - Q(x) and the sum of both passes for X and W, and the noise on W."""
    counts = operations("mxfp4-rl")
    assert counts["mm"] == 3
    assert counts["sub"] == counts["eq"] == 2
    assert counts.total() <= 22  # one more operation in the statistic of each pass would be 4 more
    assert not counts.keys() & {"amax", "max", "sort", "scatter", "bitwise_and", "bitwise_xor", "__rshift__", "div"}


def test_signs_of_a_rotation_are_drawn_in_an_operator():
    """Hashing in the graph would take shifts. An operator rotates each of the six operands."""
    counts = operations("mxfp4-full-rht")
    assert counts["mm"] + counts["bmm"] == 3
    assert not counts.keys() & {"__rshift__", "bitwise_xor"}
