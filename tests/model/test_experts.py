"""Models with experts: every product of theirs is a site, quantized, trained and resumed; what cannot be is refused."""

from __future__ import annotations

import copy
from contextlib import nullcontext

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4graph
from fp4graph.errors import CaptureError, PolicyError
from fp4graph.graph.functions import site_function
from fp4graph.model.runtime import runtime_of
from tests.helpers.models import COMPILES_GROUPED_FP32, grouped_mm
from tests.helpers.policies import NVFP4, TIES_UP, one_rule
from tests.model.test_uncompiled import assert_equal

pytestmark = pytest.mark.slow

EXPERTS, WIDTH, HIDDEN = 4, 32, 48
uncompiled = pytest.mark.filterwarnings("ignore:.*runs uncompiled:fp4graph.errors.PolicyWarning")


class Experts(nn.Module):
    """As torchtitan's: ``w1 [E, N, K]`` shown transposed, ``w2`` stored ``[E, K, N]``, rows sorted by expert.

    A quarter of the tokens is dropped, and the second expert never has any.
    """

    def __init__(self) -> None:
        super().__init__()
        self.w1 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 6)
        self.w2 = nn.Parameter(torch.randn(EXPERTS, HIDDEN, WIDTH) / 7)
        self.scale = nn.Parameter(torch.randn(3, 2, WIDTH))  # three axes, and multiplied with nothing

    def forward(self, x, choice):
        order = torch.argsort(choice, stable=True)
        sizes = (choice[:, None] == torch.arange(EXPERTS)).sum(0)
        ends = torch.cumsum(sizes, 0, dtype=torch.int32)
        # Rows that torch's own product leaves unwritten, both ways: masked behind each product and before it.
        dropped = (choice[order] == EXPERTS)[:, None]
        hidden = grouped_mm(x[order].masked_fill(dropped, 0), self.w1.transpose(-2, -1), offs=ends)
        hidden = F.silu(hidden.masked_fill(dropped, 0)) * self.scale.sum((0, 1)).mean()
        y = grouped_mm(hidden.masked_fill(dropped, 0), self.w2, offs=ends).masked_fill(dropped, 0)
        return torch.zeros_like(x).index_copy(0, order, y)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.proj, self.experts, self.out = nn.Linear(WIDTH, WIDTH), Experts(), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, choice):
        return x + self.out(self.experts(self.proj(x), choice))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x, choice):
        for layer in self.layers:
            x = layer(x, choice)
        return x


def batch(seed=0):
    generator = torch.Generator().manual_seed(seed)
    choice = torch.tensor([0, 2, 3, EXPERTS])[torch.randint(0, 4, (70,), generator=generator)]
    return torch.randn(70, WIDTH, generator=generator), choice


def applied(policy, **options):
    return fp4graph.apply(Model(), policy, **{"backend": "eager", **options})


