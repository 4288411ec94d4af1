"""Properties that several techniques share. The file of each technique tests its equations and its other properties."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
import yaml
from torch import nn

import fp4graph
from fp4graph.numerics.draw import Draw
from fp4graph.ops.product import total
from fp4graph.policy import Policy
from fp4graph.technique.operands import Operand
from fp4graph.technique.registry import default_registry
from tests.helpers.catalogue import OPTIONS, TRAINING, policy_of
from tests.helpers.floats import assert_same_bits
from tests.helpers.models import Mlp
from tests.helpers.policies import MXFP4, NVFP4, TIES_UP, loaded, one_rule, quantizer
from tests.helpers.steps import assert_resumes, differences, push, through_file
from tests.helpers.training import applied, prepared, train
from tests.plugins.layer import ENCODE, FREEZE, KEY, ROTATED, SCHEDULE, SET, Layer, draw, gaussian, linear, pushes

pytestmark = pytest.mark.usefixtures("operation_by_operation")

TECHNIQUES = default_registry().techniques
MULTIPLICATIVE = SCHEDULE | {"kind": "multiplicative"}
E8M0 = quantizer(16, rounding="nearest_even")
FLOOR = quantizer(32, rounding="floor")
GRADIENTS = (Operand.DGRAD_GRAD_OUTPUT, Operand.WGRAD_GRAD_OUTPUT)


@pytest.mark.parametrize("name", [*OPTIONS, *TRAINING])
def test_an_unknown_option_is_refused(name: str) -> None:
    with pytest.raises(fp4graph.PolicyError, match=rf"unknown option 'colour' of .*\.{name};"):
        loaded(name, {"colour": 1}, quantize=NVFP4)


@pytest.mark.parametrize("operands", [[], ["fprop.wieght"]])
@pytest.mark.parametrize("name", [name for name, cls in TECHNIQUES.items() if "operands" in cls.model_fields])
def test_operands_that_do_not_exist_are_refused(name: str, operands: list[str]) -> None:
    message = "unknown operand 'fprop.wieght'" if operands else "empty list"
    with pytest.raises(fp4graph.PolicyError, match=message):
        loaded(name, {"operands": operands}, quantize=NVFP4)


@pytest.mark.filterwarnings("ignore:.*has no effect:fp4graph.errors.PolicyWarning")
@pytest.mark.parametrize("name", OPTIONS)
def test_every_technique_is_explained(name: str) -> None:
    """``explain`` makes the initial state of weights without their values."""
    policy = policy_of(name, quantize=FLOOR if name == "quest_scale" else NVFP4)
    explanation = fp4graph.explain(Mlp(64, 48, 64), policy, (torch.randn(32, 64),))
    assert [site.quantized for site in explanation.sites] == [True, True], explanation.problem


@pytest.mark.parametrize(
    ("name", "options", "rest", "omega"),
    [
        ("adaptive_quantization_noise", SCHEDULE, {}, 0.5),
        # An operand that a technique could not act on may be left out, or kept.
        ("conditional_scaling", {"operands": ["forward"]},
         {"quantize": ENCODE, "operands": {"backward": {"scale": {"convention": "decode"}}}}, 0.5),
        *(("element_choice", options | {"selector": "amax"}, {"quantize": SET | {"selector": "amax"}}, 0.5)
          for options in ({}, {"others": ["e3m0"]})),  # the technique may repeat the selector of the list
        ("four_over_six", {"operands": ["forward"]},
         {"quantize": NVFP4, "operands": {"gradients": {"element": "e4m3"}}}, 0.5),
        *(("freeze", FREEZE, {"quantize": TIES_UP, "operands": {"forward": {"element": element}}}, 3.0)
          for element in ("e2m1", "e3m0", "int4")),
        ("freeze", FREEZE, {"quantize": TIES_UP, "more": [{"hadamard": {"scope": "backward"}}]}, 4.0),
        *(("hadamard", {"block": size}, {"quantize": quantizer(block)}, 1.0)  # one divides the other
          for size, block in ((8, 24), (64, 16), (4, "row"))),
        ("hadamard", {"scope": ["wgrad"]},  # no rotation of 16 fits blocks of 24, but fprop and dgrad have none
         {"quantize": quantizer(24), "operands": {"wgrad": {"block": 32}}}, 1.0),
        ("low_rank_residual", {"operands": ["weights"], "rank": 4}, {}, 3.0),
        ("low_rank_residual", {"operands": ["fprop.input"]}, {"after": ["q_ema"]}, 5.0),
        ("macro_block_scaling", {"block": 64, "operands": ["forward"]},
         {"quantize": E8M0, "operands": {"gradients": {"block": "tensor"}}}, 0.25),
        ("macro_block_scaling", {"block": 64}, {"quantize": E8M0, "operands": {"gradients": "keep"}}, 0.25),
        ("outlier_clamp", {"operands": ["fprop.input", "gradients"], "quantile": 0.97, "residual": False}, {}, 0.5),
        ("outlier_clamp", {}, {}, 2.0),
        ("outlier_fallback", {"operands": ["fprop.input", "gradients"], "threshold": 0.01}, {}, 1.5),
        ("scale_gradient", {}, {"more": [{"smooth_max": {"kind": "hybrid"}}]}, 4.5),
        ("smooth_swiglu", {}, {}, 0.5),
        ("step_gradient", {"kind": "dge"}, {}, 2.0),
        ("tensor_scaling_gradient", {"kind": "ste"}, {"more": ["tensor_scaling"], "quantize": NVFP4}, 3.5),
    ],
)  # fmt: skip
def test_a_policy_loads_with_its_complexity_and_round_trips(name: str, options: Any, rest: Any, omega: float) -> None:
    made = layer(name, **rest)
    assert made.program(options)
    policy = made.policy(options)
    assert policy.complexity == omega
    written = yaml.safe_load(policy.to_yaml())
    declared = [{name: options} if options else name]
    assert written["rules"][0]["techniques"] == [*rest.get("more", ()), *declared, *rest.get("after", ())]
    assert fp4graph.load_policy(written) == policy


# ---------------------------------------------------------------------- quantizers


def layer(name: str, **rest: Any) -> Layer:
    def policy(options: Any = None, **more: Any) -> Policy:
        return loaded(name, options, **{"quantize": MXFP4, **rest, **more})

    return Layer(policy, 96, 64, producer="swiglu")


@pytest.mark.parametrize(
    ("name", "options", "quantize"),
    [
        ("adaptive_quantization_noise", SCHEDULE, MXFP4),
        ("conditional_scaling", None, ENCODE),
        ("element_choice", None, NVFP4),
        ("four_over_six", None, NVFP4),
        *(("low_rank_residual", {"quantize_components": each}, MXFP4) for each in (False, True)),
        ("macro_block_scaling", {"block": 64}, E8M0),
        *(("outlier_clamp", {"residual": each}, MXFP4) for each in (False, True)),
        ("outlier_fallback", {"fraction": 0.3}, MXFP4),
        ("tensor_scaling", None, NVFP4),
    ],
)
def test_the_gradient_is_straight_through(name: str, options: Any, quantize: Any) -> None:
    """Under an exact backward dX is dY·W and dW is dYᵀ·X, of operands that are not quantized."""
    x, w, dy = gaussian(40, 96), gaussian(64, 96, seed=1), gaussian(40, 64, seed=2)
    y, dx, dw = layer(name, quantize=quantize, operands={"backward": "keep"}).products(x, w, dy, options)
    assert not torch.equal(y, x @ w.mT)
    assert torch.equal(dx, dy @ w)
    assert torch.equal(dw, dy.mT @ x)


@pytest.mark.parametrize(
    ("name", "options", "quantize", "changed"),
    [
        ("conditional_scaling", {}, ENCODE, {*Operand}),
        ("conditional_scaling", {"operands": ["gradients"]}, ENCODE, {*GRADIENTS}),
        ("four_over_six", {"operands": ["weights"]}, NVFP4, {Operand.FPROP_WEIGHT, Operand.DGRAD_WEIGHT}),
        ("low_rank_residual", {}, MXFP4, {Operand.FPROP_WEIGHT}),
        ("low_rank_residual", {"operands": ["inputs"]}, MXFP4, {Operand.FPROP_INPUT, Operand.WGRAD_INPUT}),
        ("macro_block_scaling", {"block": 64}, E8M0, {*Operand}),
        ("macro_block_scaling", {"block": 64, "operands": ["backward"]}, E8M0, {*list(Operand)[2:]}),
        ("outlier_clamp", {}, MXFP4, {Operand.FPROP_INPUT}),
        ("outlier_clamp", {"operands": ["gradients"]}, MXFP4, {*GRADIENTS}),
        ("outlier_fallback", {}, MXFP4, {Operand.FPROP_INPUT, Operand.FPROP_WEIGHT}),
        ("outlier_fallback", {"operands": ["gradients"]}, MXFP4, {*GRADIENTS}),
        ("tensor_scaling", {}, NVFP4, {*Operand}),
        ("tensor_scaling", {"operands": ["gradients"]}, NVFP4, {*GRADIENTS}),
    ],
)
def test_only_the_chosen_operands_are_changed(name: str, options: Any, quantize: Any, changed: set[Operand]) -> None:
    specs = dict(fp4graph.load_policy(one_rule(quantize=quantize)).rules[0].specs)
    x, made = wide(64, 96), layer(name, quantize=quantize)
    for operand in Operand:
        terms = made.terms(x, options, operand)
        assert torch.equal(sum(terms), fp4graph.fake_quantize(x, specs[operand])) == (operand not in changed), operand


def wide(*shape: int, decades: float = 2, seed: int = 0) -> torch.Tensor:
    """Return rows whose sizes span ``decades`` powers of ten, with outliers of either sign."""
    x = gaussian(*shape, seed=seed)
    x.view(-1)[::97] *= 40
    x.view(-1)[::89] *= -25
    return x * torch.logspace(0, -decades, shape[0])[:, None]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("name", "options", "operand", "quantize"),
    [
        ("adaptive_quantization_noise", SCHEDULE, Operand.FPROP_WEIGHT, MXFP4),
        ("element_choice", None, Operand.FPROP_INPUT, NVFP4),
        ("four_over_six", None, Operand.FPROP_INPUT, NVFP4),
        ("macro_block_scaling", {"block": 64}, Operand.FPROP_INPUT, E8M0),
        ("outlier_fallback", {"fraction": 0.3}, Operand.FPROP_INPUT, MXFP4),
        ("quest_scale", None, Operand.FPROP_INPUT, FLOOR),
    ],
)
def test_in_16_bits_the_result_is_that_of_fp32_rounded(name, options, operand, quantize, dtype) -> None:
    x, made = wide(40, 96).to(dtype), layer(name, quantize=quantize)
    y = made.quantized(x, options, operand)
    assert y.dtype is dtype
    assert torch.equal(y, made.quantized(x.float(), options, operand).to(dtype))


ALL = slice(None)
OF_16, OF_32 = slice(32, 48), slice(32, 64)  # the columns of the block that holds column 40, in blocks of 16 and of 32


@pytest.mark.parametrize(
    ("name", "options", "rest", "lines", "columns"),
    [
        ("conditional_scaling", None, {"quantize": ENCODE}, ALL, ALL),
        ("element_choice", None, {"quantize": NVFP4}, 3, OF_16),
        ("four_over_six", None, {"quantize": NVFP4}, 3, OF_16),
        *(("low_rank_residual", {"quantize_components": each}, {"operand": Operand.FPROP_WEIGHT}, 3, OF_32)
          for each in (False, True)),
        ("macro_block_scaling", {"block": 64}, {"quantize": E8M0}, 3, OF_16),
        ("mean_split", None, {"quantize": NVFP4}, ALL, OF_16),  # the mean of a column reaches all lines
        ("mean_split", None, {"quantize": NVFP4, "more": ["tensor_scaling"]}, ALL, ALL),
        ("ms_eden", None, {"quantize": NVFP4, "more": [ROTATED], "operand": Operand.DGRAD_GRAD_OUTPUT}, ALL, ALL),
        *(("outlier_clamp", {"residual": each}, {}, 3, OF_32) for each in (False, True)),
        *(("outlier_fallback", options, {}, 3, OF_32)
          for options in ({"fraction": 1.0}, {"fraction": 0.2}, {"threshold": 0.001}, {"granularity": "row"})),
        ("quest_scale", None, {"quantize": FLOOR}, 3, OF_32),
        ("smooth_max", {"kind": "softmax"}, {}, 3, OF_32),
        *(("stochastic_rounding", {"range_guard": each}, {"quantize": FLOOR, "operand": Operand.DGRAD_GRAD_OUTPUT}, 3,
           OF_32) for each in (0.75, 1.0625)),
        ("stochastic_scale_rounding", None, {"quantize": NVFP4, "operand": Operand.DGRAD_GRAD_OUTPUT}, 3, OF_16),
        ("tensor_scaling", None, {"quantize": NVFP4}, ALL, ALL),
        ("tensor_scaling", {"granularity": "row"}, {"quantize": NVFP4}, 3, ALL),
        ("tensor_scaling", {"granularity": 32}, {"quantize": NVFP4}, 3, OF_32),
    ],
)  # fmt: skip
def test_nan_and_inf_poison_what_shares_their_scale_and_zeros_and_empty_tensors_stay(
    name: str, options: Any, rest: Any, lines: Any, columns: slice
) -> None:
    terms = partial(layer(name).terms, options=options, **rest)
    for bad in (math.nan, math.inf, -math.inf):
        x = wide(40, 256)
        x[3, 40] = bad
        poisoned = torch.zeros_like(x, dtype=torch.bool)
        poisoned[lines, columns] = True
        y = sum(terms(x))
        assert torch.equal(y.isnan(), poisoned)
        assert y[~poisoned].isfinite().all()
    for shape in ((4, 256), (0, 256), (256, 0), (0, 0)):
        assert all(torch.equal(term, torch.zeros(shape)) for term in terms(torch.zeros(shape)))


def bits(name: str, options: Any, *, long: bool = True, operand: Any = Operand.FPROP_INPUT, **rest: Any) -> Any:
    """Return a case of the test below."""
    words = [name, *(f"{key}={value}" for key, value in (options or {}).items() if key not in SCHEDULE)]
    marks = [pytest.mark.long] if long else []
    return pytest.param(lambda: layer(name, **rest).operand(options, operand), marks=marks, id=" ".join(words))


@pytest.mark.parametrize(
    "make",
    [
        bits("adaptive_quantization_noise", SCHEDULE, operand=Operand.FPROP_WEIGHT),
        bits("adaptive_quantization_noise", MULTIPLICATIVE, long=False, operand=Operand.FPROP_WEIGHT),
        bits("conditional_scaling", None, long=False, quantize=ENCODE),
        *(bits("element_choice", {}, more=["tensor_scaling"], quantize=SET | {"rounding": rounding})
          for rounding in ("nearest", "stochastic")),
        *(bits("four_over_six", {"measure": measure}, long=measure == "mse", quantize=NVFP4)
          for measure in ("mse", "amax")),
        bits("macro_block_scaling", {"block": 64}, long=False, quantize=E8M0),
        bits("mean_split", None, more=["tensor_scaling"], quantize=NVFP4),
        bits("ms_eden", None, operand=Operand.DGRAD_GRAD_OUTPUT, more=[ROTATED], quantize=NVFP4),
        *(bits("outlier_clamp", options) for options in ({"quantile": 0.9}, {"residual": False})),
        *(bits("outlier_fallback", choice | by_row, long=bool(by_row), quantize=MXFP4 | {"rounding": "stochastic"})
          for choice in ({"fraction": 0.3}, {"threshold": 0.002}) for by_row in ({}, {"granularity": "row"})),
        bits("quest_scale", None, quantize=FLOOR),
        *(bits("stochastic_rounding", guard, operand=Operand.DGRAD_GRAD_OUTPUT, quantize=FLOOR,
               more=["stochastic_scale_rounding"])
          for guard in ({"range_guard": 0.75, "bits": 8}, {"range_guard": 1.0625})),
        *(bits("tensor_scaling", options, quantize=NVFP4)
          for options in ({}, {"granularity": "row"}, {"granularity": 32})),
    ],
)  # fmt: skip
def test_inductor_computes_the_bits_of_eager(make: Any, inductor: Any) -> None:
    program = make()

    def f(x: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple(term.product() for term in program(x, Draw(KEY, step)))

    tensors = [wide(50, 128, decades=3), wide(40, 256, decades=7), wide(34, 128, decades=0, seed=1)]
    tensors[2][3, 5] = math.nan
    compiled = inductor(f, tensors[0], draw(3).step)
    for count, x in enumerate((*tensors, wide(33, 90), torch.zeros(40, 128))):
        for some, other in zip(f(x, draw(17 * count).step), compiled(x, draw(17 * count).step), strict=True):
            assert_same_bits(some, other)


@pytest.mark.parametrize(
    ("name", "options"),
    [("hadamard", {"block": 16}), *(("smooth_swiglu", {"power_of_two": each}) for each in (False, True))],
)
def test_inductor_transforms_a_pair_to_the_bits_of_eager(name: str, options: Any, inductor: Any) -> None:
    """The operands have few bits, so that sums are exact: the order in which a BLAS adds is unknown."""
    fprop = layer(name).program(options).fprop

    def f(x: torch.Tensor, w: torch.Tensor, step: torch.Tensor) -> tuple[torch.Tensor, ...]:
        rotation = fprop.rotate(x, w, Draw(KEY, step))
        return rotation.left, rotation.right, total(fprop.left(rotation.left)), total(fprop.right(rotation.right))

    x, w = ((wide(rows, 96, decades=1, seed=rows) * 16).round() / 16 for rows in (50, 64))
    x[:, 5] = 0
    compiled = inductor(f, x, w, draw().step)
    for tokens in (50, 17):
        arguments = x[:tokens], w, draw(tokens).step
        assert all(map(torch.equal, f(*arguments), compiled(*arguments)))


# ---------------------------------------------------------------------- the optimizer's step


ADAMW: dict[str, Any] = {"lr": 3e-3, "betas": (0.9, 0.95), "weight_decay": 0.1, "fused": True}
RAMPS = TRAINING["q_ramping"]
#: Options of techniques that act in the optimizer's step.
STEPS: dict[str, tuple[str, dict[str, Any]]] = {
    "dampen": ("dampen", {"strength": 0.3}),
    "dampen with a schedule": ("dampen", {"strength": 0.3, "total_steps": 20}),
    "freeze": ("freeze", FREEZE),
    "freeze with a schedule": ("freeze", FREEZE | {"final_threshold": 0.2, "total_steps": 40, "start": 0.25}),
    "q_ema": ("q_ema", {"beta": 0.9}),
    "q_ramping": ("q_ramping", RAMPS),
    "q_ramping with restore": ("q_ramping", RAMPS | {"restore": True}),
    "stable_spam": ("stable_spam", TRAINING["stable_spam"]),
}


def stepped(name: str, options: Any, model: nn.Module) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = applied(model, one_rule(quantize=TIES_UP, techniques=[{name: options}]))
    return model, prepared(model, **ADAMW)


class Sharing(nn.Module):
    """Uses one weight twice, in one module with two names, as ALBERT does, or ``tied``, in two modules."""

    def __init__(self, tied: bool) -> None:
        super().__init__()
        self.first = self.second = linear()
        if tied:
            self.second = nn.Linear(64, 6, bias=False)
            self.second.weight = self.first.weight

    weight = property(lambda self: self.first.weight)
    bias = property(lambda self: self.first.bias)


@pytest.mark.slow
@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("case", STEPS)
def test_a_weight_that_is_used_twice_is_acted_on_once(case: str, tied: bool) -> None:
    """The weight moves as that of a layer that is used once, which other tests compare with equations."""
    plain, optimizer = stepped(*STEPS[case], linear())
    shared, shared_optimizer = stepped(*STEPS[case], Sharing(tied))
    free = linear()
    without = torch.optim.AdamW(free.parameters(), **ADAMW)
    for model, which in ((plain, optimizer), (shared, shared_optimizer), (free, without)):
        push(which, (model.weight, model.bias), pushes(47))
    assert torch.equal(shared.weight, plain.weight)
    assert torch.equal(shared.bias, plain.bias)
    assert not differences(dict(optimizer.state[plain.weight]), dict(shared_optimizer.state[shared.weight]))
    if case == "q_ema":
        for user in (shared.first, shared.second):
            assert torch.equal(user._fp4graph_q_ema_weight, plain._fp4graph_q_ema_weight)
    else:
        assert not torch.equal(plain.weight, free.weight)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("case", "at"),  # q_ramping: in a detection, at its end, while gradients add up, in the second detection
    [(case, at) for case in STEPS for at in ((3, 8, 13, 23) if "q_ramping" in case else (23,))],
)
def test_steps_resume_to_the_bit(case: str, at: int, dtype: torch.dtype) -> None:
    assert_resumes(lambda: stepped(*STEPS[case], linear(dtype)), pushes(45, dtype), at)


# ---------------------------------------------------------------------- training


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*has no effect:fp4graph.errors.PolicyWarning")
@pytest.mark.parametrize(
    "name",
    [  # these two write state in the graph
        pytest.param(name, marks=pytest.mark.captured) if name in ("tensor_scaling", "out_control") else name
        for name in (*OPTIONS, *TRAINING)
    ],
)
def test_a_training_in_bf16_resumes_to_the_bit(name: str) -> None:
    """The model's state dict holds what the graph writes, the optimizer's what the step of the optimizer writes."""

    def made() -> tuple[nn.Module, torch.optim.Optimizer]:
        model = applied(Mlp(64, 96, 32).bfloat16(), policy_of(name, quantize=FLOOR if name == "quest_scale" else NVFP4))
        return model, prepared(model, fused=True)

    (model, optimizer), (resumed, resumed_optimizer) = made(), made()
    batches = [(gaussian(40, 64, seed=step).bfloat16(),) for step in range(5)]
    train(model, optimizer, batches[:2])
    weights, state = through_file((model.state_dict(), optimizer.state_dict()))
    resumed.load_state_dict(weights)
    resumed_optimizer.load_state_dict(state)
    results, again = (train(*each, batches[2:]) for each in ((model, optimizer), (resumed, resumed_optimizer)))
    assert results[0].dtype is torch.bfloat16
    assert all(result.isfinite().all() for result in results)
    assert not differences(results, again)
    assert not differences(optimizer.state_dict()["state"], resumed_optimizer.state_dict()["state"])
