"""Which techniques the graph pass refuses at a linear layer, at experts, at a convolution and at a product of
activations.

``refusals.csv`` says for each shipped policy, and for each technique by options and by blocks, which of these are
refused. ``python -m tests.graph.test_refusals`` rewrites it.
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
#: Further options by which a technique acts at other stages, alone or beside the techniques that it needs.
FURTHER: tuple[tuple[Any, ...], ...] = (
    ({"adaptive_quantization_noise": {"std": 0.1}},),
    ({"hadamard": {"scope": ["fprop"], "block": 16}},),
    ({"hadamard": {"scope": "backward", "block": 16, "kind": "deterministic"}},),
    (HADAMARD, "ms_eden"),
    ({"out_control": {"mode": "measure"}},),
    (SPLIT,),
    *((SPLIT, each) for each in ("q_ema", "tensor_scaling", {"tensor_scaling": {"hold_steps": 5}}, "step_gradient")),
    *((SPLIT, each) for each in ("stochastic_rounding", {"hadamard": {"scope": "backward", "block": 16}}, "dampen")),
    *((SPLIT, each) for each in ("smooth_max", "four_over_six")),
    *(({"outlier_clamp": options},) for options in ({"operands": ["wgrad"]}, {"residual": False})),
    ({"outlier_fallback": {"operands": ["wgrad.input"]}},),
    *(({"outlier_fallback": options},) for options in ({"granularity": "row"}, {"threshold": 0.1})),
    ({"q_ema": {"start_after": 5}},),
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
    """A policy of one rule with these techniques, or None if they refuse such blocks whatever the scales."""
    for scale in SCALES:
        try:
            data = one_rule(quantize=quantizer(block) | {"scale": scale}, techniques=list(techniques))
            return fp4graph.load_policy(data)
        except PolicyError:
            continue
    return None


def refused(policy: Policy | None) -> str:
    """Name the kinds of sites that a rule of the policy refuses, whatever makes their input, in training or not."""
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
        assert list(csv.reader(file)) == table()


@pytest.mark.parametrize("mixes", get_args(Mixes))
@pytest.mark.parametrize("block", [16, "tensor"])
def test_what_a_technique_mixes_decides_about_experts(mixes: Mixes, block: Any) -> None:
    """The technique rounds elements by itself."""
    cls = technique("halving", frozenset(Operand), mixes=mixes, round=lambda self, ratio, scale, context: ratio / 2)
    rule = dataclasses.replace(fp4graph.load_policy(one_rule(quantize=quantizer(block))).rules[0], techniques=(cls(),))
    messages = {"tensor": "does not tell the tokens and weights of experts apart (it declares mixes = 'tensor')"}
    if block == "tensor":
        sees = "halving cannot act on fprop.input of experts where a whole tensor has one scale"
        messages |= {"block": sees, "expert": sees}
    site = SiteView("m", "grouped", 512, 256, 256 * 512)
    if mixes in messages:
        with pytest.raises(CaptureError, match=re.escape(messages[mixes])):
            plan_site(site, rule)
    else:
        assert plan_site(site, rule).program is not None
    assert plan_site(dataclasses.replace(site, op="linear"), rule).program is not None


def test_the_elements_that_are_treated_together_follow_from_the_facts() -> None:
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
