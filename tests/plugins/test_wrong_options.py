"""Options and rules that a technique refuses, or under which it has no effect, and the messages about them."""

from __future__ import annotations

import math
from typing import Any

import pytest

import fp4graph
from fp4graph.errors import CaptureError, PolicyError, PolicyWarning
from tests.helpers.catalogue import TRAINING
from tests.helpers.policies import MXFP4, NVFP4, TIES_UP, loaded, one_rule, quantizer
from tests.plugins.layer import ENCODE, FREEZE, ROTATED, SCHEDULE, SET

RAMPS = TRAINING["q_ramping"]
DRAWN = {"rounding": "stochastic"}

#: By technique: options (None for its name alone), and the message about them under a policy of one rule of NVFP4.
WRONG: dict[str, list[tuple[dict[str, Any] | None, str]]] = {
    "adaptive_quantization_noise": [
        (None, "needs options sigma_start, sigma_end, stages and steps_per_stage; add them"),
        *(({k: v for k, v in SCHEDULE.items() if k != gone}, f"has no option '{gone}'; add it") for gone in SCHEDULE),
        ({**SCHEDULE, "sigma_start": 0}, "sigma_start must be above 0"),
        ({**SCHEDULE, "sigma_end": math.inf}, "sigma_end must be"),
        ({**SCHEDULE, "sigma_end": 0.06}, "sigma_end 0.06 is above sigma_start 0.05"),
        ({**SCHEDULE, "stages": 1}, "at least 2"), ({**SCHEDULE, "steps_per_stage": 0}, "at least 1"),
        ({**SCHEDULE, "kind": "multiplied"}, "did you mean 'multiplicative'"),
    ],
    "conditional_scaling": [({}, r"write scale: \{convention: encode\} for fprop.input")],
    "dampen": [
        ({"strength": 0}, "strength must be above 0"), ({"strength": math.inf}, "strength"),
        ({"total_steps": 0}, "total_steps must be at least 1"),
        ({"start": 1.0, "total_steps": 5}, "start must be below 1"), ({"start": 0.5}, "set total_steps"),
    ],
    "four_over_six": [({"measure": "l2"}, "must be 'mse', 'mae' or 'amax'")],
    "freeze": [
        ({"momentum": 0}, "momentum must be above 0"), ({"momentum": 1}, "momentum must be below 1"),
        ({"threshold": 0}, "threshold must be above 0"), ({"final_threshold": 0.1}, "set total_steps"),
        ({"start": 0.1}, "set total_steps"), ({"total_steps": 100}, "set final_threshold or start"),
    ],
    "hadamard": [
        ({"block": 24}, "power of two"), ({"block": 1}, "power of two"), ({"scope": []}, "scope is empty"),
        ({"scope": ["fprp"]}, "fprop"), ({"kind": "deterministic", "resample": "step"}, "draws no signs"),
        ({"kind": "signs"}, "deterministic"),
    ],
    "loss_scaling": [
        ({"init_scale": 0}, "init_scale must be above 0"), ({"init_scale": math.inf}, "init_scale"),
        ({"growth_factor": 1.0}, "growth_factor must be above 1"),
        ({"backoff_factor": 1.0}, "backoff_factor must be below 1"),
        ({"growth_interval": 0}, "growth_interval must be at least 1"),
    ],
    "learned_scale": [({"lr_factor": math.inf}, "lr_factor must be a fin"), ({"eps": math.inf}, "eps must be a fin")],
    "low_rank_residual": [
        ({"rank": 0}, "at least 1"), ({"rank": 1.5}, "rank"), ({"iterations": -1}, "at least 0"),
        ({"rank": "3"}, r"low_rank_residual\.rank must be a whole number; got '3'"),
        ({"rank": True}, "rank must be a whole number; got true"),
    ],
    "macro_block_scaling": [
        ({"block": 40}, "block 40 is not a multiple of the block of .*, 16 elements"), ({"block": 0}, "at least 1"),
        ({"mantissa_bits": 0}, "at least 1"), ({"mantissa_bits": 11}, "at most 10"),
    ],
    "mean_split": [({"operands": ["weights"]}, "cannot act on 'weights'")],
    "osci_reset": [
        ({"every": 51}, r"every must be at least 52 .*, not 51; lower track"),
        ({"threshold": 1}, "threshold must be above 1"), ({"start": -1}, "start must be at least 0"),
        ({"threshold": math.inf}, "threshold must be a finite"),
    ],
    "out_control": [
        ({}, "needs option|has no option 'mode'"), ({"mode": "rest"}, "must be 'wait', 'measure' or 'split'"),
        ({"mode": "split", "channels": 0}, "channels must be above 0"),
        ({"mode": "split", "channels": 1}, "channels must be below 1"),
        ({"mode": "split", "multiple": 0}, "multiple must be at least 1"),
        ({"mode": "split", "element": "e4m4"}, "no element format 'e4m4'; did you mean"),
        ({"mode": "split", "block": 0}, "block must be at least 1"),
    ],
    "outlier_clamp": [
        ({"quantile": 0.5}, "above 0.5"), ({"quantile": 1}, "below 1"), ({"quantile": math.nan}, "quantile"),
    ],
    "outlier_fallback": [
        ({"fraction": 0.1, "threshold": 0.1}, "two ways to choose blocks"), ({"fraction": 0}, "above 0"),
        ({"fraction": 1.5}, "at most 1"), ({"threshold": -1}, "at least 0"),
    ],
    "q_ema": [
        *(({"beta": beta}, "beta") for beta in (0, 1, -0.1, 1.5)), ({"start_after": 2**31}, "must be below"),
    ],
    "q_ramping": [
        ({}, "t_update"), ({"t_update": 30, "n_max": 3}, "0 steps between two detections"),
        ({**RAMPS, "n_max": 13}, r"n_max 13.*12 steps.*never step"), ({**RAMPS, "k1": 0}, "k1"),
        ({**RAMPS, "n_max": 0}, "n_max"), ({**RAMPS, "k1": math.inf}, "k1 must be a finite"),
    ],
    "scale_gradient": [({"lower": math.inf}, "lower must be a fin"), ({"upper": math.inf}, "upper must be a fin")],
    "quest_scale": [({"c": 0}, "c must be above 0"), ({"operands": ["wgrad.input"]}, "cannot act on 'wgrad.input'")],
    "smooth_max": [
        ({"kind": "absmax", "of": "original"}, "of belongs to kind: softmax or hybrid, and kind is absmax"),
        ({"kind": "hybrid", "relative": True, "of": "original"}, "leave out relative or of"),
        ({"beta": 0}, "must be above 0"), ({"kind": "softsoftmax"}, "did you mean 'softmax'"),
    ],
    "smooth_swiglu": [({"power_of_two": "sometimes"}, "must be true or false")],
    "stable_spam": [
        ({"gamma1": 1}, "gamma1 must be below 1"), ({"gamma2": -0.1}, "gamma2 must be at least 0"),
        ({"theta": 1.5}, "theta must be below 1"), ({"eps": -1}, "eps must be at least 0"),
        ({"eta_min": 2}, "eta_min must be at most 1"), ({"total_steps": 0}, "total_steps must be at least 1"),
        ({"reset_interval": 0}, "reset_interval must be at least 1"),
    ],
    "step_gradient": [
        ({"operands": ["wgrad.input"]}, "cannot act on 'wgrad.input'; choose from"),
        ({"lower": math.inf}, "lower must be a finite"), ({"upper": math.inf}, "upper must be a finite"),
        ({"kind": "dge", "k": 1}, "must be above 1"), ({"kind": "spline", "knots": [[0, 0], [0, 1]]}, "ascending"),
    ],
    "stochastic_rounding": [
        ({"operands": "forward"}, "backward"), ({"range_guard": 1}, "changes nothing"),
        ({"range_guard": 0}, "above 0"), ({"bits": 25}, "at most 24"),
    ],
    "tensor_scaling": [
        ({"granularity": 24}, "24 is not a multiple of the block of fprop.input, 16"),
        *(({"granularity": size}, "granularity must be") for size in (0, -16)),
        ({"granularity": "row", "hold_steps": 5}, "use granularity: tensor"), ({"headroom": 0}, "above 0"),
        ({"headroom": 2}, "at most 1"), ({"hold_steps": 0}, "at least 1"),
        ({"hold_steps": 2**31}, "hold_steps must be below"),
        ({"granularity": "row", "share": "siblings"}, "with share use granularity: tensor$"),
        ({"gradient_target": 512}, "target 512 is above the largest scale of dgrad.grad_output, 448"),
        ({"gradient_target": 448, "operands": ["forward"]},
         "gradient_target is for gradients, which operands does not list"),
        ({"input_granularity": "row", "operands": ["weights"]},
         "input_granularity is for inputs, which operands does not list"),
        ({"input_granularity": "row", "hold_steps": 5},
         "with hold_steps use granularity: tensor, no input_granularity"),
        ({"groups": [["wq", "wk"]]}, "groups adds families of siblings; give share: siblings too"),
    ],
    "tensor_scaling_gradient": [({"kind": "absmax"}, "requires 'tensor_scaling'")],
}  # fmt: skip