def train(model, optimizer, steps, stance="default"):
    seen = []
    for step in steps:
        with torch.compiler.set_stance(stance):
            y = model(*batch(step))
        y.square().mean().backward()
        seen += [y.detach(), *(p.grad.clone() for p in model.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [value.clone() for value in model.state_dict().values()]


def prepared(model, learning_rate=1e-2, decay=0.1):
    adam = torch.optim.AdamW(model.parameters(), lr=learning_rate, weight_decay=decay)
    return fp4graph.prepare_optimizer(model, adam)


def test_each_product_is_a_site():
    explanation = fp4graph.explain(Model(), "nvfp4-te", batch())
    sites = {(site.module, site.op): site for site in explanation.sites if site.module.startswith("layers.1")}
    assert sites.keys() == {("layers.1.proj", "linear"), ("layers.1.experts", "grouped"), ("layers.1.out", "linear")}
    experts = [site for site in explanation.sites if site.module == "layers.1.experts"]
    assert [site.shapes for site in experts] == [
        ((70, WIDTH), (EXPERTS, WIDTH, HIDDEN)),
        ((70, HIDDEN), (EXPERTS, HIDDEN, WIDTH)),
    ]
    assert all(site.quantized and site.flops == 2 * 70 * WIDTH * HIDDEN for site in experts)
    kept = [site for site in explanation.sites if site.module == "layers.0.experts"]
    assert [site.reason for site in kept] == ["sensitive to quantization"] * 2


@pytest.mark.parametrize(
    ("match", "quantized"),
    [({"op": "linear"}, {"linear"}), ({"op": "grouped"}, {"grouped"}), ({}, {"linear", "grouped"})],
    ids=["linear", "grouped", "any"],
)
def test_rules_tell_experts_apart(match, quantized):
    sites = fp4graph.explain(Model(), one_rule(match=match), batch()).sites
    assert {site.op for site in sites if site.quantized} == quantized
    assert {site.op for site in sites} == {"linear", "grouped"}


def test_a_rule_for_experts_must_find_some():
    model = fp4graph.apply(nn.Sequential(nn.Linear(WIDTH, WIDTH)), one_rule(op="grouped"), backend="eager")
    with pytest.raises(PolicyError, match="rule 'all' matches no site"):
        model(batch()[0])


@pytest.mark.parametrize("backend", ["eager", pytest.param("inductor", marks=pytest.mark.long)])
@pytest.mark.parametrize("policy", ["nvfp4-te", "tetrajet-qema", "mxfp4-best"])
@uncompiled
def test_compiled_and_uncompiled_are_the_same(policy, backend):
    model, other = applied(policy, backend=backend), applied(policy)
    ours = train(model, prepared(model), range(3))
    theirs = train(other, prepared(other), range(3), stance="force_eager")
    if backend == "eager":
        assert_equal(ours, theirs)
    else:  # the first forward; after it an ulp of what is not ours grows
        torch.testing.assert_close(ours[0], theirs[0], rtol=1e-5, atol=1e-5)


def test_experts_are_those_of_ordinary_linears():
    """The second block of the model is computed by hand, expert by expert, with the program of a linear layer."""
    policy = one_rule("tensor_scaling", op=["linear", "grouped"], quantize=NVFP4)
    model, plain = applied(policy), Model()
    x, choice = batch()
    linear = site_function(runtime_of(model).weights[0].plan.program, "linear", 1.0, 1.0)
    for block in plain.layers:
        inner = linear(x, block.proj.weight, block.proj.bias, None, None, 0)
        y = torch.zeros_like(x)
        for expert in range(EXPERTS):
            mine = choice == expert
            if mine.any():
                hidden = F.silu(linear(inner[mine], block.experts.w1[expert], None, None, None, 0))
                hidden = hidden * block.experts.scale.sum((0, 1)).mean()
                y[mine] = linear(hidden, block.experts.w2[expert].T, None, None, None, 0)
        x = x + linear(y, block.out.weight, block.out.bias, None, None, 0)
    ours = model(*batch())
    assert_equal([ours], [x])
    dy = torch.randn(ours.shape, generator=torch.Generator().manual_seed(1))
    ours.backward(dy)
    x.backward(dy)
    for (name, mine), other in zip(model.named_parameters(), plain.parameters(), strict=True):
        # The gradient of an input is the sum of contributions, in another order.
        torch.testing.assert_close(mine.grad, other.grad, rtol=1e-5, atol=1e-6, msg=name)
    assert not model.layers[1].experts.w1.grad[1].any()


def test_the_average_of_an_idle_expert_follows_its_weight():
    """Its gradient is 0: without weight decay neither weight nor average moves; with it, e ← β·e + (1 − β)·w."""
    policy = one_rule({"q_ema": {"beta": 0.9}}, op="grouped", quantize=TIES_UP)
    for decay in (0.0, 0.5):
        model = applied(policy)
        first = {name: p.detach().clone() for name, p in model.named_parameters()}
        average = {name: p.clone() for name, p in first.items()}
        optimizer = prepared(model, 1e-2, decay)
        for step in range(4):
            train(model, optimizer, [step])
            for name, parameter in model.named_parameters():
                average[name] = 0.9 * average[name] + 0.1 * parameter.detach()
        for block in range(3):
            for weight in ("w1", "w2"):
                name = f"layers.{block}.experts.{weight}"
                entry = model.get_buffer(f"layers.{block}.experts._fp4graph_{weight}_q_ema_weight")
                parameter = model.get_parameter(name)
                torch.testing.assert_close(entry, average[name], rtol=1e-6, atol=1e-7)
                assert not torch.equal(entry[0], parameter[0])
                assert torch.equal(parameter[1], first[name][1]) == (decay == 0)
                if decay == 0:
                    assert torch.equal(entry[1], parameter[1])


OPTIMIZER_SIDE = {
    "q_ema": {"q_ema": {"beta": 0.9}},
    "q_ramping": {"q_ramping": {"t_update": 4, "t0": 2, "n_max": 2, "k1": 1.0}},
    "dampen": {"dampen": {"strength": 0.1}},
    "freeze": {"freeze": {"threshold": 0.01}},
}


def test_an_experts_weight_is_quantized_for_the_optimizer_as_in_the_graph():
    policy = one_rule("tensor_scaling", "q_ema", op=["linear", "grouped"], quantize=NVFP4)
    model = applied(policy)
    model(*batch())
    runtime = runtime_of(model)
    for weight in runtime.weights:
        if weight.parameter.dim() == 3 and weight.is_used:
            stored = weight.parameter.detach()
            each = stored.mT if weight.stored_transposed else stored
            program = weight.plan.program.fprop.right
            state = {"q_ema": {"weight": None}}
            expected = []
            for own in each:
                state["q_ema"]["weight"] = own.float()
                (term,) = program(own, None, state)
                expected.append(term.product())
            quantized = weight.quantize(stored, runtime.step)
            assert_equal([quantized.mT if weight.stored_transposed else quantized], [torch.stack(expected)])
    used = {weight.name for weight in runtime.weights if weight.parameter.dim() == 3 and weight.is_used}
    assert used == {f"layers.{block}.experts.{name}" for block in range(3) for name in ("w1", "w2")}


def test_a_parameter_of_three_axes_that_is_no_weight_is_left_alone():
    technique = {"dampen": {"strength": 1.0}}
    model, plain = (applied(one_rule(*each, op="grouped", quantize=TIES_UP)) for each in ([technique], []))
    for each in (model, plain):
        optimizer = fp4graph.prepare_optimizer(each, torch.optim.SGD(each.parameters(), lr=0.1))
        train(each, optimizer, [0])
    assert torch.equal(model.layers[2].experts.scale, plain.layers[2].experts.scale)
    assert not torch.equal(model.layers[2].experts.w1, plain.layers[2].experts.w1)


@pytest.mark.parametrize("technique", OPTIMIZER_SIDE)
def test_training_resumes_bit_for_bit(technique):
    policy = one_rule(OPTIMIZER_SIDE[technique], op=["linear", "grouped"], quantize=TIES_UP)
    straight = applied(policy)
    optimizer = prepared(straight)
    train(straight, optimizer, range(5))
    saved = copy.deepcopy((straight.state_dict(), optimizer.state_dict()))
    resumed = applied(policy)
    second = prepared(resumed)
    resumed.load_state_dict(saved[0])
    second.load_state_dict(saved[1])
    assert_equal(train(resumed, second, range(5, 8)), train(straight, optimizer, range(5, 8)))


class Grouped(nn.Module):
    def __init__(self, product=grouped_mm) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)))
        self.product = product

    def forward(self, x, ends):
        return self.product(x, self.w, offs=ends)


