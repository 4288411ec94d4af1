"""What techniques leave to Inductor on a CPU, which compiles it again for every site and shape: operations in the graph
of one linear layer's step."""

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
    """Count the operations in a step of one linear layer of 256 × 128, without views and operators of ours."""
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


def test_a_plain_policy_leaves_its_products():
    assert operations("mxfp4-full") == {"mm": 3}


@pytest.mark.slow
def test_the_techniques_for_reinforcement_learning_leave_sums():
    """No statistic, scale, hash or rank: only what is done with whole operands, x - Q(x) and the sum of both passes for
    X and W, and the noise on W."""
    found = operations("mxfp4-rl")
    assert found["mm"] == 3
    assert found["sub"] == found["eq"] == 2
    assert found.total() <= 22  # 4 more would be one more operation in a statistic of each pass
    assert not found.keys() & {"amax", "max", "sort", "scatter", "bitwise_and", "bitwise_xor", "__rshift__", "div"}


def test_signs_of_a_rotation_are_drawn_outside():
    """An operator rotates each of the six operands; a hash of a sign would take shifts."""
    found = operations("mxfp4-full-rht")
    assert found["mm"] + found["bmm"] == 3
    assert not found.keys() & {"__rshift__", "bitwise_xor"}