@pytest.mark.parametrize(
    ("technique", "options", "message"),
    [pytest.param(name, *case, id=f"{name}-{case[1]}") for name, cases in WRONG.items() for case in cases],
)
def test_a_wrong_option_is_named(technique: str, options: dict[str, Any] | None, message: str) -> None:
    declared = technique if options is None else {technique: options}
    with pytest.raises(PolicyError, match=message):
        fp4graph.load_policy(one_rule(quantize=NVFP4, techniques=[declared]))


def scaled(**options: Any) -> dict[str, Any]:
    """Return the rest of a rule with the tensor scale that learned_scale requires."""
    return {"more": [{"tensor_scaling": {"operands": ["fprop.weight"], **options}}], "quantize": NVFP4}


LEARNED = scaled() | {"operands": {"fprop.input": "keep", "backward": "keep", "dgrad.weight": "fprop"}}
SCALES_DRAWN = [{"stochastic_scale_rounding": {"operands": ["forward"]}}]
WEIGHT_DRAWN = {"quantize": TIES_UP, "operands": {"fprop.weight": DRAWN}}
FORWARD_DRAWN = {"quantize": TIES_UP, "more": [{"stochastic_rounding": {"operands": ["forward"]}}]}
#: By technique: options, the rest of a rule as arguments of ``with_technique``, and the message.
UNFIT: dict[str, list[tuple[dict[str, Any], dict[str, Any], str]]] = {
    "conditional_scaling": [
        *(({}, {"quantize": ENCODE, "more": [other]}, "cannot share a site")
          for other in ("tensor_scaling", {"macro_block_scaling": {"block": 64}}, "smooth_max")),
    ],
    "dampen": [({}, rest, "noise of mean zero") for rest in (WEIGHT_DRAWN, FORWARD_DRAWN)],
    "element_choice": [
        ({"others": ["int5"]}, {"quantize": SET}, "no element format 'int5'"),
        *(({"others": others, "selector": "amax"}, {"quantize": SET}, "its selector is amax, but the quantize block of "
           r"fprop\.input lists elements and has selector mse") for others in (["int4"], ["e3m0"])),
    ],
    "four_over_six": [
        ({}, {"quantize": NVFP4 | {"element": "int4"}}, "values 4 and 6 of e2m1, and .* is int4"),
        ({}, {"quantize": NVFP4, "operands": {"gradients": {"element": "e3m0"}}}, "is e3m0"),
        ({}, {"quantize": NVFP4, "more": ["stochastic_scale_rounding"]}, "rounded stochastically"),
        ({}, {"quantize": NVFP4, "more": ["smooth_max"]}, "cannot share a site"),
        ({}, {"quantize": SET}, r"between the values 4 and 6 of e2m1, and fprop\.input is e2m1\|int4"),
    ],
    "freeze": [
        (FREEZE, WEIGHT_DRAWN, "rounds stochastically"),
        (FREEZE, FORWARD_DRAWN, "rounds stochastically"),
        (FREEZE, {"quantize": NVFP4, "more": SCALES_DRAWN}, "rounds stochastically"),
        (FREEZE, {"quantize": TIES_UP, "more": ["hadamard"]}, "are not elements of the weight"),
        (FREEZE, {"quantize": TIES_UP, "more": ["smooth_swiglu"]}, "smooth_swiglu transforms the operands of fprop"),
        (FREEZE, {"quantize": TIES_UP, "after": [{"q_ramping": {"t_update": 100, "n_max": 5}}]}, "q_ramping"),
        (FREEZE, {"quantize": TIES_UP, "operands": {"fprop.weight": {"element": "e2m3"}}},
         "use an element of 4 bits"),
        ({}, {"quantize": SET}, r"'freeze': the blocks of fprop\.weight choose between e2m1 and int4"),
    ],
    "hadamard": [
        ({"block": 32}, {"quantize": quantizer(24)}, r"Hadamard block 32 and the block of fprop\.input, 24 elements"),
    ],
    "learned_scale": [
        ({}, LEARNED | {"quantize": MXFP4}, "fprop.weight is not NVFP4"),
        ({}, LEARNED | {"quantize": NVFP4 | {"ties": "up"}}, "fprop.weight is not NVFP4"),
        ({}, LEARNED | {"after": ["q_ema"]}, "q_ema changes fprop.weight too"),
        ({}, scaled() | {"after": [{"hadamard": {"block": 16}}]}, "hadamard changes fprop.weight too"),
        ({}, LEARNED | scaled(granularity="row"), "granularity: tensor"),
        ({}, LEARNED | scaled(target=256), "target of 448"), ({}, LEARNED | scaled(headroom=0.5), "headroom: 1"),
        ({}, scaled(operands=["inputs"]), "tensor_scaling needs fprop.weight"),
        ({}, LEARNED | {"more": []}, "tensor_scaling"),
    ],
    "loss_scaling": [({}, {"quantize": TIES_UP}, "move it to the policy's techniques")],
    "low_rank_residual": [({}, {"after": ["q_ema"]}, r"q_ema rounds fprop\.weight by the weight's moving average")],
    "macro_block_scaling": [
        ({"block": 64}, {"quantize": quantizer(block, rounding="nearest_even")}, message)
        for block, message in (
            ("row", "one scale per row"),
            ("tensor", "one scale per tensor"),
            ([16, 48], "not a multiple of the block of .*, 48 elements"),
        )
    ] + [
        ({"block": 64}, {"more": [{"tensor_scaling": {"granularity": 64}}]}, "already gives macro blocks a factor"),
        ({"block": 64}, {"after": ["tensor_scaling"]}, "declare tensor_scaling first"),
        ({"block": 64, "operands": ["inputs"]},
         {"more": [{"tensor_scaling": {"granularity": 64, "operands": ["forward"]}}]}, "already gives macro blocks"),
    ],
    "ms_eden": [
        (options, {"more": [ROTATED], "quantize": NVFP4} | rest, message)
        for options, rest, message in (
            ({"block": 64}, {}, "hadamard has block 128, not 64"),
            ({}, {"more": [{"hadamard": {"scope": "all", "block": 128, "kind": "deterministic"}}]},
             "a kind that draws signs"),
            ({}, {"more": [{"hadamard": {**ROTATED["hadamard"], "resample": "never"}}]},
             "leave out hadamard's option resample"),
            ({}, {"more": [{"hadamard": {"scope": ["wgrad"], "block": 128}}]}, "dgrad.* is not rotated"),
            ({}, {"more": []}, "hadamard"),
            ({}, {"quantize": {**NVFP4, "block": [16, 16]}}, "not a multiple of the block of dgrad"),
            ({}, {"quantize": {**NVFP4, **DRAWN}}, "rounds stochastically already"),
            ({}, {"quantize": {**NVFP4, "scale": {"format": "e8m0"}}}, "e8m0 scales"),
            ({"target": 500}, {}, "above the largest scale"),
            ({}, {"after": ["tensor_scaling"]}, "take its operands out of tensor_scaling's"),
            ({"fill": 1.2}, {}, "fill"),
            ({"operands": ["forward"]}, {}, "cannot act on 'forward'"),
        )
    ],
    "osci_reset": [
        ({}, {"quantize": NVFP4 | DRAWN}, "every weight seems to oscillate"),
        ({}, {"more": [{"hadamard": {"scope": "all", "block": 16}}], "quantize": NVFP4},
         r"so that Q\(W\) moves though W does not; take fprop out of the scope of hadamard"),
        *(({}, {"more": [other], "quantize": NVFP4}, "cannot share a site")
          for other in ("q_ema", {"adaptive_quantization_noise": SCHEDULE})),
    ],
    "out_control": [
        ({"mode": "wait"}, {"op": "matmul"}, r"this product \(matmul\) has no weight.*op: linear"),
        ({"mode": "wait"}, {"more": ["hadamard"]}, "hadamard transforms the operands of fprop, so that its channels"),
        ({"mode": "wait"}, {"more": ["outlier_clamp"]}, "outlier_clamp takes outliers out of X"),
    ],
    "outlier_fallback": [
        ({"granularity": "row"}, {"quantize": quantizer(block)},
         r"blocks of one line compete; the block of fprop\.input is") for block in ("row", "tensor", [4, 32])
    ],
    "q_ema": [
        *(({}, rest, r"fprop\.weight already rounds stochastically") for rest in (WEIGHT_DRAWN, FORWARD_DRAWN)),
        ({}, {"quantize": SET}, r"'q_ema': it needs a single element format, and the blocks of fprop\.weight choose "
         "between e2m1 and int4"),
    ],
    "q_ramping": [
        (RAMPS, WEIGHT_DRAWN, "rounds stochastically"),
        (RAMPS, {"quantize": TIES_UP, "more": ["q_ema"]}, "'q_ramping' and 'q_ema' cannot share a site"),
    ],
    "quest_scale": [
        ({}, {"quantize": NVFP4}, "e4m3 scales by nearest_even. Write scale: {format: e8m0, rounding: floor}"),
        ({}, {}, "e8m0 scales by ceil"),
        ({}, {"quantize": quantizer("row", "e8m0", "floor")}, "has block row"),
        ({"operands": ["backward"]}, {"quantize": quantizer(32, "e8m0", "floor")}, "cannot act on 'backward'"),
        ({}, {"quantize": quantizer(32, "e8m0", "floor"), "more": ["smooth_max"]}, "cannot share a site"),
    ],
    "step_gradient": [({"kind": "dge"}, {"quantize": SET}, "'step_gradient': it needs a single element format")],
    "tensor_scaling": [
        ({"target": 1e-3}, {"quantize": ENCODE}, "target 0.001 makes the encode scale .* 1000, and e4m3 ends at 448"),
        ({"granularity": 32}, {"quantize": {**NVFP4, "block": "row"}}, "blocks of a row have no fixed length"),
        ({"hold_steps": 5}, {"quantize": NVFP4, "op": "matmul"}, "this product has no weight; use hold_steps: 1"),
        ({"hold_steps": 5}, {"quantize": NVFP4, "op": "grouped"}, "use granularity: all or hold_steps: 1"),
    ],
    "tensor_scaling_gradient": [
        ({"kind": "absmax"}, {"more": [{"tensor_scaling": {"hold_steps": 5}}], "quantize": NVFP4},
         "a held tensor scale has no gradient"),
    ],
}  # fmt: skip


