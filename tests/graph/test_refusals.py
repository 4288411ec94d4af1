"""Which techniques the graph pass refuses at a linear layer, at experts, at a convolution and at a product of
activations.

``refusals.csv`` has a row for each shipped policy and for each technique, by options and by blocks, with the refusals
from before techniques declared what they mix. ``python -m tests.graph.test_refusals`` rewrites it.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import json
import re
import sys
from collections.abc import Iterator
from functools import cache
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
    (SPLIT, "q_ema"),
    (SPLIT, "tensor_scaling"),
    (SPLIT, {"tensor_scaling": {"hold_steps": 5}}),
    (SPLIT, "step_gradient"),
    (SPLIT, "stochastic_rounding"),
    (SPLIT, {"hadamard": {"scope": "backward", "block": 16}}),
    (SPLIT, "dampen"),
    (SPLIT, "smooth_max"),
    (SPLIT, "four_over_six"),
    ({"outlier_clamp": {"operands": ["wgrad"]}},),
    ({"outlier_clamp": {"residual": False}},),
    ({"outlier_fallback": {"operands": ["wgrad.input"]}},),
    ({"outlier_fallback": {"granularity": "row"}},),
    ({"outlier_fallback": {"threshold": 0.1}},),
    ({"q_ema": {"start_after": 5}},),
    ("smooth_max", "scale_gradient"),
    ({"smooth_max": {"kind": "softmax"}},),
    ({"smooth_max": {"kind": "ste"}},),
    ({"stochastic_rounding": {"range_guard": 1.0625}},),
    ({"stochastic_rounding": {"range_guard": 0.94}},),
    ({"tensor_scaling": {"granularity": "all"}},),
    ({"tensor_scaling": {"granularity": "all", "hold_steps": 5}},),
    ({"tensor_scaling": {"granularity": "row"}},),
    ({"tensor_scaling": {"granularity": 32}},),
    ({"tensor_scaling": {"hold_steps": 5}},),
    ("tensor_scaling", "tensor_scaling_gradient"),
    ("tensor_scaling", {"tensor_scaling_gradient": {"kind": "ignore"}}),
    ("tensor_scaling", "macro_block_scaling"),
)


def policies() -> Iterator[tuple[str, Policy]]:
    """Every shipped policy, then one for each technique, options and blocks, by the name of its row."""
    for name in sorted(shipped_registry().policies):
        yield name, fp4graph.load_policy(name)
    for techniques in (*((name,) for name in sorted(shipped_registry().techniques)), *FURTHER):
        for block in BLOCKS:
            if (policy := with_techniques(techniques, block)) is not None:
                yield f"{json.dumps(techniques)} block {block}", policy


def with_techniques(techniques: tuple[Any, ...], block: Any) -> Policy | None:
    """A policy of one rule with these techniques, or None if they refuse such blocks whatever the scales."""
    for scale in SCALES:
        try:
            data = one_rule(quantize=quantizer(block) | {"scale": scale}, techniques=list(techniques))
            return fp4graph.load_policy(data)
        except PolicyError:
            continue
    return None


def refusal(policy: Policy, op: str) -> str | None:
    """The error of a site of this kind under the first rule that refuses it, whatever makes its input, in training or
    not; None if every rule that quantizes takes it."""
    phases = (policy, *(phase.policy for phase in policy.phases))
    rules = dict.fromkeys(rule for phase in phases for rule in phase.rules if rule.quantizes)
    weight = 256 * 512 if op != "matmul" else None
    for rule, producer, training in itertools.product(rules, (None, "swiglu"), (True, False)):
        try:
            plan_site(SiteView("m", op, 512, 256, weight, producer=producer), rule, training=training)
        except CaptureError as error:
            return str(error)
    return None


@cache
def refusals() -> dict[str, list[str | None]]:
    """The refusal of every row, for each kind of site."""
    return {name: [refusal(policy, op) for op in OPS] for name, policy in policies()}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::fp4graph.errors.PolicyWarning")
def test_every_policy_and_technique_is_taken_or_refused_as_the_table_says() -> None:
    with TABLE.open(encoding="utf-8") as file:
        _, *recorded = csv.reader(file)
    assert recorded == table_rows()


@pytest.mark.parametrize("mixes", get_args(Mixes))
@pytest.mark.parametrize("block", [16, "tensor"])
def test_what_a_technique_mixes_decides_about_experts(mixes: Mixes, block: Any) -> None:
    """The technique rounds elements by itself."""
    cls = technique("halving", frozenset(Operand), mixes=mixes, round=lambda self, ratio, scale, context: ratio / 2)
    rule = dataclasses.replace(fp4graph.load_policy(one_rule(quantize=quantizer(block))).rules[0], techniques=(cls(),))
    messages = {"tensor": "does not tell the tokens and weights of experts apart (its mixes is 'tensor')"}
    if block == "tensor":
        sees = "halving cannot act on fprop.input of experts where one scale is that of a tensor"
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


def table_rows() -> list[list[str]]:
    return [[name, *("refused" if each else "accepted" for each in messages)] for name, messages in refusals().items()]


if __name__ == "__main__":
    with TABLE.open("w", encoding="utf-8") as file:
        csv.writer(file, lineterminator="\n").writerows([["policy", *OPS], *table_rows()])
    sentences = dict.fromkeys(each for messages in refusals().values() for each in messages if each)
    sys.stdout.write("\n".join(sentences) + "\n")
