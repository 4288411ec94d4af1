"""Ω: each technique once, however the policy spells it."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from fp4graph.policy import load_policy
from fp4graph.technique.registry import Registry

STOCHASTIC = {"rounding": "stochastic"}


@pytest.mark.parametrize(
    ("content", "complexity"),
    [
        ({"default": {}}, 0.0),
        ({"default": STOCHASTIC}, 0.5),
        ({"default": {"operands": {"dgrad.weight": STOCHASTIC}}}, 0.5),
        ({"default": {}, "techniques": ["dither"]}, 0.5),
        ({"default": STOCHASTIC, "techniques": ["dither"]}, 0.5),
        ({"rules": [{"match": {}, "quantize": STOCHASTIC}]}, 0.5),
        ({"rules": [{"match": {}, "quantize": {}, "techniques": ["dither"]}]}, 0.5),
        ({"default": STOCHASTIC, "rules": [{"match": {}, "quantize": STOCHASTIC, "techniques": ["dither"]}]}, 0.5),
        ({"default": {}, "techniques": ["average", "dither"]}, 2.0),
        ({"default": {}, "techniques": ["dither", "average"]}, 2.0),
        ({"default": STOCHASTIC, "techniques": ["average", "echo"]}, 3.0),
        ({"default": "keep", "techniques": ["average"]}, 1.5),
    ],
)
@pytest.mark.filterwarnings("ignore:.*has no effect here:fp4graph.PolicyWarning")
def test_complexity(content: dict[str, Any], complexity: float, registry: Registry) -> None:
    found = load_policy({"version": 1, **content}, registry).complexity
    assert found == complexity
    assert isinstance(found, float)


def test_the_largest_weight_counts_where_options_differ(registry: Registry) -> None:
    cheap, dear = [{"dither": {"bits": 8}}], [{"dither": {"bits": 24}}]
    assert load_policy({"version": 1, "default": {}, "techniques": cheap}, registry).complexity == 0.25
    for order in itertools.permutations([cheap, dear]):
        rules = [{"match": {}, "quantize": {}, "techniques": techniques} for techniques in order]
        assert load_policy({"version": 1, "rules": rules}, registry).complexity == 0.5


def test_names_in_use(registry: Registry) -> None:
    rule = {"match": {}, "quantize": STOCHASTIC, "techniques": ["echo"]}
    policy = load_policy({"version": 1, "rules": [rule], "techniques": ["average"]}, registry)
    assert {technique.name for technique in policy.used} == {"dither", "echo", "average"}
