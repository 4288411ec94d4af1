"""Every shipped technique with options under which it acts."""

from __future__ import annotations

from typing import Any

from fp4graph.technique.registry import default_registry
from tests.helpers.policies import NVFP4, Data, one_rule

#: Options of every technique of a rule, each at several values.
OPTIONS: dict[str, dict[str, list[Any]]] = {
    "stochastic_rounding": {
        "operands": ["backward", "all_activation", ["gradients"], ["forward", "wgrad"]],
        "bits": [24, 8],
        "range_guard": [None, 0.75, 1.0625],
    },
    "stochastic_scale_rounding": {"operands": [["forward", "backward"], ["gradients"]]},
    "hadamard": {
        "scope": ["all", "backward", ["wgrad"]],
        "block": [16, 4, 32],
        "kind": ["random", "deterministic"],
        "resample": ["step", "never"],
    },
    "tensor_scaling": {
        "granularity": ["tensor", "row", 32],
        "hold_steps": [1, 1, 3],
        "headroom": [1.0, 0.5],
        "target": [None, 256.0],
        "operands": [["forward", "backward"], ["backward"]],
    },
    "tensor_scaling_gradient": {"kind": ["ignore", "absmax", "softmax", "hybrid", "ste"], "relative": [False, True]},
    "smooth_max": {"kind": ["absmax", "softmax", "hybrid", "ste"], "relative": [False, True]},
    "quest_scale": {"c": [2.92247856, 4.0]},
    "step_gradient": {"kind": ["spline", "dge", "sigmoid", "clip", "ste"], "operands": [["forward"], ["fprop.weight"]]},
    "scale_gradient": {"kind": ["spline", "dge", "ste"], "range": ["all", "low"]},
    "q_ema": {"beta": [0.998, 0.9]},
    "learned_scale": {"init": ["mse", "amax"], "lr_factor": [10.0]},
    "dampen": {"strength": [1e-2], "total_steps": [None, 10]},
    "freeze": {"momentum": [0.5], "threshold": [0.1]},
    "smooth_swiglu": {"power_of_two": [False, True]},
    "macro_block_scaling": {"block": [32, 64], "mantissa_bits": [1, 3]},
    "outlier_fallback": {"fraction": [0.1, 0.5], "operands": [["forward"], ["backward"]]},
    "adaptive_quantization_noise": {
        "sigma_start": [1e-2],
        "sigma_end": [1e-3],
        "stages": [2, 5],
        "steps_per_stage": [1],
        "kind": ["additive", "multiplicative"],
    },
    "outlier_clamp": {"quantile": [0.99, 0.9], "residual": [True, False]},
    "low_rank_residual": {"rank": [1, 4], "quantize_components": [False, True]},
    "element_choice": {"others": [["int4"], ["int4", "e3m0"]], "selector": ["mse", "mae", "amax"]},
    "four_over_six": {"measure": ["mse", "mae", "amax"]},
    "conditional_scaling": {},
    "ms_eden": {"block": [16, 32], "fill": [0.988125, 1.0]},
    "mean_split": {},
    "out_control": {"mode": ["measure", "wait"], "channels": [0.1, 0.5]},  # "split" reads what "measure" has stored
    "osci_reset": {"every": [4], "track": [1, 2], "threshold": [8.0, 2.0]},
}
#: Options of the techniques that a policy names outside of its rules.
TRAINING: dict[str, dict[str, Any]] = {
    "loss_scaling": {"growth_interval": 2},
    "q_ramping": {"t_update": 20, "t0": 8, "n_max": 4, "k1": 2.0, "k2": 1},
    "stable_spam": {"gamma1": 0.6, "gamma2": 0.8, "theta": 0.97, "total_steps": 31, "reset_interval": 3},
}


def policy_of(*names: str, quantize: Data = NVFP4) -> Data:
    """Return a policy of one rule with the techniques ``names`` and those that they require, at their first options."""
    classes = default_registry().techniques
    every = [*dict.fromkeys([*names, *(other for name in names for other in sorted(classes[name].requires))])]
    scale = quantize["scale"] | ({"convention": "encode"} if "conditional_scaling" in names else {})
    first = {name: {o: v[0] for o, v in OPTIONS[name].items() if o != "relative"} for name in every if name in OPTIONS}
    declared = [{name: first.get(name) or TRAINING.get(name, {})} for name in every]
    of_rule, of_policy = ([each for each in declared if ({*each} <= OPTIONS.keys()) is kept] for kept in (True, False))
    return one_rule(*of_rule, quantize=quantize | {"scale": scale}, techniques=of_policy)
