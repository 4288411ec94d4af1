"""A technique that does not fit its rule is an error at load, and a technique without effect a warning."""

from __future__ import annotations

from typing import Any

import pytest
from fp4graph_plugins import hadamard, q_ema

from fp4graph.errors import PolicyError, PolicyWarning
from fp4graph.policy import load_policy
from fp4graph.technique.registry import Registry
from tests.helpers.policies import one_rule, quantizer
from tests.helpers.techniques import Offers, technique

E4M3 = {"format": "e4m3", "rounding": "nearest_even"}
CEIL = {"format": "e8m0", "rounding": "ceil"}


def policy(*techniques: Any, scale: Any = E4M3, match: Any = None, operands: Any = None) -> dict[str, Any]:
    return one_rule(*techniques, quantize=quantizer(16) | {"scale": scale}, match=match, operands=operands)


REFUSED = [
    (policy({"smooth_max": {"kind": "absmax", "beta": 3.0}}), "beta belongs to kind: softmax or hybrid"),
    (
        policy("tensor_scaling", {"tensor_scaling_gradient": {"kind": "ste", "relative": True}}),
        "relative belongs to kind: softmax or hybrid, and kind is ste",
    ),
    (policy({"step_gradient": {"kind": "spline", "k": 3.0}}), "k belongs to kind: dge, and kind is spline"),
    (policy({"step_gradient": {"kind": "dge", "knots": [[0, 0], [6, 6]]}}), "knots belongs to kind: spline"),
    (policy({"step_gradient": {"kind": "dge", "lower": 5.0}}), "lower 5 is above upper 3"),
    (policy({"step_gradient": {"knots": [[1, 1], [6, 6]]}}), r"knots begin at \(0, 0\)"),
    (policy({"step_gradient": {"knots": [[0, 0], [3, 3]]}}), r"knots end at 3, and fprop\.input has values up to 6"),
    (policy({"step_gradient": {"kind": "sigmoid", "temperature": float("inf")}}), "finite"),
    (policy({"scale_gradient": {"k": 3.0}}, {"smooth_max": {}}), "k belongs to kind: dge"),
    (policy({"tensor_scaling": {"target": 1e6}}), r"target 1e\+06 is above the largest scale of .*, 448"),
    (policy({"tensor_scaling": {"headroom": 0.5}}, scale=CEIL), "range to spare"),
    (policy({"tensor_scaling": {"hold_steps": 5}}, match={"op": ["linear", "matmul"]}), "this product has no weight"),
    (policy({"tensor_scaling": {"hold_steps": 5}}, match={"block": True}), "this product has no weight"),
    (policy("mean_split", {"tensor_scaling": {"hold_steps": 5}}), "mean_split quantizes twice, and hold_steps"),
    (policy({"tensor_scaling": {"hold_steps": 5}}, "outlier_fallback"), "outlier_fallback quantizes twice"),
    (policy({"hadamard": {"scope": ["fprop"], "kind": "random_backward", "block": 16}}), "scope has neither"),
    (
        policy({"stochastic_rounding": {"operands": ["forward"], "range_guard": 1.0625}}, "smooth_max"),
        "range_guard on an operand of fprop cannot be combined with smooth_max",
    ),
    (
        policy({"outlier_fallback": {"operands": ["fprop.input", "dgrad.weight"]}}, operands={"dgrad.weight": "keep"}),
        r"no rule quantizes operand 'dgrad\.weight'",
    ),
]


@pytest.mark.parametrize(("data", "message"), REFUSED)
def test_a_technique_that_does_not_fit_is_refused(data: dict[str, Any], message: str) -> None:
    with pytest.raises(PolicyError, match=message):
        load_policy(data)


FP32 = {"format": "fp32"}


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (policy("stochastic_scale_rounding", scale=FP32), "not rounded"),
        (policy({"scale_gradient": {"range": "low"}}, "smooth_max", scale=CEIL), "formats with subnormals"),
        (policy("scale_gradient", "smooth_max", scale=FP32), "not rounded"),
        (policy({"step_gradient": {"kind": "clip"}}, scale=CEIL), "clip nothing"),
        (policy({"step_gradient": {"kind": "clip"}}, scale=FP32), "not rounded, and clip nothing"),
    ],
)
def test_a_technique_without_effect_is_warned_of(data: dict[str, Any], reason: str) -> None:
    with pytest.warns(PolicyWarning, match=f"no effect here: .*{reason}"):
        load_policy(data)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize(
    "data",
    [
        policy("smooth_swiglu"),  # acts if the input is the product of a SwiGLU
        policy("q_ema", match={"op": ["matmul", "linear"]}),
        policy({"outlier_fallback": {"operands": ["forward"]}}, operands={"fprop.input": "keep"}),
    ],
)
def test_a_technique_that_can_act_is_not_warned_of(data: dict[str, Any]) -> None:
    load_policy(data)


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    ("plugin", "message"),
    [("stranger", "'q_ema' is already offered by plugin"), ("q_ema", "plugin 'q_ema': another plugin has this name")],
)
def test_a_technique_of_two_plugins_is_refused_and_others_stay_usable(plugin: str, message: str, first: bool) -> None:
    shipped: list[tuple[str, Any]] = [("q_ema", q_ema), ("hadamard", hadamard)]
    impostor = (plugin, Offers(technique("q_ema")))
    plugins = [impostor, *shipped] if first else [*shipped, impostor]
    registry = Registry(plugins, entry_point_group=None)
    with pytest.raises(PolicyError, match=f"{message}.*; uninstall or rename"):
        load_policy(policy("q_ema"), registry)
    load_policy(policy({"hadamard": {"block": 16}}), registry)