@pytest.mark.parametrize(
    ("technique", "options", "rest", "message"),
    [pytest.param(name, *case, id=f"{name}-{case[2]}") for name, cases in UNFIT.items() for case in cases],
)
def test_a_rule_under_which_a_technique_cannot_act_is_refused(
    technique: str, options: dict[str, Any], rest: dict[str, Any], message: str
) -> None:
    with pytest.raises((PolicyError, CaptureError), match=message):
        loaded(technique, options, **rest)


KEPT = {"operands": {"fprop.weight": "keep"}}
NO_FORMAT = "'element_choice' has no effect here: option others lists no format beside {}, so that no block"


@pytest.mark.parametrize(
    ("technique", "options", "rest", "message"),
    [
        ("adaptive_quantization_noise", SCHEDULE, {"op": "matmul"}, "no effect"),
        *((*case, {"quantize": TIES_UP, **rest}, "no effect")
          for case in (("dampen", {}), ("freeze", FREEZE), ("q_ema", {})) for rest in ({"op": "matmul"}, KEPT)),
        ("element_choice", {"others": ["e2m1"]}, {"quantize": NVFP4}, NO_FORMAT.format("e2m1")),
        *(("element_choice", options, {"quantize": NVFP4 | {"element": "int4"}}, NO_FORMAT.format("int4"))
          for options in ({}, {"operands": ["gradients"]})),
        ("scale_gradient", {"kind": "dge"}, {}, "scale_gradient.*differentiated only beside smooth_max"),
        ("scale_gradient", {"kind": "ste"}, {}, "scale_gradient.*kind: ste is the derivative 1"),
        ("smooth_swiglu", {}, {"match": {"op": "linear", "producer": "gelu"}}, "has no effect here"),
        ("smooth_swiglu", {}, {"operands": {"forward": "keep"}}, "has no effect here"),
    ],
)  # fmt: skip
def test_a_rule_under_which_a_technique_has_no_effect_is_warned_about(
    technique: str, options: dict[str, Any], rest: dict[str, Any], message: str
) -> None:
    with pytest.warns(PolicyWarning, match=message):
        loaded(technique, options, **rest)
