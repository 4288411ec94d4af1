"""A small selection of tests under Inductor, since compiling costs about a second a kernel."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import fp4graph
from fp4graph.kernels import operators
from fp4graph.model.runtime import runtime_of
from fp4graph.ops.operand import OperandProgram
from fp4graph.technique.operands import Operand
from fp4graph.technique.registry import Registry
from tests.helpers.models import Mlp, module_of
from tests.helpers.policies import NVFP4, one_rule
from tests.helpers.steps import descend
from tests.helpers.techniques import Offers, technique
from tests.helpers.training import applied, assert_equal, prepared

pytestmark = pytest.mark.inductor
X = torch.randn(40, 64, generator=torch.Generator().manual_seed(0))


def train(backend, x, policy, steps=3):
    model = applied(Mlp(64, 96, 64), policy, backend=backend)
    losses = descend(lambda: (model(x) - 1).square().mean(), prepared(model, torch.optim.SGD, lr=0.1), steps)
    return torch.tensor(losses, dtype=torch.float64), model


@pytest.mark.compiler
def test_training_under_inductor_follows_eager():
    """Losses differ by at most 3 times the effect of a one-ulp change of the input: quantized training amplifies it."""
    eager, _ = train("eager", X, "tetrajet-qema")
    nudged, _ = train("eager", torch.nextafter(X, torch.full_like(X, torch.inf)), "tetrajet-qema")
    compiled, model = train("inductor", X, "tetrajet-qema")
    assert (compiled - eager).abs().max() <= 3 * max((nudged - eager).abs().max().item(), 1e-7)
    assert sum(site.quantized for site in runtime_of(model).sites) == 2


@pytest.mark.long
@pytest.mark.compiler
def test_quantizers_are_bit_identical_on_the_operands_of_a_training_step(monkeypatch):
    calls, original = [], OperandProgram.__call__

    def record(program, x, draw=None, *others):
        calls.append((program, x.detach().clone(), draw))
        return original(program, x, draw, *others)

    with monkeypatch.context() as patch, operators.tensor_code():
        patch.setattr(OperandProgram, "__call__", record)
        train("eager", X, "tetrajet", steps=1)
    programs = [c for c in calls if c[0].spec is not None]
    assert len(programs) == 2 * len(Operand) - 2  # no dgrad for the first layer, whose input needs no gradient
    # Both layers have one rule: each operand is compiled once, under the layer that comes last.
    by_operand = {draw.salts: (program, x, draw) for program, x, draw in programs}
    assert len(by_operand) == len(Operand)
    for program, x, draw in by_operand.values():
        torch._dynamo.reset()
        by_kernel = program(x, draw)[0].values
        with operators.tensor_code():
            eager = program(x, draw)[0].values
            compiled = torch.compile(lambda t, program=program, draw=draw: program(t, draw)[0].values)(x)
        assert torch.equal(eager, compiled), program.spec
        assert torch.equal(eager, by_kernel), program.spec


@pytest.mark.compiler
def test_tensor_code_quantizes_one_bf16_tensor_along_both_axes():
    """Inductor fuses both with the exact x·0.5 before them, and cannot split their loops together."""
    x = torch.randn(48, 160, generator=torch.Generator().manual_seed(0)).bfloat16()
    results = []
    for backend in ("eager", "inductor"):
        torch.manual_seed(0)
        model = module_of(lambda self, x: self.linear(x * 0.5), linear=nn.Linear(160, 96)).bfloat16()
        with operators.tensor_code():
            y = fp4graph.apply(model, "nvfp4", backend=backend)(x)
            y.sum().backward()
        results.append((y, model.linear.weight.grad))
    assert_equal(*results)


@pytest.mark.compiler
def test_compiled_stages_of_one_operand_read_values_rounded_to_bf16():
    """The noise is added to Q(W) + Q(W - Q(W)) after that sum was rounded to bf16."""
    techniques = [
        {"macro_block_scaling": {"block": 128}},
        {"outlier_fallback": {"operands": ["fprop.weight"]}},
        {"adaptive_quantization_noise": {"sigma_start": 0.01, "sigma_end": 0.001, "stages": 2, "steps_per_stage": 1}},
    ]
    policy = {"version": 1, "name": "wrapped twice", "extends": "mxfp4-fprop", "techniques": techniques}
    x, outputs = X.bfloat16(), []
    for backend in ("eager", "inductor"):
        torch.manual_seed(0)
        outputs.append(applied(nn.Linear(64, 32, bias=False).bfloat16(), policy, backend=backend)(x))
    assert torch.equal(*outputs)


@pytest.mark.compiler
def test_compiled_wrappers_read_what_they_quantized_rounded_to_bf16():
    """Q(W) times γ is no bf16 number, and a wrapper reads it in fp32."""
    weight = frozenset({Operand.FPROP_WEIGHT})

    def around(self, quantize, x, context):
        return quantize(x).float() * 1.1

    registry = Registry([("more", Offers(technique("more", weight, mixes="block", around=around)))])
    more = one_rule("tensor_scaling", "more", quantize=NVFP4)
    policy, outputs = fp4graph.load_policy(more, registry=registry), []
    for backend in ("eager", "inductor"):
        torch.manual_seed(0)
        with operators.tensor_code():
            outputs.append(applied(nn.Linear(64, 32, bias=False).bfloat16(), policy, backend=backend)(X.bfloat16()))
    assert torch.equal(*outputs)


@pytest.mark.compiler
def test_a_compiled_backward_reads_operands_of_fprop_rounded_to_bf16():
    """Q(W·H)·Hᵀ is no bf16 number, and dgrad rotates it again, with random signs."""
    hadamard = {"hadamard": {"scope": "all", "block": 32, "kind": "random_backward"}}
    policy = one_rule(hadamard, operands={"dgrad.weight": {"source": "fprop"}})
    gradients = []
    for backend in ("eager", "inductor"):
        torch.manual_seed(0)
        x = X.bfloat16().requires_grad_()
        with operators.tensor_code():
            applied(nn.Linear(64, 32, bias=False).bfloat16(), policy, backend=backend, seed=1)(x).sum().backward()
        gradients.append(x.grad)
    assert torch.equal(*gradients)


@pytest.mark.compiler
def test_an_edited_technique_never_runs_the_old_code():
    """The two classes have equal options and different code: code compiled for the first may not serve the second."""

    def version(factor):
        weight = frozenset({Operand.FPROP_WEIGHT})
        scaled = technique("scaled", weight, mixes="none", after=lambda self, x, context: x * factor)
        return Registry([("scaled", Offers(scaled))], entry_point_group=None)

    x, outputs = torch.randn(8, 64), []
    for factor in (1.0, 2.0):
        torch._dynamo.reset()
        policy = fp4graph.load_policy(one_rule("scaled"), registry=version(factor))
        model = nn.Linear(64, 32, bias=False)
        nn.init.constant_(model.weight, 0.5)
        with torch.no_grad():
            outputs.append(applied(model, policy, backend="inductor")(x))
    assert torch.equal(outputs[1], 2 * outputs[0])
