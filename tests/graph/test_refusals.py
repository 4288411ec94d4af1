"""Which techniques the graph pass refuses at a linear layer, at experts, at a convolution and at a product of
activations.

``refusals.csv`` lists these refusals for each shipped policy, and for each technique by options and by blocks. ``python
-m tests.graph.test_refusals`` rewrites it.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import re
from pathlib import Path
from typing import Any, get_args

import pytest

import fp4graph
from fp4graph.commands.catalogue import shipped_registry
from fp4graph.errors import CaptureError, PolicyError
from fp4graph.graph.plan import plan_site
from fp4graph.policy import Policy
from fp4graph.technique import Operand, parts_of
from fp4graph.technique.facts import Mixes
from fp4graph.technique.site import SiteView
from tests.helpers.policies import one_rule, quantizer
from tests.helpers.techniques import technique

TABLE = Path(__file__).with_name("refusals.csv")
OPS = ("linear", "grouped", "conv", "matmul")
BLOCKS: tuple[Any, ...] = (16, "row", "tensor", [16, 16])
#: Scales to try; a technique gets the first that it accepts.
SCALES = (
    {"format": "e4m3", "rounding": "nearest_even"},
    {"format": "e8m0", "rounding": "ceil"},
    {"format": "e8m0", "rounding": "floor"},
    {"format": "e4m3", "convention": "encode", "rounding": "nearest_even"},
)
HADAMARD: dict[str, Any] = {"hadamard": {"block": 128}}
SPLIT: dict[str, Any] = {"out_control": {"mode": "split", "channels": 0.25}}
#: Techniques with the options that they need or that move them to other stages, and with the techniques that they need.
FURTHER: tuple[tuple[Any, ...], ...] = (
    ({"adaptive_quantization_noise": {"sigma_start": 0.1, "sigma_end": 0.01, "stages": 2, "steps_per_stage": 1}},),
    ({"hadamard": {"scope": ["fprop"], "block": 16}},),
    ({"hadamard": {"scope": "backward", "block": 16, "kind": "deterministic"}},),
    (HADAMARD, "ms_eden"),
    ("tensor_scaling", "learned_scale"),
    ({"out_control": {"mode": "measure"}},),
    (SPLIT,),
    *((SPLIT, each) for each in ("q_ema", "tensor_scaling", {"tensor_scaling": {"hold_steps": 5}}, "step_gradient")),
    *((SPLIT, each) for each in ("stochastic_rounding", {"hadamard": {"scope": "backward", "block": 16}}, "dampen")),
    *((SPLIT, each) for each in ("smooth_max", "four_over_six")),
    *(({"outlier_clamp": options},) for options in ({"operands": ["wgrad"]}, {"residual": False})),
    ({"outlier_fallback": {"operands": ["wgrad.input"]}},),
    *(({"outlier_fallback": options},) for options in ({"granularity": "row"}, {"threshold": 0.1})),
    ({"q_ema": {"start_after": 5}},),
    ({"q_ramping": {"t_update": 9, "t0": 4, "n_max": 3, "k1": 1.0}},),
    ("smooth_max", "scale_gradient"),
    *(({"smooth_max": {"kind": kind}},) for kind in ("softmax", "ste")),
    *(({"stochastic_rounding": {"range_guard": guard}},) for guard in (1.0625, 0.94)),
    ({"tensor_scaling": {"granularity": "all"}},),
    ({"tensor_scaling": {"granularity": "all", "hold_steps": 5}},),
    *(({"tensor_scaling": {"granularity": granularity}},) for granularity in ("row", 32)),
    ({"tensor_scaling": {"hold_steps": 5}},),
    ("tensor_scaling", "tensor_scaling_gradient"),
    ("tensor_scaling", {"tensor_scaling_gradient": {"kind": "ignore"}}),
    ("tensor_scaling", "macro_block_scaling"),
)


def with_techniques(techniques: tuple[Any, ...], block: Any) -> Policy | None:
    """Return a policy of one rule with these techniques, or None if they refuse such blocks under all SCALES."""
    for scale in SCALES:
        try:
            data = one_rule(quantize=quantizer(block) | {"scale": scale}, techniques=list(techniques))
            return fp4graph.load_policy(data)
        except PolicyError:
            continue
    return None


def refused(policy: Policy | None) -> str:
    """Name the ops that a rule of the policy refuses under some producer, in training or in evaluation."""
    if policy is None:
        return ""
    phases = (policy, *(phase.policy for phase in policy.phases))
    rules = dict.fromkeys(rule for phase in phases for rule in phase.rules if rule.quantizes)
    found: dict[str, None] = {}
    for op, rule, producer, training in itertools.product(OPS, rules, (None, "swiglu"), (True, False)):
        weight = 256 * 512 if op != "matmul" else None
        try:
            plan_site(SiteView("m", op, 512, 256, weight, producer=producer), rule, training=training)
        except CaptureError:
            found[op] = None
    return " ".join(found) or "nothing"


def table() -> list[list[str]]:
    """Return a row for each policy, then for each technique and options; a cell is empty at blocks that it refuses."""
    shipped = shipped_registry()
    every = (*((name,) for name in sorted(shipped.techniques)), *FURTHER)
    rows = [
        ["policy or techniques", "own blocks", *map(str, BLOCKS)],
        *([name, refused(fp4graph.load_policy(name)), *[""] * len(BLOCKS)] for name in sorted(shipped.policies)),
        *([json.dumps(each), "", *(refused(with_techniques(each, block)) for block in BLOCKS)] for each in every),
    ]
    return [row for row in rows if any(row[1:])]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fp4graph.errors.PolicyWarning")
def test_every_policy_and_technique_is_taken_or_refused_as_the_table_says() -> None:
    with TABLE.open(encoding="utf-8") as file:
        rows = list(csv.reader(file))
    assert rows == table()
    named = " ".join(name for name, *_ in rows)
    assert [name for name in shipped_registry().techniques if f'"{name}"' not in named] == []


@pytest.mark.parametrize("mixes", get_args(Mixes))
@pytest.mark.parametrize("block", [16, "tensor"])
def test_a_technique_that_mixes_experts_is_refused_at_experts(mixes: Mixes, block: Any) -> None:
    """The technique of the test replaces the rounding of elements."""
    cls = technique("halving", frozenset(Operand), mixes=mixes, round=lambda self, ratio, scale, context: ratio / 2)
    rule = dataclasses.replace(fp4graph.load_policy(one_rule(quantize=quantizer(block))).rules[0], techniques=(cls(),))
    messages = {"tensor": "does not tell the tokens and weights of experts apart (it declares mixes = 'tensor')"}
    if block == "tensor":
        scale = "halving cannot act on fprop.input of experts where a whole tensor has one scale"
        messages |= {"block": scale, "expert": scale}
    site = SiteView("m", "grouped", 512, 256, 256 * 512)
    if mixes in messages:
        with pytest.raises(CaptureError, match=re.escape(messages[mixes])):
            plan_site(site, rule)
    else:
        assert plan_site(site, rule).program is not None
    assert plan_site(dataclasses.replace(site, op="linear"), rule).program is not None


def test_the_period_of_a_part_follows_from_the_options_of_its_technique() -> None:
    made, site = shipped_registry().techniques, SiteView("m", "linear", 512, 256, 256 * 512)

    def period(name: str, **options: Any) -> int:
        (part,) = parts_of(made[name](**options), site)
        return part.period

    assert period("hadamard", block=16) == 16
    assert period("macro_block_scaling", block=64) == 64
    assert period("tensor_scaling", granularity=48) == 48
    assert period("tensor_scaling") == period("outlier_clamp") == 1


if __name__ == "__main__":
    with TABLE.open("w", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows(table())
