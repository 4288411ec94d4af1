"""Every product of a model with experts is a site, is quantized and trains."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import fp4graph
from fp4graph.errors import CaptureError
from fp4graph.graph.functions import site_function
from fp4graph.model.runtime import runtime_of
from fp4graph.model.weight_quantizer import quantize
from tests.helpers import training
from tests.helpers.experts import EXPERTS, HIDDEN, WIDTH, Mixture, by_hand, tokens
from tests.helpers.models import COMPILES_GROUPED_FP32, grouped_mm, module_of
from tests.helpers.policies import NVFP4, TIES_UP, one_rule
from tests.helpers.training import assert_equal, uncompiled
from tests.helpers.training import prepared as prepared  # for tests of other folders

pytestmark = pytest.mark.slow

OPS = ["linear", "grouped"]
Model = partial(Mixture, "grouped", 3)
batch = partial(tokens, dropped=True)


def applied(policy, **options):
    return training.applied(Model(), policy, **options)


def train(model, optimizer, numbers):
    return training.train(model, optimizer, map(batch, numbers))


def test_each_product_is_a_site():
    explanation = fp4graph.explain(Model(), "nvfp4-te", batch())
    assert {(site.module, site.op) for site in explanation.sites if site.module.startswith("layers.1")} == {
        ("layers.1.proj", "linear"), ("layers.1.experts", "grouped"), ("layers.1.out", "linear")
    }  # fmt: skip
    experts = [site for site in explanation.sites if site.module == "layers.1.experts"]
    assert [site.shapes for site in experts] == [
        ((70, WIDTH), (EXPERTS, WIDTH, HIDDEN)), ((70, HIDDEN), (EXPERTS, HIDDEN, WIDTH))
    ]  # fmt: skip
    assert all(site.quantized and site.flops == 2 * 70 * WIDTH * HIDDEN for site in experts)
    kept = [site for site in explanation.sites if site.module == "layers.0.experts"]
    assert [site.reason for site in kept] == ["sensitive to quantization"] * 2


@pytest.mark.parametrize("ops", [["linear"], ["grouped"], []], ids=str)
def test_a_rule_selects_experts_or_linear_layers_by_op(ops):
    sites = fp4graph.explain(Model(), one_rule(match={"op": ops} if ops else {}), batch()).sites
    assert {site.op for site in sites if site.quantized} == set(ops or OPS)
    assert {site.op for site in sites} == set(OPS)


@pytest.mark.long
@pytest.mark.inductor
@pytest.mark.parametrize("form", ["grouped", "loop"])
@pytest.mark.parametrize("policy", ["nvfp4-te", "tetrajet-qema", "mxfp4-best"])
@uncompiled
def test_inductor_computes_what_eager_computes(policy, form):
    """Only the first forward is compared: training amplifies differences of an ulp in operations that are not
    quantized."""
    y, expected = (
        training.applied(Mixture(form, 3), policy, backend=backend)(*tokens()) for backend in ("inductor", "eager")
    )
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)


@uncompiled
@pytest.mark.parametrize("form", ["grouped", "loop"])
def test_experts_compute_what_linear_layers_compute(form):
    """The reference computes the model expert by expert, with the program of a linear layer."""
    model = training.applied(Mixture(form), one_rule("tensor_scaling", op=OPS, quantize=NVFP4))
    program = site_function(runtime_of(model).weights[0].plan.program, "linear", 1.0, 1.0)
    plain, (x, choice), (other, _) = Mixture(form), batch(), batch()
    expected = by_hand(plain, other, choice, lambda x, w, b: program(x, w, b, None, None, 0))
    y = model(x, choice)
    assert_equal([y], [expected])
    assert not torch.equal(y, Mixture(form)(x, choice))
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(1))
    y.backward(dy)
    expected.backward(dy)
    for (name, parameter), reference in zip(model.named_parameters(), plain.parameters(), strict=True):
        if form == "loop":
            assert_equal([parameter.grad], [reference.grad])
        else:  # gradients are sums of contributions, in another order
            torch.testing.assert_close(parameter.grad, reference.grad, rtol=1e-5, atol=1e-6, msg=name)
    torch.testing.assert_close(x.grad, other.grad, rtol=1e-5, atol=1e-6)
    assert not model.layers[1].experts.w1.grad[1].any()


@pytest.mark.parametrize("decay", [0.0, 0.5])
def test_the_average_of_an_idle_expert_follows_its_weight(decay):
    """Its gradient is 0. Without weight decay neither weight nor average moves; with decay, e ← β·e + (1 − β)·w."""
    model = applied(one_rule({"q_ema": {"beta": 0.9}}, op="grouped", quantize=TIES_UP))
    first = {name: p.detach().clone() for name, p in model.named_parameters()}
    average = dict(first)
    optimizer = prepared(model, weight_decay=decay)
    for step in range(4):
        train(model, optimizer, [step])
        for name, parameter in model.named_parameters():
            average[name] = 0.9 * average[name] + 0.1 * parameter.detach()
    for block, weight in itertools.product(range(3), ("w1", "w2")):
        name = f"layers.{block}.experts.{weight}"
        entry = model.get_buffer(f"layers.{block}.experts._fp4graph_{weight}_q_ema_weight")
        parameter = model.get_parameter(name)
        torch.testing.assert_close(entry, average[name], rtol=1e-6, atol=1e-7)
        assert not torch.equal(entry[0], parameter[0])
        assert torch.equal(parameter[1], first[name][1]) == (decay == 0)
        assert torch.equal(entry[1], parameter[1]) or decay


@uncompiled
@pytest.mark.parametrize("form", ["grouped", "loop"])
def test_the_optimizer_quantizes_each_expert_by_itself(form):
    """Each matrix has its own tensor scale, as in the graph or in the loop."""
    model = training.applied(Mixture(form), one_rule("tensor_scaling", "q_ema", op=OPS, quantize=NVFP4))
    with torch.no_grad():
        model.layers[0].experts.w1[2] *= 64  # shows whether all experts share a scale
    model(*batch())
    runtime = runtime_of(model)
    weights = [weight for weight in runtime.weights if weight.parameter.dim() == 3 and weight.is_used]
    assert {weight.name for weight in weights} == {
        f"layers.{i}.experts.{name}" for i in range(2) for name in ("w1", "w2")
    }
    for weight in weights:
        stored = weight.parameter.detach()
        program, expected = weight.plan.program.fprop.right, []
        for matrix in stored.mT if weight.stored_transposed else stored:
            (term,) = program(matrix, None, {"q_ema": {"weight": matrix.float()}})
            expected.append(term.product())
        quantized = quantize(weight, stored, runtime.step)
        assert_equal([quantized.mT if weight.stored_transposed else quantized], [torch.stack(expected)])


def test_a_parameter_of_three_axes_that_is_no_weight_is_left_alone():
    technique = {"dampen": {"strength": 1.0}}
    model, plain = (applied(one_rule(*each, op="grouped", quantize=TIES_UP)) for each in ([technique], []))
    for each in (model, plain):
        train(each, prepared(each, torch.optim.SGD, lr=0.1), [0])
    assert torch.equal(model.layers[2].experts.scale, plain.layers[2].experts.scale)
    assert not torch.equal(model.layers[2].experts.w1, plain.layers[2].experts.w1)


def direct(product=grouped_mm):
    w = nn.Parameter(torch.randn(EXPERTS, WIDTH, WIDTH, generator=torch.Generator().manual_seed(0)))
    return module_of(lambda self, x, ends: product(x, self.w, offs=ends), w=w)


def test_a_product_in_fp32_that_torch_does_not_compile_runs_uncompiled():
    """Torch 2.13 and 2.14 refuse F.grouped_mm in fp32 under torch.compile."""
    policy, ends = one_rule(op="grouped"), torch.tensor([10, 20, 48, 64], dtype=torch.int32)
    x = torch.randn(64, WIDTH)
    expected = training.applied(direct(), policy)(x, ends)
    refused = pytest.raises(CaptureError, match=r"torch 2\.1[34].* does not compile grouped_mm in fp32")
    strict = training.applied(direct(F.grouped_mm), policy, strict=True)
    with nullcontext() if COMPILES_GROUPED_FP32 else refused:
        assert torch.equal(strict(x, ends), expected)
    assert [site.quantized for site in fp4graph.explain(direct(F.grouped_mm), policy, (x, ends)).sites] == [True]
    model = training.applied(direct(F.grouped_mm), policy, example_inputs=(x, ends))
    warned = pytest.warns(fp4graph.PolicyWarning, match="runs uncompiled.*does not compile grouped_mm in fp32")
    with nullcontext() if COMPILES_GROUPED_FP32 else warned:
        y = model(x, ends)
    assert torch.equal(y, expected)
    assert torch.equal(model(x, ends), expected)  # without a second warning
    model.bfloat16()(x.bfloat16(), ends)  # the remedy that the warning names
    assert runtime_of(model).capture.captured("__call__")


@uncompiled
def test_a_product_of_fp32_copies_in_a_bf16_model_runs_uncompiled():
    model, kept = (direct(lambda x, w, offs: F.grouped_mm(x.float(), w.float(), offs=offs)).bfloat16() for _ in "ab")
    x, ends = torch.randn(64, WIDTH).bfloat16(), torch.tensor([10, 20, 48, 64], dtype=torch.int32)
    with training.operation_by_operation():
        expected = training.applied(kept, one_rule(op="grouped"))(x, ends)
    model = training.applied(model, one_rule(op="grouped"))
    for _ in range(2):
        assert torch.equal(model(x, ends), expected)


@uncompiled
@training.stances
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_autocast_leaves_a_grouped_product_as_it_is(stance, dtype):
    """As torch's, whose grouped product autocast does not cast."""
    model, ends = direct().to(dtype), torch.tensor([10, 20, 48, 64], dtype=torch.int32)
    x = torch.randn(64, WIDTH).to(dtype)
    with torch.autocast("cpu", torch.float16):
        assert model(x, ends).dtype is dtype
    model = training.applied(model, one_rule(op="grouped"))
    with torch.compiler.set_stance(stance):
        expected = model(x, ends)
        with torch.autocast("cpu", torch.float16):
            assert_equal([model(x, ends)], [expected])


@training.stances
@pytest.mark.parametrize("op", OPS)
def test_an_out_dtype_is_refused(stance, op):
    """Compiled, torch refuses it, as in the plain model."""
    model, ends = direct(partial(F.grouped_mm, out_dtype=torch.float32)).bfloat16(), torch.tensor([64] * EXPERTS)
    error, text = (CaptureError, "out_dtype; cast the result") if stance != "default" else (RuntimeError, "must match")
    with torch.compiler.set_stance(stance), pytest.raises(error, match=text):
        training.applied(model, one_rule(op=op))(torch.randn(64, WIDTH).bfloat16(), ends.int())


@pytest.mark.parametrize("ends", [[40, 20, 48, 64], [10, 20, 48, 65], [-1, 20, 48, 64]])
def test_offsets_that_decrease_or_leave_the_tokens_are_refused(ends):
    model = training.applied(direct(), one_rule(op="grouped"))
    with pytest.raises(ValueError, match="offsets of a grouped product must not decrease"):
        model(torch.randn(64, WIDTH), torch.tensor(ends, dtype=torch.int32))
