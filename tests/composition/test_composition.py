"""Techniques compose wherever the loader accepts them together: random policies of all techniques, and every pair."""

from __future__ import annotations

import itertools
import warnings
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, assume, event, given, settings
from hypothesis import strategies as st
from torch.fx.experimental.proxy_tensor import make_fx

from fp4graph.errors import PolicyError, PolicyWarning
from fp4graph.graph.functions import site_function
from fp4graph.numerics import noise
from fp4graph.numerics.draw import Draw
from fp4graph.ops.product import total
from fp4graph.policy import Policy, load_policy
from fp4graph.technique.operands import Operand
from fp4graph.technique.registry import default_registry
from tests.helpers.catalogue import OPTIONS, TRAINING, policy_of
from tests.helpers.models import SwiGlu
from tests.helpers.policies import NVFP4, one_rule
from tests.helpers.sites import program_of
from tests.helpers.steps import descend
from tests.helpers.training import applied, prepared, train

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("operation_by_operation")]

SCALES = st.one_of(
    st.fixed_dictionaries(
        {
            "format": st.sampled_from(["e8m0", "e4m3", "ue5m3", "e8m3", "fp32"]),
            "rounding": st.sampled_from(["nearest_even", "toward_positive"]),
            "zero": st.sampled_from(["nearest_subnormal", "to_one"]),
        }
    ),
    st.fixed_dictionaries({"format": st.just("e8m0"), "rounding": st.sampled_from(["floor", "ceil"])}),
    st.fixed_dictionaries(
        {
            "format": st.sampled_from(["e8m0", "e4m3"]),
            "rounding": st.just("nearest_even"),
            "convention": st.just("encode"),
        }
    ),
)


@st.composite
def technique(draw: st.DrawFn, name: str) -> dict[str, dict[str, Any]]:
    options = {option: draw(st.sampled_from(values)) for option, values in OPTIONS[name].items()}
    if "relative" in options and options["kind"] not in ("softmax", "hybrid"):
        del options["relative"]
    return {name: options}


@st.composite
def policies(draw: st.DrawFn) -> dict[str, Any]:
    names = draw(st.lists(st.sampled_from(sorted(OPTIONS)), min_size=1, max_size=4, unique=True))
    classes = default_registry().techniques
    for name in names:  # add the techniques that this one requires
        names += sorted(classes[name].requires - set(names))
    assume(not any(b in classes[a].conflicts for a, b in itertools.permutations(names, 2)))
    source = draw(st.sampled_from([{}, {"dgrad.weight": {"source": "fprop"}, "wgrad.input": "fprop"}]))
    quantize = {
        "element": draw(st.sampled_from(["e2m1", "e2m1", "e3m0", "int4"])),
        "block": draw(st.sampled_from([16, 32, [16, 16]])),
        "scale": draw(SCALES),
    }
    return one_rule(*[draw(technique(name)) for name in names], quantize=quantize, operands=source)


def quietly(data: dict[str, Any]) -> Policy:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", PolicyWarning)
        return load_policy(data)


def loaded(data: dict[str, Any]) -> Policy:
    """Return the policy; if the loader refuses the combination, reject the example."""
    try:
        policy = quietly(data)
    except PolicyError as error:
        event(f"refused: {error}")
        assume(False)
    assert quietly(yaml.safe_load(policy.to_yaml())) == policy
    event("ran with " + ", ".join(sorted(t.name for t in policy.rules[0].techniques)))
    return policy


def test_the_catalogue_is_complete() -> None:
    registry = default_registry()
    shipped = {name for name in registry.techniques if registry.origin(name) == name}
    assert shipped == OPTIONS.keys() | TRAINING.keys()
    for name, options in OPTIONS.items():
        assert options.keys() <= registry.techniques[name].model_fields.keys(), name


quick = settings(
    deadline=None,
    derandomize=True,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.filter_too_much, HealthCheck.function_scoped_fixture],
)


