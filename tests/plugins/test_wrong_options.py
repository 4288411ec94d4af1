"""Options that each technique refuses by itself, and the words in which a policy's author learns of it."""

from __future__ import annotations

import math
from typing import Any

import pytest

import fp4graph

SCHEDULE = {"sigma_start": 0.05, "sigma_end": 5e-4, "stages": 10, "steps_per_stage": 100}
RAMPS = {"t_update": 15, "n_max": 12, "t0": 3}
NVFP4 = {"element": "e2m1", "block": 16, "scale": {"format": "e4m3"}}

WRONG: dict[str, list[tuple[dict[str, Any] | None, str]]] = {
    "adaptive_quantization_noise": [
        (None, "needs options sigma_start, sigma_end, stages and steps_per_stage; add them"),
        *(({k: v for k, v in SCHEDULE.items() if k != gone}, f"has no option '{gone}'; add it") for gone in SCHEDULE),
        ({**SCHEDULE, "sigma_start": 0}, "sigma_start must be above 0"),
        ({**SCHEDULE, "sigma_end": math.inf}, "sigma_end must be"),
        ({**SCHEDULE, "sigma_end": 0.06}, "sigma_end 0.06 is above sigma_start 0.05"),
        ({**SCHEDULE, "stages": 1}, "at least 2"),
        ({**SCHEDULE, "steps_per_stage": 0}, "at least 1"),
        ({**SCHEDULE, "kind": "multiplied"}, "did you mean 'multiplicative'"),
    ],
    "conditional_scaling": [
        ({}, r"write scale: \{convention: encode\} for fprop.input"),
        ({"operands": ["dgrad.input"]}, "unknown operand 'dgrad.input'"),
        ({"case": 2}, "unknown option 'case'"),
    ],
    "dampen": [
        ({"strength": 0}, "strength must be above 0"),
        ({"strength": math.inf}, "strength"),
        ({"total_steps": 0}, "total_steps must be at least 1"),
        ({"start": 1.0, "total_steps": 5}, "start must be below 1"),
        ({"start": 0.5}, "set total_steps"),
    ],
    "four_over_six": [
        ({"measure": "l2"}, "must be 'mse', 'mae' or 'amax'"),
        ({"operands": ["fprop.inputs"]}, "unknown operand 'fprop.inputs'"),
    ],
    "freeze": [
        ({"momentum": 0}, "momentum must be above 0"),
        ({"momentum": 1}, "momentum must be below 1"),
        ({"threshold": 0}, "threshold must be above 0"),
        ({"final_threshold": 0.1}, "set total_steps"),
        ({"start": 0.1}, "set total_steps"),
        ({"total_steps": 100}, "set final_threshold or start"),
    ],
    "hadamard": [
        ({"block": 24}, "power of two"),
        ({"block": 1}, "power of two"),
        ({"scope": []}, "scope is empty"),
        ({"scope": ["fprp"]}, "fprop"),
        ({"kind": "deterministic", "resample": "step"}, "draws no signs"),
        ({"kind": "signs"}, "deterministic"),
    ],
    "loss_scaling": [
        ({"init_scale": 0}, "init_scale must be above 0"),
        ({"init_scale": math.inf}, "init_scale"),
        ({"growth_factor": 1.0}, "growth_factor must be above 1"),
        ({"backoff_factor": 1.0}, "backoff_factor must be below 1"),
        ({"growth_interval": 0}, "growth_interval must be at least 1"),
    ],
    "low_rank_residual": [
        ({"rank": 0}, "at least 1"),
        ({"rank": 1.5}, "rank"),
        ({"iterations": -1}, "at least 0"),
        ({"operands": []}, "empty list of operands"),
        ({"operands": ["fprop.wieght"]}, "unknown operand 'fprop.wieght'"),
        ({"ranks": 4}, "unknown option 'ranks'"),
    ],
    "macro_block_scaling": [
        ({"block": 40}, "block 40 is not a multiple of the block of .*, 16 elements"),
        ({"block": 0}, "at least 1"),
        ({"mantissa_bits": 0}, "at least 1"),
        ({"mantissa_bits": 11}, "at most 10"),
        ({"operands": ["weihgts"]}, "unknown operand 'weihgts'"),
        ({"operands": []}, "empty list"),
    ],
    "outlier_clamp": [
        ({"quantile": 0.5}, "above 0.5"),
        ({"quantile": 1}, "below 1"),
        ({"quantile": math.nan}, "quantile"),
        ({"operands": []}, "empty list of operands"),
        ({"operands": ["fprop.imput"]}, "unknown operand 'fprop.imput'"),
        ({"residuals": True}, "unknown option 'residuals'"),
    ],
    "outlier_fallback": [
        ({"fraction": 0.1, "threshold": 0.1}, "two ways to choose blocks"),
        ({"fraction": 0}, "above 0"),
        ({"fraction": 1.5}, "at most 1"),
        ({"threshold": -1}, "at least 0"),
        ({"operands": []}, "empty list of operands"),
        ({"operands": ["fprop.imput"]}, "unknown operand 'fprop.imput'"),
        ({"fractoin": 0.1}, "unknown option 'fractoin'"),
    ],
    "q_ema": [({"beta": beta}, "beta") for beta in (0, 1, -0.1, 1.5)],
    "q_ramping": [
        ({}, "t_update"),
        ({"t_update": 30, "n_max": 3}, "0 steps from one detection to the next"),
        ({**RAMPS, "n_max": 13}, r"n_max 13.*12 steps.*never step"),
        ({**RAMPS, "k1": 0}, "k1"),
        ({**RAMPS, "n_max": 0}, "n_max"),
    ],
    "quest_scale": [
        ({"c": 0}, "c must be above 0"),
        ({"operands": ["wgrad.input"]}, "cannot act on 'wgrad.input'"),
    ],
    "smooth_max": [
        ({"kind": "absmax", "of": "original"}, "of belongs to kind: softmax or hybrid, and kind is absmax"),
        ({"kind": "hybrid", "relative": True, "of": "original"}, "leave out relative or of"),
        ({"beta": 0}, "must be above 0"),
        ({"kind": "softsoftmax"}, "did you mean 'softmax'"),
    ],
    "smooth_swiglu": [
        ({"power_of_two": "sometimes"}, "must be true or false"),
        ({"power": 2}, "unknown option 'power'"),
    ],
    "stable_spam": [
        ({"gamma1": 1}, "gamma1 must be below 1"),
        ({"gamma2": -0.1}, "gamma2 must be at least 0"),
        ({"theta": 1.5}, "theta must be below 1"),
        ({"eps": -1}, "eps must be at least 0"),
        ({"eta_min": 2}, "eta_min must be at most 1"),
        ({"total_steps": 0}, "total_steps must be at least 1"),
        ({"reset_interval": 0}, "reset_interval must be at least 1"),
    ],
    "step_gradient": [
        ({"operands": ["wgrad.input"]}, "cannot act on 'wgrad.input'; choose from"),
        ({"operands": ["fprop.wieght"]}, "unknown operand 'fprop.wieght'"),
        ({"kind": "dge", "k": 1}, "must be above 1"),
        ({"kind": "spline", "knots": [[0, 0], [0, 1]]}, "ascending"),
    ],
    "stochastic_rounding": [
        ({"operands": ["sideways"]}, "unknown operand 'sideways'"),
        ({"operands": []}, "empty list"),
        ({"operands": "forward"}, "backward"),
        ({"range_guard": 1}, "guards nothing"),
        ({"range_guard": 0}, "above 0"),
        ({"bits": 25}, "at most 24"),
    ],
    "tensor_scaling": [
        ({"granularity": 24}, "24 is not a multiple of the block of fprop.input, 16"),
        ({"granularity": 0}, "0 is not a multiple of the block"),
        ({"granularity": "row", "hold_steps": 5}, "use granularity: tensor"),
        ({"headroom": 0}, "above 0"),
        ({"headroom": 2}, "at most 1"),
        ({"hold_steps": 0}, "at least 1"),
        ({"operands": []}, "empty list of operands"),
        ({"operands": ["fprop.wieght"]}, "unknown operand"),
    ],
}


@pytest.mark.parametrize(
    ("technique", "options", "message"),
    [pytest.param(name, *case, id=f"{name}-{case[1]}") for name, cases in WRONG.items() for case in cases],
)
def test_a_wrong_option_is_named(technique: str, options: dict[str, Any] | None, message: str) -> None:
    rule = {"name": "linears", "match": {"op": "linear"}, "quantize": NVFP4}
    declared = technique if options is None else {technique: options}
    with pytest.raises(fp4graph.PolicyError, match=message):
        fp4graph.load_policy({"version": 1, "name": "p", "rules": [rule], "techniques": [declared]})