def test_a_product_in_fp32_that_torch_does_not_compile_runs_uncompiled():
    """Torch 2.13 and 2.14 refuse F.grouped_mm in fp32 under torch.compile."""
    policy, ends = one_rule(op="grouped"), torch.tensor([10, 20, 48, 64], dtype=torch.int32)
    x = torch.randn(64, WIDTH)
    expected = fp4graph.apply(Grouped(), policy, backend="eager")(x, ends)
    refused = pytest.raises(fp4graph.CaptureError, match=r"torch 2\.1[34].* does not compile grouped_mm in fp32")
    strict = fp4graph.apply(Grouped(F.grouped_mm), policy, backend="eager", strict=True)
    with nullcontext() if COMPILES_GROUPED_FP32 else refused:
        assert torch.equal(strict(x, ends), expected)
    assert [site.quantized for site in fp4graph.explain(Grouped(F.grouped_mm), policy, (x, ends)).sites] == [True]
    model = fp4graph.apply(Grouped(F.grouped_mm), policy, backend="eager", example_inputs=(x, ends))
    warned = pytest.warns(fp4graph.PolicyWarning, match="runs uncompiled.*does not compile grouped_mm in fp32")
    with nullcontext() if COMPILES_GROUPED_FP32 else warned:
        y = model(x, ends)
    assert torch.equal(y, expected)
    assert torch.equal(model(x, ends), expected)  # warned about once
    model.bfloat16()(x.bfloat16(), ends)  # the remedy that the warning names
    assert runtime_of(model).capture.captured("__call__")


def test_offsets_that_decrease_are_refused():
    model = fp4graph.apply(Grouped(), one_rule(op="grouped"), backend="eager")
    with pytest.raises(ValueError, match="offsets of a grouped product must not decrease"):
        model(torch.randn(64, WIDTH), torch.tensor([40, 20, 48, 64], dtype=torch.int32))


@pytest.mark.filterwarnings("ignore::fp4graph.errors.PolicyWarning")
def test_a_technique_that_would_mix_experts_is_refused():
    model = applied(one_rule("low_rank_residual", op=["linear", "grouped"]))
    with pytest.raises(CaptureError, match=r"layers\.0\.experts.*technique low_rank_residual does not tell"):
        model(*batch())