@pytest.mark.long
@settings(quick, max_examples=60)
@given(policies())
def test_any_combination_trains(data: dict[str, Any]) -> None:
    policy = loaded(data)
    torch._dynamo.reset()
    model = applied(SwiGlu(40, 72), policy)  # smooth_swiglu acts in it, and no block divides its sizes
    x = torch.randn(24, 40, generator=torch.Generator().manual_seed(0))
    before = [p.detach().clone() for p in model.parameters()]
    results = train(model, prepared(model, lr=1e-3), [(x,)] * 2, lambda x: model(x) - x)
    of_steps = 2 * (1 + len(before))  # an output, and a gradient for each parameter
    assert len(results) == of_steps + len(model.state_dict())
    assert all(result.isfinite().all() for result in results[:of_steps])
    assert any(not torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.long
@pytest.mark.inductor
@pytest.mark.compiler
@settings(quick, max_examples=5)
@given(policies())
def test_quantizers_are_bit_identical_compiled(data: dict[str, Any]) -> None:
    """One graph quantizes all six operands. Softmax statistics are left out: their exp and log change when compiled."""
    policy = loaded(data)
    kinds = {t.name: getattr(t, "kind", None) for t in policy.rules[0].techniques}
    assume("softmax" not in (kinds.get("smooth_max"), kinds.get("tensor_scaling_gradient")))
    program = program_of(policy, inputs=72, outputs=40, producer="swiglu")
    x = torch.randn(24, 72, generator=torch.Generator().manual_seed(0))
    weights = {
        slot.technique: {slot.entry.name: slot.entry.init(x)}
        for slot in program.state
        if slot.entry.operand is Operand.FPROP_WEIGHT
    }

    def quantize(x: torch.Tensor, key: torch.Tensor, step: torch.Tensor) -> list[torch.Tensor]:
        draw = Draw(key, step)
        return [
            total(program.operand(o)(x, draw.salted(i), weights if o is Operand.FPROP_WEIGHT else None))
            for i, o in enumerate(Operand)
        ]

    args = x, noise.make_key("site", "down"), noise.make_step(0, 0, 3)
    torch._dynamo.reset()
    graph = make_fx(quantize)(*args)  # one graph, as in a model; Dynamo alone would break it at techniques
    compiled = torch.compile(graph, fullgraph=True)(*args)
    for operand, a, b in zip(Operand, quantize(*args), compiled, strict=True):
        assert torch.equal(a, b), operand


def test_the_graph_and_the_optimizer_each_update_the_state_of_their_technique() -> None:
    techniques = [{"tensor_scaling": {"hold_steps": 2}}, "q_ema"]
    policy = one_rule(quantize=NVFP4, extends="ue5m3-d50", default="keep", techniques=techniques)
    model = applied(SwiGlu(40, 72), policy)
    optimizer = prepared(model, lr=1e-3)
    x, held = torch.randn(24, 40), []
    for _ in range(3):
        descend(lambda: model(x).square().mean(), optimizer, 1)
        held.append(model.up._fp4graph_tensor_scaling_gamma.item())
    assert held[0] == held[1] != held[2]
    assert not torch.equal(model.up._fp4graph_q_ema_weight, model.up.weight)


@pytest.mark.parametrize(
    "pair", list(itertools.combinations(sorted(OPTIONS), 2)), ids=lambda pair: f"{pair[0]}-{pair[1]}"
)
def test_every_pair_runs_or_is_refused(pair: tuple[str, str]) -> None:
    """Two techniques at their first options give a finite product and finite gradients, or a refusal that names one."""
    try:
        policy = quietly(policy_of(*pair))
    except PolicyError as error:
        policy, refusal = None, str(error)
    if policy is None:
        assert any(name in refusal for name in pair)
        return
    program = program_of(policy, inputs=40, outputs=24, producer="swiglu")
    x, w = torch.randn(20, 40).requires_grad_(), torch.randn(24, 40).requires_grad_()
    state = tuple(slot.entry.init(w.detach()) for slot in program.state)
    key, step = noise.make_key("site", "down"), noise.make_step(0, 0, 0)
    y = site_function(program, "linear", 1.0, 1.0)(x, w, None, key, step, 0, *state)
    y.square().sum().backward()
    for result in (y, x.grad, w.grad):
        assert result is not None
        assert result.isfinite().all()
